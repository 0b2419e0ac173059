package kvc

import (
	"slices"

	"github.com/kvc-dev/kvc/router/block"
)

// node is one resident block, or a tail: the tokens behind a session's last
// full block (the rest of its prompt and what was generated), which have no
// hash yet.
//
// Invariants: a node's parent is resident; lock and prot count direct holders
// plus children that are themselves locked or protected, so a locked node has
// only locked ancestors; a node is in Ledger.leaves exactly while it has no
// children and no lock.
type node struct {
	hash   block.Hash
	parent *node
	owner  SessionKey // lineage, or Shared
	weight int        // tokens
	cum    int        // tokens from the root to here, itself included
	depth  int        // blocks from the root; a tail has its parent's
	kids   int
	lock   int
	prot   int
	stamp  uint64 // last use; an inner node's counts once it is a leaf
	slot   int

	// All blocks in the order in which they came, so parents first.
	older, newer *node
	index        int // in the snapshot being made; the root's is 0

	tail bool
	// sits are the sessions whose last prompt ends here (blocks), or the one
	// that may continue here (tails; none when the tail is garbage).
	sits []*session
}

func (n *node) before(o *node) bool { return n.stamp < o.stamp }
func (n *node) place() *int         { return &n.slot }

// on reports whether the chain goes through n.
func (n *node) on(chain []block.Hash) bool {
	return n.depth <= len(chain) && (n.depth == 0 || chain[n.depth-1] == n.hash)
}

// match returns the deepest resident block of a chain; the root when there is
// none. Residency is prefix-closed and hashes are chained, so it is a binary
// search. A list that is no chain matches nothing.
func (l *Ledger) match(chain []block.Hash) *node {
	lo, hi := 0, len(chain)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if _, ok := l.blocks[chain[mid]]; ok {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return l.root
	}
	if n := l.blocks[chain[lo-1]]; n.depth == lo {
		return n
	}
	return l.root
}

// lockPath holds n and its ancestors for a running turn.
func (l *Ledger) lockPath(n *node) {
	for ; ; n = n.parent {
		n.lock++
		if n.lock > 1 {
			return
		}
		l.leaves.remove(n)
		l.locked += n.weight
		if n.prot > 0 {
			l.protected -= n.weight
		}
	}
}

func (l *Ledger) unlockPath(n *node) {
	for ; ; n = n.parent {
		n.lock--
		if n.lock > 0 {
			return
		}
		if n.kids == 0 {
			l.leaves.push(n)
		}
		l.locked -= n.weight
		if n.prot > 0 {
			l.protected += n.weight
		}
	}
}

// protectPath keeps n and its ancestors out of what admission calls
// reclaimable (Q1). Eviction does not look at it: the engine's LRU does not.
func (l *Ledger) protectPath(n *node) {
	for ; ; n = n.parent {
		n.prot++
		if n.prot > 1 {
			return
		}
		if n.lock == 0 {
			l.protected += n.weight
		}
	}
}

func (l *Ledger) unprotectPath(n *node) {
	for ; ; n = n.parent {
		n.prot--
		if n.prot > 0 {
			return
		}
		if n.lock == 0 {
			l.protected -= n.weight
		}
	}
}

// attach makes n resident below its parent.
func (l *Ledger) attach(n *node) {
	l.leaves.remove(n.parent)
	n.parent.kids++
	n.cum = n.parent.cum + n.weight
	n.depth = n.parent.depth
	l.used += n.weight
	if !n.tail {
		n.depth++
		l.blocks[n.hash] = n
		n.older, n.newer = l.root.older, l.root
		n.older.newer, n.newer.older = n, n
		if n.owner != Shared {
			l.exclusive += n.weight
		}
	}
	l.touch(n)
	l.leaves.push(n)
}

// detach removes an unlocked leaf. Sessions that sit there move up to the
// parent; one that has nothing of its own left there is gone.
func (l *Ledger) detach(n *node) {
	p := n.parent
	l.leaves.remove(n)
	for _, s := range n.sits {
		l.moveUp(s, n)
	}
	l.used -= n.weight
	if !n.tail {
		delete(l.blocks, n.hash)
		n.older.newer, n.newer.older = n.newer, n.older
		if n.owner != Shared {
			l.exclusive -= n.weight
		}
	}
	p.kids--
	p.stamp = max(p.stamp, n.stamp)
	if p.kids == 0 && p.lock == 0 {
		l.leaves.push(p)
	}
	for _, s := range n.sits {
		l.settle(s)
	}
}

// moveUp takes session s off the leaf n, which is about to go.
func (l *Ledger) moveUp(s *session, n *node) {
	l.markDirty(s)
	if s.held == n {
		l.unprotectPath(n)
		l.protectPath(n.parent)
		s.held = n.parent
	}
	if n.tail {
		l.exclusive -= n.weight
		s.tail = nil
		return
	}
	s.leaf = n.parent
	s.leaf.sits = append(s.leaf.sits, s)
}

// evict frees least recently used leaves until n more tokens fit in K_d, or
// nothing is left to evict. Leaf first, so that every chain stays a prefix.
func (l *Ledger) evict(n int) {
	for l.used+n > l.cfg.CapacityTokens && len(l.leaves) > 0 {
		leaf := l.leaves[0]
		l.evictedTokens += int64(leaf.weight)
		if !leaf.tail {
			l.evicted = append(l.evicted, leaf.hash)
		}
		l.detach(leaf)
	}
}

// room is what can be allocated now after evicting for n tokens; at most n.
func (l *Ledger) room(n int) int {
	l.evict(n)
	return max(0, min(n, l.cfg.CapacityTokens-l.used))
}

// touch makes n the most recently used. n is in no heap.
func (l *Ledger) touch(n *node) {
	l.uses++
	n.stamp = l.uses
}

// share marks the chain up to n as used by lineage: blocks of another lineage
// become Shared (Q5), root first in the change. A lineage that reaches a block
// has used all its ancestors, so the walk ends at the first block that needs
// no change.
func (l *Ledger) share(n *node, lineage SessionKey) {
	var changed []block.Hash
	for ; n != l.root && n.owner != lineage && n.owner != Shared; n = n.parent {
		n.owner = Shared
		l.exclusive -= n.weight
		changed = append(changed, n.hash)
	}
	if len(changed) > 0 {
		slices.Reverse(changed)
		l.emit(Change{Kind: ChangeOwn, Owner: Shared, Blocks: changed})
	}
}

// insert makes as much of the chain behind base resident as fits; tokens are
// what the missing blocks and half a block of unhashed rest weigh together.
// It returns the deepest resident block. base must be locked.
func (l *Ledger) insert(base *node, missing []block.Hash, owner SessionKey, tokens int) *node {
	if len(missing) == 0 {
		return base
	}
	tokens = max(tokens, len(missing)+1)
	upTo := func(k int) int { return 2 * k * tokens / (2*len(missing) + 1) }
	free := l.room(upTo(len(missing)))
	l.flushEvicted()
	var added []block.Hash
	n := base
	for i, h := range missing {
		w := upTo(i+1) - upTo(i)
		if _, dup := l.blocks[h]; dup || w > free {
			break
		}
		free -= w
		n = &node{hash: h, parent: n, owner: owner, weight: w}
		l.attach(n)
		added = append(added, h)
	}
	if len(added) > 0 {
		l.emit(Change{Kind: ChangeAdd, Owner: owner, Blocks: added})
	}
	return n
}
