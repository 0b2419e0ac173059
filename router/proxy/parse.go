package proxy

import (
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/scan"
)

// strippedMembers are what only the router and the sidecar may say to an engine
// (R53): the rendezvous, the local prefill switch and orders to a rank. A
// client's rid stays: the sidecar replaces it (wire.md §1).
func strippedMembers() []string {
	return []string{
		"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "do_local_prefill",
		"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank", "decode_tp_size",
	}
}

// prompt is what the router understood of a body.
type prompt struct {
	route     block.Route
	body      *shared    // what travels on
	scan      *scan.Body // of body
	stream    bool
	rid       string
	maxOutput int // tokens the client asked for at most; 0 = did not say
	chain     block.Chain
	billing   bool // a billing header block was cut (R125)
}

// parse reads a turn's body: it is refused or understood, and edited by
// splicing, so that every other byte travels unchanged (R19–R22). It consumes
// the body's reference on a refusal.
func (p *Proxy) parse(route block.Route, body *shared, pool *fleet.Pool, pd bool) (*prompt, *refusal) {
	t := &prompt{route: route, body: body}
	if refuse := p.understand(t, pool, pd); refuse != nil {
		t.body.release()
		return nil, refuse
	}
	return t, nil
}

func (p *Proxy) understand(t *prompt, pool *fleet.Pool, pd bool) *refusal {
	var err error
	if t.scan, err = scan.Parse(t.body.b, scan.Limits{}); err != nil {
		return brokenJSON(err)
	}
	splice, refuse := p.edits(t, pool)
	if refuse != nil {
		return refuse
	}
	if refuse := checkSamples(t.route, t.scan, pd); refuse != nil {
		return refuse
	}
	if err := p.apply(t, splice); err != nil {
		return brokenJSON(err)
	}
	t.stream, _ = t.scan.Bool("stream")
	t.rid, _ = t.scan.String("rid")
	t.maxOutput = maxOutput(t.route, t.scan)
	scratch, _ := p.scratch.Get().(*block.Scratch)
	if scratch == nil {
		scratch = new(block.Scratch)
	}
	t.chain, err = block.Of(t.route, t.scan, pool.Model, scratch)
	t.chain.Blocks = append([]block.Hash(nil), t.chain.Blocks...) // the scratch goes back
	p.scratch.Put(scratch)
	if err != nil {
		return &refusal{status: http.StatusBadRequest, reason: reasonBody, message: err.Error(), code: "invalid_prompt"}
	}
	return nil
}

// edits lists what the router changes in a body.
func (p *Proxy) edits(t *prompt, pool *fleet.Pool) (scan.Splice, *refusal) {
	var s scan.Splice
	for _, key := range strippedMembers() {
		if _, ok := t.scan.Get(key); ok {
			s.Del = append(s.Del, key)
		}
	}
	if t.route != block.Generate { // the native surface has no model member
		name, refuse := modelName(t.scan, pool)
		if refuse != nil {
			return s, refuse
		}
		if name != pool.Model {
			s.Set = append(s.Set, scan.Member{Key: "model", Value: scan.Quoted(pool.Model)})
		}
	}
	if !p.opt.KeepBillingHeader {
		if cut, ok := block.BillingHeader(t.route, t.scan); ok {
			s.Cut, t.billing = append(s.Cut, cut), true
		}
	}
	return s, nil
}

// modelName checks the model a client names: the served name, an alias, or
// nothing, which means the pool's only model (R28).
func modelName(b *scan.Body, pool *fleet.Pool) (string, *refusal) {
	v, ok := b.Get("model")
	if !ok || bytes.Equal(v.Raw, []byte("null")) {
		return "", nil
	}
	name, ok := b.String("model")
	if !ok {
		return "", badMember("model", "model has to be a string.")
	}
	if strings.TrimSpace(name) == "" {
		return "", nil
	}
	if name == pool.Model || slices.Contains(pool.Aliases, name) {
		return name, nil
	}
	return "", unknownModel(name)
}

func unknownModel(name string) *refusal {
	return &refusal{status: http.StatusNotFound, reason: reasonModel, param: "model", code: "model_not_found",
		message: "The model " + quoteShort(name) + " does not exist here; GET /v1/models lists the names."}
}

// quoteShort quotes what a client sent, bounded, without control characters.
func quoteShort(s string) string {
	const most = 100
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return string(scan.Quoted(s))
}

