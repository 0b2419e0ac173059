package state

import "github.com/kvc-dev/kvc/router/block"

// reach is how far each worker of a request holds its chain.
type reach struct {
	lcp   []int32 // by slot: leading blocks resident there
	first int     // index of the first block exclusive to the lineage (Q5)
}

// reach finds, for all workers of mask at once, the length of the chain's
// resident prefix, and where the part exclusive to owner begins. exclusive
// false leaves first at 0.
//
// Hashes are chained and workers evict leaves first, so the set of holders only
// shrinks along the chain: the places where it changes are found by doubling
// steps and then halving, a few dozen lookups for thousands of blocks. A set
// that grew all the same (a hole, a dropped block) is read as if it had not.
func (x *index) reach(lcp []int32, blocks []block.Hash, mask set, owner uint64, exclusive bool) reach {
	r := reach{lcp: lcp}
	f := finder{x: x, blocks: blocks, lcp: lcp}
	first := f.holders(0, &mask)
	f.from(0, first)
	if exclusive {
		r.first = f.firstOwned(owner)
	}
	return r
}

type finder struct {
	x      *index
	blocks []block.Hash
	lcp    []int32
	max    int

	lookups int
}

// holders is who of mask holds block i.
func (f *finder) holders(i int, mask *set) set {
	if i >= len(f.blocks) || mask.empty() {
		return set{}
	}
	f.lookups++
	e, _ := f.x.get(f.blocks[i])
	return e.held.and(mask)
}

// from walks on from block lo, held by at, in doubling steps.
func (f *finder) from(lo int, at set) {
	for step := 1; !at.empty(); step *= 2 {
		hi := min(lo+step, len(f.blocks))
		next := f.holders(hi, &at)
		f.between(lo, hi, at, next)
		lo, at = hi, next
	}
}

// between settles the workers of at that are not in end: each holds block lo
// and lacks block hi.
func (f *finder) between(lo, hi int, at, end set) {
	for at != end {
		if hi-lo == 1 {
			left := at.without(&end)
			f.max = max(f.max, hi)
			left.each(func(slot int) { f.lcp[slot] = int32(hi) })
			return
		}
		mid := lo + (hi-lo)/2
		m := f.holders(mid, &at)
		m = m.or(&end)
		f.between(mid, hi, m, end)
		hi, end = mid, m
	}
}

// firstOwned is the first block of the resident prefix that belongs to owner
// alone. Whoever used a block used its ancestors, so those blocks are a suffix.
func (f *finder) firstOwned(owner uint64) int {
	lo, hi := 0, f.max
	for lo < hi {
		mid := lo + (hi-lo)/2
		f.lookups++
		if e, ok := f.x.get(f.blocks[mid]); ok && e.owner == owner && owner != shared {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}
