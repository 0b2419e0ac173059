package kvc

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
)

// T3, block eviction: what a reseed has to prefill is at most what was evicted
// plus what the turn appends. Premise: blocks are evicted singly, leaf first;
// session-level eviction (everything or nothing) would break it.
func TestT3ReseedIsBoundedByEviction(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := newBench(t, LedgerConfig{CapacityTokens: 20_000})
		home := rapid.IntRange(50, 500).Draw(rt, "blocks")
		b.turn("s", 0, chain("s", home), 0)
		b.l.Changes()
		for i := range rapid.IntRange(0, 12).Draw(rt, "others") {
			b.fallback(SessionKey(fmt.Sprint(i)), chain(fmt.Sprint("other", i), rapid.IntRange(1, 120).Draw(rt, "size")), 0)
		}
		gone := 0
		mine := map[block.Hash]bool{}
		for _, h := range chain("s", home) {
			mine[h] = true
		}
		for _, c := range b.l.Changes() {
			if c.Kind == ChangeEvict {
				for _, h := range c.Blocks {
					if mine[h] {
						gone++
					}
				}
			}
		}
		more := rapid.IntRange(0, 20).Draw(rt, "append")
		e := b.l.Estimate(b.ask("s", 1, chain("s", home+more)))
		if limit := gone*24 + more*24 + 12; e.Missing > limit {
			rt.Fatalf("%d of %d blocks evicted, %d appended: %d tokens missing, want at most %d",
				gone, home, more, e.Missing, limit)
		}
		if gone > 0 && gone < home && e.Resident != (home-gone)*24 {
			rt.Fatalf("%d of %d blocks evicted, yet %d tokens resident", gone, home, e.Resident)
		}
	})
}

// The session's frame follows its eviction, and its end.
func TestEvictedSessionIsGone(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 2200})
	boiler := chain("boiler", 5)
	b.turn("a", 0, join(boiler, chain("a", 20)), 30)
	b.wait(time.Hour)
	b.turn("b", 0, join(boiler, chain("b", 20)), 30)
	b.wait(time.Hour)
	b.l.Changes()
	b.turn("c", 0, join(boiler, chain("c", 60)), 30)
	var states []string
	for _, c := range b.l.Changes() {
		if c.Session.Key == "a" {
			states = append(states, fmt.Sprint(c.Kind == ChangeSessionGone))
		}
	}
	if len(states) == 0 || states[len(states)-1] != "true" {
		t.Errorf("a has lost everything but the boilerplate, its changes say gone: %v", states)
	}
	if b.l.EvictedTokens() == 0 {
		t.Error("EvictedTokens = 0")
	}
	if got := b.l.EvictionCost(); got >= b.l.Gauges(b.now).Used || got == 0 {
		t.Errorf("EvictionCost = %d of %d used, want all but the boilerplate", got, b.l.Gauges(b.now).Used)
	}
}

func TestForgetWaitsForTheTurn(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	q := b.ask("s", 0, chain("s", 10))
	v := b.admit(q)
	b.l.Begin(v.Lease.ID, q.Attempt, b.now)
	b.l.Forget("s", b.now)
	b.l.Forget("unknown", b.now)
	if got := b.l.Sessions("", 0); len(got) != 1 || got[0].Active != 1 {
		t.Fatalf("sessions %+v, want s, running", got)
	}
	b.end(q, -1, 5)
	g := b.l.Gauges(b.now)
	if g.Sessions != 0 || g.Protected != 0 || g.Used == 0 {
		t.Errorf("gauges %+v, want no session, nothing protected, KV left to the LRU", g)
	}
}

func TestClearKeepsRunningTurns(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	b.turn("s", 0, chain("s", 10), 5)
	running, waiting := b.ask("s", 1, chain("s", 20)), b.ask("t", 0, chain("t", 20))
	v, w := b.admit(running), b.admit(waiting)
	b.l.Begin(v.Lease.ID, running.Attempt, b.now)
	b.l.Changes()
	b.l.Clear(b.now)
	b.checked()
	if cs := b.l.Changes(); len(cs) != 2 || cs[0].Kind != ChangeClear || cs[1].Session.Active != 1 {
		t.Errorf("changes %+v, want clear, then the session that still runs", cs)
	}
	if _, ok := b.l.Begin(w.Lease.ID, waiting.Attempt, b.now); ok {
		t.Error("a lease survived the flush of what it counts on")
	}
	b.end(running, 0, 5)
	if got := b.l.Sessions("", 0); len(got) != 1 || got[0].Blocks != 20 {
		t.Errorf("sessions %+v, want s with its 20 blocks", got)
	}
}

