package emulator

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
)

// whole answers r in one JSON body.
func (s *Server) whole(ctx context.Context, w http.ResponseWriter, r *request) {
	answers := make([]*answer, 0, len(r.seqs))
	for _, q := range r.seqs {
		a := &answer{seq: q}
		for !a.done {
			select {
			case <-q.out.ready:
				a.collect()
			case <-ctx.Done():
				cut()
			}
		}
		if a.finish.failed() {
			writeAbort(w, r.surface, a.finish)
			return
		}
		answers = append(answers, a)
	}
	var body []byte
	if r.surface == surfaceGenerate {
		body = wholeGenerate(r, answers)
	} else {
		body = s.wholeOpenAI(r, answers)
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body) // a client that is gone needs no answer
}

func wholeGenerate(r *request, answers []*answer) []byte {
	if !r.batch && len(answers) == 1 {
		return appendGenerate(nil, answers[0], 0, 0)
	}
	b := []byte{'['}
	for i, a := range answers {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendGenerate(b, a, 0, 0)
	}
	return append(b, ']')
}

func (s *Server) wholeOpenAI(r *request, answers []*answer) []byte {
	object := "text_completion"
	if r.surface == surfaceChat {
		object = "chat.completion"
	}
	b := append([]byte(nil), `{"id":`...)
	b = scan.AppendQuoted(b, r.rid)
	b = append(b, `,"object":"`...)
	b = append(append(b, object...), `","created":`...)
	b = strconv.AppendInt(b, time.Now().Unix(), 10)
	b = append(b, `,"model":`...)
	b = scan.AppendQuoted(b, r.model)
	b = append(b, `,"choices":[`...)
	var total usage
	for i, a := range answers {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendChoice(b, r, a)
		total.add(a, a.seq.sample == 0)
	}
	b = append(b, `],"usage":`...)
	b = total.append(b, s.cfg.EnableCacheReport)
	return append(b, `,"metadata":{"weight_version":"default"}}`...)
}

func appendChoice(b []byte, r *request, a *answer) []byte {
	b = append(b, `{"index":`...)
	b = strconv.AppendInt(b, int64(a.seq.index), 10)
	if r.surface == surfaceChat {
		b = append(b, `,"message":{"role":"assistant","content":`...)
		b = scan.AppendQuoted(b, string(a.text))
		b = append(b, `,"reasoning_content":null,"tool_calls":null}`...)
	} else {
		echo := ""
		if r.echo {
			echo = tokensText(a.seq.ids)
		}
		b = append(b, `,"text":`...)
		b = scan.AppendQuoted(b, echo+string(a.text))
	}
	b = append(b, `,"logprobs":null`...)
	b = appendReason(b, true, a.finish)
	return append(b, '}')
}
