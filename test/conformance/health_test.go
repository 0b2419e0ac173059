package conformance

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/router/stats"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

func TestR67_ClientErrorsOpenNoBreaker(t *testing.T) {
	for _, leg := range []string{"decode", "prefill"} {
		t.Run(leg, func(t *testing.T) {
			p := kit.New(t, kit.Options{Decode: 2, Prefill: 1, Sidecar: shortCap(20 * time.Millisecond)})
			bad := p.D
			if leg == "prefill" {
				bad = p.P
				for _, n := range p.D {
					n.Engine.Always(func(ex *kit.Exchange) { ex.Hang() })
				}
			}
			for _, status := range []int{400, 401, 403, 404, 408, 413, 422, 429} {
				for _, n := range bad {
					n.Engine.Always(func(ex *kit.Exchange) { ex.Refuse(status) })
				}
				for i := range 20 {
					a := p.Do(kit.Request{Body: kit.Chat(fmt.Sprint(status, " ", i), 0, i%2 == 0)})
					if a.Status == http.StatusOK || a.Err != nil {
						t.Fatalf("status %d became %d, %v", status, a.Status, a.Err)
					}
				}
			}
			for _, n := range p.Nodes() {
				n.Engine.Always(n.Engine.Serve)
			}
			served := map[string]bool{}
			for i := range 8 {
				served[p.OK(kit.Request{Body: kit.Chat(fmt.Sprint("good ", i), 0, true)}).Header.Get("X-Kvc-Worker")] = true
			}
			if len(served) != len(p.D) {
				t.Errorf("good requests went to %v only", served)
			}
			if n := p.Metric("kvc_router_breaker_open"); n != 0 {
				t.Errorf("%v breakers are open", n)
			}
		})
	}
	t.Run("hang-ups", func(t *testing.T) {
		p := unified(t, kit.Options{})
		for i := range 20 {
			p.D[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
			stop, done := p.Start(kit.Request{Body: kit.Chat(fmt.Sprint(i), 0, true)})
			p.D[0].Engine.AwaitTurns(i + 1)
			stop()
			<-done
		}
		p.OK(kit.Request{Body: kit.Chat("good", 0, true)})
		if n := p.Metric("kvc_router_breaker_open"); n != 0 {
			t.Errorf("%v breakers are open", n)
		}
	})
}

func TestR80_FailingSideCallsAreNotTheWorkers(t *testing.T) {
	const deadline = 60 * time.Millisecond
	failures := map[string]func(w http.ResponseWriter, r *http.Request, q admission.Question){
		"500": func(w http.ResponseWriter, _ *http.Request, _ admission.Question) {
			w.WriteHeader(http.StatusInternalServerError)
		},
		"503": func(w http.ResponseWriter, _ *http.Request, _ admission.Question) {
			admission.WriteError(w, http.StatusServiceUnavailable, "x")
		},
		"404": func(w http.ResponseWriter, r *http.Request, _ admission.Question) { http.NotFound(w, r) },
		"401": func(w http.ResponseWriter, _ *http.Request, _ admission.Question) {
			admission.WriteError(w, http.StatusUnauthorized, "x")
		},
		"no answer": func(_ http.ResponseWriter, r *http.Request, _ admission.Question) { <-r.Context().Done() },
		"garbage":   func(w http.ResponseWriter, _ *http.Request, _ admission.Question) { _, _ = w.Write([]byte("<html>")) },
		"nonsense": func(w http.ResponseWriter, _ *http.Request, _ admission.Question) {
			_, _ = w.Write([]byte(`{"can_admit":true,"mode":"sideways"}`))
		},
		"broken off": func(http.ResponseWriter, *http.Request, admission.Question) { panic(http.ErrAbortHandler) },
	}
	for name, fail := range failures {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Decode: 2, Prefill: 1, Peers: true, NoHint: true,
				Router: func(o *proxy.Options) { o.AskTimeout = deadline }})
			p.OK(kit.Request{Body: kit.Chat("ann", 0, true), Session: "s"})
			p.Settled()
			for _, n := range p.D {
				n.Peer.Admit(fail)
			}
			for k := range 6 { // twice the reject threshold
				a := p.OK(kit.Request{Body: kit.Chat("ann", k+1, true), Session: "s"})
				wantMode(t, a, kvc.Fallback)
				if got := a.Header.Get("X-Kvc-Reason"); got != string(kvc.ReasonUnanswered) {
					t.Errorf("reason %q: a failing question was taken for a refusal", got)
				}
				p.Settled()
			}
			if n := p.Metric("kvc_router_breaker_open", "kind", "data"); n != 0 {
				t.Errorf("%v data breakers are open", n)
			}
			if p.Metric("kvc_router_admission_seconds") == 0 {
				t.Error("nothing tells of the failing questions")
			}
			for _, n := range p.D {
				n.Peer.Admit(nil)
			}
			p.Eventually("the worker is asked again", func() bool {
				a := p.OK(kit.Request{Body: kit.Chat("ann", 8, true), Session: "s"})
				return a.Header.Get("X-Kvc-Mode") == kvc.Direct.String()
			})
		})
	}
}

