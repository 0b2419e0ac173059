package kvc

import (
	"slices"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// LedgerConfig describes one worker's engine.
type LedgerConfig struct {
	CapacityTokens int // K_d, the engine's max_total_num_tokens
	PageSize       int
	Prefill        bool // a P worker's prompt cache: no admission, no protection
	DirectPath     DirectPath
	Params         Params
	MaxInputTokens int     // longest prompt the engine takes (max_req_input_len); 0 = K_d
	TokensPerBlock float64 // initial ratio; learnt from usage afterwards (about 24)
}

// Gauges are the ledger's token counts.
//
// Used is everything resident or allocated: blocks shared by several sessions
// count once, running turns count with what they were granted. Locked is the
// part that running turns and leases hold, Protected what idle sessions hold
// under ProtectIdle and nobody locks; the rest of Used is reclaimable. Reserved
// is promised by leases and not yet part of Used.
type Gauges struct {
	Used, Locked, Protected, Reserved int
	Sessions, Active                  int
}

// ChangeKind names one ledger change; each becomes one feed frame (wire.md §4).
type ChangeKind uint8

// The kinds of change. A session's change precedes the change of the turn that
// caused it; blocks come before the session that holds them.
const (
	ChangeSession ChangeKind = iota
	ChangeSessionGone
	ChangeAdd
	ChangeEvict
	ChangeOwn
	ChangeClear
	ChangeTurn
)

// Change is one ledger change, in order.
type Change struct {
	Kind    ChangeKind
	Session SessionInfo  // ChangeSession, ChangeSessionGone (Key only)
	Owner   SessionKey   // ChangeAdd, ChangeOwn
	Blocks  []block.Hash // ChangeAdd, ChangeEvict, ChangeOwn
	Turn    TurnInfo     // ChangeTurn
}

// SessionInfo is the SESSION object of wire.md §4.
type SessionInfo struct {
	Key, Lineage SessionKey
	// Tail is the last full block of its last prompt, resident or not: a request
	// without an id continues the session by it (Q18).
	Tail           block.Hash
	Blocks         int // resident blocks of its last prompt
	ResidentTokens int // resident tokens of its last prompt and answer
	LastUse        time.Time
	Active         int // running turns
	// ProtectedUntil is zero when unprotected, or protected without end (Q16,
	// IdleLockUntilReleased).
	ProtectedUntil time.Time
}

// TurnInfo is the turn frame of wire.md §4.
type TurnInfo struct {
	Attempt string
	Session SessionKey
	Mode    Mode
	Usage   Usage
	Outcome Outcome
}

// Expectation is what the ledger expects a turn to cost, in tokens.
type Expectation struct {
	Mode     Mode // ModeNone for a question that was only estimated
	Resident int  // of the prompt, already here: no prefill, no transfer
	Missing  int  // of the prompt, to be prefilled here or transferred from P
	Input    int  // Resident + Missing
	Reserve  int  // room for the answer
}

// Ledger is M_d: what one worker holds, who may use it, and what is promised.
// It is not safe for concurrent use; the sidecar serialises it. Time comes in,
// and never runs backwards: an earlier now counts as the latest one seen.
//
// It mirrors a radix cache: blocks form a forest, because hashes are chained;
// running turns lock their path; everything else leaves least recently used
// leaf first, and only when an allocation does not fit into K_d.
//
// Invariants (Inv1): Used ≤ CapacityTokens always; after an admission under
// Corrected, Locked + Protected + Reserved ≤ ρK, under Paper Used ≤ ρK.
type Ledger struct {
	cfg LedgerConfig
	now time.Time

	root   *node // depth 0, weight 0, locked and protected for ever
	blocks map[block.Hash]*node
	leaves heap[*node] // evictable, by last use
	uses   uint64      // clock of last use

	sessions map[SessionKey]*session
	guarded  heap[*session] // protected with a deadline, by deadline

	turns  map[string]*turn // by attempt
	leases map[string]*turn // by lease id; unpresented only
	due    heap[*turn]      // leases and remembered answers, by deadline
	active int              // running turns

	used, locked, protected, reserved int
	exclusive                         int   // resident tokens that one lineage alone uses
	evictedTokens                     int64 // since the start

	seenBlocks, seenTokens float64 // for TokensPerBlock

	changes []Change
	evicted []block.Hash // leaf first; becomes one change
	dirty   []*session
}

// NewLedger returns an empty ledger.
func NewLedger(c LedgerConfig) *Ledger {
	if c.TokensPerBlock <= 0 {
		c.TokensPerBlock = block.IDs
	}
	l := &Ledger{cfg: c}
	l.reset()
	return l
}

// reset drops everything resident and promised. Counters of the past stay.
func (l *Ledger) reset() {
	l.root = &node{owner: Shared, lock: 1, prot: 1}
	l.root.older, l.root.newer = l.root, l.root
	l.blocks = map[block.Hash]*node{}
	l.leaves, l.guarded, l.due = nil, nil, nil
	l.sessions = map[SessionKey]*session{}
	l.turns, l.leases = map[string]*turn{}, map[string]*turn{}
	l.used, l.locked, l.protected, l.reserved, l.exclusive, l.active = 0, 0, 0, 0, 0, 0
	l.evicted, l.dirty = nil, nil
}

// Begin starts a turn that presents a lease (id, attempt); false with
// ReasonLeaseExpired when the lease is gone, was presented before, or names
// another attempt.
func (l *Ledger) Begin(lease, attempt string, now time.Time) (Reason, bool) {
	l.advance(now)
	defer l.flush()
	t := l.leases[lease]
	if t == nil || t.q.Attempt != attempt {
		return ReasonLeaseExpired, false
	}
	reserves := t.held != nil
	l.ungrant(t)
	// Look again: a promise held nothing, and meanwhile another turn may have
	// made more of the prompt resident.
	if p := l.plan(&t.q); !reserves || p.resident > t.plan.resident {
		t.plan = p
	}
	l.start(t)
	return ReasonNone, true
}

// BeginUnadmitted starts a Fallback turn (x-kvc-admit: none) or, on a P worker,
// any turn: it is accounted, never refused here (the sidecar's bounded queue
// asks Fits first). An attempt that already runs or ended is left alone.
func (l *Ledger) BeginUnadmitted(q Question, mode Mode, now time.Time) {
	l.advance(now)
	defer l.flush()
	var refusal Verdict
	switch t := l.turns[q.Attempt]; {
	case t == nil:
	case t.stage == leased:
		l.ungrant(t)
	case t.stage == inEngine || t.mode != ModeNone:
		return
	default: // refused before
		l.due.remove(t)
		refusal = t.verdict
	}
	t := &turn{q: q, plan: l.plan(&q), mode: mode, verdict: refusal}
	t.q.Blocks = slices.Clone(q.Blocks)
	l.turns[q.Attempt] = t
	l.start(t)
}

// start locks the turn's path and allocates what it adds, as far as K_d allows
// (the engine makes the rest of an unadmitted turn wait by itself).
func (l *Ledger) start(t *turn) {
	t.stage = inEngine
	t.held = t.plan.held
	l.lockPath(t.held)
	l.touch(t.held)
	l.touch(t.plan.base) // after its tail, so that a block never looks older than what hangs on it
	need := t.plan.missing + t.plan.reserve
	if l.tooLong(&t.plan) {
		need = min(need, l.cfg.CapacityTokens-l.used) // nothing makes room for what the engine will refuse
	}
	t.tokens = l.room(need)
	l.used += t.tokens
	l.locked += t.tokens
	l.active++
	if s := l.open(&t.q); s != nil {
		s.active++
		s.lastUse = l.now
		l.markDirty(s)
	}
}

// tooLong reports whether a prompt is longer than the engine takes: its refusal
// evicts nothing, so neither may the ledger. Should the estimate be wrong and
// the turn succeed, its credit makes the room.
func (l *Ledger) tooLong(p *plan) bool {
	most := l.cfg.CapacityTokens
	if l.cfg.MaxInputTokens > 0 {
		most = min(most, l.cfg.MaxInputTokens)
	}
	return p.resident+p.missing > most
}

// Fits reports whether the turn can start without exceeding K_d, counting what
// is promised to others. A turn that would not even fit an empty worker passes:
// only the engine's own refusal says what is wrong with it.
func (l *Ledger) Fits(q Question, now time.Time) bool {
	l.advance(now)
	defer l.flush()
	p := l.plan(&q)
	need := p.missing + p.reserve
	if p.resident+need > l.cfg.CapacityTokens {
		return true
	}
	unlocked := p.held
	for unlocked.lock == 0 {
		unlocked = unlocked.parent
	}
	return l.locked+l.reserved+p.held.cum-unlocked.cum+need <= l.cfg.CapacityTokens
}

// Estimate says what a turn would cost if it started now. It changes nothing.
func (l *Ledger) Estimate(q Question) Expectation {
	return l.plan(&q).expect(ModeNone)
}

// Expected says what the running or leased turn of an attempt was expected to
// cost when it began; ok is false for any other attempt.
func (l *Ledger) Expected(attempt string) (e Expectation, ok bool) {
	t := l.turns[attempt]
	if t == nil || t.stage == answered {
		return Expectation{}, false
	}
	return t.plan.expect(t.mode), true
}

func (p plan) expect(m Mode) Expectation {
	return Expectation{Mode: m, Resident: p.resident, Missing: p.missing, Input: p.input, Reserve: p.reserve}
}

// Release frees a lease that was not presented; unknown ids are fine.
func (l *Ledger) Release(lease string, now time.Time) {
	l.advance(now)
	defer l.flush()
	if t := l.leases[lease]; t != nil {
		l.ungrant(t)
		delete(l.turns, t.q.Attempt)
	}
}

// End finishes a turn exactly once; later calls for the attempt do nothing.
// Only OutcomeOK credits residency. An attempt that is still a lease is
// released.
func (l *Ledger) End(attempt string, u Usage, o Outcome, now time.Time) {
	l.advance(now)
	defer l.flush()
	t := l.turns[attempt]
	if t == nil || t.stage == answered {
		return
	}
	if t.stage == leased {
		l.ungrant(t)
		delete(l.turns, attempt)
		return
	}
	l.used -= t.tokens
	l.locked -= t.tokens
	t.tokens = 0
	l.active--
	if t.held != nil {
		l.unlockPath(t.held)
		t.held = nil
	}
	s := l.sessions[t.q.Session]
	if o == OutcomeOK {
		l.credit(t, s, u)
	}
	if s != nil {
		s.active--
		s.lastUse = l.now
		l.guard(s, l.now)
		l.markDirty(s)
		l.settle(s)
	}
	info := TurnInfo{Attempt: attempt, Session: t.q.Session, Mode: t.mode, Usage: u, Outcome: o}
	t.q.Blocks, t.plan.base, t.plan.held = nil, nil, nil
	l.remember(t, 0)
	l.flush()
	l.emit(Change{Kind: ChangeTurn, Turn: info})
}

// Forget unprotects a session and forgets it; its blocks leave by LRU. While a
// turn of it runs, that happens after the turn.
func (l *Ledger) Forget(key SessionKey, now time.Time) {
	l.advance(now)
	defer l.flush()
	s := l.sessions[key]
	if s == nil {
		return
	}
	s.forget = true
	l.settle(s)
}

// Clear empties the ledger (the engine's cache was flushed). Leases are void,
// since what they counted on is gone; turns that run keep what they were
// granted until they end.
func (l *Ledger) Clear(now time.Time) {
	l.advance(now)
	l.flush()
	old := l.turns
	l.reset()
	for attempt, t := range old {
		if t.stage == inEngine {
			t.held, t.plan.base, t.plan.held = nil, l.root, l.root
			l.turns[attempt] = t
			l.used += t.tokens
			l.locked += t.tokens
			l.active++
			if s := l.open(&t.q); s != nil {
				s.active++
				s.lastUse = l.now
			}
		}
	}
	l.emit(Change{Kind: ChangeClear})
	for _, s := range l.sorted("") {
		l.markDirty(s)
	}
	l.flush()
}

// Tick expires leases and protections. Next says when to call it again: at the
// next deadline, or in an hour when there is none.
func (l *Ledger) Tick(now time.Time) (next time.Duration) {
	l.advance(now)
	l.flush()
	next = time.Hour
	if len(l.due) > 0 {
		next = min(next, l.due[0].due.Sub(l.now))
	}
	if len(l.guarded) > 0 {
		next = min(next, l.guarded[0].until.Sub(l.now))
	}
	return max(next, time.Millisecond)
}

// advance moves the clock and lets every deadline that has come take effect.
func (l *Ledger) advance(now time.Time) {
	if now.After(l.now) {
		l.now = now
	}
	for len(l.due) > 0 && !l.due[0].due.After(l.now) {
		t := l.due[0]
		if t.stage == leased {
			l.ungrant(t)
		} else {
			l.due.remove(t)
		}
		delete(l.turns, t.q.Attempt)
	}
	for len(l.guarded) > 0 && !l.guarded[0].until.After(l.now) {
		s := l.guarded[0]
		l.unguard(s)
		l.markDirty(s)
	}
}

// SetParams replaces the tunables (hot reload). Leases and protections granted
// before keep their deadlines.
func (l *Ledger) SetParams(p Params) { l.cfg.Params = p }

// Gauges returns the token counts.
func (l *Ledger) Gauges(now time.Time) Gauges {
	l.advance(now)
	l.flush()
	return Gauges{
		Used: l.used, Locked: l.locked, Protected: l.protected, Reserved: l.reserved,
		Sessions: len(l.sessions), Active: l.active,
	}
}

// EvictionCost is the tokens that would have to be prefilled again elsewhere if
// this worker went away: what one lineage alone uses. Shared boilerplate is
// assumed to be everywhere.
func (l *Ledger) EvictionCost() int { return l.exclusive }

// EvictedTokens is the total evicted since the start. Clear does not count.
func (l *Ledger) EvictedTokens() int64 { return l.evictedTokens }

// Sessions lists up to limit sessions whose key follows after, in key order; a
// limit below 1 means all.
func (l *Ledger) Sessions(after SessionKey, limit int) []SessionInfo {
	all := l.sorted(after)
	if limit > 0 && len(all) > limit {
		all = all[:limit]
	}
	infos := make([]SessionInfo, len(all))
	for i, s := range all {
		infos[i] = s.info()
	}
	return infos
}

func (l *Ledger) sorted(after SessionKey) []*session {
	var all []*session
	for k, s := range l.sessions {
		if k > after {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b *session) int { return strings.Compare(string(a.key), string(b.key)) })
	return all
}

// TokensPerBlock is the ratio learnt so far.
func (l *Ledger) TokensPerBlock() float64 {
	if l.seenBlocks > 0 {
		return l.seenTokens / l.seenBlocks
	}
	return l.cfg.TokensPerBlock
}

// Changes drains the changes since the last call.
func (l *Ledger) Changes() []Change {
	l.flush()
	c := l.changes
	l.changes = nil
	return c
}

// emit appends one change behind the evictions that made room for it.
func (l *Ledger) emit(c Change) {
	l.flushEvicted()
	l.changes = append(l.changes, c)
}

// flushEvicted turns collected evictions into one change, root first.
func (l *Ledger) flushEvicted() {
	if len(l.evicted) == 0 {
		return
	}
	gone := l.evicted
	l.evicted = nil
	slices.Reverse(gone)
	l.changes = append(l.changes, Change{Kind: ChangeEvict, Blocks: gone})
}

// flush ends an operation: evictions, then the sessions it touched.
func (l *Ledger) flush() {
	l.flushEvicted()
	for _, s := range l.dirty {
		s.dirty = false
		if s.gone {
			l.emit(Change{Kind: ChangeSessionGone, Session: SessionInfo{Key: s.key}})
			continue
		}
		l.emit(Change{Kind: ChangeSession, Session: s.info()})
	}
	l.dirty = l.dirty[:0]
}
