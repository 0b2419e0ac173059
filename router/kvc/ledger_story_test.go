package kvc

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvc-dev/kvc/router/block"
)

// Stories of one worker. A prompt is a list of name:blocks, a block weighs 24
// tokens and the rest of every prompt 12; one block of a name is the same in
// every prompt that begins alike. Commands:
//
//	worker k=TOKENS [preset=Paper] [path=Unified] [prefill]
//	turn SESSION PROMPT [t=1] [answer=0] [kept] [lineage=S]   admit, begin, end
//	ask ATTEMPT SESSION PROMPT [t=1]                          admit only
//	begin ATTEMPT; end ATTEMPT [answer=0]; release ATTEMPT    of what was asked
//	fallback SESSION PROMPT [answer=0]                        begin without admission, end
//	wait DURATION, forget SESSION, flush
//	gauges, sessions
//
// kept: the engine reused the answer of the turn before. Every command also
// prints what followers of the feed learn, one change a line.
func TestLedgerStories(t *testing.T) {
	datadriven.Walk(t, "testdata/ledger", func(t *testing.T, path string) {
		var w *ledgerStory
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "worker" {
				w = newLedgerStory(t, d)
				return ""
			}
			out := w.command(t, d)
			w.b.checked()
			return out + w.news()
		})
	})
}

type ledgerStory struct {
	b     *bench
	asked map[string]Question
	lease map[string]string
	names map[block.Hash]string
}

func newLedgerStory(t *testing.T, d *datadriven.TestData) *ledgerStory {
	c := LedgerConfig{Params: Corrected(), Prefill: d.HasArg("prefill")}
	preset, path := "", ""
	d.ScanArgs(t, "k", &c.CapacityTokens)
	d.MaybeScanArgs(t, "preset", &preset)
	d.MaybeScanArgs(t, "path", &path)
	if preset == "Paper" {
		c.Params = Paper()
	}
	c.DirectPath = DirectPath(path)
	return &ledgerStory{
		b: newBench(t, c), asked: map[string]Question{}, lease: map[string]string{}, names: map[block.Hash]string{},
	}
}

// prompt reads name:blocks words.
func (w *ledgerStory) prompt(t *testing.T, d *datadriven.TestData, from int) (blocks []block.Hash) {
	prefix := ""
	for _, arg := range d.CmdArgs[from:] {
		name, count, ok := strings.Cut(arg.Key, ":")
		if !ok {
			continue
		}
		n, err := strconv.Atoi(count)
		if err != nil {
			t.Fatalf("%s: %v", arg.Key, err)
		}
		prefix += "/" + name
		for i, h := range chain(prefix, n) {
			w.names[h] = fmt.Sprint(name, i)
			blocks = append(blocks, h)
		}
	}
	return blocks
}

func (w *ledgerStory) question(t *testing.T, d *datadriven.TestData, at int) Question {
	turn, lineage := 1, ""
	d.MaybeScanArgs(t, "t", &turn)
	d.MaybeScanArgs(t, "lineage", &lineage)
	q := w.b.ask(SessionKey(d.CmdArgs[at].Key), turn, w.prompt(t, d, at+1))
	if lineage != "" {
		q.Lineage = SessionKey(lineage)
	}
	return q
}

