package kvc

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// bench is a worker of 24 tokens a block on which whole turns are played.
type bench struct {
	t   *testing.T
	l   *Ledger
	now time.Time
	n   int
}

func newBench(t *testing.T, c LedgerConfig) *bench {
	if c.Params.Preset == "" {
		c.Params = Corrected()
	}
	if c.CapacityTokens == 0 {
		c.CapacityTokens = 100_000
	}
	if c.DirectPath == "" {
		c.DirectPath = ConditionalAggregation
	}
	c.PageSize, c.TokensPerBlock = 1, 24
	return &bench{t: t, l: NewLedger(c), now: time.Unix(5000, 0)}
}

// chain is n blocks of a conversation; equal names share their blocks.
func chain(name string, n int) []block.Hash {
	hs := make([]block.Hash, n)
	for i := range hs {
		h := block.Hash(1469598103934665603)
		for _, c := range []byte(fmt.Sprintf("%s/%d", name, i)) {
			h = (h ^ block.Hash(c)) * 1099511628211
		}
		hs[i] = h
	}
	return hs
}

func join(cs ...[]block.Hash) (all []block.Hash) {
	for _, c := range cs {
		all = append(all, c...)
	}
	return all
}

func (b *bench) ask(s SessionKey, turn int, blocks []block.Hash) Question {
	b.n++
	return Question{
		Attempt: fmt.Sprintf("%032d", b.n), Blocks: blocks,
		Request: Request{Session: s, Lineage: s, Turn: turn, OutputTokens: 100},
	}
}

// checked fails the test when the books do not balance.
func (b *bench) checked() {
	b.t.Helper()
	if err := check(b.l); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) admit(q Question) Verdict {
	b.t.Helper()
	v := b.l.Admit(q, b.now)
	b.checked()
	return v
}

// finish presents the lease and ends the turn: the prompt weighs 24 tokens a
// block and 12 of rest; reused is what the engine found cached, -1 = all it
// was expected to find.
func (b *bench) finish(q Question, v Verdict, reused, answer int) {
	b.t.Helper()
	if _, ok := b.l.Begin(v.Lease.ID, q.Attempt, b.now); !ok {
		b.t.Fatalf("the lease of %+v was not accepted", v)
	}
	b.end(q, reused, answer)
}

func (b *bench) end(q Question, reused, answer int) {
	b.t.Helper()
	b.checked()
	if reused < 0 {
		e, _ := b.l.Expected(q.Attempt)
		reused = e.Resident
	}
	u := Usage{PromptTokens: 24*len(q.Blocks) + 12, CachedTokens: reused, CompletionTokens: answer}
	b.l.End(q.Attempt, u, OutcomeOK, b.now)
	b.checked()
}

// turn plays one admitted turn and returns its verdict.
func (b *bench) turn(s SessionKey, turn int, blocks []block.Hash, answer int) Verdict {
	b.t.Helper()
	q := b.ask(s, turn, blocks)
	v := b.admit(q)
	if v.CanAdmit {
		b.finish(q, v, -1, answer)
	}
	return v
}

// fallback plays one turn that nobody admitted.
func (b *bench) fallback(s SessionKey, blocks []block.Hash, answer int) {
	b.t.Helper()
	q := b.ask(s, 1, blocks)
	b.l.BeginUnadmitted(q, Fallback, b.now)
	b.end(q, -1, answer)
}

func (b *bench) wait(d time.Duration) {
	b.t.Helper()
	b.now = b.now.Add(d)
	b.l.Tick(b.now)
	b.checked()
}
