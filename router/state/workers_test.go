package state

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

func worker(st Stats, id kvc.WorkerID) WorkerStats {
	i := slices.IndexFunc(st.Workers, func(w WorkerStats) bool { return w.ID == id })
	if i < 0 {
		return WorkerStats{}
	}
	return st.Workers[i]
}

// asks is whom a new turn would ask first.
func asks(s *State, r kvc.Request, bs int) kvc.WorkerID {
	t := s.Begin(r, chain(1, bs), "")
	defer t.Done(kvc.OutcomeCancelled)
	return t.Next().Worker
}

// Q15, R99, R103: a worker that left is forgotten at once, late updates are
// discarded, and neither a returning id nor the next owner of the slot inherits
// anything.
func TestAWorkerThatLeftIsForgotten(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 2, 0)
	serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Direct) // on d1
	if len(s.spans) != 1 {
		t.Fatalf("%d credits, want 1", len(s.spans))
	}
	s.Add("d1", "s", chain(1, 10))
	s.Session("d1", kvc.SessionInfo{Key: "s", Lineage: "s", Blocks: 10, LastUse: c.now()})
	if home, ok := s.Home("s"); !ok || home != "d1" {
		t.Fatalf("home = %q %v, want d1", home, ok)
	}

	if err := s.SetWorkers(workers(2, 0)[1:]); err != nil {
		t.Fatal(err)
	}
	if home, ok := s.Home("s"); ok {
		t.Errorf("home = %q after it left", home)
	}
	if n := s.Stats().Blocks; n != 0 || len(s.spans) != 0 {
		t.Errorf("%d blocks and %d credits are believed of a worker that left", n, len(s.spans))
	}
	for name, ok := range map[string]bool{
		"add":     s.Add("d1", "s", chain(1, 10)),
		"evict":   s.Evict("d1", chain(1, 1)),
		"own":     s.Own("d1", "s", chain(1, 1)),
		"clear":   s.Clear("d1"),
		"reset":   s.Reset("d1", nil, nil),
		"session": s.Session("d1", kvc.SessionInfo{Key: "s"}),
		"gone":    s.SessionGone("d1", "s"),
		"load":    s.SetLoad("d1", Load{}),
		"trusted": s.SetTrusted("d1", true),
		"turn":    s.Finished("d1", kvc.TurnInfo{}),
	} {
		if ok {
			t.Errorf("a late %s was applied", name)
		}
	}

	ws := append(workers(2, 0), Worker{ID: "new", Role: fleet.Decode})
	if err := s.SetWorkers(ws); err != nil {
		t.Fatal(err)
	}
	for _, w := range ws {
		s.SetTrusted(w.ID, true)
		if got := worker(s.Stats(), w.ID); got.Blocks != 0 || got.Sessions != 0 || got.Inflight != 0 {
			t.Errorf("%s starts with %+v", w.ID, got)
		}
	}
}

// Q15's letter: the text is silent about workers that come and go, so belief
// outlives them.
func TestPaperKeepsBelievingInAWorkerThatLeft(t *testing.T) {
	p := kvc.Corrected()
	p.Incarnations = kvc.IncarnationsKept
	s := newState(t, newClock(), Options{Params: p}, 2, 0)
	serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Direct)
	for _, ws := range [][]Worker{workers(2, 0)[1:], workers(2, 0)} {
		if err := s.SetWorkers(ws); err != nil {
			t.Fatal(err)
		}
	}
	if got := worker(s.Stats(), "d1"); got.Blocks != 10 {
		t.Errorf("d1 came back with %d blocks, want 10", got.Blocks)
	}
	if home, _ := s.Home("s"); home != "d1" {
		t.Errorf("home = %q, want d1", home)
	}
}

// A worker that came after a request was measured has no overlap with it, be it
// in a new slot or in that of a worker that left.
func TestAWorkerYoungerThanTheRequestHasNoOverlap(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	s.Add("d1", "s", chain(1, 10))
	turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
	if got := turn.view.Overlap("d1"); got != 10 {
		t.Fatalf("overlap = %d, want 10", got)
	}
	ws := []Worker{{ID: "d2", Role: fleet.Decode}, {ID: "reuses", Role: fleet.Decode}, {ID: "adds", Role: fleet.Decode}}
	if err := s.SetWorkers(ws); err != nil {
		t.Fatal(err)
	}
	for _, w := range []kvc.WorkerID{"reuses", "adds", "d1"} {
		s.SetTrusted(w, true)
		if got := turn.view.Overlap(w); got != 0 {
			t.Errorf("overlap with %s = %d, want 0", w, got)
		}
	}
	if got := turn.view.PrefillUncached("d1"); got != 240 {
		t.Errorf("a worker that left lacks %d tokens, want all 240", got)
	}
	if turn.view.Inflight("d1") != 0 || turn.view.Assigned("d1") != 0 || turn.view.PrefillOutstanding("d1") != 0 {
		t.Error("a worker that left has load")
	}
}

