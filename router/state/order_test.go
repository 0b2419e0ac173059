package state

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// enter begins a turn of s in the background.
func enter(ctx context.Context, s *State, r kvc.Request, blocks []block.Hash) <-chan *Turn {
	got := make(chan *Turn, 1)
	go func() {
		t, err := s.Enter(ctx, r, blocks, "")
		if err != nil {
			t = nil
		}
		got <- t
	}()
	return got
}

// waits blocks until n turns wait for the session.
func waits(t *testing.T, s *State, key kvc.SessionKey, n int) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		s.mu.Lock()
		ss := s.sessions.m[key]
		got := -1
		if ss != nil {
			got = len(ss.order.waiting)
		}
		s.mu.Unlock()
		if got == n {
			return
		}
		time.Sleep(100 * time.Microsecond)
	}
	t.Fatalf("never saw %d turns of %s waiting", n, key)
}

func must(t *testing.T, got <-chan *Turn) *Turn {
	t.Helper()
	turn := <-got
	if turn == nil {
		t.Fatal("Enter failed")
	}
	return turn
}

// Q14: turns of one session run one at a time, in the order they came.
func TestTurnsOfASessionAreOrdered(t *testing.T) {
	ctx := t.Context()
	s := newState(t, newClock(), Options{}, 2, 0)
	r := kvc.Request{Session: "s"}
	first := must(t, enter(ctx, s, r, chain(1, 5)))
	second := enter(ctx, s, r, chain(1, 6))
	waits(t, s, "s", 1)
	third := enter(ctx, s, r, chain(1, 7))
	waits(t, s, "s", 2)
	other := must(t, enter(ctx, s, kvc.Request{Session: "x"}, chain(2, 5)))
	other.Done(kvc.OutcomeOK)

	first.Done(kvc.OutcomeOK)
	first.Done(kvc.OutcomeOK) // once
	turn := must(t, second)
	waits(t, s, "s", 1)
	fork := must(t, enter(ctx, s, r, append(chain(1, 5), chain(3, 1)...))) // leaves what runs now
	if key := fork.Request().Session; key == "s" {
		t.Error("a prompt that leaves the second turn's is no fork")
	}
	fork.Done(kvc.OutcomeOK)
	turn.Done(kvc.OutcomeError)
	must(t, third).Done(kvc.OutcomeOK)
	must(t, enter(ctx, s, r, chain(1, 8))).Done(kvc.OutcomeOK)
}

// Who hangs up while waiting gives up its place; if it was just handed the
// session, it passes it on.
func TestAnAbandonedPlaceIsPassedOn(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	r := kvc.Request{Session: "s"}
	first := must(t, enter(t.Context(), s, r, chain(1, 5)))
	ctx, cancel := context.WithCancel(t.Context())
	quitter := enter(ctx, s, r, chain(1, 6))
	waits(t, s, "s", 1)
	patient := enter(t.Context(), s, r, chain(1, 7))
	waits(t, s, "s", 2)
	cancel()
	if turn := <-quitter; turn != nil {
		t.Error("a turn whose client left was begun")
	}
	waits(t, s, "s", 1)
	first.Done(kvc.OutcomeOK)
	must(t, patient).Done(kvc.OutcomeOK)

	ss := s.sessions.m["s"]
	given := make(chan struct{})
	close(given) // handed over, and left at the same moment
	ss.order.busy = true
	s.abandon(ss, given)
	if ss.order.busy {
		t.Error("the session is kept by a turn that was abandoned")
	}
}

func TestEnterSaysWhatItWaitedFor(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	defer must(t, enter(t.Context(), s, kvc.Request{Session: "s"}, nil)).Done(kvc.OutcomeOK)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Enter(ctx, kvc.Request{Session: "s"}, nil, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("error = %v, want one that wraps context.Canceled", err)
	}
}

