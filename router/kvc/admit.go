package kvc

import (
	"encoding/hex"
	"math"
	"time"

	"github.com/zeebo/xxh3"
)

// turn is one attempt: a granted lease, a running turn, or the memory of an
// answer, so that the same question gets the same answer (wire.md §2).
type turn struct {
	q       Question
	plan    plan
	verdict Verdict
	stage   stage
	mode    Mode
	leaseID string
	held    *node // locked path; nil when none
	tokens  int   // reserved while leased, allocated while running
	due     time.Time
	slot    int // in Ledger.due
}

type stage uint8

const (
	answered stage = iota // refused or finished; remembered until due
	leased                // admitted, not yet presented; due is the lease's end
	inEngine              // no deadline
)

func (t *turn) before(o *turn) bool { return t.due.Before(o.due) }
func (t *turn) place() *int         { return &t.slot }

// plan is what a turn would find here and add.
type plan struct {
	base     *node // deepest resident block of the prompt
	held     *node // base, or the session's tail where its reuse is credited
	resident int   // tokens that need no prefill
	missing  int   // tokens to prefill or transfer; at least 1
	input    int   // resident + missing
	reserve  int   // room for the answer
	known    bool  // the session's own prefix is resident
	append   int   // what τ_append is compared with
}

// Admit is Algorithm 2: may this turn run here, and how. Admitting reserves a
// lease; the same attempt asked again gets the same verdict and lease, until
// the lease expires. A worker of the prefill role admits nothing.
//
// The letter is kept line by line; Q1 rules on need and used, Q4 on a large
// append, Q17 on whose append length counts.
func (l *Ledger) Admit(q Question, now time.Time) Verdict {
	l.advance(now)
	defer l.flush()
	if t := l.turns[q.Attempt]; t != nil {
		return t.verdict
	}
	if l.cfg.Prefill {
		return Verdict{}
	}
	p := l.plan(&q)
	t := &turn{q: q, plan: p, verdict: l.decide(&q, &p)}
	l.turns[q.Attempt] = t
	if !t.verdict.CanAdmit {
		t.q.Blocks = nil
		l.remember(t, t.verdict.RetryAfter)
		return t.verdict
	}
	l.grant(t)
	return t.verdict
}

// decide is the body of Algorithm 2.
func (l *Ledger) decide(q *Question, p *plan) Verdict {
	capOK, free := l.capOK(p)
	v := Verdict{ResidentTokens: p.resident, AppendTokens: p.missing, FreeTokens: max(free, 0)}
	if p.known {
		v.Mode, v.Reason = l.resident(p, capOK)
	} else {
		v.Mode, v.Reason = absent(q, capOK)
	}
	v.CanAdmit = v.Mode != ModeNone
	if !v.CanAdmit && v.Reason != ReasonRealLargeAppend {
		v.RetryAfter = l.retryAfter(-free)
	}
	return v
}

// resident is lines 3–9: s(r) ∈ M_d.
func (l *Ledger) resident(p *plan, capOK bool) (Mode, Reason) {
	large := p.append > l.cfg.Params.MaxAppendTokens
	switch {
	case large && l.cfg.Params.LargeAppend == LargeAppendReject:
		return ModeNone, ReasonRealLargeAppend
	case !capOK:
		return ModeNone, ReasonNoCapacity
	case large: // Q4: here, but through P
		return Reseed, ReasonLargeAppend
	case l.cfg.DirectPath == DeltaTransfer:
		return Delta, ReasonNone
	default:
		return Direct, ReasonNone
	}
}

// absent is lines 10–15: s(r) ∉ M_d.
func absent(q *Question, capOK bool) (Mode, Reason) {
	switch {
	case !capOK:
		return ModeNone, ReasonNotResidentNoCapacity
	case q.Turn == 0:
		return Seed, ReasonNone
	default:
		return Reseed, ReasonNone
	}
}

// plan compares a question with what is resident.
//
// The session's own prefix is resident ("s ∈ M_d") when the match reaches the
// end of its last prompt, or at least a block that only its lineage uses. So a
// context reset that keeps nothing but shared boilerplate is not resident (it
// is reseeded through P), a fork of a resident parent is, and boilerplate alone
// never makes a new session resident (Q5).
func (l *Ledger) plan(q *Question) plan {
	p := plan{base: l.match(q.Blocks)}
	p.held = p.base
	s := l.sessions[q.Session]
	p.resident = p.base.cum
	missing := l.missingTokens(q, s, p.base)
	if s != nil && s.tail != nil && s.leaf == p.base && s.confirmed > 0 && p.base.depth < len(q.Blocks) {
		credit := min(int(s.confirmed*float64(s.tail.weight)), missing-1)
		if credit > 0 {
			p.held = s.tail
			p.resident += credit
			missing -= credit
		}
	}
	p.missing = max(missing, 1)
	p.input = p.resident + p.missing
	p.reserve = l.reserve(q, s)
	p.known = q.Session != "" && p.base != l.root &&
		(p.base.owner == lineageOf(q) || (s != nil && s.leaf != l.root && s.leaf.on(q.Blocks)))
	p.append = l.appendTokens(q, &p)
	return p
}

