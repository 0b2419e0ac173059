package radix

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func ids(n, from int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(from + i)
	}
	return out
}

func cat(parts ...[]int32) []int32 { return slices.Concat(parts...) }

// run computes ids in one turn and ends it.
func run(t *testing.T, c *Cache, ids []int32) (cached int) {
	t.Helper()
	turn := c.Begin(ids)
	cached = turn.Cached()
	if !turn.Commit(ids) {
		t.Fatalf("no room for %d tokens: used %d of %d", len(ids), c.Used(), c.Capacity())
	}
	turn.End()
	check(t, c)
	return cached
}

func check(t interface {
	Helper()
	Fatalf(string, ...any)
}, c *Cache) {
	t.Helper()
	if err := c.Check(); err != nil {
		t.Fatalf("invariant broken: %v", err)
	}
}

func TestMatch(t *testing.T) {
	long := ids(100, 0)
	cases := map[string]struct {
		page int
		seen [][]int32
		ask  []int32
		want int
	}{
		"an empty cache matches nothing":                       {1, nil, long, 0},
		"the same prompt matches whole":                        {1, [][]int32{long}, long, 100},
		"a longer prompt matches what was seen":                {1, [][]int32{long}, ids(120, 0), 100},
		"a shorter prompt matches itself":                      {1, [][]int32{long}, long[:40], 40},
		"prompts part at the first other token":                {1, [][]int32{long}, cat(long[:37], ids(10, 500)), 37},
		"a page that differs in its last token does not match": {16, [][]int32{long}, cat(long[:47], ids(60, 500)), 32},
		"a partial page is not kept":                           {16, [][]int32{long}, long, 96},
		"a prompt shorter than a page matches nothing":         {16, [][]int32{long}, long[:15], 0},
		"the deepest branch wins": {1, [][]int32{
			cat(long[:50], ids(10, 500)), cat(long[:50], ids(10, 600)),
		}, cat(long[:50], ids(5, 600)), 55},
		"another first token matches nothing": {1, [][]int32{long}, ids(100, 7), 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := New(Config{Capacity: 1000, PageSize: tc.page})
			for _, s := range tc.seen {
				run(t, c, s)
			}
			if got := c.Peek(tc.ask); got != tc.want {
				t.Errorf("Peek = %d, want %d", got, tc.want)
			}
			turn := c.Begin(tc.ask)
			defer turn.End()
			if got := turn.Cached(); got != tc.want {
				t.Errorf("Begin cached %d, want %d", got, tc.want)
			}
			check(t, c)
		})
	}
}

func TestEvictionTakesTheLeastRecentlyUsedLeaf(t *testing.T) {
	c := New(Config{Capacity: 300})
	a, b, d := ids(100, 0), ids(100, 1000), ids(100, 2000)
	run(t, c, a)
	run(t, c, b)
	run(t, c, d)
	run(t, c, a) // a is now the most recent

	run(t, c, ids(50, 3000))
	want := map[string]int{"a": 100, "b": 0, "d": 100}
	got := map[string]int{"a": c.Peek(a), "b": c.Peek(b), "d": c.Peek(d)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("resident after eviction (-want +got):\n%s", diff)
	}
	if c.Evicted() != 100 {
		t.Errorf("Evicted = %d, want the whole leaf of 100", c.Evicted())
	}
}

func TestEvictionClimbsFromLeafToParent(t *testing.T) {
	c := New(Config{Capacity: 200})
	stem := ids(60, 0)
	run(t, c, stem)
	run(t, c, cat(stem, ids(40, 1000)))
	run(t, c, ids(100, 5000)) // fills the pool
	run(t, c, ids(110, 9000)) // needs leaf and stem both, and then some

	if got := c.Peek(stem); got != 0 {
		t.Errorf("%d tokens of the stem are left, want 0: its leaf went before it", got)
	}
	if c.Used() > c.Capacity() {
		t.Errorf("used %d of %d", c.Used(), c.Capacity())
	}
}

