package kvc

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// fullLedger holds about 600K tokens: 40 sessions behind 200 blocks of
// boilerplate, of which the last has 4,096 blocks.
func fullLedger(tb testing.TB) (l *Ledger, last []block.Hash, now time.Time) {
	tb.Helper()
	l = NewLedger(LedgerConfig{
		CapacityTokens: 600_000, PageSize: 1, DirectPath: ConditionalAggregation, Params: Corrected(),
	})
	boiler := chain("boiler", 200)
	now = time.Unix(1000, 0)
	for i := range 60 {
		now = now.Add(time.Minute)
		size := 400
		if i == 59 {
			size = 4096 - len(boiler)
		}
		s := SessionKey(fmt.Sprintf("%016x", i))
		last = join(boiler, chain(string(s), size))
		attempt := fmt.Sprintf("%032d", i)
		q := Question{Attempt: attempt, Request: Request{Session: s, Lineage: s, OutputTokens: 900}, Blocks: last}
		l.BeginUnadmitted(q, Seed, now)
		l.End(attempt, Usage{PromptTokens: 24*len(last) + 12, CompletionTokens: 400}, OutcomeOK, now)
	}
	l.Changes()
	if used := l.Gauges(now).Used; used < 550_000 {
		tb.Fatalf("only %d tokens resident", used)
	}
	return l, last, now
}

// One admission and release of the next turn of a 4,096-block session.
func BenchmarkAdmit(b *testing.B) {
	l, last, now := fullLedger(b)
	next, key := join(last, chain("append", 30)), SessionKey(fmt.Sprintf("%016x", 59))
	q := Question{Request: Request{Session: key, Lineage: key, Turn: 1, OutputTokens: 900}, Blocks: next}
	attempts := make([]string, b.N)
	for i := range attempts {
		attempts[i] = fmt.Sprintf("b%031x", i)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		q.Attempt = attempts[i]
		v := l.Admit(q, now)
		if v.Mode != Direct {
			b.Fatalf("%+v", v)
		}
		l.Release(v.Lease.ID, now)
	}
}

// A whole turn of that session: admit, begin, end with 30 more blocks, which
// evicts as much.
func BenchmarkTurn(b *testing.B) {
	l, last, now := fullLedger(b)
	key := SessionKey(fmt.Sprintf("%016x", 59))
	b.ReportAllocs()
	for i := range b.N {
		chainNow := join(last, chain(fmt.Sprint("append", i), 30))
		q := Question{
			Attempt: fmt.Sprintf("b%031x", i), Blocks: chainNow,
			Request: Request{Session: key, Lineage: key, Turn: 1, OutputTokens: 900},
		}
		v := l.Admit(q, now)
		l.Begin(v.Lease.ID, q.Attempt, now)
		u := Usage{PromptTokens: 24*len(chainNow) + 12, CachedTokens: v.ResidentTokens, CompletionTokens: 400}
		l.End(q.Attempt, u, OutcomeOK, now)
		l.Changes()
		now = now.Add(time.Second)
	}
}

func BenchmarkSnapshot(b *testing.B) {
	l, _, _ := fullLedger(b)
	b.ReportAllocs()
	for b.Loop() {
		if s := l.Snapshot(); len(s.State) == 0 {
			b.Fatal("empty")
		}
	}
}

func BenchmarkRestore(b *testing.B) {
	l, _, _ := fullLedger(b)
	s := l.Snapshot()
	b.ReportAllocs()
	for b.Loop() {
		if err := l.Restore(s); err != nil {
			b.Fatal(err)
		}
	}
}
