package state

import (
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// clock is a time that tests move.
type clock struct{ t time.Time }

func (c *clock) now() time.Time          { return c.t }
func (c *clock) advance(d time.Duration) { c.t = c.t.Add(d) }

func newClock() *clock { return &clock{time.Unix(1_700_000_000, 0)} }

func workers(decode, prefill int) (ws []Worker) {
	for i := range decode {
		ws = append(ws, Worker{ID: dID(i), Role: fleet.Decode})
	}
	for i := range prefill {
		ws = append(ws, Worker{ID: pID(i), Role: fleet.Prefill})
	}
	return ws
}

func dID(i int) kvc.WorkerID { return kvc.WorkerID("d" + string(rune('1'+i))) }
func pID(i int) kvc.WorkerID { return kvc.WorkerID("p" + string(rune('1'+i))) }

// newState is a State whose workers are all trusted.
func newState(t testing.TB, c *clock, o Options, decode, prefill int) *State {
	t.Helper()
	o.Clock = c.now
	s := New(o)
	if err := s.SetWorkers(workers(decode, prefill)); err != nil {
		t.Fatal(err)
	}
	for _, w := range workers(decode, prefill) {
		s.SetTrusted(w.ID, true)
	}
	return s
}

// chain is n blocks that belong to nobody else's chain with another id.
func chain(id, n int) []block.Hash {
	bs := make([]block.Hash, n)
	for i := range bs {
		bs[i] = block.Hash(uint64(id)<<32 | uint64(i+1))
	}
	return bs
}

// serve runs a turn to its end with every worker admitting mode.
func serve(t testing.TB, s *State, r kvc.Request, blocks []block.Hash, mode kvc.Mode) kvc.Step {
	t.Helper()
	turn := s.Begin(r, blocks, "")
	for {
		step := turn.Next()
		switch step.Do {
		case kvc.Ask:
			turn.Answer(kvc.Reply{Verdict: kvc.Verdict{CanAdmit: true, Mode: mode}})
		case kvc.Run:
			turn.Streaming()
			turn.Done(kvc.OutcomeOK)
			return step
		default:
			t.Fatalf("stopped: %s", step.Reason)
		}
	}
}

func TestModesAreCountedPerWorker(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 1)
	home := serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Seed).Worker
	serve(t, s, kvc.Request{Session: "s", Turn: 1}, chain(1, 14), kvc.Direct)
	serve(t, s, kvc.Request{Session: "x"}, chain(2, 10), kvc.Seed)
	st := s.Stats()
	for _, m := range kvc.Modes {
		var sum int64
		for _, w := range st.Workers {
			sum += w.Modes[m]
		}
		if sum != st.Modes[m] {
			t.Errorf("%s: workers sum to %d, want the pool's %d", m, sum, st.Modes[m])
		}
	}
	for _, w := range st.Workers {
		if w.ID == home && (w.Modes[kvc.Direct] != 1 || w.Modes[kvc.Seed] != 1) {
			t.Errorf("home's modes = %v, want one direct and one seed", w.Modes)
		}
	}
}

func TestTheSecondTurnGoesHome(t *testing.T) {
	s := newState(t, newClock(), Options{}, 3, 1)
	first := serve(t, s, kvc.Request{Session: "s"}, chain(1, 10), kvc.Seed)
	serve(t, s, kvc.Request{Session: "x"}, chain(2, 10), kvc.Seed)
	turn := s.Begin(kvc.Request{Session: "s", Turn: 1}, chain(1, 14), "")
	if got := turn.Next(); got.Worker != first.Worker {
		t.Errorf("second turn asks %s, want %s", got.Worker, first.Worker)
	}
	if got, want := turn.Request().AppendTokens, 4*block.IDs; got != want {
		t.Errorf("append = %d tokens, want %d", got, want)
	}
	turn.Done(kvc.OutcomeCancelled)
	if home, ok := s.Home("s"); !ok || home != first.Worker {
		t.Errorf("home = %q %v, want %q", home, ok, first.Worker)
	}
	for _, w := range s.Stats().Workers {
		if w.Running != 0 || w.Inflight != 0 || w.PrefillOutstanding != 0 {
			t.Errorf("not idle: %+v", w)
		}
	}
}
