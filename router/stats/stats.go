package stats

import (
	"math"
	"slices"
)

// NearestRank is the p-th percentile (0..100) of an ascending sample by the
// nearest-rank method: the smallest value with at least p % of the sample at or
// below it. It is always a value that was measured, which is why reports of
// latency use it.
func NearestRank(sorted []float64, p float64) float64 {
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	rank := int(math.Ceil(p * float64(n) / 100)) // multiplied first: exact for whole percentiles
	return sorted[min(max(rank, 1), n)-1]
}

// Quantile is the q-th quantile (0..1) of an ascending sample by linear
// interpolation between order statistics (Hyndman and Fan's type 7, the default
// of numpy and R). Bootstrap bounds use it.
func Quantile(sorted []float64, q float64) float64 {
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	h := min(max(q, 0), 1) * float64(n-1)
	low := int(h)
	if low+1 >= n {
		return sorted[n-1]
	}
	return sorted[low] + (h-float64(low))*(sorted[low+1]-sorted[low])
}

// Mean is the arithmetic mean.
func Mean(xs []float64) float64 {
	if len(xs) == 0 {
		return math.NaN()
	}
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / float64(len(xs))
}

// Median is the middle of a sample in any order, the mean of the two middle
// values when N is even. xs is not changed.
func Median(xs []float64) float64 {
	return Quantile(slices.Sorted(slices.Values(xs)), 0.5)
}

// Summary describes one sample in the unit of its values. Percentiles are by
// nearest rank.
type Summary struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}

// Summarize describes xs, which is not changed.
func Summarize(xs []float64) Summary {
	if len(xs) == 0 {
		return Summary{}
	}
	s := slices.Sorted(slices.Values(xs))
	return Summary{
		N:    len(s),
		Mean: Mean(s),
		P50:  NearestRank(s, 50),
		P90:  NearestRank(s, 90),
		P95:  NearestRank(s, 95),
		P99:  NearestRank(s, 99),
		Max:  s[len(s)-1],
	}
}

// Gini is the Gini coefficient of non-negative loads: 0 when all are equal,
// (n−1)/n when one carries everything. Equal zeros are equal: 0.
func Gini(loads []float64) float64 {
	n := float64(len(loads))
	if n == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(loads))
	sum, weighted := 0.0, 0.0
	for i, x := range s {
		sum += x
		weighted += float64(i+1) * x
	}
	if sum == 0 {
		return 0
	}
	return (2*weighted/sum - n - 1) / n
}

// Stratum is the part of a sample that shares a key.
type Stratum[K comparable, T any] struct {
	Key   K
	Items []T
}

// Strata splits items by key; strata and their items keep the order in which
// they first appear.
func Strata[K comparable, T any](items []T, key func(T) K) []Stratum[K, T] {
	var out []Stratum[K, T]
	at := map[K]int{}
	for _, item := range items {
		k := key(item)
		i, ok := at[k]
		if !ok {
			i = len(out)
			at[k] = i
			out = append(out, Stratum[K, T]{Key: k})
		}
		out[i].Items = append(out[i].Items, item)
	}
	return out
}
