package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // the fuzzer's own workers are still ending
	}
	goleak.VerifyTestMain(m)
}

const patience = 10 * time.Second

// engine is a scripted SGLang: exact bytes, exact moments. Everything it was
// sent is recorded.
type engine struct {
	t   *testing.T
	srv *httptest.Server

	mu       sync.Mutex
	info     map[string]any
	load     map[string]any
	requests []seen
	aborts   []string
	abortErr int                                                               // status of /abort_request, 0 = 200
	turn     func(w http.ResponseWriter, r *http.Request, body map[string]any) // of the test
	probe    func(path string) int                                             // status of do_local_prefill probes
	native   http.HandlerFunc
	metrics  string
	changed  chan struct{}
}

// seen is one turn as the engine got it.
type seen struct {
	path   string
	header http.Header
	raw    []byte
	body   map[string]any
}

func newEngine(t *testing.T) *engine {
	e := &engine{
		t: t, changed: make(chan struct{}),
		info: map[string]any{
			"version": "0.5.23", "served_model_name": "m", "disaggregation_mode": "decode", "page_size": 1,
			"max_total_num_tokens": 100000, "startup_time": 1999999999.5, "enable_cache_report": true,
			"disaggregation_decode_enable_radix_cache": true,
		},
		load:  map[string]any{"num_running_reqs": 0},
		probe: func(string) int { return http.StatusOK },
	}
	e.turn = answerChat
	e.srv = httptest.NewServer(e)
	t.Cleanup(e.srv.Close)
	return e
}

