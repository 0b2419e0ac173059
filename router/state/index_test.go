package state

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
)

// holding is the obvious index: who holds what for whom.
type holding struct {
	held  map[block.Hash]map[int]bool
	owner map[block.Hash]uint64
}

func newHolding() *holding {
	return &holding{map[block.Hash]map[int]bool{}, map[block.Hash]uint64{}}
}

func (m *holding) add(slot int, owner uint64, bs []block.Hash) {
	for _, h := range bs {
		if m.held[h] == nil {
			m.held[h], m.owner[h] = map[int]bool{}, owner
		}
		if m.owner[h] != owner {
			m.owner[h] = shared
		}
		m.held[h][slot] = true
	}
}

func (m *holding) evict(slot int, bs []block.Hash) {
	for _, h := range bs {
		if delete(m.held[h], slot); len(m.held[h]) == 0 {
			delete(m.held, h)
			delete(m.owner, h)
		}
	}
}

// lcp is read block by block.
func (m *holding) lcp(slot int, bs []block.Hash) int {
	for i, h := range bs {
		if !m.held[h][slot] {
			return i
		}
	}
	return len(bs)
}

// first is the first block of the longest resident prefix that is owner's.
func (m *holding) first(owner uint64, slots int, bs []block.Hash) int {
	longest := 0
	for s := range slots {
		longest = max(longest, m.lcp(s, bs))
	}
	for i, h := range bs[:longest] {
		if m.owner[h] == owner {
			return i
		}
	}
	return longest
}

// tree draws conversations that share prefixes: each branches off an earlier
// one. Block i of branch b is unique to the branches that share it.
func drawTree(t *rapid.T) (chains [][]block.Hash) {
	next := block.Hash(0)
	grow := func(bs []block.Hash, n int) []block.Hash {
		bs = slices.Clone(bs)
		for range n {
			next++
			bs = append(bs, next*0x9e3779b97f4a7c15)
		}
		return bs
	}
	for i := range rapid.IntRange(1, 5).Draw(t, "chains") {
		var stem []block.Hash
		if i > 0 {
			from := rapid.SampledFrom(chains).Draw(t, "from")
			stem = from[:rapid.IntRange(0, len(from)).Draw(t, "stem")]
		}
		chains = append(chains, grow(stem, rapid.IntRange(1, 40).Draw(t, "length")))
	}
	return chains
}

// All overlaps at once agree with reading block by block, for every worker,
// through adds and leaf-first evictions. Premise: residency is prefix-closed.
func TestReachAgreesWithReadingEveryBlock(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const slots = 70 // more than one word of the set
		chains := drawTree(t)
		x, m := newIndex(1<<20), newHolding()
		for range rapid.IntRange(1, 30).Draw(t, "changes") {
			c := rapid.IntRange(0, len(chains)-1).Draw(t, "chain")
			bs := chains[c]
			slot := rapid.SampledFrom([]int{0, 1, 2, 63, 64, 69}).Draw(t, "slot")
			cut := rapid.IntRange(0, len(bs)).Draw(t, "cut")
			if rapid.IntRange(0, 3).Draw(t, "evict") > 0 {
				x.add(slot, uint64(c+1), bs[:cut])
				m.add(slot, uint64(c+1), bs[:cut])
				continue
			}
			// Evicting a block evicts what hangs on it.
			var gone []block.Hash
			for _, other := range chains {
				if n := block.CommonPrefix(other, bs); n > cut || slices.Equal(other, bs) {
					gone = append(gone, other[min(cut, len(other)):]...)
				}
			}
			x.evict(slot, gone)
			m.evict(slot, gone)
		}
		if int(x.size.Load()) != len(m.held) {
			t.Fatalf("index has %d blocks, want %d", x.size.Load(), len(m.held))
		}
		var all set
		for s := range slots {
			all.add(s)
		}
		for c, bs := range chains {
			r := x.reach(make([]int32, slots), bs, all, uint64(c+1), true)
			for s := range slots {
				if want := m.lcp(s, bs); int(r.lcp[s]) != want {
					t.Fatalf("chain %d, slot %d: lcp %d, want %d", c, s, r.lcp[s], want)
				}
			}
			if want := m.first(uint64(c+1), slots, bs); r.first != want {
				t.Fatalf("chain %d: first exclusive block %d, want %d", c, r.first, want)
			}
		}
	})
}

func TestReachReadsOnlyWhoIsAskedFor(t *testing.T) {
	x, bs := newIndex(100), chain(1, 10)
	x.add(3, 1, bs[:4])
	x.add(5, 1, bs)
	var only set
	only.add(3)
	r := x.reach(make([]int32, 8), bs, only, 1, false)
	if r.lcp[3] != 4 || r.lcp[5] != 0 {
		t.Errorf("lcp = %v, want 4 at slot 3 alone", r.lcp)
	}
}

// A hole (a block that was dropped because the index was full) shortens what is
// believed; it never lengthens it beyond what a worker was said to hold, and
// never breaks.
func TestReachOverAHole(t *testing.T) {
	for hole := range 20 {
		x, bs := newIndex(100), chain(1, 20)
		x.add(0, 1, bs)
		x.evict(0, bs[hole:hole+1])
		var all set
		all.add(0)
		r := x.reach(make([]int32, 1), bs, all, 1, true)
		if int(r.lcp[0]) > len(bs) || hole == 0 && r.lcp[0] != 0 {
			t.Errorf("hole at %d: lcp %d", hole, r.lcp[0])
		}
	}
}

