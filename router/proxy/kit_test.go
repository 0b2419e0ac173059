package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait for an event that has to come.
const patience = 20 * time.Second

// script says what a worker does with one leg after it has read it.
type script func(*leg)

// leg is one request as a worker received it.
type leg struct {
	w      http.ResponseWriter
	r      *http.Request
	header http.Header
	body   []byte
	turn   admission.Turn
	mode   string // the mode of the verdict that admitted it
}

// mockWorker is a sidecar and its engine in one: real sockets, scripted turns,
// a real feed.
type mockWorker struct {
	t     testing.TB
	name  string
	id    string
	role  fleet.Role
	srv   *httptest.Server
	feed  *feed.Server
	stop  context.CancelFunc
	ended chan struct{}

	mu       sync.Mutex
	legs     []*leg
	asks     []admission.Question
	released []string
	verdict  func(admission.Turn) admission.Verdict // of a fused question
	answer   func(http.ResponseWriter, admission.Question)
	play     script
	noHint   bool
	resident map[string]int // tokens by session: what Direct is decided by
	path     string         // direct path
	gone     chan *leg      // legs whose request was cancelled
	arrived  chan *leg
}

func newMockWorker(t testing.TB, name string, role fleet.Role) *mockWorker {
	t.Helper()
	w := &mockWorker{t: t, name: name, id: "uid-" + name + "-" + newAttemptID()[:6], role: role,
		resident: map[string]int{}, path: "ConditionalAggregation", ended: make(chan struct{}),
		gone: make(chan *leg, 1024), arrived: make(chan *leg, 1024)}
	w.play = serveChat("ok")
	w.answer = func(rw http.ResponseWriter, q admission.Question) {
		admission.WriteJSON(rw, 200, "application/json", w.admit(q.Session, q.Turn))
	}
	w.verdict = func(tn admission.Turn) admission.Verdict { return w.admit(string(tn.Session), tn.Turn) }
	w.start("")
	return w
}

// start listens; addr "" means any port.
func (w *mockWorker) start(addr string) {
	w.feed = feed.NewServer(feed.ServerConfig{
		Hello:    w.hello(),
		Snapshot: w.snapshot,
		Load:     func() feed.Load { return feed.Load{} },
	})
	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	w.ended = make(chan struct{})
	go func(f *feed.Server, done chan struct{}) {
		defer close(done)
		_ = f.Run(ctx)
	}(w.feed, w.ended)
	mux := http.NewServeMux()
	mux.Handle("GET "+admission.PathFeed, w.feed)
	mux.HandleFunc("GET "+admission.PathHint, w.hint)
	mux.HandleFunc("POST "+admission.PathAdmit, w.ask)
	mux.HandleFunc("DELETE "+admission.PathLeases+"/{id}", func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.released = append(w.released, r.PathValue("id"))
		w.mu.Unlock()
		rw.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("/", w.serve)
	srv := httptest.NewUnstartedServer(mux)
	if addr != "" {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			w.t.Fatal(err)
		}
		srv.Listener.Close()
		srv.Listener = l
	}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	srv.Start()
	w.srv = srv
	w.t.Cleanup(w.close)
}

func (w *mockWorker) epoch() string { return w.id + "/1" }

func (w *mockWorker) hello() feed.Hello {
	return feed.Hello{Wire: 1, Format: "kvc-b96-v1", Worker: w.id, Epoch: w.epoch(), Role: string(w.role),
		Model: "m", CapacityTokens: 100000, PageSize: 1,
		DirectPath: map[string]string{"chat": w.path, "completions": w.path, "generate": w.path}}
}

func (w *mockWorker) snapshot() (kvc.Snapshot, uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s kvc.Snapshot
	for key, n := range w.resident {
		s.Sessions = append(s.Sessions, kvc.SessionInfo{Key: kvc.SessionKey(key), Lineage: kvc.SessionKey(key),
			ResidentTokens: n, Blocks: n / 24, LastUse: time.Now()})
	}
	return s, w.feed.Seq()
}

func (w *mockWorker) close() {
	w.stop()
	<-w.ended
	w.srv.CloseClientConnections()
	w.srv.Close()
}

// kill ends the worker as kill -9 does: every connection is reset.
func (w *mockWorker) kill() {
	_ = w.srv.Listener.Close()
	w.srv.CloseClientConnections()
}