// R80: the engine's /abort_request fails; the worker is as good as before.
func TestR80_FailingAborts(t *testing.T) {
	for name, fail := range map[string]func(w http.ResponseWriter, r *http.Request){
		"500":       func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) },
		"no answer": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
	} {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Prefill: 1})
			d := p.D[0].Engine
			d.Hook(func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path != "/abort_request" {
					return false
				}
				fail(w, r)
				return true
			})
			p.OK(kit.Request{Body: kit.Chat("ann", 0, false), Session: "s"})
			cancelOne(t, p, nil)
			a := p.OK(kit.Request{Body: kit.Chat("ann", 3, true), Session: "s"})
			wantMode(t, a, kvc.Direct)
			if s := p.D[0].Status(p); !s.Ready || s.State != "Active" {
				t.Errorf("the worker became ready=%v, %s", s.Ready, s.State)
			}
			if p.Metric("kvc_router_breaker_open") != 0 {
				t.Error("a breaker is open")
			}
			p.Eventually("the failing abort is counted", func() bool { return p.D[0].Metric(t, "kvc_sidecar_abort_errors_total") == 1 })
		})
	}
}

func TestR81_OneDeadPeerStallsNobodyElse(t *testing.T) {
	const deadline = time.Second
	p := kit.New(t, kit.Options{Decode: 2, Path: kvc.Unified, Peers: true, NoHint: true,
		Router: func(o *proxy.Options) { o.AskTimeout = deadline }})
	homes := map[string][]string{}
	for i := range 40 {
		s := fmt.Sprint("s", i)
		at := p.OK(kit.Request{Body: kit.Chat(s, 0, false), Session: s}).Header.Get("X-Kvc-Worker")
		homes[at] = append(homes[at], s)
		p.Settled()
	}
	dead, alive := homes["decode-0"], homes["decode-1"]
	if len(dead) == 0 || len(alive) == 0 {
		t.Fatalf("sessions are spread as %v", homes)
	}
	ask := func(s string, k int) float64 {
		start := time.Now()
		a := p.OK(kit.Request{Body: kit.Chat(s, k, false), Session: s})
		if a.Header.Get("X-Kvc-Mode") == "" {
			t.Errorf("no mode: %v", a.Header)
		}
		return time.Since(start).Seconds()
	}
	// mix sends turn k to both workers' sessions, 100 a second to the living one,
	// and returns the sorted seconds that each worker's turns took.
	mix := func(k int) (slow, quick []float64) {
		var wg sync.WaitGroup
		slow, quick = make([]float64, 50), make([]float64, 100)
		for i := range slow {
			wg.Go(func() { slow[i] = ask(dead[i%len(dead)], k) })
		}
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for i := range quick {
			<-tick.C
			wg.Go(func() { quick[i] = ask(alive[i%len(alive)], k) })
		}
		wg.Wait()
		slices.Sort(slow)
		slices.Sort(quick)
		return slow, quick
	}
	// The same mix with both alive says what this machine takes for it: a busy
	// one is slow in both.
	_, before := mix(1)
	p.Settled()
	p.D[0].Peer.Admit(func(_ http.ResponseWriter, r *http.Request, _ admission.Question) { <-r.Context().Done() })
	slow, quick := mix(2)
	usual, now, lost := stats.NearestRank(before, 90), stats.NearestRank(quick, 50), stats.NearestRank(slow, 99)
	t.Logf("seconds: living worker p90 before %.3f, p50 now %.3f; dead worker p99 %.3f", usual, now, lost)
	if now > usual+deadline.Seconds()/2 {
		t.Errorf("turns of the living worker took %v s, %v s before: as if they had waited for the dead one", now, usual)
	}
	if lost > usual+(2*deadline+soon).Seconds() { // two probes at most
		t.Errorf("turns of the dead worker took %v s", lost)
	}
}

func TestR56_CancelsGiveEverythingBack(t *testing.T) {
	const window = 8
	p := kit.New(t, kit.Options{Decode: 2, Prefill: 1, Capacity: window * 300, Transfer: time.Millisecond,
		Sidecar: shortCap(50 * time.Millisecond)})
	for _, n := range p.D {
		n.Engine.Always(func(ex *kit.Exchange) {
			if ex.Seen.Member("rid") != nil && !n.Engine.Meet(ex) {
				return
			}
			ex.Wait(time.Duration(rand.IntN(3)) * time.Millisecond)
			n.Engine.Answer(ex)
		})
	}
	cancels := 1000
	if testing.Short() {
		cancels = 100
	}
	var wg sync.WaitGroup
	gate := make(chan struct{}, 3*window)
	var cut atomic.Int64
	for i := range cancels {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			s := fmt.Sprint("s", i%50)
			stop, done := p.Start(kit.Request{Body: kit.Chat(s, i/50%4, i%3 > 0, `"max_tokens":20`), Session: s})
			select {
			case <-time.After(time.Duration(rand.IntN(12_000)) * time.Microsecond):
				stop()
				if a := <-done; a.Err != nil {
					cut.Add(1)
				}
			case <-done:
			}
		})
	}
	wg.Wait()
	if cut.Load() == 0 {
		t.Error("nothing was cancelled: the repro is no repro")
	}
	p.Quiet()
	var ends sync.WaitGroup
	for i := range window { // the whole window is there again
		ends.Go(func() { p.OK(kit.Request{Body: kit.Chat(fmt.Sprint("after ", i), 0, true, `"max_tokens":20`)}) })
	}
	ends.Wait()
}

