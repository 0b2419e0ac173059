package radix

import (
	"crypto/sha256"
	"encoding/binary"
)

// PageHash names a page together with everything before it.
type PageHash [sha256.Size]byte

// Wire returns the hash as SGLang's KV events carry it: the first eight bytes,
// big-endian, as a signed integer (contract §5).
func (h PageHash) Wire() int64 { return int64(binary.BigEndian.Uint64(h[:8])) }

// Hasher names a page. parent is nil for the first page.
type Hasher func(parent *PageHash, page []int32) PageHash

// Chain is SGLang's page hash: SHA-256 over the parent's 32 bytes (absent at the
// root) and the token ids as little-endian 32-bit integers (contract §5).
func Chain(parent *PageHash, page []int32) PageHash {
	b := make([]byte, 0, len(PageHash{})+4*len(page))
	if parent != nil {
		b = append(b, parent[:]...)
	}
	for _, id := range page {
		b = binary.LittleEndian.AppendUint32(b, uint32(id))
	}
	return sha256.Sum256(b)
}

// Kind says what an event reports.
type Kind uint8

// The kinds of event.
const (
	Stored  Kind = iota // pages entered the tree
	Removed             // pages were evicted
	Cleared             // everything was dropped
)

// Event is one change of what is resident, in the terms of contract §5. Stored
// pages are consecutive and chained; Parent is nil at the root.
type Event struct {
	Kind   Kind
	Hashes []PageHash
	Parent *PageHash
	IDs    []int32 // Stored: the tokens of all pages
}

// Events returns the changes since the last call, oldest first.
func (c *Cache) Events() []Event {
	e := c.events
	c.events = nil
	return e
}

func (c *Cache) record(e Event) {
	if c.cfg.Hash != nil {
		c.events = append(c.events, e)
	}
}

func (c *Cache) stored(n *node) {
	if c.cfg.Hash == nil {
		return
	}
	var parent *PageHash
	if up := n.parent; up != c.root {
		parent = &up.hashes[len(up.hashes)-1]
	}
	e := Event{Kind: Stored, Parent: parent, IDs: n.key}
	for i := 0; i < len(n.key); i += c.cfg.PageSize {
		n.hashes = append(n.hashes, c.cfg.Hash(parent, n.key[i:i+c.cfg.PageSize]))
		parent = &n.hashes[len(n.hashes)-1]
	}
	e.Hashes = n.hashes
	c.record(e)
}

func (c *Cache) removed(n *node) {
	if c.cfg.Hash != nil {
		c.record(Event{Kind: Removed, Hashes: n.hashes})
	}
}
