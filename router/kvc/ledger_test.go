package kvc

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// Algorithm 2, one line of the pseudocode a case. 8,192 tokens are τ_append,
// a block is 24: 342 blocks are a large append.
func TestAdmitAlgorithm2(t *testing.T) {
	const small, large = 10, 400
	type story struct {
		path       DirectPath
		params     Params
		resident   int // blocks that the session has here
		append     int // blocks that the turn adds
		turn       int
		occupied   int // blocks of others, protected
		uncached   int // what the chosen P lacks
		mode       Mode
		reason     Reason
		wantRefuse bool
	}
	cases := map[string]story{
		"resident, small append, room: direct": {
			resident: 100, append: small, turn: 3, mode: Direct},
		"resident on an engine that transfers deltas: delta": {
			path: DeltaTransfer, resident: 100, append: small, turn: 3, mode: Delta},
		"resident on Unified: direct": {
			path: Unified, resident: 100, append: small, turn: 3, mode: Direct},
		"resident, large append: in place through P (Q4)": {
			resident: 100, append: large, turn: 3, mode: Reseed, reason: ReasonLargeAppend},
		"resident, large append, Unified: the same mode, run locally": {
			path: Unified, resident: 100, append: large, turn: 3, mode: Reseed, reason: ReasonLargeAppend},
		"resident, large append, the letter: refused": {
			params: Paper(), resident: 100, append: large, turn: 3,
			reason: ReasonRealLargeAppend, wantRefuse: true},
		"the letter prefers the large append over the capacity as reason": {
			params: Paper(), resident: 100, append: large, turn: 3, occupied: 3800,
			reason: ReasonRealLargeAppend, wantRefuse: true},
		"resident, no room: no-d-capacity": {
			resident: 100, append: small, turn: 3, occupied: 3850,
			reason: ReasonNoCapacity, wantRefuse: true},
		"resident, large append, no room: no-d-capacity": {
			resident: 100, append: large, turn: 3, occupied: 3600,
			reason: ReasonNoCapacity, wantRefuse: true},
		"absent first turn: seed":         {append: small, turn: 0, mode: Seed},
		"absent later turn: reseed":       {append: small, turn: 4, mode: Reseed},
		"absent large prompt: still seed": {append: large, turn: 0, mode: Seed},
		"absent on Unified: seed":         {path: Unified, append: small, turn: 0, mode: Seed},
		"absent on a delta engine: seed":  {path: DeltaTransfer, append: small, turn: 0, mode: Seed},
		"absent, no room: refused as such": {
			append: large, turn: 0, occupied: 3700,
			reason: ReasonNotResidentNoCapacity, wantRefuse: true},
		"deltas: what P lacks decides, small": {
			path: DeltaTransfer, resident: 100, append: large, uncached: 500, turn: 3, mode: Delta},
		"deltas: what P lacks decides, large": {
			path: DeltaTransfer, resident: 100, append: small, uncached: 9000, turn: 3,
			mode: Reseed, reason: ReasonLargeAppend},
		"an append of exactly τ is not large": {
			path: DeltaTransfer, resident: 100, append: small, uncached: 8192, turn: 3, mode: Delta},
		"one token more is": {
			path: DeltaTransfer, resident: 100, append: small, uncached: 8193, turn: 3,
			mode: Reseed, reason: ReasonLargeAppend},
		"elsewhere P's cache does not matter": {resident: 100, append: small, uncached: 9000, turn: 3, mode: Direct},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{Params: tc.params, DirectPath: tc.path})
			if tc.resident > 0 {
				b.turn("s", 0, chain("s", tc.resident), 20)
			}
			if tc.occupied > 0 {
				b.fallback("other", chain("other", tc.occupied), 0)
			}
			q := b.ask("s", tc.turn, chain("s", tc.resident+tc.append))
			q.PrefillUncachedTokens = tc.uncached
			v := b.admit(q)
			if v.CanAdmit == tc.wantRefuse || v.Mode != tc.mode || v.Reason != tc.reason {
				t.Errorf("Admit = %v %q %q, want %q %q", v.CanAdmit, v.Mode, v.Reason, tc.mode, tc.reason)
			}
			if v.CanAdmit != (v.Lease != Lease{}) {
				t.Errorf("admitted %v with lease %+v", v.CanAdmit, v.Lease)
			}
		})
	}
}

