package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/session"
)

func (p *pool) get(base, path string) answer {
	p.t.Helper()
	resp, err := p.client.Get(base + path)
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, b, err}
}

func decode[T any](t *testing.T, a answer) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(a.body, &v); err != nil {
		t.Fatalf("%v in %d %s", err, a.code, a.body)
	}
	return v
}

// R117, R116, R69: only the listed routes exist on the data port; everything
// else is an OpenAI error that no worker hears of.
func TestUnknownRoutesAreRefused(t *testing.T) {
	p, d := unified(t, testOptions())
	for _, path := range []string{"/flush_cache", "/abort_request", "/update_weights_from_disk", "/pause_generation",
		"/start_profile", "/get_server_info", "/server_info", "/pd_role_switch", "/metrics", "/debug/pprof/",
		"/kvc/v1/status", "/kvc/v1/explain", "/admit_direct_append", "/v1/responses", "/v1/chat/completions/", "/",
		"//v1/chat/completions", "/v1//chat/completions", "/v1/./models", "/v1/models/..", "/v1/models/../../flush_cache"} {
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			req, err := http.NewRequest(method, p.srv.URL+path, strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			resp, err := p.client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			answer{resp.StatusCode, resp.Header, b, nil}.wantError(t, 404, "unknown_route")
		}
	}
	a := p.get(p.srv.URL, "/v1/chat/completions")
	a.wantError(t, 405, "POST")
	if a.header.Get("Allow") != "POST" {
		t.Errorf("Allow %q", a.header.Get("Allow"))
	}
	if n := len(d.seen()); n != 0 {
		t.Errorf("%d requests reached the worker", n)
	}
}

// R123: the served name and its aliases.
func TestModels(t *testing.T) {
	p, _ := unified(t, testOptions())
	list := decode[struct {
		Object string
		Data   []struct{ ID, Object, Root string }
	}](t, p.get(p.srv.URL, "/v1/models"))
	if list.Object != "list" || len(list.Data) != 2 || list.Data[0].ID != "m" || list.Data[1].ID != "alias" || list.Data[1].Root != "m" {
		t.Errorf("models %+v", list)
	}
	if a := p.get(p.srv.URL, "/v1/models/alias"); a.code != 200 {
		t.Errorf("%d %s", a.code, a.body)
	}
	p.get(p.srv.URL, "/v1/models/a/b").wantError(t, 404, "model_not_found", `a/b`)
}

// Readiness says what is missing; liveness does not.
func TestReadiness(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	want := func(part string) {
		t.Helper()
		if why := strings.Join(p.unready(), "; "); !strings.Contains(why, part) || part == "" && why != "" {
			t.Errorf("unready %q, want %q", why, part)
		}
	}
	want("the fleet was not read yet")
	f := fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "n", Name: "p", Model: "m"}}
	p.Apply(&f)
	want("the fleet has no decode worker")
	d := newMockWorker(t, "decode-0", fleet.Decode)
	fw := d.fleetWorker()
	fw.URL = "http://127.0.0.1:1" // nobody there
	f2 := f
	f2.Workers = []fleet.Worker{fw}
	p.Apply(&f2)
	want("no decode worker has answered yet")
	f3 := f
	f3.Workers = []fleet.Worker{d.fleetWorker()}
	p.Apply(&f3)
	for end := time.Now().Add(patience); len(p.unready()) > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	want("")
	p.Shutdown()
	want("shutting down")
}

func TestReadyRoutes(t *testing.T) {
	p, _ := unified(t, testOptions())
	for _, base := range []string{p.srv.URL, p.admin.URL} {
		if a := p.get(base, "/readyz"); a.code != 200 {
			t.Errorf("%d %s", a.code, a.body)
		}
		if a := p.get(base, "/healthz"); a.code != 200 {
			t.Errorf("%d %s", a.code, a.body)
		}
	}
	p.proxy.Shutdown()
	if a := p.get(p.srv.URL, "/readyz"); a.code != 503 || !strings.Contains(string(a.body), "shutting down") {
		t.Errorf("%d %s", a.code, a.body)
	}
}

// The status has what the manager, the bench and the live table read.
func TestStatus(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	d.hold(key("s"))
	p.eventually("seq followed", func() bool { return p.proxy.Status().Workers[0].Seq == 1 })
	if a := p.chat("s", false); a.code != 200 {
		t.Fatal(a.code)
	}
	st := decode[admission.RouterStatus](t, p.get(p.admin.URL, admission.PathStatus))
	if st.Wire != 1 || !st.Ready || st.Router == "" || st.StartedMS == 0 || st.Modes["direct"] != 1 || st.Sessions != 1 {
		t.Errorf("status %+v", st)
	}
	if len(st.Workers) != 2 {
		t.Fatalf("%d workers", len(st.Workers))
	}
	w := st.Workers[0]
	if w.Pod != "decode-0" || w.Worker != d.id || w.Role != "decode" || !w.Trusted || w.Breaker != "closed" ||
		w.State != "Active" || w.CapacityTokens != 100000 || w.Sessions != 1 {
		t.Errorf("worker %+v", w)
	}
}

