package emulator

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// story is a scheduler told what happens, line by line, on emulated time.
type story struct {
	t    *testing.T
	core *core
	seqs map[string]*sequence
	said map[string]bool
}

func (x *story) engine(d *datadriven.TestData) {
	mode := "null"
	scanArg(x.t, d, "mode", &mode)
	cfg := testCoreConfig(Mode(mode))
	scanArg(x.t, d, "capacity", &cfg.capacity)
	scanArg(x.t, d, "page", &cfg.pageSize)
	scanArg(x.t, d, "chunk", &cfg.chunk)
	scanArg(x.t, d, "running", &cfg.maxRunning)
	scanArg(x.t, d, "reserved", &cfg.reserved)
	scanArg(x.t, d, "host", &cfg.host)
	cfg.noRadix = d.HasArg("no-radix")
	cfg.localOK = d.HasArg("conditional-agg")
	x.core, x.seqs, x.said = newCore(cfg), map[string]*sequence{}, map[string]bool{}
}

// submit: name prompt=<n> from=<first id> out=<n> [room=<n>] [local]; with
// after=<name> the prompt is that sequence's conversation and n more tokens.
func (x *story) submit(d *datadriven.TestData) {
	var prompt, from, out, room int
	var after string
	scanArg(x.t, d, "prompt", &prompt)
	scanArg(x.t, d, "from", &from)
	scanArg(x.t, d, "out", &out)
	scanArg(x.t, d, "room", &room)
	scanArg(x.t, d, "after", &after)
	ids := promptIDs(prompt, from)
	if after != "" {
		ids = slices.Concat(x.seqs[after].tokens, ids)
	}
	s := newSeq(d.CmdArgs[0].Key, ids, out)
	s.local = d.HasArg("local")
	if room != 0 {
		inRoom(s, uint64(room))
	}
	x.seqs[s.rid] = s
	x.core.submit(s)
}

func (x *story) run(d *datadriven.TestData) string {
	seq := func() *sequence { return x.seqs[d.CmdArgs[0].Key] }
	num := func(key string) (n int) { scanArg(x.t, d, key, &n); return n }
	switch d.Cmd {
	case "engine":
		x.engine(d)
	case "submit":
		x.submit(d)
	case "known":
		x.core.discovered(seq())
	case "deliver":
		x.core.delivered(seq(), 77, num("cached"))
		x.core.start()
	case "join":
		x.core.join(uint64(num("room")), num("prefix"))
	case "leave":
		x.core.leave(uint64(num("room")), d.HasArg("said"))
	case "abort":
		x.core.abort(seq(), abortFinish(0, "gone"))
	case "lost":
		x.core.transferLost(seq(), "lost")
	case "time":
		x.core.advance(x.core.now + time.Duration(num("ms"))*time.Millisecond)
	case "settle":
		settle(x.core)
	default:
		d.Fatalf(x.t, "unknown command %q", d.Cmd)
	}
	mustCheck(x.t, x.core)
	return x.show()
}

// show prints the time, the pool, and every sequence that is live or has just
// ended.
func (x *story) show() string {
	names := [...]string{
		"new", "bootstrap", "prealloc", "transfer", "joining", "waiting", "prefill", "on the wire", "running",
		"retracted", "done",
	}
	c := x.core
	var b strings.Builder
	fmt.Fprintf(&b, "%v: %d held, %d cached, %d free\n", c.now.Round(time.Millisecond), c.kv.Held(), c.kv.Evictable(), c.kv.Free())
	sorted := make([]string, 0, len(x.seqs))
	for n := range x.seqs {
		sorted = append(sorted, n)
	}
	slices.Sort(sorted)
	for _, n := range sorted {
		s := x.seqs[n]
		if x.said[n] {
			continue
		}
		fmt.Fprintf(&b, "  %s %s, %d out, %d found", n, names[s.state], s.generated(), s.cached)
		if s.state == stateDone {
			x.said[n] = true
			o := s.out.take()
			fmt.Fprintf(&b, ", ended after %v: %s %s", o.latency.Round(time.Millisecond), o.finish.kind, o.finish.message)
		}
		b.WriteString("\n")
	}
	return strings.ReplaceAll(b.String(), " \n", "\n")
}

// TestStories tells what a scheduler does, step by step; the files in
// testdata/stories are written to be read.
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		x := &story{t: t}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			x.t = t
			return x.run(d)
		})
	})
}