func (w *mockWorker) fleetWorker() fleet.Worker {
	fw := fleet.Worker{Name: w.name, ID: kvc.WorkerID(w.id), Role: w.role, URL: w.srv.URL, State: fleet.Active}
	if w.role == fleet.Prefill {
		fw.Bootstrap = &fleet.Bootstrap{Host: "127.0.0.1", Port: 8998}
	}
	return fw
}

// admit is a sidecar with room: direct where resident, else seed or reseed.
func (w *mockWorker) admit(session string, turn int) admission.Verdict {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := admission.Verdict{CanAdmit: true, Mode: "seed", Worker: w.id, Epoch: w.epoch(), State: "Active",
		Lease: &admission.Lease{ID: newAttemptID(), Tokens: 10, TTLMS: 5000}}
	switch {
	case session != "" && w.resident[session] > 0:
		v.Mode, v.ResidentTokens = "direct", w.resident[session]
	case turn > 0:
		v.Mode = "reseed"
	}
	return v
}

func refuseWith(reason string) admission.Verdict {
	return admission.Verdict{Reason: reason, State: "Active"}
}

func (w *mockWorker) hint(rw http.ResponseWriter, _ *http.Request) {
	w.mu.Lock()
	none := w.noHint
	w.mu.Unlock()
	if !none {
		rw.Header().Set(admission.HeaderHint, "1")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Del(admission.HeaderHint)
	}
	rw.WriteHeader(http.StatusNoContent)
}

func (w *mockWorker) ask(rw http.ResponseWriter, r *http.Request) {
	var q admission.Question
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		w.t.Errorf("question: %v", err)
	}
	w.mu.Lock()
	w.asks = append(w.asks, q)
	answer := w.answer
	w.mu.Unlock()
	answer(rw, q)
}

func (w *mockWorker) serve(rw http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.gone <- &leg{r: r}
		return
	}
	turn, err := admission.ParseTurn(r.Header)
	if err != nil {
		w.t.Errorf("%s got a turn with bad headers: %v", w.name, err)
	}
	l := &leg{w: rw, r: r, header: r.Header.Clone(), body: body, turn: turn}
	w.mu.Lock()
	w.legs = append(w.legs, l)
	play, verdict := w.play, w.verdict
	w.mu.Unlock()
	select {
	case w.arrived <- l:
	default:
	}
	defer func() {
		if r.Context().Err() != nil {
			select {
			case w.gone <- l:
			default:
			}
		}
	}()
	if turn.Admit == admission.AdmitAsk && !w.fused(l, verdict(turn)) {
		return
	}
	rw.Header().Set(admission.HeaderOrigin, admission.OriginEngine)
	play(l)
}

// fused answers a question that came with its turn.
func (w *mockWorker) fused(l *leg, v admission.Verdict) bool {
	b, err := json.Marshal(v)
	if err != nil {
		w.t.Error(err)
	}
	if !v.CanAdmit {
		l.w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
		l.w.Header().Set("Content-Type", admission.ContentTypeVerdict)
		l.w.WriteHeader(http.StatusConflict)
		_, _ = l.w.Write(b)
		return false
	}
	l.mode = v.Mode
	l.w.Header().Set(admission.HeaderVerdict, string(b))
	l.w.Header().Set(admission.HeaderLease, v.Lease.ID)
	l.w.WriteHeader(http.StatusEarlyHints)
	l.w.Header().Del(admission.HeaderVerdict)
	l.w.Header().Del(admission.HeaderLease)
	return true
}

func (w *mockWorker) set(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// hold makes a session resident and tells the followers.
func (w *mockWorker) hold(session string) {
	w.set(func() { w.resident[session] = 1000 })
	w.feed.Publish(kvc.Change{Kind: kvc.ChangeSession, Session: kvc.SessionInfo{
		Key: kvc.SessionKey(session), Lineage: kvc.SessionKey(session),
		ResidentTokens: 1000, Blocks: 40, LastUse: time.Now()}})
}

func (w *mockWorker) seen() []*leg {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*leg(nil), w.legs...)
}

// leg is the i-th leg the worker got; it waits for it, because a decode worker
// of this kit answers without waiting for the prefill leg.
func (w *mockWorker) leg(i int) *leg {
	w.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if all := w.seen(); len(all) > i {
			return all[i]
		}
		if time.Now().After(end) {
			w.t.Fatalf("%s never got leg %d", w.name, i)
		}
	}
}

func (w *mockWorker) questions() []admission.Question {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]admission.Question(nil), w.asks...)
}

// Scripts.