// A turn's story is told by its request id; an unknown one says what to do.
func TestExplainATurn(t *testing.T) {
	p, _, _ := onePool(t, testOptions())
	a := p.chat("s", true)
	id := a.header.Get("X-Request-Id")
	var d Decision
	p.eventually("turn ended", func() bool {
		d = decode[Decision](t, p.get(p.admin.URL, admission.PathExplain+"?request_id="+id))
		return d.Outcome != ""
	})
	if d.Mode != "seed" || d.Worker != "decode-0" || d.Outcome != "ok" || d.Attempts != 1 || d.Session != session.Key("ns", "pool", "s") ||
		d.Usage == nil || d.Usage.Prompt != 30 || d.Blocks == 0 {
		t.Errorf("decision %+v", d)
	}
	var what []string
	for _, e := range d.Events {
		what = append(what, e.What+" "+e.Worker+" "+e.Way+" "+e.Result+" "+e.Detail)
	}
	if got := strings.Join(what, "; "); got != "ask decode-0 rpc admitted seed; run decode-0   seed" {
		t.Errorf("events %q", got)
	}
	if strings.Contains(fmt.Sprintf("%+v", d), "and so on") {
		t.Error("the story holds prompt text")
	}
	p.get(p.admin.URL, admission.PathExplain+"?request_id=none").wantError(t, 404, "unknown_request", "POST")
}

// A request body is explained without being dispatched.
func TestExplainARequest(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	p := newPool(t, testOptions(), d1, d2, newMockWorker(t, "prefill-0", fleet.Prefill))
	d2.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	req := p.request(context.Background(), admission.PathExplain, []byte(chatBody("s", false)), "x-session-id", "s")
	u := *req.URL
	u.Host = strings.TrimPrefix(p.admin.URL, "http://")
	req.URL, req.Host = &u, u.Host
	resp, err := p.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	x := decode[Explanation](t, answer{code: resp.StatusCode, body: b})
	if x.HomeName != "decode-1" || x.Source != "header:x-session-id" || len(x.Decode) != 2 || len(x.Prefill) != 1 || x.Input == 0 {
		t.Errorf("explanation %s", b)
	}
	for _, c := range x.Decode {
		if c.Why == "" || x.Names[string(c.Worker)] == "" {
			t.Errorf("choice without a reason or a name: %+v", c)
		}
	}
	if n := len(d1.seen()) + len(d2.seen()) + len(d1.questions()) + len(d2.questions()); n != 0 {
		t.Errorf("%d messages reached workers", n)
	}
	bad, err := p.client.Post(p.admin.URL+admission.PathExplain, "application/json", strings.NewReader("{"))
	if err != nil || bad.StatusCode != http.StatusBadRequest {
		t.Errorf("a broken body: %v %v", bad.StatusCode, err)
	}
	bad.Body.Close()
}

// R83, R84, Q18: where a turn's session comes from.
func TestSessionSources(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	want := key("abc")
	for _, h := range []string{"X-Session-Id", "x_session_id", "session-id", "SESSION_ID", "x-claude-code-session-id"} {
		n := len(d.seen())
		req := p.request(context.Background(), "/v1/chat/completions", []byte(chatBody(h, false)))
		req.Header[h] = []string{"abc"}
		resp, err := p.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if got := string(d.leg(n).turn.Session); got != want {
			t.Errorf("%s: session %q, want %q", h, got, want)
		}
	}
	n := len(d.seen())
	p.post("/v1/chat/completions", `{"model":"m","prompt_cache_key":"abc","messages":[]}`)
	if got := string(d.leg(n).turn.Session); got != want {
		t.Errorf("body field: session %q, want %q", got, want)
	}
	// A request id is never a session (R84): two of them give two sessions.
	n = len(d.seen())
	p.post("/v1/chat/completions", chatBody("one", false), "X-Request-Id", "same")
	p.post("/v1/chat/completions", chatBody("two", false), "X-Request-Id", "same")
	if a, b := d.leg(n).turn.Session, d.leg(n+1).turn.Session; a == b || a == "" {
		t.Errorf("sessions %q and %q, want two derived ones", a, b)
	}
	// A request without an id continues the conversation it extends.
	first := `{"role":"user","content":"` + longText("hello") + `"}`
	p.post("/v1/chat/completions", `{"model":"m","messages":[`+first+`]}`)
	p.post("/v1/chat/completions", `{"model":"m","messages":[`+first+`,{"role":"assistant","content":"ok"},`+
		`{"role":"user","content":"more"}]}`)
	a, b := d.leg(n+2).turn, d.leg(n+3).turn
	if a.Session != b.Session || b.Turn != 1 {
		t.Errorf("sessions %q, %q at turn %d: want the same at turn 1", a.Session, b.Session, b.Turn)
	}
	if got := p.sum("kvc_router_session_source_total", "source=continuation"); got != 1 {
		t.Errorf("continuations counted %v, want 1", got)
	}
}