// Q1: alone on its worker, a session of more than half of ρK can go on under
// Corrected. The letter adds its whole input to a use that counts it already.
func TestQ1ResidentPrefixCountsOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		params Params
		want   bool
	}{
		"corrected: only the append is needed": {Corrected(), true},
		"the letter refuses":                   {Paper(), false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{Params: tc.params, CapacityTokens: 10_000})
			b.turn("s", 0, chain("s", 250), 20)
			if v := b.turn("s", 1, chain("s", 255), 20); v.CanAdmit != tc.want {
				t.Errorf("6,132 of 10,000 tokens, all but 120 resident: admitted %v, want %v (%s)", v.CanAdmit, tc.want, v.Reason)
			}
		})
	}
}

// Q1: the asking session's own protected prefix is neither counted twice nor
// forgotten once its protection has ended.
func TestQ1OwnPrefixExactly(t *testing.T) {
	for name, wait := range map[string]time.Duration{"protected": 0, "no longer protected": time.Hour} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{CapacityTokens: 10_000})
			b.turn("s", 0, chain("s", 300), 20) // 7,212 of prompt, 20 of answer
			b.wait(wait)
			q := b.ask("s", 1, chain("s", 310))
			free := b.l.Gauges(b.now)
			v := b.admit(q)
			// 9,500 − path − append of 10 blocks and 12 − answer of 100 (the answer
			// of turn 0 is protected, or reclaimable).
			path := 300 * 24
			if wait == 0 {
				path += 32
			}
			if want := 9500 - path - 252 - 100; v.FreeTokens != want {
				t.Errorf("FreeTokens = %d, want %d (before: %+v)", v.FreeTokens, want, free)
			}
		})
	}
}

// Q1, Q16: idle KV is protected for ProtectIdle and reclaimable afterwards;
// under the letter it stays until released.
func TestQ16IdleProtection(t *testing.T) {
	until := Corrected()
	until.IdleLock = IdleLockUntilReleased
	for name, tc := range map[string]struct {
		params Params
		wait   time.Duration
		forget bool
		want   bool
	}{
		"within the protection others are refused": {Corrected(), 119 * time.Second, false, false},
		"after it the room is theirs":              {Corrected(), 121 * time.Second, false, true},
		"until released: an hour changes nothing":  {until, time.Hour, false, false},
		"until released: releasing does":           {until, 0, true, true},
		"forgetting ends a protection":             {Corrected(), 0, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{Params: tc.params, CapacityTokens: 10_000})
			b.turn("idle", 0, chain("idle", 300), 20)
			b.wait(tc.wait)
			if tc.forget {
				b.l.Forget("idle", b.now)
			}
			if v := b.turn("new", 0, chain("new", 200), 20); v.CanAdmit != tc.want {
				t.Errorf("admitted %v, want %v (%s)", v.CanAdmit, tc.want, v.Reason)
			}
		})
	}
}

func TestRefusalSaysWhenToRetry(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 10_000})
	b.turn("idle", 0, chain("idle", 300), 20)
	b.wait(20 * time.Second)
	v := b.admit(b.ask("new", 0, chain("new", 200)))
	if v.CanAdmit || v.RetryAfter != 100*time.Second {
		t.Fatalf("refused %v, retry after %v; the protection of 120 s is 20 s old", !v.CanAdmit, v.RetryAfter)
	}
	if v := b.admit(b.ask("new", 0, chain("new", 9999))); v.CanAdmit || v.RetryAfter != 0 {
		t.Errorf("no wait makes room for more than the worker holds, got %v", v.RetryAfter)
	}
}

// Q17: append is the worker's own number, from its own chain and ratio.
func TestQ17AppendIsRecomputed(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	b.turn("s", 0, chain("s", 100), 0)
	q := b.ask("s", 1, chain("s", 110))
	q.AppendTokens, q.InputTokens = 99_999, 99_999
	v := b.admit(q)
	if v.Mode != Direct || v.AppendTokens != 252 || v.ResidentTokens != 2400 {
		t.Errorf("mode %v, append %d, resident %d; want direct, 10½ blocks, 100 blocks",
			v.Mode, v.AppendTokens, v.ResidentTokens)
	}
	paper := Paper()
	paper.HighWaterPercent = 100
	b = newBench(t, LedgerConfig{Params: paper, CapacityTokens: 1_000_000})
	b.turn("s", 0, chain("s", 100), 0)
	q.Attempt = "letter"
	if v := b.admit(q); v.Reason != ReasonRealLargeAppend {
		t.Errorf("the letter believes the router's append, got %+v", v)
	}
}

