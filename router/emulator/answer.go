package emulator

import (
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
)

// answer is one sequence as its handler sees it.
type answer struct {
	seq    *sequence
	ids    []int32
	text   []byte
	sent   int // bytes of text already streamed
	idSent int
	batch
}

// collect adds what the engine has produced since.
func (a *answer) collect() {
	b := a.seq.out.take()
	for _, id := range b.tokens {
		a.ids = append(a.ids, id)
		a.text = appendText(a.text, id)
	}
	b.tokens = nil
	a.batch = b
	if b.done && b.finish.kind == "stop" {
		a.trim(b.finish)
	}
}

// trim drops what stopped the answer from its text; the ids keep it.
func (a *answer) trim(f finish) {
	keep := len(a.text)
	if f.matchStr != "" {
		keep = stopAt(a.text, f.matchStr)
	} else {
		keep -= len(appendText(nil, f.matchID))
	}
	a.text = a.text[:max(keep, 0)]
	a.sent = min(a.sent, len(a.text))
}

// stopAt is where a stop string begins; text from there on is not returned.
func stopAt(text []byte, stop string) int {
	for i := len(text) - len(stop); i >= 0; i-- {
		if string(text[i:i+len(stop)]) == stop {
			return i
		}
	}
	return len(text)
}

// fresh is the text that has not been streamed yet.
func (a *answer) fresh() []byte { return a.text[a.sent:] }

// due reports whether there is something to send: the first token, the end, or
// a whole stream interval.
func (a *answer) due(interval int) bool {
	n := len(a.ids) - a.idSent
	return a.done || n > 0 && (a.idSent == 0 || n >= interval)
}

func (a *answer) mark() { a.sent, a.idSent = len(a.text), len(a.ids) }

// usage is the OpenAI usage object (contract §6.3).
type usage struct{ prompt, completion, cached int }

func (u *usage) add(a *answer, first bool) {
	if first {
		u.prompt += a.seq.prompt
		u.cached += a.cached
	}
	u.completion += len(a.ids)
}

func (u usage) append(dst []byte, report bool) []byte {
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.prompt), 10)
	dst = append(dst, `,"total_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.prompt+u.completion), 10)
	dst = append(dst, `,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.completion), 10)
	dst = append(dst, `,"prompt_tokens_details":`...)
	if report && u.cached > 0 {
		dst = append(dst, `{"cached_tokens":`...)
		dst = append(strconv.AppendInt(dst, int64(u.cached), 10), '}')
	} else {
		dst = append(dst, "null"...)
	}
	return append(dst, `,"reasoning_tokens":0}`...)
}

// appendReason appends an OpenAI finish_reason and matched_stop.
func appendReason(dst []byte, done bool, f finish) []byte {
	dst = append(dst, `,"finish_reason":`...)
	if !done {
		return append(dst, `null,"matched_stop":null`...)
	}
	dst = scan.AppendQuoted(dst, f.kind)
	dst = append(dst, `,"matched_stop":`...)
	return appendMatched(dst, f)
}

func appendMatched(dst []byte, f finish) []byte {
	switch {
	case f.kind != "stop":
		return append(dst, "null"...)
	case f.matchStr != "":
		return scan.AppendQuoted(dst, f.matchStr)
	default:
		return strconv.AppendInt(dst, int64(f.matchID), 10)
	}
}

// appendFinish appends the finish_reason object of /generate (contract §6.1).
func appendFinish(dst []byte, done bool, f finish) []byte {
	switch {
	case !done:
		return append(dst, "null"...)
	case f.kind == "stop":
		dst = append(dst, `{"type":"stop","matched":`...)
		return append(appendMatched(dst, f), '}')
	case f.kind == "length":
		dst = append(dst, `{"type":"length","length":`...)
		return append(strconv.AppendInt(dst, int64(f.length), 10), '}')
	}
	dst = append(dst, `{"type":"abort","message":`...)
	dst = scan.AppendQuoted(dst, f.message)
	dst = append(dst, `,"status_code":`...)
	kind := "null"
	if f.status == 0 {
		dst = append(dst, "null"...)
	} else {
		dst = strconv.AppendInt(dst, int64(f.status), 10)
		if f.status == http.StatusBadRequest {
			kind = `"BadRequestError"`
		}
	}
	dst = append(dst, `,"err_type":`...)
	return append(append(dst, kind...), '}')
}

// appendLogprobs appends made-up log probabilities in SGLang's shape: triples of
// value, id and text, null where there is nothing before. A decode worker that
// was sent its KV has none of the prompt's; the router takes those from the
// prefill worker (contract §2.4).
func appendLogprobs(dst []byte, a *answer) []byte {
	prompt := a.seq.ids
	dst = append(dst, `,"input_token_logprobs":[`...)
	if !a.seq.remote {
		for i := a.seq.logprobFrom; i < len(prompt); i++ {
			dst = appendTriple(dst, prompt[i], i == 0, i == a.seq.logprobFrom)
		}
	}
	dst = append(dst, `],"output_token_logprobs":[`...)
	for i, id := range a.ids {
		dst = appendTriple(dst, id, false, i == 0)
	}
	return append(dst, ']')
}

func appendTriple(dst []byte, id int32, none, first bool) []byte {
	if !first {
		dst = append(dst, ',')
	}
	dst = append(dst, '[')
	if none {
		dst = append(dst, "null"...)
	} else {
		dst = strconv.AppendFloat(dst, -float64(mix(uint64(id))%4000)/1000, 'g', -1, 64)
	}
	dst = append(dst, ',')
	dst = strconv.AppendInt(dst, int64(id), 10)
	return append(dst, ",null]"...)
}

// appendGenerate appends one answer of /generate in the shape of contract §2.4.
// text and ids are cumulative unless the stream is incremental.
func appendGenerate(dst []byte, a *answer, from, fromID int) []byte {
	dst = append(dst, `{"text":`...)
	dst = scan.AppendQuoted(dst, string(a.text[from:]))
	dst = append(dst, `,"output_ids":[`...)
	for i, id := range a.ids[fromID:] {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	dst = append(dst, `],"meta_info":{"id":`...)
	dst = scan.AppendQuoted(dst, a.seq.rid)
	dst = append(dst, `,"finish_reason":`...)
	dst = appendFinish(dst, a.done, a.finish)
	dst = append(dst, `,"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(a.seq.prompt), 10)
	dst = append(dst, `,"weight_version":"default","num_retractions":`...)
	dst = strconv.AppendInt(dst, int64(a.retractions), 10)
	dst = append(dst, `,"reasoning_tokens":0,"completion_tokens":`...)
	dst = strconv.AppendInt(dst, int64(len(a.ids)), 10)
	dst = append(dst, `,"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(a.cached), 10)
	if a.fromHost > 0 {
		dst = append(dst, `,"cached_tokens_details":{"device":`...)
		dst = strconv.AppendInt(dst, int64(a.cached-a.fromHost), 10)
		dst = append(dst, `,"host":`...)
		dst = append(strconv.AppendInt(dst, int64(a.fromHost), 10), '}')
	}
	dst = append(dst, `,"dp_rank":null`...)
	if a.seq.logprobs {
		dst = appendLogprobs(dst, a)
	}
	if a.done {
		dst = append(dst, `,"e2e_latency":`...)
		dst = strconv.AppendFloat(dst, a.latency.Seconds(), 'g', -1, 64)
		dst = append(dst, `,"response_sent_to_client_ts":`...)
		dst = strconv.AppendFloat(dst, float64(time.Now().UnixMicro())/1e6, 'f', -1, 64)
	}
	return append(dst, `}}`...)
}