// A few dozen lookups answer for thousands of blocks: that is the point of
// galloping. The bound is generous; reading every block would be 4,096 × 8.
func TestReachLooksUpFewBlocks(t *testing.T) {
	x, bs := newIndex(1<<20), scattered(1, 4096)
	var all set
	for s := range 8 {
		x.add(s, 1, bs[:500*(s+1)])
		all.add(s)
	}
	f := finder{x: x, blocks: bs, lcp: make([]int32, 8)}
	first := f.holders(0, &all)
	f.from(0, first)
	f.firstOwned(1)
	if f.lookups > 150 {
		t.Errorf("%d lookups for 8 workers and 4,096 blocks", f.lookups)
	}
}

func TestOwnership(t *testing.T) {
	bs := chain(1, 1)
	cases := map[string]struct {
		do   func(*index)
		want uint64
	}{
		"the first user owns":                       {func(x *index) { x.add(0, 7, bs) }, 7},
		"the same lineage elsewhere: still its own": {func(x *index) { x.add(0, 7, bs); x.add(1, 7, bs) }, 7},
		"a second lineage on the same worker shares": {
			func(x *index) { x.add(0, 7, bs); x.add(0, 8, bs) }, shared},
		"a second lineage elsewhere shares": {
			func(x *index) { x.add(0, 7, bs); x.add(1, 8, bs) }, shared},
		"shared stays shared": {
			func(x *index) { x.add(0, shared, bs); x.add(1, 7, bs) }, shared},
		"shared ends with the last holder": {
			func(x *index) { x.add(0, 7, bs); x.add(0, 8, bs); x.evict(0, bs); x.add(1, 8, bs) }, 8},
		"the only holder may rename the owner": {
			func(x *index) { x.add(0, 7, bs); x.own(0, 8, bs) }, 8},
		"the only holder may call it shared": {
			func(x *index) { x.add(0, 7, bs); x.own(0, shared, bs) }, shared},
		"one holder of two cannot rename, only share": {
			func(x *index) { x.add(0, 7, bs); x.add(1, 7, bs); x.own(0, 8, bs) }, shared},
		"renaming what is not held adds it": {
			func(x *index) { x.own(0, 8, bs) }, 8},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			x := newIndex(10)
			tc.do(x)
			if e, ok := x.get(bs[0]); !ok || e.owner != tc.want {
				t.Errorf("owner = %d %v, want %d", e.owner, ok, tc.want)
			}
		})
	}
}

// R92: a full index drops, counts, and goes on; what it holds stays right, and
// room that is freed is used again.
func TestAFullIndexDropsTheNewest(t *testing.T) {
	x := newIndex(10)
	old, young := chain(1, 8), chain(2, 8)
	x.add(0, 1, old)
	x.add(1, 2, young)
	if x.size.Load() != 10 || x.dropped.Load() != 6 {
		t.Errorf("size %d, dropped %d; want 10, 6", x.size.Load(), x.dropped.Load())
	}
	x.add(2, 1, old) // known blocks are no new entries
	if x.dropped.Load() != 6 || x.held[2].Load() != 8 {
		t.Errorf("dropped %d, held %d; want 6, 8", x.dropped.Load(), x.held[2].Load())
	}
	var all set
	all.add(1)
	if r := x.reach(make([]int32, 2), young, all, 2, true); r.lcp[1] != 2 || r.first != 0 {
		t.Errorf("of the young chain %d blocks from %d, want 2 from 0", r.lcp[1], r.first)
	}
	x.evict(0, old)
	x.evict(2, old)
	x.add(1, 2, young)
	if x.size.Load() != 8 {
		t.Errorf("size %d after room was made, want 8", x.size.Load())
	}
}

// R92: churn leaves nothing behind.
func TestChurnLeavesNothing(t *testing.T) {
	x := newIndex(1 << 20)
	const live = 10
	for i := range 1000 {
		x.add(i%4, uint64(i+1), chain(i, 100))
		if i >= live {
			x.evict((i-live)%4, chain(i-live, 100))
		}
		if n := x.size.Load(); n > (live+1)*100 {
			t.Fatalf("round %d: %d blocks indexed, at most %d are live", i, n, (live+1)*100)
		}
	}
	entries := 0
	for i := range x.shard {
		entries += len(x.shard[i].m)
	}
	if entries != live*100 || int(x.size.Load()) != entries {
		t.Errorf("%d entries, size %d, want %d", entries, x.size.Load(), live*100)
	}
}

func TestSweep(t *testing.T) {
	x, a, b := newIndex(100), chain(1, 10), chain(2, 10)
	x.add(0, 1, a)
	x.add(0, 2, b)
	x.add(1, 1, a)
	keep := map[block.Hash]struct{}{b[0]: {}, b[1]: {}}
	x.sweep(0, keep)
	if x.held[0].Load() != 2 || x.held[1].Load() != 10 || x.size.Load() != 12 {
		t.Errorf("held %d and %d of %d, want 2 and 10 of 12", x.held[0].Load(), x.held[1].Load(), x.size.Load())
	}
	x.sweep(0, nil)
	x.sweep(1, nil)
	if x.size.Load() != 0 {
		t.Errorf("%d blocks left after sweeping everyone", x.size.Load())
	}
}

func TestSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		members := rapid.SliceOfDistinct(rapid.IntRange(0, MaxWorkers-1), rapid.ID).Draw(t, "members")
		var a set
		for _, i := range members {
			a.add(i)
		}
		var got []int
		a.each(func(i int) { got = append(got, i) })
		slices.Sort(members)
		if fmt.Sprint(got) != fmt.Sprint(members) {
			t.Fatalf("members %v, want %v", got, members)
		}
		for _, i := range members {
			if !a.has(i) {
				t.Fatalf("lacks %d", i)
			}
			a.remove(i)
		}
		if !a.empty() {
			t.Fatal("not empty")
		}
	})
}