// apply splices the body, and scans the result again when the prompt itself
// changed, because the workers hash what they receive.
func (p *Proxy) apply(t *prompt, s scan.Splice) error {
	if len(s.Del)+len(s.Set)+len(s.Cut) == 0 {
		return nil
	}
	buf := p.buffer()
	buf.Grow(len(t.body.b) + 128)
	out := t.scan.Apply(buf.AvailableBuffer(), s)
	buf.Write(out) // in place: out was appended to the buffer's own memory
	edited := &shared{b: buf.Bytes(), bufs: [2]*bytes.Buffer{buf}, pool: &p.bufs}
	edited.refs.Store(1)
	t.body.release()
	t.body = edited
	var err error
	t.scan, err = scan.Parse(t.body.b, scan.Limits{})
	return err
}

func brokenJSON(err error) *refusal {
	message := "The request body is not a JSON object."
	if se, ok := errors.AsType[*scan.SyntaxError](err); ok {
		message = "The request body is not a JSON object: " + se.Error() + "."
	}
	return &refusal{status: http.StatusBadRequest, reason: reasonBody, message: message, code: "invalid_json"}
}

// checkSamples refuses what a disaggregated engine hangs or crashes on: several
// samples or prompts in one request, which would share one rendezvous (R65),
// and object sessions, which lose theirs.
func checkSamples(route block.Route, b *scan.Body, pd bool) *refusal {
	if !pd {
		return nil
	}
	params := b.Get
	field := ""
	if route == block.Generate {
		v, _ := b.Get("sampling_params")
		params = func(key string) (scan.Value, bool) { return scan.Find(v.Raw, key) }
		field = "sampling_params."
		if v, ok := b.Get("session_params"); ok && !bytes.Equal(v.Raw, []byte("null")) {
			return badMember("session_params",
				"session_params is not supported with disaggregated prefill; send the whole prompt and a session header.")
		}
	}
	for _, key := range [...]string{"n", "best_of"} {
		v, ok := params(key)
		if !ok || bytes.Equal(v.Raw, []byte("null")) {
			continue
		}
		// Engines read "2" and true as numbers too; what is no plain number passes none.
		if n, isInt := scan.ParseInt(v.Raw); !isInt || n > 1 {
			return badMember(field+key, field+key+
				" has to be 1 with disaggregated prefill; send one request for each sample.")
		}
	}
	if key := batchMember(route, b); key != "" {
		return badMember(key, key+" holds several prompts, which disaggregated prefill cannot serve in one request; "+
			"send one request for each prompt.")
	}
	return nil
}

// batchMember names the member that holds more than one prompt. A list of one
// string is one prompt for completions, and a batch of one for the native
// surface, which answers it with a list.
func batchMember(route block.Route, b *scan.Body) string {
	most, keys := 1, []string{"prompt"}
	switch route {
	case block.Chat:
		return ""
	case block.Generate:
		most, keys = 0, []string{"text", "input_ids"}
		if v, ok := b.Get("sampling_params"); ok && v.Raw[0] == '[' {
			return "sampling_params"
		}
	}
	for _, key := range keys {
		if v, ok := b.Get(key); ok && prompts(v.Raw) > most {
			return key
		}
	}
	return ""
}

// prompts counts, up to 2, the prompts in a list of strings or of id lists; a
// string and a list of ids are none.
func prompts(raw []byte) int {
	n := 0
	if raw[0] != '[' {
		return 0
	}
	for it := scan.Iterate(raw); n < 2 && it.Next(); {
		if c := it.Value()[0]; c != '[' && c != '"' {
			return 0
		}
		n++
	}
	return n
}

func maxOutput(route block.Route, b *scan.Body) int {
	if route == block.Generate {
		v, _ := b.Get("sampling_params")
		if m, ok := scan.Find(v.Raw, "max_new_tokens"); ok {
			n, _ := scan.ParseInt(m.Raw)
			return clampTokens(n)
		}
		return 0
	}
	for _, key := range [...]string{"max_completion_tokens", "max_tokens"} {
		if n, ok := b.Int(key); ok {
			return clampTokens(n)
		}
	}
	return 0
}

// clampTokens keeps a client's number within what a token count can be.
func clampTokens(n int64) int { return int(min(max(n, 0), 1<<30)) }
