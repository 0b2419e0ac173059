package kvc

import (
	"cmp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// world is a drawn request, fleet and beliefs.
type world struct {
	req     Request
	workers []WorkerID
	view    *beliefs
	params  Params
}

func drawWorld(t *rapid.T) world {
	w := world{
		req:     Request{Session: "s", Turn: rapid.IntRange(0, 3).Draw(t, "turn"), InputTokens: 2400},
		workers: ids("d", rapid.IntRange(1, 5).Draw(t, "workers")),
		view:    newBeliefs(),
		params:  Corrected(),
	}
	w.params.StickyBonus = rapid.IntRange(0, 3).Draw(t, "bonus")
	w.params.RejectThreshold = rapid.IntRange(1, 3).Draw(t, "threshold")
	for _, d := range w.workers {
		w.view.overlap[d] = rapid.IntRange(0, 3).Draw(t, "overlap")
		w.view.inflight[d] = rapid.IntRange(0, 2).Draw(t, "inflight")
		w.view.assigned[d] = float64(rapid.IntRange(0, 2).Draw(t, "assigned"))
		w.view.rejects[pair{"s", d}] = rapid.IntRange(0, 4).Draw(t, "rejects")
	}
	if pin := rapid.IntRange(0, len(w.workers)).Draw(t, "pin"); pin > 0 {
		w.view.pin["s"] = w.workers[pin-1]
	}
	return w
}

// slowRoute is the oracle: it sorts all candidates by everything that counts.
func slowRoute(w world) WorkerID {
	type candidate struct {
		d      WorkerID
		over   bool
		n      int
		key    [4]float64 // bigger is better
		before int
	}
	var cs []candidate
	anyone := false
	for i, d := range w.workers {
		sticky := 0
		if w.view.pin["s"] == d {
			sticky = 1
		}
		n := w.view.rejects[pair{"s", d}]
		anyone = anyone || n < w.params.RejectThreshold
		cs = append(cs, candidate{d, n >= w.params.RejectThreshold, n, [4]float64{
			float64(w.view.overlap[d] + w.params.StickyBonus*sticky), float64(sticky),
			-float64(w.view.inflight[d]), -w.view.assigned[d],
		}, i})
	}
	slices.SortFunc(cs, func(a, b candidate) int {
		if a.over != b.over {
			if a.over {
				return +1
			}
			return -1
		}
		if !anyone && a.n != b.n {
			return cmp.Compare(a.n, b.n)
		}
		for i := range a.key {
			if a.key[i] != b.key[i] {
				return cmp.Compare(b.key[i], a.key[i])
			}
		}
		return cmp.Compare(a.before, b.before)
	})
	return cs[0].d
}

func TestRouteAgreesWithTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		got, ok := Route(w.req, w.workers, w.view, w.params)
		if want := slowRoute(w); !ok || got != want {
			t.Fatalf("Route = %q, the sorted list says %q", got, want)
		}
	})
}

func TestRouteOfNobodyIsNobody(t *testing.T) {
	if d, ok := Route(Request{Session: "s"}, nil, newBeliefs(), Corrected()); ok {
		t.Errorf("Route over no workers = %q", d)
	}
}

func TestRouteTable(t *testing.T) {
	cases := map[string]struct {
		set  func(*beliefs)
		want WorkerID
	}{
		"all equal: the first": {func(*beliefs) {}, "d1"},
		"a worker that refused τ times is passed over, whatever it holds": {
			func(b *beliefs) { b.overlap["d1"], b.rejects[pair{"s", "d1"}] = 100, 3 }, "d2"},
		"τ-1 refusals change nothing": {
			func(b *beliefs) { b.overlap["d1"], b.rejects[pair{"s", "d1"}] = 100, 2 }, "d1"},
		"another session's refusals do not count": {
			func(b *beliefs) { b.rejects[pair{"other", "d1"}] = 9 }, "d1"},
		"everyone passed over: the least rejected": {
			func(b *beliefs) {
				b.rejects[pair{"s", "d1"}], b.rejects[pair{"s", "d2"}], b.rejects[pair{"s", "d3"}] = 5, 4, 3
				b.overlap["d1"] = 100
			}, "d3"},
		"everyone passed over equally: the score decides (E-35)": {
			func(b *beliefs) {
				b.rejects[pair{"s", "d1"}], b.rejects[pair{"s", "d2"}], b.rejects[pair{"s", "d3"}] = 3, 3, 3
				b.overlap["d2"] = 100
			}, "d2"},
		"everyone passed over equally: the pin counts in the score": {
			func(b *beliefs) {
				b.rejects[pair{"s", "d1"}], b.rejects[pair{"s", "d2"}], b.rejects[pair{"s", "d3"}] = 3, 3, 3
				b.pin["s"] = "d3"
			}, "d3"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBeliefs()
			tc.set(b)
			if got, _ := Route(Request{Session: "s"}, ids("d", 3), b, Corrected()); got != tc.want {
				t.Errorf("Route = %s, want %s", got, tc.want)
			}
		})
	}
}

