package telemetry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// families gathers what this package defines, by name. A pedantic registry
// fails the gathering of inconsistent metrics.
func families(t *testing.T, m *Router) map[string]*dto.MetricFamily {
	t.Helper()
	all, err := m.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*dto.MetricFamily{}
	for _, f := range all {
		if strings.HasPrefix(f.GetName(), "kvc_") {
			out[f.GetName()] = f
		}
	}
	return out
}

// value is a series' counter or gauge value; -1 when there is none. labels are
// "name=value".
func value(t *testing.T, m *Router, name string, labels ...string) float64 {
	t.Helper()
	for _, s := range families(t, m)[name].GetMetric() {
		if slices.Equal(labelsOf(s), slices.Sorted(slices.Values(labels))) {
			if s.Counter != nil {
				return s.GetCounter().GetValue()
			}
			return s.GetGauge().GetValue()
		}
	}
	return -1
}

// labelsOf are a series' labels in order of their names.
func labelsOf(s *dto.Metric) []string {
	var out []string
	for _, l := range s.GetLabel() {
		out = append(out, l.GetName()+"="+l.GetValue())
	}
	return out
}

// schema is what dashboards and alerts rely on: a renamed metric, a changed type
// or another label breaks them silently.
func schema() map[string]string {
	return map[string]string{
		"kvc_router_turns_total":               "COUNTER mode outcome reason",
		"kvc_router_ttft_seconds":              "HISTOGRAM mode",
		"kvc_router_turn_seconds":              "HISTOGRAM mode",
		"kvc_router_tokens_total":              "COUNTER kind",
		"kvc_router_retries_total":             "COUNTER cause",
		"kvc_router_turn_waits_total":          "COUNTER result",
		"kvc_router_admission_seconds":         "HISTOGRAM result way",
		"kvc_router_inflight":                  "GAUGE role worker",
		"kvc_router_breaker_open":              "GAUGE kind worker",
		"kvc_feed_trusted":                     "GAUGE worker",
		"kvc_feed_untrusted_total":             "COUNTER cause",
		"kvc_router_hint_probes_total":         "COUNTER result",
		"kvc_router_open_connections":          "GAUGE purpose",
		"kvc_router_wire_faults_total":         "COUNTER kind",
		"kvc_router_requests_inflight":         "GAUGE",
		"kvc_router_body_bytes":                "HISTOGRAM",
		"kvc_router_billing_header_cuts_total": "COUNTER",
		"kvc_router_refusals_total":            "COUNTER reason",
		"kvc_router_session_source_total":      "COUNTER source",
		"kvc_router_config_reloads_total":      "COUNTER file result",
		"kvc_router_pin_changes_total":         "COUNTER",
	}
}

func TestMetricNamesTypesAndLabelsAreStable(t *testing.T) {
	m := NewRouter()
	m.PinChanges(func() float64 { return 1 })
	every(m, "d0")
	got := families(t, m)
	for name, want := range schema() {
		f := got[name]
		if f == nil {
			t.Errorf("%s is gone", name)
			continue
		}
		have := f.GetType().String()
		for _, l := range f.GetMetric()[0].GetLabel() {
			have += " " + l.GetName()
		}
		if have != want {
			t.Errorf("%s is %q, want %q", name, have, want)
		}
	}
	for name := range got {
		if schema()[name] == "" {
			t.Errorf("%s is not in the schema; add it here when it is meant", name)
		}
	}
}

// Prometheus' own naming rules: counters end in _total, times are seconds, sizes
// bytes, help is a sentence.
func TestMetricsFollowTheNamingRules(t *testing.T) {
	m := NewRouter()
	m.PinChanges(func() float64 { return 1 })
	every(m, "d0")
	shape := regexp.MustCompile(`^kvc_(router|feed)_[a-z]+(_[a-z]+)*$`)
	for name, f := range families(t, m) {
		if !shape.MatchString(name) {
			t.Errorf("%s is misnamed", name)
		}
		if (f.GetType() == dto.MetricType_COUNTER) != strings.HasSuffix(name, "_total") {
			t.Errorf("%s is a %s", name, f.GetType())
		}
		if f.GetType() == dto.MetricType_HISTOGRAM && !strings.HasSuffix(name, "_seconds") && !strings.HasSuffix(name, "_bytes") {
			t.Errorf("%s does not name its unit", name)
		}
		if help := f.GetHelp(); len(help) < 20 || !strings.HasSuffix(help, ".") {
			t.Errorf("%s: help %q is no sentence", name, help)
		}
	}
}

