package emulator

import (
	"slices"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/router/radix"
	"github.com/kvc-dev/kvc/router/sim"
)

// Mode is --disaggregation-mode.
type Mode string

// The modes of an engine (contract §1.2).
const (
	ModeNull    Mode = "null"
	ModePrefill Mode = "prefill"
	ModeDecode  Mode = "decode"
)

// coreConfig is what the scheduler needs to know.
type coreConfig struct {
	mode       Mode
	cost       sim.Cost
	link       sim.Link
	capacity   int // tokens
	pageSize   int
	host       int // tokens of the tier in host memory; 0 = none
	noRadix    bool
	chunk      int // tokens of prefill in one pass; ≤ 0 = no limit
	maxRunning int
	reserved   int // tokens kept free per sequence at preallocation
	contextLen int
	localOK    bool // conditional aggregation
	seed       uint64
	hash       radix.Hasher
}

// step is one forward pass: some prefill and one token for each running
// sequence.
type step struct {
	busy   bool
	end    time.Duration
	parts  []part
	decode []*sequence
}

// part is how much of one sequence a pass prefills.
type part struct {
	seq *sequence
	n   int
}

// timer is a transfer that ends at a known time.
type timer struct {
	at  time.Duration
	seq *sequence
}

// effect is something the core wants done in the world outside.
type effect struct {
	kind effectKind
	seq  *sequence
}

type effectKind uint8

const (
	effectDiscover  effectKind = iota // decode: find the prefill worker
	effectJoin                        // decode: KV is allocated, tell the prefill worker
	effectAbortRoom                   // decode: give the room up
	effectDelivered                   // prefill: KV has arrived on the decode side
	effectRefused                     // prefill: the transfer failed
	effectCrash                       // the real engine's scheduler would die here
)

// core is the engine's scheduler: one forward pass at a time, prefill in chunks
// and in order of arrival, decode in one batch. It has no clock: time is
// emulated, starts at 0 and comes in with advance.
//
// Invariants: a sequence is in exactly one place; KV used never exceeds the
// capacity (radix.Cache); a sequence that is done holds no KV.
type core struct {
	cfg  coreConfig
	kv   *radix.Cache
	host *radix.Cache // a copy of all that was computed, in host memory; nil = none
	now  time.Duration

	seqs  map[*sequence]struct{} // everything not done
	rooms map[uint64]*sequence   // live rooms
	early map[uint64]int         // prefill: rooms whose decode side came first, and its prefix
	order uint64

	bootstrapping []*sequence
	prealloc      []*sequence
	joining       []*sequence
	waiting       []*sequence
	retracted     []*sequence
	partial       *sequence // the sequence whose prefill is cut into chunks
	running       []*sequence

	step     step
	timers   []timer // by time
	linkFree time.Duration
	effects  []effect
	count    counters
}

func newCore(cfg coreConfig) *core {
	c := &core{
		cfg:   cfg,
		seqs:  map[*sequence]struct{}{},
		rooms: map[uint64]*sequence{},
		early: map[uint64]int{},
		kv: radix.New(radix.Config{
			Capacity: cfg.capacity, PageSize: cfg.pageSize, Disabled: cfg.noRadix, Hash: cfg.hash,
		}),
	}
	if cfg.host > 0 && !cfg.noRadix {
		c.host = radix.New(radix.Config{Capacity: cfg.host, PageSize: cfg.pageSize})
	}
	return c
}

// submit accepts a sequence; one that is refused ends at once.
func (c *core) submit(s *sequence) {
	c.order++
	s.order, s.arrived = c.order, c.now
	c.seqs[s] = struct{}{}
	c.count.requests++
	if f, ok := c.admissible(s); !ok {
		c.finish(s, f)
		return
	}
	s.writer = newWriter(c.cfg.seed, s.tokens[:s.prompt], s.sample)
	s.writer.plan(c.limit(s), s.sampling.minNew, s.sampling.ignoreEOS)

	switch {
	case c.cfg.mode == ModeNull || s.local:
		s.state = stateWaiting
		c.waiting = append(c.waiting, s)
	case c.cfg.mode == ModePrefill:
		c.submitPrefill(s)
	default:
		c.submitDecode(s)
	}
	c.start()
}

