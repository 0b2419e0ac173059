package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/session"
)

// R47: a prefill leg that fails ends the decode leg at once, and the client
// gets the prefill worker's 4xx as it is, or a 502.
func TestPrefillFailureEndsTheTurn(t *testing.T) {
	const body = `{"object":"error","message":"prompt too long","type":"BadRequestError","param":null,"code":400}`
	cases := map[string]struct {
		play script
		code int
		want string
	}{
		"a 4xx passes as it is":    {status(400, body), 400, body},
		"a 5xx passes as it is":    {status(500, body), 500, body},
		"a reset is a 502":         {func(l *leg) { l.reset() }, 502, reasonPrefill},
		"a truncated answer too":   {func(l *leg) { l.startStream(); l.send("data: {"); l.reset() }, 502, ""},
		"an abort in a 200 (R55)":  {func(l *leg) { writeWhole(l, "", "abort") }, 502, ""},
		"an abort event in stream": {func(l *leg) { l.startStream(); l.send(`data: {"error":{"message":"x","code":500}}` + "\n\n") }, 502, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, d, pf := onePool(t, testOptions())
			d.set(func() { d.play = func(l *leg) { l.hang() } })
			pf.set(func() {
				pf.play = func(l *leg) {
					recvLeg(t, d.arrived, "decode leg")
					tc.play(l)
				}
			})
			start := time.Now()
			a := p.chat("s", true)
			if a.code != tc.code || !strings.Contains(string(a.body)+a.reason(), tc.want) {
				t.Errorf("%d %s, want %d %s", a.code, a.body, tc.code, tc.want)
			}
			if d := time.Since(start); d > 5*time.Second {
				t.Errorf("took %v: D was waited for", d)
			}
			recvLeg(t, d.gone, "cancel of the decode leg")
			p.quiet()
			if got := p.sum("kvc_router_turns_total", "outcome=prefill_error"); got != 1 {
				t.Errorf("outcome prefill_error counted %v, want 1", got)
			}
		})
	}
}

// A prefill flake is served by another pair, with a fresh room.
func TestPrefillFlakeIsRetried(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	p1, p2 := newMockWorker(t, "prefill-0", fleet.Prefill), newMockWorker(t, "prefill-1", fleet.Prefill)
	ok := make(chan struct{})
	wait := func(l *leg) {
		if l.turn.Bootstrap == nil {
			t.Error("a decode leg without a rendezvous")
		}
		select {
		case <-ok:
			serveChat("done")(l)
		case <-l.r.Context().Done():
		}
	}
	var once sync.Once
	for _, d := range []*mockWorker{d1, d2} {
		d.play = wait
	}
	for _, pf := range []*mockWorker{p1, p2} {
		pf.play = func(l *leg) {
			first := false
			once.Do(func() { first = true })
			if first {
				status(500, `{"error":{"message":"flake","type":"x"}}`)(l)
				return
			}
			close(ok)
			writeWhole(l, "x", "length")
		}
	}
	p := newPool(t, testOptions(), d1, d2, p1, p2)
	a := p.chat("s", true)
	if a.code != 200 || !strings.Contains(string(a.body), "done") || a.header.Get(admission.HeaderAttempts) != "2" {
		t.Fatalf("%d attempts %q %s", a.code, a.header.Get(admission.HeaderAttempts), a.body)
	}
	p.quiet()
	rooms := map[int64]int{}
	for _, w := range []*mockWorker{d1, d2, p1, p2} {
		for _, l := range w.seen() {
			rooms[l.turn.Bootstrap.Room]++
		}
	}
	if len(rooms) != 2 {
		t.Errorf("rooms %v, want two pairs", rooms)
	}
}

// R48: a decode leg that cannot be reached cancels its prefill leg at once.
func TestDecodeFailureCancelsPrefill(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	pf.set(func() { pf.play = func(l *leg) { l.hang() } })
	d.set(func() {
		d.play = func(l *leg) {
			recvLeg(t, pf.arrived, "prefill leg")
			l.reset()
		}
	})
	p.chat("s", true).wantError(t, 502)
	recvLeg(t, pf.gone, "cancel of the prefill leg")
}

