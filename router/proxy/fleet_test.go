package proxy

import (
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/session"
)

// What a change of the fleet file does to the worker it is about: kept with its
// connections and beliefs, or followed anew.
func TestApplyKeepsWhatDidNotChange(t *testing.T) {
	cases := map[string]struct {
		change func(*fleet.Worker)
		kept   bool
	}{
		"nothing":           {func(*fleet.Worker) {}, true},
		"its state":         {func(w *fleet.Worker) { w.State = fleet.Draining }, true},
		"its revision":      {func(w *fleet.Worker) { w.Revision = "r2" }, true},
		"its topology":      {func(w *fleet.Worker) { w.Topology = map[string]string{"rail": "b"} }, true},
		"its bootstrap":     {func(w *fleet.Worker) { w.Bootstrap = &fleet.Bootstrap{Host: "h", Port: 9} }, false},
		"an equal one":      {func(w *fleet.Worker) { w.Bootstrap = &fleet.Bootstrap{Host: "127.0.0.1", Port: 8998} }, true},
		"its name":          {func(w *fleet.Worker) { w.Name = "other" }, false},
		"its role":          {func(w *fleet.Worker) { w.Role, w.Bootstrap = fleet.Decode, nil }, false},
		"its address":       {func(w *fleet.Worker) { w.URL = strings.Replace(w.URL, "127.0.0.1", "localhost", 1) }, false},
		"a new incarnation": {func(w *fleet.Worker) { w.ID += "-2" }, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, _, pf := onePool(t, testOptions())
			before := p.proxy.worker(kvc.WorkerID(pf.id))
			for i := range p.file.Workers {
				if p.file.Workers[i].Role == fleet.Prefill {
					tc.change(&p.file.Workers[i])
				}
			}
			p.apply()
			after := p.proxy.worker(kvc.WorkerID(pf.id))
			if kept := before == after; kept != tc.kept {
				t.Errorf("kept %t, want %t", kept, tc.kept)
			}
			if !tc.kept {
				select {
				case <-before.done:
				case <-time.After(patience):
					t.Error("the old follower goes on")
				}
			}
		})
	}
}

