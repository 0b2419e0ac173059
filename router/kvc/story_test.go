package kvc

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// Stories are whole fleets over many turns, as text. Commands:
//
//	world preset=Paper|Corrected d=3 p=1 [reset=Never] [path=Unified]
//	full|free|silent|dead WORKER…   what the workers do from now on (free: admit and serve)
//	busy every=N [after=5ms]        in every Nth turn the first question is refused (0: never),
//	                                with a time after which it would not be
//	turn SESSION [n=1] [scores]     play n turns; each adds 100 blocks. The fleet is under
//	                                pressure: KV on a worker that did not serve the last turn
//	                                has been evicted by the next
//	beliefs                         pins, rejects, pin changes
func TestStories(t *testing.T) {
	datadriven.Walk(t, "testdata/stories", func(t *testing.T, path string) {
		var w *storyWorld
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			if d.Cmd == "world" {
				w = newStoryWorld(t, d)
				return ""
			}
			return w.command(t, d)
		})
	})
}

type storyWorld struct {
	b        *beliefs
	f        Fleet
	p        Params
	does     map[WorkerID]string
	resident map[pair]int
	length   map[SessionKey]int
	every    int
	after    time.Duration
	turn     int
}

func newStoryWorld(t *testing.T, d *datadriven.TestData) *storyWorld {
	preset, reset, path := "Corrected", "", ""
	n, p := 3, 1
	d.MaybeScanArgs(t, "preset", &preset)
	d.MaybeScanArgs(t, "d", &n)
	d.MaybeScanArgs(t, "p", &p)
	params := Corrected()
	if preset == "Paper" {
		params = Paper()
	}
	w := makeStoryWorld(params, n, p)
	if d.MaybeScanArgs(t, "reset", &reset) {
		w.p.ResetAt = ResetAtRule(reset)
	}
	d.MaybeScanArgs(t, "path", &path)
	w.f.Path = DirectPath(path)
	return w
}

func makeStoryWorld(params Params, d, p int) *storyWorld {
	return &storyWorld{
		b: newBeliefs(), p: params, does: map[WorkerID]string{},
		f:        Fleet{Decode: ids("d", d), Prefill: ids("p", p), Cursors: &Cursors{}},
		resident: map[pair]int{}, length: map[SessionKey]int{},
	}
}

// The v1 pathology: a burst fills the fleet; afterwards there is room, and now
// and then a worker is busy for a moment. Without reset the session never again
// stays anywhere; with reset it reseeds at most once, in the first turn after
// the burst, and is Direct from then on.
func TestV1Pathology(t *testing.T) {
	for _, reset := range []ResetAtRule{ResetNever, ResetAtAdmission, ResetAtFirstToken} {
		t.Run(string(reset), func(t *testing.T) {
			p := Paper()
			p.ResetAt = reset
			w := makeStoryWorld(p, 3, 1)
			var log strings.Builder
			w.play(&log, "s")
			for _, d := range w.f.Decode {
				w.does[d] = "full"
			}
			for range 12 {
				w.play(&log, "s")
			}
			clear(w.does)
			w.every = 2
			lost := 0
			last := 0
			for i := range 1000 {
				if s := w.play(&log, "s"); s.Mode != Direct {
					lost, last = lost+1, i
				}
			}
			if reset == ResetNever && (lost < 200 || last < 990) {
				t.Errorf("without reset it recovers: %d turns lost, the last %d turns after the burst\n%s",
					lost, last, log.String())
			}
			if reset != ResetNever && last > 0 {
				t.Errorf("with reset %d turns lost, the last %d turns after the burst", lost, last)
			}
		})
	}
}

func (w *storyWorld) command(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "full", "free", "silent", "dead":
		for _, a := range d.CmdArgs {
			w.does[WorkerID(a.Key)] = d.Cmd
		}
		return ""
	case "busy":
		d.ScanArgs(t, "every", &w.every)
		var after string
		w.after = 0
		if d.MaybeScanArgs(t, "after", &after) {
			var err error
			if w.after, err = time.ParseDuration(after); err != nil {
				d.Fatalf(t, "after: %v", err)
			}
		}
		return ""
	case "turn":
		n := 1
		d.MaybeScanArgs(t, "n", &n)
		var out strings.Builder
		for range n {
			s := SessionKey(d.CmdArgs[0].Key)
			if d.HasArg("scores") {
				w.scores(&out, s)
			}
			w.play(&out, s)
		}
		return out.String()
	case "beliefs":
		return w.beliefs()
	}
	d.Fatalf(t, "unknown command %q", d.Cmd)
	return ""
}

