package emulator

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/sim"
)

func testCoreConfig(mode Mode) coreConfig {
	p, _ := sim.PresetOf("h100")
	return coreConfig{
		mode: mode, cost: p.Cost, link: sim.LinkOf("mooncake"), capacity: 100_000, pageSize: 1,
		chunk: 8192, maxRunning: 256, reserved: 512, contextLen: 131072, seed: 1,
	}
}

func promptIDs(n, from int) []int32 {
	ids := make([]int32, n, n+64)
	for i := range ids {
		ids[i] = int32(from + i)
	}
	return ids
}

func newSeq(rid string, prompt []int32, out int) *sequence {
	return &sequence{
		rid: rid, tokens: prompt, prompt: len(prompt), out: newOutbox(),
		sampling: sampling{maxNew: out, ignoreEOS: true},
	}
}

func inRoom(s *sequence, room uint64) *sequence {
	s.boot = bootstrap{set: true, host: "10.0.0.1", port: 8998, room: room}
	return s
}

// settle runs the core until it has nothing left to do by itself.
func settle(c *core) {
	for {
		at, _, ok := c.next()
		if !ok {
			return
		}
		c.advance(at)
	}
}

// pass runs the core to the end of its present pass: queues move only between
// passes.
func pass(c *core) {
	if at, _, ok := c.next(); ok {
		c.advance(at)
	}
}

// receive takes a sequence of a decode core through its rendezvous.
func receive(c *core, s *sequence, cached int) {
	c.submit(s)
	c.discovered(s)
	for s.state == statePrealloc && c.step.busy {
		pass(c)
	}
	c.delivered(s, s.writer.token(0), cached)
	c.start()
}

// checkCore verifies that every live sequence is in exactly one place and that
// the KV adds up.
func checkCore(c *core) error {
	if err := c.kv.Check(); err != nil {
		return err
	}
	places := map[*sequence][]string{}
	for name, list := range map[string][]*sequence{
		"bootstrapping": c.bootstrapping, "prealloc": c.prealloc, "joining": c.joining,
		"waiting": c.waiting, "retracted": c.retracted, "running": c.running,
	} {
		for _, s := range list {
			places[s] = append(places[s], name)
		}
	}
	for _, t := range c.timers {
		places[t.seq] = append(places[t.seq], "wire")
	}
	for _, p := range c.step.parts {
		if p.seq.state == statePrefill {
			places[p.seq] = append(places[p.seq], "prefill")
		}
	}
	held := 0
	for s := range c.seqs {
		if s.turn != nil {
			held++
		}
		if s.state == stateDone {
			return fmt.Errorf("%s is done and still live", s.rid)
		}
		want := 1
		if s.state == stateTransfer {
			want = 0 // only the peer knows
		}
		if len(places[s]) != want {
			return fmt.Errorf("%s in state %d is in %v, want %d places", s.rid, s.state, places[s], want)
		}
		delete(places, s)
	}
	for s, in := range places {
		if in[0] != "prefill" {
			return fmt.Errorf("%s is not live and in %v", s.rid, in)
		}
	}
	if held != c.kv.Turns() {
		return fmt.Errorf("%d sequences hold KV, the cache counts %d turns", held, c.kv.Turns())
	}
	return nil
}

func mustCheck(t interface {
	Helper()
	Fatalf(string, ...any)
}, c *core) {
	t.Helper()
	if err := checkCore(c); err != nil {
		t.Fatalf("invariant broken: %v", err)
	}
}

func drawCore(t *rapid.T, mode Mode) *core {
	cfg := testCoreConfig(mode)
	cfg.capacity = rapid.IntRange(40, 600).Draw(t, "capacity")
	cfg.pageSize = rapid.SampledFrom([]int{1, 4, 16}).Draw(t, "page")
	cfg.chunk = rapid.SampledFrom([]int{-1, 7, 64}).Draw(t, "chunk")
	cfg.maxRunning = rapid.SampledFrom([]int{1, 3, 256}).Draw(t, "maxRunning")
	cfg.reserved = rapid.SampledFrom([]int{1, 32, 512}).Draw(t, "reserved")
	cfg.noRadix = rapid.Bool().Draw(t, "noRadix")
	cfg.host = rapid.SampledFrom([]int{0, 100, 2000}).Draw(t, "host")
	cfg.localOK = mode == ModeDecode
	return newCore(cfg)
}

