package state

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// The table agrees with a slice kept in order of use: strict LRU, a bound, and
// a TTL.
func TestTheTableIsStrictLRU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit, ttl = 4, 10 * time.Nanosecond
		tab := newTable(limit, ttl)
		type entry struct {
			key  kvc.SessionKey
			used int64
		}
		var model []entry // oldest first
		now := int64(100)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			now += int64(rapid.IntRange(0, 4).Draw(t, "pause"))
			key := kvc.SessionKey(rapid.StringMatching("[a-g]").Draw(t, "key"))
			if rapid.Bool().Draw(t, "look") {
				i := slices.IndexFunc(model, func(e entry) bool { return e.key == key })
				want := i >= 0 && now-model[i].used <= int64(ttl)
				if got := tab.get(key, now) != nil; got != want {
					t.Fatalf("get(%s) = %v, want %v", key, got, want)
				}
				continue
			}
			tab.touch(key, "", now)
			model = slices.DeleteFunc(model, func(e entry) bool { return e.key == key })
			model = append(model, entry{key, now})
			for len(model) > 1 && (len(model) > limit || now-model[0].used > int64(ttl)) {
				model = model[1:]
			}
			if len(tab.m) != len(model) {
				t.Fatalf("%d sessions, want %d", len(tab.m), len(model))
			}
			i := 0
			for s := tab.oldest; s != nil; s = s.newer {
				if s.key != model[i].key {
					t.Fatalf("position %d is %s, want %s", i, s.key, model[i].key)
				}
				i++
			}
			if i != len(model) {
				t.Fatalf("list has %d sessions, want %d", i, len(model))
			}
		}
	})
}

func TestAnExpiredSessionIsANewOne(t *testing.T) {
	tab := newTable(10, time.Second)
	s := tab.touch("s", "line", 0)
	s.pinned, s.rejects = true, []reject{{n: 3}}
	tab.setTail(s, 9)
	s = tab.touch("s", "", int64(2*time.Second))
	if s.pinned || s.rejects != nil || s.lineage != "" || tab.tails[9] != nil {
		t.Errorf("after the TTL: %+v, tails %v", s, tab.tails)
	}
}

func TestASessionWithARunningTurnDoesNotExpire(t *testing.T) {
	tab := newTable(10, time.Second)
	tab.touch("s", "", 0).turns = 1
	if tab.get("s", int64(time.Hour)) == nil {
		t.Error("expired while its turn runs")
	}
}

func TestTails(t *testing.T) {
	tab := newTable(2, 0)
	a, b := tab.touch("a", "", 1), tab.touch("b", "", 2)
	tab.setTail(a, 10)
	tab.setTail(b, 10) // the same prompt: the later is found
	if tab.tails[10] != b {
		t.Error("tail 10 is not b's")
	}
	tab.setTail(a, 11) // a moves on: b keeps its tail
	if tab.tails[10] != b || tab.tails[11] != a {
		t.Errorf("tails = %v", tab.tails)
	}
	tab.setTail(b, 12)
	if _, ok := tab.tails[10]; ok || len(tab.tails) != 2 {
		t.Errorf("old tails stay: %v", tab.tails)
	}
	tab.touch("c", "", 3) // a is evicted with its tail
	if _, ok := tab.tails[11]; ok || len(tab.tails) != 1 {
		t.Errorf("tails of evicted sessions stay: %v", tab.tails)
	}
	tab.setTail(tab.touch("c", "", 4), 0)
	if len(tab.tails) != 1 {
		t.Errorf("a prompt without a full block left a tail: %v", tab.tails)
	}
}

func TestRejectsDecayAndHalfOpen(t *testing.T) {
	p := kvc.Corrected() // τ 3, half-life 60 s, half-open after 60 s
	paper := kvc.Paper() // neither
	cases := map[string]struct {
		n    float32
		age  time.Duration
		p    kvc.Params
		want int
	}{
		"three refusals count as three":              {3, 0, p, 3},
		"a moment later still":                       {3, time.Second, p, 3},
		"the threshold is left when two are left":    {3, 36 * time.Second, p, 2},
		"a high count half-opens all the same":       {100, 60 * time.Second, p, 2},
		"but not before":                             {100, 59 * time.Second, p, 51},
		"below one half it is forgotten":             {1, 61 * time.Second, p, 0},
		"at one half it is not":                      {1, 59 * time.Second, p, 1},
		"the letter never forgets":                   {3, 24 * time.Hour, paper, 3},
		"a clock that ran backwards decays nothing":  {3, -time.Hour, p, 3},
		"no refusal is no refusal, half-open or not": {0, time.Hour, p, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := reject{n: tc.n, at: 0}
			if got := r.count(int64(tc.age), &tc.p); got != tc.want {
				t.Errorf("count = %d, want %d", got, tc.want)
			}
		})
	}
}

