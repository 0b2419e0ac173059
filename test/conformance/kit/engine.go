package kit

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/scan"
	"github.com/kvc-dev/kvc/router/sglang"
)

// Model is the served name of every mock engine.
const Model = "m"

// EngineConfig describes a mock engine.
type EngineConfig struct {
	Role   fleet.Role
	Mode   string // disaggregation mode: null, prefill, decode
	Tokens int    // KV capacity; default 1,000,000
	Key    string // its --api-key, "" = none
	Rooms  *Rooms // shared by the engines of a pool
	// Transfer is how long the KV hand-off takes once both legs met.
	Transfer time.Duration
	// Started tells one incarnation from the next; default: now.
	Started time.Time
}

// Engine is a mock SGLang: the control routes that a sidecar needs, and Serve
// as the script of its turns until a test sets another.
type Engine struct {
	*Worker
	cfg EngineConfig

	// Under Worker.mu.
	info    map[string]any
	control []*http.Request // requests to control routes, headers only
	aborts  []string        // rids
	phases  []string        // "<rid> <phase>", in order
	crashed []string        // rids cancelled during their transfer
	running int
	most    int // largest number of turns at once
	cache   map[block.Hash]bool
	hook    func(http.ResponseWriter, *http.Request) bool
}

// Hook lets a test answer a control route itself: true means it did.
func (e *Engine) Hook(f func(w http.ResponseWriter, r *http.Request) bool) {
	e.note(func() { e.hook = f })
}

// NewEngine starts a mock engine; the test's end stops it.
func NewEngine(t testing.TB, addr string, c EngineConfig) *Engine {
	t.Helper()
	if c.Tokens == 0 {
		c.Tokens = 1_000_000
	}
	if c.Started.IsZero() {
		c.Started = time.Now()
	}
	if c.Rooms == nil {
		c.Rooms = new(Rooms)
	}
	e := &Engine{Worker: &Worker{t: t}, cfg: c, cache: map[block.Hash]bool{}}
	e.info = map[string]any{
		"version": "0.5.23", "served_model_name": Model, "model_path": "/models/m", "disaggregation_mode": c.Mode,
		"page_size": 1, "max_total_num_tokens": c.Tokens, "enable_cache_report": true,
		"startup_time": float64(c.Started.UnixMilli()) / 1000,
		"disaggregation_decode_enable_radix_cache":     c.Mode == "decode",
		"disaggregation_decode_enable_conditional_agg": c.Mode == "decode",
	}
	e.script = e.Serve
	e.Worker.control = e.serveControl
	e.before = func(ex *Exchange) {
		e.note(func() { e.running++; e.most = max(e.most, e.running) })
	}
	e.after = func(*Exchange) { e.note(func() { e.running-- }) }
	e.start(addr)
	t.Cleanup(e.Stop)
	return e
}

func (e *Engine) serveControl(w http.ResponseWriter, r *http.Request) {
	var abort struct {
		Rid string `json:"rid"`
	}
	_ = json.NewDecoder(r.Body).Decode(&abort) // most have no body
	var hook func(http.ResponseWriter, *http.Request) bool
	e.note(func() {
		hook = e.hook
		e.control = append(e.control, r.Clone(r.Context()))
		if r.URL.Path == "/abort_request" {
			e.aborts = append(e.aborts, abort.Rid)
		}
	})
	if e.cfg.Key != "" && r.URL.Path != "/health" && r.Header.Get("Authorization") != "Bearer "+e.cfg.Key {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if hook != nil && hook(w, r) {
		return
	}
	var answer any
	switch r.URL.Path {
	case "/server_info":
		answer = e.info
	case "/v1/loads":
		e.mu.Lock()
		answer = map[string]any{"loads": []any{map[string]any{"num_running_reqs": e.running}}}
		e.mu.Unlock()
	case "/v1/models":
		answer = map[string]any{"object": "list", "data": []any{map[string]any{"id": Model, "object": "model"}}}
	case "/health", "/abort_request":
	default:
		http.NotFound(w, r)
		return
	}
	if answer != nil {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer)
	}
}