// A child session is of its parent's lineage.
func TestParentSessionsShareALineage(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	p.chat("root", false)
	p.post("/v1/chat/completions", chatBody("child", false), "x-session-id", "child", "x-parent-session-id", "root")
	p.post("/v1/chat/completions", chatBody("grandchild", false), "x-session-id", "grandchild", "x-parent-session-id", "child")
	for i := range 3 {
		if got := string(d.leg(i).turn.Lineage); got != key("root") {
			t.Errorf("leg %d: lineage %q, want the root's", i, got)
		}
	}
}

// R86: the pin moves on observed success, not on selection.
func TestPinMovesOnSuccessOnly(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	d1.path, d2.path = "Unified", "Unified"
	d1.feed.Restart(d1.hello(), 0)
	d2.feed.Restart(d2.hello(), 0)
	p := newPool(t, testOptions(), d1, d2)
	for _, d := range []*mockWorker{d1, d2} {
		d.set(func() { d.play = status(400, `{"error":{"message":"no","type":"x"}}`) })
	}
	p.chat("s", true)
	if home, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); ok {
		t.Errorf("a failed turn pinned the session to %s", home)
	}
	for _, d := range []*mockWorker{d1, d2} {
		d.set(func() { d.play = serveChat("ok") })
	}
	a := p.chat("s", true)
	home, ok := p.proxy.state.Home(session.Key("ns", "pool", "s"))
	if !ok || p.proxy.worker(home).Name != a.header.Get(admission.HeaderWorker) {
		t.Errorf("after a served turn: home %s %t", home, ok)
	}
}

// R111: after Shutdown new turns are refused and running ones finish.
func TestShutdownLetsStreamsFinish(t *testing.T) {
	p, d := unified(t, testOptions())
	finish := make(chan struct{})
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			l.send(chatEvents("x")[0])
			<-finish
			for _, e := range chatEvents("x")[1:] {
				l.send(e)
			}
		}
	})
	got := make(chan answer, 1)
	go func() { got <- p.chat("s", true) }()
	recvLeg(t, d.arrived, "leg")
	p.proxy.Shutdown()
	p.chat("t", true).wantError(t, 503, "shutting down")
	close(finish)
	if a := <-got; a.err != nil || string(a.body) != strings.Join(chatEvents("x"), "") {
		t.Errorf("the running stream was cut: %v %s", a.err, a.body)
	}
}

// T5: a client that stops reading does not hold the worker for ever.
func TestSlowReaderIsCutOff(t *testing.T) {
	o := testOptions()
	o.IdleTimeout = 300 * time.Millisecond
	p, d := unified(t, o)
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			for l.r.Context().Err() == nil {
				l.send(chatEvents(strings.Repeat("x", 32<<10))[1])
			}
		}
	})
	resp, err := p.client.Do(p.request(t.Context(), "/v1/chat/completions", []byte(chatBody("s", true))))
	if err != nil {
		t.Fatal(err)
	}
	recvLeg(t, d.gone, "cancel of the leg nobody reads")
	resp.Body.Close()
	p.quiet()
	if got := p.sum("kvc_router_turns_total", "outcome=client_cancelled"); got != 1 {
		t.Errorf("outcome client_cancelled counted %v, want 1", got)
	}
}

func TestReconfigure(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	f := routingFile(t, `{"routing":{"preset":"Paper","rejectThreshold":7,"admission":{"timeoutMilliseconds":99}},"session":{"headers":["x-mine"]}}`)
	p.Reconfigure(f, "hash")
	if got := p.state.Params(); got.Preset != "Paper" || got.RejectThreshold != 7 {
		t.Errorf("params %+v", got)
	}
	if p.askTimeout() != 99*time.Millisecond || p.session.Load().Headers[0] != "x-mine" || p.Status().ConfigHash != "hash" {
		t.Errorf("ask timeout %v, session %v, hash %q", p.askTimeout(), p.session.Load(), p.Status().ConfigHash)
	}
	o := testOptions()
	o.Preset = "Corrected"
	o.Override = func(k *kvc.Params) { k.RejectThreshold = 9 }
	q := New(o)
	defer q.Close()
	q.Reconfigure(f, "h")
	if got := q.state.Params(); got.Preset != "Corrected" || got.RejectThreshold != 9 {
		t.Errorf("flags did not win: %s %d", got.Preset, got.RejectThreshold)
	}
}
