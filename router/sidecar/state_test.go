package sidecar

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
)

func draining(soft, hard time.Time) admission.State {
	return admission.State{State: "Draining", SoftDeadlineMS: unixMS(soft), HardDeadlineMS: unixMS(hard)}
}

func TestDrainingTakesKnownSessionsUntilTheSoftDeadline(t *testing.T) {
	clock := newClock()
	r := newRig(t, func(c *Config) { c.Now = clock.now }).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	r.quiet()
	soft, hard := clock.now().Add(time.Minute), clock.now().Add(time.Hour)
	for range 2 { // idempotent
		if err := r.ctl.SetState(t.Context(), r.base, draining(soft, hard)); err != nil {
			t.Fatal(err)
		}
	}
	s := r.s.status()
	if s.State != "Draining" || s.SoftDeadlineMS != soft.UnixMilli() || s.HardDeadlineMS != hard.UnixMilli() {
		t.Errorf("status %+v", s)
	}
	if a := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false)); a.status != 200 || a.verdict(t).State != "Draining" {
		t.Errorf("a known session before the soft deadline: %d %s", a.status, a.body)
	}
	r.quiet()
	for name, in := range map[string]admission.Turn{
		"a new session": ask("00000000000000bb", 0),
		"a fallback":    func() admission.Turn { in := ask(session, 2); in.Admit = admission.AdmitNone; return in }(),
	} {
		if a := r.send(t.Context(), in, chatPath, chat(0, false)); a.status != 409 || a.verdict(t).Reason != "draining" {
			t.Errorf("%s: %d %s, want 409 draining", name, a.status, a.body)
		}
	}
	clock.advance(2 * time.Minute)
	if a := r.send(t.Context(), ask(session, 2), chatPath, chat(2, false)); a.status != 409 || a.verdict(t).Reason != "draining" {
		t.Errorf("a known session after the soft deadline: %d %s", a.status, a.body)
	}
	r.quiet()
	if err := r.ctl.SetState(t.Context(), r.base, admission.State{State: "Active", SoftDeadlineMS: 5}); err != nil {
		t.Fatal(err)
	}
	if s := r.s.status(); s.State != "Active" || s.SoftDeadlineMS != 0 {
		t.Errorf("status %+v, want Active without deadlines", s)
	}
	if a := r.send(t.Context(), ask("00000000000000bb", 0), chatPath, chat(0, false)); a.status != 200 {
		t.Errorf("a new session when active again: %d", a.status)
	}
	r.quiet()
}

func TestHardDeadlineEndsStreams(t *testing.T) {
	clock := newClock()
	r := newRig(t, func(c *Config) { c.Now = clock.now }).ready()
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn(chunk("x")) })
	done := make(chan answer, 1)
	go func() { done <- r.send(t.Context(), ask(session, 0), chatPath, chat(0, true)) }()
	await(t, h.reached, "turn", patience)
	r.until("streaming", func(admission.SidecarStatus) bool { return !r.s.book.deferring() })
	if err := r.ctl.SetState(t.Context(), r.base, draining(clock.now(), clock.now().Add(time.Second))); err != nil {
		t.Fatal(err)
	}
	clock.advance(2 * time.Second)
	await(t, h.cancelled, "cancel at the hard deadline", patience)
	if a := <-done; a.err == nil {
		t.Errorf("the client got a clean end: %q", a.body)
	}
	r.quiet()
}

func TestStateNamesTheField(t *testing.T) {
	r := newRig(t).ready()
	for _, body := range []string{`{"state":"Gone"}`, `{`, `{"state":5}`} {
		target := r.base + admission.PathState
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, target, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := r.hc.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		msg, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(msg), "state") {
			t.Errorf("PUT state %s = %d %s, want 400 naming state", body, resp.StatusCode, msg)
		}
	}
}