func TestALockedPrefixIsNeverEvicted(t *testing.T) {
	c := New(Config{Capacity: 150})
	held := ids(100, 0)
	run(t, c, held)
	turn := c.Begin(held)
	if other := c.Begin(ids(60, 1000)); other.Extend(60) {
		t.Error("60 tokens were found beside 100 locked ones in a pool of 150")
	} else {
		other.End()
	}
	if got := c.Peek(held); got != 100 {
		t.Errorf("%d of the locked prefix are left, want 100", got)
	}
	turn.End()
	run(t, c, ids(60, 1000))
	if got := c.Peek(held); got != 0 {
		t.Errorf("%d tokens survived although unlocked and needed", got)
	}
}

func TestAFailedExtendEvictsNothing(t *testing.T) {
	c := New(Config{Capacity: 100})
	idle := ids(50, 0)
	run(t, c, idle)
	turn := c.Begin(ids(10, 1000))
	defer turn.End()
	if turn.Extend(101) {
		t.Fatal("101 tokens fit into a pool of 100")
	}
	if got := c.Peek(idle); got != 50 {
		t.Errorf("a failed Extend left %d of 50 idle tokens", got)
	}
}

func TestTwoTurnsOfTheSamePromptShareItsPages(t *testing.T) {
	c := New(Config{Capacity: 250})
	p := ids(100, 0)
	a, b := c.Begin(p), c.Begin(p)
	if !a.Extend(100) || !b.Extend(100) {
		t.Fatal("two copies of 100 tokens do not fit into 250")
	}
	if c.Used() != 200 {
		t.Errorf("used %d while both compute, want 200", c.Used())
	}
	if !a.Commit(p) || !b.Commit(p) {
		t.Fatal("Commit found no room")
	}
	check(t, c)
	if c.Used() != 100 || c.Held() != 100 {
		t.Errorf("used %d, held %d after both committed, want 100 and 100", c.Used(), c.Held())
	}
	a.End()
	if c.Evictable() != 0 {
		t.Errorf("%d tokens are evictable while a turn still holds them", c.Evictable())
	}
	b.End()
	b.End()
	if c.Evictable() != 100 || c.Turns() != 0 {
		t.Errorf("evictable %d, turns %d after both ended, want 100 and 0", c.Evictable(), c.Turns())
	}
	check(t, c)
}

func TestASplitKeepsTheHolder(t *testing.T) {
	c := New(Config{Capacity: 1000})
	long := ids(100, 0)
	run(t, c, long)
	holder := c.Begin(long)
	run(t, c, cat(long[:30], ids(20, 500))) // splits the held node at 30
	if c.Held() != 100 {
		t.Errorf("held %d after the split, want 100", c.Held())
	}
	if !holder.Commit(ids(120, 0)) {
		t.Fatal("the holder cannot go on after a split")
	}
	holder.End()
	check(t, c)
	if got := c.Peek(ids(120, 0)); got != 120 {
		t.Errorf("resident %d, want 120", got)
	}
}

func TestADisabledCacheForgets(t *testing.T) {
	c := New(Config{Capacity: 200, Disabled: true})
	p := ids(100, 0)
	run(t, c, p)
	if got := c.Peek(p); got != 0 || c.Used() != 0 {
		t.Errorf("resident %d, used %d after the turn, want nothing", got, c.Used())
	}
}

func TestFlush(t *testing.T) {
	c := New(Config{Capacity: 200})
	turn := c.Begin(ids(10, 0))
	if c.Flush() {
		t.Error("flushed under a running turn")
	}
	turn.Commit(ids(10, 0))
	turn.End()
	if !c.Flush() || c.Used() != 0 || c.Peek(ids(10, 0)) != 0 {
		t.Errorf("used %d after Flush, want 0", c.Used())
	}
	check(t, c)
}

