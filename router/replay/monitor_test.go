package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/admission"
)

// plane is a router and two sidecars that only have a status.
type plane struct {
	*httptest.Server
	mu      sync.Mutex
	router  admission.RouterStatus
	workers map[string]*admission.SidecarStatus
	asked   int
	onAsk   func(p *plane) // under the lock, before an answer of the router
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	p := &plane{
		router: admission.RouterStatus{StartedMS: 5, PinChanges: 3, Workers: []admission.RouterWorker{
			{Worker: "w-d", Pod: "decode-0", Role: "decode", Seq: 7, Used: 40, CapacityTokens: 100},
			{Worker: "w-p", Pod: "prefill-0", Role: "prefill", Seq: 2},
		}},
		workers: map[string]*admission.SidecarStatus{
			"w-d": {Worker: "w-d", Role: "decode", Epoch: "e1", Seq: 7,
				Totals: admission.WorkerTotals{PrefillUncachedTokens: 10, TransferredTokens: 100, EvictedTokens: 1}},
			"w-p": {Worker: "w-p", Role: "prefill", Epoch: "e2", Seq: 2,
				Totals: admission.WorkerTotals{PrefillUncachedTokens: 1000}},
		},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /router"+admission.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.asked++
		if p.onAsk != nil {
			p.onAsk(p)
		}
		json.NewEncoder(w).Encode(p.router)
	})
	mux.HandleFunc("GET /{id}"+admission.PathStatus, func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		s, ok := p.workers[r.PathValue("id")]
		if !ok || r.Header.Get("Authorization") != "Bearer tok" {
			http.Error(w, "no", http.StatusUnauthorized)
			return
		}
		json.NewEncoder(w).Encode(s)
	})
	p.Server = httptest.NewServer(mux)
	t.Cleanup(p.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return p
}

func (p *plane) monitor() *Monitor {
	return &Monitor{AdminURL: p.URL + "/router", Token: "tok", Every: time.Millisecond, SettleWithin: time.Second,
		Sidecars: map[string]string{"w-d": p.URL + "/w-d", "w-p": p.URL + "/w-p"}}
}

func TestSettleWaitsForEveryFeedAndEveryTurn(t *testing.T) {
	cases := map[string]struct {
		unsettle func(*plane)
		settle   func(*plane)
	}{
		"the router is one change behind": {
			func(p *plane) { p.router.Workers[0].Seq = 6 },
			func(p *plane) { p.router.Workers[0].Seq = 7 }},
		"a turn is still under way on a worker": {
			func(p *plane) { p.workers["w-p"].InFlight = 1 },
			func(p *plane) { p.workers["w-p"].InFlight = 0 }},
		"the router does not know a worker yet": {
			func(p *plane) { p.router.Workers[1].Worker = "older" },
			func(p *plane) { p.router.Workers[1].Worker = "w-p" }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := newPlane(t)
			tc.unsettle(p)
			p.onAsk = func(p *plane) {
				if p.asked == 4 {
					tc.settle(p)
				}
			}
			if err := p.monitor().settle(t.Context()); err != nil {
				t.Fatal(err)
			}
			if p.asked < 4 {
				t.Errorf("settled after %d questions, before it was true", p.asked)
			}
		})
	}
}

func TestSettleGivesUpWithTheReason(t *testing.T) {
	p := newPlane(t)
	p.router.Workers[0].Seq = 6
	m := p.monitor()
	m.SettleWithin = 20 * time.Millisecond
	err := m.settle(t.Context())
	want := "wait for the router to follow the workers: worker w-d is at change 7, the router at 6"
	if err == nil || err.Error() != want {
		t.Errorf("error = %v, want %s", err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.settle(ctx); err == nil || !strings.Contains(err.Error(), "canceled") {
		t.Errorf("error after the run's end = %v", err)
	}
}

func TestCountersAreWhatTheRunAdded(t *testing.T) {
	p := newPlane(t)
	stop, err := p.monitor().start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.router.PinChanges = 5
	p.workers["w-d"].Totals = admission.WorkerTotals{PrefillUncachedTokens: 25, TransferredTokens: 160, EvictedTokens: 4}
	p.workers["w-p"].Epoch = "e2-restarted"
	p.workers["w-p"].Totals.PrefillUncachedTokens = 50
	p.mu.Unlock()
	load, got := stop()
	want := Counters{PinChanges: new(int64(2)), PrefillTokens: new(int64(50)), DecodePrefill: new(int64(15)),
		TransferredTokens: new(int64(60)), EvictedTokens: new(int64(3))}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(the prefill worker restarted, so it counts from zero)\n%s", diff)
	}
	if len(load) == 0 {
		t.Fatal("no sample of the load")
	}
	one := WorkerLoad{Pod: "decode-0", Role: "decode", Used: 40, Capacity: 100}
	if diff := cmp.Diff(one, load[0].Workers[0]); diff != "" {
		t.Error(diff)
	}
}

func TestUnknownCountersAreNull(t *testing.T) {
	var none *Monitor
	stop, err := none.start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if load, c := stop(); load != nil || c != (Counters{}) {
		t.Errorf("load %v, counters %+v of nothing", load, c)
	}
	p := newPlane(t)
	stop, err = (&Monitor{AdminURL: p.URL + "/router"}).start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if _, c := stop(); c.PinChanges == nil || c.PrefillTokens != nil {
		t.Errorf("counters %+v: the router alone knows pins and no tokens", c)
	}
}

func TestMonitorErrorsNameTheirSource(t *testing.T) {
	p := newPlane(t)
	m := p.monitor()
	m.Token = "wrong"
	_, err := m.start(t.Context(), time.Now())
	mentions(t, err, "read the status of worker w-", "401")
	m.AdminURL = p.URL + "/nowhere"
	_, err = m.start(t.Context(), time.Now())
	mentions(t, err, "read the router's status", "401")
}

func mentions(t *testing.T, err error, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if err == nil || !strings.Contains(err.Error(), p) {
			t.Errorf("error = %v, want it to mention %q", err, p)
		}
	}
}