func TestPreStopWaitsForTurns(t *testing.T) {
	r := newRig(t).ready()
	get := func(nonce string) int {
		resp, err := r.hc.Get(r.base + admission.PathPreStop + "/" + nonce)
		if err != nil {
			t.Error(err)
			return 0
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := get("wrong"); got != 404 {
		t.Errorf("wrong nonce: %d, want 404", got)
	}
	if s := r.s.status(); s.State != "Active" {
		t.Error("a wrong nonce drained the worker")
	}
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn(chunk("x")) })
	turn := make(chan answer, 1)
	go func() { turn <- r.send(t.Context(), ask(session, 0), chatPath, chat(0, true)) }()
	await(t, h.reached, "turn", patience)
	stopped := make(chan int, 1)
	go func() { stopped <- get("n0nce") }()
	r.until("draining", func(s admission.SidecarStatus) bool { return s.State == "Draining" })
	select {
	case <-stopped:
		t.Error("prestop returned while a turn ran")
	case <-time.After(20 * time.Millisecond):
	}
	close(h.release)
	if a := <-turn; a.err != nil {
		t.Errorf("the running turn: %v", a.err)
	}
	if got := <-stopped; got != 204 {
		t.Errorf("prestop = %d", got)
	}
}

func TestPreStopReturnsBeforeTheKubeletKills(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Grace = 5*time.Second + 20*time.Millisecond }).ready()
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn(chunk("x")) })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.send(ctx, ask(session, 0), chatPath, chat(0, true)) }()
	await(t, h.reached, "turn", patience)
	resp, err := r.hc.Get(r.base + admission.PathPreStop + "/n0nce")
	if err != nil || resp.StatusCode != http.StatusNoContent {
		t.Errorf("prestop = %v, %v", resp, err)
	}
	resp.Body.Close()
	cancel()
	<-done
}

func TestPreStopWithoutANonceIsOff(t *testing.T) {
	r := newRig(t, func(c *Config) { c.PreStopNonce = "" }).ready()
	resp, err := r.hc.Get(r.base + admission.PathPreStop + "/")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound || r.s.status().State != "Active" {
		t.Errorf("an empty nonce: %d", resp.StatusCode)
	}
}

func TestForgetSession(t *testing.T) {
	r := newRig(t).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	if s := r.quiet(); s.Sessions != 1 || s.Protected == 0 {
		t.Fatalf("status %+v", s)
	}
	for range 2 {
		if err := r.ctl.Forget(t.Context(), r.base, string(session)); err != nil {
			t.Fatal(err)
		}
	}
	if s := r.s.status(); s.Sessions != 0 || s.Protected != 0 || s.Used == 0 {
		t.Errorf("status %+v, want the session forgotten and its blocks left to LRU", s)
	}
}

// Drain ends within its limits whatever the engine does.
func TestDrainIsBounded(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AbortCap = 30 * time.Millisecond }).ready()
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn("") })
	done := make(chan answer, 1)
	go func() { done <- r.send(t.Context(), ask(session, 0), chatPath, chat(0, true)) }()
	await(t, h.reached, "turn", patience)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	r.s.Drain(ctx)
	await(t, h.cancelled, "cancel after limit and cap", patience)
	<-done
	r.quiet()
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false)); a.status != 409 || a.verdict(t).Reason != "draining" {
		t.Errorf("after Drain: %d %s", a.status, a.body)
	}
}

func TestDrainOfAnIdleWorkerIsImmediate(t *testing.T) {
	r := newRig(t).ready()
	started := time.Now()
	r.s.Drain(t.Context())
	if took := time.Since(started); took > time.Second {
		t.Errorf("took %v", took)
	}
}

func TestSessionsPage(t *testing.T) {
	r := newRig(t).ready()
	want := []string{"00000000000000a1", "00000000000000a2", "00000000000000a3"}
	for _, k := range want {
		r.send(t.Context(), ask(kvc.SessionKey(k), 0), chatPath, chat(0, false))
		r.quiet()
	}
	var got []string
	after := ""
	for range 4 {
		var page struct {
			Sessions []struct {
				Key, Tail string
				Blocks    int
			}
		}
		getJSON(t, r, admission.PathSessions+"?limit=2&after="+after, &page)
		if len(page.Sessions) == 0 {
			break
		}
		for _, s := range page.Sessions {
			if got = append(got, s.Key); s.Tail == "" || s.Blocks == 0 {
				t.Errorf("session %+v, want tail and blocks", s)
			}
		}
		after = got[len(got)-1]
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("pages give %v, want %v", got, want)
	}
}