// Q17: a generated tail counts as resident only once cached_tokens has shown
// that this session's template keeps it.
func TestQ17GeneratedTailIsCreditedWhenConfirmed(t *testing.T) {
	for name, tc := range map[string]struct {
		reused int // by turn 1, whose prompt ends behind turn 0's answer of 480
		want   int // appended by turn 2, whose prompt is 30 blocks longer
	}{
		"never confirmed: all of it is append":        {100 * 24, 732},
		"confirmed: the answer of turn 1 is resident": {100*24 + 492, 732 - 492},
		"confirmed by half: half is":                  {100*24 + 246, 732 - 246},
		"not reported: unknown is not confirmed":      {0, 732},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{})
			b.turn("s", 0, chain("s", 100), 480)
			q := b.ask("s", 1, chain("s", 130))
			v := b.admit(q)
			if v.AppendTokens != 732 {
				t.Fatalf("turn 1: append %d before anything was confirmed, want 30½ blocks", v.AppendTokens)
			}
			b.finish(q, v, tc.reused, 480)
			if v := b.admit(b.ask("s", 2, chain("s", 160))); v.AppendTokens != tc.want {
				t.Errorf("turn 2: append %d, want %d", v.AppendTokens, tc.want)
			}
		})
	}
}

// A confirmed tail is the same KV as the blocks that name it from then on, so
// it is not counted twice; one that the template dropped stays until evicted.
func TestConfirmedTailIsNotCountedTwice(t *testing.T) {
	for name, tc := range map[string]struct{ reused, want int }{
		"kept by the template":     {100*24 + 492, 130*24 + 12},
		"stripped by the template": {100 * 24, 130*24 + 12 + 492},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{})
			b.turn("s", 0, chain("s", 100), 480)
			q := b.ask("s", 1, chain("s", 130))
			b.finish(q, b.admit(q), tc.reused, 0)
			if got := b.l.Gauges(b.now).Used; got != tc.want {
				t.Errorf("Used = %d, want %d", got, tc.want)
			}
		})
	}
}

// Q5: blocks belong to a lineage until a second one uses them.
func TestQ5Ownership(t *testing.T) {
	b := newBench(t, LedgerConfig{})
	boiler := chain("boiler", 20)
	b.turn("a", 0, join(boiler, chain("a", 30)), 0)
	b.l.Changes()
	v := b.turn("b", 0, join(boiler, chain("b", 30)), 0)
	if v.Mode != Seed || v.ResidentTokens != 480 {
		t.Errorf("boilerplate alone makes nobody resident: %v with %d tokens, want seed with 480", v.Mode, v.ResidentTokens)
	}
	var own, add *Change
	for _, c := range b.l.Changes() {
		switch c.Kind {
		case ChangeOwn:
			own = &c
		case ChangeAdd:
			add = &c
		}
	}
	if own == nil || own.Owner != Shared || !cmp.Equal(own.Blocks, boiler) {
		t.Errorf("own change %+v, want the boilerplate, root first, to SHARED", own)
	}
	if add == nil || add.Owner != "b" || !cmp.Equal(add.Blocks, chain("b", 30)) {
		t.Errorf("add change %+v, want b's 30 blocks", add)
	}

	t.Run("a child of the same lineage shares nothing away", func(t *testing.T) {
		q := b.ask("a-child", 0, join(boiler, chain("a", 30), chain("child", 5)))
		q.Lineage = "a"
		v := b.admit(q)
		if v.Mode != Direct {
			t.Errorf("a fork of a resident parent is resident, got %v", v.Mode)
		}
		b.finish(q, v, -1, 0)
		for _, c := range b.l.Changes() {
			if c.Kind == ChangeOwn {
				t.Errorf("unexpected %+v", c)
			}
		}
	})
	t.Run("a session whose whole prompt became shared is still resident", func(t *testing.T) {
		b.turn("twin", 0, join(boiler, chain("b", 30)), 0)
		if v := b.turn("b", 1, join(boiler, chain("b", 35)), 0); v.Mode != Direct {
			t.Errorf("mode %v, want direct", v.Mode)
		}
	})
	t.Run("a context reset to the boilerplate is not resident", func(t *testing.T) {
		if v := b.turn("b", 2, join(boiler, chain("compacted", 10)), 0); v.Mode != Reseed || v.ResidentTokens != 480 {
			t.Errorf("mode %v with %d resident, want reseed with 480", v.Mode, v.ResidentTokens)
		}
	})
	t.Run("a sessionless request is never resident and owns nothing", func(t *testing.T) {
		b.l.Changes()
		q := b.ask("", 0, chain("nobody", 3))
		b.finish(q, b.admit(q), -1, 0)
		for _, c := range b.l.Changes() {
			if c.Kind == ChangeAdd && c.Owner != Shared {
				t.Errorf("added for %q, want SHARED", c.Owner)
			}
		}
		q = b.ask("", 1, chain("nobody", 4))
		if v := b.admit(q); v.Mode != Reseed {
			t.Errorf("mode %v, want reseed", v.Mode)
		}
	})
	t.Run("nobody becomes resident by claiming SHARED as lineage", func(t *testing.T) {
		q := b.ask("thief", 0, boiler)
		q.Lineage = Shared
		if v := b.admit(q); v.Mode != Seed {
			t.Errorf("mode %v, want seed", v.Mode)
		}
	})
}