// A decode leg's own 4xx is the client's answer, and ends the prefill leg.
func TestDecode4xxCancelsPrefill(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	pf.set(func() { pf.play = func(l *leg) { l.hang() } })
	d.set(func() {
		d.play = func(l *leg) {
			recvLeg(t, pf.arrived, "prefill leg")
			status(400, `{"error":{"message":"no","type":"x"}}`)(l)
		}
	})
	if a := p.chat("s", false); a.code != 400 {
		t.Errorf("%d %s", a.code, a.body)
	}
	recvLeg(t, pf.gone, "cancel of the prefill leg")
	if n := len(d.seen()); n != 1 {
		t.Errorf("%d decode legs: a 4xx was retried", n)
	}
}

// R54: prefill failing after decode began ends the stream with an in-band error.
func TestPrefillFailureAfterTheFirstByte(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	streaming := make(chan struct{})
	pf.set(func() {
		pf.play = func(l *leg) {
			<-streaming
			p.eventually("the client has a token", func() bool { return p.sum("kvc_router_ttft_seconds") > 0 })
			status(500, `{"error":{"message":"late","type":"x"}}`)(l)
		}
	})
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			for range 3 {
				l.send(chatEvents("tok")[1])
			}
			close(streaming)
			l.hang()
		}
	})
	a := p.chat("s", true)
	if a.code != 200 || strings.Count(string(a.body), "tok") != 3 || !strings.Contains(string(a.body), `{"error":`) ||
		!strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
		t.Errorf("%d %s", a.code, a.body)
	}
	p.quiet()
	if got := p.sum("kvc_router_turns_total", "outcome=prefill_error"); got != 1 {
		t.Errorf("outcome prefill_error counted %v, want 1", got)
	}
}

// R49–R51, R56, R57: a client that leaves in any phase is noticed by both
// workers, counts against nobody, and leaves nothing behind.
func TestHangUpInEveryPhase(t *testing.T) {
	type phase struct {
		name   string
		stream bool
		setUp  func(p *pool, d, pf *mockWorker)
		on     func(d, pf *mockWorker) <-chan *leg // the leg after whose arrival the client leaves
		gone   func(d, pf *mockWorker) []<-chan *leg
	}
	hang := func(l *leg) { l.hang() }
	both := func(d, pf *mockWorker) []<-chan *leg { return []<-chan *leg{d.gone, pf.gone} }
	onlyD := func(d, _ *mockWorker) []<-chan *leg { return []<-chan *leg{d.gone} }
	atD := func(d, _ *mockWorker) <-chan *leg { return d.arrived }
	phases := []phase{
		{"before the headers, streaming", true, func(_ *pool, d, pf *mockWorker) { d.play, pf.play = hang, hang }, atD, both},
		{"before the headers, whole", false, func(_ *pool, d, pf *mockWorker) { d.play, pf.play = hang, hang }, atD, both},
		{"before the first event", true, func(_ *pool, d, pf *mockWorker) {
			d.play, pf.play = func(l *leg) { l.startStream(); l.hang() }, hang
		}, atD, both},
		{"between events", true, func(_ *pool, d, _ *mockWorker) {
			d.play = func(l *leg) { l.startStream(); l.send(chatEvents("x")[0]); l.hang() }
		}, atD, onlyD},
		{"while a fused question is open", true, func(p *pool, d, _ *mockWorker) {
			d.hold(key("s"))
			p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
			d.verdict = func(admission.Turn) admission.Verdict {
				time.Sleep(100 * time.Millisecond)
				return refuseWith("no-d-capacity")
			}
			d.play = hang
		}, atD, onlyD},
	}
	for _, ph := range phases {
		t.Run(ph.name, func(t *testing.T) {
			p, d, pf := onePool(t, testOptions())
			if ph.name != "while a fused question is open" {
				d.set(func() { ph.setUp(p, d, pf) })
			} else {
				ph.setUp(p, d, pf)
			}
			ctx, cancel := context.WithCancel(context.Background())
			ended := make(chan error, 1)
			go func() {
				resp, err := p.client.Do(p.request(ctx, "/v1/chat/completions", []byte(chatBody("s", ph.stream)), "x-session-id", "s"))
				if err == nil {
					_, err = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				ended <- err
			}()
			recvLeg(t, ph.on(d, pf), "leg")
			if ph.name == "before the headers, streaming" {
				recvLeg(t, pf.arrived, "prefill leg")
			}
			time.Sleep(20 * time.Millisecond) // let what was sent be relayed
			start := time.Now()
			cancel()
			if err := <-ended; err == nil {
				t.Error("the client's request ended well")
			}
			for _, c := range ph.gone(d, pf) {
				recvLeg(t, c, "cancel")
			}
			if took := time.Since(start); took > 2*time.Second {
				t.Errorf("cancel took %v", took)
			}
			p.quiet()
			if got := p.sum("kvc_router_turns_total", "outcome=client_cancelled"); got != 1 {
				t.Errorf("outcome client_cancelled counted %v, want 1", got)
			}
			if w := p.proxy.Status().Workers[0]; w.Breaker != "closed" {
				t.Errorf("breaker %s after a hang-up", w.Breaker)
			}
		})
	}
}

// A client that leaves while the RPC is open ends the question.
func TestHangUpWhileAsking(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	asked, gone := make(chan struct{}), make(chan struct{})
	d.set(func() {
		d.answer = func(w http.ResponseWriter, _ admission.Question) {
			close(asked)
			<-gone
			admission.WriteJSON(w, 200, "application/json", d.admit("", 0))
		}
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		resp, err := p.client.Do(p.request(ctx, "/v1/chat/completions", []byte(chatBody("s", true))))
		if err == nil {
			resp.Body.Close()
			t.Error("an answer came")
		}
	}()
	<-asked
	cancel()
	<-ended
	p.eventually("the cancel counted", func() bool {
		return p.sum("kvc_router_turns_total", "outcome=client_cancelled") == 1
	})
	close(gone)
	if n := len(d.seen()); n != 0 {
		t.Errorf("%d legs after the hang-up", n)
	}
}

// R56, R57: random cancels leave every gauge at 0.
func TestRandomCancelsLeaveNothing(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	slow := func(l *leg) {
		l.startStream()
		for _, e := range chatEvents("x") {
			time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
			l.send(e)
		}
	}
	d.set(func() { d.play = slow })
	pf.set(func() { pf.play = func(l *leg) { time.Sleep(time.Millisecond); writeWhole(l, "", "length") } })
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(40000))*time.Microsecond)
			defer cancel()
			body := []byte(chatBody(fmt.Sprint(i%40), i%3 != 0))
			resp, err := p.client.Do(p.request(ctx, "/v1/chat/completions", body))
			if err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	wg.Wait()
	p.quiet()
	if n := p.sum("kvc_router_turns_total"); n == 0 || n > 300 {
		t.Errorf("%v turns ended, want at most 300, each once", n)
	}
}

