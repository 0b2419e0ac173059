package sidecar

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
)

func getJSON(t *testing.T, r *rig, path string, into any) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.base+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.ctl.Tokens.Authorize(req.Header)
	resp, err := r.hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s = %d, %v", path, resp.StatusCode, err)
	}
}

// R33, R38: without a token nothing happens; with one, the engine sees its own
// key and never the pool's.
func TestUnauthorizedHasNoSideEffect(t *testing.T) {
	tokens := admission.StaticTokens("pool-token")
	r := newRig(t, func(c *Config) { c.Tokens = tokens }).ready()
	seq := r.s.status().Seq
	paths := []struct{ method, path string }{
		{"POST", chatPath}, {"POST", "/v1/completions"}, {"POST", "/generate"}, {"POST", admission.PathAdmit},
		{"GET", admission.PathFeed}, {"GET", admission.PathStatus}, {"GET", admission.PathSessions},
		{"GET", admission.PathHint}, {"PUT", admission.PathState}, {"DELETE", admission.PathSessions + "/x"},
		{"DELETE", admission.PathLeases + "/x"}, {"GET", "/v1/models"}, {"GET", "/whatever"},
	}
	for _, p := range paths {
		for _, key := range []string{"", "Bearer client-key"} {
			req, err := http.NewRequestWithContext(t.Context(), p.method, r.base+p.path, strings.NewReader(`{"state":"Draining"}`))
			if err != nil {
				t.Fatal(err)
			}
			in := ask(session, 0)
			in.Write(req.Header)
			req.Header.Set("Authorization", key)
			resp, err := r.hc.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != http.StatusUnauthorized || resp.Header.Get(admission.HeaderOrigin) != "sidecar" {
				t.Errorf("%s %s with %q = %d, want 401", p.method, p.path, key, resp.StatusCode)
			}
		}
	}
	if s := r.s.status(); s.State != "Active" || s.Seq != seq || s.InFlight != 0 || r.e.count() != 0 {
		t.Errorf("a 401 had an effect: %+v", s)
	}
	if got := r.metric("kvc_sidecar_unauthorized_total"); got != float64(2*len(paths)) {
		t.Errorf("unauthorized = %v, want %d", got, 2*len(paths))
	}
	for _, open := range []string{"/healthz", "/readyz", "/metrics"} {
		resp, err := r.hc.Get(r.base + open)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("GET %s without a token = %d, want 200", open, resp.StatusCode)
		}
	}
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false)); a.status != 200 {
		t.Fatalf("with the token: %d %s", a.status, a.body)
	}
	if got := r.e.last().header.Get("Authorization"); got != "Bearer engine-key" {
		t.Errorf("the engine saw Authorization %q, want its own key", got)
	}
	r.quiet()
}

func TestNoEngineKeyStripsAuthorization(t *testing.T) {
	r := newRig(t, func(c *Config) { c.EngineKey = "" }).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false), func(req *http.Request) {
		req.Header.Set("Authorization", "Bearer client-key")
	})
	if got, ok := r.e.last().header["Authorization"]; ok {
		t.Errorf("the client's key leaked: %v (R38)", got)
	}
}

// R35, R41, R53: what belongs to us or to one connection crosses in no direction.
func TestHeadersThatDoNotCross(t *testing.T) {
	r := newRig(t).ready()
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			h := w.Header()
			h.Set("Connection", "X-Conn")
			for _, k := range []string{"X-Conn", "Keep-Alive", "Proxy-Authenticate", "Upgrade", "X-Kvc-Verdict", "X-Kvc-Mode"} {
				h.Set(k, "engine")
			}
			h.Set("X-Kept", "engine")
			h.Set("Content-Type", "application/json")
			_, _ = io.WriteString(w, wholeAnswer)
		}
	})
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false), func(req *http.Request) {
		for k, v := range map[string]string{
			"Connection": "x-foo", "X-Foo": "1", "Keep-Alive": "timeout=1", "Te": "trailers", "Proxy-Authorization": "x",
			"Upgrade": "websocket", "X-Kvc-Odd": "1", "X-Override-Bootstrap-Room": "7", "Accept-Encoding": "br",
			"X-Custom": "kept", "Traceparent": "00-1", "User-Agent": "client/1",
		} {
			req.Header.Set(k, v)
		}
	})
	if a.status != 200 || a.header.Get("X-Kept") != "engine" {
		t.Fatalf("got %d %v", a.status, a.header)
	}
	for _, k := range []string{"X-Conn", "Keep-Alive", "Proxy-Authenticate", "Upgrade", "X-Kvc-Verdict", "X-Kvc-Mode"} {
		if got := a.header.Get(k); got != "" {
			t.Errorf("%s: %q crossed from the engine", k, got)
		}
	}
	h := r.e.last().header
	for k := range h {
		if strings.HasPrefix(k, "X-Kvc-") || strings.HasPrefix(k, "X-Override-") {
			t.Errorf("%s reached the engine", k)
		}
	}
	for _, k := range []string{"X-Foo", "Keep-Alive", "Te", "Proxy-Authorization", "Upgrade", "Accept-Encoding"} {
		if got := h.Get(k); got != "" {
			t.Errorf("%s: %q reached the engine", k, got)
		}
	}
	if h.Get("X-Custom") != "kept" || h.Get("Traceparent") != "00-1" || h.Get("User-Agent") != "client/1" {
		t.Errorf("headers lost on the way to the engine: %v", h)
	}
	r.quiet()
}