func TestCountersCountWhatTheySay(t *testing.T) {
	m := NewRouter()
	for range 3 {
		m.TurnEnded("direct", "", OutcomeOK)
	}
	m.TurnEnded("", "draining", OutcomeOK)
	m.Tokens(100, 60, 7)
	m.Tokens(11, 0, 1)
	m.Inflight("d0", "decode", 1)
	m.Inflight("d0", "decode", 1)
	m.Inflight("d0", "decode", -1)
	m.Breaker("d0", "data", true)
	m.Breaker("d0", "admission", true)
	m.Breaker("d0", "data", false)
	m.Trusted("d0", true)
	m.Trusted("d0", false)
	m.Retry(RetryEmpty)
	m.Waited(true)
	m.Waited(true)
	m.Waited(false)
	m.Requests(2)
	m.Requests(-1)
	m.Reloaded("fleet", true)
	m.Reloaded("fleet", false)
	m.Reloaded("routing", false)
	m.Conns("feed", 2)
	m.Conns("feed", -1)
	for _, c := range []struct {
		want   float64
		name   string
		labels []string
	}{
		{3, "kvc_router_turns_total", []string{"mode=direct", "reason=", "outcome=" + OutcomeOK}},
		{1, "kvc_router_turns_total", []string{"mode=", "reason=draining", "outcome=" + OutcomeOK}},
		{111, "kvc_router_tokens_total", []string{"kind=prompt"}},
		{60, "kvc_router_tokens_total", []string{"kind=cached"}},
		{8, "kvc_router_tokens_total", []string{"kind=completion"}},
		{1, "kvc_router_inflight", []string{"worker=d0", "role=decode"}},
		{0, "kvc_router_breaker_open", []string{"worker=d0", "kind=data"}},
		{1, "kvc_router_breaker_open", []string{"worker=d0", "kind=admission"}},
		{0, "kvc_feed_trusted", []string{"worker=d0"}},
		{1, "kvc_router_retries_total", []string{"cause=" + RetryEmpty}},
		{2, "kvc_router_turn_waits_total", []string{"result=ended"}},
		{1, "kvc_router_turn_waits_total", []string{"result=timeout"}},
		{1, "kvc_router_requests_inflight", nil},
		{1, "kvc_router_config_reloads_total", []string{"file=fleet", "result=ok"}},
		{1, "kvc_router_config_reloads_total", []string{"file=fleet", "result=rejected"}},
		{-1, "kvc_router_config_reloads_total", []string{"file=routing", "result=ok"}},
		{1, "kvc_router_open_connections", []string{"purpose=feed"}},
	} {
		if got := value(t, m, c.name, c.labels...); got != c.want {
			t.Errorf("%s%v = %v, want %v", c.name, c.labels, got, c.want)
		}
	}
}

func TestHistogramsTakeSecondsAndBytes(t *testing.T) {
	m := NewRouter()
	m.FirstToken("direct", 1500*time.Millisecond)
	m.TurnTook("seed", 2*time.Minute)
	m.Asked("fused", AskTimeout, 50*time.Millisecond)
	m.Body(4096)
	for name, want := range map[string]float64{
		"kvc_router_ttft_seconds": 1.5, "kvc_router_turn_seconds": 120,
		"kvc_router_admission_seconds": .05, "kvc_router_body_bytes": 4096,
	} {
		h := families(t, m)[name].GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 1 || h.GetSampleSum() != want {
			t.Errorf("%s holds %d samples of sum %v, want one of %v", name, h.GetSampleCount(), h.GetSampleSum(), want)
		}
		for _, b := range h.GetBucket() {
			if in := want <= b.GetUpperBound(); (b.GetCumulativeCount() == 1) != in {
				t.Errorf("%s: the bucket up to %v holds %d", name, b.GetUpperBound(), b.GetCumulativeCount())
			}
		}
	}
}

// The SLO thresholds of the paper and the default body limit stand inside the
// buckets: a quantile outside cannot be read.
func TestBucketsCoverTheLimits(t *testing.T) {
	if b := bodyBuckets(); b[len(b)-1] < 64<<20 {
		t.Errorf("body buckets end at %v, the default limit is 64 MiB", b[len(b)-1])
	}
	if b := admissionBuckets(); b[0] > .0005 || b[len(b)-1] < .05 {
		t.Errorf("admission buckets %v miss a local answer or the 50 ms timeout", b)
	}
	for _, b := range [][]float64{admissionBuckets(), bodyBuckets()} {
		if !slices.IsSorted(b) || len(slices.Compact(slices.Clone(b))) != len(b) {
			t.Errorf("buckets %v do not rise", b)
		}
	}
}

