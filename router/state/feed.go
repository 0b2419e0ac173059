package state

import (
	"slices"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// The methods of this file apply a worker's feed (wire.md §4). Each discards
// updates for a worker that is not in the worker set and returns false (R103).

// lookup resolves a worker; the caller holds s.feeds for reading while it
// changes the slot's blocks.
func (s *State) lookup(w kvc.WorkerID) (i int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok = s.slotOf[w]
	return i, ok
}

// SetTrusted says whether w's feed can be believed. An untrusted worker has no
// overlap and stays routable.
func (s *State) SetTrusted(w kvc.WorkerID, yes bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.slotOf[w]
	if !ok {
		return false
	}
	s.slots[i].trusted = yes
	if yes {
		s.known.add(i)
	} else {
		s.known.remove(i)
	}
	return true
}

// SetLoad records w's heartbeat.
func (s *State) SetLoad(w kvc.WorkerID, l Load) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.slotOf[w]
	if !ok {
		return false
	}
	if l.Capacity == 0 {
		l.Capacity = s.slots[i].load.Capacity
	}
	s.slots[i].load = l
	if l.TokensPerBlock > 0 {
		s.ratio = l.TokensPerBlock
	}
	return true
}

// Reset replaces everything believed of w by a snapshot. What the snapshot
// confirms stays visible throughout.
func (s *State) Reset(w kvc.WorkerID, sessions []kvc.SessionInfo, owned []kvc.OwnedBlocks) bool {
	s.feeds.RLock()
	defer s.feeds.RUnlock()
	i, ok := s.lookup(w)
	if !ok {
		return false
	}
	n := 0
	for _, o := range owned {
		n += len(o.Blocks)
	}
	keep := make(map[block.Hash]struct{}, n)
	for _, o := range owned {
		for _, h := range o.Blocks {
			keep[h] = struct{}{}
		}
	}
	s.index.sweep(i, keep)
	for _, o := range owned {
		s.index.own(i, ownerID(o.Owner), o.Blocks)
	}
	s.resetSessions(w, sessions)
	return true
}

func (s *State) resetSessions(w kvc.WorkerID, sessions []kvc.SessionInfo) {
	infos := slices.Clone(sessions)
	slices.SortStableFunc(infos, func(a, b kvc.SessionInfo) int { return a.LastUse.Compare(b.LastUse) })
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.slotOf[w]
	if !ok {
		return
	}
	s.forgetHomes(i)
	for _, info := range infos {
		s.setHome(i, info)
	}
}

// forgetHomes takes slot i off every session: its generation of reports is
// replaced, so that no session has to be looked at.
func (s *State) forgetHomes(i int) {
	s.slots[i].report++
	s.slots[i].sessions = 0
	s.spans.forget(i)
}

// Add records blocks that w now holds for owner, root first.
func (s *State) Add(w kvc.WorkerID, owner kvc.SessionKey, blocks []block.Hash) bool {
	return s.onBlocks(w, func(slot int) { s.index.add(slot, ownerID(owner), blocks) })
}

// Evict records blocks that w no longer holds.
func (s *State) Evict(w kvc.WorkerID, blocks []block.Hash) bool {
	return s.onBlocks(w, func(slot int) { s.index.evict(slot, blocks) })
}

// Own records that blocks which w holds now belong to owner.
func (s *State) Own(w kvc.WorkerID, owner kvc.SessionKey, blocks []block.Hash) bool {
	return s.onBlocks(w, func(slot int) { s.index.own(slot, ownerID(owner), blocks) })
}

// Clear records that w's cache was flushed.
func (s *State) Clear(w kvc.WorkerID) bool {
	return s.Reset(w, nil, nil)
}

func (s *State) onBlocks(w kvc.WorkerID, change func(slot int)) bool {
	s.feeds.RLock()
	defer s.feeds.RUnlock()
	i, ok := s.lookup(w)
	if ok {
		change(i)
	}
	return ok
}

// Session records what w reports of one session. A session that its home no
// longer holds has lost its home (Q12).
func (s *State) Session(w kvc.WorkerID, info kvc.SessionInfo) bool {
	s.feeds.RLock()
	defer s.feeds.RUnlock()
	s.mu.Lock()
	i, ok := s.slotOf[w]
	var wrong []block.Hash
	if ok {
		wrong = s.spans.confirm(i, info)
		s.setHome(i, info)
	}
	s.mu.Unlock()
	if ok && len(wrong) > 0 {
		s.index.evict(i, wrong)
	}
	return ok
}

