package emulator

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"github.com/kvc-dev/kvc/router/scan"
)

// surface is which of the three generation routes a request came by.
type surface uint8

const (
	surfaceGenerate surface = iota
	surfaceCompletions
	surfaceChat
)

// request is a parsed generation request.
type request struct {
	surface      surface
	model        string
	stream       bool
	usage        bool // stream_options.include_usage
	continuous   bool // stream_options.continuous_usage_stats
	echo         bool
	batch        bool // the prompt was a list, so the answer is one (generate)
	n            int
	rid          string
	seqs         []*sequence
	cacheDetails bool
}

// params are the small members of a request; the large ones (messages, prompt,
// input_ids, text, tools) are read in place.
type params struct {
	Model         *string `json:"model"`
	Stream        *bool   `json:"stream"`
	StreamOptions *struct {
		IncludeUsage         bool `json:"include_usage"`
		ContinuousUsageStats bool `json:"continuous_usage_stats"`
	} `json:"stream_options"`
	N                   *int            `json:"n"`
	MaxTokens           *int            `json:"max_tokens"`
	MaxCompletionTokens *int            `json:"max_completion_tokens"`
	MinTokens           *int            `json:"min_tokens"`
	IgnoreEOS           *bool           `json:"ignore_eos"`
	Stop                strings1        `json:"stop"`
	StopTokenIDs        []int32         `json:"stop_token_ids"`
	Echo                *bool           `json:"echo"`
	RID                 json.RawMessage `json:"rid"`
	BootstrapHost       json.RawMessage `json:"bootstrap_host"`
	BootstrapPort       json.RawMessage `json:"bootstrap_port"`
	BootstrapRoom       json.RawMessage `json:"bootstrap_room"`
	DoLocalPrefill      *bool           `json:"do_local_prefill"`
	CachedTokensDetails *bool           `json:"return_cached_tokens_details"`
	SamplingParams      json.RawMessage `json:"sampling_params"`
	ReturnLogprob       *bool           `json:"return_logprob"`
	LogprobStartLen     *int            `json:"logprob_start_len"`
}

// samplingParams are those of /generate (contract §6.1).
type samplingParams struct {
	MaxNewTokens *int     `json:"max_new_tokens"`
	MinNewTokens *int     `json:"min_new_tokens"`
	IgnoreEOS    bool     `json:"ignore_eos"`
	Stop         strings1 `json:"stop"`
	StopTokenIDs []int32  `json:"stop_token_ids"`
	N            *int     `json:"n"`
}

// strings1 is one string or a list of them.
type strings1 []string

// UnmarshalJSON implements json.Unmarshaler.
func (s *strings1) UnmarshalJSON(b []byte) error {
	if b[0] == '"' {
		var one string
		err := json.Unmarshal(b, &one)
		*s = strings1{one}
		return err
	}
	return json.Unmarshal(b, (*[]string)(s))
}

// badRequest is a fault in the body, answered with 400.
type badRequest struct{ msg string }

func (e *badRequest) Error() string { return e.msg }

func badf(format string, args ...any) error { return &badRequest{fmt.Sprintf(format, args...)} }

// defaultMaxNew is /generate's max_new_tokens when absent.
const defaultMaxNew = 128

// maxN bounds the answers to one prompt; SGLang has no bound.
const maxN = 512

// large reports the members that params leaves to their own readers.
func large(key string) bool {
	switch key {
	case "messages", "prompt", "input_ids", "text", "tools", "image_data":
		return true
	}
	return false
}

// parseParams decodes the small members of a body.
func parseParams(b *scan.Body) (p params, err error) {
	small := append(make([]byte, 0, 1024), '{')
	b.Keys(func(key string, v scan.Value) bool {
		if large(key) {
			return true
		}
		if len(small) > 1 {
			small = append(small, ',')
		}
		small = scan.AppendQuoted(small, key)
		small = append(small, ':')
		small = append(small, v.Raw...)
		return true
	})
	err = json.Unmarshal(append(small, '}'), &p)
	if typeErr, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return p, badf("%s: a JSON %s is not valid here", typeErr.Field, typeErr.Value)
	}
	if err != nil {
		return p, badf("%v", err)
	}
	return p, nil
}