// Serve is the ordinary engine: the rendezvous when the body names a room, then
// three tokens, usage when asked for, the end.
func (e *Engine) Serve(ex *Exchange) {
	if e.probe(ex) || !e.Meet(ex) {
		return
	}
	e.Answer(ex)
}

// Turns are the turns received, a sidecar's own probes not counted.
func (e *Engine) Turns() []*Seen {
	turns := e.Worker.Turns()
	return slices.DeleteFunc(turns, func(s *Seen) bool { return s.Member("rid") == nil })
}

// AwaitTurns waits until n turns have arrived, probes not counted.
func (e *Engine) AwaitTurns(n int) []*Seen {
	e.t.Helper()
	e.Await("turns", func() bool {
		k := 0
		for _, s := range e.seen {
			if s.Member("rid") != nil {
				k++
			}
		}
		return k >= n
	})
	return e.Turns()
}

// AwaitLegs waits until n turns have arrived at a worker of either kind and
// returns all of them, probes not counted.
func (e *Engine) AwaitLegs(n int) []*Seen {
	e.t.Helper()
	var legs []*Seen
	e.Await("legs", func() bool {
		legs = legs[:0]
		for _, s := range e.seen {
			if s.Member("rid") != nil || s.Header.Get(admission.HeaderLeg) != "" {
				legs = append(legs, s)
			}
		}
		return len(legs) >= n
	})
	return legs
}

// Last is the newest turn.
func (e *Engine) Last() *Seen {
	e.t.Helper()
	turns := e.Turns()
	if len(turns) == 0 {
		e.t.Fatal("the engine got no turn")
	}
	return turns[len(turns)-1]
}

// probe answers a sidecar's question whether do_local_prefill works.
func (e *Engine) probe(ex *Exchange) bool {
	if ex.Seen.Member("rid") != nil {
		return false
	}
	ex.JSON(http.StatusOK, `{}`)
	return true
}

// Meet does a turn's KV hand-off; false means that it broke off and nothing may
// be answered. Phases are noted: prealloc, transfer, decoding on D; bootstrap,
// transfer, done on P. A D leg that is cancelled in its transfer crashes the
// engine (R50): Crashed tells. A P leg that is cancelled before the hand-off is
// over fails D's, which answers 500.
func (e *Engine) Meet(ex *Exchange) bool {
	n, ok := ex.Seen.Member("bootstrap_room").(json.Number)
	if !ok {
		return true
	}
	room := e.cfg.Rooms.get(n.String())
	if e.cfg.Role == fleet.Prefill {
		e.phase(ex, "bootstrap")
		if !ex.Until(room.joined) {
			room.fail()
			return false
		}
		e.phase(ex, "transfer")
		if e.cfg.Transfer > 0 && !ex.Wait(e.cfg.Transfer) {
			room.fail()
			return false
		}
		room.transfer()
		e.phase(ex, "done")
		return true
	}
	e.phase(ex, "prealloc")
	room.join()
	e.phase(ex, "transfer")
	select {
	case <-room.moved:
		e.phase(ex, "decoding")
		return true
	case <-room.failed:
		e.phase(ex, "failed")
		ex.Refuse(http.StatusInternalServerError)
	case <-ex.Gone():
		e.note(func() { e.crashed = append(e.crashed, fmt.Sprint(ex.Seen.Member("rid"))) })
	}
	return false
}

func (e *Engine) phase(ex *Exchange, name string) {
	e.note(func() { e.phases = append(e.phases, fmt.Sprint(ex.Seen.Member("rid"))+" "+name) })
}

// AwaitPhase waits until some turn is in a phase.
func (e *Engine) AwaitPhase(name string) {
	e.t.Helper()
	e.Await("phase "+name, func() bool {
		return slices.ContainsFunc(e.phases, func(s string) bool { return strings.HasSuffix(s, " "+name) })
	})
}

// Crashed are the rids of turns that were cancelled in their KV hand-off.
func (e *Engine) Crashed() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.crashed)
}

// Aborts are the rids of /abort_request.
func (e *Engine) Aborts() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.aborts)
}

