package radix

// Config describes one cache.
type Config struct {
	// Capacity is the size of the pool in tokens, rounded down to whole pages.
	Capacity int
	// PageSize is the allocation unit in tokens; below 1 means 1.
	PageSize int
	// Disabled keeps nothing beyond the turn that computed it (SGLang's chunk
	// cache, contract §1.2): every Begin matches nothing.
	Disabled bool
	// Hash, when set, names pages and turns the recording of events on.
	Hash Hasher
}

// Cache is one worker's KV pool. Every token of the pool is in exactly one of
// three places: free, in the tree, or private to a turn that is computing it.
type Cache struct {
	cfg  Config
	root *node
	tick uint64 // recency: raised once per walk, so no two leaves share a value

	tree    int // tokens held by nodes
	locked  int // of those, tokens in nodes that some turn holds
	private int // tokens allocated to turns, outside the tree
	turns   int // turns begun and not ended

	evicted int64
	events  []Event
}

// New returns an empty cache.
func New(cfg Config) *Cache {
	cfg.PageSize = max(cfg.PageSize, 1)
	cfg.Capacity = max(cfg.Capacity/cfg.PageSize*cfg.PageSize, 0)
	return &Cache{cfg: cfg, root: &node{}}
}

// Capacity returns the pool's size in tokens.
func (c *Cache) Capacity() int { return c.cfg.Capacity }

// PageSize returns the allocation unit in tokens.
func (c *Cache) PageSize() int { return c.cfg.PageSize }

// Used returns the tokens that are not free: cached or being computed.
// It never exceeds Capacity.
func (c *Cache) Used() int { return c.tree + c.private }

// Cached returns the tokens in the tree.
func (c *Cache) Cached() int { return c.tree }

// Evictable returns the tokens that eviction could free now.
func (c *Cache) Evictable() int { return c.tree - c.locked }

// Held returns the tokens in use by turns: locked prefixes plus what they are
// computing. It is the engine's "used" (capacity − available − evictable).
func (c *Cache) Held() int { return c.locked + c.private }

// Free returns the tokens that can be allocated without eviction.
func (c *Cache) Free() int { return c.cfg.Capacity - c.Used() }

// Turns returns the number of turns begun and not yet ended.
func (c *Cache) Turns() int { return c.turns }

// Evicted returns the tokens evicted since the start (Flush does not count).
func (c *Cache) Evicted() int64 { return c.evicted }

// Peek returns the length of the longest cached prefix of ids, in tokens,
// without touching recency or splitting nodes.
func (c *Cache) Peek(ids []int32) int {
	n, depth := c.root, 0
	for {
		child := c.child(n, ids[depth:])
		if child == nil {
			return depth
		}
		same := c.common(child.key, ids[depth:])
		depth += same
		if same < len(child.key) {
			return depth
		}
		n = child
	}
}

// Turn is one request's hold on the cache: a locked prefix in the tree and
// private pages for what it is computing. It must be ended exactly once; after
// that every method is a no-op.
type Turn struct {
	c       *Cache
	at      *node // deepest node held
	depth   int   // tokens from the root to at
	private int   // tokens allocated outside the tree, whole pages
	over    bool
}

// Begin locks the longest cached prefix of ids, so that it cannot be evicted
// before End, and marks it as used now.
func (c *Cache) Begin(ids []int32) *Turn {
	t := &Turn{c: c, at: c.root}
	c.turns++
	if !c.cfg.Disabled {
		t.at, t.depth = c.walk(ids)
	}
	c.lock(t.at)
	return t
}

// Cached returns how many tokens of the turn are in the tree: at first the
// matched prefix, after Commit all that was committed in whole pages.
func (t *Turn) Cached() int { return t.depth }

// Size returns the tokens the turn holds: locked prefix plus private pages.
func (t *Turn) Size() int { return t.depth + t.private }

// Extend makes room for the turn to hold total tokens in all, evicting others'
// unlocked leaves where needed. ok is false, and nothing has changed but what
// was evicted, when the room cannot be found.
func (t *Turn) Extend(total int) (ok bool) {
	if t.over {
		return false
	}
	need := t.c.pages(total) - t.Size()
	if need <= 0 {
		return true
	}
	if short := need - t.c.Free(); short > 0 {
		if short > t.c.Evictable() {
			return false
		}
		t.c.evict(short)
	}
	t.private += need
	t.c.private += need
	return true
}

// Commit puts the whole pages of ids into the tree and holds them. ids are all
// tokens of the turn whose KV is computed, from the first one; they must extend
// what the turn holds already. Pages that another turn committed meanwhile are
// shared, and this turn's copies freed. ok is false when there is no room.
func (t *Turn) Commit(ids []int32) (ok bool) {
	if !t.Extend(len(ids)) {
		return false
	}
	aligned := len(ids) / t.c.cfg.PageSize * t.c.cfg.PageSize
	if t.c.cfg.Disabled || aligned <= t.depth {
		return true
	}
	// The private pages leave first, so that the sum never exceeds the capacity
	// while both copies are counted.
	moved := aligned - t.depth
	t.private -= moved
	t.c.private -= moved

	at := t.c.insert(ids[:aligned])
	t.c.lock(at)
	t.c.unlock(t.at)
	t.at, t.depth = at, aligned
	return true
}

// End frees the private pages and unlocks the prefix, which stays cached until
// it is evicted.
func (t *Turn) End() {
	if t.over {
		return
	}
	t.over = true
	t.c.turns--
	t.c.private -= t.private
	t.private = 0
	t.c.unlock(t.at)
}

// Flush empties the cache. It refuses, and returns false, while a turn runs.
func (c *Cache) Flush() bool {
	if c.turns > 0 {
		return false
	}
	c.root, c.tree, c.locked = &node{}, 0, 0
	c.record(Event{Kind: Cleared})
	return true
}

// pages rounds tokens up to whole pages.
func (c *Cache) pages(tokens int) int {
	p := c.cfg.PageSize
	return (tokens + p - 1) / p * p
}
