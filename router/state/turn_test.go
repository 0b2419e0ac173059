package state

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

func admit(m kvc.Mode) kvc.Reply { return kvc.Reply{Verdict: kvc.Verdict{CanAdmit: true, Mode: m}} }

func refuse(r kvc.Reason) kvc.Reply { return kvc.Reply{Verdict: kvc.Verdict{Reason: r}} }

// run brings a turn to its Run.
func run(t testing.TB, turn *Turn, m kvc.Mode) kvc.Step {
	t.Helper()
	for {
		switch step := turn.Next(); step.Do {
		case kvc.Ask:
			turn.Answer(admit(m))
		case kvc.Run:
			return step
		default:
			t.Fatalf("stopped: %s", step.Reason)
		}
	}
}

func wantIdle(t testing.TB, s *State) {
	t.Helper()
	for _, w := range s.Stats().Workers {
		if w.Inflight != 0 || w.Running != 0 || w.PrefillOutstanding != 0 {
			t.Errorf("%s is not idle: in flight %d, running %d, prefill tokens %d",
				w.ID, w.Inflight, w.Running, w.PrefillOutstanding)
		}
	}
}

func TestTheCountersOfOneTurn(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 1)
	turn := s.Begin(kvc.Request{Session: "s", InputTokens: 300}, chain(1, 10), kvc.ConditionalAggregation)
	look := func() (w WorkerStats, prefill int) {
		st := s.Stats()
		return worker(st, "d1"), worker(st, "p1").PrefillOutstanding
	}
	turn.Next()
	if w, p := look(); w.Inflight != 1 || w.Running != 0 || p != 300 {
		t.Errorf("asked: in flight %d, running %d, prefill %d; want 1, 0, 300", w.Inflight, w.Running, p)
	}
	turn.Answer(admit(kvc.Seed))
	turn.Next()
	if w, p := look(); w.Inflight != 1 || w.Running != 1 || w.Assigned != 1 || p != 300 {
		t.Errorf("running: in flight %d, running %d, assigned %v, prefill %d; want 1, 1, 1, 300",
			w.Inflight, w.Running, w.Assigned, p)
	}
	turn.Streaming()
	if w, p := look(); w.Inflight != 1 || w.Running != 1 || p != 0 {
		t.Errorf("streaming: in flight %d, running %d, prefill %d; want 1, 1, 0", w.Inflight, w.Running, p)
	}
	if n := s.Stats().Modes[kvc.Seed]; n != 1 {
		t.Errorf("seeds = %d, want 1", n)
	}
	turn.Streaming()
	turn.Done(kvc.OutcomeOK)
	turn.Done(kvc.OutcomeError)
	if n := s.Stats().Modes[kvc.Seed]; n != 1 || turn.Attempts() != 1 {
		t.Errorf("seeds = %d, attempts %d; want 1, 1", n, turn.Attempts())
	}
	wantIdle(t, s)
}

// Under the letter inflight only rises, yet what really runs is counted right.
func TestPaperCountsRunningAllTheSame(t *testing.T) {
	s := newState(t, newClock(), Options{Params: kvc.Paper()}, 2, 1)
	for range 3 {
		serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Direct)
	}
	w := worker(s.Stats(), "d1")
	if w.Inflight != 3 || w.Running != 0 || w.Assigned != 0 {
		t.Errorf("in flight %d, running %d, assigned %v; want 3, 0, 0", w.Inflight, w.Running, w.Assigned)
	}
}

