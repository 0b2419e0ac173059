package state

import (
	"slices"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Turn is one request's kvc.Dispatch on the shared beliefs: every method
// decides and applies what was decided in one critical section, so that
// simultaneous turns see each other (R90). Its methods are safe for concurrent
// use; Done counts once (R57).
type Turn struct {
	s      *State
	view   view
	req    kvc.Request
	blocks []block.Hash
	d      *kvc.Dispatch

	inflight held
	prefill  held
	running  held
	streamed bool
	over     bool
	ordered  *session // whose order this turn holds (Enter)
	credit   held     // the worker that was credited with blocks[from:] at the first byte
	from     int
}

// held is what a turn has to give back to one worker.
type held struct {
	ref
	yes bool
}

// Begin starts the dispatch of one request whose prompt is blocks, root first;
// they must not change until Done. path is the decode workers' engine profile
// for the request's route ("" = Unified where there is no prefill worker).
//
// Begin fills in what only the beliefs know: AppendTokens, if 0, as the input
// beyond the longest prefix resident on any decode worker, and OutputTokens, on
// entry the client's max_tokens or 0, as Q1's reserve.
func (s *State) Begin(r kvc.Request, blocks []block.Hash, path kvc.DirectPath) *Turn {
	t := &Turn{s: s, req: r, blocks: blocks}
	s.mu.Lock()
	now := s.now()
	var ss *session
	if r.Session != "" {
		ss = s.sessions.touch(r.Session, r.Lineage, now)
		ss.turns++
		if ss.lineage == "" {
			ss.lineage = r.Session // a root
		}
		t.req.Lineage = ss.lineage
	}
	t.view.begin(s, ss, now)
	f := s.fleetFor(ss, path)
	p := s.params
	t.req.OutputTokens = reserve(r.OutputTokens, ss, &p)
	s.mu.Unlock()

	t.view.measure(&t.req, blocks, p.Overlap == kvc.OverlapExclusive)
	if t.req.AppendTokens == 0 {
		t.req.AppendTokens = t.appendTokens(f.Decode)
	}
	t.d = kvc.NewDispatch(t.req, f, &t.view, p)
	return t
}

// reserve is Q1's output reserve: min(max_tokens, learnt p95 of the session).
func reserve(maxTokens int, ss *session, p *kvc.Params) int {
	if p.Reserve == kvc.ReserveNothing {
		return 0
	}
	want := p.ReserveGuess
	if ss != nil {
		want = ss.outputs.p95(want)
	}
	if maxTokens > 0 {
		want = min(want, maxTokens)
	}
	return want
}

// appendTokens is the input beyond the longest prefix on any of decode.
func (t *Turn) appendTokens(decode []kvc.WorkerID) int {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	least := t.req.InputTokens
	for _, d := range decode {
		if i, ok := t.view.slot(d); ok {
			least = min(least, t.view.uncached(i))
		}
	}
	return least
}

// Request is the request with what Begin filled in.
func (t *Turn) Request() kvc.Request { return t.req }

// Attempts counts the Runs so far.
func (t *Turn) Attempts() int {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	return t.d.Attempts()
}

// Next is kvc.Dispatch.Next: it selects and reserves.
func (t *Turn) Next() (step kvc.Step) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.view.now = t.s.now()
	step = t.d.Next()
	t.settle()
	return step
}

// Answer is kvc.Dispatch.Answer.
func (t *Turn) Answer(a kvc.Reply) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.view.now = t.s.now()
	t.d.Answer(a)
	t.settle()
}

// Failed is kvc.Dispatch.Failed.
func (t *Turn) Failed() { t.fail(t.d.Failed) }

// FailedPrefill is kvc.Dispatch.FailedPrefill.
func (t *Turn) FailedPrefill() { t.fail(t.d.FailedPrefill) }

func (t *Turn) fail(how func()) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	t.view.now = t.s.now()
	how()
	t.settle()
}

// Streaming is kvc.Dispatch.Streaming. The worker is believed to hold the
// prompt from now on, whatever the mode (Q9, R93); its feed corrects that.
func (t *Turn) Streaming() {
	t.s.feeds.RLock()
	defer t.s.feeds.RUnlock()
	if blocks, slot := t.stream(); len(blocks) > 0 {
		t.s.index.add(slot, ownerID(t.req.Lineage), blocks)
	}
}

func (t *Turn) stream() (credit []block.Hash, slot int) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	step, ok := t.d.Running()
	if !ok || t.streamed {
		return nil, 0
	}
	t.streamed = true
	t.view.now = t.s.now()
	t.d.Streaming()
	t.settle()
	t.s.modes[step.Mode]++
	i, ok := t.view.slot(step.Worker)
	if ok {
		t.s.slots[i].modes[step.Mode]++
	}
	// What a sessionless turn leaves is nobody's own: nothing is gained by
	// guessing it.
	if !ok || t.view.ss == nil || t.s.params.Residency == kvc.ResidencyFromFeed || !t.s.known.has(i) {
		return nil, 0
	}
	t.credit, t.from = held{t.view.ref(i), true}, t.view.lcp(i)
	return t.blocks[t.from:], i
}