// R64: the next turn of a session waits until the worker has ended the
// cancelled one; the turn frame is the end.
func TestNextTurnWaitsForTheCancelledOne(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	d.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	d.set(func() { d.play = func(l *leg) { l.startStream(); l.send(chatEvents("x")[0]); l.hang() } })
	ctx, cancel := context.WithCancel(context.Background())
	resp, err := p.client.Do(p.request(ctx, "/v1/chat/completions", []byte(chatBody("s", true)), "x-session-id", "s"))
	if err != nil {
		t.Fatal(err)
	}
	first := recvLeg(t, d.arrived, "first turn")
	cancel()
	resp.Body.Close()
	recvLeg(t, d.gone, "cancel")

	d.set(func() { d.play = serveChat("next") })
	got := make(chan answer, 1)
	go func() { got <- p.chat("s", true) }()
	select {
	case <-d.arrived:
		t.Fatal("the next turn reached the engine while the cancelled one was still there")
	case <-time.After(200 * time.Millisecond):
	}
	d.feed.Publish(kvc.Change{Kind: kvc.ChangeTurn, Turn: kvc.TurnInfo{Attempt: first.turn.Attempt,
		Session: first.turn.Session, Mode: kvc.Direct, Outcome: kvc.OutcomeCancelled}})
	if a := <-got; a.code != 200 || a.mode() != "direct" {
		t.Errorf("%d %s", a.code, a.mode())
	}
	if p.sum("kvc_router_turn_waits_total", "result=ended") != 1 {
		t.Error("the wait was not counted")
	}
}