// Theorem 2, router half: a pinned worker that holds the whole prefix and is
// not passed over is always chosen, whatever the load. Premises: the pin
// (without it an equal overlap elsewhere, less loaded, may win), the whole
// prefix (without it a worker that holds more may win), below the threshold,
// and α ≥ 1 or a tie broken by stickiness, which any α gives.
func TestRouteTheorem2(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		d := rapid.SampledFrom(w.workers).Draw(t, "home")
		w.view.pin["s"] = d
		w.view.overlap[d] = 3 // nobody was drawn more: the whole prefix
		w.view.rejects[pair{"s", d}] = w.params.RejectThreshold - 1

		if got, _ := Route(w.req, w.workers, w.view, w.params); got != d {
			t.Fatalf("Route = %q, want the resident, pinned worker %q", got, d)
		}
	})
}

// Each premise of Theorem 2 is needed: dropping it lets another worker win.
func TestRouteTheorem2NeedsItsPremises(t *testing.T) {
	cases := map[string]func(*beliefs){
		"without the pin":          func(b *beliefs) { delete(b.pin, "s"); b.inflight["d2"] = 1 },
		"without the whole prefix": func(b *beliefs) { b.overlap["d2"] = 8 },
		"when passed over":         func(b *beliefs) { b.rejects[pair{"s", "d2"}] = 3 },
	}
	for name, drop := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBeliefs()
			b.pin["s"], b.overlap["d1"], b.overlap["d2"] = "d2", 10, 10
			if got, _ := Route(Request{Session: "s"}, ids("d", 2), b, Corrected()); got != "d2" {
				t.Fatalf("with all premises Route = %s, want d2", got)
			}
			drop(b)
			if got, _ := Route(Request{Session: "s"}, ids("d", 2), b, Corrected()); got != "d1" {
				t.Errorf("Route = %s, want d1", got)
			}
		})
	}
}

func TestPickPrefill(t *testing.T) {
	cases := map[string]struct {
		set  func(*beliefs)
		want WorkerID
	}{
		"all equal: the first":          {func(*beliefs) {}, "p1"},
		"the one with less to do":       {func(b *beliefs) { b.outstanding["p1"] = 1 }, "p2"},
		"the one that holds the prompt": {func(b *beliefs) { b.uncached["p3"] = 100 }, "p3"},
		"holding it is not worth a longer queue": {
			func(b *beliefs) { b.uncached["p3"], b.outstanding["p3"] = 0, 1001 }, "p1"},
		"equal finish: the one that holds more": {
			func(b *beliefs) { b.uncached["p2"], b.outstanding["p2"] = 400, 600 }, "p2"},
		"nobody holds it: least outstanding alone": {
			func(b *beliefs) { b.outstanding["p1"], b.outstanding["p2"] = 9, 8 }, "p3"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b := newBeliefs()
			for _, p := range ids("p", 3) {
				b.uncached[p] = 1000
			}
			tc.set(b)
			cursor := 0
			if got, _ := PickPrefill(ids("p", 3), b, Corrected(), &cursor); got != tc.want || cursor != 0 {
				t.Errorf("PickPrefill = %s, cursor %d; want %s, 0", got, cursor, tc.want)
			}
		})
	}
	if p, ok := PickPrefill(nil, newBeliefs(), Corrected(), new(int)); ok {
		t.Errorf("PickPrefill over no workers = %q", p)
	}
}

// Q13, Paper: by turns, whatever the load.
func TestPaperPrefillTakesTurns(t *testing.T) {
	b, cursor := newBeliefs(), 0
	b.outstanding["p2"] = 1 << 20
	var got []WorkerID
	for range 5 {
		p, _ := PickPrefill(ids("p", 3), b, Paper(), &cursor)
		got = append(got, p)
	}
	if want := []WorkerID{"p1", "p2", "p3", "p1", "p2"}; !slices.Equal(got, want) {
		t.Errorf("round robin = %v, want %v", got, want)
	}
}

func TestRoundRobinSkipsAndSurvivesAShrinkingSet(t *testing.T) {
	cursor := 7
	if w, ok := roundRobin(ids("p", 2), []WorkerID{"p2"}, &cursor); !ok || w != "p1" {
		t.Errorf("roundRobin = %q %v, want p1", w, ok)
	}
	cursor = -1 // an overflowed counter
	if w, ok := roundRobin(ids("p", 2), nil, &cursor); !ok || w == "" {
		t.Errorf("roundRobin = %q %v, want any worker", w, ok)
	}
	if w, ok := roundRobin(ids("p", 2), ids("p", 2), &cursor); ok {
		t.Errorf("roundRobin over skipped workers = %q", w)
	}
}
