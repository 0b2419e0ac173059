package kvc

import (
	"testing"

	"pgregory.net/rapid"
)

func TestScoreCompare(t *testing.T) {
	cases := map[string]struct {
		a, b Score
		want int
	}{
		"one block more beats any load":              {Score{Reuse: 3, Inflight: 99, Assigned: 1e6}, Score{Reuse: 2}, +1},
		"one block more beats the pin":               {Score{Reuse: 3}, Score{Reuse: 2, Sticky: 1}, +1},
		"equal reuse: the pin beats any load":        {Score{Reuse: 2, Sticky: 1, Inflight: 99}, Score{Reuse: 2}, +1},
		"equal reuse and pin: fewer in flight wins":  {Score{Inflight: 1, Assigned: 9}, Score{Inflight: 2}, +1},
		"equal in flight: fewer assigned wins":       {Score{Assigned: 1}, Score{Assigned: 1.5}, +1},
		"a tiny fraction of an assignment decides":   {Score{Assigned: 0.999}, Score{Assigned: 1}, +1},
		"all equal: only the order is left":          {Score{1, 1, 1, 1}, Score{1, 1, 1, 1}, 0},
		"a load below zero would still be less load": {Score{Inflight: -1}, Score{}, +1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := tc.a.Compare(tc.b); got != tc.want {
				t.Errorf("Compare(%+v, %+v) = %d, want %d", tc.a, tc.b, got, tc.want)
			}
			if got := tc.b.Compare(tc.a); got != -tc.want {
				t.Errorf("Compare(%+v, %+v) = %d, want %d", tc.b, tc.a, got, -tc.want)
			}
		})
	}
}

func drawScore(t *rapid.T, label string) Score {
	small := rapid.IntRange(0, 2)
	return Score{
		Reuse: small.Draw(t, label+".reuse"), Sticky: rapid.IntRange(0, 1).Draw(t, label+".sticky"),
		Inflight: small.Draw(t, label+".inflight"), Assigned: float64(small.Draw(t, label+".assigned")),
	}
}

func TestScoresAreTotallyOrdered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := drawScore(t, "a"), drawScore(t, "b"), drawScore(t, "c")
		if a.Compare(b) != -b.Compare(a) {
			t.Fatalf("not antisymmetric: %+v %+v", a, b)
		}
		if (a.Compare(b) == 0) != (a == b) {
			t.Fatalf("a tie of different scores: %+v %+v", a, b)
		}
		if a.Compare(b) >= 0 && b.Compare(c) >= 0 && a.Compare(c) < 0 {
			t.Fatalf("not transitive: %+v %+v %+v", a, b, c)
		}
	})
}

// Q6: at α=1 one block elsewhere does not beat a pin without blocks (they tie
// on reuse and stickiness decides); α+1 blocks do. The paper's prose says that
// any one hit does, its formula says this, and the formula is normative.
func TestOneBlockDoesNotBeatThePin(t *testing.T) {
	for blocks, want := range map[int]WorkerID{0: "d1", 1: "d1", 2: "d2", 3: "d2"} {
		b := newBeliefs()
		b.pin["s"], b.overlap["d2"] = "d1", blocks
		if got, _ := Route(Request{Session: "s"}, ids("d", 2), b, Corrected()); got != want {
			t.Errorf("%d blocks elsewhere: Route = %s, want %s", blocks, got, want)
		}
		p := Corrected()
		p.StickyBonus = 0
		if got, _ := Route(Request{Session: "s"}, ids("d", 2), b, p); blocks > 0 && got != "d2" {
			t.Errorf("α=0, %d blocks elsewhere: Route = %s, want d2", blocks, got)
		}
	}
}
