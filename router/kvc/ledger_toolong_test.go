package kvc

import (
	"testing"
	"time"
)

// A prompt that the engine will refuse as too long costs nobody their KV: the
// engine evicts nothing for it, so the ledger must not forget what is resident.
func TestTooLongPromptEvictsNothing(t *testing.T) {
	cases := map[string]struct {
		cfg    LedgerConfig
		blocks int
	}{
		"longer than the whole worker":         {LedgerConfig{}, 5000},
		"longer than the engine's input limit": {LedgerConfig{MaxInputTokens: 50_000}, 3000},
		"the same on a prefill worker":         {LedgerConfig{MaxInputTokens: 50_000, Prefill: true}, 3000},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, tc.cfg)
			for _, s := range []SessionKey{"a", "b"} {
				b.fallback(s, chain(string(s), 900), 100)
			}
			b.wait(10 * time.Minute) // idle, unprotected
			before := b.l.Gauges(b.now)
			q := b.ask("long", 0, chain("long", tc.blocks))
			b.l.BeginUnadmitted(q, Fallback, b.now)
			b.checked()
			b.l.End(q.Attempt, Usage{}, OutcomeError, b.now)
			b.checked()
			after := b.l.Gauges(b.now)
			if after.Used != before.Used || b.l.EvictedTokens() != 0 {
				t.Errorf("used %d → %d, evicted %d: a refused prompt took KV", before.Used, after.Used, b.l.EvictedTokens())
			}
		})
	}
}

// The same through a lease: admission knows K_d but not the input limit's slack.
func TestTooLongLeasedPromptEvictsNothing(t *testing.T) {
	b := newBench(t, LedgerConfig{MaxInputTokens: 50_000})
	b.fallback("a", chain("a", 2000), 100)
	b.wait(10 * time.Minute)
	q := b.ask("long", 0, chain("long", 3000))
	v := b.admit(q)
	if _, ok := b.l.Begin(v.Lease.ID, q.Attempt, b.now); !ok {
		t.Fatalf("no lease: %+v", v)
	}
	b.checked()
	b.l.End(q.Attempt, Usage{}, OutcomeError, b.now)
	if v := b.turn("a", 1, chain("a", 2010), 10); v.Mode != Direct {
		t.Errorf("the idle session is %s afterwards, want direct", v.Mode)
	}
}

// An estimate may be wrong: a prompt that ran after all is credited, and then
// the room for it is made.
func TestTooLongPromptThatRanIsCredited(t *testing.T) {
	b := newBench(t, LedgerConfig{MaxInputTokens: 50_000})
	b.fallback("a", chain("a", 2000), 100)
	b.wait(10 * time.Minute)
	b.fallback("long", chain("long", 3000), 100)
	if v := b.turn("long", 1, chain("long", 3010), 10); v.Mode != Direct {
		t.Errorf("the session that ran is %s, want direct", v.Mode)
	}
	if b.l.EvictedTokens() == 0 {
		t.Error("nothing was evicted for a prompt that ran")
	}
}
