package sidecar

import (
	"context"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
)

// waiter is a fallback turn that waits for room.
type waiter struct {
	t       *turn
	started chan struct{} // closed when the turn has left the queue to begin
	reason  kvc.Reason    // set before that, when it could not
}

// join begins a fallback turn, or queues it until the ledger says it fits
// (Q10): first come first served, bounded in number and in time. It returns the
// reason for giving up, or ctx's error when the peer left.
func (b *book) join(ctx context.Context, t *turn, limit int, wait time.Duration) (kvc.Reason, error) {
	w, reason, err := b.enqueue(t, limit)
	if w == nil || reason != kvc.ReasonNone || err != nil {
		return reason, err
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-w.started:
		return w.reason, nil
	case <-timer.C:
		if b.leave(w) {
			return b.count(kvc.ReasonQueueFull), nil
		}
		return w.reason, nil
	case <-ctx.Done():
		if !b.leave(w) { // it began in this very moment
			b.end(t, kvc.Usage{}, kvc.OutcomeCancelled)
		}
		return kvc.ReasonNone, ctx.Err()
	}
}

// enqueue begins t at once when nobody waits and it fits; else w is its place.
func (b *book) enqueue(t *turn, limit int) (w *waiter, reason kvc.Reason, err error) {
	err = errNotReady
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l == nil {
			return
		}
		err = nil
		switch {
		case t.in.Epoch != "" && t.in.Epoch != b.inc.epoch:
			reason = b.refuse(kvc.ReasonStaleEpoch).Reason
		case !b.state.takes(false, now):
			reason = b.refuse(kvc.ReasonDraining).Reason
		case len(b.queue) == 0 && b.fits(l, t, now):
			reason = b.startUnadmitted(l, t, kvc.Fallback, now)
		case len(b.queue) >= limit:
			reason = b.refuse(kvc.ReasonQueueFull).Reason
		default:
			w = &waiter{t: t, started: make(chan struct{})}
			b.queue = append(b.queue, w)
		}
	})
	return w, reason, err
}

// fits lets a turn in when the ledger has room, and when nothing runs at all:
// what is too large for the whole engine gets the engine's own answer, and
// waiting would not help it.
func (b *book) fits(l *kvc.Ledger, t *turn, now time.Time) bool {
	return l.Fits(t.q, now) || len(b.turns) == 0 && len(b.grants) == 0
}

// pumpQueue starts the waiters at the head that fit now.
func (b *book) pumpQueue(now time.Time) {
	for len(b.queue) > 0 && b.fits(b.l, b.queue[0].t, now) {
		w := b.queue[0]
		b.queue = b.queue[1:]
		w.reason = b.startUnadmitted(b.l, w.t, kvc.Fallback, now)
		close(w.started)
	}
}

// leave removes w from the queue; false when it has begun already.
func (b *book) leave(w *waiter) (left bool) {
	b.do(func(*kvc.Ledger, time.Time) {
		for i, o := range b.queue {
			if o == w {
				b.queue = append(b.queue[:i:i], b.queue[i+1:]...)
				left = true
				return
			}
		}
	})
	return left
}

func (b *book) count(r kvc.Reason) kvc.Reason {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.refuse(r).Reason
}