// limit clips the output to what the engine could ever hold.
func (c *core) limit(s *sequence) int {
	most := min(c.cfg.contextLen, c.kv.Capacity()) - 1 - s.prompt
	if s.sampling.maxNew > 0 {
		most = min(most, s.sampling.maxNew)
	}
	return max(most, 1)
}

// finish ends a sequence: its KV is unlocked, its place is freed, its handler
// told. last are tokens that come with the end.
func (c *core) finish(s *sequence, f finish, last ...int32) {
	if s.state == stateDone {
		return
	}
	c.remove(s)
	if f.kind == "abort" {
		c.count.aborted++
	}
	if s.turn != nil {
		s.turn.End()
	}
	s.state, s.doneAt = stateDone, c.now
	delete(c.seqs, s)
	s.out.put(func(b *batch) {
		b.tokens = append(b.tokens, last...)
		b.done, b.finish = true, f
		b.cached, b.fromHost, b.retractions = s.reported, s.fromHost, s.retractions
		b.latency = s.doneAt - s.arrived
	})
}

// remove takes s out of whatever list it is in.
func (c *core) remove(s *sequence) {
	if c.partial == s {
		c.partial = nil
	}
	for _, list := range []*[]*sequence{
		&c.bootstrapping, &c.prealloc, &c.joining, &c.waiting, &c.retracted, &c.running,
	} {
		if i := slices.Index(*list, s); i >= 0 {
			*list = slices.Delete(*list, i, i+1)
		}
	}
	c.timers = slices.DeleteFunc(c.timers, func(t timer) bool { return t.seq == s })
	if s.boot.set && c.rooms[s.boot.room] == s {
		delete(c.rooms, s.boot.room)
	}
}

// abort ends s from outside: a client that hung up, or /abort_request.
func (c *core) abort(s *sequence, why finish) {
	if s.state == stateDone {
		return
	}
	c.giveUpRoom(s)
	c.finish(s, why)
	c.start()
}

// abortPrefix ends every sequence whose rid begins with prefix (contract §4.5),
// or all of them.
func (c *core) abortPrefix(prefix string, all bool) {
	var hit []*sequence
	for s := range c.seqs {
		if all || prefix != "" && strings.HasPrefix(s.rid, prefix) {
			hit = append(hit, s)
		}
	}
	slices.SortFunc(hit, func(a, b *sequence) int { return int(a.order) - int(b.order) })
	for _, s := range hit {
		why := abortFinish(0, "Aborted by AbortReq.")
		if s.state == stateWaiting && s.computed == 0 {
			why.message = "Abort in waiting queue"
		}
		c.abort(s, why)
	}
}

// flush empties the cache; it refuses while anything is queued or running.
func (c *core) flush() bool {
	if len(c.seqs) > 0 || !c.kv.Flush() {
		return false
	}
	return c.host == nil || c.host.Flush()
}

// next returns when advance wants to be called again; ok is false when only a
// new request or a peer can change anything. coarse means that nothing but
// later tokens of running sequences happens then, so that a little later will
// do.
func (c *core) next() (at time.Duration, coarse, ok bool) {
	if c.step.busy {
		at, ok = c.step.end, true
	}
	if len(c.timers) > 0 && (!ok || c.timers[0].at < at) {
		return c.timers[0].at, false, true
	}
	coarse = ok && len(c.step.parts) == 0 && len(c.waiting) == 0 && len(c.timers) == 0
	return at, coarse, ok
}

