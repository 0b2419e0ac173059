package sidecar

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// hang is an engine's turn that stops at a phase until it is let go, and says
// when the request was closed on it.
type hang struct {
	reached   chan struct{} // the phase
	cancelled chan struct{} // the sidecar closed the request
	release   chan struct{}
}

func newHang() *hang {
	return &hang{make(chan struct{}), make(chan struct{}), make(chan struct{})}
}

// turn sends what comes before the phase and waits.
func (h *hang) turn(before string) func(http.ResponseWriter, *http.Request, map[string]any) {
	return func(w http.ResponseWriter, r *http.Request, _ map[string]any) {
		if before != "" {
			w.Header().Set("Content-Type", "text/event-stream")
			send(w, before)
		}
		close(h.reached)
		select {
		case <-r.Context().Done():
			close(h.cancelled)
		case <-h.release:
			send(w, chunk("late")+doneEvent)
		}
	}
}

func await(t *testing.T, c <-chan struct{}, what string, within time.Duration) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(within):
		t.Fatalf("no %s within %v", what, within)
	}
}

// R51, R56: whatever the phase, the engine sees the cancel at once and every
// gauge returns to 0.
func TestCancelInEveryPhase(t *testing.T) {
	direct := func(r *rig) admission.Turn {
		r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
		r.quiet()
		return ask(session, 1)
	}
	cases := map[string]struct {
		in     func(*rig) admission.Turn
		body   string
		before string // what the engine has sent by then
	}{
		"before the headers of a stream":         {direct, chat(1, true), ""},
		"between events":                         {direct, chat(1, true), chunk("x")},
		"while a whole answer is made":           {direct, chat(1, false), ""},
		"between events of a turn with two legs": {func(*rig) admission.Turn { return ask(session, 0) }, chat(0, true), chunk("x")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).ready()
			in, h := tc.in(r), newHang()
			r.e.set(func() { r.e.turn = h.turn(tc.before) })
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() { defer close(done); r.send(ctx, in, chatPath, tc.body) }()
			await(t, h.reached, "turn at the engine", patience)
			if s := r.s.status(); s.InFlight != 1 || s.Locked == 0 {
				t.Errorf("in flight %d, locked %d; want the turn on the book", s.InFlight, s.Locked)
			}
			if tc.before != "" {
				r.until("streaming", func(admission.SidecarStatus) bool { return !r.s.book.deferring() })
			}
			cancel()
			await(t, h.cancelled, "cancel at the engine", 200*time.Millisecond)
			r.e.until("abort", func() bool { return len(r.e.aborts) == 1 && r.e.aborts[0] == "kvc-"+in.Attempt })
			<-done
			r.quiet()
			if r.metric("kvc_sidecar_turns_total", "outcome", "cancelled") != 1 {
				t.Error("the turn does not count as cancelled")
			}
			if r.metric("kvc_sidecar_aborts_deferred_total") != 0 {
				t.Error("the abort was deferred")
			}
		})
	}
}

// deferring reports whether any turn is between forwarding and its first byte.
func (b *book) deferring() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.turns {
		t.mu.Lock()
		d := t.deferring
		t.mu.Unlock()
		if d {
			return true
		}
	}
	return false
}

// handoff is R50's engine: prealloc → transfer → decoding, and it crashes when
// it is cancelled in transfer.
type handoff struct {
	mu       sync.Mutex
	phase    string
	crashed  bool
	reached  chan struct{}
	arrived  chan struct{} // closed by the test: the KV is here
	finished chan struct{}
}

func (h *handoff) turn(w http.ResponseWriter, r *http.Request, _ map[string]any) {
	defer close(h.finished)
	w.Header().Set("Content-Type", "text/event-stream")
	_ = http.NewResponseController(w).Flush() // headers are sent long before the KV is here
	h.set("transfer")
	close(h.reached)
	select {
	case <-r.Context().Done():
		h.mu.Lock()
		h.crashed = true
		h.mu.Unlock()
		return
	case <-h.arrived:
	}
	h.set("decoding")
	for range 1000 {
		if _, err := io.WriteString(w, chunk("x")); err != nil {
			return
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-time.After(time.Millisecond):
		}
	}
}

