package sglang

import (
	"bytes"
	"net/http"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

// FinishAbort is the finish reason of a turn that the engine gave up. It comes
// with HTTP 200 and, unless a client asked for the abort, with an ErrorCode.
const FinishAbort = "abort"

// Observed is what accounting reads of an answer, streamed or not. Each field
// keeps its last reported value (R18).
type Observed struct {
	Usage     kvc.Usage
	HasUsage  bool
	Finish    string // last finish reason, "" = none seen
	Done      bool   // [DONE] seen as a whole data line
	ErrorCode int    // in-band error as an HTTP status, 0 = none
	Content   bool   // some generated content was seen
}

// Failed reports an answer that says of itself that it is none (R55).
func (o *Observed) Failed() bool { return o.ErrorCode != 0 || o.Finish == FinishAbort }

// ObserveEvent updates o from one SSE data payload of any surface; usageOnly
// reports the OpenAI usage chunk with empty choices (R16).
//
// Nearly all events are one more token. They cost a few byte searches: JSON is
// read only when a usage, a finish reason or an error is not null, and until the
// first content was seen. Inside a JSON string a quote is escaped, so generated
// text cannot look like a member.
func ObserveEvent(o *Observed, data []byte) (usageOnly bool) {
	if len(data) <= len(done)+2 && string(bytes.TrimSpace(data)) == done {
		o.Done = true
		return false
	}
	if o.Content && !present(data, finishMember) && !present(data, usageMember) && !present(data, errorMember) {
		return false
	}
	var b scan.Body
	if b.Reset(data, scan.Limits{}) != nil {
		return false
	}
	return o.object(&b)
}

// done is the payload that ends an OpenAI or SGLang stream.
const done = "[DONE]"

// Members that are null, or absent, in the events of ordinary tokens.
const (
	finishMember = `finish_reason"`
	usageMember  = `usage"`
	errorMember  = `error"`
)

// Ordinary reports that observing a run of whole events would add nothing to o:
// content was seen, and the run holds more of it, no usage, finish reason, error
// or end mark. It may be wrong in the direction of false. A relay asks it once
// for all the events of a read.
func (o *Observed) Ordinary(events []byte) bool {
	return o.Content && !bytes.Contains(events, []byte(done)) &&
		!present(events, finishMember) && !present(events, usageMember) && !present(events, errorMember)
}

// present reports that some member whose name ends so has a value other than
// null, or that a value does ("object":"error"). It may be wrong in the
// direction of true.
func present(data []byte, member string) bool {
	for {
		n := bytes.Index(data, []byte(member))
		if n < 0 {
			return false
		}
		data = trimSpace(data[n+len(member):])
		if len(data) == 0 || data[0] != ':' {
			return true
		}
		if data = trimSpace(data[1:]); len(data) > 0 && data[0] != 'n' {
			return true
		}
	}
}

// trimSpace cuts leading JSON white space.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\n' || b[0] == '\r' || b[0] == '\t') {
		b = b[1:]
	}
	return b
}

// ObserveBody updates o from a whole non-streamed JSON answer. A batch (an array
// of answers) adds up.
func ObserveBody(o *Observed, body []byte) {
	trimmed := bytes.TrimSpace(body)
	if len(trimmed) == 0 {
		return
	}
	if trimmed[0] == '[' {
		o.batch(trimmed)
		return
	}
	var b scan.Body
	if b.Reset(trimmed, scan.Limits{}) == nil {
		o.object(&b)
	}
}

// batch reads an array of answers; scan validates objects only, hence the wrap.
func (o *Observed) batch(array []byte) {
	wrapped := append(append([]byte(`{"batch":`), array...), '}')
	b, err := scan.Parse(wrapped, scan.Limits{})
	if err != nil {
		return
	}
	v, _ := b.Get("batch")
	var sum kvc.Usage
	for it := scan.Iterate(v.Raw); it.Next(); {
		o.Usage = kvc.Usage{}
		var one scan.Body
		if one.Reset(it.Value(), scan.Limits{}) == nil {
			o.object(&one)
		}
		sum.PromptTokens += o.Usage.PromptTokens
		sum.CachedTokens += o.Usage.CachedTokens
		sum.CompletionTokens += o.Usage.CompletionTokens
	}
	o.Usage = sum
}

