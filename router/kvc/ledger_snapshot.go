package kvc

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvc-dev/kvc/router/block"
)

// OwnedBlocks is one owner's resident blocks, in chain order per chain.
type OwnedBlocks struct {
	Owner  SessionKey
	Blocks []block.Hash
}

// Snapshot is the ledger's whole durable state: the feed's snapshot and the
// journal are both made of it.
type Snapshot struct {
	Sessions []SessionInfo
	Blocks   []OwnedBlocks
	// State holds the shape of the forest, token counts, order of use and what
	// was learnt: needed by Restore, opaque to others, no text and no ids.
	State []byte
}

const (
	stateVersion = 1
	maxWeight    = 1 << 30 // tokens of one node; more is a damaged journal
)

var errState = errors.New("restore: the ledger's state is damaged; start with an empty ledger and a new epoch")

// Snapshot copies the durable state: sessions in key order, blocks in the order
// in which they came. Running turns and leases are not durable.
func (l *Ledger) Snapshot() Snapshot {
	l.flush()
	s := Snapshot{Sessions: l.Sessions("", 0)}
	b := append(make([]byte, 0, 64+8*len(l.blocks)+64*len(s.Sessions)), stateVersion)
	b = appendFloat(b, l.seenBlocks)
	b = appendFloat(b, l.seenTokens)
	hashes := make([]block.Hash, 0, len(l.blocks)) // one array for all runs
	from := 0
	for n := l.root.newer; n != l.root; n = n.newer {
		if older := n.older; older != l.root && older.owner != n.owner {
			s.Blocks = append(s.Blocks, OwnedBlocks{older.owner, slices.Clip(hashes[from:])})
			from = len(hashes)
		}
		hashes = append(hashes, n.hash)
		n.index = len(hashes)
		b = binary.AppendUvarint(b, uint64(n.index-1-n.parent.index)) // 0: the block before
		b = binary.AppendUvarint(b, uint64(n.weight))
		b = binary.AppendUvarint(b, n.stamp)
	}
	if from < len(hashes) {
		s.Blocks = append(s.Blocks, OwnedBlocks{l.root.older.owner, hashes[from:]})
	}
	for _, info := range s.Sessions {
		b = l.sessions[info.Key].appendState(b)
	}
	for _, n := range l.garbage() {
		b = appendTail(b, n)
	}
	s.State = b
	return s
}

// appendState writes what SessionInfo does not say.
func (s *session) appendState(b []byte) []byte {
	tail := s.tail
	if tail == nil {
		tail = &node{parent: s.leaf}
	}
	b = appendTail(b, tail)
	protected := uint64(0)
	if s.held != nil {
		protected = 1
	}
	b = binary.AppendUvarint(b, protected)
	b = appendFloat(b, s.perBlock)
	b = appendFloat(b, s.confirmed)
	b = binary.AppendUvarint(b, uint64(s.outputs.n))
	for _, tokens := range s.outputs.ring[:min(s.outputs.n, len(s.outputs.ring))] {
		b = binary.AppendUvarint(b, uint64(tokens))
	}
	return b
}

func appendTail(b []byte, n *node) []byte {
	b = binary.AppendUvarint(b, uint64(n.parent.index))
	b = binary.AppendUvarint(b, uint64(n.weight))
	return binary.AppendUvarint(b, n.stamp)
}

// garbage is the tails that no session names any more, by last use.
func (l *Ledger) garbage() (ns []*node) {
	for _, n := range l.leaves {
		if n.tail && len(n.sits) == 0 {
			ns = append(ns, n)
		}
	}
	slices.SortFunc(ns, func(a, b *node) int { return cmp.Compare(a.stamp, b.stamp) })
	return ns
}

func appendFloat(b []byte, f float64) []byte {
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(f))
}

// Restore replaces the durable state; leases and running turns are dropped. It
// makes no changes: followers need a snapshot. After an error the ledger is
// empty. What does not fit into K_d is evicted as usual.
func (l *Ledger) Restore(s Snapshot) error {
	l.reset()
	err := l.restore(&s)
	if err != nil {
		l.reset()
	}
	l.changes = nil
	return err
}