// With one session in flight the next turn waits until the router has followed
// every worker; with two it does not.
func TestOneSessionInFlightSettlesBetweenTurns(t *testing.T) {
	for concurrency, want := range map[int]int{1: 3, 2: 0} {
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			f, p := newFake(t), newPlane(t)
			o := f.options()
			o.Concurrency, o.Settle, o.Monitor = concurrency, true, p.monitor()
			o.Monitor.Every = time.Hour // the sampler asks once, the start and the end once each
			mustRun(t, o, NewRecorded(sessions(1, 3)))
			p.mu.Lock()
			defer p.mu.Unlock()
			if got := p.asked - 3; got != want {
				t.Errorf("asked %d times between turns, want %d", got, want)
			}
		})
	}
}

// A worker that is restarting cannot be asked for a moment: that is waited for.
func TestSettleWaitsForAWorkerThatDoesNotAnswer(t *testing.T) {
	p := newPlane(t)
	away := p.workers["w-d"]
	delete(p.workers, "w-d")
	time.AfterFunc(30*time.Millisecond, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.workers["w-d"] = away
	})
	m := p.monitor()
	m.SettleWithin = 20 * time.Second
	if err := m.settle(t.Context()); err != nil {
		t.Error(err)
	}
	delete(p.workers, "w-d")
	m.SettleWithin = 20 * time.Millisecond
	mentions(t, m.settle(t.Context()), "wait for the router to follow the workers", "read the status of worker w-d")
}

// The last sample is the state at the end, however rarely samples are taken.
func TestTheLoadIsSampledToTheEnd(t *testing.T) {
	p := newPlane(t)
	m := p.monitor()
	m.Every = time.Hour
	stop, err := m.start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.router.Workers[0].Used = 99
	p.mu.Unlock()
	load, _ := stop()
	if n := len(load); n == 0 || load[n-1].Workers[0].Used != 99 {
		t.Errorf("samples %+v, want the end's 99", load)
	}
	for i := 1; i < len(load); i++ {
		if load[i].At < load[i-1].At {
			t.Errorf("sample %d at %v after %v", i, load[i].At, load[i-1].At)
		}
	}
}

func TestTheLoadIsSampledAsOftenAsAsked(t *testing.T) {
	p := newPlane(t)
	m := p.monitor()
	m.Every = 2 * time.Millisecond
	stop, err := m.start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for asked := 0; asked < 12 && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		p.mu.Lock()
		asked = p.asked
		p.mu.Unlock()
	}
	if load, _ := stop(); len(load) < 10 {
		t.Errorf("%d samples", len(load))
	}
}

// Counters of a pool that is gone at the end are unknown, not zero, and what was
// sampled stays.
func TestAPoolThatIsGoneLeavesItsSamples(t *testing.T) {
	p := newPlane(t)
	m := p.monitor()
	stop, err := m.start(t.Context(), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		p.mu.Lock()
		asked := p.asked
		p.mu.Unlock()
		if asked > 3 {
			break
		}
	}
	p.Close()
	load, c := stop()
	if len(load) == 0 || c != (Counters{}) {
		t.Errorf("%d samples, counters %+v", len(load), c)
	}
}

func TestSinceCountsRestartsFromZero(t *testing.T) {
	status := func(epoch string, prefill, moved int64) admission.SidecarStatus {
		return admission.SidecarStatus{Role: "decode", Epoch: epoch,
			Totals: admission.WorkerTotals{PrefillUncachedTokens: prefill, TransferredTokens: moved}}
	}
	router := func(started, pins int64) *admission.RouterStatus {
		return &admission.RouterStatus{StartedMS: started, PinChanges: pins}
	}
	type workers = map[string]admission.SidecarStatus
	cases := map[string]struct {
		before, after       snapshot
		pins, decode, moved int64
	}{
		"the same router and worker: the difference": {
			snapshot{router(1, 5), workers{"a": status("e", 10, 100)}},
			snapshot{router(1, 7), workers{"a": status("e", 15, 160)}}, 2, 5, 60},
		"another router: all of its own": {
			snapshot{router(1, 5), workers{}}, snapshot{router(2, 3), workers{}}, 3, 0, 0},
		"another incarnation: all of its own": {
			snapshot{router(1, 0), workers{"a": status("e", 10, 100)}},
			snapshot{router(1, 0), workers{"a": status("f", 4, 3)}}, 0, 4, 3},
		"a new worker: all of its own": {
			snapshot{router(1, 0), workers{"a": status("e", 10, 100)}},
			snapshot{router(1, 0), workers{"a": status("e", 10, 100), "b": status("g", 2, 1)}}, 0, 2, 1},
		"a worker that left takes its count along": {
			snapshot{router(1, 0), workers{"a": status("e", 10, 100)}}, snapshot{router(1, 0), workers{}}, 0, 0, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := tc.after.since(tc.before)
			if *c.PinChanges != tc.pins || *c.DecodePrefill != tc.decode ||
				*c.TransferredTokens != tc.moved || *c.PrefillTokens != 0 {
				t.Errorf("pins %d, computed on D %d, moved %d; want %d, %d, %d", *c.PinChanges, *c.DecodePrefill,
					*c.TransferredTokens, tc.pins, tc.decode, tc.moved)
			}
		})
	}
}