// Q9, R93: every mode leaves its prompt where it ran, from the first token; the
// letter waits for the feed.
func TestTheFirstTokenCreditsTheWorker(t *testing.T) {
	for _, mode := range []kvc.Mode{kvc.Direct, kvc.Delta, kvc.Seed, kvc.Reseed, kvc.Fallback} {
		s := newState(t, newClock(), Options{}, 1, 1)
		turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
		if mode == kvc.Fallback {
			turn.Next()
			turn.Answer(refuse(kvc.ReasonNoCapacity))
		}
		run(t, turn, mode)
		if n := worker(s.Stats(), "d1").Blocks; n != 0 {
			t.Errorf("%s: %d blocks before the first token", mode, n)
		}
		turn.Streaming()
		if n := worker(s.Stats(), "d1").Blocks; n != 10 {
			t.Errorf("%s: %d blocks after the first token, want 10", mode, n)
		}
	}
	p := kvc.Corrected()
	p.Residency = kvc.ResidencyFromFeed
	s := newState(t, newClock(), Options{Params: p}, 1, 1)
	serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Seed)
	if n := worker(s.Stats(), "d1").Blocks; n != 0 {
		t.Errorf("the letter believes in %d blocks that nobody reported", n)
	}
}

// R05: a turn that broke leaves nothing; what was there before stays.
func TestABrokenTurnIsNotCredited(t *testing.T) {
	for _, o := range []kvc.Outcome{kvc.OutcomeError, kvc.OutcomeCancelled} {
		s := newState(t, newClock(), Options{}, 1, 0)
		serve(t, s, kvc.Request{Session: "s"}, chain(1, 6), kvc.Seed)
		turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
		run(t, turn, kvc.Direct)
		turn.Streaming()
		turn.Done(o)
		if n := worker(s.Stats(), "d1").Blocks; n != 6 {
			t.Errorf("%s: %d blocks, want the 6 of before", o, n)
		}
		if _, _, ok := s.ByTail(chain(1, 10)[9]); ok {
			t.Errorf("%s: the broken prompt can be continued", o)
		}
	}
}

func TestABrokenTurnSparesWhatAnotherTurnLeft(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	a := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
	b := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
	run(t, a, kvc.Seed)
	run(t, b, kvc.Seed)
	a.Streaming()
	b.Streaming()
	a.Done(kvc.OutcomeError)
	if n := worker(s.Stats(), "d1").Blocks; n != 10 {
		t.Errorf("%d blocks while the twin streams, want 10", n)
	}
	b.Done(kvc.OutcomeOK)
	if n := worker(s.Stats(), "d1").Blocks; n != 10 {
		t.Errorf("%d blocks, want 10", n)
	}
}

// Q9: the worker's report corrects the credit, whoever speaks first.
func TestTheFeedCorrectsTheCredit(t *testing.T) {
	report := kvc.SessionInfo{Key: "s", Lineage: "s", Tail: chain(1, 10)[9], Blocks: 7}
	for name, first := range map[string]bool{"the report comes first": true, "the report comes later": false} {
		t.Run(name, func(t *testing.T) {
			c := newClock()
			s := newState(t, c, Options{}, 1, 0)
			report.LastUse = c.now()
			turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
			run(t, turn, kvc.Seed)
			turn.Streaming()
			if first {
				s.Session("d1", report)
			}
			turn.Done(kvc.OutcomeOK)
			if !first {
				s.Session("d1", report)
			}
			if n := worker(s.Stats(), "d1").Blocks; n != 7 {
				t.Errorf("%d blocks, the worker says 7", n)
			}
			if len(s.spans) != 0 {
				t.Errorf("%d credits still open", len(s.spans))
			}
		})
	}
}

func TestASessionlessTurnIsRememberedByNobody(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	turn := s.Begin(kvc.Request{}, chain(1, 10), "")
	turn.Next()
	turn.Answer(refuse(kvc.ReasonNoCapacity))
	run(t, turn, kvc.Seed)
	turn.Streaming()
	turn.Done(kvc.OutcomeOK)
	if st := s.Stats(); st.Sessions != 0 || st.Blocks != 0 || len(s.sessions.tails) != 0 {
		t.Errorf("%d sessions, %d blocks, %d tails; want none", st.Sessions, st.Blocks, len(s.sessions.tails))
	}
	wantIdle(t, s)
}