// AwaitAborts waits until n aborts were asked for.
func (e *Engine) AwaitAborts(n int) []string {
	e.t.Helper()
	e.Await("aborts", func() bool { return len(e.aborts) >= n })
	return e.Aborts()
}

// Control are the requests to control routes so far.
func (e *Engine) Control() []*http.Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.control)
}

// Most is the largest number of turns that ran at once.
func (e *Engine) Most() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.most
}

// AwaitIdle waits until no turn runs.
func (e *Engine) AwaitIdle() {
	e.t.Helper()
	e.Await("idleness", func() bool { return e.running == 0 })
}

// Answer is an ordinary answer of the turn's surface. The prompt's blocks count
// as cached from then on.
func (e *Engine) Answer(ex *Exchange) {
	usage := e.usage(ex.Seen)
	route, _ := sglang.RouteOf(ex.Seen.Path)
	if route == block.Generate {
		e.answerGenerate(ex, usage)
		return
	}
	if !ex.Streams() {
		choice := `"message":{"role":"assistant","content":"one two three"}`
		if route == block.Completions {
			choice = `"text":"one two three"`
		}
		ex.JSON(http.StatusOK, `{"id":"r","choices":[{"index":0,`+choice+`,"finish_reason":"stop"}],"usage":`+usage+`}`)
		return
	}
	ex.Stream()
	for _, s := range []string{"one", " two", " three"} {
		ex.Send(Token(s))
	}
	ex.Send(Finish("stop"))
	if o, ok := ex.Seen.Member("stream_options").(map[string]any); ok && o["include_usage"] == true {
		ex.Send(Event(`{"id":"r","choices":[],"usage":` + usage + `}`))
	}
	ex.Send(Done)
}

func (e *Engine) answerGenerate(ex *Exchange, usage string) {
	meta := func(text, finish string) string {
		return `{"text":"` + text + `","output_ids":[1,2,3],"meta_info":{"id":"r","finish_reason":` + finish + `,` +
			strings.Trim(strings.Replace(usage, `"prompt_tokens_details":{"cached_tokens"`, `"cached_tokens"`, 1), "{}") + `}}`
	}
	if !ex.Streams() {
		ex.JSON(http.StatusOK, meta("one two three", `{"type":"stop","matched":7}`))
		return
	}
	ex.Stream()
	ex.Send(Event(meta("one", "null")))
	ex.Send(Event(meta("one two three", `{"type":"stop","matched":7}`)))
	ex.Send(Done)
}

// usage reports the prompt at four bytes a token, and as cached what earlier
// turns left.
func (e *Engine) usage(s *Seen) string {
	const perToken, answered = block.Bytes / block.IDs, 3
	prompt, cached := 1, 0
	route, _ := sglang.RouteOf(s.Path)
	b, err := scan.Parse(s.Body, scan.Limits{})
	if err == nil {
		if c, err := block.Of(route, b, Model, nil); err == nil {
			prompt = max(c.Bytes/perToken+c.IDs, 1)
			e.note(func() {
				for cached < len(c.Blocks) && e.cache[c.Blocks[cached]] {
					cached++
				}
				for _, h := range c.Blocks {
					e.cache[h] = true
				}
			})
		}
	}
	return fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`,
		prompt, answered, min(cached*block.IDs, prompt))
}

// Rooms is where the legs of a pool's turns meet.
type Rooms struct {
	mu sync.Mutex
	m  map[string]*room
}

type room struct {
	joined, moved, failed chan struct{} // closed when D is there; when the KV has moved; when P gave up
	join, transfer, fail  func()
}

func (r *Rooms) get(id string) *room {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil {
		r.m = map[string]*room{}
	}
	if r.m[id] == nil {
		n := &room{joined: make(chan struct{}), moved: make(chan struct{}), failed: make(chan struct{})}
		n.join = sync.OnceFunc(func() { close(n.joined) })
		n.transfer = sync.OnceFunc(func() { close(n.moved) })
		n.fail = sync.OnceFunc(func() { close(n.failed) })
		r.m[id] = n
	}
	return r.m[id]
}