// A worker that left serves its running stream to the end, and gets nothing new.
func TestARemovedWorkerFinishesItsStream(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	for _, d := range []*mockWorker{d1, d2} {
		d.path = "Unified"
		d.feed.Restart(d.hello(), 0)
	}
	p := newPool(t, testOptions(), d1, d2)
	d1.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	finish := make(chan struct{})
	d1.set(func() {
		d1.play = func(l *leg) {
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
	recvLeg(t, d1.arrived, "leg")
	p.file.Workers = []fleet.Worker{d2.fleetWorker()}
	p.apply()
	for range 3 {
		if a := p.chat("other", true); a.header.Get(admission.HeaderWorker) != "decode-1" {
			t.Errorf("a new turn went to %s", a.header.Get(admission.HeaderWorker))
		}
	}
	close(finish)
	if a := <-got; a.err != nil || string(a.body) != strings.Join(chatEvents("x"), "") {
		t.Errorf("the removed worker's stream: %v %s", a.err, a.body)
	}
	p.eventually("series deleted", func() bool { return p.count("kvc_router_inflight", "worker=decode-0") == 0 })
}

// The profile of a pool is what its decode workers say, surface by surface.
func TestDisaggregatedIsWhatTheWorkersSay(t *testing.T) {
	d := newMockWorker(t, "decode-0", fleet.Decode)
	p := newPool(t, testOptions(), d, newMockWorker(t, "prefill-0", fleet.Prefill))
	if !p.proxy.disaggregated("chat") || p.proxy.path("chat") != kvc.ConditionalAggregation {
		t.Errorf("path %q, disaggregated %t", p.proxy.path("chat"), p.proxy.disaggregated("chat"))
	}
	h := d.hello()
	h.DirectPath["generate"] = "Unified"
	d.feed.Restart(h, 0)
	p.eventually("the new hello", func() bool { return p.proxy.path("generate") == kvc.Unified })
	if p.proxy.disaggregated("generate") || !p.proxy.disaggregated("chat") {
		t.Error("the surfaces were mixed up")
	}
}

// While no decode worker has said anything, the fleet's shape decides.
func TestDisaggregatedWithoutAWord(t *testing.T) {
	for name, tc := range map[string]struct {
		role fleet.Role
		want bool
	}{"with prefill workers": {fleet.Prefill, true}, "without": {fleet.Decode, false}} {
		t.Run(name, func(t *testing.T) {
			p := New(testOptions())
			defer p.Close()
			fw := fleet.Worker{Name: "w", ID: "w", Role: tc.role, URL: "http://127.0.0.1:1"}
			if tc.role == fleet.Prefill {
				fw.Bootstrap = &fleet.Bootstrap{Host: "h", Port: 1}
			}
			p.Apply(&fleet.File{Version: 1, Pool: fleet.Pool{Model: "m"}, Workers: []fleet.Worker{fw}})
			if got := p.disaggregated("chat"); got != tc.want {
				t.Errorf("disaggregated = %t, want %t", got, tc.want)
			}
		})
	}
}

// A worker whose feed breaks is still routable, without overlap; the metric says
// so, and a new snapshot mends it.
func TestAnUntrustedWorkerStaysRoutable(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	h := d.hello()
	h.Format = "kvc-b96-v0" // hashes of another format than ours
	d.feed.Restart(h, 0)
	p.eventually("distrust", func() bool { return p.sum("kvc_feed_trusted", "worker=decode-0") == 0 })
	if a := p.chat("s", true); a.code != 200 {
		t.Errorf("%d %s", a.code, a.body)
	}
	d.feed.Restart(d.hello(), 0)
	p.eventually("trust", func() bool { return p.sum("kvc_feed_trusted", "worker=decode-0") == 1 })
	if p.sum("kvc_feed_untrusted_total", "cause=format") == 0 {
		t.Error("the cause was not counted")
	}
}

// R61, R99: an engine that restarted under the same worker has another epoch;
// a question in the old one's name is refused as stale and harms nobody.
func TestStaleEpochIsNoFault(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	d.hold(key("s"))
	p.eventually("home known", func() bool { _, ok := p.proxy.state.Home(session.Key("ns", "pool", "s")); return ok })
	d.set(func() { d.verdict = func(admission.Turn) admission.Verdict { return refuseWith("stale-epoch") } })
	a := p.chat("s", true)
	if a.code != 200 || a.mode() != "fallback" || p.proxy.Status().Workers[0].Breaker != "closed" {
		t.Errorf("%d %s, breaker %s", a.code, a.mode(), p.proxy.Status().Workers[0].Breaker)
	}
	for _, c := range p.proxy.state.Explain(kvc.Request{Session: session.Key("ns", "pool", "s")}, nil).Decode {
		if c.Rejects != 0 {
			t.Errorf("%d rejects for a stale epoch", c.Rejects)
		}
	}
}

// An expired lease is asked for anew; the turn is served, and the client sees
// one attempt.
func TestExpiredLeaseIsAskedForAnew(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	first := true
	d.set(func() {
		d.play = func(l *leg) {
			if first {
				first = false
				l.w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
				admission.WriteJSON(l.w, 409, admission.ContentTypeVerdict, refuseWith("lease-expired"))
				return
			}
			serveChat("ok")(l)
		}
	})
	a := p.chat("s", true)
	if a.code != 200 || a.mode() != "seed" || a.header.Get(admission.HeaderAttempts) != "1" {
		t.Errorf("%d %s after %s attempts", a.code, a.mode(), a.header.Get(admission.HeaderAttempts))
	}
	if n := len(d.questions()); n != 2 {
		t.Errorf("%d questions, want 2", n)
	}
	one, two := d.leg(0).turn, d.leg(1).turn
	if one.Attempt == two.Attempt || one.Lease == two.Lease || one.Bootstrap.Room == two.Bootstrap.Room {
		t.Error("the second leg reuses something of the first")
	}
	if p.sum("kvc_router_retries_total", "cause=lease_expired") != 1 {
		t.Error("the expiry was not counted")
	}
}

// A lease that is granted and not used is given back.
func TestUnusedLeasesAreReleased(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	d.set(func() {
		d.play = func(l *leg) { l.reset() }
	})
	p.chat("s", true).wantError(t, 502)
	granted := len(d.questions())
	presented := 0
	for _, l := range d.seen() {
		if l.turn.Lease != "" {
			presented++
		}
	}
	p.eventually("leases given back", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.released)+presented >= granted
	})
}