func TestPagesRoundUp(t *testing.T) {
	c := New(Config{Capacity: 100, PageSize: 16})
	if c.Capacity() != 96 {
		t.Errorf("Capacity = %d, want 96: whole pages only", c.Capacity())
	}
	turn := c.Begin(ids(17, 0))
	turn.Extend(17)
	if c.Used() != 32 {
		t.Errorf("17 tokens use %d, want two pages of 16", c.Used())
	}
	turn.End()
}

// model is the slow cache: a set of sequences, without nodes, splits or pages.
type model struct{ held map[int][]int32 }

// Any interleaving of turns keeps every invariant, never evicts what a turn
// holds, and never loses a prefix while nothing was evicted.
func TestCacheInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		page := rapid.SampledFrom([]int{1, 2, 4, 16}).Draw(t, "page")
		c := New(Config{Capacity: rapid.IntRange(8, 200).Draw(t, "capacity"), PageSize: page, Hash: Chain})
		m := model{held: map[int][]int32{}}
		turns := map[int]*Turn{}
		resident := map[int64]bool{}
		next := 0
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(turns) == 0 || rapid.Bool().Draw(t, "begin") {
				p := rapid.SliceOfN(rapid.Int32Range(0, 2), 1, 60).Draw(t, "ids")
				before := c.Peek(p)
				turn := c.Begin(p)
				if turn.Cached() != before {
					t.Fatalf("Begin matched %d, Peek %d", turn.Cached(), before)
				}
				turns[next], m.held[next] = turn, p
				next++
			} else {
				k := rapid.SampledFrom(slices.Sorted(keys(turns))).Draw(t, "turn")
				if rapid.Bool().Draw(t, "commit") {
					if turns[k].Commit(m.held[k]) && turns[k].Cached() != len(m.held[k])/page*page {
						t.Fatalf("committed %d of %d tokens", turns[k].Cached(), len(m.held[k]))
					}
				} else {
					turns[k].End()
					delete(turns, k)
				}
			}
			check(t, c)
			for k, turn := range turns {
				if got := c.Peek(m.held[k]); got < turn.Cached() {
					t.Fatalf("turn %d holds %d tokens, %d are resident", k, turn.Cached(), got)
				}
			}
			replayEvents(t, c, resident)
		}
		for _, turn := range turns {
			turn.End()
		}
		check(t, c)
		if c.Held() != 0 {
			t.Fatalf("%d tokens are held although no turn runs", c.Held())
		}
		if len(resident)*page != c.Cached() {
			t.Fatalf("the events add up to %d pages of %d, the tree holds %d tokens", len(resident), page, c.Cached())
		}
	})
}

