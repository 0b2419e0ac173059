package stats_test

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/stats"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

func TestNearestRank(t *testing.T) {
	s := []float64{15, 20, 35, 40, 50} // the textbook example
	ranks := map[float64]float64{0: 15, 5: 15, 20: 15, 30: 20, 40: 20, 50: 35, 99: 50, 100: 50, 200: 50, -1: 15}
	for p, want := range ranks {
		if got := stats.NearestRank(s, p); got != want {
			t.Errorf("NearestRank(%v) = %v, want %v", p, got, want)
		}
	}
}

func TestQuantile(t *testing.T) {
	s := []float64{15, 20, 35, 40, 50} // numpy.quantile
	for q, want := range map[float64]float64{0: 15, 0.05: 16, 0.3: 23, 0.4: 29, 0.5: 35, 0.95: 48, 1: 50, 2: 50, -1: 15} {
		if got := stats.Quantile(s, q); !near(got, want) {
			t.Errorf("Quantile(%v) = %v, want %v", q, got, want)
		}
	}
	if got := stats.Quantile([]float64{7}, 0.3); got != 7 {
		t.Errorf("Quantile of one = %v", got)
	}
}

func TestEmptySamples(t *testing.T) {
	for name, got := range map[string]float64{
		"NearestRank": stats.NearestRank(nil, 50), "Quantile": stats.Quantile(nil, 0.5),
		"Mean": stats.Mean(nil), "Median": stats.Median(nil), "Gini": stats.Gini(nil),
		"Bootstrap": stats.Bootstrap{}.PairedBootstrap(nil, stats.Mean, nil).Estimate,
	} {
		if !math.IsNaN(got) {
			t.Errorf("%s of nothing = %v, want NaN", name, got)
		}
	}
	s := stats.Summarize(nil)
	if _, err := json.Marshal(s); err != nil || s.N != 0 {
		t.Errorf("Summarize(nil) = %+v, %v", s, err)
	}
}

func TestSummarize(t *testing.T) {
	var xs []float64
	for i := 100; i >= 1; i-- {
		xs = append(xs, float64(i))
	}
	want := stats.Summary{N: 100, Mean: 50.5, P50: 50, P90: 90, P95: 95, P99: 99, Max: 100}
	if diff := cmp.Diff(want, stats.Summarize(xs)); diff != "" {
		t.Errorf("Summarize (-want +got):\n%s", diff)
	}
	if xs[0] != 100 {
		t.Error("Summarize reordered its argument")
	}
	if got := stats.Median([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("Median = %v", got)
	}
}

func TestGini(t *testing.T) {
	cases := map[string]struct {
		loads []float64
		want  float64
	}{
		"equal":           {[]float64{3, 3, 3, 3}, 0},
		"all zero":        {[]float64{0, 0}, 0},
		"one carries all": {[]float64{0, 8, 0, 0}, 0.75},
		"one worker":      {[]float64{5}, 0},
		"a ramp":          {[]float64{4, 1, 3, 2}, 0.25},
	}
	for name, tc := range cases {
		if got := stats.Gini(tc.loads); !near(got, tc.want) {
			t.Errorf("%s: Gini = %v, want %v", name, got, tc.want)
		}
	}
}

// Gini equals half the relative mean absolute difference.
func TestGiniAgainstItsDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(0, 1000), 1, 30).Draw(t, "loads")
		sum, diff := 0.0, 0.0
		for _, a := range xs {
			sum += a
			for _, b := range xs {
				diff += math.Abs(a - b)
			}
		}
		want := 0.0
		if sum > 0 {
			want = diff / (2 * float64(len(xs)) * sum)
		}
		if got := stats.Gini(xs); math.Abs(got-want) > 1e-9 {
			t.Fatalf("Gini = %v, want %v", got, want)
		}
	})
}