// drawSeq draws prompts that share prefixes, some too long for the pool.
func drawSeq(t *rapid.T, n int) *sequence {
	prompt := promptIDs(rapid.IntRange(1, 300).Draw(t, "prompt"), 1000*rapid.IntRange(0, 3).Draw(t, "family"))
	return newSeq(fmt.Sprintf("r%d", n), prompt, rapid.IntRange(1, 40).Draw(t, "out"))
}

// Every interleaving of arrivals, aborts and time on a unified engine keeps the
// invariants, and everything that fits is answered in full: the queue never
// wedges.
func TestUnifiedCoreNeverWedges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCore(t, ModeNull)
		var all []*sequence
		aborted := map[*sequence]bool{}
		for i := range rapid.IntRange(1, 25).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"submit", "submit", "abort", "time"}).Draw(t, "op") {
			case "submit":
				s := drawSeq(t, i)
				all = append(all, s)
				c.submit(s)
			case "abort":
				if len(all) > 0 {
					s := rapid.SampledFrom(all).Draw(t, "victim")
					aborted[s] = aborted[s] || s.state != stateDone
					c.abort(s, abortFinish(0, "gone"))
				}
			case "time":
				c.advance(c.now + time.Duration(rapid.IntRange(0, 400).Draw(t, "ms"))*time.Millisecond)
			}
			mustCheck(t, c)
		}
		settle(c)
		mustCheck(t, c)
		if len(c.seqs) != 0 || c.kv.Held() != 0 || len(c.rooms) != 0 {
			t.Fatalf("%d sequences are left, %d tokens held", len(c.seqs), c.kv.Held())
		}
		for _, s := range all {
			if aborted[s] {
				continue
			}
			b := s.out.take()
			switch {
			case s.prompt > c.kv.Capacity():
				if b.finish.status != 400 {
					t.Fatalf("%s does not fit and ended with %+v", s.rid, b.finish)
				}
			case !b.done || b.finish.kind != "length" || len(b.tokens) != b.finish.length:
				t.Fatalf("%s ended with %d tokens and %+v", s.rid, len(b.tokens), b.finish)
			}
		}
	})
}

// The same for the decode side, with a peer that answers late, never, or dies.
func TestDecodeCoreKeepsItsInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCore(t, ModeDecode)
		var all []*sequence
		for i := range rapid.IntRange(1, 40).Draw(t, "steps") {
			live := slices.DeleteFunc(slices.Clone(all), func(s *sequence) bool { return s.state == stateDone })
			op := rapid.SampledFrom([]string{"submit", "local", "known", "deliver", "abort", "lose", "time"}).Draw(t, "op")
			switch {
			case op == "submit" || op == "local" || len(live) == 0:
				s := drawSeq(t, i)
				if s.local = op == "local"; !s.local {
					inRoom(s, rapid.Uint64Range(1, 8).Draw(t, "room"))
				}
				all = append(all, s)
				c.submit(s)
			case op == "time":
				c.advance(c.now + time.Duration(rapid.IntRange(0, 400).Draw(t, "ms"))*time.Millisecond)
			default:
				s := rapid.SampledFrom(live).Draw(t, "seq")
				switch op {
				case "known":
					if s.state == statePrealloc {
						c.discovered(s)
					}
				case "deliver":
					c.delivered(s, 77, rapid.IntRange(0, s.prompt).Draw(t, "cached"))
					c.start()
				case "abort":
					c.abort(s, abortFinish(0, "gone"))
				case "lose":
					c.transferLost(s, "lost")
				}
			}
			mustCheck(t, c)
		}
		settle(c)
		mustCheck(t, c)
		for _, s := range all {
			if s.state == statePrealloc || s.state == stateTransfer {
				c.abort(s, abortFinish(0, "gone"))
			}
		}
		settle(c)
		for _, s := range all {
			if s.state != stateDone {
				t.Fatalf("%s is stuck in state %d", s.rid, s.state)
			}
		}
		if c.kv.Held() != 0 || len(c.rooms) != 0 {
			t.Fatalf("%d tokens held and %d rooms taken at rest", c.kv.Held(), len(c.rooms))
		}
	})
}

