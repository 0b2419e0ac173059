package sidecar

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

func TestProbeDecidesPerRoute(t *testing.T) {
	cases := map[string]struct {
		refuses func(path string) bool
		want    map[string]string
		ready   bool
	}{
		"an engine with the patch on every surface": {func(string) bool { return false },
			map[string]string{"chat": "ConditionalAggregation", "completions": "ConditionalAggregation", "generate": "ConditionalAggregation"}, true},
		"an engine whose OpenAI surfaces drop the field": {func(p string) bool { return p != "/generate" },
			map[string]string{"chat": "DeltaTransfer", "completions": "DeltaTransfer", "generate": "ConditionalAggregation"}, true},
		"a stock engine": {func(string) bool { return true },
			map[string]string{"chat": "ConditionalAggregation", "completions": "ConditionalAggregation", "generate": "ConditionalAggregation"}, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			e.probe = func(p string) int {
				if tc.refuses(p) {
					return 400
				}
				return 200
			}
			r := startRig(t, e)
			var s admission.SidecarStatus
			if tc.ready {
				s = r.ready().s.status()
			} else {
				s = r.until("refused", func(s admission.SidecarStatus) bool {
					return strings.Contains(s.Reason, "--disaggregation-decode-enable-conditional-agg")
				})
			}
			if s.Ready != tc.ready {
				t.Errorf("ready %t (%s), want %t", s.Ready, s.Reason, tc.ready)
			}
			if d := cmp.Diff(tc.want, s.DirectPath); d != "" {
				t.Errorf("direct_path (-want +got):\n%s", d)
			}
		})
	}
}

// A route without do_local_prefill runs resident turns as deltas, through P.
func TestResidentTurnOnARouteWithoutLocalPrefill(t *testing.T) {
	e := newEngine(t)
	e.probe = func(p string) int { return map[bool]int{true: 200, false: 400}[p == "/generate"] }
	r := startRig(t, e).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	r.quiet()
	a := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false))
	if v := a.verdict(t); v.Mode != "delta" {
		t.Errorf("verdict %+v, want delta", v)
	}
	checkSplice(t, []byte(chat(1, false)), e.last().raw, []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"})
	r.quiet()
	if r.metric("kvc_sidecar_turns_total", "mode", "delta") != 1 {
		t.Error("the turn does not count as delta")
	}
}

// A null engine would answer 200 to anything.
func TestNullEngineIsNeverProbed(t *testing.T) {
	e := newEngine(t)
	e.info["disaggregation_mode"] = "null"
	e.probe = func(p string) int { t.Errorf("probed %s", p); return 200 }
	r := startRig(t, e, func(c *Config) { c.DirectPath = kvc.Unified }).ready()
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	if v := a.verdict(t); v.Mode != "seed" {
		t.Errorf("verdict %+v, want a seed, run locally", v)
	}
	if s := r.quiet(); s.Totals.TransferredTokens != 0 || s.Totals.PrefillUncachedTokens != 56 {
		t.Errorf("totals %+v, want everything prefilled here", s.Totals)
	}
}

func TestNotReadyNamesTheRemedy(t *testing.T) {
	cases := map[string]struct {
		role   fleet.Role
		path   kvc.DirectPath
		change map[string]any
		reason string
	}{
		"a null engine cannot receive KV": {fleet.Decode, kvc.DeltaTransfer, map[string]any{"disaggregation_mode": "null"},
			"--disaggregation-mode null; start it with decode"},
		"unified wants a null engine":             {fleet.Decode, kvc.Unified, nil, "start it with null"},
		"a prefill worker wants a prefill engine": {fleet.Prefill, "", nil, "start it with prefill"},
		"without the decode radix cache nothing stays": {fleet.Decode, kvc.DeltaTransfer,
			map[string]any{"disaggregation_decode_enable_radix_cache": false}, "--disaggregation-decode-enable-radix-cache"},
		"conditional aggregation needs it too": {fleet.Decode, kvc.ConditionalAggregation,
			map[string]any{"disaggregation_decode_enable_radix_cache": nil}, "--disaggregation-decode-enable-radix-cache"},
		"unified needs the radix cache, too": {fleet.Decode, kvc.Unified,
			map[string]any{"disaggregation_mode": "null", "disable_radix_cache": true}, "without --disable-radix-cache"},
		"native admission needs the patch": {fleet.Decode, kvc.NativeAdmission, nil, "/admit_direct_append"},
		"an engine without capacity is still loading": {fleet.Decode, kvc.ConditionalAggregation,
			map[string]any{"max_total_num_tokens": 0}, "max_total_num_tokens"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			maps.Copy(e.info, tc.change)
			r := startRig(t, e, func(c *Config) { c.Role, c.DirectPath = tc.role, tc.path })
			r.until("refused", func(s admission.SidecarStatus) bool { return !s.Ready && strings.Contains(s.Reason, tc.reason) })
			resp, err := r.hc.Get(r.base + "/readyz")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil || resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(body), tc.reason) {
				t.Errorf("readyz %d %s, %v", resp.StatusCode, body, err)
			}
		})
	}
}

