package emulator

import (
	"context"
	"net/http"
	"reflect"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
)

// chunks writes the events of one streamed answer on one surface.
type chunks struct {
	s       *Server
	r       *request
	created int64
	buf     []byte
	total   usage
	began   map[int]bool // chat: the role chunk of this choice is out
}

// stream answers r as server-sent events. The status is 200 before the engine
// has said anything, so whatever goes wrong is an event (contract §2.5).
func (s *Server) stream(ctx context.Context, w http.ResponseWriter, r *request) {
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	_ = out.Flush()

	c := &chunks{s: s, r: r, created: time.Now().Unix(), began: map[int]bool{}}
	answers := make([]*answer, len(r.seqs))
	for i, q := range r.seqs {
		answers[i] = &answer{seq: q}
	}
	for open := len(answers); open > 0; {
		a := s.await(ctx, answers)
		if a == nil {
			cut()
		}
		if a.done {
			continue // a signal that came with the end already
		}
		a.collect()
		if !a.due(s.cfg.StreamInterval) {
			continue
		}
		c.buf = c.buf[:0]
		c.event(a)
		if a.done {
			open--
			c.total.add(a, a.seq.sample == 0)
		}
		if open == 0 {
			c.end()
		}
		if _, err := w.Write(c.buf); err != nil {
			return
		}
		if err := out.Flush(); err != nil {
			return
		}
		a.mark()
	}
}

// cut ends an answer without its end, so that nobody takes what was sent for a
// whole one: the client is gone, or this engine died.
func cut() { panic(http.ErrAbortHandler) }

// await returns an answer with news, or nil when the client is gone.
func (s *Server) await(ctx context.Context, answers []*answer) *answer {
	if len(answers) == 1 {
		select {
		case <-answers[0].seq.out.ready:
			return answers[0]
		case <-ctx.Done():
			return nil
		}
	}
	cases := make([]reflect.SelectCase, 0, len(answers)+1)
	cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(ctx.Done())})
	for _, a := range answers {
		cases = append(cases, reflect.SelectCase{Dir: reflect.SelectRecv, Chan: reflect.ValueOf(a.seq.out.ready)})
	}
	i, _, _ := reflect.Select(cases)
	if i == 0 {
		return nil
	}
	return answers[i-1]
}

func (c *chunks) event(a *answer) {
	switch c.r.surface {
	case surfaceGenerate:
		c.generate(a)
	case surfaceChat:
		c.chat(a)
	default:
		c.completion(a)
	}
}

func (c *chunks) generate(a *answer) {
	c.buf = append(c.buf, "data: "...)
	if c.s.cfg.IncrementalStream {
		c.buf = appendGenerate(c.buf, a, a.sent, a.idSent)
	} else {
		c.buf = appendGenerate(c.buf, a, 0, 0)
	}
	if len(c.r.seqs) > 1 {
		c.buf = append(c.buf[:len(c.buf)-1], `,"index":`...)
		c.buf = append(strconv.AppendInt(c.buf, int64(a.seq.index), 10), '}')
	}
	c.buf = append(c.buf, "\n\n"...)
}

// head opens a chat or completions chunk up to its choices.
func (c *chunks) head(object string) {
	c.buf = append(c.buf, `data: {"id":`...)
	c.buf = scan.AppendQuoted(c.buf, c.r.rid)
	c.buf = append(c.buf, `,"object":"`...)
	c.buf = append(c.buf, object...)
	c.buf = append(c.buf, `","created":`...)
	c.buf = strconv.AppendInt(c.buf, c.created, 10)
	c.buf = append(c.buf, `,"model":`...)
	c.buf = scan.AppendQuoted(c.buf, c.r.model)
	c.buf = append(c.buf, `,"choices":[`...)
}

// tail closes a chunk, with the usage so far when the client asked for it in
// every chunk.
func (c *chunks) tail(a *answer) {
	c.buf = append(c.buf, ']')
	if c.r.continuous {
		u := usage{prompt: a.seq.prompt, completion: len(a.ids), cached: a.cached}
		c.buf = append(c.buf, `,"usage":`...)
		c.buf = u.append(c.buf, c.s.cfg.EnableCacheReport)
	}
	c.buf = append(c.buf, "}\n\n"...)
}

func (c *chunks) choice(a *answer, delta func()) {
	c.head("chat.completion.chunk")
	c.buf = append(c.buf, `{"index":`...)
	c.buf = strconv.AppendInt(c.buf, int64(a.seq.index), 10)
	c.buf = append(c.buf, `,"delta":{"reasoning_content":null`...)
	delta()
	c.buf = append(c.buf, `},"logprobs":null`...)
}

func (c *chunks) chat(a *answer) {
	if a.done && a.finish.failed() {
		c.buf = appendStreamError(c.buf, a.finish)
		return
	}
	if !c.began[a.seq.index] {
		c.began[a.seq.index] = true
		c.choice(a, func() { c.buf = append(c.buf, `,"role":"assistant","content":""`...) })
		c.buf = appendReason(c.buf, false, finish{})
		c.buf = append(c.buf, '}')
		c.tail(a)
	}
	if text := a.fresh(); len(text) > 0 {
		c.choice(a, func() {
			c.buf = append(c.buf, `,"content":`...)
			c.buf = scan.AppendQuoted(c.buf, string(text))
		})
		c.buf = appendReason(c.buf, false, finish{})
		c.buf = append(c.buf, '}')
		c.tail(a)
	}
	if a.done {
		c.choice(a, func() {})
		c.buf = appendReason(c.buf, true, a.finish)
		c.buf = append(c.buf, '}')
		c.tail(a)
	}
}

func (c *chunks) completion(a *answer) {
	if a.done && a.finish.failed() {
		c.buf = appendStreamError(c.buf, a.finish)
		return
	}
	c.head("text_completion")
	c.buf = append(c.buf, `{"index":`...)
	c.buf = strconv.AppendInt(c.buf, int64(a.seq.index), 10)
	c.buf = append(c.buf, `,"text":`...)
	echo := ""
	if c.r.echo && a.idSent == 0 {
		echo = tokensText(a.seq.ids)
	}
	c.buf = scan.AppendQuoted(c.buf, echo+string(a.fresh()))
	c.buf = append(c.buf, `,"logprobs":null`...)
	c.buf = appendReason(c.buf, a.done, a.finish)
	c.buf = append(c.buf, '}')
	c.tail(a)
}

// end closes the stream.
func (c *chunks) end() {
	if c.r.usage && c.r.surface != surfaceGenerate {
		object := "text_completion"
		if c.r.surface == surfaceChat {
			object = "chat.completion.chunk"
		}
		c.head(object)
		c.buf = append(c.buf, `],"usage":`...)
		c.buf = c.total.append(c.buf, c.s.cfg.EnableCacheReport)
		c.buf = append(c.buf, "}\n\n"...)
	}
	c.buf = append(c.buf, "data: [DONE]\n\n"...)
}