// A prefill worker's prompt cache: no admission, no protection, no answers.
func TestPrefillWorker(t *testing.T) {
	b := newBench(t, LedgerConfig{Prefill: true, CapacityTokens: 5000})
	if v := b.admit(b.ask("s", 0, chain("s", 10))); v != (Verdict{}) {
		t.Errorf("a P worker admitted: %+v", v)
	}
	b.fallback("s", chain("s", 100), 1)
	if g := b.l.Gauges(b.now); g.Used != 2412 || g.Protected != 0 || g.Reserved != 0 {
		t.Errorf("gauges %+v, want the prompt alone", g)
	}
	if e := b.l.Estimate(b.ask("s", 1, chain("s", 110))); e.Resident != 2400 || e.Missing != 252 || e.Reserve != 0 {
		t.Errorf("%+v", e)
	}
	b.fallback("t", chain("t", 150), 1)
	if e := b.l.Estimate(b.ask("s", 1, chain("s", 110))); e.Resident >= 2400 {
		t.Errorf("nothing of s was evicted for t: %+v", e)
	}
}

func TestSessionsArePagedByKey(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	for _, s := range []string{"c", "a", "d", "b"} {
		b.turn(SessionKey(s), 0, chain(s, 4), 7)
	}
	var keys []string
	for after, pages := SessionKey(""), 0; pages < 5; pages++ {
		page := b.l.Sessions(after, 3)
		for _, s := range page {
			keys = append(keys, string(s.Key))
			after = s.Key
		}
		if len(page) < 3 {
			break
		}
	}
	if diff := cmp.Diff([]string{"a", "b", "c", "d"}, keys); diff != "" {
		t.Error(diff)
	}
	s := b.l.Sessions("", 1)[0]
	want := SessionInfo{
		Key: "a", Lineage: "a", Tail: chain("a", 4)[3], Blocks: 4, ResidentTokens: 4*24 + 12 + 7,
		LastUse: b.now, ProtectedUntil: b.now.Add(2 * time.Minute),
	}
	if diff := cmp.Diff(want, s); diff != "" {
		t.Error(diff)
	}
}

func TestTokensPerBlockIsLearnt(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	if got := b.l.TokensPerBlock(); got != 24 {
		t.Errorf("before any usage %v, want the configured 24", got)
	}
	for i := range 5 {
		q := b.ask(SessionKey(fmt.Sprint(i)), 0, chain(fmt.Sprint(i), 100))
		v := b.admit(q)
		b.l.Begin(v.Lease.ID, q.Attempt, b.now)
		b.l.End(q.Attempt, Usage{PromptTokens: 3015}, OutcomeOK, b.now)
	}
	if got := b.l.TokensPerBlock(); got < 29.9 || got > 30.1 {
		t.Errorf("after prompts of 30 tokens a block: %v", got)
	}
	if got := b.l.Estimate(b.ask("new", 0, chain("new", 100))).Input; got != 3015 {
		t.Errorf("a new session's input is estimated at %d, want 3,015", got)
	}
	q := b.ask("new", 0, chain("new", 100))
	q.InputTokens = 2010
	if got := b.l.Estimate(q).Input; got != 2010 {
		t.Errorf("a caller who knows better says 2,010, got %d", got)
	}
}

// Time never runs backwards in the ledger.
func TestEarlierNowIsIgnored(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	q := b.ask("s", 0, chain("s", 10))
	v := b.admit(q)
	b.l.Tick(b.now.Add(Corrected().LeaseTTL))
	if _, ok := b.l.Begin(v.Lease.ID, q.Attempt, b.now); ok {
		t.Error("an expired lease came back to life")
	}
}

func TestSetParamsAppliesToTheNextQuestion(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	b.turn("s", 0, chain("s", 10), 0)
	p := Corrected()
	p.MaxAppendTokens = 10
	b.l.SetParams(p)
	if v := b.admit(b.ask("s", 1, chain("s", 20))); v.Mode != Reseed || v.Reason != ReasonLargeAppend {
		t.Errorf("%+v", v)
	}
}