func TestR57_OneFinaliserPerTurn(t *testing.T) {
	p := unified(t, kit.Options{Router: func(o *proxy.Options) { o.IdleTimeout = time.Second }})
	p.D[0].Engine.Always(func(ex *kit.Exchange) {
		ex.Wait(time.Duration(rand.IntN(3000)) * time.Microsecond)
		switch rand.IntN(300) {
		case 0:
			ex.Hang() // the idle timer ends it
		case 1:
			ex.RST()
		case 2:
			ex.Stream()
			ex.Send(kit.Token("a"))
			ex.RST()
		default:
			p.D[0].Engine.Answer(ex)
		}
	})
	runs := 2000
	if testing.Short() {
		runs = 200
	}
	stop := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() { // the gauges never go below zero
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if p.Metric("kvc_router_inflight") < 0 || p.Metric("kvc_router_requests_inflight") < 0 {
				t.Error("a gauge is negative")
				return
			}
			for _, w := range p.Router.Status().Workers {
				if w.InFlight < 0 {
					t.Errorf("%d turns in flight on %s", w.InFlight, w.Pod)
				}
			}
		}
	})
	var wg sync.WaitGroup
	gate := make(chan struct{}, 16)
	for i := range runs {
		gate <- struct{}{}
		wg.Go(func() {
			defer func() { <-gate }()
			s := fmt.Sprint("s", i%700)
			cancel, done := p.Start(kit.Request{Body: kit.Chat(s, 0, i%2 == 0), Session: s})
			if i%3 > 0 {
				time.Sleep(time.Duration(rand.IntN(20_000)) * time.Microsecond)
				cancel()
			}
			<-done
		})
	}
	wg.Wait()
	close(stop)
	watch.Wait()
	p.Quiet()
	accepted, ended := p.Metric("kvc_router_body_bytes"), p.Metric("kvc_router_turns_total")
	if accepted != ended || accepted < float64(runs)/2 {
		t.Errorf("%v turns began, %v ended, of %d", accepted, ended, runs)
	}
	for _, outcome := range []string{"ok", "client_cancelled"} {
		if outcomes(p, outcome) == 0 {
			t.Errorf("no turn ended %s: the race was none", outcome)
		}
	}
}

func TestR60_PrefillIsCalledWhenDecodeHasRoom(t *testing.T) {
	const window, seeds = 4, 32
	// Room for four prompts of 272 tokens and their reserve below the high water.
	p := kit.New(t, kit.Options{Prefill: 1, Capacity: 1300, Transfer: 5 * time.Millisecond})
	d, pre := p.D[0].Engine, p.P[0].Engine
	var mu sync.Mutex
	waiting, most, timeouts, running, crowd := 0, 0, 0, 0, 0
	pre.Always(func(ex *kit.Exchange) {
		mu.Lock()
		waiting++
		most = max(most, waiting)
		mu.Unlock()
		clock := time.AfterFunc(2*time.Second, func() { mu.Lock(); timeouts++; mu.Unlock() }) // P's own, of 120 s
		pre.Serve(ex)
		clock.Stop()
		mu.Lock()
		waiting--
		mu.Unlock()
	})
	d.Always(func(ex *kit.Exchange) {
		if ex.Seen.Member("rid") != nil && !d.Meet(ex) {
			return
		}
		mu.Lock()
		running++
		crowd = max(crowd, running)
		mu.Unlock()
		ex.Wait(20 * time.Millisecond)
		mu.Lock()
		running--
		mu.Unlock()
		d.Answer(ex)
	})
	var wg sync.WaitGroup
	for i := range seeds {
		wg.Go(func() {
			p.OK(kit.Request{Body: kit.Chat(fmt.Sprint("s", i), 0, true, `"max_tokens":20`), Session: fmt.Sprint(i)})
		})
	}
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	if timeouts > 0 {
		t.Errorf("%d prefills ran into P's clock", timeouts)
	}
	if most > window {
		t.Errorf("%d prefills were under way at once; D has room for %d", most, window)
	}
	if crowd > window {
		t.Errorf("%d turns ran on D at once", crowd)
	}
}