// serveChat answers like an engine: a stream or a JSON object.
func serveChat(text string) script {
	return func(l *leg) {
		if l.turn.Leg == admission.LegPrefill {
			writeWhole(l, "x", "length")
			return
		}
		if bytes.Contains(l.body, []byte(`"stream":true`)) || bytes.Contains(l.body, []byte(`"stream": true`)) {
			l.startStream()
			for _, e := range chatEvents(text) {
				l.send(e)
			}
			return
		}
		writeWhole(l, text, "stop")
	}
}

func chatEvents(text string) []string {
	return []string{
		`data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n",
		`data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"` + text + `"},"finish_reason":null}]}` + "\n\n",
		`data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n",
		`data: {"id":"x","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":30,"completion_tokens":2,"total_tokens":32,"prompt_tokens_details":{"cached_tokens":20}}}` + "\n\n",
		"data: [DONE]\n\n",
	}
}

func writeWhole(l *leg, text, finish string) {
	l.w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(l.w, `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":%q},`+
		`"finish_reason":%q}],"usage":{"prompt_tokens":30,"completion_tokens":2,"total_tokens":32,"prompt_tokens_details":{"cached_tokens":20}}}`, text, finish)
}

func (l *leg) startStream() {
	l.w.Header().Set("Content-Type", "text/event-stream")
	l.w.WriteHeader(200)
	l.flush()
}

func (l *leg) send(s string) {
	_, _ = io.WriteString(l.w, s)
	l.flush()
}

func (l *leg) flush() { _ = http.NewResponseController(l.w).Flush() }

// reset breaks the connection with a RST.
func (l *leg) reset() {
	c, _, err := http.NewResponseController(l.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tc, ok := c.(*net.TCPConn); ok {
		_ = tc.SetLinger(0)
	}
	_ = c.Close()
}

// hang waits for the cancel.
func (l *leg) hang() { <-l.r.Context().Done() }

func status(code int, body string) script {
	return func(l *leg) {
		l.w.Header().Set("Content-Type", "application/json")
		l.w.WriteHeader(code)
		_, _ = io.WriteString(l.w, body)
	}
}

// pool is a router with its workers.
type pool struct {
	t       testing.TB
	proxy   *Proxy
	srv     *httptest.Server
	admin   *httptest.Server
	file    fleet.File
	metrics *telemetry.Router
	client  *http.Client
}

func testOptions() Options {
	p := kvc.Corrected()
	return Options{Params: p, AskTimeout: 2 * time.Second, IdleTimeout: 30 * time.Second, Metrics: telemetry.NewRouter(),
		Log: testLog()}
}

func testLog() *slog.Logger {
	if os.Getenv("KVC_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}

func newPool(t testing.TB, o Options, ws ...*mockWorker) *pool {
	t.Helper()
	p := newStartingPool(t, o, ws...)
	p.settled()
	return p
}

// newStartingPool is a pool whose router may not have read its feeds yet.
func newStartingPool(t testing.TB, o Options, ws ...*mockWorker) *pool {
	t.Helper()
	p := &pool{t: t, proxy: New(o), metrics: o.Metrics,
		file:   fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "ns", Name: "pool", Model: "m", Aliases: []string{"alias"}}},
		client: &http.Client{Transport: &http.Transport{DisableCompression: true}}}
	for _, w := range ws {
		p.file.Workers = append(p.file.Workers, w.fleetWorker())
	}
	p.srv = httptest.NewUnstartedServer(p.proxy.Handler())
	p.srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)
	p.srv.Start()
	p.admin = httptest.NewServer(p.proxy.Admin())
	t.Cleanup(func() {
		p.client.CloseIdleConnections()
		p.srv.Close()
		p.admin.Close()
		p.quiet()
		p.proxy.Close()
	})
	p.apply()
	return p
}

func (p *pool) apply() {
	f := p.file
	f.Workers = append([]fleet.Worker(nil), p.file.Workers...)
	p.proxy.Apply(&f)
}

// settled waits until every worker's feed is trusted and its hint probed.
func (p *pool) settled() {
	p.t.Helper()
	p.eventually("feeds trusted and hints probed", func() bool {
		for _, ws := range p.proxy.state.Stats().Workers {
			if w := p.proxy.worker(ws.ID); !ws.Trusted || w != nil && w.Role == fleet.Decode && !w.hints() && !w.skipHint() {
				return false
			}
		}
		return true
	})
}