// And for the prefill side.
func TestPrefillCoreKeepsItsInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawCore(t, ModePrefill)
		var all []*sequence
		for i := range rapid.IntRange(1, 40).Draw(t, "steps") {
			room := rapid.Uint64Range(1, 6).Draw(t, "room")
			switch rapid.SampledFrom([]string{"submit", "join", "leave", "said", "abort", "timeout", "time"}).Draw(t, "op") {
			case "submit":
				s := inRoom(drawSeq(t, i), room)
				all = append(all, s)
				c.submit(s)
			case "join":
				c.join(room, rapid.IntRange(0, 50).Draw(t, "prefix"))
			case "leave":
				c.leave(room, false)
			case "said":
				c.leave(room, true)
			case "abort":
				if s := c.rooms[room]; s != nil {
					c.abort(s, abortFinish(0, "gone"))
				}
			case "timeout":
				if s := c.rooms[room]; s != nil {
					c.bootstrapTimeout(s, 300)
				}
			case "time":
				c.advance(c.now + time.Duration(rapid.IntRange(0, 400).Draw(t, "ms"))*time.Millisecond)
			}
			mustCheck(t, c)
		}
		settle(c)
		for _, s := range all {
			if s.state == stateBootstrap {
				c.join(s.boot.room, 0)
				settle(c)
			}
			if s.state != stateDone {
				t.Fatalf("%s is stuck in state %d", s.rid, s.state)
			}
			if b := s.out.take(); b.finish.kind == "length" && len(b.tokens) != 1 {
				t.Fatalf("a prefill worker gave %d tokens, want one", len(b.tokens))
			}
		}
		mustCheck(t, c)
		if c.kv.Held() != 0 || len(c.rooms) != 0 {
			t.Fatalf("%d tokens held and %d rooms taken at rest", c.kv.Held(), len(c.rooms))
		}
	})
}

func TestTimingFollowsTheCostModel(t *testing.T) {
	cfg := testCoreConfig(ModeNull)
	c := newCore(cfg)
	s := newSeq("a", promptIDs(1000, 0), 10)
	c.submit(s)
	settle(c)
	b := s.out.take()

	want := cfg.cost.Prefill(1000, 0) + 9*cfg.cost.DecodeStep(1)
	if b.latency != want {
		t.Errorf("latency = %v, want prefill + 9 steps = %v", b.latency, want)
	}
	if s.firstAt != cfg.cost.Prefill(1000, 0) {
		t.Errorf("first token at %v, want the prefill's %v", s.firstAt, cfg.cost.Prefill(1000, 0))
	}
}

func TestChunksLetDecodeGoOnSlowly(t *testing.T) {
	cfg := testCoreConfig(ModeNull)
	cfg.chunk = 1000
	c := newCore(cfg)
	running := newSeq("running", promptIDs(10, 0), 500)
	c.submit(running)
	c.advance(time.Second)
	before := running.generated()

	long := newSeq("long", promptIDs(8000, 100_000), 1)
	c.submit(long)
	for long.state != stateDone {
		at, _, _ := c.next()
		c.advance(at)
	}
	got := running.generated() - before
	if got < 7 || got > 10 {
		t.Errorf("%d tokens while 8 chunks were prefilled, want about one per chunk", got)
	}
}

func TestPrefillIsServedInOrderOfArrival(t *testing.T) {
	c := newCore(testCoreConfig(ModeNull))
	big := newSeq("big", promptIDs(50_000, 0), 1)
	small := newSeq("small", promptIDs(10, 900_000), 1)
	c.submit(big)
	c.submit(small)
	settle(c)
	if small.doneAt < big.doneAt {
		t.Errorf("the later, smaller prompt ended at %v, before the earlier one at %v", small.doneAt, big.doneAt)
	}
}

func TestCachedTokens(t *testing.T) {
	c := newCore(testCoreConfig(ModeNull))
	first := newSeq("1", promptIDs(1000, 0), 10)
	c.submit(first)
	settle(c)

	next := newSeq("2", slices.Concat(first.tokens, promptIDs(100, 50_000)), 1)
	c.submit(next)
	settle(c)
	// The tenth token's own KV was never computed, so 9 of 10 are resident.
	if b := next.out.take(); b.cached != 1009 {
		t.Errorf("cached_tokens = %d, want prompt and all generated tokens but the last: 1009", b.cached)
	}
	same := newSeq("3", slices.Clone(first.tokens[:1000]), 1)
	c.submit(same)
	settle(c)
	if b := same.out.take(); b.cached != 999 {
		t.Errorf("cached_tokens of a prompt that is resident whole = %d, want 999: one token is always computed", b.cached)
	}
}

