package state

import (
	"context"
	"fmt"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// maxBranches is how many forks of one session are told apart.
const maxBranches = 8

// order lets one turn of a session run at a time, first come, first served
// (Q14). A turn that holds it is in at most one dispatch.
type order struct {
	busy     bool
	prompt   []block.Hash // of the turn that holds it
	waiting  []chan struct{}
	branches []kvc.SessionKey // forks of the session, oldest first
}

// Enter is Begin for a driver that can wait. Under TurnsInOrder a turn that
// continues one of the same session waits for that one's Done; the error is
// ctx's, when it ends first. Under ForksAreChildren a turn that leaves the
// running one's prompt (a sub-agent, a parallel tool call) does not wait: it is
// a child session of the same lineage, and so are the turns that continue it.
func (s *State) Enter(
	ctx context.Context, r kvc.Request, blocks []block.Hash, path kvc.DirectPath,
) (*Turn, error) {
	if r.Session == "" {
		return s.Begin(r, blocks, path), nil
	}
	ss, ready := s.claim(&r, blocks)
	if ss == nil {
		return s.Begin(r, blocks, path), nil
	}
	if ready != nil {
		select {
		case <-ready:
		case <-ctx.Done():
			s.abandon(ss, ready)
			return nil, fmt.Errorf("wait for the session's turn before: %w", ctx.Err())
		}
	}
	s.mu.Lock()
	ss.order.prompt = blocks
	s.mu.Unlock()
	t := s.Begin(r, blocks, path)
	t.ordered = ss
	return t, nil
}

// claim settles which session the request is of and takes its turn; a turn that
// has to wait gets a channel. nil, nil: turns are not ordered.
func (s *State) claim(r *kvc.Request, blocks []block.Hash) (*session, chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	if s.params.Forks == kvc.ForksAreChildren {
		s.branch(r, blocks, now)
	}
	if s.params.Turns != kvc.TurnsInOrder {
		return nil, nil
	}
	ss := s.sessions.touch(r.Session, r.Lineage, now)
	if !ss.order.busy {
		ss.order.busy, ss.order.prompt = true, blocks
		return ss, nil
	}
	ready := make(chan struct{})
	ss.order.waiting = append(ss.order.waiting, ready)
	return ss, ready
}

// branch renames the request to the fork that it continues or starts.
func (s *State) branch(r *kvc.Request, blocks []block.Hash, now int64) {
	ss := s.sessions.get(r.Session, now)
	if ss == nil || len(blocks) == 0 || ss.continuedBy(blocks) {
		return
	}
	for _, key := range ss.order.branches {
		c := s.sessions.get(key, now)
		if c != nil && (c.tail != 0 || c.order.busy) && c.continuedBy(blocks) {
			r.Session, r.Lineage = key, c.lineage
			return
		}
	}
	if !ss.order.busy {
		return // one after the other: the conversation was reset, it is the same session
	}
	lineage := ss.lineage
	if lineage == "" {
		lineage = ss.key
	}
	key := branchKey(r.Session, blocks[len(blocks)-1])
	if n := len(ss.order.branches); n >= maxBranches {
		ss.order.branches = slices.Delete(ss.order.branches, 0, n-maxBranches+1)
	}
	ss.order.branches = append(ss.order.branches, key)
	r.Session, r.Lineage = key, lineage
}

// continuedBy reports whether a prompt goes on where the session's running turn
// stands, or its last one did.
func (s *session) continuedBy(blocks []block.Hash) bool {
	if s.order.busy {
		return block.CommonPrefix(s.order.prompt, blocks) == len(s.order.prompt)
	}
	return s.tail == 0 || slices.Contains(blocks, s.tail)
}

// branchKey is the key of a fork that starts with a prompt ending in h.
func branchKey(s kvc.SessionKey, h block.Hash) kvc.SessionKey {
	return kvc.SessionKey(fmt.Sprintf("%016x", xxh3.HashString("kvc-fork-v1\x00"+string(s)+"\x00"+h.String())))
}

// leave hands the session to the next turn that waits; State.mu is held.
func (o *order) leave() {
	o.prompt = nil
	if len(o.waiting) == 0 {
		o.busy = false
		return
	}
	next := o.waiting[0]
	o.waiting = o.waiting[1:]
	close(next)
}

// abandon gives up a turn's place, or passes on what it was just given.
func (s *State) abandon(ss *session, ready chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(ss.order.waiting, ready); i >= 0 {
		ss.order.waiting = slices.Delete(ss.order.waiting, i, i+1)
		return
	}
	ss.order.leave()
}
