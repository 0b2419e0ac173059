package kvc

import "testing"

func TestDispatchDirectAtHome(t *testing.T) {
	b := newBeliefs()
	b.pin["s"], b.overlap["d2"], b.uncached["p1"] = "d2", 10, 300
	d := start(Request{Session: "s", Turn: 1, InputTokens: 300}, Fleet{Decode: ids("d", 3), Prefill: ids("p", 1)}, b, Corrected())

	if s := d.next(); s.Do != Ask || s.Worker != "d2" || s.Prefill != "p1" || s.PrefillUncached != 300 {
		t.Fatalf("first step = %+v, want Ask d2 with p1", s)
	}
	if b.inflight["d2"] != 1 || b.outstanding["p1"] != 300 {
		t.Errorf("the question reserved inflight %d, outstanding %d; want 1, 300", b.inflight["d2"], b.outstanding["p1"])
	}
	d.admit(Direct)
	if s := d.next(); s.Do != Run || s.Worker != "d2" || s.Mode != Direct || s.Prefill != "" {
		t.Fatalf("second step = %+v, want Run d2 direct", s)
	}
	if b.outstanding["p1"] != 0 {
		t.Errorf("direct still holds %d tokens on p1", b.outstanding["p1"])
	}
	d.firstByte()
	d.finish()
	if !b.idle() {
		t.Errorf("not idle at the end: %+v", b)
	}
}
