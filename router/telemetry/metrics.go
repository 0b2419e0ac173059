package telemetry

import (
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Outcomes of a turn, the values of kvc_router_turns_total's outcome label.
const (
	OutcomeOK              = "ok"
	OutcomeUpstreamError   = "upstream_error"   // D failed, before or after its first byte
	OutcomeUpstreamRefused = "upstream_refused" // the engine's own 4xx, passed through (R67: neutral)
	OutcomePrefillError    = "prefill_error"    // P failed (R54)
	OutcomeClientCancelled = "client_cancelled" // the client hung up (R51)
	OutcomeIdle            = "idle_timeout"     // D fell silent (R12)
	OutcomeContended       = "contended"        // ready workers, no place (429)
	OutcomeUnavailable     = "unavailable"      // nobody can serve (503)
	OutcomeInvalid         = "invalid"          // the request was refused before any worker was asked
)

// Causes of a new attempt, the values of kvc_router_retries_total's cause label.
const (
	RetryTransport    = "transport"     // D's connection failed before a byte
	RetryDecodeStatus = "decode_5xx"    // D answered 5xx before a byte
	RetryPrefill      = "prefill"       // P failed before D's first byte
	RetryLeaseExpired = "lease_expired" // 409: ask anew
	RetryStaleEpoch   = "stale_epoch"   // 409: the worker restarted
	RetryEmpty        = "empty"         // D ended before its first byte (R07)
)

// Results of asking a worker, the values of kvc_router_admission_seconds' result label.
const (
	AskAdmitted = "admitted"
	AskRefused  = "refused"
	AskTimeout  = "timeout"
	AskError    = "error"   // connection error, 5xx, malformed answer
	AskSkipped  = "skipped" // breaker open or no room for one more question
)

// ttftBuckets are fine where Direct lives (milliseconds) and reach an hour
// (R13): a factor of about 1.5 up to 10 s, then wider.
func ttftBuckets() []float64 {
	return []float64{
		.002, .003, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75,
		1, 1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300, 600, 1800, 3600,
	}
}

// durationBuckets reach two hours.
func durationBuckets() []float64 {
	return []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200}
}

func admissionBuckets() []float64 {
	return []float64{.0002, .0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1}
}

// bodyBuckets reach the default body limit of 64 MiB.
func bodyBuckets() []float64 { return prometheus.ExponentialBuckets(1<<10, 4, 9) }

// Router is every metric of the router. A worker label is a pod name, so its
// series are bounded by the fleet and deleted with the worker (R105).
type Router struct {
	reg *prometheus.Registry

	turns      *prometheus.CounterVec
	ttft       *prometheus.HistogramVec
	duration   *prometheus.HistogramVec
	tokens     *prometheus.CounterVec
	admission  *prometheus.HistogramVec
	inflight   *prometheus.GaugeVec
	breaker    *prometheus.GaugeVec
	trusted    *prometheus.GaugeVec
	untrusted  *prometheus.CounterVec
	retries    *prometheus.CounterVec
	requests   prometheus.Gauge
	body       prometheus.Histogram
	refusals   *prometheus.CounterVec
	sessions   *prometheus.CounterVec
	billing    prometheus.Counter
	hints      *prometheus.CounterVec
	waits      *prometheus.CounterVec
	config     *prometheus.CounterVec
	pins       prometheus.CounterFunc
	conns      *prometheus.GaugeVec
	inconsist  *prometheus.CounterVec
	registerMu sync.Mutex

	reasons, causes, refused, sources labelBound
}

// NewRouter registers every metric on a registry of its own.
func NewRouter() *Router {
	m := &Router{reg: prometheus.NewPedanticRegistry()}
	m.reg.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.newTurnMetrics()
	m.newWorkerMetrics()
	m.newIngressMetrics()
	return m
}

func (m *Router) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.reg.MustRegister(v)
	return v
}

func (m *Router) gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.reg.MustRegister(v)
	return v
}

