package kvc

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func pd(d, p int) Fleet {
	return Fleet{Decode: ids("d", d), Prefill: ids("p", p), Path: ConditionalAggregation}
}

// home is a session resident on d2 of three, with one prefill worker.
func home(p Params) (*driver, *beliefs) {
	b := newBeliefs()
	b.pin["s"], b.overlap["d2"], b.uncached["p1"] = "d2", 10, 300
	return start(Request{Session: "s", Turn: 1, InputTokens: 300}, pd(3, 1), b, p), b
}

func wantStep(t *testing.T, got, want Step) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("step (-want +got):\n%s", diff)
	}
}

func TestADirectTurnAsksHomeAndHoldsNoPrefill(t *testing.T) {
	d, b := home(Corrected())
	wantStep(t, d.next(), Step{Do: Ask, Worker: "d2", Prefill: "p1", PrefillUncached: 300})
	wantStep(t, d.next(), Step{Do: Ask, Worker: "d2", Prefill: "p1", PrefillUncached: 300}) // the same again
	if b.inflight["d2"] != 1 || b.outstanding["p1"] != 300 {
		t.Errorf("the question reserved inflight %d, outstanding %d; want 1, 300", b.inflight["d2"], b.outstanding["p1"])
	}
	d.admit(Direct)
	wantStep(t, d.next(), Step{Do: Run, Worker: "d2", Mode: Direct})
	if b.outstanding["p1"] != 0 {
		t.Errorf("direct still holds %d tokens on p1", b.outstanding["p1"])
	}
	if b.assigned["d2"] != 1 {
		t.Errorf("assigned = %v, want 1", b.assigned["d2"])
	}
	d.firstByte()
	d.finish()
	if !b.idle() {
		t.Errorf("not idle at the end: %+v", b)
	}
}

func TestASeedHoldsItsPrefillWorkerUntilTheFirstByte(t *testing.T) {
	b := newBeliefs()
	b.uncached["p1"] = 300
	d := start(Request{Session: "s"}, pd(2, 1), b, Corrected())
	d.next()
	d.admit(Seed)
	wantStep(t, d.next(), Step{Do: Run, Worker: "d1", Prefill: "p1", PrefillUncached: 300, Mode: Seed})
	if b.outstanding["p1"] != 300 {
		t.Errorf("outstanding = %d during prefill, want 300", b.outstanding["p1"])
	}
	d.firstByte()
	if b.outstanding["p1"] != 0 || b.inflight["d1"] != 1 {
		t.Errorf("after the first byte outstanding %d, inflight %d; want 0, 1 (R58)", b.outstanding["p1"], b.inflight["d1"])
	}
	if b.pin["s"] != "d1" {
		t.Errorf("pin = %q, want d1", b.pin["s"])
	}
	d.finish()
	if !b.idle() {
		t.Errorf("not idle at the end: %+v", b)
	}
}

func TestALargeAppendStaysHomeAndSaysSo(t *testing.T) {
	d, b := home(Corrected())
	d.next()
	d.answer(Verdict{CanAdmit: true, Mode: Reseed, Reason: ReasonLargeAppend})
	wantStep(t, d.next(), Step{
		Do: Run, Worker: "d2", Prefill: "p1", PrefillUncached: 300, Mode: Reseed, Reason: ReasonLargeAppend,
	})
	if b.rejected != 0 {
		t.Error("an admission in place counted as a refusal (Q4)")
	}
}

