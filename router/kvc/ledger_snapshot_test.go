package kvc

import (
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/block"
)

// lived is a ledger with boilerplate, a fork, an evicted part, protections and
// things learnt.
func lived(t *testing.T) *bench {
	b := newBench(t, LedgerConfig{CapacityTokens: 6000})
	boiler := chain("boiler", 20)
	for turn := range 6 {
		b.turn("a", turn, join(boiler, chain("a", 10+5*turn)), 60+turn)
		b.now = b.now.Add(20 * time.Second)
	}
	b.fallback("b", join(boiler, chain("b", 60)), 100)
	b.fallback("a", join(boiler, chain("a", 12), chain("fork", 8)), 30)
	b.now = b.now.Add(20 * time.Second)
	b.fallback("c", chain("c", 90), 10)
	b.l.Changes()
	return b
}

// A restored ledger goes on exactly as the one it was taken from would have.
func TestRestoreGoesOnAlike(t *testing.T) {
	b := lived(t)
	snap := b.l.Snapshot()
	again := NewLedger(b.l.cfg)
	if err := again.Restore(snap); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(snap, again.Snapshot()); diff != "" {
		t.Fatalf("snapshot of the restored ledger:\n%s", diff)
	}
	play := func(l *Ledger) (out []any) {
		c := &bench{t: t, l: l, now: b.now, n: 1000}
		for i, s := range []SessionKey{"a", "b", "c", "d", "a", "b"} {
			blocks := join(chain("boiler", 20), chain(string(s), 40+10*i))
			out = append(out, c.turn(s, 3, blocks, 40))
			c.wait(45 * time.Second)
			out = append(out, l.Gauges(c.now), l.TokensPerBlock(), l.Changes())
		}
		return out
	}
	if diff := cmp.Diff(play(b.l), play(again)); diff != "" {
		t.Errorf("the two ledgers went apart (-original +restored):\n%s", diff)
	}
}

func TestRestoreIntoASmallerEngineEvicts(t *testing.T) {
	b := lived(t)
	snap := b.l.Snapshot()
	cfg := b.l.cfg
	cfg.CapacityTokens = 1500
	l := NewLedger(cfg)
	if err := l.Restore(snap); err != nil {
		t.Fatal(err)
	}
	if err := check(l); err != nil {
		t.Fatal(err)
	}
	if g := l.Gauges(b.now); g.Used > 1500 || g.Used < 1400 {
		t.Errorf("gauges %+v, want nearly 1,500 used", g)
	}
	if cs := l.Changes(); len(cs) != 0 {
		t.Errorf("changes %+v, want none", cs)
	}
}

func TestRestoreUnderOtherParams(t *testing.T) {
	b := lived(t)
	snap := b.l.Snapshot()
	unprotected, until := b.l.cfg, b.l.cfg
	unprotected.Params.ProtectIdle = 0
	until.Params.IdleLock = IdleLockUntilReleased
	for name, tc := range map[string]struct {
		cfg  LedgerConfig
		wait time.Duration
		want bool
	}{
		"the protection keeps its deadline":  {b.l.cfg, 0, true},
		"and ends then":                      {b.l.cfg, time.Hour, false},
		"protection switched off":            {unprotected, 0, false},
		"idle lock: protected until release": {until, time.Hour, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLedger(tc.cfg)
			if err := l.Restore(snap); err != nil {
				t.Fatal(err)
			}
			if got := l.Gauges(b.now.Add(tc.wait)).Protected > 0; got != tc.want {
				t.Errorf("protected %v, want %v", got, tc.want)
			}
			if err := check(l); err != nil {
				t.Error(err)
			}
		})
	}
}