// Done is kvc.Dispatch.Done. Only a turn that ended well leaves its prompt on
// the worker (R05).
func (t *Turn) Done(o kvc.Outcome) {
	t.s.feeds.RLock()
	defer t.s.feeds.RUnlock()
	if blocks, slot := t.finish(o); len(blocks) > 0 {
		t.s.index.evict(slot, blocks)
	}
}

func (t *Turn) finish(o kvc.Outcome) (debit []block.Hash, slot int) {
	t.s.mu.Lock()
	defer t.s.mu.Unlock()
	if t.over {
		return nil, 0
	}
	t.over = true
	t.view.now = t.s.now()
	t.d.Done(o)
	t.settle()
	if t.ordered != nil {
		t.ordered.order.leave()
	}
	served := o == kvc.OutcomeOK && t.streamed
	if t.view.ss == nil {
		return nil, 0
	}
	t.endOf(t.view.ss, served)
	return t.checkCredit(t.view.ss, served)
}

// endOf is what the turn's end means to its session.
func (t *Turn) endOf(ss *session, served bool) {
	ss.turns--
	ss.used = max(ss.used, t.view.now)
	if served && len(t.blocks) > 0 && t.s.sessions.m[ss.key] == ss {
		t.s.sessions.setTail(ss, t.blocks[len(t.blocks)-1])
		ss.tailUsed = t.view.now
	}
}

// checkCredit leaves a served turn's credit for the worker to confirm, and
// returns the blocks of a broken one, to be taken back.
func (t *Turn) checkCredit(ss *session, served bool) (debit []block.Hash, slot int) {
	if !t.credit.yes || t.s.slots[t.credit.slot].gen != t.credit.gen || t.from == len(t.blocks) {
		return nil, 0
	}
	slot = int(t.credit.slot)
	if !served {
		if ss.turns > 0 {
			return nil, 0 // another turn of the session may have left the same blocks
		}
		return t.blocks[t.from:], slot
	}
	s := span{t.from, t.blocks[t.from:]}
	for _, h := range ss.homes { // the worker may have spoken first
		if int(h.slot) == slot && t.s.current(h) && s.closedBy(h.tail, int(h.active)) {
			return s.beyond(int(h.blocks)), slot
		}
	}
	s.blocks = slices.Clone(s.blocks)
	t.s.spans.push(spanKey{slot, ss.key}, s)
	return nil, 0
}

// settle applies what the dispatch decided; State.mu is held.
func (t *Turn) settle() {
	for _, e := range t.d.Effects() {
		if i, ok := t.view.slot(e.Worker); ok || e.N < 0 {
			t.apply(e, i)
		}
	}
	step, ok := t.d.Running()
	if ok == t.running.yes {
		return
	}
	if !ok {
		t.giveBack(&t.running, func(sl *slot) { sl.running-- })
		return
	}
	if i, found := t.view.slot(step.Worker); found {
		t.running = held{t.view.ref(i), true}
		t.s.slots[i].running++
	}
}

func (t *Turn) apply(e kvc.Effect, i int) {
	switch e.Kind {
	case kvc.EffectInflight:
		if e.N < 0 {
			t.giveBack(&t.inflight, func(sl *slot) { sl.inflight += e.N })
			return
		}
		t.inflight = held{t.view.ref(i), true}
		t.s.slots[i].inflight += e.N
	case kvc.EffectPrefillTokens:
		if e.N < 0 {
			t.giveBack(&t.prefill, func(sl *slot) { sl.prefill += e.N })
			return
		}
		t.prefill = held{t.view.ref(i), true}
		t.s.slots[i].prefill += e.N
	case kvc.EffectAssigned:
		sl := &t.s.slots[i]
		sl.assigned, sl.assignedT = sl.assignedNow(t.view.now, &t.s.params)+1, t.view.now
	default:
		if t.view.ss != nil {
			t.applySession(e.Kind, t.view.ref(i))
		}
	}
}

// giveBack undoes what h holds, unless its worker has gone meanwhile and taken
// its counters along.
func (t *Turn) giveBack(h *held, undo func(*slot)) {
	if h.yes {
		h.yes = false
		if sl := &t.s.slots[h.slot]; sl.gen == h.gen {
			undo(sl)
		}
	}
}

func (t *Turn) applySession(k kvc.EffectKind, d ref) {
	ss := t.view.ss
	switch k {
	case kvc.EffectReject:
		ss.rejected(d, t.view.now, &t.s.params)
	case kvc.EffectResetRejects:
		ss.resetRejects(d)
	case kvc.EffectHalveOthers:
		ss.halveOthers(d)
	case kvc.EffectResetSession:
		ss.rejects = nil
	case kvc.EffectPin:
		if ss.pinned && ss.pin != d {
			t.s.pinChanges++
		}
		ss.pin, ss.pinned, ss.lost = d, true, false
	}
}