func TestWhatARefusalCountsAs(t *testing.T) {
	cases := map[string]struct {
		reason  Reason
		session SessionKey
		want    int
	}{
		"no capacity counts":             {ReasonNoCapacity, "s", 1},
		"no room for a newcomer counts":  {ReasonNotResidentNoCapacity, "s", 1},
		"a large append counts":          {ReasonRealLargeAppend, "s", 1},
		"a class budget does not":        {ReasonClassBudget, "s", 0},
		"draining does not":              {ReasonDraining, "s", 0},
		"a stale epoch does not":         {ReasonStaleEpoch, "s", 0},
		"a full queue does not":          {ReasonQueueFull, "s", 0},
		"a sessionless request does not": {ReasonNoCapacity, "", 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBeliefs()
			d := start(Request{Session: tc.session}, pd(2, 1), b, Corrected())
			d.next()
			d.reject(tc.reason)
			if b.rejected != tc.want {
				t.Errorf("rejects = %d, want %d", b.rejected, tc.want)
			}
			if s := d.next(); s.Do != Ask || s.Worker != "d2" {
				t.Errorf("after the refusal: %+v, want Ask d2", s)
			}
			if b.inflight["d1"] != 0 || b.inflight["d2"] != 1 {
				t.Errorf("inflight = %v, want only d2's", b.inflight)
			}
		})
	}
}

// R80, Q8: one admission that timed out gives nothing up. The next choice is
// asked, serves this turn, and the session's home stays.
func TestAnUnansweredHomeStaysHome(t *testing.T) {
	d, b := home(Corrected())
	d.next()
	d.unanswered()
	s := d.next()
	if s.Do != Ask || s.Worker != "d1" {
		t.Fatalf("after silence: %+v, want Ask d1", s)
	}
	d.admit(Reseed)
	d.next()
	d.firstByte()
	d.finish()
	if b.rejected != 0 || b.pin["s"] != "d2" {
		t.Errorf("rejects %d, pin %q; want 0, d2", b.rejected, b.pin["s"])
	}
}

func TestFallback(t *testing.T) {
	t.Run("after refusals by all: the least loaded, and the reason says so", func(t *testing.T) {
		d, b := home(Corrected())
		b.inflight["d1"], b.inflight["d2"], b.assigned["d2"] = 2, 1, 7
		b.inflight["d3"], b.assigned["d3"] = 1, 3
		for range 3 {
			d.next()
			d.reject(ReasonNoCapacity)
		}
		wantStep(t, d.next(), Step{
			Do: Run, Worker: "d3", Prefill: "p1", PrefillUncached: 300, Mode: Fallback, Reason: ReasonAllRefused,
		})
		d.firstByte()
		d.finish()
		if b.pin["s"] != "d2" {
			t.Errorf("pin = %q, want d2: a Fallback moves no session that has a home (Q10)", b.pin["s"])
		}
	})
	t.Run("after silence by all: unanswered", func(t *testing.T) {
		d, _ := home(Corrected())
		for range 3 {
			d.next()
			d.unanswered()
		}
		if s := d.next(); s.Mode != Fallback || s.Reason != ReasonUnanswered {
			t.Errorf("step = %+v, want Fallback, unanswered", s)
		}
	})
	t.Run("who did not answer comes last, however idle", func(t *testing.T) {
		b := newBeliefs()
		b.inflight["d1"] = 5
		d := start(Request{Session: "s"}, pd(2, 1), b, Corrected())
		d.next()
		d.unanswered() // d2, the less loaded
		d.next()
		d.reject(ReasonNoCapacity) // d1
		if s := d.next(); s.Worker != "d1" {
			t.Errorf("Fallback on %s, want d1", s.Worker)
		}
	})
	t.Run("gives a home to a session without one, with a clean count", func(t *testing.T) {
		b := newBeliefs()
		d := start(Request{Session: "s"}, pd(1, 1), b, Corrected())
		d.next()
		d.reject(ReasonNoCapacity)
		d.next()
		if _, ok := b.pin["s"]; ok {
			t.Error("pinned before the first byte (R86)")
		}
		d.firstByte()
		if b.pin["s"] != "d1" || b.rejects[pair{"s", "d1"}] != 0 {
			t.Errorf("pin %q, rejects %d; want d1, 0", b.pin["s"], b.rejects[pair{"s", "d1"}])
		}
	})
	t.Run("a home outside the fleet is no home", func(t *testing.T) {
		b := newBeliefs()
		b.pin["s"] = "gone"
		d := start(Request{Session: "s"}, pd(1, 1), b, Corrected())
		d.next()
		d.reject(ReasonNoCapacity)
		d.next()
		d.firstByte()
		if b.pin["s"] != "d1" {
			t.Errorf("pin = %q, want d1", b.pin["s"])
		}
	})
	t.Run("a sessionless Fallback pins nothing", func(t *testing.T) {
		b := newBeliefs()
		d := start(Request{}, pd(1, 1), b, Corrected())
		d.next()
		d.reject(ReasonNoCapacity)
		d.next()
		d.firstByte()
		if len(b.pin) != 0 {
			t.Errorf("pins = %v", b.pin)
		}
	})
}