func (l *Ledger) restore(s *Snapshot) error {
	r := &stateReader{b: s.State}
	if v := r.byte(); v != stateVersion {
		return fmt.Errorf("restore: state version %d, want %d", v, stateVersion)
	}
	l.seenBlocks, l.seenTokens = r.amount(), r.amount()
	nodes := []*node{l.root}
	for _, o := range s.Blocks {
		for _, h := range o.Blocks {
			n := l.restoreBlock(r, nodes, h, o.Owner)
			if n == nil {
				return errState
			}
			nodes = append(nodes, n)
		}
	}
	for i := range s.Sessions {
		if !l.restoreSession(r, &s.Sessions[i], nodes) {
			return errState
		}
	}
	for !r.bad && len(r.b) > 0 {
		if _, tail := l.restoreTail(r, nodes, Shared); tail == nil {
			return errState
		}
	}
	if r.bad {
		return errState
	}
	for _, sess := range l.sorted("") {
		l.settle(sess)
	}
	l.evict(0)
	l.flush()
	return nil
}

// restoreNode attaches n without losing its place in the order of use.
func (l *Ledger) restoreNode(n *node) {
	stamp := n.stamp
	l.uses = max(l.uses, stamp)
	l.attach(n)
	l.leaves.remove(n)
	n.stamp = stamp
	l.leaves.push(n)
}

// restoreBlock returns nil for a block that cannot have been.
func (l *Ledger) restoreBlock(r *stateReader, nodes []*node, h block.Hash, owner SessionKey) *node {
	back, weight, stamp := r.uvarint(), r.uvarint(), r.uvarint()
	last := uint64(len(nodes) - 1)
	if r.bad || back > last || weight < 1 || weight > maxWeight {
		return nil
	}
	parent := nodes[last-back]
	if _, dup := l.blocks[h]; dup || owner == "" || (owner == Shared && parent.owner != Shared) {
		return nil
	}
	n := &node{hash: h, parent: parent, owner: owner, weight: int(weight), stamp: stamp}
	l.restoreNode(n)
	return n
}

// restoreTail returns a tail, nil when it is empty, and the node it hangs on;
// no node for one that cannot have been.
func (l *Ledger) restoreTail(r *stateReader, nodes []*node, owner SessionKey) (leaf, tail *node) {
	at, weight, stamp := r.uvarint(), r.uvarint(), r.uvarint()
	if r.bad || at >= uint64(len(nodes)) || weight > maxWeight {
		return nil, nil
	}
	if weight > 0 {
		tail = &node{parent: nodes[at], owner: owner, weight: int(weight), stamp: stamp, tail: true}
		l.restoreNode(tail)
	}
	return nodes[at], tail
}

// restoreSession returns false for a session that cannot have been.
func (l *Ledger) restoreSession(r *stateReader, info *SessionInfo, nodes []*node) bool {
	leaf, tail := l.restoreTail(r, nodes, info.Lineage)
	protected := r.uvarint()
	s := &session{
		key: info.Key, lineage: info.Lineage, last: info.Tail, lastUse: info.LastUse,
		perBlock: r.amount(), confirmed: r.amount(), leaf: l.root, outputs: r.outputs(),
	}
	if r.bad || leaf == nil || s.confirmed > 1 || s.key == "" || l.sessions[s.key] != nil {
		return false
	}
	l.sessions[s.key] = s
	l.place(s, leaf, tail)
	if protected == 1 {
		l.restoreGuard(s, info)
	}
	return true
}

// restoreGuard renews a protection under the params of today.
func (l *Ledger) restoreGuard(s *session, info *SessionInfo) {
	l.guard(s, info.LastUse)
	if s.slot > 0 && !info.ProtectedUntil.IsZero() {
		l.guarded.remove(s)
		s.until = info.ProtectedUntil
		l.guarded.push(s)
	}
}

// stateReader reads State; after a short read it is bad and returns zeros.
type stateReader struct {
	b   []byte
	bad bool
}

func (r *stateReader) byte() byte {
	if len(r.b) == 0 {
		r.bad = true
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *stateReader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

// amount reads a float that counts something: not negative, not NaN, not huge.
func (r *stateReader) amount() float64 {
	if len(r.b) < 8 {
		r.bad = true
		return 0
	}
	v := math.Float64frombits(binary.LittleEndian.Uint64(r.b))
	r.b = r.b[8:]
	if !(v >= 0 && v <= maxWeight) {
		r.bad = true
		return 0
	}
	return v
}

func (r *stateReader) outputs() (o outputs) {
	o.n = int(min(r.uvarint(), maxWeight))
	for i := range min(o.n, len(o.ring)) {
		o.ring[i] = int(min(r.uvarint(), maxWeight))
	}
	return o
}