// Q11: leases.
func TestQ11Lease(t *testing.T) {
	ttl := Corrected().LeaseTTL
	t.Run("an unpresented lease frees what it reserved when it expires", func(t *testing.T) {
		b := newBench(t, LedgerConfig{})
		b.turn("s", 0, chain("s", 10), 0)
		before := b.l.Gauges(b.now)
		q := b.ask("s", 1, chain("s", 20))
		v := b.admit(q)
		if g := b.l.Gauges(b.now); g.Reserved != v.Lease.Tokens || v.Lease.TTL != ttl || g.Locked != 240 {
			t.Errorf("gauges %+v, lease %+v", g, v.Lease)
		}
		if next := b.l.Tick(b.now.Add(ttl - time.Second)); next != time.Second {
			t.Errorf("Tick asks to be called in %v, want when the lease ends, in 1s", next)
		}
		b.wait(ttl)
		if g := b.l.Gauges(b.now); g.Reserved != 0 || g.Locked != 0 || g.Used != before.Used {
			t.Errorf("after expiry %+v, before %+v", g, before)
		}
		if r, ok := b.l.Begin(v.Lease.ID, q.Attempt, b.now); ok || r != ReasonLeaseExpired {
			t.Errorf("Begin = %q %v", r, ok)
		}
		if again := b.admit(q); !again.CanAdmit || again.Lease.ID != v.Lease.ID {
			t.Errorf("asked anew: %+v", again)
		}
	})
	t.Run("a lease keeps the prefix it counts on from being evicted", func(t *testing.T) {
		b := newBench(t, LedgerConfig{CapacityTokens: 10_000})
		b.turn("s", 0, chain("s", 100), 0)
		q := b.ask("s", 1, chain("s", 110))
		v := b.admit(q)
		b.fallback("big", chain("big", 290), 0)
		b.finish(q, v, -1, 0)
		if got := b.l.Sessions("", 0); len(got) == 0 || got[len(got)-1].Key != "s" || got[len(got)-1].Blocks != 110 {
			t.Errorf("sessions %+v, want s with 110 blocks", got)
		}
	})
	t.Run("a promise (the letter) keeps nothing", func(t *testing.T) {
		b := newBench(t, LedgerConfig{Params: Paper()})
		b.admit(b.ask("s", 0, chain("s", 10)))
		if g := b.l.Gauges(b.now); g.Reserved != 0 || g.Locked != 0 {
			t.Errorf("gauges %+v", g)
		}
	})
	t.Run("an ended lease is no turn", func(t *testing.T) {
		b := newBench(t, LedgerConfig{})
		q := b.ask("s", 0, chain("s", 10))
		v := b.admit(q)
		b.l.End(q.Attempt, Usage{}, OutcomeCancelled, b.now)
		b.checked()
		for _, c := range b.l.Changes() {
			if c.Kind == ChangeTurn {
				t.Errorf("unexpected %+v", c)
			}
		}
		if _, ok := b.l.Begin(v.Lease.ID, q.Attempt, b.now); ok {
			t.Error("the lease survived")
		}
	})
	t.Run("a turn that falls back gives its lease up", func(t *testing.T) {
		b := newBench(t, LedgerConfig{})
		q := b.ask("s", 0, chain("s", 10))
		b.admit(q)
		b.l.BeginUnadmitted(q, Fallback, b.now)
		b.checked()
		if g := b.l.Gauges(b.now); g.Reserved != 0 || g.Active != 1 {
			t.Errorf("gauges %+v", g)
		}
		b.l.BeginUnadmitted(q, Fallback, b.now)
		if g := b.l.Gauges(b.now); g.Active != 1 {
			t.Errorf("begun twice: %+v", g)
		}
		b.end(q, -1, 0)
		b.l.BeginUnadmitted(q, Fallback, b.now)
		if g := b.l.Gauges(b.now); g.Active != 0 {
			t.Errorf("begun again after its end: %+v", g)
		}
	})
}

