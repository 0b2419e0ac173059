package stats_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/stats"
)

// The nearest rank of a whole percentile is an integer question: the smallest k
// with 100·k ≥ p·n. Rounding must not answer it one too high.
func TestNearestRankIsExactForWholePercentiles(t *testing.T) {
	var sorted []float64
	for n := 1; n <= 1200; n++ {
		sorted = append(sorted, float64(n))
		for p := range 101 {
			want := float64(max(1, (p*n+99)/100))
			if got := stats.NearestRank(sorted, float64(p)); got != want {
				t.Fatalf("p%d of 1..%d = %v, want %v", p, n, got, want)
			}
		}
	}
}

// By its definition: at least p % of the sample is at or below the percentile,
// and less than p % is below it.
func TestNearestRankAgainstItsDefinition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 60).Draw(t, "sample")
		slices.Sort(xs)
		p := rapid.IntRange(1, 100).Draw(t, "p")
		got := stats.NearestRank(xs, float64(p))
		atOrBelow, below := 0, 0
		for _, x := range xs {
			if x <= got {
				atOrBelow++
			}
			if x < got {
				below++
			}
		}
		if 100*atOrBelow < p*len(xs) || 100*below >= p*len(xs) {
			t.Fatalf("p%d = %v: %d of %d at or below, %d below", p, got, atOrBelow, len(xs), below)
		}
	})
}

// A quantile interpolates between its neighbours and is exact at the order
// statistics; the median of either parity is as taught at school.
func TestQuantileAtTheOrderStatistics(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 2, 40).Draw(t, "sample")
		slices.Sort(xs)
		n := len(xs)
		i := rapid.IntRange(0, n-1).Draw(t, "i")
		if got := stats.Quantile(xs, float64(i)/float64(n-1)); math.Abs(got-xs[i]) > 1e-6 {
			t.Fatalf("Quantile at order statistic %d = %v, want %v", i, got, xs[i])
		}
		want := (xs[(n-1)/2] + xs[n/2]) / 2
		if got := stats.Median(xs); math.Abs(got-want) > 1e-6 {
			t.Fatalf("Median = %v, want %v", got, want)
		}
	})
}

// A report does not depend on the order in which its requests ended, nor change
// what it was given; scaling the unit scales the figures.
func TestSummaryIsOfTheSampleNotItsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(0, 1e5), 1, 50).Draw(t, "sample")
		shuffled := slices.Clone(xs)
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		r.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		before := slices.Clone(shuffled)
		a, b := stats.Summarize(xs), stats.Summarize(shuffled)
		if a != b {
			t.Fatalf("%+v in one order, %+v in another", a, b)
		}
		if !slices.Equal(before, shuffled) {
			t.Fatal("Summarize changed its sample")
		}
		doubled := make([]float64, len(xs))
		for i, x := range xs {
			doubled[i] = 2 * x
		}
		if d := stats.Summarize(doubled); d.P50 != 2*a.P50 || d.P99 != 2*a.P99 || d.Max != 2*a.Max || d.N != a.N {
			t.Fatalf("doubled %+v of %+v", d, a)
		}
	})
}

// Gini knows nothing of units, order or of how many fleets are looked at.
func TestGiniInvariances(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		xs := rapid.SliceOfN(rapid.Float64Range(0, 1e4), 1, 30).Draw(t, "loads")
		g := stats.Gini(xs)
		if g < -1e-9 || g > 1-1/float64(len(xs))+1e-9 {
			t.Fatalf("Gini = %v of %d loads", g, len(xs))
		}
		scaled := make([]float64, len(xs))
		for i, x := range xs {
			scaled[i] = 8 * x
		}
		if got := stats.Gini(scaled); math.Abs(got-g) > 1e-9 {
			t.Fatalf("Gini of eightfold loads = %v, want %v", got, g)
		}
		if got := stats.Gini(append(slices.Clone(xs), xs...)); math.Abs(got-g) > 1e-9 {
			t.Fatalf("Gini of two equal fleets = %v, want %v", got, g)
		}
	})
}

// An effect that every pair shows is found exactly; no effect is not excluded.
func TestBootstrapOfAConstantEffect(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 0))
	var plus, same []stats.Pair
	for range 60 {
		x := r.Float64() * 100
		plus = append(plus, stats.Pair{A: x, B: x + 5})
		same = append(same, stats.Pair{A: x, B: x})
	}
	b := stats.Bootstrap{Resamples: 200}
	i := b.PairedBootstrap([][]stats.Pair{plus}, stats.Mean, r)
	if math.Abs(i.Estimate-5) > 1e-9 || i.High-i.Low > 1e-9 || !i.Excludes(0) {
		t.Errorf("an effect of 5 in every pair: %+v", i)
	}
	if i := b.PairedBootstrap([][]stats.Pair{same}, stats.Percentile(90), r); i != (stats.Interval{}) || i.Excludes(0) {
		t.Errorf("no effect: %+v", i)
	}
	if i := b.PairedBootstrap([][]stats.Pair{nil, {}}, stats.Mean, r); !math.IsNaN(i.Estimate) || i.Excludes(0) {
		t.Errorf("no pairs: %+v", i)
	}
}

// A wider level contains a narrower one, drawn from the same resamples.
func TestBootstrapLevelsNest(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 0))
	pairs := make([]stats.Pair, 80)
	for i := range pairs {
		pairs[i] = stats.Pair{A: r.NormFloat64(), B: r.NormFloat64() + .3}
	}
	last := stats.Interval{Low: math.Inf(1), High: math.Inf(-1)}
	for _, level := range []float64{.5, .8, .9, .95, .99} {
		b := stats.Bootstrap{Resamples: 400, Level: level}
		i := b.PairedBootstrap([][]stats.Pair{pairs}, stats.Median, rand.New(rand.NewPCG(1, 1)))
		if i.Low > last.Low && last.Low != math.Inf(1) || i.High < last.High || i.Low > i.High {
			t.Errorf("level %v: %+v does not contain %+v", level, i, last)
		}
		last = i
	}
}
