package kvc

import (
	"testing"

	"pgregory.net/rapid"
)

// What leaves is always what was used longest ago, whole paths being used
// together, as an engine's radix cache does it; judged by the machine's oracle
// that touches every block of a path. Few sessions, no admission, a worker too
// small for them: nearly every turn evicts a part of some chain.
func TestEvictionIsLRU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newMachine(t, Corrected())
		m.cfg.CapacityTokens = 1200
		m.cfg.Prefill = rapid.Bool().Draw(t, "prefill worker")
		m.l = NewLedger(m.cfg)
		turn := func(t *rapid.T) {
			q := m.question(t)
			m.l.BeginUnadmitted(q, Fallback, m.now)
			m.drain(t)
			m.touch(q.Blocks)
			m.check(t)
			e, _ := m.l.Expected(q.Attempt)
			m.l.End(q.Attempt, Usage{PromptTokens: e.Input, CachedTokens: e.Resident}, OutcomeOK, m.now)
			m.drain(t)
			m.touch(q.Blocks)
		}
		t.Repeat(map[string]func(*rapid.T){"turn": turn, "restart": m.restart, "": m.check})
	})
}