// A lease that counts on a chain delays its eviction, not its place in the
// order of use: what was used later stays behind it.
func TestReleasedLeaseLeavesOrderOfUse(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 1200})
	trunk := chain("trunk", 10)
	b.fallback("new", trunk, 0)
	b.fallback("old", chain("old", 10), 0)
	b.fallback("new", join(trunk, chain("leaf", 10)), 0) // uses the trunk after old
	b.wait(time.Hour)
	q := b.ask("old", 1, chain("old", 10))
	v := b.admit(q)
	if !v.CanAdmit {
		t.Fatalf("%+v", v)
	}
	b.fallback("big", chain("big", 26), 0) // takes the leaf and a bit of the trunk: old is held
	b.l.Release(v.Lease.ID, b.now)
	b.l.Changes()
	b.fallback("more", chain("more", 2), 0)
	olds := 0
	for _, c := range b.l.Changes() {
		if c.Kind != ChangeEvict {
			continue
		}
		for _, h := range c.Blocks {
			if slices.Contains(trunk, h) {
				t.Error("a block of the trunk, used after old's, was evicted before them")
			}
			if slices.Contains(chain("old", 10), h) {
				olds++
			}
		}
	}
	if olds == 0 {
		t.Error("nothing of old was evicted: the story is stale")
	}
}

// What another turn made resident between a lease and its turn is used.
func TestBeginLooksAgain(t *testing.T) {
	for name, p := range map[string]Params{"lease": Corrected(), "promise": Paper()} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{Params: p})
			q := b.ask("s", 0, chain("s", 20))
			v := b.admit(q)
			b.fallback("s", chain("s", 15), 0)
			b.l.Begin(v.Lease.ID, q.Attempt, b.now)
			b.checked()
			if e, ok := b.l.Expected(q.Attempt); !ok || e.Resident != 360 || e.Mode != Seed {
				t.Errorf("Expected = %+v %v, want 15 blocks resident", e, ok)
			}
			if _, ok := b.l.Expected("unknown"); ok {
				t.Error("an unknown attempt is expected")
			}
		})
	}
}

// Sessions that left nothing of their own do not stay listed as long as the
// blocks they shared.
func TestTwinsWithoutTailsAreGone(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 1000})
	b.turn("x", 0, chain("same", 5), 30)
	b.turn("y", 0, chain("same", 5), 30)
	b.wait(time.Hour)
	b.fallback("big", chain("big", 32), 0)
	if got := b.l.Sessions("", 0); len(got) != 2 || got[1].Key != "y" {
		t.Errorf("listed: %+v; want big, and y as the last one at the shared blocks", got)
	}
	if e := b.l.Estimate(b.ask("x", 1, chain("same", 6))); e.Resident == 0 {
		t.Error("the shared blocks were evicted too: the story is stale")
	}
}