// skipHint is for workers whose probe is known to fail.
func (w *worker) skipHint() bool { return strings.Contains(w.Name, "nohint") }

func (p *pool) eventually(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("%s did not come true within %v", what, patience)
		}
	}
}

// quiet waits until nothing is in flight: gauges at 0, rooms free (R56, R57).
func (p *pool) quiet() {
	p.t.Helper()
	p.eventually("in-flight gauges at 0", func() bool {
		for _, w := range p.proxy.Status().Workers {
			if w.InFlight != 0 {
				return false
			}
		}
		for _, w := range p.proxy.state.Stats().Workers {
			if w.Inflight != 0 || w.PrefillOutstanding != 0 {
				return false
			}
		}
		p.proxy.rooms.mu.Lock()
		rooms := len(p.proxy.rooms.live)
		p.proxy.rooms.mu.Unlock()
		return rooms == 0 && p.sum("kvc_router_inflight") == 0 && p.sum("kvc_router_requests_inflight") == 0
	})
}

// count is the number of a metric's series with these labels.
func (p *pool) count(name string, want ...string) int { n, _ := p.series(name, want...); return n }

// sum adds up a metric's series whose labels contain all of want ("k=v").
func (p *pool) sum(name string, want ...string) float64 {
	_, total := p.series(name, want...)
	return total
}

func (p *pool) series(name string, want ...string) (n int, total float64) {
	p.t.Helper()
	fams, err := p.metrics.Registry().Gather()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, f := range fams {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			have := map[string]bool{}
			for _, l := range m.GetLabel() {
				have[l.GetName()+"="+l.GetValue()] = true
			}
			for _, w := range want {
				if !have[w] {
					continue series
				}
			}
			n++
			total += m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return n, total
}

// answer is what a client got.
type answer struct {
	code   int
	header http.Header
	body   []byte
	err    error // of reading the body
}

func (p *pool) request(ctx context.Context, path string, body []byte, header ...string) *http.Request {
	p.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.srv.URL+path, bytes.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	return req
}

func (p *pool) post(path, body string, header ...string) answer {
	p.t.Helper()
	resp, err := p.client.Do(p.request(context.Background(), path, []byte(body), header...))
	if err != nil {
		p.t.Fatalf("POST %s: %v", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, b, err}
}

// chat sends a turn of one user message.
func (p *pool) chat(session string, stream bool) answer {
	p.t.Helper()
	return p.post("/v1/chat/completions", chatBody(session, stream), "x-session-id", session)
}

func chatBody(text string, stream bool) string {
	return fmt.Sprintf(`{"model":"m","stream":%t,"messages":[{"role":"user","content":"%s"}]}`, stream, longText(text))
}

// longText is a prompt of several blocks.
func longText(s string) string { return strings.Repeat(s+" and so on; ", 60) }

func (a answer) reason() string { return a.header.Get(admission.HeaderReason) }
func (a answer) mode() string   { return a.header.Get(admission.HeaderMode) }

// wantError checks a router-made or passed error in OpenAI's shape.
func (a answer) wantError(t *testing.T, code int, parts ...string) {
	t.Helper()
	if a.code != code {
		t.Fatalf("status %d, want %d; body %s", a.code, code, a.body)
	}
	var e struct {
		Error *struct {
			Message, Type string
			Param, Code   any
		}
	}
	if err := json.Unmarshal(a.body, &e); err != nil || e.Error == nil || e.Error.Message == "" || e.Error.Type == "" {
		t.Fatalf("body is no OpenAI error object: %s (%v)", a.body, err)
	}
	if ct := a.header.Get("Content-Type"); ct != "application/json" {
		t.Errorf("Content-Type %q, want application/json", ct)
	}
	for _, s := range parts {
		if !strings.Contains(string(a.body), s) {
			t.Errorf("error %s lacks %q", a.body, s)
		}
	}
	for _, s := range []string{"127.0.0.1", "http://", "dial tcp"} {
		if a.reason() != "" && strings.Contains(string(a.body), s) {
			t.Errorf("error %s shows an address", a.body)
		}
	}
}

func recvLeg(t *testing.T, c <-chan *leg, what string) *leg {
	t.Helper()
	select {
	case l := <-c:
		return l
	case <-time.After(patience):
		t.Fatalf("no %s within %v", what, patience)
		return nil
	}
}

func routingFile(t *testing.T, s string) *v1alpha1.RoutingFile {
	t.Helper()
	f, err := v1alpha1.ParseRoutingFile([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return f
}
