package sidecar

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// readiness is what /readyz and the status say.
type readiness struct {
	ready  bool
	reason string
}

func (s *Sidecar) setReady(ready bool, reason string) {
	if old := s.ready.Swap(&readiness{ready, reason}); old == nil || *old != (readiness{ready, reason}) {
		s.cfg.Log.Info("readiness changed", "ready", ready, "reason", reason)
	}
}

// warmUp runs the first health check and the probes, once per incarnation and
// one at a time, beside the polls: a health check takes a second or more.
func (s *Sidecar) warmUp() {
	if s.warmed.Load() || !s.warming.CompareAndSwap(false, true) {
		return
	}
	s.tasks.Go(func() {
		defer s.warming.Store(false)
		s.warm(s.ctx)
	})
}

func (s *Sidecar) warm(ctx context.Context) {
	inc := s.book.current()
	hctx, cancel := context.WithTimeout(ctx, warmTimeout)
	err := s.engine.Health(hctx)
	cancel()
	if err != nil {
		s.notWarm(ctx, fmt.Sprintf("the engine is not healthy yet: %v", err))
		return
	}
	pctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	paths, err := s.probe(pctx, inc)
	if err != nil {
		s.notWarm(ctx, err.Error())
		return
	}
	if !s.settle(inc, paths) {
		s.doubt() // it restarted meanwhile
		return
	}
	s.warmed.Store(true)
	s.setReady(true, "")
}

// notWarm reports why, and asks for another try.
func (s *Sidecar) notWarm(ctx context.Context, reason string) {
	if ctx.Err() == nil {
		s.setReady(false, reason)
		s.doubt()
	}
}

// probe asks, per route, whether the engine does what the profile claims
// (sglang-contract §2.6). It only confirms or refuses; a null engine is never
// asked, since it would say yes to anything.
func (s *Sidecar) probe(ctx context.Context, inc *incarnation) (map[block.Route]kvc.DirectPath, error) {
	paths := maps.Clone(inc.paths)
	if s.cfg.Role != fleet.Decode {
		return paths, nil
	}
	switch s.cfg.DirectPath {
	case kvc.NativeAdmission:
		ok, err := s.engine.ProbeNativeAdmission(ctx)
		if err == nil && !ok {
			err = errors.New("the engine has no /admit_direct_append; NativeAdmission needs a patched engine")
		}
		return paths, err
	case kvc.ConditionalAggregation:
		return paths, s.probeLocalPrefill(ctx, inc, paths)
	}
	return paths, nil
}

// probeLocalPrefill leaves ConditionalAggregation on the routes that have it. A
// route that drops the field still has the decode radix cache, so it runs
// resident turns as DeltaTransfer; when no route has it, the profile is wrong.
func (s *Sidecar) probeLocalPrefill(ctx context.Context, inc *incarnation, paths map[block.Route]kvc.DirectPath) error {
	found := false
	for _, r := range routes {
		ok, err := s.engine.ProbeLocalPrefill(ctx, r, inc.model)
		if err != nil {
			return err
		}
		found = found || ok
		if !ok {
			paths[r] = kvc.DeltaTransfer
		}
	}
	if !found {
		return errors.New("the engine refuses do_local_prefill; start it with " +
			"--disaggregation-decode-enable-conditional-agg on a build that has the conditional aggregation patch " +
			"(sgl-project/sglang#34773), or choose DeltaTransfer")
	}
	return nil
}

// settle puts probed paths in force. Turns hold the incarnation they began with,
// so it is replaced, never changed; followers come back to hear of it. False
// when the engine is another by now.
func (s *Sidecar) settle(inc *incarnation, paths map[block.Route]kvc.DirectPath) bool {
	b := s.book
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inc != inc {
		return false
	}
	if !maps.Equal(inc.paths, paths) {
		next := *inc
		next.paths = paths
		b.inc = &next
		b.out.Restart(s.hello(&next, b.l), b.out.Seq())
	}
	return true
}

// watchLedger lets time pass in the ledger.
func (s *Sidecar) watchLedger(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		timer.Reset(s.book.tick())
	}
}