func keys[K comparable, V any](m map[K]V) func(func(K) bool) {
	return func(yield func(K) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// replayEvents applies the cache's events to a follower's set of pages: no page
// is stored twice, removed twice, or removed before what was stored after it.
func replayEvents(t *rapid.T, c *Cache, resident map[int64]bool) {
	for _, e := range c.Events() {
		switch e.Kind {
		case Stored:
			if e.Parent != nil && !resident[e.Parent.Wire()] {
				t.Fatalf("pages were stored under a parent that is not resident")
			}
			if len(e.IDs) != len(e.Hashes)*c.PageSize() {
				t.Fatalf("%d tokens for %d pages", len(e.IDs), len(e.Hashes))
			}
			for _, h := range e.Hashes {
				if resident[h.Wire()] {
					t.Fatalf("a page was stored twice")
				}
				resident[h.Wire()] = true
			}
		case Removed:
			for _, h := range e.Hashes {
				if !resident[h.Wire()] {
					t.Fatalf("a page was removed that was not resident")
				}
				delete(resident, h.Wire())
			}
		case Cleared:
			clear(resident)
		}
	}
}

// The golden values of contract §5.
func TestChainGolden(t *testing.T) {
	cases := map[string]struct {
		page int
		ids  []int32
		want []int64
	}{
		"tokens 1..8, page 4":     {4, ids(8, 1), []int64{-3488128144981237669, 5674439469042975057}},
		"tokens 10,11,12, page 1": {1, ids(3, 10), []int64{530829615411484422, 1664552575489320250, -2339062019419321107}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := New(Config{Capacity: 100, PageSize: tc.page, Hash: Chain})
			run(t, c, tc.ids)
			events := c.Events()
			if len(events) != 1 || events[0].Kind != Stored || events[0].Parent != nil {
				t.Fatalf("events = %+v, want one Stored at the root", events)
			}
			var got []int64
			for _, h := range events[0].Hashes {
				got = append(got, h.Wire())
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("hashes (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEventsFollowASplitAndAnEviction(t *testing.T) {
	c := New(Config{Capacity: 12, PageSize: 4, Hash: Chain})
	stem := ids(4, 0)
	run(t, c, cat(stem, ids(4, 100)))
	run(t, c, cat(stem, ids(4, 200))) // splits, stores one page under the stem
	run(t, c, cat(stem, ids(4, 300))) // evicts the page of 100…103

	var kinds []Kind
	var pages []int
	for _, e := range c.Events() {
		kinds, pages = append(kinds, e.Kind), append(pages, len(e.Hashes))
	}
	if diff := cmp.Diff([]Kind{Stored, Stored, Removed, Stored}, kinds); diff != "" {
		t.Errorf("kinds (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{2, 1, 1, 1}, pages); diff != "" {
		t.Errorf("pages (-want +got):\n%s", diff)
	}
	if e := c.Events(); e != nil {
		t.Errorf("events were reported twice: %v", e)
	}
}

// FuzzCache drives turns from bytes, so that the fuzzer finds orders of
// operations that the property's generator does not.
func FuzzCache(f *testing.F) {
	f.Add([]byte{1, 40, 10, 1, 2, 3, 4, 200, 201, 10, 1, 2, 3, 9, 220})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) < 2 {
			return
		}
		c := New(Config{Capacity: int(ops[1]), PageSize: int(ops[0]%8) + 1})
		var turns []*Turn
		var prompts [][]int32
		for i := 2; i < len(ops); i++ {
			switch op := ops[i]; {
			case op < 100:
				n := min(int(op), len(ops)-i-1)
				p := make([]int32, n)
				for k := range p {
					p[k] = int32(ops[i+1+k] % 3)
				}
				turns, prompts = append(turns, c.Begin(p)), append(prompts, p)
				i += n
			case len(turns) == 0:
			case op < 200:
				k := int(op) % len(turns)
				turns[k].Commit(prompts[k])
			default:
				turns[int(op)%len(turns)].End()
			}
			check(t, c)
		}
	})
}

func BenchmarkTurn100K(b *testing.B) {
	for _, page := range []int{1, 64} {
		b.Run(map[int]string{1: "page1", 64: "page64"}[page], func(b *testing.B) {
			c := New(Config{Capacity: 600_000, PageSize: page})
			for s := range 40 { // other sessions
				p := cat(ids(8_000, 0), ids(10_000, 100_000*(s+1)))
				turn := c.Begin(p)
				turn.Commit(p)
				turn.End()
			}
			prompt := cat(ids(8_000, 0), ids(92_000, 50_000_000))
			b.ReportAllocs()
			for b.Loop() {
				turn := c.Begin(prompt)
				turn.Commit(prompt)
				turn.End()
			}
		})
	}
}

// BenchmarkChurn measures turns that evict: every prompt is new and the pool
// is full.
func BenchmarkChurn(b *testing.B) {
	c := New(Config{Capacity: 600_000, PageSize: 64})
	stem := ids(8_000, 0)
	n := 0
	for b.Loop() {
		n++
		p := cat(stem, ids(1_000, 10_000*n))
		turn := c.Begin(p)
		if !turn.Commit(p) {
			b.Fatal("no room")
		}
		turn.End()
	}
}