func TestOutputReserve(t *testing.T) {
	for name, tc := range map[string]struct {
		answers   []int
		maxTokens int
		want      int
	}{
		"nothing known: the guess":                {nil, 0, 1024},
		"max_tokens below the guess":              {nil, 300, 300},
		"a few short answers do not lower it":     {[]int{5, 5}, 0, 1024},
		"one long answer raises it":               {[]int{3000}, 0, 3000},
		"learnt: the p95 of the latest answers":   {[]int{10, 20, 30, 40, 50, 60, 70, 80}, 0, 80},
		"learnt: only the latest sixteen count":   {append([]int{9000}, repeat(50, 16)...), 0, 50},
		"max_tokens below what was learnt":        {repeat(500, 8), 200, 200},
		"max_tokens above what was learnt: p95":   {repeat(500, 8), 9000, 500},
		"empty answers: no reserve, still a turn": {repeat(0, 8), 9000, 0},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, LedgerConfig{})
			for i, answer := range tc.answers {
				b.turn("s", i, chain("s", 10), answer)
			}
			q := b.ask("s", 9, chain("s", 11))
			q.OutputTokens = tc.maxTokens
			if got := b.l.Estimate(q).Reserve; got != tc.want {
				t.Errorf("Reserve = %d, want %d", got, tc.want)
			}
		})
	}
}

func repeat(v, n int) (vs []int) {
	for range n {
		vs = append(vs, v)
	}
	return vs
}

// Only a turn that ended well leaves KV behind; every turn leaves a frame.
func TestOnlySuccessCredits(t *testing.T) {
	for _, o := range []Outcome{OutcomeError, OutcomeCancelled} {
		t.Run(string(o), func(t *testing.T) {
			b := newBench(t, LedgerConfig{})
			q := b.ask("s", 0, chain("s", 10))
			v := b.admit(q)
			b.l.Begin(v.Lease.ID, q.Attempt, b.now)
			b.l.End(q.Attempt, Usage{PromptTokens: 252}, o, b.now)
			b.checked()
			if g := b.l.Gauges(b.now); g != (Gauges{}) {
				t.Errorf("gauges %+v, want none", g)
			}
			cs := b.l.Changes()
			last := cs[len(cs)-1]
			want := TurnInfo{Attempt: q.Attempt, Session: "s", Mode: Seed, Usage: Usage{PromptTokens: 252}, Outcome: o}
			if last.Kind != ChangeTurn || last.Turn != want {
				t.Errorf("last change %+v, want %+v", last, want)
			}
			if before := cs[len(cs)-2]; before.Kind != ChangeSessionGone {
				t.Errorf("the session that never got KV is still listed: %+v", before)
			}
		})
	}
}

// Fits: a fallback turn may fill K_d, not what is promised to others.
func TestFits(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 10_000})
	b.turn("idle", 0, chain("idle", 300), 0)
	q := b.ask("f", 1, chain("f", 350)) // 8,412 + 100
	if !b.l.Fits(q, b.now) {
		t.Error("protection binds admission only; idle KV gives way")
	}
	leased := b.ask("l", 0, chain("l", 70)) // 1,692 + 100
	if v := b.admit(leased); !v.CanAdmit {
		t.Fatalf("%+v", v)
	}
	if b.l.Fits(q, b.now) {
		t.Error("8,512 + 1,792 reserved tokens do not fit into 10,000")
	}
	if !b.l.Fits(b.ask("huge", 0, chain("huge", 1000)), b.now) {
		t.Error("a prompt beyond K_d must reach the engine, which says so")
	}
}

// An unadmitted turn that does not fit takes what there is; Inv1 holds.
func TestUnadmittedBeyondCapacity(t *testing.T) {
	b := newBench(t, LedgerConfig{CapacityTokens: 1000})
	q := b.ask("huge", 0, chain("huge", 100))
	b.l.BeginUnadmitted(q, Fallback, b.now)
	b.checked()
	if g := b.l.Gauges(b.now); g.Used != 1000 || g.Locked != 1000 {
		t.Errorf("gauges %+v", g)
	}
	b.end(q, 0, 500)
	if got := b.l.Sessions("", 0); len(got) != 1 || got[0].Blocks != 41 {
		t.Errorf("of 100 blocks of 24 tokens, 41 fit into 1,000: %+v", got)
	}
}
