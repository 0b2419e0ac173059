package stats

import (
	"math"
	"slices"
)

// Pair is one request measured under two arms.
type Pair struct{ A, B float64 }

// Source draws uniform integers in [0, n); *math/rand/v2.Rand is one.
type Source interface{ IntN(n int) int }

// Interval is an estimate with the bounds of its confidence interval.
type Interval struct {
	Estimate float64 `json:"estimate"`
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
}

// Excludes reports that x lies outside the interval.
func (i Interval) Excludes(x float64) bool { return x < i.Low || x > i.High }

// Bootstrap configures PairedBootstrap. The zero value is 2,000 resamples at
// 95 %.
type Bootstrap struct {
	Resamples int     // 0 = 2000
	Level     float64 // 0 = 0.95
}

// PairedBootstrap estimates statistic(B) − statistic(A) over pairs, with a
// percentile bootstrap interval. Pairs are drawn whole, so what two arms have in
// common (the request's size, its session) cancels. Each slice is one stratum
// and is resampled on its own, which keeps the mix of strata; give one slice
// for none. statistic may reorder the slice it is given.
func (b Bootstrap) PairedBootstrap(strata [][]Pair, statistic func([]float64) float64, src Source) Interval {
	if b.Resamples <= 0 {
		b.Resamples = 2000
	}
	if b.Level <= 0 || b.Level >= 1 {
		b.Level = 0.95
	}
	n := 0
	for _, s := range strata {
		n += len(s)
	}
	if n == 0 {
		return Interval{Estimate: math.NaN(), Low: math.NaN(), High: math.NaN()}
	}
	r := resampler{as: make([]float64, 0, n), bs: make([]float64, 0, n)}
	out := Interval{Estimate: r.difference(strata, statistic, func(_, i int) int { return i })}
	differences := make([]float64, b.Resamples)
	for k := range differences {
		differences[k] = r.difference(strata, statistic, func(n, _ int) int { return src.IntN(n) })
	}
	slices.Sort(differences)
	out.Low = Quantile(differences, (1-b.Level)/2)
	out.High = Quantile(differences, (1+b.Level)/2)
	return out
}

type resampler struct{ as, bs []float64 }

// difference is the statistic of one draw; pick chooses a pair of n for place i.
func (r *resampler) difference(strata [][]Pair, statistic func([]float64) float64, pick func(n, i int) int) float64 {
	r.as, r.bs = r.as[:0], r.bs[:0]
	for _, s := range strata {
		for i := range s {
			p := s[pick(len(s), i)]
			r.as, r.bs = append(r.as, p.A), append(r.bs, p.B)
		}
	}
	return statistic(r.bs) - statistic(r.as)
}

// Percentile is the p-th nearest-rank percentile as a statistic for
// PairedBootstrap.
func Percentile(p float64) func([]float64) float64 {
	return func(xs []float64) float64 {
		slices.Sort(xs)
		return NearestRank(xs, p)
	}
}