func TestTheDecodeSideReportsTheLargerPrefix(t *testing.T) {
	cases := map[string]struct{ own, peer, want int }{
		"the prefill worker's cache, when it holds more": {0, 700, 700},
		"its own prefix, when that is longer":            {400, 100, 400},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := newCore(testCoreConfig(ModeDecode))
			if tc.own > 0 {
				warm := inRoom(newSeq("warm", promptIDs(tc.own, 0), 1), 1)
				receive(c, warm, 0)
				settle(c)
			}
			s := inRoom(newSeq("s", promptIDs(1000, 0), 2), 2)
			c.submit(s)
			c.discovered(s)
			if s.cached != tc.own {
				t.Errorf("own prefix = %d, want %d: only the rest is transferred", s.cached, tc.own)
			}
			c.delivered(s, 5, tc.peer)
			c.start()
			settle(c)
			if b := s.out.take(); b.cached != tc.want {
				t.Errorf("cached_tokens = %d, want %d", b.cached, tc.want)
			}
		})
	}
}

func TestOnlyTheMissingSuffixIsTransferred(t *testing.T) {
	cfg := testCoreConfig(ModePrefill)
	took := func(prefix int) time.Duration {
		c := newCore(cfg)
		s := inRoom(newSeq("s", promptIDs(50_000, 0), 1), 9)
		c.join(9, prefix)
		c.submit(s)
		settle(c)
		return s.doneAt - cfg.cost.Prefill(8192, 0) // any constant will do
	}
	saved := took(0) - took(40_000)
	want := cfg.cost.Transfer(50_000, cfg.link) - cfg.cost.Transfer(10_000, cfg.link)
	if saved != want {
		t.Errorf("a prefix of 40,000 tokens saved %v of transfer, want %v", saved, want)
	}
}

func TestPreallocationIsFirstComeFirstServed(t *testing.T) {
	cfg := testCoreConfig(ModeDecode)
	cfg.capacity, cfg.reserved = 1000, 100
	c := newCore(cfg)
	seqs := []*sequence{
		inRoom(newSeq("holder", promptIDs(600, 0), 200), 1),
		inRoom(newSeq("large", promptIDs(500, 10_000), 200), 2),
		inRoom(newSeq("small", promptIDs(10, 20_000), 200), 3),
	}
	for _, s := range seqs {
		c.submit(s)
		c.discovered(s)
	}
	if seqs[0].state != stateTransfer || seqs[1].state != statePrealloc || seqs[2].state != statePrealloc {
		t.Fatalf("states %d %d %d: the small one must wait behind the large one", seqs[0].state, seqs[1].state, seqs[2].state)
	}
	c.abort(seqs[0], abortFinish(0, "gone"))
	if seqs[1].state != stateTransfer || seqs[2].state != stateTransfer {
		t.Errorf("states %d %d after KV was freed, want both in transfer", seqs[1].state, seqs[2].state)
	}
}

func TestReservedDecodeTokensAreKeptFree(t *testing.T) {
	cfg := testCoreConfig(ModeDecode)
	cfg.capacity, cfg.reserved = 1000, 300
	c := newCore(cfg)
	a := inRoom(newSeq("a", promptIDs(300, 0), 400), 1)
	b := inRoom(newSeq("b", promptIDs(300, 10_000), 400), 2)
	c.submit(a)
	c.discovered(a)
	c.submit(b)
	c.discovered(b)
	// 300 held + 300 promised to a leave 400; b needs 300 + 300.
	if b.state != statePrealloc {
		t.Errorf("b was allocated into the tokens promised to a")
	}
}

func TestTransferredSequencesWaitForALocalPrefillInChunks(t *testing.T) {
	cfg := testCoreConfig(ModeDecode)
	cfg.localOK, cfg.chunk = true, 1000
	c := newCore(cfg)
	local := newSeq("local", promptIDs(5000, 0), 1)
	local.local = true
	c.submit(local)

	s := inRoom(newSeq("remote", promptIDs(10, 90_000), 5), 1)
	receive(c, s, 0)
	pass(c)
	if s.state != stateJoining {
		t.Fatalf("state %d: it joined the batch while a local prefill was cut into chunks", s.state)
	}
	settle(c)
	if s.firstAt < local.firstAt-cfg.cost.Prefill(1000, 4000)-cfg.cost.DecodeStep(2) {
		t.Errorf("first token at %v, long before the local prefill ended at %v", s.firstAt, local.firstAt)
	}
}

func TestADecodeWorkerWithoutRadixForgets(t *testing.T) {
	cfg := Config{ModelPath: "m", Mode: ModeDecode}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	c := newCore(cfg.core())
	for i, want := range []int{0, 0} {
		s := inRoom(newSeq("s", promptIDs(100, 0), 2), uint64(i+1))
		c.submit(s)
		c.discovered(s)
		if s.cached != want {
			t.Errorf("turn %d found %d tokens, want %d: chunk cache (contract §1.2)", i, s.cached, want)
		}
		c.delivered(s, 5, 0)
		c.start()
		settle(c)
	}
}

