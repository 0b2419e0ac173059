package kvc

import (
	"slices"
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// session is one conversation that left KV here.
type session struct {
	key, lineage SessionKey

	leaf   *node      // deepest resident block of its last prompt; the root when none
	tail   *node      // what follows leaf and has no hash yet; nil when evicted or empty
	last   block.Hash // last full block of its last prompt, resident or not
	held   *node      // where its protection is held; nil when unprotected
	active int        // running turns

	lastUse time.Time
	until   time.Time // end of protection; zero with held set: until released (Q16, Paper)
	slot    int       // in Ledger.guarded

	perBlock  float64 // tokens a block in its last prompt; 0 = not learnt
	confirmed float64 // share of the last generated tail that cached_tokens confirmed (Q17)
	outputs   outputs

	dirty, gone, forget bool
}

func (s *session) before(o *session) bool { return s.until.Before(o.until) }
func (s *session) place() *int            { return &s.slot }

// tip is the deepest node that the session holds.
func (s *session) tip() *node {
	if s.tail != nil {
		return s.tail
	}
	return s.leaf
}

func (s *session) info() SessionInfo {
	return SessionInfo{
		Key: s.key, Lineage: s.lineage, Tail: s.last,
		Blocks: s.leaf.depth, ResidentTokens: s.tip().cum,
		LastUse: s.lastUse, Active: s.active, ProtectedUntil: s.until,
	}
}

// outputs are the lengths of a session's latest answers.
type outputs struct {
	ring [16]int
	n    int // answers seen
}

func (o *outputs) add(tokens int) {
	o.ring[o.n%len(o.ring)] = tokens
	o.n++
}

// p95 is the 95th percentile (nearest rank) of the latest answers. Below four
// of them guess is the floor: a few short answers say little about the next.
func (o *outputs) p95(guess int) int {
	if o.n == 0 {
		return guess
	}
	seen := slices.Clone(o.ring[:min(o.n, len(o.ring))])
	slices.Sort(seen)
	p := seen[(len(seen)*95+99)/100-1]
	if o.n < 4 {
		p = max(p, guess)
	}
	return p
}

// open returns the session of a question, new if need be; nil when it has none.
func (l *Ledger) open(q *Question) *session {
	if q.Session == "" {
		return nil
	}
	s := l.sessions[q.Session]
	if s == nil {
		s = &session{key: q.Session, lineage: lineageOf(q), leaf: l.root}
		l.sessions[q.Session] = s
		l.root.sits = append(l.root.sits, s)
	}
	return s
}

// drop forgets s. What it left becomes ordinary LRU.
func (l *Ledger) drop(s *session) {
	l.unguard(s)
	l.leaveTail(s)
	l.unsit(s)
	delete(l.sessions, s.key)
	s.gone = true
	l.markDirty(s)
}

// settle ends an idle session that is to be forgotten, or whose rest here is
// not its own: only blocks that others continue or end at too. Without the
// latter, everyone who ever used the boilerplate would stay for ever.
func (l *Ledger) settle(s *session) {
	nothing := s.tail == nil && (s.leaf == l.root || s.leaf.kids > 0 || len(s.leaf.sits) > 1)
	if s.active == 0 && (s.forget || nothing) && !s.gone {
		l.drop(s)
	}
}

// unsit takes s off its leaf.
func (l *Ledger) unsit(s *session) {
	if i := slices.Index(s.leaf.sits, s); i >= 0 {
		s.leaf.sits = slices.Delete(s.leaf.sits, i, i+1)
	}
}

// leaveTail turns the session's tail into garbage: nobody can name it any more,
// the engine's LRU will find it.
func (l *Ledger) leaveTail(s *session) {
	if s.tail == nil {
		return
	}
	if s.held == s.tail {
		l.unprotectPath(s.tail)
		l.protectPath(s.leaf)
		s.held = s.leaf
	}
	l.exclusive -= s.tail.weight
	s.tail.sits = nil
	s.tail = nil
}

// guard protects what s holds now until the deadline of Q1; or until released
// where the paper's idle lock is kept (Q16).
func (l *Ledger) guard(s *session, now time.Time) {
	l.unguard(s)
	forever := l.cfg.Params.IdleLock == IdleLockUntilReleased
	if l.cfg.Prefill || (!forever && l.cfg.Params.ProtectIdle <= 0) {
		return
	}
	s.held = s.tip()
	l.protectPath(s.held)
	if !forever {
		s.until = now.Add(l.cfg.Params.ProtectIdle)
		l.guarded.push(s)
	}
}

func (l *Ledger) unguard(s *session) {
	if s.held == nil {
		return
	}
	l.unprotectPath(s.held)
	l.guarded.remove(s)
	s.held, s.until = nil, time.Time{}
}

// credit records a finished turn: its prompt and answer are resident now, as
// far as they fit. Order matters: what the engine confirmed of the old tail
// makes room for the blocks that name the same tokens.
func (l *Ledger) credit(t *turn, s *session, u Usage) {
	q := &t.q
	prompt := u.PromptTokens
	if prompt <= 0 {
		prompt = t.plan.input
	}
	answer := max(u.CompletionTokens, 0)
	if l.cfg.Prefill {
		answer = 0 // P's one token leaves with the KV
	}
	l.learn(s, len(q.Blocks), prompt)
	if s != nil {
		l.confirm(s, q.Blocks, min(u.CachedTokens, prompt))
		l.unguard(s)
		l.leaveTail(s)
	}

	base := l.match(q.Blocks)
	l.lockPath(base)
	lineage := lineageOf(q)
	l.share(base, lineage)
	leaf := l.insert(base, q.Blocks[base.depth:], lineage, prompt-base.cum)
	l.unlockPath(base)
	l.lockPath(leaf)
	var rest *node
	if leaf.depth == len(q.Blocks) {
		if w := l.room(max(prompt+answer-leaf.cum, 1)); w > 0 {
			rest = &node{parent: leaf, owner: lineage, weight: w, tail: true}
			l.attach(rest)
		}
	}
	l.touch(leaf)
	l.unlockPath(leaf)
	if s != nil {
		l.place(s, leaf, rest)
		s.outputs.add(max(u.CompletionTokens, 0))
		if n := len(q.Blocks); n > 0 {
			s.last = q.Blocks[n-1]
		}
	}
}

// place moves s to where its last prompt ends.
func (l *Ledger) place(s *session, leaf, tail *node) {
	l.unsit(s)
	s.leaf, s.tail = leaf, tail
	leaf.sits = append(leaf.sits, s)
	if tail != nil {
		tail.sits = append(tail.sits, s)
		l.exclusive += tail.weight
	}
}

// confirm takes out of the old tail what the engine says it reused: these
// tokens are about to be named by blocks (Q17). What it did not reuse (templates
// strip thinking) stays behind as garbage.
func (l *Ledger) confirm(s *session, chain []block.Hash, cached int) {
	if s.tail == nil || cached <= 0 || !s.leaf.on(chain) {
		return
	}
	reused := max(0, min(cached-s.leaf.cum, s.tail.weight))
	s.confirmed = float64(reused) / float64(s.tail.weight)
	if reused == 0 {
		return
	}
	tail := s.tail
	l.leaveTail(s)
	if left := tail.weight - reused; left >= max(l.cfg.PageSize, 1) && tail.lock == 0 {
		l.used -= reused
		tail.weight, tail.cum = left, tail.cum-reused
		return
	}
	if tail.lock == 0 {
		l.detach(tail)
	}
}

// learn updates the tokens-per-block ratios from a prompt of n full blocks,
// which weigh half a block less than the prompt on average.
func (l *Ledger) learn(s *session, n, prompt int) {
	if n == 0 {
		return
	}
	ratio := float64(prompt) / (float64(n) + 0.5)
	if s != nil {
		s.perBlock = ratio
	}
	const few = 4 // blocks; the template's own tokens distort shorter prompts
	if n < few {
		return
	}
	const memory = 1 << 16 // blocks after which old evidence counts half
	keep := 1 / (1 + float64(n)/memory)
	l.seenBlocks = l.seenBlocks*keep + float64(n) + 0.5
	l.seenTokens = l.seenTokens*keep + float64(prompt)
}

// markDirty has the session's frame sent when the operation ends.
func (l *Ledger) markDirty(s *session) {
	if !s.dirty {
		s.dirty = true
		l.dirty = append(l.dirty, s)
	}
}