// advance brings the machine to time now: passes and transfers that end by
// then end, each at its own time, and new passes begin.
func (c *core) advance(now time.Duration) {
	for {
		at, _, ok := c.next()
		if !ok || at > now {
			break
		}
		c.now = max(c.now, at)
		if len(c.timers) > 0 && c.timers[0].at == at {
			t := c.timers[0]
			c.timers = c.timers[1:]
			c.transferred(t.seq)
		} else {
			c.complete()
		}
		c.start()
	}
	c.now = max(c.now, now)
}

// start begins a pass when the engine is idle and there is work.
func (c *core) start() {
	if c.step.busy {
		return
	}
	c.preallocate()
	c.absorb()
	parts := c.schedulePrefill()
	c.makeRoom()
	decode := slices.Clone(c.running)
	if len(parts) == 0 && len(decode) == 0 {
		return
	}
	var cost time.Duration
	for _, p := range parts {
		cost += c.cfg.cost.PrefillWork(p.n, p.seq.computed)
		if p.seq.loadBack > 0 {
			cost += c.cfg.cost.Transfer(p.seq.loadBack, sim.HostLink())
			p.seq.loadBack = 0
		}
	}
	if len(parts) > 0 {
		cost += c.cfg.cost.PrefillBase
	}
	cost += c.cfg.cost.DecodeStep(len(decode))
	c.count.busy(cost)
	c.step = step{busy: true, end: c.now + cost, parts: parts, decode: decode}
}

// schedulePrefill fills one pass with prefill: the sequence in chunks first,
// then the queue in order of arrival, as far as the chunk and the KV go.
func (c *core) schedulePrefill() []part {
	budget := c.cfg.chunk
	if budget <= 0 {
		budget = int(^uint(0) >> 1)
	}
	var parts []part
	if s := c.partial; s != nil {
		p, ok := c.take(s, budget)
		if !ok {
			return nil
		}
		parts = append(parts, p)
		budget -= p.n
	}
	for budget > 0 && c.partial == nil && len(c.waiting) > 0 {
		s := c.waiting[0]
		if len(c.running)+len(parts) >= c.cfg.maxRunning || !c.admit(s) {
			break
		}
		c.waiting = c.waiting[1:]
		p, _ := c.take(s, budget)
		parts = append(parts, p)
		budget -= p.n
	}
	return parts
}

// admit begins the turn of the head of the queue if its KV fits beside what
// the running sequences are promised.
func (c *core) admit(s *sequence) bool {
	// One token is always computed: it gives the logits of the first output.
	s.turn = c.kv.Begin(s.tokens[:len(s.tokens)-1])
	promised := 0
	for _, r := range c.running {
		promised += c.promise(r)
	}
	if !c.hold(s, promised) {
		return false
	}
	s.loadBack = c.onHost(s)
	s.computed = s.turn.Cached() + s.loadBack
	if s.generated() == 0 {
		s.cached, s.reported, s.fromHost = s.computed, s.computed, s.loadBack
	}
	s.state = statePrefill
	return true
}

// promise is what s may still grow by, as far as the engine plans ahead.
func (c *core) promise(s *sequence) int {
	if c.cfg.mode == ModePrefill {
		return 0
	}
	return min(c.cfg.reserved, s.remaining())
}

// hold allocates the whole prompt of s beside what others are promised, or ends
// its turn. A sequence that is alone is not held to promises: it always fits.
func (c *core) hold(s *sequence, promised int) bool {
	need := len(s.tokens) - s.turn.Cached() + c.promise(s) + promised
	alone := c.kv.Turns() == 1
	if alone || need <= c.kv.Free()+c.kv.Evictable() {
		if s.turn.Extend(len(s.tokens)) {
			return true
		}
	}
	s.turn.End()
	s.turn = nil
	return false
}

// remaining is how many tokens s may still generate.
func (s *sequence) remaining() int { return s.writer.total() - s.generated() }