func TestRetries(t *testing.T) {
	t.Run("a run that failed goes elsewhere, and the failed worker is not asked again", func(t *testing.T) {
		d, b := home(Corrected())
		d.next()
		d.admit(Direct)
		d.next()
		d.fail()
		if b.inflight["d2"] != 0 {
			t.Errorf("the failed run still counts on d2")
		}
		s := d.next()
		if s.Do != Ask || s.Worker == "d2" {
			t.Fatalf("after the failure: %+v, want Ask of another", s)
		}
		d.admit(Reseed)
		if s := d.next(); s.Do != Run || s.Mode != Reseed || d.Attempts() != 2 {
			t.Errorf("second attempt: %+v, attempts %d", s, d.Attempts())
		}
		if b.rejected != 0 {
			t.Error("a broken run counted as a refusal")
		}
	})
	t.Run("attempts are bounded", func(t *testing.T) {
		d := start(Request{Session: "s"}, pd(9, 1), newBeliefs(), Corrected())
		runs := 0
		for {
			s := d.next()
			if s.Do == Ask {
				d.admit(Seed)
				continue
			}
			if s.Do == Stop {
				if s.Reason != ReasonRetry || runs != Corrected().MaxAttempts {
					t.Errorf("stopped with %q after %d runs, want %q after %d", s.Reason, runs, ReasonRetry, Corrected().MaxAttempts)
				}
				return
			}
			runs++
			d.fail()
		}
	})
	t.Run("the last worker failed: stop, and hold nothing", func(t *testing.T) {
		b := newBeliefs()
		d := start(Request{Session: "s"}, pd(1, 1), b, Corrected())
		d.next()
		d.admit(Seed)
		d.next()
		d.fail()
		wantStep(t, d.next(), Step{Do: Stop, Reason: ReasonRetry})
		if !b.idle() {
			t.Errorf("not idle: %+v", b)
		}
	})
	t.Run("after the first byte a failure starts nothing (R59)", func(t *testing.T) {
		d, b := home(Corrected())
		d.next()
		d.admit(Direct)
		run := d.next()
		d.firstByte()
		d.fail()
		wantStep(t, d.next(), run)
		if b.inflight["d2"] != 1 {
			t.Error("the broken stream was given back before Done")
		}
	})
	t.Run("a broken prefill leg excludes both its workers (R77)", func(t *testing.T) {
		b := newBeliefs()
		b.uncached["p1"], b.uncached["p2"] = 100, 200
		d := start(Request{Session: "s"}, pd(2, 2), b, Corrected())
		d.next()
		d.admit(Seed)
		if s := d.next(); s.Prefill != "p1" {
			t.Fatalf("first prefill = %s, want p1", s.Prefill)
		}
		d.failPrefill()
		if s := d.next(); s.Do != Ask || s.Worker != "d2" || s.Prefill != "p2" {
			t.Errorf("retry = %+v, want Ask d2 with p2", s)
		}
		if b.outstanding["p1"] != 0 {
			t.Error("the broken leg still counts on p1")
		}
	})
	t.Run("an expired lease is asked for anew, once, and is no attempt", func(t *testing.T) {
		d, _ := home(Corrected())
		d.next()
		d.admit(Direct)
		d.next()
		d.reject(ReasonLeaseExpired)
		if s := d.next(); s.Do != Ask || s.Worker != "d2" || d.Attempts() != 0 {
			t.Fatalf("after expiry: %+v, attempts %d; want Ask d2 again, 0", s, d.Attempts())
		}
		d.admit(Direct)
		d.next()
		d.reject(ReasonLeaseExpired)
		if s := d.next(); s.Worker == "d2" {
			t.Errorf("after the second expiry: %+v, want another worker", s)
		}
	})
	t.Run("a worker whose lease expired twice still serves a fallback", func(t *testing.T) {
		d := start(Request{Session: "s"}, Fleet{Decode: []WorkerID{"d1"}, Prefill: []WorkerID{"p1"}}, newBeliefs(), Corrected())
		for range 2 {
			d.next()
			d.admit(Seed)
			d.next()
			d.reject(ReasonLeaseExpired)
		}
		if s := d.next(); s.Do != Run || s.Worker != "d1" || s.Mode != Fallback {
			t.Errorf("after two expiries: %+v, want a Fallback on d1: it is willing", s)
		}
	})
	t.Run("a run refused because the worker drains goes elsewhere", func(t *testing.T) {
		d, b := home(Corrected())
		d.next()
		d.admit(Direct)
		d.next()
		d.reject(ReasonDraining)
		if s := d.next(); s.Do != Ask || s.Worker == "d2" || b.inflight["d2"] != 0 {
			t.Errorf("after the refused run: %+v, inflight %v", s, b.inflight)
		}
	})
}

