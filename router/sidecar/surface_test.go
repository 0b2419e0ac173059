package sidecar

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
)

// The same conversation is admitted, spliced and credited on every surface.
func TestSurfaces(t *testing.T) {
	long := strings.Repeat("the quick brown fox ", 60)
	ids := strings.Trim(strings.Repeat("1,", 400), ",")
	cases := map[string]struct {
		path, first, second, answer string
	}{
		"completions": {"/v1/completions", `{"model":"m","prompt":"` + long + `"}`,
			`{"model":"m","prompt":"` + long + long + `"}`,
			`{"choices":[{"index":0,"text":"hi","finish_reason":"length"}],"usage":` + usage + `}`},
		"generate with text": {"/generate", `{"text":"` + long + `"}`, `{"text":"` + long + long + `"}`,
			`{"text":"hi","meta_info":{"prompt_tokens":120,"completion_tokens":20,"cached_tokens":64,"finish_reason":{"type":"length","length":20}}}`},
		"generate with ids": {"/generate", `{"input_ids":[` + ids + `]}`, `{"input_ids":[` + ids + `,2,3,4]}`,
			`{"output_ids":[9],"meta_info":{"prompt_tokens":400,"completion_tokens":20,"cached_tokens":64,"finish_reason":{"type":"length","length":20}}}`},
		"chat with tools": {chatPath, `{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{"z":1,"a":2}}}],` +
			`"messages":[{"role":"user","content":"` + long + `"}]}`,
			`{"model":"m","tools":[{"type":"function","function":{"name":"f","parameters":{"z":1,"a":2}}}],` +
				`"messages":[{"role":"user","content":"` + long + `"},{"role":"assistant","content":"hi"},{"role":"user","content":"go on"}]}`,
			wholeAnswer},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).ready()
			r.e.set(func() {
				r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
					w.Header().Set("Content-Type", "application/json")
					_, _ = io.WriteString(w, tc.answer)
				}
			})
			for i, body := range []string{tc.first, tc.second} {
				a := r.send(t.Context(), ask(session, i), tc.path, body)
				if a.status != 200 || a.body != tc.answer {
					t.Fatalf("turn %d: %d %s", i, a.status, a.body)
				}
				if v, want := a.verdict(t), []string{"seed", "direct"}[i]; v.Mode != want {
					t.Errorf("turn %d: %+v, want %s", i, v, want)
				}
				if got := r.e.last(); got.path != tc.path {
					t.Errorf("the engine was called at %s", got.path)
				} else {
					checkSplice(t, []byte(body), got.raw, [][]string{
						{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}, {"rid", "do_local_prefill"}}[i])
				}
				r.quiet()
			}
		})
	}
}

// wire.md §0: every answer carries the version and who composed it.
func TestEveryAnswerIsSigned(t *testing.T) {
	r := newRig(t).ready()
	for _, tc := range []struct {
		method, path string
		status       int
		origin       string
	}{
		{"GET", "/healthz", 200, "sidecar"}, {"GET", "/readyz", 200, "sidecar"}, {"GET", "/metrics", 200, "sidecar"},
		{"GET", admission.PathStatus, 200, "sidecar"}, {"GET", admission.PathSessions, 200, "sidecar"},
		{"GET", admission.PathSessions + "?limit=0", 400, "sidecar"}, {"GET", admission.PathSessions + "?limit=x", 400, "sidecar"},
		{"GET", admission.PathHint, 204, "sidecar"}, {"DELETE", admission.PathLeases + "/none", 204, "sidecar"},
		{"DELETE", admission.PathSessions + "/none", 204, "sidecar"}, {"POST", admission.PathAdmit, 400, "sidecar"},
		{"GET", "/v1/models", 200, "engine"}, {"GET", "/v1/models/m", 404, "sidecar"}, {"GET", chatPath, 404, "sidecar"},
		{"GET", admission.PathPreStop + "/x", 404, "sidecar"}, {"POST", "/abort_request", 404, "sidecar"},
		{"GET", "/server_info", 404, "sidecar"}, {"POST", "/flush_cache", 404, "sidecar"}, {"GET", "/debug/pprof/", 404, "sidecar"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), tc.method, r.base+tc.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.hc.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tc.status || resp.Header.Get(admission.HeaderWire) != "1" || resp.Header.Get(admission.HeaderOrigin) != tc.origin {
			t.Errorf("%s %s = %d from %q on wire %q, want %d from %s", tc.method, tc.path, resp.StatusCode,
				resp.Header.Get(admission.HeaderOrigin), resp.Header.Get(admission.HeaderWire), tc.status, tc.origin)
		}
	}
}

// A later wire version is a reason for the router to distrust us, never for us
// to refuse it.
func TestLaterWireVersionIsServed(t *testing.T) {
	r := newRig(t).ready()
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false), func(req *http.Request) {
		req.Header.Set(admission.HeaderWire, "2")
		req.Header.Set("X-Kvc-Something-New", "1")
	})
	if a.status != 200 {
		t.Errorf("got %d %s", a.status, a.body)
	}
	r.quiet()
}

