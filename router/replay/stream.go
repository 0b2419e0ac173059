package replay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
)

// maxEventBytes bounds one line of a stream.
const maxEventBytes = 8 << 20

// event is what the client reads of a chat chunk.
type event struct {
	Choices []struct {
		Delta struct {
			Content   string          `json:"content"`
			Reasoning string          `json:"reasoning_content"`
			Tools     json.RawMessage `json:"tool_calls"`
		} `json:"delta"`
		Finish string `json:"finish_reason"`
	} `json:"choices"`
	Usage *usage          `json:"usage"`
	Error json.RawMessage `json:"error"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Details    *struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// readStream reads an answer to its end and times it from start. An answer
// without [DONE], with an in-band error or with a line that is no chunk is a
// failure, however much of it came.
func (t *Turn) readStream(ctx context.Context, body io.Reader, start time.Time) {
	r := bufio.NewReaderSize(body, 64<<10)
	var text strings.Builder
	defer func() { t.text = text.String() }()
	var line []byte
	for {
		var err error
		if line, err = readLine(r, line[:0]); err != nil {
			t.Failure = cutShort(ctx, err)
			return
		}
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue // blank lines, comments, other fields
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			t.E2E = time.Since(start)
			drain(r)
			return
		}
		var e event
		if err := json.Unmarshal(data, &e); err != nil {
			t.Failure = Failure{Kind: "stream", Message: "a chunk is not JSON: " + err.Error()}
			return
		}
		if len(e.Error) > 0 && string(e.Error) != "null" {
			t.Failure = Failure{Kind: "in-band", Message: errorMessage(data)}
			return
		}
		t.observe(&e, &text, start)
	}
}

// drain reads what may follow the last event, so that the server sees its answer
// taken whole and the connection serves the next turn.
func drain(r io.Reader) { _, _ = io.CopyN(io.Discard, r, maxEventBytes) }

// observe accounts for one chunk.
func (t *Turn) observe(e *event, text *strings.Builder, start time.Time) {
	for _, c := range e.Choices {
		if c.Finish != "" {
			t.Finish = c.Finish
		}
		if c.Delta.Content == "" && c.Delta.Reasoning == "" && (len(c.Delta.Tools) == 0 || string(c.Delta.Tools) == "null") {
			continue
		}
		if t.TTFT == 0 {
			t.TTFT = time.Since(start)
		}
		t.Chunks++
		text.WriteString(c.Delta.Content)
	}
	if e.Usage != nil {
		t.PromptTokens, t.CompletionTokens = e.Usage.Prompt, e.Usage.Completion
		if e.Usage.Details != nil {
			t.CachedTokens = e.Usage.Details.Cached
		}
	}
}

// readLine appends one line to dst, bounded.
func readLine(r *bufio.Reader, dst []byte) ([]byte, error) {
	for {
		part, err := r.ReadSlice('\n')
		if len(dst)+len(part) > maxEventBytes {
			return dst, errors.New("a line of the stream is longer than 8 MiB")
		}
		dst = append(dst, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return dst, err
		}
	}
}

func cutShort(ctx context.Context, err error) Failure {
	if errors.Is(err, io.EOF) {
		return Failure{Kind: "stream", Message: "the stream ended before [DONE]"}
	}
	f := failure(ctx, err)
	if f.Kind == "connection" {
		f.Kind = "stream"
	}
	return f
}

// fromHeader reads how the router served the turn.
func (t *Turn) fromHeader(h http.Header) {
	t.Mode = modeOf(h.Get(admission.HeaderMode))
	t.Worker = h.Get(admission.HeaderWorker)
	t.Reason = h.Get(admission.HeaderReason)
	t.Attempts, _ = strconv.Atoi(h.Get(admission.HeaderAttempts))
}
