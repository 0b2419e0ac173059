package replay

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func updating() bool { return os.Getenv("KVC_UPDATE") != "" }

// golden compares got with a file of testdata; KVC_UPDATE=1 writes it.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if updating() {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (KVC_UPDATE=1 rewrites it):\n%s", name, diff)
	}
}

// sampleResult is a run of all modes, with one failure.
func sampleResult() *Result {
	ms := time.Millisecond
	turn := func(mode string, index int, at, ttft time.Duration) Turn {
		return Turn{Session: "s<1>", Index: index, At: at, Mode: mode, Worker: "decode-0", TTFT: ttft,
			E2E: ttft + 90*ms, PromptTokens: 1000, CachedTokens: 900, CompletionTokens: 10}
	}
	r := &Result{Wall: 2 * time.Second, Sessions: 2, Counters: Counters{PinChanges: new(int64(1)),
		PrefillTokens: new(int64(4000)),
		DecodePrefill: new(int64(600)), TransferredTokens: new(int64(4200)), EvictedTokens: new(int64(0))}}
	r.Turns = append(r.Turns, turn("seed", 0, 0, 40*ms), turn("seed", 0, 10*ms, 60*ms))
	for i := range 7 {
		r.Turns = append(r.Turns, turn("direct", i+1, time.Duration(100+50*i)*ms, time.Duration(4+i)*ms))
	}
	r.Turns = append(r.Turns, turn("reseed", 8, 600*ms, 50*ms), turn("delta", 9, 700*ms, 20*ms))
	failed := turn("fallback", 10, 900*ms, 0)
	failed.Failure = Failure{Kind: "in-band", Message: "worker <died>"}
	r.Turns = append(r.Turns, failed)
	for i := range 4 {
		at := time.Duration(i) * 300 * ms
		r.Load = append(r.Load, LoadSample{At: at, Workers: []WorkerLoad{
			{Pod: "decode-0", Role: "decode", Used: 1000 * i, Capacity: 10000},
			{Pod: "prefill-0", Role: "prefill", Used: 500, Capacity: 10000},
		}})
	}
	return r
}

func sampleLabels() Labels {
	return Labels{Preset: "Corrected", DirectPath: "ConditionalAggregation", Workload: "built-in agent sessions",
		Seed: 1, Concurrency: 2, TimeScale: 10}
}

func TestSummaryJSON(t *testing.T) {
	data, err := json.MarshalIndent(Summarize(sampleResult(), sampleLabels()), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "summary.json", append(data, '\n'))
}

// The members that others read, in the order and with the names promised.
func TestSummaryBeginsAsPromised(t *testing.T) {
	data, err := json.Marshal(Summarize(&Result{}, sampleLabels()))
	if err != nil {
		t.Fatal(err)
	}
	want := `{"requests":0,"errors":0,"modes":{"direct":0,"delta":0,"seed":0,"reseed":0,"fallback":0},` +
		`"ttft_ms":{},"pin_changes":null,"preset":"Corrected","direct_path":"ConditionalAggregation",`
	if !strings.HasPrefix(string(data), want) {
		t.Errorf("JSON begins\n%s\nwant\n%s", data[:min(len(data), len(want))], want)
	}
}

func TestSummaryAccountsForEveryTurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &Result{}
		modes := modeNames()
		for range rapid.IntRange(0, 40).Draw(t, "turns") {
			turn := Turn{Mode: rapid.SampledFrom(modes).Draw(t, "mode"), Index: rapid.IntRange(0, 3).Draw(t, "index"),
				TTFT: time.Duration(rapid.IntRange(1, 1e9).Draw(t, "ttft"))}
			if rapid.Bool().Draw(t, "failed") {
				turn.Failure.Kind = rapid.SampledFrom([]string{"stream", "timeout"}).Draw(t, "kind")
			}
			r.Turns = append(r.Turns, turn)
		}
		s := Summarize(r, Labels{TimeScale: 1})
		n, failures := s.Errors, 0
		for _, m := range modes {
			n += *s.Modes.Of(m)
		}
		for _, f := range s.Failures {
			failures += f.Count
		}
		if n != len(r.Turns) || s.Requests != n || failures != s.Errors {
			t.Fatalf("%d requests, %d errors, %d failures: %d turns in all of %d",
				s.Requests, s.Errors, failures, n, len(r.Turns))
		}
		if x := s.DirectShareAfterFirst; x != nil && (*x < 0 || *x > *s.ResidentShareAfterFirst || *x > 1) {
			t.Fatalf("direct share %g, resident share %g", *x, *s.ResidentShareAfterFirst)
		}
	})
}

func TestSharesAfterTheFirstTurn(t *testing.T) {
	ok := func(mode string, index int) Turn { return Turn{Mode: mode, Index: index} }
	broken := Turn{Mode: "direct", Index: 1, Failure: Failure{Kind: "stream"}}
	cases := map[string]struct {
		turns []Turn
		want  string
	}{
		"first turns do not count":          {[]Turn{ok("seed", 0), ok("seed", 0), ok("direct", 1)}, "100.0 %"},
		"a failure counts against":          {[]Turn{ok("direct", 1), broken}, "50.0 %"},
		"no later turns: unknown":           {[]Turn{ok("seed", 0)}, "–"},
		"a server without modes: unknown":   {[]Turn{ok("unknown", 0), ok("unknown", 1)}, "–"},
		"delta is resident, and not direct": {[]Turn{ok("delta", 1), ok("direct", 1)}, "50.0 %"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			direct, _ := sharesAfterFirst(tc.turns)
			if got := percent(direct); got != tc.want {
				t.Errorf("share = %s, want %s", got, tc.want)
			}
		})
	}
}