func TestBeforeTheEngineAnswers(t *testing.T) {
	r := newRig(t, func(c *Config) { c.EngineURL = "http://127.0.0.1:1" })
	r.until("refused", func(s admission.SidecarStatus) bool { return strings.Contains(s.Reason, "does not answer") })
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	if a.status != 503 || a.header.Get("Retry-After") == "" {
		t.Errorf("a turn got %d %v, want 503", a.status, a.header)
	}
	if _, err := r.ctl.Ask(t.Context(), r.base, r.question(ask(session, 0), chat(0, false))); err == nil {
		t.Error("a question was answered without an engine")
	}
	for path, want := range map[string]int{admission.PathFeed: 503, "/healthz": 200, "/readyz": 503, "/metrics": 200,
		admission.PathStatus: 200, admission.PathSessions: 200} {
		resp, err := r.hc.Get(r.base + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("GET %s = %d, want %d", path, resp.StatusCode, want)
		}
	}
}

// R99: same address, same port, however short the pause.
func TestEngineRestartIsANewEpoch(t *testing.T) {
	e := newEngine(t)
	r := startRig(t, e).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	before := r.quiet()
	e.set(func() { e.info["startup_time"] = 2000000000.0 })
	e.srv.CloseClientConnections() // what a restart does to connections
	after := r.until("on the new engine", func(s admission.SidecarStatus) bool { return s.Epoch == "uid-1/2000000000000" && s.Ready })
	if after.Used != 0 || after.Sessions != 0 {
		t.Errorf("after %+v, want an empty ledger", after)
	}
	if after.Totals.PromptTokens != before.Totals.PromptTokens || after.Seq < before.Seq {
		t.Errorf("totals went back: %+v after %+v", after, before)
	}
	in := ask(session, 1)
	in.Epoch = before.Epoch
	if a := r.send(t.Context(), in, chatPath, chat(1, false)); a.status != 409 || a.verdict(t).Reason != "stale-epoch" {
		t.Errorf("a turn for the old engine: %d %s", a.status, a.body)
	}
}

// An engine whose identity does not change is another one all the same when its
// port was closed in between.
func TestClosedPortMeansAnotherProcess(t *testing.T) {
	e := newEngine(t)
	e.info["startup_time"] = 0
	r := startRig(t, e).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	before := r.quiet()
	addr := e.srv.Listener.Addr().String()
	e.srv.Listener.Close()
	e.srv.CloseClientConnections()
	r.until("not ready", func(s admission.SidecarStatus) bool { return !s.Ready })
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", addr)
	if err != nil {
		t.Skipf("the port was taken meanwhile: %v", err)
	}
	again := &http.Server{Handler: e, ReadHeaderTimeout: patience}
	go func() { _ = again.Serve(ln) }()
	defer again.Close()
	after := r.until("ready again", func(s admission.SidecarStatus) bool { return s.Ready })
	if after.Epoch == before.Epoch || after.Sessions != 0 {
		t.Errorf("after %+v, before %+v; want another epoch", after, before)
	}
	r.stop()
}

func TestEngineThatFallsSilentIsNotReady(t *testing.T) {
	e := newEngine(t)
	r := startRig(t, e).ready()
	e.srv.Config.SetKeepAlivesEnabled(false)
	e.srv.Listener.Close()
	e.srv.CloseClientConnections()
	r.until("not ready", func(s admission.SidecarStatus) bool { return !s.Ready && strings.Contains(s.Reason, "does not answer") })
}