// After half-opening, one more refusal closes the pair again.
func TestOneRefusalClosesAHalfOpenPair(t *testing.T) {
	p, d, s := kvc.Corrected(), ref{slot: 1}, &session{}
	now := int64(0)
	for range 3 {
		s.rejected(d, now, &p)
	}
	now += int64(40 * time.Second)
	if r, _ := s.rejectsOf(d); r.count(now, &p) >= p.RejectThreshold {
		t.Fatal("still closed after 40 s")
	}
	s.rejected(d, now, &p)
	if r, _ := s.rejectsOf(d); r.count(now, &p) < p.RejectThreshold {
		t.Errorf("open after another refusal: %+v", r)
	}
}

func TestForgottenRejectsAreDropped(t *testing.T) {
	p, s := kvc.Corrected(), &session{}
	for i := range 50 {
		s.rejected(ref{slot: int16(i)}, int64(i)*int64(time.Hour), &p)
	}
	if len(s.rejects) != 1 {
		t.Errorf("%d pairs remembered, want the last", len(s.rejects))
	}
}

func TestHalvingSparesThePairItself(t *testing.T) {
	s := &session{rejects: []reject{{ref: ref{slot: 1}, n: 3}, {ref: ref{slot: 2}, n: 3}}}
	s.halveOthers(ref{slot: 1})
	if s.rejects[0].n != 3 || s.rejects[1].n != 1.5 {
		t.Errorf("rejects = %+v", s.rejects)
	}
	s.resetRejects(ref{slot: 1})
	if len(s.rejects) != 1 || s.rejects[0].slot != 2 {
		t.Errorf("rejects after reset = %+v", s.rejects)
	}
}

// The 95th percentile of the last twenty outputs, nearest rank.
func TestOutputQuantile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		outs := rapid.SliceOfN(rapid.IntRange(0, 70_000), 0, 50).Draw(t, "outputs")
		guess := rapid.IntRange(0, 2000).Draw(t, "guess")
		var q quantile
		for _, o := range outs {
			q.add(o)
		}
		last := slices.Clone(outs[max(0, len(outs)-20):])
		for i := range last {
			last[i] = min(last[i], 65_535)
		}
		slices.Sort(last)
		want := guess
		if n := len(last); n > 0 {
			rank := 0
			for rank*100 < n*95 {
				rank++
			}
			want = last[rank-1]
			if n < 4 {
				want = max(want, guess)
			}
		}
		if got := q.p95(guess); got != want {
			t.Fatalf("p95 of %v = %d, want %d", outs, got, want)
		}
	})
}

func TestOwnerIDs(t *testing.T) {
	if ownerID("") != shared || ownerID(kvc.Shared) != shared {
		t.Error("no lineage is not shared")
	}
	if got := ownerID("00000000000000ff"); got != 255 {
		t.Errorf("a key of 16 hex digits is %d, want 255", got)
	}
	seen := map[uint64]string{}
	for i := range 1000 {
		for _, k := range []string{fmt.Sprintf("s-%d", i), fmt.Sprintf("%016x", i+1)} {
			id := ownerID(kvc.SessionKey(k))
			if other, ok := seen[id]; ok || id == shared {
				t.Fatalf("%q and %q share an owner id %d", k, other, id)
			}
			seen[id] = k
		}
	}
}

func TestSpansAreBounded(t *testing.T) {
	q := make(spans)
	for i := range maxSpans + 100 {
		q.push(spanKey{1, kvc.SessionKey(fmt.Sprint(i))}, span{0, []block.Hash{1}})
	}
	if len(q) != maxSpans {
		t.Errorf("%d spans, want %d", len(q), maxSpans)
	}
	q.push(spanKey{2, "x"}, span{0, []block.Hash{1}})
	q.forget(1)
	if len(q) != 1 {
		t.Errorf("%d spans after forgetting a slot, want the other slot's", len(q))
	}
}

func TestSpanConfirmation(t *testing.T) {
	bs := chain(1, 10)
	cases := map[string]struct {
		info kvc.SessionInfo
		want []block.Hash // wrong
		open bool
	}{
		"all are there":                        {kvc.SessionInfo{Key: "s", Tail: bs[9], Blocks: 10}, nil, false},
		"more than the prompt is there":        {kvc.SessionInfo{Key: "s", Tail: bs[9], Blocks: 99}, nil, false},
		"the last three are not":               {kvc.SessionInfo{Key: "s", Tail: bs[9], Blocks: 7}, bs[7:], false},
		"not even what was there before":       {kvc.SessionInfo{Key: "s", Tail: bs[9], Blocks: 1}, bs[4:], false},
		"another prompt's report says nothing": {kvc.SessionInfo{Key: "s", Tail: bs[3], Blocks: 4}, nil, true},
		"another session's neither":            {kvc.SessionInfo{Key: "x", Tail: bs[9], Blocks: 4}, nil, true},
		"nor one while a turn runs":            {kvc.SessionInfo{Key: "s", Tail: bs[9], Blocks: 4, Active: 1}, nil, true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			q := spans{{0, "s"}: {from: 4, blocks: bs[4:]}}
			if got := q.confirm(0, tc.info); !slices.Equal(got, tc.want) || len(q) == 1 != tc.open {
				t.Errorf("wrong = %v, open %v; want %v, %v", got, len(q) == 1, tc.want, tc.open)
			}
		})
	}
}
