package state

import (
	"math"
	"slices"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// ref names one incarnation of one worker: a slot and its generation. What is
// remembered under an older generation is forgotten without being looked for
// (Q15).
type ref struct {
	slot int16
	gen  uint32
}

// reject is rejects[s,d]: n as it was at, decaying since (Q8).
type reject struct {
	ref
	n  float32
	at int64 // Unix ns of the last refusal
}

// home is what one worker reports of the session.
type home struct {
	ref
	report         uint32 // the slot's report it belongs to
	blocks, tokens int32
	tail           block.Hash
	active         int32
	used           int64 // Unix ns
}

// session is everything remembered of one session.
type session struct {
	key, lineage kvc.SessionKey
	used         int64 // Unix ns of the last use anywhere
	tail         block.Hash
	tailUsed     int64 // Unix ns of the turn that left it
	turns        int   // unfinished dispatches

	pin     ref
	pinned  bool // a pin was ever set
	lost    bool // the pinned worker reported that the KV is gone (Q12: a home loss)
	rejects []reject
	homes   []home
	outputs quantile
	order   order

	newer, older *session
}

// table is the sessions: a map with strict LRU order and a bound (R85).
type table struct {
	limit          int
	ttl            int64
	m              map[kvc.SessionKey]*session
	tails          map[block.Hash]*session
	newest, oldest *session
	evicted        int64
}

func newTable(limit int, ttl time.Duration) *table {
	return &table{
		limit: limit, ttl: int64(ttl),
		m:     make(map[kvc.SessionKey]*session),
		tails: make(map[block.Hash]*session),
	}
}

// get returns a live session without touching its age.
func (t *table) get(key kvc.SessionKey, now int64) *session {
	if s := t.m[key]; s != nil && !t.expired(s, now) {
		return s
	}
	return nil
}

func (t *table) expired(s *session, now int64) bool {
	return s.turns == 0 && !s.order.busy && t.ttl > 0 && now-s.used > t.ttl
}

// touch returns the session, made if need be, as the most recently used one,
// and makes room: first what has expired, then the least recently used.
func (t *table) touch(key, lineage kvc.SessionKey, now int64) *session {
	s := t.m[key]
	switch {
	case s == nil:
		s = &session{key: key, lineage: lineage}
		t.m[key] = s
	case t.expired(s, now):
		t.unlink(s)
		t.untail(s)
		*s = session{key: key, lineage: lineage}
	default:
		t.unlink(s)
	}
	if lineage != "" {
		s.lineage = lineage
	}
	s.used = max(s.used, now)
	t.link(s)
	for t.oldest != s && (len(t.m) > t.limit || t.expired(t.oldest, now)) {
		t.remove(t.oldest)
		t.evicted++
	}
	return s
}

func (t *table) link(s *session) {
	s.older, s.newer = t.newest, nil
	if t.newest != nil {
		t.newest.newer = s
	}
	t.newest = s
	if t.oldest == nil {
		t.oldest = s
	}
}

func (t *table) unlink(s *session) {
	if s.newer != nil {
		s.newer.older = s.older
	} else {
		t.newest = s.older
	}
	if s.older != nil {
		s.older.newer = s.newer
	} else {
		t.oldest = s.newer
	}
	s.newer, s.older = nil, nil
}

func (t *table) remove(s *session) {
	t.unlink(s)
	t.untail(s)
	delete(t.m, s.key)
}

func (t *table) untail(s *session) {
	if s.tail != 0 && t.tails[s.tail] == s {
		delete(t.tails, s.tail)
	}
	s.tail = 0
}

// setTail says that the session's last prompt ended with block h. Of two
// sessions with one tail the later is found.
func (t *table) setTail(s *session, h block.Hash) {
	if h == 0 || s.tail == h {
		return
	}
	t.untail(s)
	s.tail = h
	t.tails[h] = s
}

// count is rejects[s,d] as it reads now. It is rounded up, so that three
// refusals in a row count as three; below one half it has been forgotten. After
// halfOpen without a refusal it reads at most threshold-1: one more question is
// allowed, and one more refusal closes the pair again.
func (r reject) count(now int64, p *kvc.Params) int {
	n := r.decayed(now, p)
	if n < 0.5 {
		return 0
	}
	c := int(math.Ceil(n - 1e-6))
	if p.HalfOpenAfter > 0 && now-r.at >= int64(p.HalfOpenAfter) {
		return min(c, p.RejectThreshold-1)
	}
	return c
}

func (r reject) decayed(now int64, p *kvc.Params) float64 {
	return decay(float64(r.n), now-r.at, p.RejectHalfLife)
}

// decay halves n once per half-life; 0 is no decay.
func decay(n float64, age int64, halfLife time.Duration) float64 {
	if halfLife <= 0 || age <= 0 || n == 0 {
		return n
	}
	return n * math.Exp2(-float64(age)/float64(halfLife))
}

// rejected is rejects[s,d]++.
func (s *session) rejected(d ref, now int64, p *kvc.Params) {
	for i := range s.rejects {
		if r := &s.rejects[i]; r.ref == d {
			r.n = float32(r.decayed(now, p)) + 1
			r.at = now
			return
		}
	}
	s.rejects = slices.DeleteFunc(s.rejects, func(r reject) bool { return r.decayed(now, p) < 0.5 })
	s.rejects = append(s.rejects, reject{ref: d, n: 1, at: now})
}

func (s *session) rejectsOf(d ref) (reject, bool) {
	for _, r := range s.rejects {
		if r.ref == d {
			return r, true
		}
	}
	return reject{}, false
}

func (s *session) resetRejects(d ref) {
	s.rejects = slices.DeleteFunc(s.rejects, func(r reject) bool { return r.ref == d })
}

func (s *session) halveOthers(d ref) {
	for i := range s.rejects {
		if s.rejects[i].ref != d {
			s.rejects[i].n /= 2
		}
	}
}

func (s *session) setHome(h home) {
	for i := range s.homes {
		if s.homes[i].slot == h.slot {
			s.homes[i] = h
			return
		}
	}
	s.homes = append(s.homes, h)
}

func (s *session) dropHome(slot int16) {
	s.homes = slices.DeleteFunc(s.homes, func(h home) bool { return h.slot == slot })
}

// quantile remembers the last outputs of a session, in tokens.
type quantile struct {
	last [20]uint16
	n    uint32 // outputs seen
}

func (q *quantile) add(tokens int) {
	q.last[q.n%uint32(len(q.last))] = uint16(min(max(tokens, 0), math.MaxUint16))
	q.n++
}

// p95 is the 95th percentile (nearest rank) of what is remembered. Below four
// outputs guess is the floor: a few short answers say little about the next.
func (q *quantile) p95(guess int) int {
	n := min(int(q.n), len(q.last))
	if n == 0 {
		return guess
	}
	sorted := q.last
	slices.Sort(sorted[:n])
	p := int(sorted[(n*95+99)/100-1])
	if n < 4 {
		p = max(p, guess)
	}
	return p
}
