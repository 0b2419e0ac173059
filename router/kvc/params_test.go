package kvc

import (
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The presets are normative: this table is algorithms.md §5 in Go. A ruling
// that is switched in a preset fails here, and in the behaviour it stands for.
func TestPresets(t *testing.T) {
	want := Params{
		Preset: "Corrected", StickyBonus: 1, RejectThreshold: 3, MaxAppendTokens: 8192, HighWaterPercent: 95, MaxAttempts: 3,
		Need: "Missing", Used: "Busy", Reserve: "Learnt", ReserveGuess: 1024, ProtectIdle: 2 * time.Minute,
		Probe: "Once", ProbeLimit: "AtMostFour", LargeAppend: "InPlace", Overlap: "Exclusive",
		ResetAt: "FirstToken", ResetScope: "PairHalvesOthers",
		Fault: "Neutral", RejectHalfLife: time.Minute, HalfOpenAfter: time.Minute,
		Inflight: "Leased", Assigned: "AtRun", AssignedHalfLife: 10 * time.Minute, Newcomer: "AtMinimum",
		Residency: "Optimistic",
		Fallback:  "LeastLoaded", FallbackPin: "IfNone", Lease: "Reserves", LeaseTTL: 5 * time.Second,
		PinAt: "FirstToken", Spill: "KeepsPin", ReseedCostPerToken: 70 * time.Microsecond,
		Prefill: "LeastOutstanding", Legs: "Together", Turns: "InOrder", Forks: "Children",
		Incarnations: "Cleared", IdleLock: "Running", AppendBy: "Worker", NoID: "Continues",
	}
	if diff := cmp.Diff(want, Corrected()); diff != "" {
		t.Errorf("Corrected (-want +got):\n%s", diff)
	}
	want = Params{
		Preset: "Paper", StickyBonus: 1, RejectThreshold: 3, MaxAppendTokens: 8192, HighWaterPercent: 95, MaxAttempts: 3,
		Need: "WholeInput", Used: "Everything", Reserve: "Nothing",
		Probe: "Repick", ProbeLimit: "AllButOne", LargeAppend: "Reject", Overlap: "Prefix",
		ResetAt: "Admission", ResetScope: "Pair", Fault: "Rejects",
		Inflight: "NeverLowered", Assigned: "Never", Newcomer: "AtZero", Residency: "FromFeed",
		Fallback: "RoundRobin", FallbackPin: "Never", Lease: "Promise", LeaseTTL: 5 * time.Second,
		PinAt: "Admission", Spill: "MovesPin", Prefill: "RoundRobin", Legs: "InSequence",
		Turns: "Unordered", Forks: "Ignored", Incarnations: "Kept", IdleLock: "UntilReleased",
		AppendBy: "Router", NoID: "Sessionless",
	}
	if diff := cmp.Diff(want, Paper()); diff != "" {
		t.Errorf("Paper (-want +got):\n%s", diff)
	}
}

// Every rule differs between the presets, or the ablation would measure
// nothing.
func TestEveryRuleDiffersBetweenThePresets(t *testing.T) {
	p, c := reflect.ValueOf(Paper()), reflect.ValueOf(Corrected())
	for i := range p.NumField() {
		f := p.Type().Field(i)
		rule := f.Type.Kind() == reflect.String
		if rule && p.Field(i).Interface() == c.Field(i).Interface() {
			t.Errorf("%s is %v in both presets", f.Name, p.Field(i))
		}
		if rule && p.Field(i).Len() == 0 || rule && c.Field(i).Len() == 0 {
			t.Errorf("%s is empty in a preset", f.Name)
		}
	}
}

func TestScaledDividesEveryDurationAndNothingElse(t *testing.T) {
	was, got := reflect.ValueOf(Corrected()), reflect.ValueOf(Corrected().Scaled(10))
	durations := 0
	for i := range was.NumField() {
		name := was.Type().Field(i).Name
		if d, ok := reflect.TypeAssert[time.Duration](was.Field(i)); ok {
			durations++
			if s, _ := reflect.TypeAssert[time.Duration](got.Field(i)); s != d/10 || d == 0 {
				t.Errorf("%s: %v scaled by 10 is %v", name, d, s)
			}
		} else if was.Field(i).Interface() != got.Field(i).Interface() {
			t.Errorf("%s changed from %v to %v", name, was.Field(i), got.Field(i))
		}
	}
	if durations != 6 {
		t.Errorf("%d durations, want 6: Scaled must know each", durations)
	}
	for _, s := range []float64{0, -1} {
		if diff := cmp.Diff(Corrected(), Corrected().Scaled(s)); diff != "" {
			t.Errorf("Scaled(%v) changed:\n%s", s, diff)
		}
	}
}

func TestProbes(t *testing.T) {
	cases := map[string]struct {
		p       Params
		n, want int
	}{
		"Corrected asks the only worker":           {Corrected(), 1, 1},
		"Corrected asks all of three":              {Corrected(), 3, 3},
		"Corrected asks four of many":              {Corrected(), 64, 4},
		"Corrected is never below one":             {Corrected(), 0, 1},
		"Paper asks nobody when there is only one": {Paper(), 1, 0},
		"Paper asks all but one":                   {Paper(), 9, 8},
		"Paper of none is none":                    {Paper(), 0, 0},
		"MaxProbes overrules the preset":           {Params{MaxProbes: 2}, 64, 2},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := tc.p.Probes(tc.n); got != tc.want {
				t.Errorf("Probes(%d) = %d, want %d", tc.n, got, tc.want)
			}
		})
	}
}

