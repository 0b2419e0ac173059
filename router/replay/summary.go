package replay

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/kvc-dev/kvc/router/stats"
)

// Labels are what the caller knows of a run and the traffic cannot show.
type Labels struct {
	Preset      string
	DirectPath  string
	Workload    string
	Seed        uint64
	Concurrency int
	TimeScale   float64
}

// Summary is the machine-readable report. Times are emulated milliseconds: real
// milliseconds times TimeScale. A null is unknown.
type Summary struct {
	Requests   int           `json:"requests"`
	Errors     int           `json:"errors"`
	Modes      ModeCounts    `json:"modes"`
	TTFT       ModeQuantiles `json:"ttft_ms"`
	PinChanges *int64        `json:"pin_changes"`
	Preset     string        `json:"preset"`
	DirectPath string        `json:"direct_path"`

	// DirectShareAfterFirst is direct turns per turn after the first of its
	// session, failures included below the line. ResidentShareAfterFirst counts
	// delta turns too.
	DirectShareAfterFirst   *float64 `json:"direct_share_after_first"`
	ResidentShareAfterFirst *float64 `json:"resident_share_after_first"`

	E2E      ModeQuantiles `json:"e2e_ms"`
	ITL      ModeQuantiles `json:"itl_ms"`
	Sessions int           `json:"sessions"`

	PromptTokens        int    `json:"prompt_tokens"`
	CachedTokens        int    `json:"cached_tokens"`
	CompletionTokens    int    `json:"completion_tokens"`
	PrefillTokens       *int64 `json:"prefill_tokens"`        // computed on prefill workers
	DecodePrefillTokens *int64 `json:"decode_prefill_tokens"` // prompt tokens computed on decode workers
	TransferredTokens   *int64 `json:"transferred_tokens"`    // from prefill to decode workers
	EvictedTokens       *int64 `json:"evicted_tokens"`

	Failures []FailureCount `json:"failures,omitempty"`

	Workload    string  `json:"workload"`
	Seed        uint64  `json:"seed"`
	Concurrency int     `json:"concurrency"`
	TimeScale   float64 `json:"time_scale"`
	WallS       float64 `json:"wall_s"` // real seconds
	Interrupted bool    `json:"interrupted,omitempty"`
}

// ModeCounts counts whole answers by mode.
type ModeCounts struct {
	Direct   int `json:"direct"`
	Delta    int `json:"delta"`
	Seed     int `json:"seed"`
	Reseed   int `json:"reseed"`
	Fallback int `json:"fallback"`
	Unknown  int `json:"unknown,omitempty"` // the server names no mode
}

// Of is the count of one mode.
func (c *ModeCounts) Of(mode string) *int {
	switch mode {
	case "direct":
		return &c.Direct
	case "delta":
		return &c.Delta
	case "seed":
		return &c.Seed
	case "reseed":
		return &c.Reseed
	case "fallback":
		return &c.Fallback
	}
	return &c.Unknown
}

// ModeQuantiles holds a quantity's quantiles for the modes that have any, and
// for all turns together.
type ModeQuantiles map[string]Quantiles

// All is the key of the quantiles over every mode.
const All = "all"

// Quantiles of a quantity in emulated milliseconds.
type Quantiles struct {
	Count int     `json:"count"`
	Mean  float64 `json:"mean"`
	P50   float64 `json:"p50"`
	P90   float64 `json:"p90"`
	P99   float64 `json:"p99"`
	Max   float64 `json:"max"`
}

// FailureCount is one kind of failure with an example.
type FailureCount struct {
	Kind    string `json:"kind"`
	Count   int    `json:"count"`
	Example string `json:"example"`
}

