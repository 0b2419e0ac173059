package state

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// A restarted router is warm within one snapshot: the next turn of a resident
// session goes home, by residency and by report.
func TestASnapshotWarmsARestartedRouter(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 3, 0)
	s.Reset("d3", []kvc.SessionInfo{
		{Key: "s", Lineage: "s", Tail: chain(1, 10)[9], Blocks: 10, LastUse: c.now()},
		{Key: "tiny", Lineage: "tiny", LastUse: c.now()},
	}, []kvc.OwnedBlocks{{Owner: "s", Blocks: chain(1, 10)}})

	for _, key := range []kvc.SessionKey{"s", "tiny"} {
		if home, ok := s.Home(key); !ok || home != "d3" {
			t.Errorf("home of %s = %q %v, want d3", key, home, ok)
		}
	}
	if got := asks(s, kvc.Request{Session: "s"}, 12); got != "d3" {
		t.Errorf("the resident session asks %s, want d3", got)
	}
	turn := s.Begin(kvc.Request{Session: "tiny"}, nil, "")
	if got := turn.Next().Worker; got != "d3" {
		t.Errorf("a session shorter than a block asks %s, want d3", got)
	}
	if key, lineage, ok := s.ByTail(chain(1, 10)[9]); !ok || key != "s" || lineage != "s" {
		t.Errorf("ByTail = %q %q %v, want s", key, lineage, ok)
	}
}

func TestASnapshotReplacesEverything(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 2, 0)
	s.Add("d1", "a", chain(1, 10))
	s.Add("d1", "b", chain(2, 10))
	s.Session("d1", kvc.SessionInfo{Key: "a", LastUse: c.now()})
	s.Session("d1", kvc.SessionInfo{Key: "b", LastUse: c.now()})
	s.Add("d2", "a", chain(1, 3))

	s.Reset("d1", []kvc.SessionInfo{{Key: "b", LastUse: c.now()}}, []kvc.OwnedBlocks{
		{Owner: "b", Blocks: chain(2, 4)}, {Owner: kvc.Shared, Blocks: chain(3, 2)},
	})
	st := s.Stats()
	if d1, d2 := worker(st, "d1"), worker(st, "d2"); d1.Blocks != 6 || d1.Sessions != 1 || d2.Blocks != 3 {
		t.Errorf("d1 %d blocks, %d sessions, d2 %d blocks; want 6, 1, 3", d1.Blocks, d1.Sessions, d2.Blocks)
	}
	if home, ok := s.Home("a"); ok {
		t.Errorf("home of a = %q, want none", home)
	}
	s.Clear("d1")
	if d1 := worker(s.Stats(), "d1"); d1.Blocks != 0 || d1.Sessions != 0 {
		t.Errorf("after clear: %+v", d1)
	}
	if _, ok := s.Home("b"); ok {
		t.Error("b has a home after clear")
	}
}

// What a snapshot confirms is never out of sight, so a turn that is routed in
// the middle of one does not lose its home.
func TestASnapshotHidesNothing(t *testing.T) {
	s := newState(t, newClock(), Options{}, 2, 0)
	own := []kvc.OwnedBlocks{{Owner: "s", Blocks: chain(1, 200)}}
	s.Reset("d2", nil, own)
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		for range 200 {
			s.Reset("d2", nil, own)
		}
	}()
	for {
		select {
		case <-stop:
			return
		default:
			if got := asks(s, kvc.Request{Session: "s", Lineage: "s"}, 200); got != "d2" {
				t.Errorf("asks %s during a snapshot, want d2", got)
				<-stop
				return
			}
		}
	}
}