// override puts the x-override-* headers over the members of the body (contract
// §6.6), so that a router need not touch the body.
func (p *params) override(h http.Header) {
	for name, member := range map[string]*json.RawMessage{
		"X-Override-Rid": &p.RID, "X-Override-Bootstrap-Host": &p.BootstrapHost,
		"X-Override-Bootstrap-Port": &p.BootstrapPort, "X-Override-Bootstrap-Room": &p.BootstrapRoom,
	} {
		v := h.Get(name)
		switch {
		case v == "":
		case strings.HasSuffix(name, "Port"), strings.HasSuffix(name, "Room"):
			*member = json.RawMessage(v)
		default:
			*member = scan.Quoted(v)
		}
	}
}

// parse reads a generation request of any surface. rid comes from the body or
// is drawn. over are headers that may override members, nil for none.
func parse(s surface, body []byte, over http.Header) (*request, error) {
	b, err := scan.Parse(body, scan.Limits{})
	if err != nil {
		return nil, badf("%v", err)
	}
	p, err := parseParams(b)
	if err != nil {
		return nil, err
	}
	p.override(over)
	r := &request{surface: s, model: "default", n: 1}
	deref(&r.model, p.Model)
	deref(&r.stream, p.Stream)
	deref(&r.echo, p.Echo)
	deref(&r.cacheDetails, p.CachedTokensDetails)
	if p.StreamOptions != nil {
		r.usage, r.continuous = p.StreamOptions.IncludeUsage, p.StreamOptions.ContinuousUsageStats
	}
	var prompts [][]int32
	if s == surfaceChat {
		prompts, err = chatPrompt(b)
	} else {
		prompts, r.batch, err = plainPrompts(s, b)
	}
	if err != nil {
		return nil, err
	}
	smp, err := r.sampling(&p, len(prompts))
	if err != nil {
		return nil, err
	}
	return r, r.build(&p, prompts, smp)
}

func deref[T any](dst, src *T) {
	if src != nil {
		*dst = *src
	}
}

// sampling returns one set of sampling parameters per prompt.
func (r *request) sampling(p *params, prompts int) ([]sampling, error) {
	if r.surface != surfaceGenerate {
		s := sampling{stop: p.Stop, stopIDs: p.StopTokenIDs}
		deref(&s.maxNew, p.MaxTokens)
		deref(&s.maxNew, p.MaxCompletionTokens)
		deref(&s.minNew, p.MinTokens)
		deref(&s.ignoreEOS, p.IgnoreEOS)
		deref(&r.n, p.N)
		if r.surface == surfaceCompletions && p.MaxTokens == nil {
			s.maxNew = 16
		}
		return repeat(s, prompts), check(s, r.n)
	}
	return r.nativeSampling(p, prompts)
}

// nativeSampling reads /generate's sampling_params: one object for all prompts
// or a list of them.
func (r *request) nativeSampling(p *params, prompts int) ([]sampling, error) {
	raws := []json.RawMessage{p.SamplingParams}
	if len(p.SamplingParams) > 0 && p.SamplingParams[0] == '[' {
		if err := json.Unmarshal(p.SamplingParams, &raws); err != nil || len(raws) != prompts {
			return nil, badf("sampling_params: the list must have one entry for each of the %d prompts", prompts)
		}
	}
	out := make([]sampling, 0, prompts)
	for _, raw := range raws {
		s, err := r.native(raw)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	if len(out) == 1 {
		return repeat(out[0], prompts), nil
	}
	return out, nil
}

func (r *request) native(raw json.RawMessage) (sampling, error) {
	sp := samplingParams{}
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &sp); err != nil {
			return sampling{}, badf("sampling_params: %v", err)
		}
	}
	s := sampling{maxNew: defaultMaxNew, ignoreEOS: sp.IgnoreEOS, stop: sp.Stop, stopIDs: sp.StopTokenIDs}
	deref(&s.maxNew, sp.MaxNewTokens)
	deref(&s.minNew, sp.MinNewTokens)
	deref(&r.n, sp.N)
	return s, check(s, r.n)
}

func check(s sampling, n int) error {
	switch {
	case s.maxNew < 0:
		return badf("max_new_tokens must be at least 0, got %d.", s.maxNew)
	case s.minNew < 0:
		return badf("min_new_tokens must be in [0, max_new_tokens], got %d.", s.minNew)
	case n < 1 || n > maxN:
		return badf("n must be from 1 to %d, got %d.", maxN, n)
	}
	return nil
}