// R114: ten thousand distinct values off the wire, well-formed ones included,
// stay within a bound.
func TestTenThousandWireValuesMakeFewSeries(t *testing.T) {
	m := NewRouter()
	m.Refused("body-too-large")
	for i := range 10_000 {
		v := fmt.Sprintf("reason-%d", i)
		m.TurnEnded("seed", v, OutcomeOK)
		m.Untrusted(v)
		m.Refused(v)
		m.Session("header:" + v)
	}
	m.Refused("body-too-large")
	for name, want := range map[string]float64{"kvc_router_turns_total": 10_000, "kvc_feed_untrusted_total": 10_000,
		"kvc_router_refusals_total": 10_002, "kvc_router_session_source_total": 10_000} {
		series, sum := families(t, m)[name].GetMetric(), 0.
		for _, s := range series {
			sum += s.GetCounter().GetValue()
		}
		if len(series) > 200 {
			t.Errorf("%s has %d series", name, len(series))
		}
		if sum != want {
			t.Errorf("%s counted %v of %v", name, sum, want)
		}
	}
	if got := value(t, m, "kvc_router_refusals_total", "reason=body-too-large"); got != 2 {
		t.Errorf("a value known before the flood counts %v, want 2", got)
	}
}

// Workers come and go: what stays is the live ones' series only.
func TestChurnOfWorkersLeavesNoSeries(t *testing.T) {
	m := NewRouter()
	for i := range 500 {
		w := fmt.Sprintf("decode-%d", i)
		for _, role := range []string{"decode", "prefill"} {
			m.Inflight(w, role, 1)
		}
		m.Breaker(w, "data", true)
		m.Breaker(w, "admission", false)
		m.Trusted(w, true)
		if i > 0 {
			m.WorkerGone(w)
		}
	}
	m.WorkerGone("never-seen")
	for name, want := range map[string]int{"kvc_router_inflight": 2, "kvc_router_breaker_open": 2, "kvc_feed_trusted": 1} {
		series := families(t, m)[name].GetMetric()
		if len(series) != want {
			t.Errorf("%s has %d series, want %d", name, len(series), want)
		}
		for _, s := range series {
			if !slices.Contains(labelsOf(s), "worker=decode-0") {
				t.Errorf("%s kept %v", name, labelsOf(s))
			}
		}
	}
}

// A name that begins like another's is another worker.
func TestWorkerGoneTakesTheWholeName(t *testing.T) {
	m := NewRouter()
	m.Trusted("decode-1", true)
	m.Trusted("decode-10", true)
	m.WorkerGone("decode-1")
	if value(t, m, "kvc_feed_trusted", "worker=decode-10") != 1 || value(t, m, "kvc_feed_trusted", "worker=decode-1") != -1 {
		t.Error("want decode-10 alone")
	}
}

// A worker that is deleted while its turns end neither races nor panics, and a
// scrape in between is whole.
func TestConcurrentUseIsSafe(t *testing.T) {
	m := NewRouter()
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for range 50 {
				every(m, fmt.Sprint("d", i%2))
				m.PinChanges(func() float64 { return 0 })
			}
		})
	}
	for range 5 {
		m.WorkerGone("d0")
		if _, err := m.Registry().Gather(); err != nil {
			t.Error(err)
		}
	}
	all.Wait()
	if got := value(t, m, "kvc_router_billing_header_cuts_total"); got != 200 {
		t.Errorf("%v cuts, want 200", got)
	}
}

func TestTwoRoutersShareNothing(t *testing.T) {
	a, b := NewRouter(), NewRouter()
	a.BillingCut()
	if value(t, a, "kvc_router_billing_header_cuts_total") != 1 || value(t, b, "kvc_router_billing_header_cuts_total") != 0 {
		t.Error("a cut of one router is counted by the other")
	}
}

func TestAScrapeIsTextWithTheProcess(t *testing.T) {
	w := httptest.NewRecorder()
	NewRouter().Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if ct := w.Header().Get("Content-Type"); !strings.HasPrefix(ct, "text/plain") {
		t.Errorf("content type %q", ct)
	}
	for _, want := range []string{"go_goroutines ", "kvc_router_requests_inflight 0", "kvc_router_billing_header_cuts_total 0"} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("scrape lacks %q", want)
		}
	}
}

func TestLogLevels(t *testing.T) {
	for level, want := range map[string]int{"debug": 4, "info": 3, "warn": 2, "error": 1} {
		var b bytes.Buffer
		l, err := NewLog(&b, "json", level)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
			l.Log(t.Context(), at, "said", "worker", "d0")
		}
		lines := bytes.Split(bytes.TrimSpace(b.Bytes()), []byte("\n"))
		if len(lines) != want {
			t.Errorf("level %s: %d lines, want %d", level, len(lines), want)
		}
		for _, line := range lines {
			var entry map[string]any
			if err := json.Unmarshal(line, &entry); err != nil || entry["worker"] != "d0" {
				t.Errorf("line %s: %v", line, err)
			}
		}
	}
}