func (s *State) setHome(i int, info kvc.SessionInfo) {
	now := s.now()
	used := min(info.LastUse.UnixNano(), now)
	if now-used > s.sessions.ttl && info.Active == 0 {
		return
	}
	ss := s.sessions.touch(info.Key, info.Lineage, used)
	sl := &s.slots[i]
	if !s.isHome(ss, i) {
		sl.sessions++
	}
	ss.setHome(home{
		ref: ref{int16(i), sl.gen}, report: sl.report,
		blocks: int32(info.Blocks), tokens: int32(info.ResidentTokens), used: used,
		tail: info.Tail, active: int32(info.Active),
	})
	if used >= ss.tailUsed {
		s.sessions.setTail(ss, info.Tail)
		ss.tailUsed = used
	}
}

// SessionGone records that w no longer holds a session.
func (s *State) SessionGone(w kvc.WorkerID, key kvc.SessionKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.slotOf[w]
	if !ok {
		return false
	}
	ss := s.sessions.get(key, s.now())
	if ss == nil {
		return true
	}
	if s.isHome(ss, i) {
		s.slots[i].sessions--
	}
	ss.dropHome(int16(i))
	if ss.turns == 0 && ss.pinned && ss.pin == (ref{int16(i), s.slots[i].gen}) {
		ss.lost = true
	}
	return true
}

// Finished records how a turn ended on w; the output length is learnt for the
// session's reserve (Q1).
func (s *State) Finished(w kvc.WorkerID, t kvc.TurnInfo) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.slotOf[w]; !ok {
		return false
	}
	if ss := s.sessions.get(t.Session, s.now()); ss != nil && t.Outcome == kvc.OutcomeOK {
		ss.outputs.add(t.Usage.CompletionTokens)
	}
	return true
}

// isHome reports whether slot i currently reports the session.
func (s *State) isHome(ss *session, i int) bool {
	return slices.ContainsFunc(ss.homes, func(h home) bool { return int(h.slot) == i && s.current(h) })
}

// current reports whether h is still what its worker says.
func (s *State) current(h home) bool {
	sl := &s.slots[h.slot]
	return h.gen == sl.gen && h.report == sl.report
}

// Home is the worker believed to hold the session: one that reports it, the
// pinned one first and then the latest used, else the pinned one.
func (s *State) Home(key kvc.SessionKey) (kvc.WorkerID, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.homeOf(s.sessions.get(key, s.now()))
}

func (s *State) homeOf(ss *session) (kvc.WorkerID, bool) {
	if ss == nil {
		return "", false
	}
	pin, pinned := s.pinOf(ss)
	var best home
	found := false
	for _, h := range ss.homes {
		sl := &s.slots[h.slot]
		if !s.current(h) || !sl.live || !sl.trusted {
			continue
		}
		if pinned && h.ref == pin {
			return sl.id, true
		}
		if !found || h.used > best.used {
			best, found = h, true
		}
	}
	switch {
	case found:
		return s.slots[best.slot].id, true
	case pinned:
		return s.slots[pin.slot].id, true
	}
	return "", false
}

// pinOf is pin[s], unless the worker or the session's KV on it is gone.
func (s *State) pinOf(ss *session) (ref, bool) {
	if ss == nil || !ss.pinned || ss.lost {
		return ref{}, false
	}
	sl := &s.slots[ss.pin.slot]
	return ss.pin, sl.gen == ss.pin.gen && sl.live
}

// Known reports whether the session was ever served, here or by report of a
// worker, with its lineage, and how many of its turns are unfinished here.
func (s *State) Known(key kvc.SessionKey) (lineage kvc.SessionKey, turns int, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ss := s.sessions.get(key, s.now())
	if ss == nil {
		return "", 0, false
	}
	served := ss.pinned || ss.tailUsed > 0 || slices.ContainsFunc(ss.homes, s.current)
	return ss.lineage, ss.turns, served
}

// Forget drops a session: its pin, its rejects, its tail.
func (s *State) Forget(key kvc.SessionKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ss := s.sessions.m[key]; ss != nil {
		s.sessions.remove(ss)
	}
}

// ByTail finds the session whose last prompt ended with block h (Q18); it
// implements session.Tails.
func (s *State) ByTail(h block.Hash) (key, lineage kvc.SessionKey, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ss := s.sessions.tails[h]
	if ss == nil || s.sessions.expired(ss, s.now()) {
		return "", "", false
	}
	return ss.key, ss.lineage, true
}
