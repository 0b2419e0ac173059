package kvc

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// capacityWorld answers questions as a worker without KV would: whoever is in
// willing admits.
func willing(ws ...WorkerID) func(WorkerID) Verdict {
	return func(d WorkerID) Verdict {
		if contains(ws, d) {
			return Verdict{CanAdmit: true, Mode: Reseed}
		}
		return Verdict{Reason: ReasonNotResidentNoCapacity}
	}
}

// Theorem 1′ (safety): if some eligible worker would admit r throughout the
// dispatch and ε ≥ |D|, Dispatch returns a mode other than Fallback within |D|
// questions. Premises: ε ≥ |D|; a worker is asked at most once (Q2); the
// willing worker is in the fleet, answers, and goes on being willing.
func TestTheorem1Safety(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.params.MaxProbes = len(w.workers) + rapid.IntRange(0, 2).Draw(t, "more")
		able := rapid.SliceOfNDistinct(rapid.SampledFrom(w.workers), 1, -1, rapid.ID).Draw(t, "willing")

		d := start(w.req, Fleet{Decode: w.workers, Prefill: ids("p", 1)}, w.view, w.params)
		last, asked := d.serve(willing(able...))
		if last.Mode == Fallback || !contains(able, last.Worker) {
			t.Fatalf("ended with %+v although %v were willing", last, able)
		}
		if len(asked) > len(w.workers) {
			t.Fatalf("%d questions for %d workers: %v", len(asked), len(w.workers), asked)
		}
	})
}

// Theorem 1′ on every small world: |D| ≤ 4, τ ≤ 3, all reject counts, all sets
// of willing workers.
func TestTheorem1SafetyExhaustively(t *testing.T) {
	for n := 1; n <= 4; n++ {
		for tau := 1; tau <= 3; tau++ {
			for counts := range pow(tau+1, n) {
				for able := 1; able < 1<<n; able++ {
					small(t, n, tau, counts, able)
				}
			}
		}
	}
}

func pow(a, n int) int {
	p := 1
	for range n {
		p *= a
	}
	return p
}

func small(t *testing.T, n, tau, counts, able int) {
	b, p := newBeliefs(), Corrected()
	p.RejectThreshold, p.MaxProbes = tau, n
	ws := ids("d", n)
	var can []WorkerID
	for i, d := range ws {
		b.rejects[pair{"s", d}] = counts % (tau + 1)
		counts /= tau + 1
		if able&(1<<i) != 0 {
			can = append(can, d)
		}
	}
	last, asked := start(Request{Session: "s"}, Fleet{Decode: ws, Prefill: ids("p", 1)}, b, p).serve(willing(can...))
	if last.Mode == Fallback || len(asked) > n || !contains(can, last.Worker) {
		t.Fatalf("|D|=%d τ=%d willing %v: %+v after asking %v", n, tau, can, last, asked)
	}
}

// Each premise of Theorem 1′ is needed.
func TestTheorem1NeedsItsPremises(t *testing.T) {
	cases := map[string]struct {
		params func(*Params)
		answer func(asked int, d WorkerID) Reply
	}{
		"fewer questions than workers": {
			func(p *Params) { p.MaxProbes = 2 },
			func(_ int, d WorkerID) Reply { return Reply{Verdict: willing("d3")(d)} },
		},
		"the same worker asked again": {
			func(p *Params) { p.MaxProbes, p.Probe = 3, ProbeRepick },
			func(_ int, d WorkerID) Reply { return Reply{Verdict: willing("d3")(d)} },
		},
		"a worker that stops being willing": {
			func(p *Params) { p.MaxProbes = 3 },
			func(asked int, d WorkerID) Reply {
				if asked == 1 {
					return Reply{Verdict: willing("d3")(d)} // d1: no; d3 would still
				}
				return Reply{Verdict: willing()(d)}
			},
		},
		"a worker that does not answer": {
			func(p *Params) { p.MaxProbes = 3 },
			func(_ int, d WorkerID) Reply { return Reply{Unknown: d == "d3", Verdict: willing("d3")(d)} },
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := Corrected()
			tc.params(&p)
			d := start(Request{Session: "s"}, pd(3, 1), newBeliefs(), p)
			for asked := 1; ; asked++ {
				s := d.next()
				if s.Do == Run {
					if s.Mode != Fallback {
						t.Errorf("still served as %s: the premise is not needed", s.Mode)
					}
					return
				}
				d.do(func() { d.Answer(tc.answer(asked, s.Worker)) })
			}
		})
	}
}