func repeat[T any](v T, n int) []T {
	out := make([]T, n)
	for i := range out {
		out[i] = v
	}
	return out
}

// build makes the sequences: every prompt n times.
func (r *request) build(p *params, prompts [][]int32, smp []sampling) error {
	boots, err := bootstraps(p, len(prompts))
	if err != nil {
		return err
	}
	rids, err := requestIDs(p.RID, len(prompts))
	if err != nil {
		return err
	}
	r.rid = rids[0]
	local := p.DoLocalPrefill != nil && *p.DoLocalPrefill
	logprobs := r.surface == surfaceGenerate && p.ReturnLogprob != nil && *p.ReturnLogprob
	for i, prompt := range prompts {
		for k := range r.n {
			rid := rids[i]
			if k > 0 {
				rid = newRID()
			}
			tokens := prompt
			if k > 0 {
				tokens = append([]int32(nil), prompt...)
			}
			r.seqs = append(r.seqs, &sequence{
				rid: rid, index: len(r.seqs), sample: k, tokens: tokens, ids: prompt, prompt: len(prompt),
				sampling: smp[i], boot: boots[i], local: local, out: newOutbox(),
				logprobs: logprobs, logprobFrom: logprobStart(p, len(prompt)),
			})
		}
	}
	return nil
}

// logprobStart is the first prompt token whose logprob is wanted; the default,
// -1, is none of them.
func logprobStart(p *params, prompt int) int {
	if p.LogprobStartLen == nil || *p.LogprobStartLen < 0 {
		return prompt
	}
	return min(*p.LogprobStartLen, prompt)
}

func newRID() string {
	id := uuid.New()
	return hex.EncodeToString(id[:])
}

func requestIDs(raw json.RawMessage, prompts int) ([]string, error) {
	var ids strings1
	if len(raw) > 0 && !bytes.Equal(raw, []byte("null")) {
		if err := json.Unmarshal(raw, &ids); err != nil {
			return nil, badf("rid: it must be a string or a list of strings")
		}
		if len(ids) == 1 && prompts > 1 {
			for i := range prompts - 1 {
				ids = append(ids, fmt.Sprintf("%s_%d", ids[0], i+1))
			}
		}
		if len(ids) != prompts {
			return nil, badf("rid: %d ids for %d prompts", len(ids), prompts)
		}
		return ids, nil
	}
	for range prompts {
		ids = append(ids, newRID())
	}
	return ids, nil
}

// bootstraps spreads bootstrap_* over a batch: lists element by element,
// scalars broadcast, except that the room of the i-th prompt is room+i
// (contract §2.1).
func bootstraps(p *params, n int) ([]bootstrap, error) {
	hosts, err := spread[string](p.BootstrapHost, "bootstrap_host", n)
	if err != nil {
		return nil, err
	}
	ports, err := spread[int](p.BootstrapPort, "bootstrap_port", n)
	if err != nil {
		return nil, err
	}
	rooms, err := spread[uint64](p.BootstrapRoom, "bootstrap_room", n)
	if err != nil {
		return nil, err
	}
	out := make([]bootstrap, n)
	for i := range out {
		deref(&out[i].host, hosts[i])
		deref(&out[i].port, ports[i])
		if rooms[i] != nil {
			out[i].set, out[i].room = true, *rooms[i]
			if p.BootstrapRoom[0] != '[' {
				out[i].room += uint64(i)
			}
		}
		out[i].host = trimBrackets(out[i].host)
	}
	return out, nil
}

// spread reads a scalar, null or a list into n entries.
func spread[T any](raw json.RawMessage, name string, n int) ([]*T, error) {
	if len(raw) == 0 {
		return make([]*T, n), nil
	}
	if raw[0] == '[' {
		var list []*T
		if err := json.Unmarshal(raw, &list); err != nil || len(list) != n {
			return nil, badf("%s: the list must have one valid entry for each of the %d prompts", name, n)
		}
		return list, nil
	}
	var one *T
	if err := json.Unmarshal(raw, &one); err != nil {
		return nil, badf("%s: %v", name, err)
	}
	return repeat(one, n), nil
}