func TestATurnOutlivesItsWorker(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 1)
	turn := s.Begin(kvc.Request{Session: "s", InputTokens: 240}, chain(1, 10), "")
	turn.Next()
	turn.Answer(kvc.Reply{Verdict: kvc.Verdict{CanAdmit: true, Mode: kvc.Seed}})
	if step := turn.Next(); step.Worker != "d1" || step.Do != kvc.Run {
		t.Fatalf("step = %+v", step)
	}
	turn.Streaming()
	if err := s.SetWorkers([]Worker{{ID: "d2", Role: fleet.Decode}, {ID: "d3", Role: fleet.Decode}}); err != nil {
		t.Fatal(err)
	}
	turn.Done(kvc.OutcomeError)
	for _, w := range s.Stats().Workers {
		if w.Inflight != 0 || w.Running != 0 || w.PrefillOutstanding != 0 || w.Blocks != 0 {
			t.Errorf("the turn of a worker that left was given back to another: %+v", w)
		}
	}
}

func TestTooManyWorkers(t *testing.T) {
	s := New(Options{})
	var ws []Worker
	for i := range MaxWorkers + 1 {
		ws = append(ws, Worker{ID: kvc.WorkerID(fmt.Sprint("w", i)), Role: fleet.Decode})
	}
	err := s.SetWorkers(ws)
	if err == nil || !strings.Contains(err.Error(), "257") || !strings.Contains(err.Error(), "256") {
		t.Errorf("error = %v, want one that names both numbers", err)
	}
	if n := len(s.Stats().Workers); n != MaxWorkers {
		t.Errorf("%d workers used, want %d", n, MaxWorkers)
	}
	for range 3 { // whole fleets are replaced within the same 256 slots
		for i := range ws {
			ws[i].ID += "'"
		}
		if err := s.SetWorkers(ws[:MaxWorkers]); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(s.slots); n != MaxWorkers {
		t.Errorf("%d slots", n)
	}
}

// Under the letter gone workers keep their slots only while there are slots.
func TestPaperGivesUpOldWorkersWhenSlotsRunOut(t *testing.T) {
	s := New(Options{Params: kvc.Paper()})
	for gen := range 4 {
		var ws []Worker
		for i := range 200 {
			ws = append(ws, Worker{ID: kvc.WorkerID(fmt.Sprint(gen, "-", i)), Role: fleet.Decode})
		}
		if err := s.SetWorkers(ws); err != nil {
			t.Fatal(err)
		}
		if n := len(s.Stats().Workers); n != 200 || len(s.slots) > MaxWorkers {
			t.Fatalf("generation %d: %d workers in %d slots", gen, n, len(s.slots))
		}
	}
}

// Q9, R91: a new worker starts at the minimum of the others, not at zero, or it
// would win every tie until it had caught up.
func TestANewcomerStartsAtTheMinimum(t *testing.T) {
	for rule, want := range map[kvc.NewcomerRule]float64{kvc.NewcomerAtMinimum: 50, kvc.NewcomerAtZero: 0} {
		p := kvc.Corrected()
		p.Newcomer = rule
		c := newClock()
		s := newState(t, c, Options{Params: p}, 2, 0)
		for i := range 101 {
			serve(t, s, kvc.Request{Session: kvc.SessionKey(fmt.Sprint(i))}, nil, kvc.Seed)
		}
		if err := s.SetWorkers(workers(3, 1)); err != nil {
			t.Fatal(err)
		}
		if got := worker(s.Stats(), "d3").Assigned; got != want {
			t.Errorf("%s: a new worker starts at %v, want %v", rule, got, want)
		}
		if got := worker(s.Stats(), "p1").Assigned; got != 0 {
			t.Errorf("the first prefill worker starts at %v, want 0", got)
		}
	}
}

// R91: seven warm workers and a new one: the new one gets its fair share of new
// sessions, neither nothing nor everything.
func TestANewcomerGetsItsFairShare(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 7, 0)
	turn := func(i int) kvc.WorkerID {
		c.advance(50 * time.Millisecond)
		return serve(t, s, kvc.Request{Session: kvc.SessionKey(fmt.Sprint(i))}, nil, kvc.Seed).Worker
	}
	for i := range 1000 {
		turn(i)
	}
	if err := s.SetWorkers(workers(8, 0)); err != nil {
		t.Fatal(err)
	}
	got := 0
	const n = 800
	for i := range n {
		if turn(10_000+i) == "d8" {
			got++
		}
	}
	if got < n/16 || got > n/4 {
		t.Errorf("the newcomer got %d of %d new sessions, fair is %d", got, n, n/8)
	}
}