func TestLargeBodyIs413(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxBodyBytes = 8 << 10 }).ready()
	body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("x", 16<<10) + `"}]}`
	a := r.send(t.Context(), ask(session, 0), chatPath, body)
	var e admission.ErrorBody
	if err := json.Unmarshal([]byte(a.body), &e); err != nil || a.status != 413 || e.Error.Type != "invalid_request_error" ||
		!strings.Contains(e.Error.Message, "8192") {
		t.Errorf("got %d %s (%v), want 413 naming the limit", a.status, a.body, a.err)
	}
	if r.e.count() != 0 {
		t.Error("it reached the engine")
	}
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false)); a.status != 200 {
		t.Errorf("the next turn: %d", a.status)
	}
	r.quiet()
}

func TestBadTurns(t *testing.T) {
	r := newRig(t).ready()
	for name, tc := range map[string]struct {
		in         admission.Turn
		path, body string
		status     int
		says       string
	}{
		"broken JSON":             {ask(session, 0), chatPath, `{"messages":[}`, 400, "JSON object"},
		"an array":                {ask(session, 0), chatPath, `[]`, 400, "JSON object"},
		"no leg":                  {admission.Turn{}, chatPath, chat(0, false), 400, "X-Kvc-Leg"},
		"a prefill leg":           {prefillLeg(), chatPath, chat(0, false), 400, "decode worker"},
		"another route":           {ask(session, 0), "/v1/embeddings", `{}`, 404, "/v1/embeddings"},
		"an engine's admin route": {ask(session, 0), "/flush_cache", `{}`, 404, "/flush_cache"},
	} {
		t.Run(name, func(t *testing.T) {
			a := r.send(t.Context(), tc.in, tc.path, tc.body)
			if a.status != tc.status || !strings.Contains(a.body, tc.says) || a.header.Get(admission.HeaderOrigin) != "sidecar" {
				t.Errorf("got %d %s, want %d saying %s", a.status, a.body, tc.status, tc.says)
			}
		})
	}
	if r.e.count() != 0 {
		t.Error("a bad turn reached the engine")
	}
	r.quiet()
}

func TestTurnWithoutRendezvous(t *testing.T) {
	in := func() admission.Turn { in := ask(session, 0); in.Bootstrap = nil; return in }
	t.Run("runs locally where the engine can", func(t *testing.T) {
		r := newRig(t).ready()
		if a := r.send(t.Context(), in(), chatPath, chat(0, false)); a.status != 200 {
			t.Fatalf("got %d %s", a.status, a.body)
		}
		checkSplice(t, []byte(chat(0, false)), r.e.last().raw, []string{"rid", "do_local_prefill"})
		r.quiet()
	})
	t.Run("is refused where it cannot", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.DirectPath = kvc.DeltaTransfer }).ready()
		if a := r.send(t.Context(), in(), chatPath, chat(0, false)); a.status != 400 || !strings.Contains(a.body, "X-Kvc-Bootstrap") {
			t.Errorf("got %d %s", a.status, a.body)
		}
		r.quiet()
	})
}

func TestHint(t *testing.T) {
	r := newRig(t).ready()
	if ok, err := r.ctl.Hint(t.Context(), r.base); !ok || err != nil {
		t.Errorf("Hint = %t, %v", ok, err)
	}
}