func TestFlushedCacheIsNoticed(t *testing.T) {
	prepare := func(t *testing.T) *rig {
		r := newRig(t).ready()
		r.e.set(func() { r.e.turn = answerUsage(4000, 0) })
		for _, key := range []kvc.SessionKey{session, "00000000000000bb"} {
			body := strings.Replace(chat(1, false), "question", "question of "+string(key)+strings.Repeat(" pad", 900), 1)
			r.send(t.Context(), ask(key, 0), chatPath, body)
			r.quiet()
		}
		return r
	}
	t.Run("by the load of an idle engine that counts its cache", func(t *testing.T) {
		r := prepare(t)
		used := r.s.status().Used
		r.e.set(func() { r.e.load["num_used_tokens"] = used })
		r.until("learnt", func(admission.SidecarStatus) bool { return r.s.fix.countsCache.Load() })
		r.e.set(func() { r.e.load["num_used_tokens"] = 0 })
		r.until("cleared", func(s admission.SidecarStatus) bool { return s.Used == 0 && s.Sessions == 0 })
	})
	t.Run("but not by one that never counted it, as stock SGLang", func(t *testing.T) {
		r := prepare(t)
		r.e.set(func() { r.e.load["num_used_tokens"] = 0 })
		polls := r.s.polls.Load()
		r.until("polled", func(admission.SidecarStatus) bool { return r.s.polls.Load() > polls+5 })
		if s := r.s.status(); s.Sessions != 2 {
			t.Errorf("sessions %d, want the ledger kept", s.Sessions)
		}
	})
	t.Run("by the metrics of an engine that has them", func(t *testing.T) {
		e := newEngine(t)
		e.info["enable_metrics"] = true
		e.turn = answerUsage(4000, 0)
		r := startRig(t, e).ready()
		r.send(t.Context(), ask(session, 0), chatPath, chat(1, false))
		r.quiet()
		e.set(func() {
			e.metrics = "sglang:kv_used_tokens{tp_rank=\"0\"} 0.0\nsglang:kv_evictable_tokens{tp_rank=\"0\"} 4020.0\n"
		})
		polls := r.s.polls.Load()
		r.until("polled", func(admission.SidecarStatus) bool { return r.s.polls.Load() > polls+20 })
		if s := r.s.status(); s.Sessions != 1 {
			t.Fatalf("a full cache was cleared: %+v", s)
		}
		e.set(func() { e.metrics = strings.Replace(e.metrics, "4020.0", "64.0", 1) })
		r.until("cleared", func(s admission.SidecarStatus) bool { return s.Used == 0 && s.Sessions == 0 })
	})
	t.Run("by resident turns that find nothing cached", func(t *testing.T) {
		r := prepare(t)
		r.e.set(func() { r.e.turn = answerUsage(4400, 0) })
		for i, key := range []kvc.SessionKey{session, "00000000000000bb"} {
			body := strings.Replace(chat(2, false), "question", "question of "+string(key)+strings.Repeat(" pad", 900), 1)
			a := r.send(t.Context(), ask(key, 1), chatPath, body)
			if v := a.verdict(t); v.Mode != "direct" {
				t.Fatalf("turn %d: %+v", i, v)
			}
			r.quiet()
		}
		if got := r.metric("kvc_sidecar_ledger_clears_total", "evidence", "cached_tokens"); got != 1 {
			t.Errorf("clears = %v, want 1 after two turns", got)
		}
	})
}

// answerUsage is an engine that reports these tokens.
func answerUsage(prompt, cached int) func(http.ResponseWriter, *http.Request, map[string]any) {
	return func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":%d,`+
			`"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":%d}}}`, prompt, cached)
	}
}

func TestNativeAdmissionNeedsBoth(t *testing.T) {
	cases := map[string]struct {
		answer string
		status int
		mode   string
		reason string
	}{
		"the engine's mode wins":                         {`{"can_admit":true,"mode":"direct","resident_tokens":77}`, 200, "direct", ""},
		"the engine's refusal wins":                      {`{"can_admit":false,"reason":"no-d-capacity"}`, 409, "", "no-d-capacity"},
		"an unknown reason is capacity":                  {`{"can_admit":false,"reason":"because"}`, 409, "", "no-d-capacity"},
		"an engine that does not answer refuses nothing": {`boom`, 200, "seed", ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			asked := make(chan admission.Question, 10)
			e.native = func(w http.ResponseWriter, r *http.Request) {
				var q admission.Question
				if err := json.NewDecoder(r.Body).Decode(&q); err != nil || q.Attempt == "" {
					w.WriteHeader(http.StatusBadRequest) // the probe
					return
				}
				asked <- q
				_, _ = io.WriteString(w, tc.answer)
			}
			r := startRig(t, e, func(c *Config) { c.DirectPath = kvc.NativeAdmission }).ready()
			in := ask(session, 0)
			a := r.send(t.Context(), in, chatPath, chat(0, false))
			v := a.verdict(t)
			if a.status != tc.status || v.Mode != tc.mode || v.Reason != tc.reason {
				t.Errorf("got %d %+v, want %d %s %s", a.status, v, tc.status, tc.mode, tc.reason)
			}
			if q := <-asked; q.Attempt != in.Attempt || q.Session != string(session) || q.Blocks == "" {
				t.Errorf("the engine was asked %+v", q)
			}
			if tc.mode == "direct" {
				checkSplice(t, []byte(chat(0, false)), e.last().raw, []string{"rid"})
			}
			r.quiet()
		})
	}
}
