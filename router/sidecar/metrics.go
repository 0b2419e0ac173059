package sidecar

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

// metrics are every name the sidecar exports. Labels come from closed sets
// (modes, reasons, outcomes, legs), never from a request (R114).
type metrics struct {
	turns      *prometheus.CounterVec   // leg, mode, outcome
	verdicts   *prometheus.CounterVec   // mode, reason
	tokens     *prometheus.CounterVec   // kind
	admit      prometheus.Histogram     // seconds
	ttft       *prometheus.HistogramVec // mode; seconds
	estimate   prometheus.Histogram     // estimated ÷ true prompt tokens (Q17)
	clears     *prometheus.CounterVec   // evidence
	journal    *prometheus.CounterVec   // result
	mismatches prometheus.Counter
	deferred   prometheus.Counter

	abortErrors, nativeErrors, unauthorized, reloadErrors prometheus.Counter
}

// ttftBuckets reach from a direct turn at a high time scale to a seed behind a queue.
var ttftBuckets = []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

func newMetrics(r *prometheus.Registry) *metrics {
	counter := func(name, help string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "kvc_sidecar_" + name, Help: help})
		r.MustRegister(c)
		return c
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kvc_sidecar_" + name, Help: help}, labels)
		r.MustRegister(c)
		return c
	}
	m := &metrics{
		turns:    counters("turns_total", "Legs of turns that ended here.", "leg", "mode", "outcome"),
		verdicts: counters("verdicts_total", "Answers to admission questions.", "mode", "reason"),
		tokens: counters("tokens_total",
			"Tokens of ended turns: prompt, cached, generated, uncached (prefilled here), transferred (from P).", "kind"),
		admit: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvc_sidecar_admit_seconds", Help: "Time to answer an admission question.",
			Buckets: []float64{.00001, .00003, .0001, .0003, .001, .003, .01, .03, .1, 1},
		}),
		ttft: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "kvc_sidecar_first_byte_seconds", Help: "From the end of the upload to the engine's first output.",
			Buckets: ttftBuckets,
		}, []string{"mode"}),
		estimate: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "kvc_sidecar_prompt_estimate_ratio", Help: "Estimated over true prompt tokens.",
			Buckets: []float64{.25, .5, .75, .9, .95, 1, 1.05, 1.1, 1.25, 1.5, 2, 4},
		}),
		clears: counters("ledger_clears_total",
			"Times the ledger was emptied because the engine's cache was.", "evidence"),
		journal:      counters("journal_total", "Journal reads that failed and writes.", "result"),
		mismatches:   counter("block_mismatches_total", "Turns whose body hashed to other blocks than the router said."),
		deferred:     counter("aborts_deferred_total", "Aborts that waited for the end of a KV hand-off."),
		abortErrors:  counter("abort_errors_total", "Calls of the engine's /abort_request that failed."),
		nativeErrors: counter("native_admission_errors_total", "Calls of the engine's own admission that failed."),
		unauthorized: counter("unauthorized_total", "Requests without a valid token."),
		reloadErrors: counter("reload_errors_total", "Changes of the routing file that were not taken."),
	}
	r.MustRegister(m.admit, m.ttft, m.estimate)
	return m
}

func (m *metrics) verdict(v kvc.Verdict, took time.Duration) {
	m.verdicts.WithLabelValues(v.Mode.String(), string(v.Reason)).Inc()
	m.admit.Observe(took.Seconds())
}

func (m *metrics) firstByte(t *turn) {
	m.ttft.WithLabelValues(t.mode.String()).Observe(t.s.cfg.Now().Sub(t.began).Seconds())
}

func (m *metrics) ended(t *turn, obs *sglang.Observed, o kvc.Outcome) {
	m.turns.WithLabelValues(string(t.in.Leg), t.mode.String(), string(o)).Inc()
	c := costOf(t, obs.Usage)
	for kind, n := range map[string]int{
		"prompt": c.prompt, "cached": c.cached, "generated": c.generated,
		"uncached": c.uncached, "transferred": c.transferred,
	} {
		m.tokens.WithLabelValues(kind).Add(float64(n))
	}
	if c.prompt > 0 {
		m.estimate.Observe(float64(t.q.InputTokens) / float64(c.prompt))
	}
}

// gaugeCollector reads the ledger when scraped, so that no gauge can be left
// behind by a turn that ended twice or never.
type gaugeCollector struct {
	s     *Sidecar
	descs map[string]*prometheus.Desc
}

var gaugeHelp = map[string]string{
	"capacity_tokens":  "K_d, the engine's KV capacity.",
	"used_tokens":      "Tokens resident or allocated.",
	"locked_tokens":    "Tokens held by running turns and leases.",
	"protected_tokens": "Idle tokens that may not be reclaimed yet.",
	"reserved_tokens":  "Tokens promised by leases.",
	"sessions":         "Sessions known.",
	"in_flight":        "Turns running or queued.",
	"queued":           "Fallback turns waiting for room.",
	"leases":           "Leases granted and not presented.",
	"ready":            "1 when the engine is warm and does what its profile claims.",
	"draining":         "1 when draining.",
	"feed_seq":         "The feed's last number.",
	"evicted_tokens":   "Tokens evicted since the start.",
	"leases_expired":   "Leases that were never presented, since the start.",
}

func newGaugeCollector(s *Sidecar) *gaugeCollector {
	g := &gaugeCollector{s: s, descs: map[string]*prometheus.Desc{}}
	for name, help := range gaugeHelp {
		full := "kvc_sidecar_" + name
		if name == "evicted_tokens" || name == "leases_expired" {
			full += "_total"
		}
		g.descs[name] = prometheus.NewDesc(full, help, nil, nil)
	}
	return g
}

// Describe implements prometheus.Collector.
func (g *gaugeCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range g.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (g *gaugeCollector) Collect(ch chan<- prometheus.Metric) {
	st, extra := g.s.status(), g.s.book.counts()
	flag := map[bool]float64{true: 1}
	for name, v := range map[string]float64{
		"capacity_tokens": float64(st.CapacityTokens), "used_tokens": float64(st.Used),
		"locked_tokens": float64(st.Locked), "protected_tokens": float64(st.Protected),
		"reserved_tokens": float64(st.Reserved), "sessions": float64(st.Sessions),
		"in_flight": float64(st.InFlight), "queued": float64(extra.queued), "leases": float64(extra.leases),
		"ready": flag[st.Ready], "draining": flag[st.State == stateDraining], "feed_seq": float64(st.Seq),
	} {
		ch <- prometheus.MustNewConstMetric(g.descs[name], prometheus.GaugeValue, v)
	}
	for name, v := range map[string]int64{"evicted_tokens": st.Totals.EvictedTokens, "leases_expired": extra.expired} {
		ch <- prometheus.MustNewConstMetric(g.descs[name], prometheus.CounterValue, float64(v))
	}
}

type bookCounts struct {
	queued, leases int
	expired        int64
}

func (b *book) counts() bookCounts {
	b.mu.Lock()
	defer b.mu.Unlock()
	return bookCounts{len(b.queue), len(b.grants), b.totals.expired}
}