// A damaged journal is an error and leaves an empty ledger, never a wrong one.
func TestRestoreRefuses(t *testing.T) {
	good := lived(t).l.Snapshot()
	state := func(edit func(b []byte) []byte) Snapshot {
		s := good
		s.State = edit(append([]byte(nil), good.State...))
		return s
	}
	cases := map[string]Snapshot{
		"nothing":           {},
		"another version":   state(func(b []byte) []byte { b[0] = 9; return b }),
		"a short state":     state(func(b []byte) []byte { return b[:len(b)-1] }),
		"a long state":      state(func(b []byte) []byte { return append(b, 0) }),
		"a ratio of NaN":    state(func(b []byte) []byte { binary.LittleEndian.PutUint64(b[1:], ^uint64(0)); return b }),
		"a parent too far":  state(func(b []byte) []byte { b[17] = 5; return b }),
		"a weightless one":  state(func(b []byte) []byte { b[18] = 0; return b }),
		"blocks without it": {Blocks: good.Blocks, State: good.State[:17]},
		"no blocks":         {Sessions: good.Sessions, State: good.State},
		"no sessions":       {Blocks: good.Blocks, State: good.State},
	}
	twice := good
	twice.Blocks = append([]OwnedBlocks{{Owner: good.Blocks[0].Owner, Blocks: good.Blocks[0].Blocks[:1]}}, good.Blocks...)
	cases["a block twice"] = twice
	cases["no owner"] = edited(good, func(bs []OwnedBlocks) { bs[0].Owner = "" })
	cases["shared below an owned one"] = edited(good, func(bs []OwnedBlocks) {
		bs[0] = OwnedBlocks{Owner: "x", Blocks: bs[0].Blocks[:1]}
		bs[1] = OwnedBlocks{Owner: Shared, Blocks: append(slices.Clone(good.Blocks[0].Blocks[1:]), bs[1].Blocks...)}
	})
	dup := good
	dup.Sessions = append([]SessionInfo(nil), good.Sessions...)
	dup.Sessions[1].Key = dup.Sessions[0].Key
	cases["a session twice"] = dup
	for name, s := range cases {
		t.Run(name, func(t *testing.T) {
			b := lived(t)
			if err := b.l.Restore(s); err == nil {
				t.Fatal("restored without an error")
			}
			b.checked()
			if g := b.l.Gauges(b.now); g != (Gauges{}) {
				t.Errorf("left behind %+v", g)
			}
		})
	}
}

func edited(s Snapshot, f func([]OwnedBlocks)) Snapshot {
	s.Blocks = append([]OwnedBlocks(nil), s.Blocks...)
	f(s.Blocks)
	return s
}

// Whatever the journal says, the ledger's books balance afterwards.
func FuzzRestore(f *testing.F) {
	f.Add([]byte{1}, byte(0), byte(0))
	good := lived(&testing.T{}).l.Snapshot()
	f.Add(good.State, byte(3), byte(2))
	f.Fuzz(func(t *testing.T, state []byte, nBlocks, nSessions byte) {
		s := Snapshot{State: state}
		if int(nSessions) == len(good.Sessions)-1 || nBlocks == 3 {
			s.Blocks, s.Sessions = good.Blocks, good.Sessions
		} else {
			owner := SessionKey("a")
			for i := range int(nBlocks) {
				if i%4 == 3 {
					owner += "x"
				}
				s.Blocks = append(s.Blocks, OwnedBlocks{owner, []block.Hash{block.Hash(i + 1)}})
			}
			for i := range int(nSessions) {
				s.Sessions = append(s.Sessions, SessionInfo{Key: SessionKey(rune('a' + i))})
			}
		}
		b := newBench(t, LedgerConfig{CapacityTokens: 6000})
		err := b.l.Restore(s)
		b.checked()
		if err != nil && b.l.Gauges(b.now) != (Gauges{}) {
			t.Fatalf("error %v, yet %+v", err, b.l.Gauges(b.now))
		}
		b.turn("a", 1, join(chain("boiler", 20), chain("a", 40)), 10)
		b.wait(time.Hour)
		b.fallback("big", chain("big", 240), 10)
	})
}
