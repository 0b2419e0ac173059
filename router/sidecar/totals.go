package sidecar

import (
	"maps"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
)

// totals are monotonic since the sidecar's start (wire.md §5), in tokens.
type totals struct {
	prompt, generated, uncached, transferred int64
	evicted                                  int64 // of earlier incarnations; the ledger counts its own
	expired                                  int64 // leases
	refusals                                 map[kvc.Reason]int64
}

// cost is what one finished leg cost this worker, in tokens.
type cost struct{ prompt, cached, generated, uncached, transferred int }

// costOf reads a leg's usage. With a prefill leg, a decode worker computes
// nothing of the prompt and receives what was not resident; its cached_tokens
// are P's (sglang-contract §6.3), so the ledger's own expectation counts.
func costOf(t *turn, u kvc.Usage) cost {
	c := cost{prompt: u.PromptTokens, cached: min(u.CachedTokens, u.PromptTokens), generated: u.CompletionTokens}
	if t.handover() {
		c.transferred = max(u.PromptTokens-t.expected.Resident, 0)
	} else {
		c.uncached = c.prompt - c.cached
	}
	return c
}

func (s *totals) add(t *turn, u kvc.Usage) {
	c := costOf(t, u)
	s.prompt += int64(c.prompt)
	s.generated += int64(c.generated)
	s.uncached += int64(c.uncached)
	s.transferred += int64(c.transferred)
}

func (s *totals) wire(l *kvc.Ledger) admission.WorkerTotals {
	w := admission.WorkerTotals{
		PrefillUncachedTokens: s.uncached, PromptTokens: s.prompt, GeneratedTokens: s.generated,
		EvictedTokens: s.evicted, TransferredTokens: s.transferred,
		Refusals: map[string]int64{},
	}
	if l != nil {
		w.EvictedTokens += l.EvictedTokens()
	}
	for r, n := range maps.All(s.refusals) {
		w.Refusals[string(r)] = n
	}
	return w
}