// Q3's consequence in the Paper preset: with one worker nothing is ever asked,
// so every turn is a Fallback, without an entry in any counter.
func TestPaperWithOneWorkerAlwaysFallsBack(t *testing.T) {
	b := newBeliefs()
	b.pin["s"], b.overlap["d1"] = "d1", 100
	last, asked := start(Request{Session: "s", Turn: 3}, pd(1, 1), b, Paper()).serve(willing("d1"))
	if last.Mode != Fallback || len(asked) != 0 {
		t.Errorf("ended with %+v after asking %v", last, asked)
	}
	if len(b.inflight) != 0 || len(b.assigned) != 0 {
		t.Errorf("Paper's Fallback is not counted, yet inflight %v, assigned %v", b.inflight, b.assigned)
	}
}

// Each ruling of the dispatch, switched alone, changes what can be seen: the
// value of see under Corrected and under Corrected with the paper's letter.
func TestEachRulingAlone(t *testing.T) {
	cases := map[string]struct {
		letter func(*Params)
		see    func(Params) any
		want   [2]any // corrected, letter
	}{
		"Q2 a worker is asked once": {
			func(p *Params) { p.Probe = ProbeRepick },
			func(p Params) any { return asked(p, func(*beliefs) {}) },
			[2]any{[]WorkerID{"d1", "d2", "d3"}, []WorkerID{"d1", "d1", "d1"}},
		},
		"Q3 at least one question": {
			func(p *Params) { p.ProbeLimit = ProbesAllButOne },
			func(p Params) any {
				last, _ := start(Request{}, pd(1, 1), newBeliefs(), p).serve(willing("d1"))
				return last.Mode
			},
			[2]any{Reseed, Fallback},
		},
		"Q7 reset at the first token, not before": {
			func(p *Params) { p.ResetAt = ResetAtAdmission },
			func(p Params) any { return rejectsAfterAdmission(p) },
			[2]any{2, 0},
		},
		"Q7 the session's other pairs are halved": {
			func(p *Params) { p.ResetScope = ResetPair },
			func(p Params) any { return othersAfterSuccess(p) },
			[2]any{1, 2},
		},
		"Q8 silence is no refusal": {
			func(p *Params) { p.Fault = FaultRejects },
			func(p Params) any {
				d, b := home(p)
				d.next()
				d.unanswered()
				return b.rejected
			},
			[2]any{0, 1},
		},
		"Q9 inflight is given back": {
			func(p *Params) { p.Inflight = InflightNeverLowered },
			func(p Params) any {
				b := newBeliefs()
				start(Request{}, pd(1, 1), b, p).serve(willing("d1"))
				return b.inflight["d1"]
			},
			[2]any{0, 1},
		},
		"Q9 inflight counts the question already": {
			func(p *Params) { p.Inflight = InflightNeverLowered },
			func(p Params) any {
				d, b := home(p)
				d.next()
				return b.inflight["d2"]
			},
			[2]any{1, 0},
		},
		"Q9 assigned is raised": {
			func(p *Params) { p.Assigned = AssignedNever },
			func(p Params) any {
				b := newBeliefs()
				start(Request{}, pd(1, 1), b, p).serve(willing("d1"))
				return b.assigned["d1"]
			},
			[2]any{1.0, 0.0},
		},
		"Q10 Fallback takes the least loaded": {
			func(p *Params) { p.Fallback = FallbackRoundRobin },
			func(p Params) any {
				last, _ := start(Request{}, pd(3, 1), loaded(), p).serve(willing())
				return last.Worker
			},
			[2]any{WorkerID("d3"), WorkerID("d1")},
		},
		"Q10 Fallback gives a first home": {
			func(p *Params) { p.FallbackPin = FallbackPinNever },
			func(p Params) any {
				b := newBeliefs()
				start(Request{Session: "s"}, pd(1, 1), b, p).serve(willing())
				return b.pin["s"]
			},
			[2]any{WorkerID("d1"), WorkerID("")},
		},
		"Q12 one refusal does not move the session": {
			func(p *Params) { p.Spill = SpillMovesPin },
			func(p Params) any {
				b := newBeliefs()
				b.pin["s"] = "d1"
				start(Request{Session: "s"}, pd(2, 1), b, p).serve(willing("d2"))
				return b.pin["s"]
			},
			[2]any{WorkerID("d1"), WorkerID("d2")},
		},
		"Q13 the idle prefill worker is taken": {
			func(p *Params) { p.Prefill = PrefillRoundRobin },
			func(p Params) any {
				last, _ := start(Request{}, pd(1, 2), loaded(), p).serve(willing("d1"))
				return last.Prefill
			},
			[2]any{WorkerID("p2"), WorkerID("p1")},
		},
		"R86 the pin moves on what was seen": {
			func(p *Params) { p.PinAt = PinAtAdmission },
			func(p Params) any {
				b := newBeliefs()
				d := start(Request{Session: "s"}, pd(1, 1), b, p)
				d.next()
				d.admit(Seed)
				d.next()
				d.fail()
				return b.pin["s"]
			},
			[2]any{WorkerID(""), WorkerID("d1")},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			letter := Corrected()
			tc.letter(&letter)
			got := [2]any{tc.see(Corrected()), tc.see(letter)}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("[corrected, letter] (-want +got):\n%s", diff)
			}
		})
	}
}