func (m *Router) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
	m.reg.MustRegister(v)
	return v
}

func (m *Router) newTurnMetrics() {
	m.turns = m.counter("kvc_router_turns_total",
		"Turns ended, by the mode they ran as (empty: none ran), the dispatch's reason and the outcome.",
		"mode", "reason", "outcome")
	m.ttft = m.histogram("kvc_router_ttft_seconds",
		"Time from the request's arrival to the first relayed event, by mode.", ttftBuckets(), "mode")
	m.duration = m.histogram("kvc_router_turn_seconds",
		"Time from the request's arrival to the end of its answer, by mode.", durationBuckets(), "mode")
	m.tokens = m.counter("kvc_router_tokens_total",
		"Tokens of finished turns as the engines reported them: prompt, cached, completion.", "kind")
	m.retries = m.counter("kvc_router_retries_total",
		"Attempts given up before their first byte and tried again, by cause.", "cause")
	m.waits = m.counter("kvc_router_turn_waits_total",
		"Turns that waited for the worker to end the session's cancelled turn, by how the wait ended: ended, timeout.",
		"result")
}

func (m *Router) newWorkerMetrics() {
	m.admission = m.histogram("kvc_router_admission_seconds",
		"Round trips of admission questions, by way (fused, rpc) and result.", admissionBuckets(), "way", "result")
	m.inflight = m.gauge("kvc_router_inflight",
		"Legs in flight, by worker and role.", "worker", "role")
	m.breaker = m.gauge("kvc_router_breaker_open",
		"1 while a worker's breaker is not closed; kind: admission (never a reject) or data.", "worker", "kind")
	m.trusted = m.gauge("kvc_feed_trusted",
		"1 while a worker's feed is followed without a gap.", "worker")
	m.untrusted = m.counter("kvc_feed_untrusted_total",
		"Times a feed became untrusted, by cause.", "cause")
	m.hints = m.counter("kvc_router_hint_probes_total",
		"Hint probes by result: ok, missing (the worker is asked by RPC only), error.", "result")
	m.conns = m.gauge("kvc_router_open_connections",
		"Connections to sidecars, by purpose: data, admission, feed.", "purpose")
	m.inconsist = m.counter("kvc_router_wire_faults_total",
		"Answers that break wire.md, by kind.", "kind")
}

func (m *Router) newIngressMetrics() {
	m.requests = prometheus.NewGauge(prometheus.GaugeOpts{Name: "kvc_router_requests_inflight",
		Help: "Client requests being served."})
	m.body = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kvc_router_body_bytes",
		Help: "Sizes of accepted request bodies after decoding.", Buckets: bodyBuckets()})
	m.billing = prometheus.NewCounter(prometheus.CounterOpts{Name: "kvc_router_billing_header_cuts_total",
		Help: "Leading x-anthropic-billing-header blocks removed from prompts (R125)."})
	m.reg.MustRegister(m.requests, m.body, m.billing)
	m.refusals = m.counter("kvc_router_refusals_total",
		"Requests refused by the router itself, by x-kvc-reason.", "reason")
	m.sessions = m.counter("kvc_router_session_source_total",
		"Where turns got their session from: a configured header or field, continuation, derived, none.", "source")
	m.config = m.counter("kvc_router_config_reloads_total",
		"Reloads of fleet and routing files by result; a rejected one keeps the last good.", "file", "result")
}

// Handler serves the metrics.
func (m *Router) Handler() http.Handler {
	return promhttp.HandlerFor(m.reg, promhttp.HandlerOpts{Registry: m.reg})
}

// Registry gives tests a way to read the metrics.
func (m *Router) Registry() *prometheus.Registry { return m.reg }

// PinChanges registers the pin-change counter, whose value router/state keeps.
func (m *Router) PinChanges(read func() float64) {
	m.registerMu.Lock()
	defer m.registerMu.Unlock()
	if m.pins != nil {
		return
	}
	m.pins = prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvc_router_pin_changes_total",
		Help: "Times a session's pin moved to another worker (Q12)."}, read)
	m.reg.MustRegister(m.pins)
}