func (w *ledgerStory) command(t *testing.T, d *datadriven.TestData) string {
	answer := 0
	d.MaybeScanArgs(t, "answer", &answer)
	arg := ""
	if len(d.CmdArgs) > 0 {
		arg = d.CmdArgs[0].Key
	}
	switch d.Cmd {
	case "turn":
		return w.turn(w.question(t, d, 0), d.HasArg("kept"), answer)
	case "ask":
		q := w.question(t, d, 1)
		v := w.b.admit(q)
		w.asked[arg], w.lease[arg] = q, v.Lease.ID
		return spell(v)
	case "begin":
		r, ok := w.b.l.Begin(w.lease[arg], w.asked[arg].Attempt, w.b.now)
		return fmt.Sprintln("begun:", ok, r)
	case "end":
		w.b.end(w.asked[arg], -1, answer)
	case "release":
		w.b.l.Release(w.lease[arg], w.b.now)
	case "fallback":
		w.b.fallback(SessionKey(arg), w.prompt(t, d, 1), answer)
	case "wait":
		took, err := time.ParseDuration(arg)
		if err != nil {
			t.Fatal(err)
		}
		w.b.wait(took)
	case "forget":
		w.b.l.Forget(SessionKey(arg), w.b.now)
	case "flush":
		w.b.l.Clear(w.b.now)
	case "gauges":
		g := w.b.l.Gauges(w.b.now)
		return fmt.Sprintf("used %d locked %d protected %d reserved %d sessions %d active %d, eviction cost %d\n",
			g.Used, g.Locked, g.Protected, g.Reserved, g.Sessions, g.Active, w.b.l.EvictionCost())
	case "sessions":
		out := ""
		for _, s := range w.b.l.Sessions("", 0) {
			out += fmt.Sprintf("%s of %s: %d blocks, %d tokens\n", s.Key, s.Lineage, s.Blocks, s.ResidentTokens)
		}
		return out
	default:
		t.Fatalf("unknown command %q", d.Cmd)
	}
	return ""
}

func (w *ledgerStory) turn(q Question, kept bool, answer int) string {
	tail := 0
	if s := w.b.l.sessions[q.Session]; s != nil && s.tail != nil {
		tail = s.tail.weight
	}
	v := w.b.admit(q)
	if v.CanAdmit {
		reused := v.ResidentTokens
		if kept {
			reused += tail
		}
		w.b.finish(q, v, reused, answer)
	}
	return spell(v)
}

func spell(v Verdict) string {
	if !v.CanAdmit {
		out := fmt.Sprintf("refused %s: resident %d append %d", v.Reason, v.ResidentTokens, v.AppendTokens)
		if v.RetryAfter > 0 {
			out += fmt.Sprint(" retry ", v.RetryAfter)
		}
		return out + "\n"
	}
	out := fmt.Sprintf("%s: resident %d append %d free %d", v.Mode, v.ResidentTokens, v.AppendTokens, v.FreeTokens)
	if v.Reason != ReasonNone {
		out += " " + string(v.Reason)
	}
	return out + "\n"
}

// news is what the feed would say; sessions are left to the sessions command.
func (w *ledgerStory) news() (out string) {
	for _, c := range w.b.l.Changes() {
		switch c.Kind {
		case ChangeAdd:
			out += fmt.Sprintf("  + %s for %s\n", w.spans(c.Blocks), c.Owner)
		case ChangeEvict:
			out += fmt.Sprintf("  - %s\n", w.spans(c.Blocks))
		case ChangeOwn:
			out += fmt.Sprintf("  = %s now of %s\n", w.spans(c.Blocks), c.Owner)
		case ChangeClear:
			out += "  clear\n"
		case ChangeSessionGone:
			out += fmt.Sprintf("  %s is gone\n", c.Session.Key)
		case ChangeSession, ChangeTurn:
		}
	}
	return out
}

// spans shortens a list of blocks: "a0..a9 b0".
func (w *ledgerStory) spans(hs []block.Hash) string {
	var out []string
	for i := 0; i < len(hs); {
		first := w.names[hs[i]]
		letters := strings.TrimRight(first, "0123456789")
		n, _ := strconv.Atoi(first[len(letters):])
		j := i + 1
		for j < len(hs) && w.names[hs[j]] == fmt.Sprint(letters, n+j-i) {
			j++
		}
		if j > i+1 {
			first += ".." + w.names[hs[j-1]]
		}
		out = append(out, first)
		i = j
	}
	return strings.Join(out, " ")
}