// R86: a first turn that failed pins nothing, before or after the first byte of
// another worker.
func TestAPinNeedsAFirstByte(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), "")
	first := run(t, turn, kvc.Seed)
	turn.Failed()
	if home, ok := s.Home("s"); ok {
		t.Errorf("home = %q after a failed run", home)
	}
	wantIdle(t, s) // given back at once, not with the next step
	second := run(t, turn, kvc.Seed)
	if second.Worker == first.Worker {
		t.Fatalf("the failed worker %s runs again", first.Worker)
	}
	turn.Streaming()
	turn.Done(kvc.OutcomeOK)
	if home, _ := s.Home("s"); home != second.Worker || turn.Attempts() != 2 {
		t.Errorf("home %q after %d attempts, want %s after 2", home, turn.Attempts(), second.Worker)
	}
	wantIdle(t, s)
}

func TestAFailedPrefillLegIsReplaced(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 2)
	turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 10), kvc.ConditionalAggregation)
	first := run(t, turn, kvc.Seed)
	turn.FailedPrefill()
	second := run(t, turn, kvc.Seed)
	if second.Prefill == first.Prefill || second.Prefill == "" || second.Worker == first.Worker {
		t.Errorf("first %+v, then %+v", first, second)
	}
	turn.Done(kvc.OutcomeError)
	wantIdle(t, s)
}

// R90: 200 simultaneous first turns over 8 workers, each its own goroutine.
func TestSimultaneousFirstTurns(t *testing.T) {
	s := newState(t, newClock(), Options{}, 8, 1)
	var wg sync.WaitGroup
	turns := make([]*Turn, 200)
	for i := range turns {
		wg.Go(func() {
			turns[i] = s.Begin(kvc.Request{Session: kvc.SessionKey(fmt.Sprint(i))}, chain(i+1, 5), "")
			run(t, turns[i], kvc.Seed)
		})
	}
	wg.Wait()
	var counts []int
	for _, w := range s.Stats().Workers {
		if w.ID[0] == 'd' {
			counts = append(counts, w.Running)
		}
	}
	if slices.Max(counts)-slices.Min(counts) > 2 {
		t.Errorf("after the burst %v, max - min > 2", counts)
	}
	for _, turn := range turns {
		turn.Done(kvc.OutcomeCancelled)
	}
	wantIdle(t, s)
}

// R57: the end of a response, a cancel, a timeout and a failure race; exactly
// one ends the turn, nothing is given back twice.
func TestExactlyOneFinaliser(t *testing.T) {
	iterations := 10_000
	if testing.Short() {
		iterations = 500
	}
	s := newState(t, newClock(), Options{}, 3, 2)
	for i := range iterations {
		turn := s.Begin(kvc.Request{Session: "s", InputTokens: 480}, chain(1, 20), "")
		run(t, turn, kvc.Seed)
		var wg sync.WaitGroup
		for _, end := range []func(){
			turn.Streaming,
			turn.Failed,
			func() { turn.Done(kvc.OutcomeOK) },
			func() { turn.Done(kvc.OutcomeCancelled) },
			func() { turn.Done(kvc.OutcomeError) },
		} {
			wg.Go(end)
		}
		wg.Wait()
		if step := turn.Next(); step.Do != kvc.Stop {
			t.Fatalf("iteration %d: %+v after Done", i, step)
		}
		for _, w := range s.Stats().Workers {
			if w.Inflight != 0 || w.Running != 0 || w.PrefillOutstanding != 0 {
				t.Fatalf("iteration %d: %+v", i, w)
			}
		}
		if _, turns, _ := s.Known("s"); turns != 0 {
			t.Fatalf("iteration %d: %d unfinished turns", i, turns)
		}
	}
}