func TestNoWorker(t *testing.T) {
	d := start(Request{Session: "s"}, Fleet{}, newBeliefs(), Corrected())
	wantStep(t, d.next(), Step{Do: Stop, Reason: ReasonNoWorker})
}

func TestWithoutPrefillWorkers(t *testing.T) {
	run := func(m Mode) Step { return Step{Do: Run, Worker: "d1", Mode: m} }
	stop := Step{Do: Stop, Reason: ReasonNoPrefill}
	cases := map[string]struct {
		path DirectPath
		mode Mode
		want Step
	}{
		"unified seeds on the decode worker":             {Unified, Seed, run(Seed)},
		"unknown profile counts as unified":              {"", Seed, run(Seed)},
		"a PD profile still serves what is resident":     {ConditionalAggregation, Direct, run(Direct)},
		"a PD profile cannot seed, and says so":          {ConditionalAggregation, Seed, stop},
		"a delta needs a prefill worker as well":         {DeltaTransfer, Delta, stop},
		"the engine's own admission cannot seed without": {NativeAdmission, Reseed, stop},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBeliefs()
			d := start(Request{Session: "s"}, Fleet{Decode: ids("d", 1), Path: tc.path}, b, Corrected())
			wantStep(t, d.next(), Step{Do: Ask, Worker: "d1"})
			d.admit(tc.mode)
			wantStep(t, d.next(), tc.want)
			d.finish()
			if !b.idle() {
				t.Errorf("not idle: %+v", b)
			}
		})
	}
	t.Run("Fallback on unified runs on the decode worker", func(t *testing.T) {
		d := start(Request{}, Fleet{Decode: ids("d", 1), Path: Unified}, newBeliefs(), Corrected())
		d.next()
		d.reject(ReasonNoCapacity)
		wantStep(t, d.next(), Step{Do: Run, Worker: "d1", Mode: Fallback, Reason: ReasonAllRefused})
	})
	t.Run("Fallback on a PD profile stops", func(t *testing.T) {
		d := start(Request{}, Fleet{Decode: ids("d", 1), Path: DeltaTransfer}, newBeliefs(), Corrected())
		d.next()
		d.reject(ReasonNoCapacity)
		wantStep(t, d.next(), Step{Do: Stop, Reason: ReasonNoPrefill})
	})
}

