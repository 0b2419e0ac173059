package sidecar

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

const (
	stateActive   = string(fleet.Active)
	stateDraining = string(fleet.Draining)
)

// lifecycle is Active or Draining with its deadlines (wire.md §6). The zero
// deadline is none.
type lifecycle struct {
	name       string
	soft, hard time.Time
}

// takes reports whether a turn may begin: a draining worker takes the sessions
// it knows until the soft deadline, and nothing new.
func (s *lifecycle) takes(known bool, now time.Time) bool {
	if s.name != stateDraining {
		return true
	}
	return known && (s.soft.IsZero() || now.Before(s.soft))
}

// enforce ends every stream once the hard deadline has passed.
func (s *lifecycle) enforce(now time.Time, turns map[string]*turn) {
	if s.name != stateDraining || s.hard.IsZero() || now.Before(s.hard) {
		return
	}
	for _, t := range turns {
		t.stop()
	}
}

// setState is idempotent: followers hear of it only when it changed.
func (b *book) setState(s lifecycle) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s == b.state {
		return
	}
	b.state = s
	b.out.PublishState(s.name, s.soft, s.hard)
}

// drain begins draining, keeping deadlines that were set before.
func (b *book) drain() {
	b.mu.Lock()
	s := b.state
	b.mu.Unlock()
	s.name = stateDraining
	b.setState(s)
}

// idle waits until no turn runs or waits.
func (b *book) idle(ctx context.Context) error {
	for {
		n, changed := b.inFlight()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *Sidecar) putState(w http.ResponseWriter, r *http.Request) {
	var in admission.State
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10)).Decode(&in); err != nil {
		admission.WriteError(w, http.StatusBadRequest, "state: "+err.Error())
		return
	}
	if in.State != stateActive && in.State != stateDraining {
		admission.WriteError(w, http.StatusBadRequest, "state: want Active or Draining")
		return
	}
	next := lifecycle{name: in.State}
	if in.State == stateDraining {
		next.soft, next.hard = fromMS(in.SoftDeadlineMS), fromMS(in.HardDeadlineMS)
	}
	s.book.setState(next)
	w.WriteHeader(http.StatusNoContent)
}

// preStop holds the engine's termination back until nothing is in flight, or
// until five seconds before the kubelet would kill it anyway.
func (s *Sidecar) preStop(w http.ResponseWriter, r *http.Request) {
	nonce := r.PathValue("nonce")
	if s.cfg.PreStopNonce == "" || subtle.ConstantTimeCompare([]byte(nonce), []byte(s.cfg.PreStopNonce)) != 1 {
		notFound(w, r)
		return
	}
	s.book.drain()
	ctx, cancel := context.WithTimeout(r.Context(), max(s.cfg.Grace-5*time.Second, 0))
	defer cancel()
	if err := s.book.idle(ctx); err != nil {
		n, _ := s.book.inFlight()
		s.cfg.Log.Warn("termination grace is over with turns in flight", "in_flight", n)
	}
	w.WriteHeader(http.StatusNoContent)
}

func (s *Sidecar) forget(w http.ResponseWriter, r *http.Request) {
	key := kvc.SessionKey(r.PathValue("key"))
	s.book.do(func(l *kvc.Ledger, now time.Time) {
		if l != nil {
			l.Forget(key, now)
		}
	})
	w.WriteHeader(http.StatusNoContent)
}

func (s *Sidecar) releaseLease(w http.ResponseWriter, r *http.Request) {
	s.book.release(r.PathValue("id"))
	w.WriteHeader(http.StatusNoContent)
}

func fromMS(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// unixMS is a time on the wire; the zero time is 0, none.
func unixMS(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