// TurnEnded counts a turn.
func (m *Router) TurnEnded(mode, reason, outcome string) {
	m.turns.WithLabelValues(mode, m.reasons.of(reason), outcome).Inc()
}

// FirstToken observes a turn's time to its first event.
func (m *Router) FirstToken(mode string, d time.Duration) {
	m.ttft.WithLabelValues(mode).Observe(d.Seconds())
}

// TurnTook observes a turn's whole time.
func (m *Router) TurnTook(mode string, d time.Duration) {
	m.duration.WithLabelValues(mode).Observe(d.Seconds())
}

// Tokens counts a finished turn's usage.
func (m *Router) Tokens(prompt, cached, completion int) {
	for kind, n := range map[string]int{"prompt": prompt, "cached": cached, "completion": completion} {
		if n > 0 {
			m.tokens.WithLabelValues(kind).Add(float64(n))
		}
	}
}

// Asked observes one admission question.
func (m *Router) Asked(way, result string, d time.Duration) {
	m.admission.WithLabelValues(way, result).Observe(d.Seconds())
}

// Inflight moves a worker's gauge of legs in flight.
func (m *Router) Inflight(worker, role string, by int) {
	m.inflight.WithLabelValues(worker, role).Add(float64(by))
}

// Breaker says whether one of a worker's breakers is not closed.
func (m *Router) Breaker(worker, kind string, open bool) {
	m.breaker.WithLabelValues(worker, kind).Set(number(open))
}

// Trusted says whether a worker's feed is followed.
func (m *Router) Trusted(worker string, yes bool) { m.trusted.WithLabelValues(worker).Set(number(yes)) }

// Untrusted counts a feed that became untrusted.
func (m *Router) Untrusted(cause string) { m.untrusted.WithLabelValues(m.causes.of(cause)).Inc() }

// WorkerGone deletes a removed worker's series (R105).
func (m *Router) WorkerGone(worker string) {
	l := prometheus.Labels{"worker": worker}
	m.inflight.DeletePartialMatch(l)
	m.breaker.DeletePartialMatch(l)
	m.trusted.DeletePartialMatch(l)
}

// Retry counts an attempt that is tried again.
func (m *Router) Retry(cause string) { m.retries.WithLabelValues(cause).Inc() }

// Waited counts a turn that waited for a cancelled one to end (R64).
func (m *Router) Waited(ended bool) {
	result := "timeout"
	if ended {
		result = "ended"
	}
	m.waits.WithLabelValues(result).Inc()
}

// Requests moves the gauge of client requests being served.
func (m *Router) Requests(by int) { m.requests.Add(float64(by)) }

// Body observes an accepted body's size in bytes.
func (m *Router) Body(n int) { m.body.Observe(float64(n)) }

// Refused counts a request the router refused itself.
func (m *Router) Refused(reason string) { m.refusals.WithLabelValues(m.refused.of(reason)).Inc() }

// Session counts where a turn's session came from.
func (m *Router) Session(source string) { m.sessions.WithLabelValues(m.sources.of(source)).Inc() }

// BillingCut counts a removed billing header block (R125).
func (m *Router) BillingCut() { m.billing.Inc() }

// Hint counts a hint probe: ok, missing or error.
func (m *Router) Hint(result string) { m.hints.WithLabelValues(result).Inc() }

// Reloaded counts a reload of a file: fleet or routing.
func (m *Router) Reloaded(file string, ok bool) {
	result := "rejected"
	if ok {
		result = "ok"
	}
	m.config.WithLabelValues(file, result).Inc()
}

// Conns moves the gauge of open connections of one purpose.
func (m *Router) Conns(purpose string, by int) { m.conns.WithLabelValues(purpose).Add(float64(by)) }

// WireFault counts an answer that breaks the wire.
func (m *Router) WireFault(kind string) { m.inconsist.WithLabelValues(kind).Inc() }

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
