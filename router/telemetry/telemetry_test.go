package telemetry

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// every moves each metric once, for a worker of this name.
func every(m *Router, worker string) {
	m.TurnEnded("direct", "", OutcomeOK)
	m.FirstToken("direct", time.Second)
	m.TurnTook("direct", time.Second)
	m.Tokens(1, 2, 3)
	m.Asked("rpc", AskAdmitted, time.Millisecond)
	m.Inflight(worker, "decode", 1)
	m.Breaker(worker, "data", true)
	m.Trusted(worker, true)
	m.Untrusted("gap")
	m.Retry(RetryTransport)
	m.Waited(true)
	m.Requests(1)
	m.Body(100)
	m.Refused("invalid-body")
	m.Session("header:x-session-id")
	m.BillingCut()
	m.Hint("ok")
	m.Reloaded("fleet", true)
	m.Conns("data", 1)
	m.WireFault("early_hint")
}

func scrape(t *testing.T, m *Router) string {
	t.Helper()
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != 200 {
		t.Fatalf("scrape: %d %s", w.Code, w.Body)
	}
	return w.Body.String()
}

// R115: label sets agree between code paths; a pedantic registry would panic or
// fail the scrape otherwise. Each of our metrics has help text.
func TestEveryMetricIsConsistent(t *testing.T) {
	m := NewRouter()
	m.PinChanges(func() float64 { return 4 })
	m.PinChanges(func() float64 { return 5 }) // registered once
	every(m, "d0")
	every(m, "d1")
	m.Reloaded("routing", false)
	m.Waited(false)
	body := scrape(t, m)
	for line := range strings.Lines(body) {
		name, _, _ := strings.Cut(strings.TrimPrefix(line, "# TYPE "), " ")
		if strings.HasPrefix(line, "# TYPE kvc_") && !strings.Contains(body, "# HELP "+name+" ") {
			t.Errorf("%s has no help", name)
		}
	}
	for _, want := range []string{"kvc_router_pin_changes_total 4", `kvc_feed_trusted{worker="d0"} 1`,
		`kvc_router_tokens_total{kind="completion"} 6`, `kvc_router_turn_waits_total{result="timeout"} 1`,
		`kvc_router_config_reloads_total{file="routing",result="rejected"} 1`} {
		if !strings.Contains(body, want) {
			t.Errorf("scrape lacks %s", want)
		}
	}
}

// R105: a removed worker leaves no series behind.
func TestWorkerGoneDeletesItsSeries(t *testing.T) {
	m := NewRouter()
	every(m, "d0")
	every(m, "d1")
	m.WorkerGone("d0")
	if body := scrape(t, m); strings.Contains(body, `"d0"`) || !strings.Contains(body, `"d1"`) {
		t.Error("want d0's series gone and d1's kept")
	}
}

// R114: values that come off a wire cannot make series without bound.
func TestForeignLabelsAreBounded(t *testing.T) {
	m := NewRouter()
	for i := range 1000 {
		m.TurnEnded("seed", fmt.Sprintf("weird reason %d", i), OutcomeOK)
		m.Session(strings.Repeat("x", 65+i))
	}
	body := scrape(t, m)
	if n := strings.Count(body, "kvc_router_turns_total{"); n != 1 {
		t.Errorf("%d series, want other alone", n)
	}
	if !strings.Contains(body, `kvc_router_session_source_total{source="other"} 1000`) {
		t.Error("long sources are not in other")
	}
}

// R13: the longest runs are inside the buckets.
func TestBucketsReachLongRuns(t *testing.T) {
	for name, b := range map[string][]float64{"ttft": ttftBuckets(), "duration": durationBuckets()} {
		if last := b[len(b)-1]; last < 3600 {
			t.Errorf("%s ends at %v s, want an hour or more", name, last)
		}
		for i := 1; i < len(b); i++ {
			if b[i] <= b[i-1] {
				t.Errorf("%s buckets do not rise at %d", name, i)
			}
		}
	}
}

func TestNewLog(t *testing.T) {
	for format, want := range map[string]string{"json": `"msg":"hello"`, "text": "msg=hello"} {
		var b bytes.Buffer
		l, err := NewLog(&b, format, "info")
		if err != nil {
			t.Fatal(err)
		}
		l.Info("hello")
		l.Debug("quiet")
		if !strings.Contains(b.String(), want) || strings.Contains(b.String(), "quiet") {
			t.Errorf("%s log %q", format, b.String())
		}
	}
	if _, err := NewLog(nil, "xml", "info"); err == nil || !strings.Contains(err.Error(), "text or json") {
		t.Errorf("format: %v", err)
	}
	if _, err := NewLog(nil, "text", "loud"); err == nil || !strings.Contains(err.Error(), "debug, info, warn or error") {
		t.Errorf("level: %v", err)
	}
}
