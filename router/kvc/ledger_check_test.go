package kvc

import (
	"fmt"
	"slices"

	"github.com/kvc-dev/kvc/router/block"
)

// check recomputes everything the ledger keeps incrementally, from the forest
// itself. Every ledger test runs it after every operation.
func check(l *Ledger) error {
	kids, locks, prots := map[*node]int{}, map[*node]int{}, map[*node]int{}
	nodes := allNodes(l)
	for _, n := range nodes {
		kids[n.parent]++
	}
	for _, t := range l.turns {
		if t.held != nil {
			locks[t.held]++
		}
		if (t.stage == inEngine) != (t.slot == 0) {
			return fmt.Errorf("attempt %s: phase %d but place %d in the deadline heap", t.q.Attempt, t.stage, t.slot)
		}
	}
	for _, s := range l.sessions {
		if s.held != nil {
			prots[s.held]++
			if s.held != s.tip() {
				return fmt.Errorf("session %s protects something else than its tip", s.key)
			}
		}
		if s.gone || s.active < 0 {
			return fmt.Errorf("session %s: gone %v, active %d", s.key, s.gone, s.active)
		}
	}
	return checkSums(l, nodes, counts{kids, locks, prots})
}

type counts struct{ kids, locks, prots map[*node]int }

// allNodes lists the forest, children before parents, without the root.
func allNodes(l *Ledger) []*node {
	var nodes []*node
	seen := map[*node]bool{}
	add := func(n *node) {
		for ; n != l.root && !seen[n]; n = n.parent {
			seen[n] = true
			nodes = append(nodes, n)
		}
	}
	for _, n := range l.blocks {
		add(n)
	}
	for _, n := range l.leaves {
		add(n)
	}
	for _, s := range l.sessions {
		add(s.tip())
	}
	for _, t := range l.turns {
		if t.held != nil {
			add(t.held)
		}
	}
	// Deepest first; a tail before the block it hangs on.
	byDepth := make([][]*node, 0, 64)
	for _, n := range nodes {
		d := 2 * n.depth
		if n.tail {
			d++
		}
		for len(byDepth) <= d {
			byDepth = append(byDepth, nil)
		}
		byDepth[d] = append(byDepth[d], n)
	}
	var out []*node
	for _, ns := range slices.Backward(byDepth) {
		out = append(out, ns...)
	}
	return out
}

func checkSums(l *Ledger, nodes []*node, c counts) error {
	var used, locked, protected, exclusive, reserved, active int
	for _, n := range nodes {
		if err := checkNode(l, n, c); err != nil {
			return err
		}
		used += n.weight
		switch {
		case n.lock > 0:
			locked += n.weight
		case n.prot > 0:
			protected += n.weight
		}
		if (n.tail && len(n.sits) > 0) || (!n.tail && n.owner != Shared) {
			exclusive += n.weight
		}
		if n.lock > 0 {
			c.locks[n.parent]++
		}
		if n.prot > 0 {
			c.prots[n.parent]++
		}
	}
	for _, t := range l.turns {
		switch t.stage {
		case leased:
			reserved += t.tokens
		case inEngine:
			used, locked = used+t.tokens, locked+t.tokens
			active++
		}
	}
	got := [...]int{l.used, l.locked, l.protected, l.exclusive, l.reserved, l.active}
	want := [...]int{used, locked, protected, exclusive, reserved, active}
	if got != want {
		return fmt.Errorf("used, locked, protected, exclusive, reserved, active = %v, recomputed %v", got, want)
	}
	if l.used > l.cfg.CapacityTokens {
		return fmt.Errorf("Inv1: used %d > K_d %d", l.used, l.cfg.CapacityTokens)
	}
	if l.root.lock-1 != c.locks[l.root] || l.root.prot-1 != c.prots[l.root] || l.root.kids != c.kids[l.root] {
		return fmt.Errorf("root counts: lock %d prot %d kids %d", l.root.lock, l.root.prot, l.root.kids)
	}
	return nil
}

func checkNode(l *Ledger, n *node, c counts) error {
	evictable := n.kids == 0 && n.lock == 0
	switch {
	case !n.tail && l.blocks[n.hash] != n:
		return fmt.Errorf("block %x is not in the index", n.hash)
	case n.parent != l.root && l.blocks[n.parent.hash] != n.parent:
		return fmt.Errorf("the parent of %x is gone: a chain is no prefix any more", n.hash)
	case n.cum != n.parent.cum+n.weight || n.weight < 1:
		return fmt.Errorf("block %x: cum %d, weight %d, parent's cum %d", n.hash, n.cum, n.weight, n.parent.cum)
	case n.kids != c.kids[n] || n.lock != c.locks[n] || n.prot != c.prots[n]:
		return fmt.Errorf("block %x: kids %d lock %d prot %d, recomputed %d %d %d",
			n.hash, n.kids, n.lock, n.prot, c.kids[n], c.locks[n], c.prots[n])
	case evictable != (n.slot > 0) || (n.slot > 0 && l.leaves[n.slot-1] != n):
		return fmt.Errorf("block %x: evictable %v, place %d", n.hash, evictable, n.slot)
	case n.owner == Shared && n.parent.owner != Shared && !n.tail:
		return fmt.Errorf("block %x is shared but its parent belongs to %s", n.hash, n.parent.owner)
	}
	for _, s := range n.sits {
		if s.tip() != n && s.leaf != n {
			return fmt.Errorf("session %s is listed at a node it left", s.key)
		}
	}
	return nil
}

// replay applies changes to what a follower of the feed knows, and fails where
// a follower would be surprised.
type replica struct {
	blocks   map[block.Hash]SessionKey
	sessions map[SessionKey]SessionInfo
}

func newReplica() *replica {
	return &replica{map[block.Hash]SessionKey{}, map[SessionKey]SessionInfo{}}
}

func (r *replica) apply(changes []Change) error {
	for _, c := range changes {
		switch c.Kind {
		case ChangeClear:
			*r = *newReplica()
		case ChangeSession:
			r.sessions[c.Session.Key] = c.Session
		case ChangeSessionGone:
			delete(r.sessions, c.Session.Key)
		case ChangeAdd, ChangeOwn, ChangeEvict:
			for _, h := range c.Blocks {
				if _, held := r.blocks[h]; held == (c.Kind == ChangeAdd) {
					return fmt.Errorf("change %d for block %x, which the follower has: %v", c.Kind, h, held)
				}
				r.blocks[h] = c.Owner
				if c.Kind == ChangeEvict {
					delete(r.blocks, h)
				}
			}
		case ChangeTurn:
		}
	}
	return nil
}

// agrees compares the follower's picture with the ledger.
func (r *replica) agrees(l *Ledger) error {
	if len(r.blocks) != len(l.blocks) || len(r.sessions) != len(l.sessions) {
		return fmt.Errorf("follower has %d blocks, %d sessions; ledger %d, %d",
			len(r.blocks), len(r.sessions), len(l.blocks), len(l.sessions))
	}
	for h, owner := range r.blocks {
		if n := l.blocks[h]; n == nil || n.owner != owner {
			return fmt.Errorf("follower gives block %x to %s, ledger has %+v", h, owner, n)
		}
	}
	for k, s := range r.sessions {
		if got := l.sessions[k]; got == nil || got.info() != s {
			return fmt.Errorf("follower knows %+v, ledger %+v", s, got)
		}
	}
	return nil
}
