package state

import (
	"maps"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// maxSpans bounds the optimistic additions that wait for their worker's word.
const maxSpans = 4096

// spanKey is one session on one slot.
type spanKey struct {
	slot int
	key  kvc.SessionKey
}

// span is the blocks that a finished turn is believed to have left on a worker
// (Q9), from index from of its chain, until the worker reports the session.
type span struct {
	from   int
	blocks []block.Hash
}

// spans are the open spans.
type spans map[spanKey]span

func (q spans) push(k spanKey, s span) {
	if _, ok := q[k]; !ok && len(q) >= maxSpans {
		for old := range q { // any one: it will only stay unchecked
			delete(q, old)
			break
		}
	}
	q[k] = s
}

// confirm closes the span that info speaks of and returns the blocks that the
// worker does not hold after all.
func (q spans) confirm(slot int, info kvc.SessionInfo) (wrong []block.Hash) {
	k := spanKey{slot, info.Key}
	s, ok := q[k]
	if !ok || !s.closedBy(info.Tail, info.Active) {
		return nil
	}
	delete(q, k)
	return s.beyond(info.Blocks)
}

// closedBy reports whether a report of the session speaks of the span's prompt:
// no turn runs, and the last one ended with the same block.
func (s span) closedBy(tail block.Hash, active int) bool {
	return active == 0 && s.blocks[len(s.blocks)-1] == tail
}

// beyond is the blocks of the span that are not among the first resident of the
// prompt.
func (s span) beyond(resident int) []block.Hash {
	return s.blocks[min(max(resident-s.from, 0), len(s.blocks)):]
}

// forget drops the spans of a slot: a snapshot replaced them.
func (q spans) forget(slot int) {
	maps.DeleteFunc(q, func(k spanKey, _ span) bool { return k.slot == slot })
}