func TestPercentilesAreMonotonicAndInside(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 50).Draw(t, "sample")
		slices.Sort(xs)
		p, q := rapid.Float64Range(0, 100).Draw(t, "p"), rapid.Float64Range(0, 100).Draw(t, "q")
		if p > q {
			p, q = q, p
		}
		if stats.NearestRank(xs, p) > stats.NearestRank(xs, q) || stats.Quantile(xs, p/100) > stats.Quantile(xs, q/100)+1e-6 {
			t.Fatalf("percentiles %v and %v of %v are out of order", p, q, xs)
		}
		if !slices.Contains(xs, stats.NearestRank(xs, p)) {
			t.Fatal("a nearest-rank percentile was never measured")
		}
		below := 0
		for _, x := range xs {
			if x <= stats.NearestRank(xs, p) {
				below++
			}
		}
		if float64(below) < p/100*float64(len(xs))-1e-9 {
			t.Fatalf("only %d of %d values at or below P%v", below, len(xs), p)
		}
	})
}

func TestStrata(t *testing.T) {
	got := stats.Strata([]int{5, 2, 8, 3, 7}, func(n int) bool { return n%2 == 0 })
	want := []stats.Stratum[bool, int]{{Key: false, Items: []int{5, 3, 7}}, {Key: true, Items: []int{2, 8}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Strata (-want +got):\n%s", diff)
	}
}

func TestBootstrapPairsCancelWhatArmsShare(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	var pairs []stats.Pair
	for range 300 {
		size := rnd.Float64() * 10_000 // dwarfs the effect
		pairs = append(pairs, stats.Pair{A: size, B: size - 20 + rnd.Float64()*2})
	}
	ci := stats.Bootstrap{}.PairedBootstrap([][]stats.Pair{pairs}, stats.Mean, rnd)
	if !ci.Excludes(0) || ci.Low > -19 || ci.High < -19 || ci.High-ci.Low > 0.5 {
		t.Errorf("interval %+v, want a narrow one around -19", ci)
	}
}

func TestBootstrapIsReproducible(t *testing.T) {
	pairs := [][]stats.Pair{{{A: 1, B: 2}, {A: 3, B: 3}, {A: 5, B: 9}}, {{A: 2, B: 1}}}
	run := func(seed uint64) stats.Interval {
		rnd := rand.New(rand.NewPCG(seed, 0))
		return stats.Bootstrap{Resamples: 200, Level: 0.9}.PairedBootstrap(pairs, stats.Percentile(50), rnd)
	}
	if run(7) != run(7) {
		t.Error("equal seeds give different intervals")
	}
	if pairs[0][0] != (stats.Pair{A: 1, B: 2}) {
		t.Error("the sample was changed")
	}
}

func TestBootstrapKeepsTheMixOfStrata(t *testing.T) {
	// Without strata the share of the second kind would vary and with it the mean.
	strata := [][]stats.Pair{slices.Repeat([]stats.Pair{{A: 0, B: 1}}, 5), slices.Repeat([]stats.Pair{{A: 0, B: 100}}, 5)}
	rnd := rand.New(rand.NewPCG(3, 4))
	ci := stats.Bootstrap{}.PairedBootstrap(strata, stats.Mean, rnd)
	if ci != (stats.Interval{Estimate: 50.5, Low: 50.5, High: 50.5}) {
		t.Errorf("stratified interval %+v, want exactly 50.5", ci)
	}
	merged := [][]stats.Pair{slices.Concat(strata...)}
	if ci := (stats.Bootstrap{}).PairedBootstrap(merged, stats.Mean, rnd); ci.High-ci.Low < 10 {
		t.Errorf("merged interval %+v, want a wide one", ci)
	}
}

// The 95 % interval of a mean covers the truth about 95 times in 100.
func TestBootstrapCoverage(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	covered := 0
	const runs = 200
	for range runs {
		pairs := make([]stats.Pair, 60)
		for i := range pairs {
			pairs[i] = stats.Pair{A: rnd.NormFloat64(), B: rnd.NormFloat64() + 1}
		}
		ci := stats.Bootstrap{Resamples: 300}.PairedBootstrap([][]stats.Pair{pairs}, stats.Mean, rnd)
		if !ci.Excludes(1) {
			covered++
		}
	}
	if covered < runs*88/100 || covered > runs*99/100 {
		t.Errorf("covered %d of %d", covered, runs)
	}
}