// Theorem 1‴, the machine's half: whatever the workers answer, Dispatch ends in
// a bounded number of steps, runs at most MaxAttempts times, never runs two at
// once, and holds nothing afterwards.
func TestTheorem1AlwaysEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		w.params = rapid.SampledFrom([]Params{Paper(), Corrected()}).Draw(t, "preset")
		w.params.MaxProbes = rapid.IntRange(0, 6).Draw(t, "probes")
		leased := w.params.Inflight == InflightLeased
		if !leased {
			clear(w.view.inflight) // it is never lowered
		}
		before := total(w.view.inflight)
		prefill := ids("p", rapid.IntRange(0, 2).Draw(t, "prefill"))
		f := Fleet{Decode: w.workers, Prefill: prefill, Path: ConditionalAggregation}
		for _, p := range f.Prefill {
			w.view.uncached[p] = rapid.IntRange(0, 500).Draw(t, "uncached")
		}
		d := start(w.req, f, w.view, w.params)
		bound := w.params.Probes(len(w.workers)) + 2*w.params.MaxAttempts + 4
		runs := 0
		for step := 0; ; step++ {
			if step > bound {
				t.Fatalf("still going after %d steps", step)
			}
			s := d.next()
			if s.Do == Stop {
				break
			}
			if s.Do == Run {
				runs++
			}
			if play(t, d, s) {
				break
			}
		}
		d.finish()
		if runs > w.params.MaxAttempts+1 { // one more for an expired lease, which ran nothing
			t.Fatalf("%d runs, at most %d allowed", runs, w.params.MaxAttempts)
		}
		if leased && total(w.view.inflight) != before || total(w.view.outstanding) != 0 {
			t.Fatalf("still held: inflight %v, outstanding %v", w.view.inflight, w.view.outstanding)
		}
		if w.view.lowest < 0 {
			t.Fatalf("a counter fell below zero: %d", w.view.lowest)
		}
	})
}

func total(m map[WorkerID]int) (n int) {
	for _, v := range m {
		n += v
	}
	return n
}

// play answers one step at random; true when the turn was served.
func play(t *rapid.T, d *driver, s Step) (served bool) {
	if s.Do == Ask {
		switch rapid.IntRange(0, 3).Draw(t, "answer") {
		case 0:
			d.unanswered()
		case 1:
			d.admit(rapid.SampledFrom([]Mode{Direct, Delta, Seed, Reseed}).Draw(t, "mode"))
		default:
			d.reject(rapid.SampledFrom([]Reason{ReasonNoCapacity, ReasonDraining, ReasonQueueFull}).Draw(t, "reason"))
		}
		return false
	}
	switch rapid.IntRange(0, 3).Draw(t, "run") {
	case 0:
		d.fail()
	case 1:
		d.failPrefill()
	case 2:
		d.reject(rapid.SampledFrom([]Reason{ReasonLeaseExpired, ReasonDraining}).Draw(t, "409"))
	default:
		d.firstByte()
		return true
	}
	return false
}

// Theorem 2′ (fast path): pin[s] = d, d holds the whole prefix and is below the
// threshold, append ≤ τ_append, and d has capacity ⇒ Direct(d) by the first
// question, whatever the load. Admit's half is played by a worker that answers
// as Algorithm 2 does under these premises.
func TestTheorem2FastPath(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		home := rapid.SampledFrom(w.workers).Draw(t, "home")
		w.view.pin["s"], w.view.overlap[home] = home, 3
		w.view.rejects[pair{"s", home}] = w.params.RejectThreshold - 1
		w.req.AppendTokens = rapid.IntRange(0, w.params.MaxAppendTokens).Draw(t, "append")

		d := start(w.req, Fleet{Decode: w.workers, Prefill: ids("p", 1)}, w.view, w.params)
		last, asked := d.serve(func(x WorkerID) Verdict {
			if x == home && w.req.AppendTokens <= w.params.MaxAppendTokens {
				return Verdict{CanAdmit: true, Mode: Direct}
			}
			return Verdict{CanAdmit: true, Mode: Reseed}
		})
		if last.Mode != Direct || last.Worker != home || len(asked) != 1 {
			t.Fatalf("ended with %+v after asking %v, want direct on %s at once", last, asked, home)
		}
	})
}

// Invariant 2: a success at d zeroes (s,d), and the session's other pairs never
// rise by it.
func TestInvariant2(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		able := rapid.SampledFrom(w.workers).Draw(t, "able")
		w.params.MaxProbes = len(w.workers)
		d := start(w.req, Fleet{Decode: w.workers, Prefill: ids("p", 1)}, w.view, w.params)
		var before map[pair]int
		for {
			s := d.next()
			if s.Do == Run {
				before = maps.Clone(w.view.rejects)
				d.firstByte()
				break
			}
			d.answer(willing(able)(s.Worker))
		}
		for k, n := range w.view.rejects {
			if k.d == able && n != 0 {
				t.Fatalf("rejects[s,%s] = %d after a success there", able, n)
			}
			if k.d != able && n != before[k]/2 {
				t.Fatalf("rejects[s,%s] = %d after a success elsewhere, want half of %d", k.d, n, before[k])
			}
		}
	})
}