// A cancelled turn that takes long to end does not hold its session for ever:
// the next turn goes elsewhere, and it is no reject.
func TestNextTurnGoesElsewhereWhenTheCancelledOneLingers(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	p := newPool(t, testOptions(), d1, d2, newMockWorker(t, "prefill-0", fleet.Prefill))
	d1.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	d1.set(func() { d1.play = func(l *leg) { l.hang() } })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		resp, err := p.client.Do(p.request(ctx, "/v1/chat/completions", []byte(chatBody("s", true)), "x-session-id", "s"))
		if err == nil {
			resp.Body.Close()
		}
	}()
	recvLeg(t, d1.arrived, "first turn")
	p.eventually("admitted", func() bool {
		return p.sum("kvc_router_admission_seconds", "way=fused", "result=admitted") == 1
	})
	cancel()
	<-ended
	recvLeg(t, d1.gone, "cancel")
	start := time.Now()
	a := p.chat("s", true)
	if a.code != 200 || a.header.Get(admission.HeaderWorker) != "decode-1" || time.Since(start) > 10*time.Second {
		t.Errorf("%d on %s after %v", a.code, a.header.Get(admission.HeaderWorker), time.Since(start))
	}
	for _, c := range p.proxy.state.Explain(kvc.Request{Session: session.Key("ns", "pool", "s")}, nil).Decode {
		if c.Rejects != 0 {
			t.Errorf("%s has %d rejects", c.Worker, c.Rejects)
		}
	}
}

// R60: P is called only once D has promised a place.
func TestPrefillWaitsForTheLease(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	open := make(chan struct{})
	d.set(func() {
		d.answer = func(w http.ResponseWriter, q admission.Question) {
			<-open
			admission.WriteJSON(w, 200, "application/json", d.admit(q.Session, q.Turn))
		}
	})
	got := make(chan answer, 4)
	for i := range cap(got) {
		go func() { got <- p.chat(fmt.Sprint("s", i), true) }()
	}
	p.eventually("all asked", func() bool { return len(d.questions()) == cap(got) })
	if n := len(pf.seen()); n != 0 {
		t.Errorf("%d prefill legs before D had room", n)
	}
	close(open)
	for range cap(got) {
		if a := <-got; a.code != 200 {
			t.Errorf("%d %s", a.code, a.body)
		}
	}
}

// A fused question refused with 409 goes elsewhere by RPC; the refusal is no
// fault of the worker.
func TestRefusedAtHomeGoesElsewhere(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	p := newPool(t, testOptions(), d1, d2, pf)
	d1.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	d1.set(func() { d1.verdict = func(admission.Turn) admission.Verdict { return refuseWith("no-d-capacity") } })
	a := p.chat("s", true)
	if a.code != 200 || a.header.Get(admission.HeaderWorker) != "decode-1" || a.header.Get(admission.HeaderAttempts) != "1" {
		t.Errorf("%d on %s after %s attempts", a.code, a.header.Get(admission.HeaderWorker), a.header.Get(admission.HeaderAttempts))
	}
	if got := p.sum("kvc_router_admission_seconds", "way=fused", "result=refused"); got != 1 {
		t.Errorf("fused refusals %v, want 1", got)
	}
	for _, w := range p.proxy.Status().Workers {
		if w.Breaker != "closed" {
			t.Errorf("%s: breaker %s after a refusal", w.Pod, w.Breaker)
		}
	}
}

// A worker whose 103 never arrives is asked by RPC only.
func TestWithoutHintsOnlyTheRPCIsUsed(t *testing.T) {
	d := newMockWorker(t, "decode-nohint", fleet.Decode)
	d.noHint = true
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	p := newPool(t, testOptions(), d, pf)
	p.eventually("the probe ended", func() bool { return p.sum("kvc_router_hint_probes_total", "result=missing") > 0 })
	d.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	if a := p.chat("s", true); a.code != 200 || a.mode() != "direct" {
		t.Fatalf("%d %s", a.code, a.mode())
	}
	if l := d.leg(0); l.turn.Admit != admission.AdmitLease || len(d.questions()) != 1 {
		t.Errorf("admit %q after %d questions, want a lease after one", l.turn.Admit, len(d.questions()))
	}
}