func (h *handoff) set(p string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.phase = p
}

func TestAbortOfDecodeWaitsForTheHandOff(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AbortCap = patience }).ready()
	h := &handoff{reached: make(chan struct{}), arrived: make(chan struct{}), finished: make(chan struct{})}
	r.e.set(func() { r.e.turn = h.turn })
	in := ask(session, 0)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.send(ctx, in, chatPath, chat(0, true)) }()
	await(t, h.reached, "transfer", patience)
	cancel()
	<-done // the client, and its router with it, are gone
	r.until("deferring", func(admission.SidecarStatus) bool { return r.metric("kvc_sidecar_aborts_deferred_total") == 1 })
	if s := r.s.status(); s.InFlight != 1 || s.Locked == 0 {
		t.Errorf("status %+v: the turn left the book while the engine still receives KV", s)
	}
	r.e.set(func() {
		if len(r.e.aborts) != 0 {
			t.Error("aborted in transfer")
		}
	})
	close(h.arrived)
	await(t, h.finished, "end at the engine", patience)
	r.quiet()
	if h.crashed {
		t.Error("the engine was cancelled in transfer")
	}
	r.e.until("abort", func() bool { return len(r.e.aborts) == 1 })
}

func TestDeferredAbortHasACap(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AbortCap = 50 * time.Millisecond }).ready()
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn("") })
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-h.reached
		cancel()
	}()
	r.send(ctx, ask(session, 0), chatPath, chat(0, true))
	await(t, h.cancelled, "cancel after the cap", patience)
	r.quiet()
}

// A deferred abort ends with the engine's own error, too.
func TestDeferredAbortEndsWithAnError(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AbortCap = patience }).ready()
	reached, fail := make(chan struct{}), make(chan struct{})
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			close(reached)
			<-fail
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-reached
		cancel()
	}()
	r.send(ctx, ask(session, 0), chatPath, chat(0, true))
	close(fail)
	r.quiet()
}

func TestPrefillLegIsCancelledAtOnce(t *testing.T) {
	r := newPrefillRig(t)
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn("") })
	in := prefillLeg()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-h.reached
		cancel()
	}()
	r.send(ctx, in, chatPath, chat(0, true))
	await(t, h.cancelled, "cancel of P before the hand-off", 200*time.Millisecond)
	r.e.until("abort", func() bool { return len(r.e.aborts) == 1 && r.e.aborts[0] == "kvc-"+in.Attempt })
	r.quiet()
}

func newPrefillRig(t *testing.T) *rig {
	t.Helper()
	e := newEngine(t)
	e.info["disaggregation_mode"] = "prefill"
	return startRig(t, e, func(c *Config) { c.Role, c.DirectPath = fleet.Prefill, "" }).ready()
}

func prefillLeg() admission.Turn {
	in := ask(session, 0)
	in.Leg, in.Admit = admission.LegPrefill, ""
	return in
}

func TestPrefillLegIsForwardedAndAccounted(t *testing.T) {
	r := newPrefillRig(t)
	for i, want := range []int64{56, 112} {
		a := r.send(t.Context(), prefillLeg(), chatPath, chat(0, true))
		if a.status != 200 || len(a.early) != 0 {
			t.Fatalf("status %d with %d early hints: %s", a.status, len(a.early), a.body)
		}
		checkSplice(t, []byte(chat(0, true)), r.e.last().raw,
			[]string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "stream_options"})
		if s := r.quiet(); s.Totals.PrefillUncachedTokens != want || s.Totals.TransferredTokens != 0 || s.Used == 0 {
			t.Errorf("leg %d: %+v, want %d uncached tokens and a prompt cache", i, s.Totals, want)
		}
	}
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, true)); a.status != 400 {
		t.Errorf("a decode leg on a prefill worker: %d, want 400", a.status)
	}
	in := prefillLeg()
	in.Bootstrap = nil
	if a := r.send(t.Context(), in, chatPath, chat(0, true)); a.status != 400 {
		t.Errorf("a prefill leg without rendezvous: %d, want 400", a.status)
	}
	r.quiet()
}

