package radix

import (
	"errors"
	"fmt"
)

// Check verifies every invariant of the cache and describes the first one that
// is broken. It walks the whole tree: for tests.
func (c *Cache) Check() error {
	if c.Used() > c.cfg.Capacity || c.private < 0 || c.tree < 0 {
		return fmt.Errorf("used %d (tree %d, private %d) is outside 0..%d", c.Used(), c.tree, c.private, c.cfg.Capacity)
	}
	var sum tally
	if err := c.checkNode(c.root, &sum); err != nil {
		return err
	}
	if sum.tokens != c.tree || sum.locked != c.locked {
		return fmt.Errorf("tree holds %d tokens, %d locked; the counters say %d and %d",
			sum.tokens, sum.locked, c.tree, c.locked)
	}
	if c.turns == 0 && c.Held() != 0 {
		return fmt.Errorf("no turn runs, yet %d tokens are held", c.Held())
	}
	return nil
}

type tally struct{ tokens, locked int }

func (c *Cache) checkNode(n *node, sum *tally) error {
	for h, k := range n.children {
		for ; k != nil; k = k.next {
			if err := c.checkEdge(n, k, h); err != nil {
				return err
			}
			sum.tokens += len(k.key)
			if k.locks > 0 {
				sum.locked += len(k.key)
			}
			if err := c.checkNode(k, sum); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *Cache) checkEdge(n, k *node, h uint64) error {
	switch {
	case k.parent != n:
		return fmt.Errorf("a node of %d tokens names another parent", len(k.key))
	case len(k.key) == 0 || len(k.key)%c.cfg.PageSize != 0:
		return fmt.Errorf("a node holds %d tokens, not whole pages of %d", len(k.key), c.cfg.PageSize)
	case c.first(k.key) != h:
		return errors.New("a node is filed under another page's hash")
	}
	if err := c.checkHeld(n, k); err != nil {
		return err
	}
	for s := k.next; s != nil; s = s.next {
		if c.common(s.key, k.key) > 0 {
			return errors.New("two siblings share a first page")
		}
	}
	return nil
}

// checkHeld verifies what each node must share with its parent n.
func (c *Cache) checkHeld(n, k *node) error {
	switch {
	case k.locks < 0 || n != c.root && n.locks < k.locks:
		return fmt.Errorf("locks are not counted along the path: parent %d, child %d", n.locks, k.locks)
	case k.used > c.tick || n != c.root && n.used < k.used:
		return fmt.Errorf("recency does not grow towards the root: parent %d, child %d", n.used, k.used)
	case c.cfg.Hash != nil && len(k.hashes)*c.cfg.PageSize != len(k.key):
		return fmt.Errorf("a node of %d tokens has %d page hashes", len(k.key), len(k.hashes))
	}
	return nil
}