// A verdict that does not come in time is unknown: the leg is cancelled before
// anyone else is asked, and it is no reject.
func TestLateVerdictIsUnknown(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	o := testOptions()
	o.AskTimeout = 150 * time.Millisecond
	p := newPool(t, o, d1, d2, pf)
	d1.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	stuck := make(chan struct{})
	d1.set(func() {
		d1.verdict = func(admission.Turn) admission.Verdict { <-stuck; return refuseWith("draining") }
	})
	a := p.chat("s", true)
	if a.code != 200 || a.header.Get(admission.HeaderWorker) != "decode-1" {
		t.Errorf("%d on %s", a.code, a.header.Get(admission.HeaderWorker))
	}
	close(stuck)
	recvLeg(t, d1.gone, "cancel of the stuck question")
	if got := p.sum("kvc_router_admission_seconds", "way=fused", "result=timeout"); got != 1 {
		t.Errorf("fused timeouts %v, want 1", got)
	}
	x := p.proxy.state.Explain(kvc.Request{Session: session.Key("ns", "pool", "s")}, nil)
	for _, c := range x.Decode {
		if c.Rejects != 0 {
			t.Errorf("%s has %d rejects for a timeout (R80)", c.Worker, c.Rejects)
		}
	}
}

// R80, R81: an admission route that fails or hangs harms neither the worker's
// breaker on the data path nor the other workers.
func TestBrokenAdmissionRoute(t *testing.T) {
	d1 := newMockWorker(t, "decode-0", fleet.Decode)
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	p := newPool(t, testOptions(), d1, pf)
	d1.set(func() {
		d1.answer = func(w http.ResponseWriter, _ admission.Question) { admission.WriteError(w, 500, "broken") }
	})
	for i := range 10 {
		a := p.chat(fmt.Sprint("s", i), true)
		if a.code != 200 || a.mode() != "fallback" || a.reason() != "unanswered" {
			t.Fatalf("turn %d: %d %s %s", i, a.code, a.mode(), a.reason())
		}
	}
	w := p.proxy.worker(kvc.WorkerID(d1.id))
	if w.data.String() != "closed" {
		t.Error("the data breaker opened for admission faults")
	}
	if n := len(d1.questions()); n >= 10 {
		t.Errorf("%d questions: the admission breaker never opened", n)
	}
}

// R67: client errors never open a breaker.
func Test4xxNeverOpensABreaker(t *testing.T) {
	p, d := unified(t, testOptions())
	for _, code := range []int{400, 401, 404, 422, 429} {
		d.set(func() { d.play = status(code, `{"error":{"message":"no","type":"x"}}`) })
		for range 20 {
			if a := p.chat("", false); a.code != code && (code != 401 || a.code != 502) {
				t.Fatalf("status %d became %d", code, a.code)
			}
		}
	}
	d.set(func() { d.play = serveChat("ok") })
	if a := p.chat("", false); a.code != 200 || p.proxy.Status().Workers[0].Breaker != "closed" {
		t.Errorf("after 100 client errors: %d, breaker %s", a.code, p.proxy.Status().Workers[0].Breaker)
	}
}

// R68, R70: each shortage has its own status and reason.
func TestShortages(t *testing.T) {
	t.Run("no worker is 503", func(t *testing.T) {
		p := newPool(t, testOptions())
		a := p.chat("s", true)
		a.wantError(t, 503)
		if a.reason() != reasonNoWorker || a.header.Get("Retry-After") == "" {
			t.Errorf("reason %q Retry-After %q", a.reason(), a.header.Get("Retry-After"))
		}
	})
	t.Run("all refusing and no place in the queue is 429", func(t *testing.T) {
		p, d, _ := onePool(t, testOptions())
		d.set(func() {
			d.answer = func(w http.ResponseWriter, _ admission.Question) {
				admission.WriteJSON(w, 200, "application/json", refuseWith("no-d-capacity"))
			}
			d.play = func(l *leg) {
				l.w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
				l.w.Header().Set("Retry-After", "7")
				status(503, `{"error":{"message":"queue full","type":"x"}}`)(l)
			}
		})
		a := p.chat("s", true)
		a.wantError(t, 429)
		if a.reason() != reasonContended || a.header.Get("Retry-After") != "7" {
			t.Errorf("reason %q Retry-After %q", a.reason(), a.header.Get("Retry-After"))
		}
		if l := d.leg(0); l.turn.Admit != admission.AdmitNone {
			t.Errorf("admit %q, want none: a fallback waits in the worker's queue", l.turn.Admit)
		}
	})
	t.Run("all breakers open is 503", func(t *testing.T) {
		p, d := unified(t, testOptions())
		d.set(func() { d.play = func(l *leg) { l.reset() } })
		for range 3 {
			p.chat("", false)
		}
		a := p.chat("", false)
		a.wantError(t, 503)
		if a.header.Get("Retry-After") == "" {
			t.Error("no Retry-After")
		}
	})
	t.Run("shutting down is 503", func(t *testing.T) {
		p, _ := unified(t, testOptions())
		p.proxy.Shutdown()
		a := p.chat("", false)
		a.wantError(t, 503)
		if a.reason() != reasonShutdown {
			t.Errorf("reason %q", a.reason())
		}
	})
}