// play plays one turn and returns how it ran.
func (w *storyWorld) play(out *strings.Builder, s SessionKey) Step {
	r := w.look(s)
	w.length[s] += 100
	w.turn++
	r.InputTokens = 24 * w.length[s]
	fmt.Fprintf(out, "turn %d:", w.turn)
	noisy := w.every > 0 && w.turn%w.every == 0
	d := start(r, w.f, w.b, w.p)
	for {
		step := d.next()
		switch step.Do {
		case Stop:
			fmt.Fprintf(out, " stop %s\n", step.Reason)
			d.finish()
			return step
		case Ask:
			if step.Wait > 0 {
				fmt.Fprintf(out, " (%s later)", step.Wait)
			}
			fmt.Fprintf(out, " %s", step.Worker)
			w.answer(out, d, r, step.Worker, noisy)
			noisy = false
		case Run:
			if w.run(out, d, step, s) {
				return step
			}
		}
	}
}

// look is the session's next request, with what the beliefs say of its overlap.
func (w *storyWorld) look(s SessionKey) Request {
	for _, d := range w.f.Decode {
		w.b.overlap[d] = w.resident[pair{s, d}]
	}
	return Request{Session: s, Turn: w.length[s] / 100}
}

func (w *storyWorld) answer(out *strings.Builder, d *driver, r Request, at WorkerID, busy bool) {
	held := w.resident[pair{r.Session, at}] > 0
	switch {
	case w.does[at] == "silent" || w.does[at] == "dead":
		fmt.Fprint(out, " silent,")
		d.unanswered()
	case (w.does[at] == "full" || busy) && held:
		fmt.Fprint(out, " full,")
		d.answer(Verdict{Reason: ReasonNoCapacity, RetryAfter: w.retryAfter(busy)})
	case w.does[at] == "full" || busy:
		fmt.Fprint(out, " full,")
		d.reject(ReasonNotResidentNoCapacity)
	case held:
		d.admit(Direct)
	case r.Turn == 0:
		d.admit(Seed)
	default:
		d.admit(Reseed)
	}
}

func (w *storyWorld) retryAfter(busy bool) time.Duration {
	if busy {
		return w.after
	}
	return 0
}

func (w *storyWorld) run(out *strings.Builder, d *driver, step Step, s SessionKey) bool {
	if w.does[step.Worker] == "dead" {
		fmt.Fprintf(out, " %s on %s dies,", step.Mode, step.Worker)
		d.fail()
		return false
	}
	fmt.Fprintf(out, " -> %s on %s", step.Mode, step.Worker)
	if step.Prefill != "" {
		fmt.Fprintf(out, " via %s", step.Prefill)
	}
	if step.Reason != "" {
		fmt.Fprintf(out, " (%s)", step.Reason)
	}
	fmt.Fprintln(out)
	clear(w.resident)
	w.resident[pair{s, step.Worker}] = w.length[s]
	d.firstByte()
	d.finish()
	return true
}

func (w *storyWorld) scores(out *strings.Builder, s SessionKey) {
	r := w.look(s)
	for _, d := range w.f.Decode {
		sc := ScoreOf(r, d, w.b, w.p)
		fmt.Fprintf(out, "  %s ⟨%d,%d,-%d,-%g⟩", d, sc.Reuse, sc.Sticky, sc.Inflight, sc.Assigned)
		if n := w.b.Rejects(s, d); n >= w.p.RejectThreshold {
			fmt.Fprintf(out, " passed over (%d)", n)
		} else if n > 0 {
			fmt.Fprintf(out, " rejects %d", n)
		}
		fmt.Fprintln(out)
	}
}

func (w *storyWorld) beliefs() string {
	var out strings.Builder
	var keys []string
	for s, d := range w.b.pin {
		keys = append(keys, fmt.Sprintf("pin[%s] = %s", s, d))
	}
	for k, n := range w.b.rejects {
		if n > 0 {
			keys = append(keys, fmt.Sprintf("rejects[%s,%s] = %d", k.s, k.d, n))
		}
	}
	slices.Sort(keys)
	for _, k := range keys {
		fmt.Fprintln(&out, k)
	}
	fmt.Fprintf(&out, "pin changes %d\n", w.b.pinChanges)
	return out.String()
}
