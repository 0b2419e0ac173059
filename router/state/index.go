package state

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/kvc-dev/kvc/router/block"
)

const (
	// MaxWorkers is the number of workers that can be told apart.
	MaxWorkers = 256
	words      = MaxWorkers / 64
	shardBits  = 6
	shards     = 1 << shardBits
)

// set is a set of worker slots.
type set [words]uint64

func (a *set) add(i int)      { a[i>>6] |= 1 << (i & 63) }
func (a *set) remove(i int)   { a[i>>6] &^= 1 << (i & 63) }
func (a *set) has(i int) bool { return a[i>>6]&(1<<(i&63)) != 0 }
func (a *set) empty() bool    { return a[0]|a[1]|a[2]|a[3] == 0 }

func (a set) and(b *set) set {
	return set{a[0] & b[0], a[1] & b[1], a[2] & b[2], a[3] & b[3]}
}

func (a set) or(b *set) set {
	return set{a[0] | b[0], a[1] | b[1], a[2] | b[2], a[3] | b[3]}
}

func (a set) without(b *set) set {
	return set{a[0] &^ b[0], a[1] &^ b[1], a[2] &^ b[2], a[3] &^ b[3]}
}

// each calls f for every member.
func (a *set) each(f func(slot int)) {
	for w, x := range a {
		for x != 0 {
			f(w<<6 + bits.TrailingZeros64(x))
			x &= x - 1
		}
	}
}

// shared is the owner of blocks that more than one lineage has used.
const shared uint64 = 0

// entry is one resident block: who holds it, and whose it is.
type entry struct {
	held  set
	owner uint64
}

// index is block → entry, in shards with a lock each. Entries that nobody holds
// are removed. It never holds more than limit entries: further blocks are
// dropped and counted, so that a full index scores worse and serves the same.
type index struct {
	limit   int64
	size    atomic.Int64
	dropped atomic.Int64
	held    [MaxWorkers]atomic.Int64 // blocks per slot
	shard   [shards]struct {
		sync.RWMutex
		m map[block.Hash]entry
	}
}

func newIndex(limit int) *index {
	x := &index{limit: int64(limit)}
	for i := range x.shard {
		x.shard[i].m = make(map[block.Hash]entry)
	}
	return x
}

func shardOf(h block.Hash) int {
	return int(uint64(h) * 0x9e3779b97f4a7c15 >> (64 - shardBits))
}

func (x *index) get(h block.Hash) (entry, bool) {
	s := &x.shard[shardOf(h)]
	s.RLock()
	e, ok := s.m[h]
	s.RUnlock()
	return e, ok
}

// add records that slot holds blocks for owner. Two owners make a block shared,
// and shared it stays until nobody holds it.
func (x *index) add(slot int, owner uint64, blocks []block.Hash) {
	for _, h := range blocks {
		x.put(slot, owner, h, false)
	}
}

// own records that the blocks which slot holds now belong to owner. A block
// that slot does not hold is added.
func (x *index) own(slot int, owner uint64, blocks []block.Hash) {
	for _, h := range blocks {
		x.put(slot, owner, h, true)
	}
}

func (x *index) put(slot int, owner uint64, h block.Hash, sole bool) {
	s := &x.shard[shardOf(h)]
	s.Lock()
	defer s.Unlock()
	e, ok := s.m[h]
	if !ok {
		if x.size.Add(1) > x.limit {
			x.size.Add(-1)
			x.dropped.Add(1)
			return
		}
		e.owner = owner
	}
	had := e.held.has(slot)
	e.held.add(slot)
	if e.owner != owner {
		alone := set{}
		alone.add(slot)
		if sole && e.held == alone {
			e.owner = owner // the only holder changed its mind
		} else {
			e.owner = shared
		}
	}
	s.m[h] = e
	if !had {
		x.held[slot].Add(1)
	}
}

// evict records that slot no longer holds blocks.
func (x *index) evict(slot int, blocks []block.Hash) {
	for _, h := range blocks {
		s := &x.shard[shardOf(h)]
		s.Lock()
		if e, ok := s.m[h]; ok && e.held.has(slot) {
			x.drop(s.m, slot, h, e)
		}
		s.Unlock()
	}
}

// drop takes slot off e; the shard is locked.
func (x *index) drop(m map[block.Hash]entry, slot int, h block.Hash, e entry) {
	e.held.remove(slot)
	x.held[slot].Add(-1)
	if e.held.empty() {
		delete(m, h)
		x.size.Add(-1)
		return
	}
	m[h] = e
}

// sweep takes slot off every block that keep does not name. It holds one shard
// at a time.
func (x *index) sweep(slot int, keep map[block.Hash]struct{}) {
	if x.held[slot].Load() == 0 {
		return
	}
	for i := range x.shard {
		s := &x.shard[i]
		s.Lock()
		for h, e := range s.m {
			if !e.held.has(slot) {
				continue
			}
			if _, kept := keep[h]; !kept {
				x.drop(s.m, slot, h, e)
			}
		}
		s.Unlock()
	}
}