func TestTransferredTokensAreWhatWasNotResident(t *testing.T) {
	r := newRig(t).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	s := r.quiet()
	if s.Totals.TransferredTokens != 120 || s.Totals.PrefillUncachedTokens != 0 {
		t.Errorf("after a seed: %+v, want the whole prompt transferred and none prefilled here", s.Totals)
	}
	r.send(t.Context(), ask(session, 1), chatPath, chat(1, false))
	if s = r.quiet(); s.Totals.TransferredTokens != 120 || s.Totals.PrefillUncachedTokens != 56 {
		t.Errorf("after a direct turn: %+v, want 120-64 tokens prefilled here", s.Totals)
	}
}

// R57: the end of the answer, the client's leaving and the cap race; one end.
func TestOneEndPerTurn(t *testing.T) {
	r := newRig(t, func(c *Config) { c.AbortCap = time.Millisecond }).ready()
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, req *http.Request, body map[string]any) {
			select {
			case <-time.After(time.Millisecond):
				answerChat(w, req, body)
			case <-req.Context().Done():
			}
		}
	})
	const turns = 300
	var wg sync.WaitGroup
	limit := make(chan struct{}, 16)
	for i := range turns {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i%12)*300*time.Microsecond)
			defer cancel()
			in := ask(kvc.SessionKey([]string{"00000000000000a1", "00000000000000a2", "00000000000000a3"}[i%3]), i%2)
			if i%3 == 0 {
				in.Admit = admission.AdmitNone
			}
			r.send(ctx, in, chatPath, chat(i%2, i%2 == 0))
		})
	}
	wg.Wait()
	s := r.quiet()
	if s.Used > s.CapacityTokens {
		t.Errorf("used %d of %d", s.Used, s.CapacityTokens)
	}
	if got := r.metric("kvc_sidecar_turns_total"); got > turns {
		t.Errorf("%v ends of %d turns", got, turns)
	}
}

// R80: a failing side call changes nothing on the data path.
func TestAbortFailureIsCountedOnly(t *testing.T) {
	r := newRig(t).ready()
	h := newHang()
	r.e.set(func() { r.e.turn = h.turn(chunk("x")) })
	r.e.set(func() { r.e.abortErr = 500 })
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-h.reached
		r.until("streaming", func(admission.SidecarStatus) bool { return !r.s.book.deferring() })
		cancel()
	}()
	r.send(ctx, ask(session, 0), chatPath, chat(0, true))
	r.quiet()
	r.until("counted", func(admission.SidecarStatus) bool { return r.metric("kvc_sidecar_abort_errors_total") == 1 })
	r.e.set(func() { r.e.turn = answerChat })
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false)); a.status != 200 {
		t.Errorf("the next turn: %d %s", a.status, a.body)
	}
}

func TestQueueIsFirstComeFirstServed(t *testing.T) {
	e := newEngine(t)
	e.info["max_total_num_tokens"] = 1500 // one turn at a time
	r := startRig(t, e).ready()
	var order []string
	hangs := map[string]*hang{}
	turn := func(w http.ResponseWriter, req *http.Request, body map[string]any) {
		e.mu.Lock()
		rid, _ := body["rid"].(string)
		order = append(order, rid)
		h := hangs[rid]
		e.mu.Unlock()
		h.turn(chunk("x"))(w, req, body)
	}
	e.set(func() { e.turn = turn })
	var want []string
	var wg sync.WaitGroup
	for i := range 3 {
		in := ask(kvc.SessionKey([]string{"00000000000000b1", "00000000000000b2", "00000000000000b3"}[i]), 0)
		in.Admit = admission.AdmitNone
		want = append(want, "kvc-"+in.Attempt)
		e.set(func() { hangs["kvc-"+in.Attempt] = newHang() })
		wg.Go(func() {
			body := strings.Replace(chat(0, true), "be kind", "be "+in.Attempt[30:], 1) // share nothing
			if a := r.send(t.Context(), in, chatPath, body); a.status != 200 || a.err != nil {
				t.Errorf("queued turn: %d %v %s", a.status, a.err, a.body)
			}
		})
		r.until("queued", func(s admission.SidecarStatus) bool { return s.InFlight == i+1 })
	}
	for _, rid := range want {
		await(t, hangs[rid].reached, "turn of "+rid, patience)
		close(hangs[rid].release)
	}
	wg.Wait()
	if d := cmp.Diff(want, order); d != "" {
		t.Errorf("order at the engine (-want +got):\n%s", d)
	}
	r.quiet()
}