func (e *engine) set(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/server_info":
		e.json(w, func() any { return e.info })
	case "/v1/loads":
		e.json(w, func() any { return map[string]any{"loads": []any{e.load}} })
	case "/health":
	case "/metrics":
		e.mu.Lock()
		defer e.mu.Unlock()
		_, _ = io.WriteString(w, e.metrics)
	case "/abort_request":
		var in struct{ Rid string }
		_ = json.NewDecoder(r.Body).Decode(&in)
		e.note(func() {
			e.aborts = append(e.aborts, in.Rid)
			if e.abortErr != 0 {
				w.WriteHeader(e.abortErr)
			}
		})
	case "/v1/models":
		_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"m","extra":1.0}]}`)
	case "/admit_direct_append":
		e.set(func() {})
		if e.native == nil {
			http.NotFound(w, r)
			return
		}
		e.native(w, r)
	default:
		e.serveTurn(w, r)
	}
}

func (e *engine) serveTurn(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	body := map[string]any{}
	if err == nil {
		err = json.Unmarshal(raw, &body)
	}
	if err != nil {
		e.t.Errorf("engine got %q: %v", raw, err)
		return
	}
	if _, ok := body["rid"]; !ok && body["do_local_prefill"] == true {
		w.WriteHeader(e.probe(r.URL.Path))
		return
	}
	e.note(func() { e.requests = append(e.requests, seen{r.URL.Path, r.Header.Clone(), raw, body}) })
	e.mu.Lock()
	turn := e.turn
	e.mu.Unlock()
	turn(w, r, body)
}

func (e *engine) json(w http.ResponseWriter, f func() any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	_ = json.NewEncoder(w).Encode(f())
}

// note records something and wakes who waits for it.
func (e *engine) note(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f()
	close(e.changed)
	e.changed = make(chan struct{})
}

// until waits until ok, looking after each recorded event.
func (e *engine) until(what string, ok func() bool) {
	e.t.Helper()
	deadline := time.After(patience)
	for {
		e.mu.Lock()
		done, changed := ok(), e.changed
		e.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			e.t.Fatalf("engine: no %s", what)
		}
	}
}

// last is the newest turn.
func (e *engine) last() seen {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.requests) == 0 {
		e.t.Fatal("the engine got no turn")
	}
	return e.requests[len(e.requests)-1]
}

func (e *engine) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.requests)
}

// usage is what answerChat reports.
const usage = `{"prompt_tokens":120,"total_tokens":140,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":64}}`

// event is one server-sent event.
func event(data string) string { return "data: " + data + "\n\n" }

// chunk is one chat chunk.
func chunk(content string) string {
	return event(`{"id":"r","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"` + content +
		`"},"finish_reason":null}]}`)
}

var (
	finishEvent = event(`{"id":"r","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`)
	usageEvent  = event(`{"id":"r","choices":[],"usage":` + usage + `}`)
	doneEvent   = event("[DONE]")
	wholeAnswer = `{"id":"r","choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],"usage":` + usage + `}`
)

// answerChat is the ordinary engine: two chunks, usage if asked, the end.
func answerChat(w http.ResponseWriter, _ *http.Request, body map[string]any) {
	if body["stream"] != true {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, wholeAnswer)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	for _, s := range []string{chunk("he"), chunk("llo"), finishEvent} {
		send(w, s)
	}
	if o, ok := body["stream_options"].(map[string]any); ok && o["include_usage"] == true {
		send(w, usageEvent)
	}
	send(w, doneEvent)
}

func send(w http.ResponseWriter, s string) {
	_, _ = io.WriteString(w, s)
	_ = http.NewResponseController(w).Flush()
}

// rig is a sidecar beside a scripted engine, on real sockets.
type rig struct {
	t    *testing.T
	e    *engine
	s    *Sidecar
	base string
	hc   *http.Client
	ctl  *admission.Client
	stop func() // ends the sidecar, journal written
}

func newRig(t *testing.T, change ...func(*Config)) *rig {
	t.Helper()
	return startRig(t, newEngine(t), change...)
}

func startRig(t *testing.T, e *engine, change ...func(*Config)) *rig {
	t.Helper()
	cfg := Config{
		Worker: "uid-1", Pod: "decode-0", Role: fleet.Decode, DirectPath: kvc.ConditionalAggregation,
		EngineURL: e.url(), EngineKey: "engine-key", PreStopNonce: "n0nce", Poll: 20 * time.Millisecond,
		AbortCap: 300 * time.Millisecond, Registry: prometheus.NewPedanticRegistry(),
	}
	for _, f := range change {
		f(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx) }()
	srv := httptest.NewServer(s.Handler())
	r := &rig{t: t, e: e, s: s, base: srv.URL, hc: srv.Client()}
	r.ctl = &admission.Client{HTTP: r.hc, Tokens: cfg.Tokens}
	r.stop = sync.OnceFunc(func() {
		cancel()
		<-done
		srv.CloseClientConnections()
		srv.Close()
	})
	t.Cleanup(r.stop)
	return r
}

// ready waits until the worker is.
func (r *rig) ready() *rig {
	r.t.Helper()
	r.until("ready", func(s admission.SidecarStatus) bool { return s.Ready })
	return r
}

// until polls the status; the sidecar has no event for everything.
func (r *rig) until(what string, ok func(admission.SidecarStatus) bool) admission.SidecarStatus {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		s := r.s.status()
		if ok(s) {
			return s
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("sidecar not %s: %+v", what, s)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// quiet waits until every gauge that a turn raises is back at 0 (R56).
func (r *rig) quiet() admission.SidecarStatus {
	r.t.Helper()
	s := r.until("quiet", func(s admission.SidecarStatus) bool { return s.InFlight == 0 && s.Reserved == 0 && s.Locked == 0 })
	if c := r.s.book.counts(); c.leases != 0 || c.queued != 0 {
		r.t.Errorf("leases %d, queued %d; want none", c.leases, c.queued)
	}
	return s
}

// attempts are distinct per call.
var attempts = func() func() string {
	var mu sync.Mutex
	n := 0
	return func() string {
		mu.Lock()
		defer mu.Unlock()
		n++
		return fmt.Sprintf("%032x", n)
	}
}()

// ask is a fused turn of a session.
func ask(session kvc.SessionKey, turn int) admission.Turn {
	return admission.Turn{
		Leg: admission.LegDecode, Attempt: attempts(), Admit: admission.AdmitAsk, Session: session, Lineage: session,
		Turn: turn, OutputTokens: 100, Bootstrap: &admission.Bootstrap{Host: "10.0.0.7", Port: 8998, Room: 42},
	}
}

const session = kvc.SessionKey("00000000000000aa")

// chat is a conversation's body after some turns.
func chat(turns int, stream bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"model":"m","stream":%t,"seed":9007199254740993,"temperature":1.0,"messages":[`, stream)
	fmt.Fprintf(&b, `{"role":"system","content":%q}`, strings.Repeat("be kind ", 400))
	for i := range turns {
		fmt.Fprintf(&b, `,{"role":"assistant","content":%q}`, strings.Repeat(fmt.Sprintf("answer %d ", i), 30))
		fmt.Fprintf(&b, `,{"role":"user","content":%q}`, strings.Repeat(fmt.Sprintf("question %d ", i), 30))
	}
	return b.String() + "]}"
}

// answer is what the router gets.
type answer struct {
	early  []http.Header // of 103s
	status int
	header http.Header
	body   string
	err    error // of reading the body
}

func (a answer) verdict(t *testing.T) admission.Verdict {
	t.Helper()
	text := a.body
	if len(a.early) > 0 {
		text = a.early[0].Get(admission.HeaderVerdict)
	}
	var v admission.Verdict
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("verdict %q: %v", text, err)
	}
	return v
}

// send posts a turn and reads the whole answer.
func (r *rig) send(ctx context.Context, in admission.Turn, path, body string, change ...func(*http.Request)) answer {
	r.t.Helper()
	resp, a := r.open(ctx, in, path, body, change...)
	if resp == nil {
		return a
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	a.body, a.err = string(b), err
	return a
}

// open posts a turn and returns at its headers.
func (r *rig) open(
	ctx context.Context, in admission.Turn, path, body string, change ...func(*http.Request),
) (*http.Response, answer) {
	r.t.Helper()
	var a answer
	var mu sync.Mutex // a 103 may still come when the caller has left
	var early []http.Header
	got1xx := func(code int, h textproto.MIMEHeader) error {
		mu.Lock()
		defer mu.Unlock()
		if code == http.StatusEarlyHints {
			early = append(early, http.Header(h))
		}
		return nil
	}
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: got1xx})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.base+path, bytes.NewReader([]byte(body)))
	if err != nil {
		r.t.Fatal(err)
	}
	in.Write(req.Header)
	req.Header.Set("Content-Type", "application/json")
	r.ctl.Tokens.Authorize(req.Header)
	for _, f := range change {
		f(req)
	}
	resp, err := r.hc.Do(req)
	if err != nil {
		a.err = err
		return nil, a
	}
	mu.Lock()
	defer mu.Unlock()
	a.status, a.header, a.early = resp.StatusCode, resp.Header, early
	return resp, a
}

const chatPath = "/v1/chat/completions"

// metric reads one series' value, 0 when absent.
func (r *rig) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.s.cfg.Registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	total := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			match := true
			for i := 0; i+1 < len(labels); i += 2 {
				ok := false
				for _, l := range m.GetLabel() {
					ok = ok || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}
				match = match && ok
			}
			if match {
				total += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return total
}

func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// url is where the engine listens; "" for one that stands for an emulator.
func (e *engine) url() string {
	if e.srv == nil {
		return ""
	}
	return e.srv.URL
}