// Q12: the home that refuses but expects room soon is waited for once, if that
// is cheaper than a reseed; the refusal that was waited out does not count.
func TestPatience(t *testing.T) {
	soon := 10 * time.Millisecond // the input of 300 tokens costs 21 ms elsewhere
	refuse := func(r Reason, after time.Duration) Verdict { return Verdict{Reason: r, RetryAfter: after} }

	t.Run("waits at home", func(t *testing.T) {
		d, b := home(Corrected())
		d.next()
		d.answer(refuse(ReasonNoCapacity, soon))
		wantStep(t, d.next(), Step{Do: Ask, Worker: "d2", Prefill: "p1", PrefillUncached: 300, Wait: soon})
		if b.rejected != 0 {
			t.Error("the refusal that is waited out counted")
		}
		d.admit(Direct)
		wantStep(t, d.next(), Step{Do: Run, Worker: "d2", Mode: Direct})
	})
	t.Run("once", func(t *testing.T) {
		d, b := home(Corrected())
		d.next()
		d.answer(refuse(ReasonNoCapacity, soon))
		d.next()
		d.answer(refuse(ReasonNoCapacity, soon))
		if s := d.next(); s.Worker == "d2" || b.rejected != 1 {
			t.Errorf("step %+v, rejects %d; want another worker, 1", s, b.rejected)
		}
	})
	no := map[string]struct {
		v Verdict
		p func(*Params)
	}{
		"not when a reseed is cheaper":       {refuse(ReasonNoCapacity, 22*time.Millisecond), func(*Params) {}},
		"not without a time":                 {refuse(ReasonNoCapacity, 0), func(*Params) {}},
		"not for what waiting cannot cure":   {refuse(ReasonDraining, soon), func(*Params) {}},
		"not under the eager rule":           {refuse(ReasonNoCapacity, soon), func(p *Params) { p.Spill = SpillMovesPin }},
		"not when a reseed costs nothing":    {refuse(ReasonNoCapacity, soon), func(p *Params) { p.ReseedCostPerToken = 0 }},
		"not for a large append (letter Q4)": {refuse(ReasonRealLargeAppend, soon), func(*Params) {}},
	}
	for name, tc := range no {
		t.Run(name, func(t *testing.T) {
			p := Corrected()
			tc.p(&p)
			d, _ := home(p)
			d.next()
			d.answer(tc.v)
			if s := d.next(); s.Worker == "d2" || s.Wait != 0 {
				t.Errorf("step = %+v, want another worker at once", s)
			}
		})
	}
	t.Run("not away from home", func(t *testing.T) {
		b := newBeliefs()
		d := start(Request{Session: "s", InputTokens: 1 << 20}, pd(2, 1), b, Corrected())
		d.next()
		d.answer(refuse(ReasonNoCapacity, soon))
		if s := d.next(); s.Worker != "d2" {
			t.Errorf("step = %+v, want d2", s)
		}
	})
}

func TestCallsOutOfTurnDoNothing(t *testing.T) {
	d, b := home(Corrected())
	d.admit(Direct) // nothing was asked
	d.firstByte()
	d.fail()
	d.next()
	d.firstByte() // nothing runs
	d.fail()
	d.admit(Direct)
	d.next()
	d.firstByte()
	d.reject(ReasonNoCapacity) // it streams
	d.firstByte()
	d.finish()
	d.finish()
	d.admit(Direct)
	d.fail()
	d.firstByte()
	wantStep(t, d.next(), Step{Do: Stop})
	if !b.idle() || b.rejected != 0 || b.assigned["d2"] != 1 {
		t.Errorf("beliefs after calls out of turn: %+v", b)
	}
}

// R90: simultaneous first turns see each other, because selecting reserves.
func TestSimultaneousFirstTurnsSpread(t *testing.T) {
	b := newBeliefs()
	f := pd(8, 1)
	for i := range 200 {
		d := start(Request{Session: SessionKey(rune('a' + i))}, f, b, Corrected())
		d.next()
	}
	var counts []int
	for _, w := range f.Decode {
		counts = append(counts, b.inflight[w])
	}
	if slices.Max(counts)-slices.Min(counts) > 2 {
		t.Errorf("200 simultaneous first turns over 8 workers: %v", counts)
	}
}