func TestHome(t *testing.T) {
	c := newClock()
	info := func(ago time.Duration) kvc.SessionInfo {
		return kvc.SessionInfo{Key: "s", LastUse: c.now().Add(-ago)}
	}
	cases := map[string]struct {
		do   func(*State)
		want kvc.WorkerID
	}{
		"nobody knows it": {func(*State) {}, ""},
		"the pin":         {func(s *State) { serveOn(s, "d1") }, "d1"},
		"who reports it beats the pin": {func(s *State) {
			serveOn(s, "d1")
			s.Session("d2", info(0))
		}, "d2"},
		"of two reporters the pinned one": {func(s *State) {
			serveOn(s, "d1")
			s.Session("d1", info(time.Minute))
			s.Session("d2", info(0))
		}, "d1"},
		"of two others the latest used": {func(s *State) {
			s.Session("d2", info(0))
			s.Session("d3", info(time.Minute))
		}, "d2"},
		"not one that is not believed": {func(s *State) {
			s.Session("d2", info(0))
			s.Session("d3", info(time.Minute))
			s.SetTrusted("d2", false)
		}, "d3"},
		"an untrusted pin is still the pin": {func(s *State) {
			serveOn(s, "d1")
			s.SetTrusted("d1", false)
		}, "d1"},
		"the pin whose KV is gone is no home": {func(s *State) {
			serveOn(s, "d1")
			s.Session("d1", info(0))
			s.SessionGone("d1", "s")
		}, ""},
		"the other holder is": {func(s *State) {
			serveOn(s, "d1")
			s.Session("d2", info(0))
			s.SessionGone("d1", "s")
		}, "d2"},
		"a forgotten session has none": {func(s *State) {
			serveOn(s, "d1")
			s.Forget("s")
			s.Forget("never seen")
		}, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := newState(t, c, Options{}, 3, 0)
			tc.do(s)
			got, ok := s.Home("s")
			if got != tc.want || ok != (tc.want != "") {
				t.Errorf("Home = %q %v, want %q", got, ok, tc.want)
			}
		})
	}
}

// serveOn serves session s on d, everyone else refusing.
func serveOn(s *State, d kvc.WorkerID) {
	turn := s.Begin(kvc.Request{Session: "s"}, nil, "")
	defer turn.Done(kvc.OutcomeOK)
	for {
		switch step := turn.Next(); {
		case step.Do == kvc.Ask && step.Worker == d:
			turn.Answer(kvc.Reply{Verdict: kvc.Verdict{CanAdmit: true, Mode: kvc.Seed}})
		case step.Do == kvc.Ask:
			turn.Answer(kvc.Reply{Verdict: kvc.Verdict{Reason: kvc.ReasonDraining}})
		default:
			turn.Streaming()
			return
		}
	}
}

// Q12: a session that its home no longer holds has lost its home: the next
// success elsewhere moves the pin, and counts as a change.
func TestAnEvictedSessionIsFreeToMove(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 2, 0)
	serveOn(s, "d1")
	s.Session("d1", kvc.SessionInfo{Key: "s", LastUse: c.now()})
	serveOn(s, "d2")
	if n := s.Stats().PinChanges; n != 0 {
		t.Errorf("a spill counts as %d pin changes", n)
	}
	s.SessionGone("d1", "s")
	serveOn(s, "d2")
	if home, _ := s.Home("s"); home != "d2" || s.Stats().PinChanges != 1 {
		t.Errorf("home %q, %d pin changes; want d2, 1", home, s.Stats().PinChanges)
	}
	s.SessionGone("d2", "never seen")
}

// R88: two replicas that follow the same feeds agree without gossip.
func TestReplicasAgree(t *testing.T) {
	c := newClock()
	a, b := newState(t, c, Options{}, 4, 0), newState(t, c, Options{}, 4, 0)
	routers := []*State{a, b}
	for i := range 20 {
		key := kvc.SessionKey(fmt.Sprint("s", i))
		var home kvc.WorkerID
		for turn := range 6 {
			bs := chain(i+1, 10*(turn+1))
			at := serve(t, routers[turn%2], kvc.Request{Session: key, Turn: turn}, bs, kvc.Seed).Worker
			if turn > 0 && at != home {
				t.Fatalf("session %d turn %d on %s, home %s", i, turn, at, home)
			}
			home = at
			for _, r := range routers {
				r.Add(at, key, bs)
				r.Session(at, kvc.SessionInfo{Key: key, Lineage: key, Tail: bs[len(bs)-1], Blocks: len(bs), LastUse: c.now()})
			}
			c.advance(time.Second)
		}
	}
}

// Q5: the boilerplate that every session shares attracts nobody: first turns
// go by load alone, and a child goes to its parent's worker.
func TestSharedBlocksAttractNobody(t *testing.T) {
	boiler := chain(99, 50)
	prompt := func(id, n int) []block.Hash { return append(append([]block.Hash{}, boiler...), chain(id, n)...) }
	for overlap, spread := range map[kvc.OverlapRule]bool{kvc.OverlapExclusive: true, kvc.OverlapPrefix: false} {
		p := kvc.Corrected()
		p.Overlap = overlap
		s := newState(t, newClock(), Options{Params: p}, 4, 0)
		counts := map[kvc.WorkerID]int{}
		var parent kvc.WorkerID
		for i := range 40 {
			at := serve(t, s, kvc.Request{Session: kvc.SessionKey(fmt.Sprint("s", i))}, prompt(i+1, 10), kvc.Seed).Worker
			counts[at]++
			if i == 7 {
				parent = at
			}
		}
		if got := len(counts) == 4 && counts["d1"] == 10; got != spread {
			t.Errorf("%s: first turns %v, spread evenly %v, want %v", overlap, counts, got, spread)
		}
		child := s.Begin(kvc.Request{Session: "child", Lineage: "s7"}, prompt(8, 12), "")
		if got := child.Next().Worker; got != parent {
			t.Errorf("%s: the child of s7 asks %s, want its parent's %s", overlap, got, parent)
		}
	}
}

