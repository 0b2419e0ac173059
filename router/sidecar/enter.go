package sidecar

import (
	"context"
	"encoding/json"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// enterPrefill puts a prefill leg on the book: a P worker refuses nothing but
// what was meant for another incarnation.
func (b *book) enterPrefill(t *turn) (reason kvc.Reason, err error) {
	err = errNotReady
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l == nil {
			return
		}
		err = nil
		if reason = b.stale(t.in.Epoch); reason == kvc.ReasonNone {
			reason = b.startUnadmitted(l, t, kvc.ModeNone, now) // only D knows the mode
		}
	})
	return reason, err
}

// enterLease puts a turn with a lease on the book.
func (b *book) enterLease(t *turn, lease string) (reason kvc.Reason, err error) {
	err = errNotReady
	b.do(func(l *kvc.Ledger, now time.Time) {
		if l == nil {
			return
		}
		err = nil
		if reason = b.stale(t.in.Epoch); reason == kvc.ReasonNone {
			reason = b.present(l, t, lease, now)
		}
	})
	return reason, err
}

func (b *book) stale(epoch string) kvc.Reason {
	if epoch == "" || epoch == b.inc.epoch {
		return kvc.ReasonNone
	}
	return b.refuse(kvc.ReasonStaleEpoch).Reason
}

// admit answers a question: the ledger, and on a NativeAdmission engine also
// the engine itself. Both must agree: the ledger holds the lease, the engine
// knows its own cache.
func (s *Sidecar) admit(ctx context.Context, q kvc.Question, epoch string, route block.Route) (kvc.Verdict, error) {
	started := s.cfg.Now()
	v, err := s.book.admit(q, epoch)
	if err == nil && v.CanAdmit {
		v = s.adapt(ctx, q, v, route)
	}
	if err == nil {
		s.metrics.verdict(v, s.cfg.Now().Sub(started))
	}
	return v, err
}

// adapt fits an admission to what this route of the engine can do.
func (s *Sidecar) adapt(ctx context.Context, q kvc.Question, v kvc.Verdict, route block.Route) kvc.Verdict {
	inc := s.book.current()
	switch path := inc.path(route); {
	case path == kvc.DeltaTransfer && v.Mode == kvc.Direct:
		v.Mode = kvc.Delta
	case path == kvc.NativeAdmission:
		v = s.nativeAdmit(ctx, inc, q, v, route)
	default:
		return v
	}
	if !v.CanAdmit {
		s.book.release(v.Lease.ID)
		v.Lease = kvc.Lease{}
		return v
	}
	s.book.regrant(v.Lease.ID, v.Mode)
	return v
}

// regrant changes the mode that a lease was granted for.
func (b *book) regrant(lease string, m kvc.Mode) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g, ok := b.grants[lease]; ok {
		g.mode = m
		b.grants[lease] = g
	}
}

// nativeAdmit relays the question to the engine's own /admit_direct_append and
// translates its answer. An engine that does not answer refuses nothing: the
// ledger's verdict stands.
func (s *Sidecar) nativeAdmit(
	ctx context.Context, inc *incarnation, q kvc.Question, v kvc.Verdict, route block.Route,
) kvc.Verdict {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	a, err := s.engine.AdmitDirectAppend(ctx, admission.NewQuestion(q, inc.epoch, route))
	if err != nil {
		s.metrics.nativeErrors.Inc()
		return v
	}
	v.ResidentTokens, v.AppendTokens, v.FreeTokens = a.ResidentTokens, a.AppendTokens, a.FreeTokens
	if !a.CanAdmit {
		v.CanAdmit, v.Mode, v.Reason = false, kvc.ModeNone, nativeReason(a.Reason)
		return v
	}
	if m, ok := kvc.ParseMode(a.Mode); ok && m != kvc.ModeNone && m != kvc.Fallback {
		v.Mode = m
	}
	return v
}

// nativeReason keeps the set of reasons closed: it is a metric label.
func nativeReason(s string) kvc.Reason {
	switch r := kvc.Reason(s); r {
	case kvc.ReasonRealLargeAppend, kvc.ReasonNotResidentNoCapacity, kvc.ReasonClassBudget, kvc.ReasonDraining:
		return r
	}
	return kvc.ReasonNoCapacity
}

// answer serves POST /admit_direct_append.
func (s *Sidecar) answer(ctx context.Context, in admission.Question) (admission.Verdict, error) {
	q, err := in.Core()
	if err != nil {
		return admission.Verdict{}, &admission.BadQuestionError{Err: err}
	}
	v, err := s.admit(ctx, q, in.Epoch, block.Route(in.Route))
	if err != nil {
		return admission.Verdict{}, err
	}
	return s.wireVerdict(v), nil
}

// wireVerdict signs a verdict with who gives it.
func (s *Sidecar) wireVerdict(v kvc.Verdict) admission.Verdict {
	w := admission.NewVerdict(v)
	w.Worker = s.cfg.Worker
	s.book.mu.Lock()
	defer s.book.mu.Unlock()
	w.State = s.book.state.name
	if s.book.inc != nil {
		w.Epoch = s.book.inc.epoch
	}
	return w
}

func oneLine(v admission.Verdict) string {
	b, err := json.Marshal(v)
	if err != nil { // plain members always encode
		return "{}"
	}
	return string(b)
}