// Q14: what leaves the running turn's prompt is a child of the same lineage,
// does not wait, and goes to its parent's worker; what continues the child is
// the child.
func TestForks(t *testing.T) {
	ctx := t.Context()
	s := newState(t, newClock(), Options{}, 4, 0)
	r := kvc.Request{Session: "s", Turn: 1}
	home := serve(t, s, r, chain(1, 20), kvc.Seed).Worker
	parent := must(t, enter(ctx, s, r, chain(1, 30)))
	run(t, parent, kvc.Direct)

	side := func(n int) []block.Hash { return append(chain(1, 20), chain(7, n)...) }
	child := must(t, enter(ctx, s, r, side(5))) // while the parent runs
	got := child.Request()
	if got.Session == "s" || len(got.Session) != 16 || got.Lineage != "s" {
		t.Fatalf("the fork is session %q of lineage %q", got.Session, got.Lineage)
	}
	if at := run(t, child, kvc.Direct).Worker; at != home {
		t.Errorf("the fork runs on %s, its parent on %s", at, home)
	}
	child.Streaming()
	child.Done(kvc.OutcomeOK)

	next := must(t, enter(ctx, s, r, side(9)))
	if again := next.Request(); again.Session != got.Session || again.Lineage != "s" {
		t.Errorf("the fork's next turn is %q, want %q", again.Session, got.Session)
	}
	next.Done(kvc.OutcomeOK)
	parent.Streaming()
	parent.Done(kvc.OutcomeOK)

	// The parent goes on as itself, idle or not.
	goesOn := must(t, enter(ctx, s, r, chain(1, 33)))
	if key := goesOn.Request().Session; key != "s" {
		t.Errorf("the parent's next turn is %q, want s", key)
	}
	goesOn.Done(kvc.OutcomeOK)
	// Nothing runs: a conversation that starts over is the same session.
	reset := must(t, enter(ctx, s, r, chain(9, 3)))
	if key := reset.Request().Session; key != "s" {
		t.Errorf("a reset conversation is %q, want s", key)
	}
	reset.Done(kvc.OutcomeOK)
}

func TestForksAreBounded(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	r := kvc.Request{Session: "s"}
	defer must(t, enter(t.Context(), s, r, chain(1, 5))).Done(kvc.OutcomeOK)
	for i := range 3 * maxBranches {
		must(t, enter(t.Context(), s, r, chain(10+i, 5))).Done(kvc.OutcomeOK)
	}
	if n := len(s.sessions.m["s"].order.branches); n != maxBranches {
		t.Errorf("%d forks remembered, want %d", n, maxBranches)
	}
}

// Q14's letter: turns are not ordered, forks are ignored.
func TestPaperOrdersNothing(t *testing.T) {
	p := kvc.Corrected()
	p.Turns, p.Forks = kvc.TurnsUnordered, kvc.ForksIgnored
	s := newState(t, newClock(), Options{Params: p}, 1, 0)
	r := kvc.Request{Session: "s"}
	a := must(t, enter(t.Context(), s, r, chain(1, 5)))
	b := must(t, enter(t.Context(), s, r, chain(1, 6)))
	c := must(t, enter(t.Context(), s, r, chain(2, 6)))
	for _, turn := range []*Turn{a, b, c} {
		if key := turn.Request().Session; key != "s" {
			t.Errorf("session %q, want s", key)
		}
		turn.Done(kvc.OutcomeOK)
	}
}

func TestSessionlessTurnsDoNotWait(t *testing.T) {
	s := newState(t, newClock(), Options{}, 1, 0)
	a := must(t, enter(t.Context(), s, kvc.Request{}, chain(1, 5)))
	must(t, enter(t.Context(), s, kvc.Request{}, chain(1, 5))).Done(kvc.OutcomeOK)
	a.Done(kvc.OutcomeOK)
}

// Under races: never two turns of one session at once, and everybody gets a
// turn or its cancellation.
func TestOrderUnderRaces(t *testing.T) {
	s := newState(t, newClock(), Options{}, 3, 0)
	var running, served atomic.Int32
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%3 == 0 {
				go cancel()
			}
			turn, err := s.Enter(ctx, kvc.Request{Session: "s"}, nil, "")
			if err != nil {
				return
			}
			if n := running.Add(1); n != 1 {
				t.Errorf("%d turns of one session at once", n)
			}
			run(t, turn, kvc.Seed)
			turn.Streaming()
			running.Add(-1)
			served.Add(1)
			turn.Done(kvc.OutcomeOK)
		})
	}
	wg.Wait()
	if n := served.Load(); n < 133 {
		t.Errorf("%d turns served, at least the 133 that nobody cancelled", n)
	}
	if o := s.sessions.m["s"].order; o.busy || len(o.waiting) != 0 {
		t.Errorf("order at the end: %+v", o)
	}
	wantIdle(t, s)
}

func TestBranchKeysDiffer(t *testing.T) {
	seen := map[kvc.SessionKey]bool{}
	for _, key := range []kvc.SessionKey{"a", "b"} {
		for h := range block.Hash(100) {
			k := branchKey(key, h)
			if seen[k] || len(k) != 16 {
				t.Fatalf("key %q of %s, %d", k, key, h)
			}
			seen[k] = true
		}
	}
}
