package sidecar

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

const (
	// evidenceTokens is how much a turn must have been thought to find before
	// its cached_tokens prove anything.
	evidenceTokens = 1024
	// strikes is how many turns or polls in a row must say that the cache is
	// gone. One may be an eviction of that session alone, or a race.
	strikes = 2
)

// correction holds what the polls hold against the ledger so far.
type correction struct {
	// countsCache is set once an idle engine was seen to count its cache in
	// num_used_tokens. Stock SGLang does not (evictable tokens are free to it),
	// so there a low count proves nothing; with --enable-metrics it is asked.
	countsCache atomic.Bool
	empty       int // idle looks in a row that saw far fewer tokens than the ledger
	idle        int // polls of an idle engine
}

// correct compares an idle engine with the ledger: an emptied cache
// (/flush_cache by somebody else) shows as far fewer tokens held.
func (s *Sidecar) correct(ctx context.Context, load *sglang.Load) {
	g, _ := s.book.gauges()
	if !load.Idle() || g.Active > 0 || g.Used < evidenceTokens {
		s.fix.empty = 0
		return
	}
	held, known := s.held(ctx, load, g.Used)
	switch {
	case !known:
	case held*4 >= g.Used:
		s.fix.empty = 0
	default:
		if s.fix.empty++; s.fix.empty >= strikes {
			s.fix.empty = 0
			s.clear("loads")
		}
	}
}

// metricsEvery is how many idle polls pass between two reads of an engine's
// metrics: they are collected from every process of it.
const metricsEvery = 5

// held is how many tokens the engine's cache holds, when anything tells.
func (s *Sidecar) held(ctx context.Context, load *sglang.Load, used int) (tokens int, known bool) {
	if load.UsedTokens*2 >= used {
		s.fix.countsCache.Store(true)
	}
	if s.fix.countsCache.Load() {
		return load.UsedTokens, true
	}
	s.fix.idle++
	if !s.book.current().info.Metrics || s.fix.idle%metricsEvery != 0 {
		return 0, false
	}
	tokens, err := s.engine.CacheTokens(ctx)
	if err != nil {
		return 0, false
	}
	return tokens, true
}

// evidence reads a finished direct turn: when the engine found nothing of what
// the ledger thought resident, not even the boilerplate that every session
// shares, its cache was flushed. With a prefill leg cached_tokens are P's, and
// without --enable-cache-report they are unknown; neither proves anything.
func (s *Sidecar) evidence(t *turn, obs *sglang.Observed, o kvc.Outcome) (flushed bool) {
	if o != kvc.OutcomeOK || !obs.HasUsage || !t.inc.info.CacheReport ||
		t.handover() || t.expected.Resident < evidenceTokens {
		return false
	}
	s.evidenceMu.Lock()
	defer s.evidenceMu.Unlock()
	if obs.Usage.CachedTokens > 0 {
		s.missedTurns = 0
		return false
	}
	s.missedTurns++
	if s.missedTurns < strikes {
		return false
	}
	s.missedTurns = 0
	return true
}

// clear empties the ledger: the engine's cache is gone, whatever we believed.
func (s *Sidecar) clear(cause string) {
	s.cfg.Log.Warn("the engine's cache was emptied; forgetting what was resident", "evidence", cause)
	s.metrics.clears.WithLabelValues(cause).Inc()
	s.book.do(func(l *kvc.Ledger, now time.Time) {
		if l != nil {
			clear(s.book.grants) // their leases are void
			l.Clear(now)
		}
	})
}