func TestRetractionKeepsTheAnswer(t *testing.T) {
	for _, mode := range []Mode{ModeNull, ModeDecode} {
		t.Run(string(mode), func(t *testing.T) {
			cfg := testCoreConfig(mode)
			cfg.capacity, cfg.reserved = 260, 1
			c := newCore(cfg)
			var seqs []*sequence
			for i := range 2 {
				s := newSeq(fmt.Sprint(i), promptIDs(100, 1000*i), 60)
				if mode == ModeDecode {
					inRoom(s, uint64(i+1))
				}
				seqs = append(seqs, s)
				if mode == ModeDecode {
					receive(c, s, 0)
				} else {
					c.submit(s)
				}
			}
			settle(c)
			retractions := 0
			for _, s := range seqs {
				b := s.out.take()
				retractions += b.retractions
				w := newWriter(cfg.seed, s.tokens[:s.prompt], 0)
				w.plan(60, 0, true)
				for i, id := range b.tokens {
					if id != w.token(i) {
						t.Fatalf("token %d changed through a retraction", i)
					}
				}
				if len(b.tokens) != 60 {
					t.Errorf("%d tokens, want 60", len(b.tokens))
				}
			}
			if retractions == 0 {
				t.Error("nothing was retracted although two answers do not fit")
			}
			mustCheck(t, c)
		})
	}
}

func TestAbortByPrefix(t *testing.T) {
	c := newCore(testCoreConfig(ModeNull))
	long := newSeq("kvc-aa1", promptIDs(9000, 0), 50)
	queued := newSeq("kvc-aa2", promptIDs(9000, 20_000), 50)
	other := newSeq("kvc-ab", promptIDs(10, 90_000), 5)
	for _, s := range []*sequence{long, queued, other} {
		c.submit(s)
	}
	c.abortPrefix("", false)
	if len(c.seqs) != 3 {
		t.Fatal("an empty rid aborted something")
	}
	c.abortPrefix("kvc-aa", false)
	if b := long.out.take(); b.finish.message != "Aborted by AbortReq." || b.finish.status != 0 {
		t.Errorf("running: %+v", b.finish)
	}
	if b := queued.out.take(); b.finish.message != "Abort in waiting queue" {
		t.Errorf("queued: %+v", b.finish)
	}
	mustCheck(t, c)
	settle(c)
	if b := other.out.take(); b.finish.kind != "length" {
		t.Errorf("a rid without the prefix ended with %+v", b.finish)
	}
}

func TestOutputIsClippedToThePool(t *testing.T) {
	cfg := testCoreConfig(ModeNull)
	cfg.capacity = 1000
	c := newCore(cfg)
	s := newSeq("s", promptIDs(900, 0), 5000)
	c.submit(s)
	settle(c)
	if b := s.out.take(); len(b.tokens) != 99 || b.finish.length != 99 {
		t.Errorf("%d tokens, want 99: prompt + output stay below the pool", len(b.tokens))
	}
}

func TestTheHostTierGivesBackWhatWasEvicted(t *testing.T) {
	cfg := testCoreConfig(ModeNull)
	cfg.capacity, cfg.host = 10_000, 50_000
	c := newCore(cfg)
	old := promptIDs(8_000, 0)
	turn := func(p []int32) (*sequence, batch) {
		s := newSeq("s", slices.Clone(p), 1)
		c.submit(s)
		settle(c)
		mustCheck(t, c)
		return s, s.out.take()
	}
	turn(old)
	turn(promptIDs(9_000, 100_000)) // evicts it
	if got := c.kv.Peek(old); got != 0 {
		t.Fatalf("%d tokens are still on the device", got)
	}
	s, b := turn(old)
	if b.cached != 7_999 || b.fromHost != 7_999 {
		t.Errorf("cached %d, of these %d from the host, want 7,999 and all", b.cached, b.fromHost)
	}
	want := cfg.cost.Prefill(1, 7_999) + cfg.cost.Transfer(7_999, sim.HostLink())
	if got := s.doneAt - s.arrived; got != want {
		t.Errorf("took %v, want one token of prefill and the load: %v", got, want)
	}
	if !c.flush() || c.host.Used() != 0 {
		t.Errorf("%d tokens are left on the host after a flush", c.host.Used())
	}
}