func TestModelsPassThrough(t *testing.T) {
	r := newRig(t).ready()
	resp, err := r.hc.Get(r.base + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || string(b) != `{"object":"list","data":[{"id":"m","extra":1.0}]}` || resp.Header.Get(admission.HeaderOrigin) != "engine" {
		t.Errorf("models %s, %v", b, err)
	}
}

// The feed tells of a turn in an order a follower can rely on: blocks, session,
// and the turn frame when the engine is done.
func TestFeedFollowsTurns(t *testing.T) {
	r := newRig(t).ready()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.base+admission.PathFeed, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := r.hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, feed.MaxLine)
	next := func() feed.Frame {
		t.Helper()
		if !lines.Scan() {
			t.Fatalf("feed ended: %v", lines.Err())
		}
		f, err := feed.Decode(lines.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	hello, ok := next().(*feed.Hello)
	if !ok || hello.Epoch != "uid-1/1999999999500" || hello.CapacityTokens != 100000 || hello.DirectPath["chat"] != "ConditionalAggregation" ||
		hello.Model != "m" || hello.Role != "decode" || hello.Worker != "uid-1" {
		t.Fatalf("hello %+v", hello)
	}
	in := ask(session, 0)
	r.send(t.Context(), in, chatPath, chat(0, false))
	if err := r.ctl.SetState(t.Context(), r.base, admission.State{State: "Draining"}); err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for {
		f := next()
		switch f := f.(type) {
		case *feed.Snap, *feed.Load:
			continue
		case *feed.Turn:
			if f.Attempt != in.Attempt || f.Mode != "seed" || f.Outcome != "ok" || f.PromptTokens != 120 || f.CompletionTokens != 20 {
				t.Errorf("turn frame %+v", f)
			}
			kinds = append(kinds, "turn")
		case *feed.Session:
			kinds = append(kinds, "session")
		case *feed.Blocks:
			kinds = append(kinds, "blocks")
		case *feed.State:
			if f.State != "Draining" {
				t.Errorf("state frame %+v", f)
			}
			if got := strings.Join(kinds, " "); !strings.HasSuffix(got, "blocks session turn") {
				t.Errorf("frames %s, want blocks, session, turn at the end", got)
			}
			return
		}
	}
}

// wire.md §5: totals only grow, and seq with them.
func TestTotalsAreMonotonic(t *testing.T) {
	r := newRig(t).ready()
	var last admission.SidecarStatus
	for i := range 6 {
		var s admission.SidecarStatus
		getJSON(t, r, admission.PathStatus, &s)
		a, b := last.Totals, s.Totals
		if b.PromptTokens < a.PromptTokens || b.GeneratedTokens < a.GeneratedTokens || b.EvictedTokens < a.EvictedTokens ||
			b.PrefillUncachedTokens < a.PrefillUncachedTokens || b.TransferredTokens < a.TransferredTokens || s.Seq < last.Seq {
			t.Fatalf("step %d went back: %+v after %+v", i, s, last)
		}
		last = s
		in := ask(session, i)
		if i == 3 {
			in.Epoch = "other"
		}
		r.send(t.Context(), in, chatPath, chat(i, i%2 == 0))
		r.quiet()
	}
	if last.Totals.Refusals["stale-epoch"] != 1 || last.Totals.PromptTokens == 0 || last.EvictionCostTokens == 0 {
		t.Errorf("status %+v", last)
	}
}

func TestMetricsAreWellFormed(t *testing.T) {
	r := newRig(t).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, true))
	r.quiet()
	problems, err := testutil.GatherAndLint(r.s.cfg.Registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	resp, err := r.hc.Get(r.base + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`kvc_sidecar_turns_total{leg="decode",mode="seed",outcome="ok"} 1`, `kvc_sidecar_verdicts_total{mode="seed",reason=""} 1`,
		"kvc_sidecar_capacity_tokens 100000", "kvc_sidecar_ready 1", "kvc_sidecar_in_flight 0",
	} {
		if !bytes.Contains(b, []byte(want)) {
			t.Errorf("no %s in\n%s", want, b)
		}
	}
}

func TestRoutingFileIsReloaded(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "routing.json")
	write := func(s string) {
		t.Helper()
		tmp := path + ".new"
		if err := os.WriteFile(tmp, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(tmp, path); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"routing":{"maxAppendTokens":8192},"slo_classes":[],"session":{}}`)
	r := newRig(t, func(c *Config) { c.RoutingFile, c.TimeScale = path, 10 }).ready()
	first := r.s.status().ConfigHash
	if first == "" || r.s.params().MaxAppendTokens != 8192 || r.s.params().ProtectIdle != kvc.Corrected().ProtectIdle/10 {
		t.Errorf("hash %q, params %+v", first, r.s.params())
	}
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	r.quiet()
	write(`{"routing":{"maxAppendTokens":1},"slo_classes":[],"session":{}}`)
	second := r.until("reloaded", func(s admission.SidecarStatus) bool { return s.ConfigHash != first }).ConfigHash
	if v := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false)).verdict(t); v.Mode != "reseed" || v.Reason != "large-append" {
		t.Errorf("verdict %+v, want the new τ_append to make the append large", v)
	}
	r.quiet()
	write(`{"routing":{"maxAppendTokenz":9}}`)
	r.until("refused", func(admission.SidecarStatus) bool { return r.metric("kvc_sidecar_reload_errors_total") > 0 })
	if s := r.s.status(); s.ConfigHash != second || r.s.params().MaxAppendTokens != 1 {
		t.Errorf("hash %q, params %+v; want the last good file", s.ConfigHash, r.s.params())
	}
}

func TestNewNamesTheVariable(t *testing.T) {
	good := Config{Worker: "w", Role: "decode", DirectPath: kvc.Unified, EngineURL: "http://127.0.0.1:30000"}
	for want, change := range map[string]func(*Config){
		"KVC_WORKER":      func(c *Config) { c.Worker = "" },
		"KVC_ROLE":        func(c *Config) { c.Role = "router" },
		"KVC_DIRECT_PATH": func(c *Config) { c.DirectPath = "Auto" },
		"KVC_ENGINE_URL":  func(c *Config) { c.EngineURL = "127.0.0.1:30000" },
		"KVC_TIME_SCALE":  func(c *Config) { c.TimeScale = 0.001 },
		"routing file":    func(c *Config) { c.RoutingFile = "/nonexistent/routing.json" },
	} {
		c := good
		change(&c)
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v, want an error naming %s", err, want)
		}
	}
	if _, err := New(good); err != nil {
		t.Errorf("New: %v", err)
	}
}

// T2, R51: a client that breaks off its upload leaves nothing behind.
func TestBrokenUpload(t *testing.T) {
	r := newRig(t).ready()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, "POST "+chatPath+" HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"model\"")
	conn.Close()
	time.Sleep(10 * time.Millisecond)
	if s := r.quiet(); s.InFlight != 0 || r.e.count() != 0 {
		t.Errorf("status %+v", s)
	}
}

func TestClientRID(t *testing.T) {
	for body, want := range map[string]string{
		`{"rid":"mine"}`: "mine", `{"rid":""}`: "", `{"rid":5}`: "", `{"rid":"a\nb"}`: "", `{}`: "",
		`{"rid":"` + strings.Repeat("x", 257) + `"}`: "",
	} {
		tn := &turn{body: mustScan(t, body)}
		if got := tn.clientRID(); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestCostOf(t *testing.T) {
	u := kvc.Usage{PromptTokens: 100, CachedTokens: 64, CompletionTokens: 7}
	boot := &admission.Bootstrap{Host: "h", Port: 1, Room: 1}
	for name, tc := range map[string]struct {
		t    *turn
		want cost
	}{
		"direct prefills what was not cached": {&turn{in: admission.Turn{Leg: admission.LegDecode, Bootstrap: boot},
			path: kvc.ConditionalAggregation, mode: kvc.Direct}, cost{100, 64, 7, 36, 0}},
		"a seed receives the prompt": {&turn{in: admission.Turn{Leg: admission.LegDecode, Bootstrap: boot},
			path: kvc.ConditionalAggregation, mode: kvc.Seed}, cost{100, 64, 7, 0, 100}},
		"a delta receives what was not resident": {&turn{in: admission.Turn{Leg: admission.LegDecode, Bootstrap: boot},
			path: kvc.DeltaTransfer, mode: kvc.Delta, expected: kvc.Expectation{Resident: 90}}, cost{100, 64, 7, 0, 10}},
		"more resident than prompt is none, not negative": {&turn{in: admission.Turn{Leg: admission.LegDecode, Bootstrap: boot},
			path: kvc.DeltaTransfer, mode: kvc.Delta, expected: kvc.Expectation{Resident: 900}}, cost{100, 64, 7, 0, 0}},
		"a prefill leg prefills": {&turn{in: admission.Turn{Leg: admission.LegPrefill, Bootstrap: boot}}, cost{100, 64, 7, 36, 0}},
	} {
		if d := cmp.Diff(tc.want, costOf(tc.t, u), cmp.AllowUnexported(cost{})); d != "" {
			t.Errorf("%s (-want +got):\n%s", name, d)
		}
	}
}
