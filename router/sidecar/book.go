package sidecar

import (
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
)

// book serialises one engine incarnation's ledger and everything whose order
// matters to followers: every change of it happens in do.
type book struct {
	mu  sync.Mutex
	now func() time.Time
	out *feed.Server

	l      *kvc.Ledger // nil until the engine has been seen
	inc    *incarnation
	turns  map[string]*turn // between begin and end, by attempt
	grants map[string]grant // leases given and not yet presented, by id
	queue  []*waiter        // fallback turns waiting for room, first come first served
	ending *turn            // whose end is being published

	state  lifecycle
	totals totals

	dirty   chan struct{} // capacity 1: the journal is behind
	changed chan struct{} // closed and replaced when a turn ends
}

// grant remembers what a lease was granted for: the mode is the worker's to
// say, so the turn that presents the lease does not repeat it.
type grant struct {
	attempt string
	mode    kvc.Mode
	until   time.Time
}

func newBook(now func() time.Time) *book {
	return &book{
		now:   now,
		turns: map[string]*turn{}, grants: map[string]grant{},
		state: lifecycle{name: stateActive}, totals: totals{refusals: map[kvc.Reason]int64{}},
		dirty: make(chan struct{}, 1), changed: make(chan struct{}),
	}
}

// do runs f under the lock and then publishes what it changed, starts the
// queued turns that now fit, and wakes who waits for changes.
func (b *book) do(f func(l *kvc.Ledger, now time.Time)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.now()
	b.expire(now)
	f(b.l, now)
	if b.l == nil {
		return
	}
	b.pumpQueue(now)
	b.publish()
	b.ending = nil
}

// publish sends the ledger's changes to the feed.
func (b *book) publish() {
	changes := b.l.Changes()
	if len(changes) == 0 {
		return
	}
	for i := range changes {
		if c, t := &changes[i], b.ending; c.Kind == kvc.ChangeTurn && t != nil && t.q.Attempt == c.Turn.Attempt {
			c.Turn.Mode = t.mode // the route's own, see adapt
		}
	}
	b.out.Publish(changes...)
	poke(b.dirty)
}

// adopt starts a new incarnation with an empty or restored ledger; its feed
// begins behind seq. Turns of the old one end on the old ledger, where nobody
// looks any more.
func (b *book) adopt(inc *incarnation, l *kvc.Ledger, hello feed.Hello, seq uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.l != nil {
		b.totals.evicted += b.l.EvictedTokens()
	}
	b.inc, b.l = inc, l
	clear(b.grants)
	l.Changes() // a restored ledger reaches followers as a snapshot
	b.out.Restart(hello, max(seq, b.out.Seq()))
	b.pumpQueue(b.now())
	b.publish()
	poke(b.dirty)
}

// maxTick bounds how late an idle worker notices a deadline; a busy one notices
// with every turn.
const maxTick = 100 * time.Millisecond

// tick lets time pass in the ledger and says when it wants to be called again.
func (b *book) tick() (next time.Duration) {
	next = maxTick
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l == nil {
			return
		}
		next = min(next, l.Tick(now))
		b.state.enforce(now, b.turns)
	})
	return max(next, time.Millisecond)
}

// expire forgets the grants whose lease the ledger frees at this moment.
func (b *book) expire(now time.Time) {
	for id, g := range b.grants {
		if !now.Before(g.until) {
			delete(b.grants, id)
			b.totals.expired++
		}
	}
}

// admit is Algorithm 2 with what surrounds it: epoch, state, accounting.
func (b *book) admit(q kvc.Question, epoch string) (v kvc.Verdict, err error) {
	err = errNotReady
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l == nil {
			return
		}
		v, err = b.decide(l, q, epoch, now), nil
	})
	return v, err
}

// decide asks the ledger and applies the state: a draining worker takes no new
// session, and none at all after its soft deadline.
func (b *book) decide(l *kvc.Ledger, q kvc.Question, epoch string, now time.Time) kvc.Verdict {
	if epoch != "" && epoch != b.inc.epoch {
		return b.refuse(kvc.ReasonStaleEpoch)
	}
	v := l.Admit(q, now)
	if !v.CanAdmit {
		b.totals.refusals[v.Reason]++
		return v
	}
	if !b.state.takes(known(v), now) {
		l.Release(v.Lease.ID, now)
		return b.refuse(kvc.ReasonDraining)
	}
	b.grants[v.Lease.ID] = grant{attempt: q.Attempt, mode: v.Mode, until: now.Add(v.Lease.TTL)}
	return v
}

// known reports whether an admission is of a session that lives here.
func known(v kvc.Verdict) bool {
	return v.Mode == kvc.Direct || v.Mode == kvc.Delta || v.Reason == kvc.ReasonLargeAppend
}

func (b *book) refuse(r kvc.Reason) kvc.Verdict {
	b.totals.refusals[r]++
	return kvc.Verdict{Reason: r}
}

// release gives back a lease that will not be presented.
func (b *book) release(lease string) {
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l != nil {
			delete(b.grants, lease)
			l.Release(lease, now)
		}
	})
}

// present starts t under a lease. The blocks that t's own body hashed to win
// over those the lease was granted for.
func (b *book) present(l *kvc.Ledger, t *turn, lease string, now time.Time) kvc.Reason {
	g, ok := b.grants[lease]
	if !ok || g.attempt != t.q.Attempt || b.turns[t.q.Attempt] != nil {
		return b.refuse(kvc.ReasonLeaseExpired).Reason
	}
	delete(b.grants, lease)
	t.mode = g.mode
	if t.mismatch {
		l.Release(lease, now)
		l.BeginUnadmitted(t.q, t.mode, now)
	} else if r, ok := l.Begin(lease, t.q.Attempt, now); !ok {
		return b.refuse(r).Reason
	}
	b.start(t, l)
	return kvc.ReasonNone
}

// startUnadmitted starts a turn that was not asked for: a fallback, or a
// prefill leg. An attempt that runs already is refused like a lease that was
// presented before.
func (b *book) startUnadmitted(l *kvc.Ledger, t *turn, m kvc.Mode, now time.Time) kvc.Reason {
	if b.turns[t.q.Attempt] != nil {
		return b.refuse(kvc.ReasonLeaseExpired).Reason
	}
	t.mode = m
	l.BeginUnadmitted(t.q, m, now)
	b.start(t, l)
	return kvc.ReasonNone
}

func (b *book) start(t *turn, l *kvc.Ledger) {
	t.ledger = l
	if e, ok := l.Expected(t.q.Attempt); ok {
		t.expected = e
	}
	b.turns[t.q.Attempt] = t
}

// end finishes t: exactly once counts (R57).
func (b *book) end(t *turn, u kvc.Usage, o kvc.Outcome) {
	b.do(func(l *kvc.Ledger, now time.Time) {
		if b.turns[t.q.Attempt] != t {
			return
		}
		delete(b.turns, t.q.Attempt)
		b.ending = t
		t.ledger.End(t.q.Attempt, u, o, now)
		b.totals.add(t, u)
		close(b.changed)
		b.changed = make(chan struct{})
	})
}

// inFlight counts turns between begin and end, with a channel that is closed
// when the count may have changed.
func (b *book) inFlight() (int, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.turns) + len(b.queue), b.changed
}

// current is the incarnation in force, nil before the engine was seen.
func (b *book) current() *incarnation {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inc
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