func TestAssignedDecays(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 1, 0)
	for range 8 {
		serve(t, s, kvc.Request{}, nil, kvc.Seed)
	}
	c.advance(10 * time.Minute)
	if got := worker(s.Stats(), "d1").Assigned; got < 3.99 || got > 4.01 {
		t.Errorf("assigned = %v one half-life after 8, want 4", got)
	}
	p := kvc.Corrected()
	p.AssignedHalfLife = 0
	s.SetParams(p)
	if got := s.Params().AssignedHalfLife; got != 0 {
		t.Errorf("SetParams: half-life %v", got)
	}
	c.advance(time.Hour)
	if got := worker(s.Stats(), "d1").Assigned; got != 8 {
		t.Errorf("assigned = %v without decay, want 8", got)
	}
}

func TestADrainingWorkerServesOnlyItsSessions(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 2, 2)
	if got := serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Seed).Worker; got != "d1" {
		t.Fatalf("served on %s", got)
	}
	ws := workers(2, 2)
	ws[0].Draining, ws[2].Draining = true, true
	if err := s.SetWorkers(ws); err != nil {
		t.Fatal(err)
	}
	if got := asks(s, kvc.Request{Session: "s"}, 10); got != "d1" {
		t.Errorf("a session of the draining worker asks %s, want d1", got)
	}
	for i := range 5 {
		turn := s.Begin(kvc.Request{Session: kvc.SessionKey(fmt.Sprint("new", i))}, nil, "")
		if step := turn.Next(); step.Worker != "d2" || step.Prefill != "p2" {
			t.Errorf("a new session asks %+v, want d2 with p2", step)
		}
	}
	s.Session("d1", kvc.SessionInfo{Key: "told", Lineage: "told", LastUse: c.now()})
	if got := asks(s, kvc.Request{Session: "told"}, 0); got != "d1" {
		t.Errorf("a session that the draining worker reports asks %s, want d1", got)
	}
	ws[1].Draining = true
	if err := s.SetWorkers(ws); err != nil {
		t.Fatal(err)
	}
	turn := s.Begin(kvc.Request{Session: "late"}, nil, "")
	if step := turn.Next(); step.Do != kvc.Stop || step.Reason != kvc.ReasonNoWorker {
		t.Errorf("a new session with everyone draining: %+v, want Stop, no-worker", step)
	}
}

// R76: who is suspect is avoided, until nobody else is left.
func TestSuspectWorkersAreTheLastResort(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	s.SetAvailable("d1", false)
	if got := asks(s, kvc.Request{}, 0); got != "d2" {
		t.Errorf("asks %s, want d2", got)
	}
	s.SetAvailable("d2", false)
	s.SetAvailable("unknown", false)
	if got := asks(s, kvc.Request{}, 0); got != "d1" {
		t.Errorf("with nobody available asks %q, want d1", got)
	}
	s.SetAvailable("d1", true)
	s.SetAvailable("d2", true)
	if s.partial {
		t.Error("still filtering after all are back")
	}
}

// An untrusted worker has no overlap and stays routable.
func TestAnUntrustedWorkerHasNoOverlap(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	s.Add("d2", "s", chain(1, 10))
	r := kvc.Request{Session: "s", Lineage: "s"}
	if got := asks(s, r, 10); got != "d2" {
		t.Errorf("asks %s, want d2 for its blocks", got)
	}
	s.SetTrusted("d2", false)
	if got := asks(s, r, 10); got != "d1" {
		t.Errorf("asks %s, want d1: d2 is not believed", got)
	}
	s.SetAvailable("d1", false)
	if got := asks(s, r, 10); got != "d2" {
		t.Errorf("asks %s, want d2: it is still routable", got)
	}
}

func TestLoadAndRatio(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	if got := s.TokensPerBlock(); got != 24 {
		t.Errorf("tokens per block = %v before anything was learnt, want 24", got)
	}
	s.SetLoad("d1", Load{Capacity: 1000, TokensPerBlock: 30})
	s.SetLoad("d1", Load{Used: 10})
	if got := worker(s.Stats(), "d1").Load; got.Capacity != 1000 || got.Used != 10 {
		t.Errorf("load = %+v: a heartbeat without capacity forgot it", got)
	}
	if got := s.TokensPerBlock(); got != 30 {
		t.Errorf("tokens per block = %v, want 30", got)
	}
	if got := s.Begin(kvc.Request{}, chain(1, 10), "").Request(); got.InputTokens != 300 || got.AppendTokens != 300 {
		t.Errorf("request = %+v, want 300 tokens in, all of it append", got)
	}
}