func TestFinishedTeachesTheReserve(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{}, 1, 0)
	serveOn(s, "d1")
	outcomes := []kvc.Outcome{kvc.OutcomeOK, kvc.OutcomeOK, kvc.OutcomeOK, kvc.OutcomeOK, kvc.OutcomeError}
	for i, o := range outcomes {
		tokens := 100 * (i + 1)
		if o != kvc.OutcomeOK {
			tokens = 9000
		}
		s.Finished("d1", kvc.TurnInfo{Session: "s", Outcome: o, Usage: kvc.Usage{CompletionTokens: tokens}})
	}
	s.Finished("d1", kvc.TurnInfo{Session: "unknown", Outcome: kvc.OutcomeOK})
	cases := map[string]struct {
		r    kvc.Request
		want int
	}{
		"learnt":                            {kvc.Request{Session: "s"}, 400},
		"max_tokens below it":               {kvc.Request{Session: "s", OutputTokens: 50}, 50},
		"max_tokens above it":               {kvc.Request{Session: "s", OutputTokens: 5000}, 400},
		"nothing learnt: the guess":         {kvc.Request{Session: "x"}, 1024},
		"nothing learnt: max_tokens counts": {kvc.Request{Session: "x", OutputTokens: 10}, 10},
		"sessionless: the guess":            {kvc.Request{}, 1024},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			turn := s.Begin(tc.r, nil, "")
			defer turn.Done(kvc.OutcomeCancelled)
			if got := turn.Request().OutputTokens; got != tc.want {
				t.Errorf("reserve = %d, want %d", got, tc.want)
			}
		})
	}
	p := s.Params()
	p.Reserve = kvc.ReserveNothing
	s.SetParams(p)
	if got := s.Begin(kvc.Request{Session: "s", OutputTokens: 50}, nil, "").Request().OutputTokens; got != 0 {
		t.Errorf("reserve = %d under the letter, want 0", got)
	}
}

func TestKnown(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{SessionTTL: time.Minute}, 1, 0)
	if _, _, ok := s.Known("s"); ok {
		t.Error("a session never seen is known")
	}
	turn := s.Begin(kvc.Request{Session: "s", Lineage: "root"}, nil, "")
	if lineage, turns, ok := s.Known("s"); ok || turns != 1 || lineage != "root" {
		t.Errorf("during its first turn: %q, %d, %v; want root, 1, false", lineage, turns, ok)
	}
	turn.Done(kvc.OutcomeError)
	if _, turns, ok := s.Known("s"); ok || turns != 0 {
		t.Errorf("after a turn that was never served: %d, %v; want 0, false", turns, ok)
	}
	serveOn(s, "d1")
	if _, _, ok := s.Known("s"); !ok {
		t.Error("not known after it was served")
	}
	c.advance(2 * time.Minute)
	if _, _, ok := s.Known("s"); ok {
		t.Error("known after the TTL")
	}
	s.Session("d1", kvc.SessionInfo{Key: "old", LastUse: c.now().Add(-time.Hour)})
	s.Session("d1", kvc.SessionInfo{Key: "told", LastUse: c.now(), Lineage: "root"})
	if _, _, ok := s.Known("old"); ok {
		t.Error("a report of a session beyond the TTL makes it known")
	}
	if lineage, _, ok := s.Known("told"); !ok || lineage != "root" {
		t.Errorf("a reported session: %q %v, want root, true", lineage, ok)
	}
}

// R85: untrusted ids cannot fill the memory, and nobody is refused for it.
func TestAMillionIDsAreBounded(t *testing.T) {
	c := newClock()
	s := newState(t, c, Options{MaxSessions: 1000}, 2, 0)
	for i := range 5000 {
		c.advance(time.Millisecond)
		serve(t, s, kvc.Request{Session: kvc.SessionKey(fmt.Sprint(i))}, chain(i+1, 1), kvc.Seed)
	}
	st := s.Stats()
	if st.Sessions != 1000 || st.SessionsEvicted != 4000 || len(s.sessions.tails) > 1000 {
		t.Errorf("%d sessions, %d evicted, %d tails", st.Sessions, st.SessionsEvicted, len(s.sessions.tails))
	}
}