// Summarize condenses a run.
func Summarize(r *Result, l Labels) Summary {
	s := Summary{
		Requests: len(r.Turns), Sessions: r.Sessions, Interrupted: r.Interrupted,
		PinChanges: r.Counters.PinChanges, PrefillTokens: r.Counters.PrefillTokens,
		DecodePrefillTokens: r.Counters.DecodePrefill, TransferredTokens: r.Counters.TransferredTokens,
		EvictedTokens: r.Counters.EvictedTokens,
		Preset:        l.Preset, DirectPath: l.DirectPath, Workload: l.Workload, Seed: l.Seed,
		Concurrency: l.Concurrency, TimeScale: l.TimeScale, WallS: round(r.Wall.Seconds()),
	}
	ttft, e2e, itl := newByMode(l.TimeScale), newByMode(l.TimeScale), newByMode(l.TimeScale)
	for i := range r.Turns {
		t := &r.Turns[i]
		if !t.OK() {
			s.Errors++
			continue
		}
		*s.Modes.Of(t.Mode)++
		s.PromptTokens += t.PromptTokens
		s.CachedTokens += t.CachedTokens
		s.CompletionTokens += t.CompletionTokens
		ttft.add(t.Mode, t.TTFT)
		e2e.add(t.Mode, t.E2E)
		itl.add(t.Mode, t.ITL())
	}
	s.TTFT, s.E2E, s.ITL = ttft.quantiles(), e2e.quantiles(), itl.quantiles()
	s.DirectShareAfterFirst, s.ResidentShareAfterFirst = sharesAfterFirst(r.Turns)
	s.Failures = countFailures(r.Turns)
	return s
}

// sharesAfterFirst is nil when no turn followed a first one or modes are unknown.
func sharesAfterFirst(turns []Turn) (direct, resident *float64) {
	n, d, res, known := 0, 0, 0, false
	for i := range turns {
		t := &turns[i]
		known = known || t.Mode != ModeUnknown
		if t.Index == 0 {
			continue
		}
		n++
		if t.OK() && t.Mode == "direct" {
			d++
		}
		if t.OK() && (t.Mode == "direct" || t.Mode == "delta") {
			res++
		}
	}
	if n == 0 || !known {
		return nil, nil
	}
	x, y := round(float64(d)/float64(n)), round(float64(res)/float64(n))
	return &x, &y
}

func countFailures(turns []Turn) []FailureCount {
	var out []FailureCount
	for i := range turns {
		f := turns[i].Failure
		if f.Kind == "" {
			continue
		}
		at := slices.IndexFunc(out, func(c FailureCount) bool { return c.Kind == f.Kind })
		if at < 0 {
			at, out = len(out), append(out, FailureCount{Kind: f.Kind, Example: clip(f.Message, 300)})
		}
		out[at].Count++
	}
	slices.SortStableFunc(out, func(a, b FailureCount) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Kind, b.Kind))
	})
	return out
}

// byMode collects durations.
type byMode struct {
	scale float64
	ms    map[string][]float64
}

func newByMode(scale float64) *byMode {
	return &byMode{scale: scale, ms: make(map[string][]float64)}
}

// add keeps one duration; 0 means that it was not measured.
func (b *byMode) add(mode string, d time.Duration) {
	if d <= 0 {
		return
	}
	v := emulatedMS(d, b.scale)
	b.ms[mode] = append(b.ms[mode], v)
	b.ms[All] = append(b.ms[All], v)
}

func emulatedMS(d time.Duration, scale float64) float64 {
	return float64(d) / float64(time.Millisecond) * scale
}

func (b *byMode) quantiles() ModeQuantiles {
	out := make(ModeQuantiles, len(b.ms))
	for mode, vs := range b.ms {
		slices.Sort(vs)
		out[mode] = Quantiles{
			Count: len(vs), Mean: round(stats.Mean(vs)), P50: round(stats.NearestRank(vs, 50)),
			P90: round(stats.NearestRank(vs, 90)), P99: round(stats.NearestRank(vs, 99)), Max: round(vs[len(vs)-1]),
		}
	}
	return out
}

// round keeps three digits behind the point, so that reports stay short.
func round(v float64) float64 { return math.Round(v*1000) / 1000 }