// object reads an answer or an event of chat, completions or generate.
func (o *Observed) object(b *scan.Body) (usageOnly bool) {
	choices, hasChoices := b.Get("choices")
	some := false
	for it := scan.Iterate(choices.Raw); it.Next(); {
		some = true
		o.choice(it.Value())
	}
	if meta, ok := b.Get("meta_info"); ok {
		o.metaInfo(meta.Raw)
		text, _ := b.Get("text")
		ids, _ := b.Get("output_ids")
		o.Content = o.Content || filled(text.Raw) || filled(ids.Raw)
	}
	o.failure(b)
	usage, ok := b.Get("usage")
	if !ok || !o.usage(usage.Raw) {
		return false
	}
	return hasChoices && !some
}

// choice reads one choice of an OpenAI answer: delta when streamed, else
// message or text.
func (o *Observed) choice(raw []byte) {
	for it := scan.Iterate(raw); it.Next(); {
		switch string(it.Name()) {
		case "finish_reason":
			o.finish(it.Value())
		case "text":
			o.Content = o.Content || filled(it.Value())
		case "delta", "message":
			for m := scan.Iterate(it.Value()); m.Next(); {
				if !m.KeyIs("role") && filled(m.Value()) {
					o.Content = true
				}
			}
		}
	}
}

// filled reports a value other than null, "" and an empty container.
func filled(raw []byte) bool {
	return len(raw) > 2 && raw[0] != 'n'
}

// metaInfo reads SGLang's own account of a turn. Counts are cumulative in a
// stream, so the last ones stand.
func (o *Observed) metaInfo(raw []byte) {
	for it := scan.Iterate(raw); it.Next(); {
		switch string(it.Name()) {
		case "finish_reason":
			o.finish(it.Value())
		case "prompt_tokens":
			o.count(&o.Usage.PromptTokens, it.Value())
		case "completion_tokens":
			o.count(&o.Usage.CompletionTokens, it.Value())
		case "cached_tokens":
			o.count(&o.Usage.CachedTokens, it.Value())
		}
	}
}

// usage reads OpenAI's usage object; ok is false for null.
func (o *Observed) usage(raw []byte) (ok bool) {
	if raw[0] != '{' {
		return false
	}
	for it := scan.Iterate(raw); it.Next(); {
		switch string(it.Name()) {
		case "prompt_tokens":
			o.count(&o.Usage.PromptTokens, it.Value())
		case "completion_tokens":
			o.count(&o.Usage.CompletionTokens, it.Value())
		case "prompt_tokens_details":
			v, _ := scan.Find(it.Value(), "cached_tokens")
			o.count(&o.Usage.CachedTokens, v.Raw)
		}
	}
	return true
}

// maxCount bounds what an engine may report, so that sums cannot overflow.
const maxCount = 1 << 40

func (o *Observed) count(field *int, raw []byte) {
	if n, ok := scan.ParseInt(raw); ok && n >= 0 && n <= maxCount {
		*field, o.HasUsage = int(n), true
	}
}

// finish reads a finish reason: a string, or SGLang's object with a type and,
// for an abort, a status.
func (o *Observed) finish(raw []byte) {
	switch raw[0] {
	case '"':
		o.Finish = string(scan.AppendUnescaped(nil, raw))
	case '{':
		kind, _ := scan.Find(raw, "type")
		if len(kind.Raw) == 0 || kind.Raw[0] != '"' {
			return
		}
		o.Finish = string(scan.AppendUnescaped(nil, kind.Raw))
		status, _ := scan.Find(raw, "status_code")
		if code, ok := scan.ParseInt(status.Raw); ok && o.Finish == FinishAbort {
			o.ErrorCode = statusOf(code)
		}
	}
}

// failure reads an in-band error in the shapes of SGLang, OpenAI and ourselves:
// {"error":{…,"code":…}}, {"error":"…"} and {"object":"error","code":…}.
func (o *Observed) failure(b *scan.Body) {
	e, ok := b.Get("error")
	switch {
	case ok && e.Raw[0] == '{':
		code, _ := scan.Find(e.Raw, "code")
		n, _ := scan.ParseInt(code.Raw)
		o.ErrorCode = statusOf(n)
	case ok && filled(e.Raw):
		o.ErrorCode = http.StatusInternalServerError
	default:
		if kind, _ := b.String("object"); kind == "error" {
			n, _ := b.Int("code")
			o.ErrorCode = statusOf(n)
		}
	}
}

// statusOf is an error code as an HTTP status: what is none reads as 500.
func statusOf(code int64) int {
	if code < 400 || code > 599 {
		return http.StatusInternalServerError
	}
	return int(code)
}