// T1″ (liveness): if a worker can admit s for longer than the half-open time
// and s keeps asking, s is admitted there within one more request. Premises:
// rejects decay, the worker is the one Route prefers, and it answers.
func TestTheorem1Liveness(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 3, 1)
	home := serve(t, s, kvc.Request{Session: "s"}, chain(1, 50), kvc.Seed).Worker
	full := map[kvc.WorkerID]bool{home: true}
	play := func() kvc.Step {
		turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 50), "")
		defer turn.Done(kvc.OutcomeError) // a broken turn elsewhere leaves no KV there
		for {
			step := turn.Next()
			if step.Do != kvc.Ask {
				return step
			}
			if full[step.Worker] {
				turn.Answer(refuse(kvc.ReasonNoCapacity))
			} else {
				turn.Answer(admit(kvc.Reseed))
			}
		}
	}
	for range 10 {
		play()
	}
	full[home] = false
	if got := play().Worker; got == home {
		t.Fatal("the home is still asked: the premise of this test is gone")
	}
	c.advance(s.Params().HalfOpenAfter)
	if got := play(); got.Worker != home || got.Mode == kvc.Fallback {
		t.Errorf("one half-open time after it has room: %+v, want %s", got, home)
	}
}

// Without decay the same session is kept away for ever.
func TestTheorem1LivenessNeedsDecay(t *testing.T) {
	p := kvc.Corrected()
	p.RejectHalfLife, p.HalfOpenAfter = 0, 0
	c := newClock()
	s := newState(t, c, Options{Params: p, SessionTTL: 1 << 62}, 2, 0)
	serve(t, s, kvc.Request{Session: "s"}, chain(1, 50), kvc.Seed)
	for range 3 {
		turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 50), "")
		turn.Next()
		turn.Answer(refuse(kvc.ReasonNoCapacity))
		turn.Done(kvc.OutcomeError)
	}
	c.advance(1000 * time.Hour)
	turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 50), "")
	if got := turn.Next().Worker; got == "d1" {
		t.Error("d1 is asked again without decay")
	}
}

// ledgerOf is the sequential model of one session: what its own turns did to
// pin and rejects, in their order.
type ledgerOf struct {
	pin     kvc.WorkerID
	changes int
	rejects map[kvc.WorkerID]int
}

// The concurrent state agrees with a sequential model: every session is driven
// by one goroutine, so that its pin and rejects follow from its own turns
// alone, whatever the others do; assigned, modes and residency are sums over
// all turns. Decay is off and every worker is alive, or time and order would
// count.
func TestStateAgreesWithASequentialModel(t *testing.T) {
	p := kvc.Corrected()
	p.RejectHalfLife, p.HalfOpenAfter, p.AssignedHalfLife = 0, 0, 0
	p.ResetScope = kvc.ResetPair
	s := newState(t, newClock(), Options{Params: p}, 5, 2)
	const sessions, turns = 16, 60
	var mu sync.Mutex
	assigned, modes := map[kvc.WorkerID]float64{}, map[kvc.Mode]int64{}
	changes := int64(0)
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			key := kvc.SessionKey(fmt.Sprint("s", i))
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			m := &ledgerOf{rejects: map[kvc.WorkerID]int{}}
			ran, served := map[kvc.WorkerID]float64{}, map[kvc.Mode]int64{}
			for n := range turns {
				m.play(s, rng, key, chain(i+1, n+1), ran, served)
			}
			s.mu.Lock()
			ss := s.sessions.m[key]
			got := map[kvc.WorkerID]int{}
			for _, r := range ss.rejects {
				got[s.slots[r.slot].id] = int(r.n)
			}
			pin := kvc.WorkerID("")
			if ss.pinned {
				pin = s.slots[ss.pin.slot].id
			}
			s.mu.Unlock()
			if pin != m.pin || fmt.Sprint(got) != fmt.Sprint(m.rejects) {
				t.Errorf("%s: pin %q rejects %v, the model says %q %v", key, pin, got, m.pin, m.rejects)
			}
			mu.Lock()
			defer mu.Unlock()
			changes += int64(m.changes)
			for d, n := range ran {
				assigned[d] += n
			}
			for mode, n := range served {
				modes[mode] += n
			}
		})
	}
	// Feeds speak all the while; what they say changes neither pins nor rejects.
	stop := make(chan struct{})
	var feeds sync.WaitGroup
	for d := range 5 {
		feeds.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
					s.Add(dID(d), "feed", chain(1000+d, 20))
					s.SetLoad(dID(d), Load{Used: i})
					s.Evict(dID(d), chain(1000+d, 20))
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	feeds.Wait()

	st := s.Stats()
	wantIdle(t, s)
	for _, w := range st.Workers {
		if w.Assigned != assigned[w.ID] {
			t.Errorf("%s: assigned %v, the model says %v", w.ID, w.Assigned, assigned[w.ID])
		}
	}
	for _, m := range kvc.Modes {
		if st.Modes[m] != modes[m] {
			t.Errorf("%s: %d turns, the model says %d", m, st.Modes[m], modes[m])
		}
	}
	if st.PinChanges != changes {
		t.Errorf("%d pin changes, the model says %d", st.PinChanges, changes)
	}
}