// take cuts the next chunk of s; the rest, if any, becomes the partial one.
func (c *core) take(s *sequence, budget int) (p part, ok bool) {
	left := len(s.tokens) - s.computed
	if left <= 0 {
		return part{}, false
	}
	p = part{seq: s, n: min(left, budget)}
	if p.n < left {
		c.partial = s
	} else if c.partial == s {
		c.partial = nil
	}
	return p, true
}

// onHost is how many tokens after the device's prefix of s the host tier has.
func (c *core) onHost(s *sequence) int {
	if c.host == nil {
		return 0
	}
	n := max(c.host.Peek(s.tokens[:len(s.tokens)-1])-s.turn.Cached(), 0)
	c.count.loadedBack += int64(n)
	return n
}

// commit puts the first n tokens of s into the cache, and through it into the
// host tier (write_through).
func (c *core) commit(s *sequence, n int) {
	s.turn.Commit(s.tokens[:n])
	if c.host != nil {
		t := c.host.Begin(s.tokens[:n])
		t.Commit(s.tokens[:n]) // no room: this much is not on the host
		t.End()
	}
}

// makeRoom gives every running sequence room for its next token, retracting
// the latest ones when the pool is full.
func (c *core) makeRoom() {
	for i := range len(c.running) {
		for i < len(c.running) && !c.running[i].turn.Extend(len(c.running[i].tokens)) {
			c.retract(c.running[len(c.running)-1])
		}
	}
}

// retract takes a sequence out of the batch: its KV is freed and computed again
// later (null mode), or kept in host memory and brought back (decode).
func (c *core) retract(s *sequence) {
	c.count.retractions++
	s.retractions++
	c.running = c.running[:len(c.running)-1]
	s.turn.End()
	s.turn = nil
	if c.cfg.mode == ModeDecode {
		s.state = stateRetracted
		c.retracted = append(c.retracted, s)
		return
	}
	s.state, s.computed = stateWaiting, 0
	c.waiting = slices.Insert(c.waiting, 0, s)
}

// complete ends the pass: chunks become cached, sequences whose prompt is done
// get their first token, running ones their next.
func (c *core) complete() {
	done := c.step
	c.step = step{}
	for _, p := range done.parts {
		if p.seq.state == stateDone {
			continue
		}
		c.count.prefilled(p.n)
		p.seq.computed += p.n
		c.commit(p.seq, p.seq.computed)
		if p.seq.computed == len(p.seq.tokens) {
			c.prefilled(p.seq)
		}
	}
	for _, s := range done.decode {
		if s.state == stateRunning {
			s.computed = len(s.tokens)
			c.generate(s, s.writer.token(s.generated()))
		}
	}
}

// prefilled is the end of a prompt's prefill.
func (c *core) prefilled(s *sequence) {
	first := s.writer.token(s.generated())
	if s.generated() == 0 {
		c.count.prompt(s)
	}
	if c.cfg.mode == ModePrefill {
		c.send(s, first)
		return
	}
	s.state = stateRunning
	c.running = append(c.running, s)
	c.generate(s, first)
}

// generate appends one token to a running sequence and ends it when that was
// the last.
func (c *core) generate(s *sequence, id int32) {
	if s.generated() == 0 {
		s.firstAt = c.now
	}
	s.tokens = append(s.tokens, id)
	c.count.generated(c.now)

	f, over := s.stopMatch(id)
	switch {
	case over:
	case s.generated() < s.writer.total():
		s.out.put(func(b *batch) { b.tokens, b.cached = append(b.tokens, id), s.reported })
		return
	case s.writer.stop:
		f = finish{kind: "stop", matchID: tokEnd}
	default:
		f = finish{kind: "length", length: s.generated()}
	}
	// The newest token was never an input, so its KV does not exist.
	if s.turn != nil && !s.boot.fake() {
		c.commit(s, len(s.tokens)-1)
	}
	c.finish(s, f, id)
}