func loaded() *beliefs {
	b := newBeliefs()
	b.inflight["d1"], b.inflight["d2"] = 2, 1
	b.outstanding["p1"] = 100
	return b
}

// asked is whom a session that everyone refuses asks.
func asked(p Params, set func(*beliefs)) []WorkerID {
	b := newBeliefs()
	set(b)
	_, who := start(Request{Session: "s"}, pd(3, 1), b, p).serve(willing())
	return who
}

func rejectsAfterAdmission(p Params) int {
	d, b := home(p)
	b.rejects[pair{"s", "d2"}] = 2
	d.next()
	d.admit(Direct)
	d.next()
	return b.rejects[pair{"s", "d2"}]
}

func othersAfterSuccess(p Params) int {
	d, b := home(p)
	b.rejects[pair{"s", "d1"}] = 2
	d.serve(willing("d2"))
	return b.rejects[pair{"s", "d1"}]
}

func TestALeaseOutlastsARoundTripAtAnyScale(t *testing.T) {
	if got := Corrected().Scaled(1000).LeaseTTL; got != leaseFloor {
		t.Errorf("LeaseTTL at scale 1000 = %v, want the floor of %v", got, leaseFloor)
	}
	short := Corrected()
	short.LeaseTTL = 100 * time.Millisecond
	if got := short.Scaled(2).LeaseTTL; got != 100*time.Millisecond {
		t.Errorf("a TTL below the floor became %v, want it as it was", got)
	}
}
