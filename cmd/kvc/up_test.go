package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/controllers/local"
	"github.com/kvc-dev/kvc/router/admission"
)

func TestRowsJoinProcessesAndRouter(t *testing.T) {
	workers := []local.Worker{
		{Name: "prefill-0", ID: "p", Role: "prefill", Pods: 1},
		{Name: "prefill-1", Role: "prefill", Pods: 1},
		{Name: "prefill-2", Role: "prefill", Pods: 1, ID: "q", Waiting: "the engine is warming up"},
		{Name: "decode-0", ID: "a", Role: "decode", Pods: 1, Ready: true, SidecarPID: 7},
		{Name: "decode-1", ID: "b", Role: "decode", Pods: 3},
		{Name: "decode-2", ID: "c", Role: "decode", Pods: 1, Ready: true},
		{Name: "decode-3", ID: "new", Role: "decode", Pods: 2, Ready: true, SidecarPID: 8},
	}
	status := &admission.RouterStatus{Workers: []admission.RouterWorker{
		{Worker: "a", State: "Active", Trusted: true, Used: 300, CapacityTokens: 600, Sessions: 4, InFlight: 1,
			Modes: map[string]int64{"direct": 9, "seed": 1}},
		{Worker: "c", State: "Active", Trusted: true},
		{Worker: "old", State: "Active", Trusted: true, Sessions: 99}, // the incarnation before
	}}
	want := []row{
		{name: "prefill-0", role: "prefill", state: "starting"},
		{name: "prefill-1", role: "prefill", state: "engine ended"},
		{name: "prefill-2", role: "prefill", state: "starting: the engine is warming up"},
		{name: "decode-0", role: "decode", state: "ready", known: true, used: 300, capacity: 600, sessions: 4, inFlight: 1,
			modes: map[string]int64{"direct": 9, "seed": 1}},
		{name: "decode-1", role: "decode", state: "restarting (pod 3)"},
		{name: "decode-2", role: "decode", state: "sidecar restarting", known: true},
		{name: "decode-3", role: "decode", state: "ready"},
	}
	if diff := cmp.Diff(want, rows(workers, status), cmp.AllowUnexported(row{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, r := range rows(workers, nil) {
		if r.known {
			t.Errorf("%s: load is known without a router", r.name)
		}
	}
}

func TestRouterState(t *testing.T) {
	cases := map[string]struct {
		w    admission.RouterWorker
		want string
	}{
		"followed and closed":             {admission.RouterWorker{Trusted: true, Breaker: "closed"}, "ready"},
		"draining comes first":            {admission.RouterWorker{State: "Draining", Breaker: "open"}, "draining"},
		"an open breaker":                 {admission.RouterWorker{Trusted: true, Breaker: "open"}, "breaker open"},
		"a breaker that tries":            {admission.RouterWorker{Trusted: true, Breaker: "half-open"}, "breaker half-open"},
		"a feed that is not yet followed": {admission.RouterWorker{}, "feed not followed"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := routerState(tc.w); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestTableShowsUnknownAsADash(t *testing.T) {
	got := tableOf([]row{
		{name: "prefill-0", role: "prefill", state: "starting"},
		{name: "decode-0", role: "decode", state: "ready", known: true, used: 123456, capacity: 600000, sessions: 12, inFlight: 3,
			modes: map[string]int64{"direct": 93, "seed": 5, "reseed": 2}},
	}, 0)
	want := ` WORKER     ROLE     STATE     KV USE          SESSIONS  IN FLIGHT  TURNS BY MODE
 prefill-0  prefill  starting  -                      -          -
 decode-0   decode   ready      20% of 600.0K        12          3  direct 93% seed 5% reseed 2% of 100
`
	if diff := cmp.Diff(trimLines(want), trimLines(got)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func trimLines(s string) string {
	var out []string
	for line := range strings.SplitSeq(strings.TrimSpace(s), "\n") {
		out = append(out, strings.TrimRight(line, " "))
	}
	return strings.Join(out, "\n")
}

func TestTokens(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1.0K", 123456: "123.5K", 2345678: "2.35M"} {
		if got := tokens(n); got != want {
			t.Errorf("tokens(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestScreenOfATerminalRedrawsInPlace(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out)
	s.live = true
	rows := []row{{name: "decode-0", role: "decode", state: "ready"}}
	s.show(rows)
	first := out.String()
	height := strings.Count(first, "\n")
	if strings.Contains(first, "\x1b[") && strings.HasPrefix(first, "\x1b[") {
		t.Errorf("the first table moves the cursor: %q", first)
	}
	out.Reset()
	s.show(rows)
	if want := "\x1b[2A\x1b[J" + first; height != 2 || out.String() != want {
		t.Errorf("second = %q, want %q", out.String(), want)
	}
	out.Reset()
	s.printf("event\n")
	if got := out.String(); got != "\x1b[2A\x1b[Jevent\n" {
		t.Errorf("an event prints %q, want it in place of the table", got)
	}
	out.Reset()
	s.show(rows)
	if out.String() != first {
		t.Errorf("after an event the table is %q, want it afresh", out.String())
	}
}

func TestScreenOfALogSaysChangesOnly(t *testing.T) {
	var out bytes.Buffer
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := newScreen(&out)
	s.now = func() time.Time { return now }
	busy := row{name: "decode-0", role: "decode", state: "ready", known: true, used: 1, capacity: 4, sessions: 1}
	busier := busy
	busier.sessions = 2
	steps := []struct {
		name string
		wait time.Duration
		row  row
		want string
	}{
		{"a new worker", 0, row{name: "decode-0", state: "starting"}, "03:04:05 decode-0 starting\n"},
		{"the same again", time.Second, row{name: "decode-0", state: "starting"}, ""},
		{"another state", time.Second, busy, "03:04:07 decode-0 ready kv 25% of 4 sessions 1 in-flight 0\n"},
		{"another load, soon after", time.Second, busier, ""},
		{"another load, when it is time", 8 * time.Second, busier, "03:04:16 decode-0 ready kv 25% of 4 sessions 2 in-flight 0\n"},
		{"the same load, when it is time", 10 * time.Second, busier, ""},
	}
	for _, step := range steps {
		now = now.Add(step.wait)
		out.Reset()
		s.show([]row{step.row})
		if out.String() != step.want {
			t.Errorf("%s: %q, want %q", step.name, out.String(), step.want)
		}
	}
}

func TestEventLogIsForPeople(t *testing.T) {
	var out bytes.Buffer
	newEventLog(&out).Warn("process ended", "process", "router")
	got := out.String()
	if !strings.HasSuffix(got, " msg=\"process ended\" process=router\n") || strings.Contains(got, "level") ||
		len(got) > len("time=03:04:05 msg=\"process ended\" process=router\n") {
		t.Errorf("line = %q", got)
	}
}

func TestStatusReaderKnowsNothingOfASilentRouter(t *testing.T) {
	answers := map[string]http.HandlerFunc{
		"an error":     func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) },
		"broken JSON":  func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "{") },
		"nothing here": http.NotFound,
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(answer)
			defer srv.Close()
			if got := (statusReader{url: srv.URL, client: srv.Client()}).read(t.Context()); got != nil {
				t.Errorf("status = %+v, want unknown", got)
			}
		})
	}
	if got := (statusReader{url: "http://127.0.0.1:1", client: http.DefaultClient}).read(t.Context()); got != nil {
		t.Errorf("status of nobody = %+v", got)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != admission.PathStatus {
			t.Errorf("asked for %s", r.URL.Path)
		}
		_ = json.NewEncoder(w).Encode(admission.RouterStatus{PinChanges: 3})
	}))
	defer srv.Close()
	if got := (statusReader{url: srv.URL, client: srv.Client()}).read(t.Context()); got == nil || got.PinChanges != 3 {
		t.Errorf("status = %+v", got)
	}
}

// One clear sentence, and an exit code that tells a typing error (2) from a pool
// that cannot run (1).
func TestUpRefuses(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "pool.yaml")
	if err := os.WriteFile(bad, []byte("apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nspec:\n  prefil: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		args []string
		want string
		code int
	}{
		"no manifest":          {[]string{"up"}, "up needs a manifest: kvc up -f pool.yaml", 2},
		"a manifest by itself": {[]string{"up", "pool.yaml"}, `unknown command or argument "pool.yaml" for "kvc up"`, 2},
		"an unknown flag":      {[]string{"up", "--prot", "1"}, "unknown flag: --prot", 2},
		"an absent manifest":   {[]string{"up", "-f", bad + ".no"}, "pool.yaml.no does not exist; give the path", 1},
		"a directory":          {[]string{"up", "-f", filepath.Dir(bad)}, "read the manifest", 1},
		"a misspelt field": {[]string{"up", "-f", bad},
			bad + `:4: spec.prefil: unknown field; did you mean "prefill"?`, 1},
		"programs that are not built": {[]string{"up", "-f", "../../config/samples/pool_demo.yaml"},
			"has no program \"router\"; build them all with `make build`", 1},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			err := run(t.Context(), tc.args, io.Discard, io.Discard)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error = %v, want %q", err, tc.want)
			}
			if got := exitCode(err); got != tc.code {
				t.Errorf("exit code %d, want %d", got, tc.code)
			}
		})
	}
}

func TestReadPoolFromStandardInput(t *testing.T) {
	data, err := os.ReadFile("../../config/samples/pool_short.yaml")
	if err != nil {
		t.Fatal(err)
	}
	p, err := readPool("-", bytes.NewReader(data))
	if err != nil || p.Name != "qwen3-32b" {
		t.Errorf("pool = %v, %v", p, err)
	}
	if _, err := readPool("-", strings.NewReader("kind: x")); err == nil || !strings.HasPrefix(err.Error(), "standard input:1") {
		t.Errorf("error = %v, want the place in standard input", err)
	}
	if _, err := readPool("-", failingReader{}); err == nil || !errors.Is(err, context.Canceled) {
		t.Errorf("error = %v", err)
	}
}

type failingReader struct{}

func (failingReader) Read([]byte) (int, error) { return 0, context.Canceled }