// migrate plays turns of one session in a fleet that loses workers, and returns
// pin changes, refusals and home losses.
func migrate(t *rapid.T, p Params) (changes, refusals, losses int) {
	b := newBeliefs()
	all := ids("d", 4)
	up := slices.Clone(all)
	for range rapid.IntRange(1, 25).Draw(t, "turns") {
		if rapid.IntRange(0, 7).Draw(t, "event") == 0 {
			if len(up) > 1 {
				gone := rapid.SampledFrom(up).Draw(t, "gone")
				up = slices.DeleteFunc(slices.Clone(up), func(d WorkerID) bool { return d == gone })
				if b.pin["s"] == gone {
					losses++
				}
				for _, d := range []WorkerID{gone} { // its incarnation's belief goes along (Q15)
					delete(b.rejects, pair{"s", d})
					delete(b.overlap, d)
				}
			} else {
				up = slices.Clone(all)
			}
		}
		d := start(Request{Session: "s", InputTokens: 2400}, Fleet{Decode: up, Prefill: ids("p", 1)}, b, p)
		last, _ := d.serve(func(WorkerID) Verdict {
			if rapid.Bool().Draw(t, "admits") {
				return Verdict{CanAdmit: true, Mode: Reseed}
			}
			return Verdict{Reason: ReasonNoCapacity}
		})
		b.overlap[last.Worker] = 100
	}
	return b.pinChanges, b.rejected, losses
}

// Invariant 3 (Q12): pin changes ≤ ⌊rejects/τ⌋ + home losses. Premises: the
// patient rule, the pin moves only on success, and reset on success.
func TestInvariant3BoundsMigration(t *testing.T) {
	for _, scope := range []ResetScopeRule{ResetPair, ResetPairHalvesOthers, ResetSession} {
		t.Run(string(scope), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				p := Corrected()
				p.ResetScope = scope
				p.RejectThreshold = rapid.IntRange(1, 4).Draw(t, "threshold")
				changes, refusals, losses := migrate(t, p)
				if changes > refusals/p.RejectThreshold+losses {
					t.Fatalf("%d pin changes for %d refusals at τ=%d and %d home losses",
						changes, refusals, p.RejectThreshold, losses)
				}
			})
		})
	}
}

// Without the patient rule one refusal and one acceptance move the session: the
// paper's own bound does not hold for its own pseudocode.
func TestInvariant3NeedsPatience(t *testing.T) {
	p := Corrected()
	p.Spill = SpillMovesPin
	b := newBeliefs()
	b.pin["s"], b.overlap["d1"] = "d1", 50
	start(Request{Session: "s"}, pd(2, 1), b, p).serve(willing("d2"))
	if b.pinChanges != 1 || b.rejected != 1 {
		t.Errorf("%d pin changes after %d refusals, want 1 after 1", b.pinChanges, b.rejected)
	}
}

// With the patient rule the pin does move once its home is passed over.
func TestAPersistentlyFullHomeIsLeft(t *testing.T) {
	p := Corrected()
	b := newBeliefs()
	b.pin["s"], b.overlap["d1"] = "d1", 50
	b.rejects[pair{"s", "d1"}] = p.RejectThreshold
	start(Request{Session: "s"}, pd(2, 1), b, p).serve(willing("d2"))
	if b.pin["s"] != "d2" {
		t.Errorf("pin = %q after the home was passed over, want d2", b.pin["s"])
	}
}

// The simulator and the router run the same dispatch: equal inputs, equal steps.
func TestDispatchIsDeterministic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		seed := rapid.IntRange(0, 1<<10).Draw(t, "seed")
		run := func() string {
			b := newBeliefs()
			b.overlap, b.pin, b.rejects = w.view.overlap, maps.Clone(w.view.pin), maps.Clone(w.view.rejects)
			n := seed
			f := Fleet{Decode: w.workers, Prefill: ids("p", 2)}
			last, asked := start(w.req, f, b, w.params).serve(func(WorkerID) Verdict {
				n /= 2
				return Verdict{CanAdmit: n%2 == 1, Mode: Seed, Reason: ReasonNoCapacity}
			})
			return fmt.Sprint(last, asked, b.rejects)
		}
		if a, b := run(), run(); a != b {
			t.Fatalf("two runs differ:\n%s\n%s", a, b)
		}
	})
}