// R72: a stale keep-alive connection is replaced without a second generation.
func TestKilledWorkerFailsFastAndBreaks(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	if a := p.chat("s", true); a.code != 200 {
		t.Fatal(a.code)
	}
	d.kill()
	start := time.Now()
	a := p.chat("s", true)
	if a.code != 502 && a.code != 503 || time.Since(start) > 5*time.Second {
		t.Errorf("%d after %v", a.code, time.Since(start))
	}
	p.quiet()
}

// R99, R105: another id under an old name is another worker: nothing believed
// of the old one is left, and its series are not doubled.
func TestNewIncarnation(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	d.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	again := newMockWorker(t, "decode-0", fleet.Decode)
	p.file.Workers = []fleet.Worker{again.fleetWorker(), pf.fleetWorker()}
	p.apply()
	p.settled()
	if home, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); ok {
		t.Errorf("home is still %s", home)
	}
	if a := p.chat("s", true); a.code != 200 || a.mode() == "direct" || len(again.seen()) != 1 {
		t.Errorf("%d %s", a.code, a.mode())
	}
	p.file.Workers = []fleet.Worker{pf.fleetWorker()}
	p.apply()
	p.eventually("series deleted", func() bool {
		fams, err := p.metrics.Registry().Gather()
		if err != nil {
			t.Fatal(err)
		}
		return !strings.Contains(fmt.Sprint(fams), "decode-0")
	})
}

// R100: a draining worker gets no new session and keeps those it holds.
func TestDrainingWorker(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	p := newPool(t, testOptions(), d1, d2, pf)
	d1.hold(key("mine"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "mine")); return ok })
	for name, drain := range map[string]func(on bool){
		"by the fleet file": func(on bool) {
			p.file.Workers[0].State = map[bool]fleet.State{true: fleet.Draining, false: fleet.Active}[on]
			p.apply()
		},
		"by the worker's word": func(on bool) {
			d1.feed.PublishState(map[bool]string{true: "Draining", false: "Active"}[on], time.Time{}, time.Time{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			drain(true)
			p.eventually("draining", func() bool { return p.proxy.Status().Workers[0].State == "Draining" })
			for i := range 6 {
				if a := p.chat(fmt.Sprint(name, i), true); a.header.Get(admission.HeaderWorker) != "decode-1" {
					t.Errorf("a new session went to %s", a.header.Get(admission.HeaderWorker))
				}
			}
			if a := p.chat("mine", true); a.header.Get(admission.HeaderWorker) != "decode-0" {
				t.Errorf("the session it holds went to %s", a.header.Get(admission.HeaderWorker))
			}
			drain(false)
			p.eventually("active", func() bool { return p.proxy.Status().Workers[0].State == "Active" })
		})
	}
}

// R74: there is no hidden cap on connections.
func TestManyStreamsAtOnce(t *testing.T) {
	p, d := unified(t, testOptions())
	n := 300
	release := make(chan struct{})
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			l.send(chatEvents("x")[0])
			<-release
			l.send("data: [DONE]\n\n")
		}
	})
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			if a := p.chat("", true); a.code != 200 || a.err != nil {
				t.Errorf("%d %v", a.code, a.err)
			}
		})
	}
	p.eventually("all in flight", func() bool { return p.sum("kvc_router_inflight") == float64(n) })
	close(release)
	wg.Wait()
}

// T1: a client that half-closes after its request is taken for gone: Go's
// server cannot tell the two apart.
func TestHalfCloseCountsAsAHangUp(t *testing.T) {
	p, d := unified(t, testOptions())
	d.set(func() { d.play = func(l *leg) { l.hang() } })
	c, err := net.Dial("tcp", p.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	body := chatBody("s", true)
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	recvLeg(t, d.arrived, "leg")
	if tc, ok := c.(*net.TCPConn); !ok || tc.CloseWrite() != nil {
		t.Fatal(errors.New("no half-close"))
	}
	recvLeg(t, d.gone, "cancel")
}
