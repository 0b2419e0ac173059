package radix

import "container/heap"

// node is one edge of the compressed tree. Its key is a whole number of pages
// and is never empty except at the root.
type node struct {
	key      []int32
	hashes   []PageHash // one per page of key, when events are recorded
	parent   *node
	children map[uint64]*node // by hash of the first page
	next     *node            // another child whose first page has the same hash
	locks    int              // turns that hold this node or one below it
	used     uint64           // tick of the last walk through it
}

// first hashes the first page of ids; equal pages have equal hashes, the
// converse is checked by comparison.
func (c *Cache) first(ids []int32) uint64 {
	h := uint64(0xcbf29ce484222325)
	for _, id := range ids[:c.cfg.PageSize] {
		h = (h ^ uint64(uint32(id))) * 0x9e3779b97f4a7c15
		h ^= h >> 29
	}
	return h
}

// common returns how many leading tokens a and b share, in whole pages.
func (c *Cache) common(a, b []int32) int {
	n := min(len(a), len(b))
	a, b = a[:n], b[:n]
	i := 0
	for i < n && a[i] == b[i] {
		i++
	}
	return i / c.cfg.PageSize * c.cfg.PageSize
}

// child returns n's child that shares at least the first page of ids.
func (c *Cache) child(n *node, ids []int32) *node {
	if len(ids) < c.cfg.PageSize {
		return nil
	}
	for k := n.children[c.first(ids)]; k != nil; k = k.next {
		if c.common(k.key[:c.cfg.PageSize], ids) > 0 {
			return k
		}
	}
	return nil
}

// walk follows ids from the root as far as they are cached, splitting the last
// node where they part, and marks the path as used now.
func (c *Cache) walk(ids []int32) (n *node, depth int) {
	c.tick++
	n = c.root
	for {
		k := c.child(n, ids[depth:])
		if k == nil {
			return n, depth
		}
		same := c.common(k.key, ids[depth:])
		if same < len(k.key) {
			k = c.split(k, same)
		}
		k.used = c.tick
		depth += same
		n = k
	}
}

// split cuts n after its first at tokens and returns the new upper node. n
// keeps its identity below, so turns that hold it hold the same tokens.
func (c *Cache) split(n *node, at int) *node {
	up := &node{key: n.key[:at:at], parent: n.parent, locks: n.locks, used: n.used}
	c.unlink(n)
	n.key = n.key[at:]
	if n.hashes != nil {
		pages := at / c.cfg.PageSize
		up.hashes, n.hashes = n.hashes[:pages:pages], n.hashes[pages:]
	}
	c.link(up.parent, up)
	c.link(up, n)
	return up
}

// insert returns the node that ends ids, which are whole pages, adding what is
// missing.
func (c *Cache) insert(ids []int32) *node {
	n, depth := c.walk(ids)
	if depth == len(ids) {
		return n
	}
	leaf := &node{key: append([]int32(nil), ids[depth:]...), used: c.tick}
	c.link(n, leaf)
	c.tree += len(leaf.key)
	c.stored(leaf)
	return leaf
}

func (c *Cache) link(parent, k *node) {
	k.parent = parent
	h := c.first(k.key)
	if parent.children == nil {
		parent.children = make(map[uint64]*node, 1)
	}
	k.next = parent.children[h]
	parent.children[h] = k
}

func (c *Cache) unlink(k *node) {
	h := c.first(k.key)
	head := k.parent.children[h]
	switch {
	case head == k && k.next == nil:
		delete(k.parent.children, h)
	case head == k:
		k.parent.children[h] = k.next
	default:
		for head.next != k {
			head = head.next
		}
		head.next = k.next
	}
	k.next = nil
}

func (c *Cache) lock(n *node) {
	for ; n != c.root; n = n.parent {
		if n.locks == 0 {
			c.locked += len(n.key)
		}
		n.locks++
	}
}

func (c *Cache) unlock(n *node) {
	for ; n != c.root; n = n.parent {
		n.locks--
		if n.locks == 0 {
			c.locked -= len(n.key)
		}
	}
}

// evict frees at least want tokens, whole leaves at a time, the least recently
// used first. The caller has checked that so many are evictable.
func (c *Cache) evict(want int) {
	h := leaves(c.idleLeaves(c.root, nil))
	heap.Init(&h)
	for want > 0 && len(h) > 0 {
		n := heap.Pop(&h).(*node)
		want -= len(n.key)
		parent := n.parent
		c.remove(n)
		if parent != c.root && parent.locks == 0 && len(parent.children) == 0 {
			heap.Push(&h, parent)
		}
	}
}

func (c *Cache) remove(n *node) {
	c.unlink(n)
	c.tree -= len(n.key)
	c.evicted += int64(len(n.key))
	c.removed(n)
}

// idleLeaves collects the leaves that no turn holds.
func (c *Cache) idleLeaves(n *node, to []*node) []*node {
	for _, k := range n.children {
		for ; k != nil; k = k.next {
			switch {
			case len(k.children) > 0:
				to = c.idleLeaves(k, to)
			case k.locks == 0:
				to = append(to, k)
			}
		}
	}
	return to
}

// leaves is a heap by recency. Ticks are unique among leaves (a walk touches
// one path, and two leaves are never on one path), so the order is total and
// does not depend on the order of map iteration.
type leaves []*node

func (l leaves) Len() int           { return len(l) }
func (l leaves) Less(i, j int) bool { return l[i].used < l[j].used }
func (l leaves) Swap(i, j int)      { l[i], l[j] = l[j], l[i] }
func (l *leaves) Push(x any)        { *l = append(*l, x.(*node)) }
func (l *leaves) Pop() any {
	old := *l
	n := old[len(old)-1]
	*l = old[:len(old)-1]
	return n
}