func TestTimesAreEmulated(t *testing.T) {
	r := &Result{Turns: []Turn{
		{Mode: "direct", TTFT: 3 * time.Millisecond, E2E: 12 * time.Millisecond, CompletionTokens: 4}}}
	s := Summarize(r, Labels{TimeScale: 40})
	if s.TTFT["direct"].P50 != 120 || s.E2E[All].P99 != 480 || s.ITL["direct"].Mean != 120 {
		t.Errorf("TTFT %g, E2E %g, ITL %g; want 120, 480, 120", s.TTFT["direct"].P50, s.E2E[All].P99, s.ITL["direct"].Mean)
	}
}

func TestTable(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, Summarize(sampleResult(), sampleLabels())); err != nil {
		t.Fatal(err)
	}
	golden(t, "table.txt", b.Bytes())
}

func TestComparison(t *testing.T) {
	a := Summarize(sampleResult(), sampleLabels())
	u := a
	u.DirectPath, u.TransferredTokens = "Unified", nil
	d := a
	d.DirectPath = "DeltaTransfer"
	var b bytes.Buffer
	if err := WriteComparison(&b, []Summary{a, u, d}); err != nil {
		t.Fatal(err)
	}
	golden(t, "comparison.txt", b.Bytes())
}

func TestNumbersForPeople(t *testing.T) {
	for want, got := range map[string]string{
		"1,234,567": count(1234567), "-1,000": count(-1000), "999": count(999), "-12": count(-12),
		"–": millis(0), "12.3": millis(12.34), "1,235": millis(1234.6),
		"2.5 s": secondsLabel(2.5), "20 min": secondsLabel(1200), "100 ms": msLabel(100), "3 s": msLabel(3000),
		"a PR": strings.ReplaceAll(stock("ConditionalAggregation"), "no: draft PR #34773", "a PR"),
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for v, want := range map[float64]float64{0: 1, .7: 1, 3: 5, 45: 60, 120: 120, 121: 300, 1801: 3600, 7300: 14400} {
		if got := niceStep(v); math.Abs(got-want) > 1e-9 {
			t.Errorf("niceStep(%g) = %g, want %g", v, got, want)
		}
	}
}

func page1(t *testing.T, runs ...Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := WriteHTML(&b, runs); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func sampleReport() Report {
	r := sampleResult()
	return Report{Result: r, Summary: Summarize(r, sampleLabels())}
}

func TestReportIsWellFormedAndNeedsNothingElse(t *testing.T) {
	other := sampleReport()
	other.Summary.DirectPath = "Unified"
	for name, html := range map[string]string{
		"one run":       page1(t, sampleReport()),
		"two runs":      page1(t, sampleReport(), other),
		"an empty run":  page1(t, Report{Result: &Result{}, Summary: Summarize(&Result{}, sampleLabels())}),
		"unknown modes": page1(t, unknownModes()),
	} {
		t.Run(name, func(t *testing.T) {
			wellFormed(t, html)
			if m := regexp.MustCompile(`(?i)(https?:|//[a-z]|src=|@import|url\(|<script|<link)`).FindString(html); m != "" {
				t.Errorf("the page reaches outside itself: %q", m)
			}
			if strings.Contains(html, "NaN") || strings.Contains(html, "Inf") || strings.Contains(html, "ZgotmplZ") {
				t.Error("a number or a value did not survive")
			}
		})
	}
}

func unknownModes() Report {
	r := &Result{Turns: []Turn{{Mode: ModeUnknown, TTFT: 1, E2E: 2}}}
	return Report{Result: r, Summary: Summarize(r, Labels{TimeScale: 1})}
}

// wellFormed checks that every element that is opened is closed, in order.
func wellFormed(t *testing.T, html string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(html))
	d.Strict = true
	d.Entity = xml.HTMLEntity
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			line, col := d.InputPos()
			t.Fatalf("line %d, column %d: %v", line, col, err)
		}
	}
}

func TestReportShowsThePlotsAndEscapesWhatItQuotes(t *testing.T) {
	html := page1(t, sampleReport())
	for _, want := range []string{
		"Time to first token by mode", "Mode shares over time", "KV use per worker", `class="dot m-direct"`,
		"direct p99: ", "<polyline", "decode-0, 30 % at the end", "prefers-color-scheme: dark", "worker &lt;died&gt;",
		"1 ms here = 0.1 ms real (KVC_TIME_SCALE 10)",
	} {
		if !strings.Contains(html, want) {
			t.Errorf("the report lacks %q", want)
		}
	}
	if n := strings.Count(html, "<circle"); n != 11 {
		t.Errorf("%d dots, want one for each of the 11 answers", n)
	}
	if strings.Contains(html, "The same workload on each") {
		t.Error("one run is compared with nothing")
	}
}

func TestReportsOfLongRunsStaySmall(t *testing.T) {
	r := sampleResult()
	for i := range 50_000 {
		r.Turns = append(r.Turns, Turn{Mode: "direct", Index: 1, At: time.Duration(i) * time.Millisecond,
			TTFT: time.Duration(i + 1)})
		r.Load = append(r.Load, r.Load[0])
	}
	if n := len(page1(t, Report{Result: r, Summary: Summarize(r, sampleLabels())})); n > 200_000 {
		t.Errorf("the report has %d bytes", n)
	}
}

func TestDotsAreTheSameForTheSameRun(t *testing.T) {
	first := page1(t, sampleReport())
	if again := page1(t, sampleReport()); again != first {
		t.Error("two reports of one run differ")
	}
}