// R64: the turn frame says that the engine is done with the turn, so it may
// come only after the abort has been taken.
func TestTurnFrameWaitsForTheAbort(t *testing.T) {
	r := newRig(t).ready()
	h := newHang()
	aborting, abort := make(chan struct{}), make(chan struct{})
	r.e.set(func() {
		r.e.turn = h.turn(chunk("x"))
		r.e.onAbort = func() { close(aborting); <-abort }
	})
	m := newMirror()
	ctx, stop := context.WithCancel(t.Context())
	followed := make(chan error, 1)
	go func() { followed <- feed.NewFollower(feed.FollowerConfig{URL: r.base, Worker: "uid-1"}, m).Run(ctx) }()
	r.until("followed", func(admission.SidecarStatus) bool { m.mu.Lock(); defer m.mu.Unlock(); return m.trusted })

	in := ask(session, 0)
	turnCtx, leave := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.send(turnCtx, in, chatPath, chat(0, true)) }()
	await(t, h.reached, "turn", patience)
	r.until("streaming", func(admission.SidecarStatus) bool { return !r.s.book.deferring() })
	leave()
	<-done
	await(t, aborting, "abort", patience)
	ended := func() (o kvc.Outcome) {
		m.locked(func() { o = m.turns[in.Attempt].Outcome })
		return o
	}
	if s := r.s.status(); s.InFlight != 1 || ended() != "" {
		t.Errorf("in flight %d, outcome %q while the engine still ends the turn", s.InFlight, ended())
	}
	close(abort)
	r.quiet()
	r.until("told", func(admission.SidecarStatus) bool { return ended() == kvc.OutcomeCancelled })
	stop()
	<-followed
}

// T5: a peer that stops reading loses its turn; the engine is not held for ever.
func TestPeerThatStopsReading(t *testing.T) {
	r := newRig(t, func(c *Config) { c.WritePatience = 50 * time.Millisecond }).ready()
	gone := make(chan struct{})
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, req *http.Request, _ map[string]any) {
			defer close(gone)
			w.Header().Set("Content-Type", "text/event-stream")
			big := chunk(strings.Repeat("x", 16<<10))
			for req.Context().Err() == nil {
				if _, err := io.WriteString(w, big); err != nil {
					return
				}
			}
		}
	})
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(r.base, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	body := chat(0, true)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.base+chatPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	ask(session, 0).Write(req.Header)
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "103") {
		t.Fatalf("first line %q, %v", line, err)
	}
	await(t, gone, "cancel of the turn nobody reads", patience)
	r.quiet()
}

// Reloads, drains and status reads under load change nothing they should not.
func TestControlPlaneUnderLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "routing.json")
	write := func(n int) error {
		text := fmt.Sprintf(`{"routing":{"maxAppendTokens":%d},"slo_classes":[],"session":{}}`, n)
		if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
			return err
		}
		return os.Rename(path+".new", path)
	}
	if err := write(8192); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.RoutingFile, c.JournalDir = path, t.TempDir() }).ready()
	stop := make(chan struct{})
	var control, turns sync.WaitGroup
	control.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if err := write(8192 + i%2); err != nil {
				t.Error(err)
			}
			state := admission.State{State: []string{"Active", "Draining"}[i%2]}
			if err := r.ctl.SetState(t.Context(), r.base, state); err != nil {
				t.Error(err)
			}
			if _, err := r.ctl.Status(t.Context(), r.base); err != nil {
				t.Error(err)
			}
		}
	})
	for w := range 4 {
		turns.Go(func() {
			for i := range 20 {
				a := r.send(t.Context(), ask(kvc.SessionKey(fmt.Sprintf("%016x", w+1)), i), chatPath, chat(i%3, i%2 == 0))
				if a.err != nil || a.status != 200 && (a.status != 409 || a.verdict(t).Reason != "draining") {
					t.Errorf("turn: %d %v %s", a.status, a.err, a.body)
				}
			}
		})
	}
	turns.Wait()
	close(stop)
	control.Wait()
	r.quiet()
}

// Nothing of a prompt, a key or a token reaches the log.
func TestLogsHoldNoSecrets(t *testing.T) {
	var log safeBuffer
	r := newRig(t, func(c *Config) {
		c.Log, c.Tokens, c.JournalDir = textLogger(&log), admission.StaticTokens("pool-token"), t.TempDir()+"/missing"
	}).ready()
	r.e.set(func() {
		r.e.turn = func(http.ResponseWriter, *http.Request, map[string]any) { panic(http.ErrAbortHandler) }
		r.e.abortErr = 500
	})
	r.send(t.Context(), ask(session, 0), chatPath, strings.Replace(chat(0, true), "be kind", "my password is hunter2", 1))
	r.quiet()
	r.stop()
	text := log.String()
	if !strings.Contains(text, "engine did not answer a turn") {
		t.Errorf("the failure is not logged:\n%s", text)
	}
	for _, secret := range []string{"hunter2", "pool-token", "engine-key", "n0nce"} {
		if strings.Contains(text, secret) {
			t.Errorf("the log holds %q:\n%s", secret, text)
		}
	}
}

// A verdict header must stay one line of at most 1 KiB whatever the numbers.
func TestVerdictHeaderIsShort(t *testing.T) {
	v := admission.NewVerdict(kvc.Verdict{
		CanAdmit: true, Mode: kvc.Reseed, Reason: kvc.ReasonNotResidentNoCapacity,
		ResidentTokens: 1 << 40, AppendTokens: 1 << 40, FreeTokens: 1 << 40, RetryAfter: time.Hour, Pause: time.Hour,
		Lease: kvc.Lease{ID: strings.Repeat("f", 32), Tokens: 1 << 40, TTL: time.Hour},
	})
	v.Worker, v.Epoch, v.State = strings.Repeat("u", 36), strings.Repeat("u", 36)+"/1999999999500/1999999999500", "Draining"
	line := oneLine(v)
	var back admission.Verdict
	if err := json.Unmarshal([]byte(line), &back); err != nil || len(line) > 1024 || strings.ContainsAny(line, "\r\n") {
		t.Errorf("%d bytes, %v: %s", len(line), err, line)
	}
}