// play drives one random turn and replays what it did on the model.
func (m *ledgerOf) play(
	s *State, rng *rand.Rand, key kvc.SessionKey, bs []block.Hash,
	ran map[kvc.WorkerID]float64, served map[kvc.Mode]int64,
) {
	turn := s.Begin(kvc.Request{Session: key}, bs, kvc.ConditionalAggregation)
	defer turn.Done(kvc.OutcomeOK)
	for {
		step := turn.Next()
		switch step.Do {
		case kvc.Stop:
			return
		case kvc.Ask:
			switch rng.IntN(4) {
			case 0:
				turn.Answer(kvc.Reply{Unknown: true})
			case 1:
				turn.Answer(refuse(kvc.ReasonNoCapacity))
				m.rejects[step.Worker]++
			default:
				turn.Answer(admit(kvc.Modes[rng.IntN(4)]))
			}
		case kvc.Run:
			ran[step.Worker]++
			if rng.IntN(5) == 0 {
				turn.Failed()
				continue
			}
			turn.Streaming()
			served[step.Mode]++
			m.success(step, s.Params())
			return
		}
	}
}

// success is Q7, Q10 and Q12 on one session, all workers being alive.
func (m *ledgerOf) success(step kvc.Step, p kvc.Params) {
	moves := m.pin == "" || step.Mode != kvc.Fallback && m.pin != step.Worker && m.rejects[m.pin] >= p.RejectThreshold
	if moves && m.pin != "" {
		m.changes++
	}
	if moves || step.Mode != kvc.Fallback {
		delete(m.rejects, step.Worker)
	}
	if moves {
		m.pin = step.Worker
	}
}

// Worker sets change while turns run and feeds speak: nothing is given back to
// the wrong worker, and nothing is left of those that went.
func TestChurnUnderLoad(t *testing.T) {
	s := newState(t, newClock(), Options{}, 4, 1)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(2, uint64(i)))
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				key := kvc.SessionKey(fmt.Sprint(i))
				m := &ledgerOf{rejects: map[kvc.WorkerID]int{}}
				m.play(s, rng, key, chain(i+1, n%50), map[kvc.WorkerID]float64{}, map[kvc.Mode]int64{})
				d := kvc.WorkerID(fmt.Sprint("gen", n%7))
				s.SetTrusted(d, true)
				s.Reset(d, []kvc.SessionInfo{{Key: key, LastUse: s.clock()}},
					[]kvc.OwnedBlocks{{Owner: key, Blocks: chain(i+1, 9)}})
				s.Add(d, key, chain(i+1, 12))
				s.Home(key)
				s.Explain(kvc.Request{Session: key}, chain(i+1, 9))
			}
		})
	}
	for g := range 300 {
		ws := workers(2, 1)
		ws = append(ws, Worker{ID: kvc.WorkerID(fmt.Sprint("gen", g%7)), Role: "decode"})
		if err := s.SetWorkers(ws); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	wg.Wait()
	wantIdle(t, s)
	if err := s.SetWorkers(nil); err != nil {
		t.Fatal(err)
	}
	if n := s.Stats().Blocks; n != 0 {
		t.Errorf("%d blocks are left of nobody", n)
	}
	for i := range s.index.held {
		if n := s.index.held[i].Load(); n != 0 {
			t.Errorf("slot %d holds %d blocks", i, n)
		}
	}
}