// missingTokens estimates the tokens of the prompt beyond base: its unmatched
// blocks and half a block of rest, at the session's own ratio where known.
func (l *Ledger) missingTokens(q *Question, s *session, base *node) int {
	n := len(q.Blocks)
	if n == 0 {
		return q.InputTokens
	}
	ratio := l.TokensPerBlock()
	switch {
	case s != nil && s.perBlock > 0:
		ratio = s.perBlock
	case q.InputTokens > 0:
		ratio = float64(q.InputTokens) / (float64(n) + 0.5)
	}
	return int(math.Round((float64(n-base.depth) + 0.5) * ratio))
}

// appendTokens is append_len(r): the worker's own number (Q17), or under the
// letter the router's. DeltaTransfer pays for what the chosen P lacks.
func (l *Ledger) appendTokens(q *Question, p *plan) int {
	switch {
	case l.cfg.DirectPath == DeltaTransfer && q.PrefillUncachedTokens > 0:
		return q.PrefillUncachedTokens
	case l.cfg.Params.AppendBy == AppendByRouter && q.AppendTokens > 0:
		return q.AppendTokens
	default:
		return p.missing
	}
}

// reserve is the room kept for the answer (Q1): min(max_tokens, learnt p95).
func (l *Ledger) reserve(q *Question, s *session) int {
	if l.cfg.Prefill || l.cfg.Params.Reserve == ReserveNothing {
		return 0
	}
	r := l.cfg.Params.ReserveGuess
	if s != nil {
		r = s.outputs.p95(r)
	}
	if q.OutputTokens > 0 {
		r = min(r, q.OutputTokens)
	}
	return max(r, 0)
}

// capOK is Algorithm 2, lines 1–2, under Q1's rulings; free is what would be
// left below ρK, negative when the turn does not fit.
//
// Counting what is busy, the prompt's resident path counts once: with the
// locked, with the protected, or here as what the turn is going to lock.
func (l *Ledger) capOK(p *plan) (ok bool, free int) {
	rho := l.cfg.CapacityTokens * l.cfg.Params.HighWaterPercent / 100
	used := l.used + l.reserved
	if l.cfg.Params.Used == UsedBusy {
		used = l.locked + l.protected + l.reserved + idleTokens(p.held)
	}
	need := p.missing + p.reserve
	if l.cfg.Params.Need == NeedWholeInput {
		need = p.input + p.reserve
	}
	return used+need <= rho, rho - used - need
}

// idleTokens is what of the path to n is neither locked nor protected.
func idleTokens(n *node) int {
	busy := n
	for busy.lock == 0 && busy.prot == 0 {
		busy = busy.parent
	}
	return n.cum - busy.cum
}

// retryAfter estimates when short more tokens become reclaimable: at the first
// end of a protection if that session alone is large enough. 0 = unknown.
func (l *Ledger) retryAfter(short int) time.Duration {
	if len(l.guarded) == 0 || l.guarded[0].tip().cum < short {
		return 0
	}
	return max(l.guarded[0].until.Sub(l.now), 0)
}

// grant reserves what the verdict promises (Q11): the tokens, and the resident
// prefix it counts on.
func (l *Ledger) grant(t *turn) {
	t.stage = leased
	t.mode = t.verdict.Mode
	t.leaseID = leaseID(t.q.Attempt)
	t.q.Blocks = append(t.q.Blocks[:0:0], t.q.Blocks...) // the caller reuses its buffer
	tokens := t.plan.missing + t.plan.reserve
	if l.cfg.Params.Lease == LeaseReserves {
		t.tokens = tokens
		l.reserved += tokens
		t.held = t.plan.held
		l.lockPath(t.held)
	}
	t.verdict.Lease = Lease{ID: t.leaseID, Tokens: tokens, TTL: l.cfg.Params.LeaseTTL}
	t.due = l.now.Add(l.cfg.Params.LeaseTTL)
	l.leases[t.leaseID] = t
	l.due.push(t)
}

// ungrant gives back what a lease holds.
func (l *Ledger) ungrant(t *turn) {
	l.reserved -= t.tokens
	t.tokens = 0
	if t.held != nil {
		l.unlockPath(t.held)
		t.held = nil
	}
	delete(l.leases, t.leaseID)
	l.due.remove(t)
}

// remember keeps the answer to an attempt for the time in which it may be asked
// again: LeaseTTL, or less where the answer itself says when to ask again.
func (l *Ledger) remember(t *turn, atMost time.Duration) {
	t.stage = answered
	keep := l.cfg.Params.LeaseTTL
	if atMost > 0 {
		keep = min(keep, atMost)
	}
	t.due = l.now.Add(keep)
	l.due.push(t)
}

// leaseID is derived from the attempt, which is random already: the ledger
// needs no random source, and the same attempt has the same lease.
func leaseID(attempt string) string {
	sum := xxh3.HashString128("kvc-lease-v1\x00" + attempt).Bytes()
	return hex.EncodeToString(sum[:])
}

// lineageOf is the owner of a question's blocks. What a sessionless request
// leaves is nobody's own, so it is Shared.
func lineageOf(q *Question) SessionKey {
	switch {
	case q.Lineage != "" && q.Lineage != Shared:
		return q.Lineage
	case q.Session != "":
		return q.Session
	default:
		return Shared
	}
}