func TestQueueEnds(t *testing.T) {
	full := func(t *testing.T, change ...func(*Config)) (*rig, *hang) {
		e := newEngine(t)
		e.info["max_total_num_tokens"] = 1500
		r := startRig(t, e, change...).ready()
		h := newHang()
		e.set(func() { e.turn = h.turn(chunk("x")) })
		in := ask("00000000000000b1", 0)
		in.Admit = admission.AdmitNone
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); r.send(ctx, in, chatPath, chat(0, true)) }()
		await(t, h.reached, "first turn", patience)
		t.Cleanup(func() { cancel(); <-done })
		return r, h
	}
	second := func() admission.Turn {
		in := ask("00000000000000b2", 0)
		in.Admit = admission.AdmitNone
		return in
	}
	t.Run("with 503 and Retry-After when nobody leaves in time", func(t *testing.T) {
		r, _ := full(t, func(c *Config) { c.QueueWait = 10 * time.Millisecond })
		a := r.send(t.Context(), second(), chatPath, chat(0, true))
		if a.status != 503 || a.header.Get("Retry-After") == "" || a.header.Get(admission.HeaderOrigin) != "sidecar" {
			t.Errorf("got %d %v, want 503 with Retry-After", a.status, a.header)
		}
		if s := r.s.status(); s.Totals.Refusals["queue-full"] != 1 || s.InFlight != 1 {
			t.Errorf("status %+v", s)
		}
	})
	t.Run("with 503 at once when it is full", func(t *testing.T) {
		r, _ := full(t, func(c *Config) { c.QueueLimit = 1 })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go r.send(ctx, second(), chatPath, chat(0, true))
		r.until("queued", func(s admission.SidecarStatus) bool { return s.InFlight == 2 })
		if a := r.send(t.Context(), second(), chatPath, chat(0, true)); a.status != 503 {
			t.Errorf("got %d, want 503", a.status)
		}
		cancel()
		r.until("left", func(s admission.SidecarStatus) bool { return s.InFlight == 1 })
	})
	t.Run("when the client leaves, without reaching the engine", func(t *testing.T) {
		r, _ := full(t)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			r.until("queued", func(s admission.SidecarStatus) bool { return s.InFlight == 2 })
			cancel()
		}()
		if a := r.send(ctx, second(), chatPath, chat(0, true)); !isContext(a.err) {
			t.Errorf("got %+v", a)
		}
		r.until("left", func(s admission.SidecarStatus) bool { return s.InFlight == 1 })
		if r.e.count() != 1 {
			t.Error("the turn of a client that left reached the engine")
		}
	})
	t.Run("for a turn larger than the whole engine with the engine's own answer", func(t *testing.T) {
		e := newEngine(t)
		e.info["max_total_num_tokens"] = 100
		r := startRig(t, e).ready()
		e.set(func() {
			e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) { w.WriteHeader(http.StatusBadRequest) }
		})
		if a := r.send(t.Context(), second(), chatPath, chat(0, true)); a.status != 400 ||
			a.header.Get(admission.HeaderOrigin) != "engine" {
			t.Errorf("got %d from %s, want the engine's 400", a.status, a.header.Get(admission.HeaderOrigin))
		}
		r.quiet()
	})
}
