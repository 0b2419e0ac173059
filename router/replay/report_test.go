package replay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTurnLog(t *testing.T) {
	r := sampleReport()
	r.Result.Turns[0], r.Result.Turns[3] = r.Result.Turns[3], r.Result.Turns[0] // completion is not the order of start
	var b bytes.Buffer
	if err := WriteTurns(&b, r); err != nil {
		t.Fatal(err)
	}
	golden(t, "turns.jsonl", b.Bytes())
	last := -1.0
	for line := range strings.Lines(b.String()) {
		var v struct {
			At float64 `json:"at_ms"`
		}
		if err := json.Unmarshal([]byte(line), &v); err != nil || v.At < last {
			t.Errorf("%q at %g after %g (%v)", line, v.At, last, err)
		}
		last = v.At
	}
}

// failing is a disk that is full.
type failing struct{ after int }

func (f *failing) Write(p []byte) (int, error) {
	if f.after -= len(p); f.after < 0 {
		return 0, errFull
	}
	return len(p), nil
}

var errFull = errors.New("disk is full")

func TestWritersPassTheirErrors(t *testing.T) {
	r := sampleReport()
	for name, write := range map[string]func(*failing) error{
		"the page":       func(w *failing) error { return WriteHTML(w, []Report{r}) },
		"the turns":      func(w *failing) error { return WriteTurns(w, r) },
		"the table":      func(w *failing) error { return WriteTable(w, r.Summary) },
		"the comparison": func(w *failing) error { return WriteComparison(w, []Summary{r.Summary}) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := write(&failing{after: 20}); !errors.Is(err, errFull) {
				t.Errorf("error = %v", err)
			}
		})
	}
}

func TestFacts(t *testing.T) {
	base := Summary{Requests: 10, TimeScale: 25, WallS: 40, PromptTokens: 1000, CachedTokens: 900}
	cases := map[string]struct {
		change func(*Summary)
		want   []string
	}{
		"a server that says nothing of itself": {func(*Summary) {}, []string{
			"times are emulated: 1 ms here = 0.04 ms real (KVC_TIME_SCALE 25); 40.0 s of wall clock",
			"prompt tokens 1,000, 90.0 % cached"}},
		"modes, but no router to ask": {func(s *Summary) { s.DirectShareAfterFirst = new(.5) }, []string{
			"times are emulated: 1 ms here = 0.04 ms real (KVC_TIME_SCALE 25); 40.0 s of wall clock",
			"direct 50.0 % of the turns after the first",
			"prompt tokens 1,000, 90.0 % cached"}},
		"everything": {func(s *Summary) {
			s.DirectShareAfterFirst, s.ResidentShareAfterFirst, s.PinChanges = new(.5), new(.75), new(int64(2))
			s.Modes.Delta = 1
			s.PrefillTokens, s.DecodePrefillTokens, s.TransferredTokens = new(int64(7000)), new(int64(0)), new(int64(12))
			s.Failures = []FailureCount{{"timeout", 2, "no whole answer"}}
			s.Interrupted = true
		}, []string{
			"times are emulated: 1 ms here = 0.04 ms real (KVC_TIME_SCALE 25); 40.0 s of wall clock",
			"direct 50.0 % of the turns after the first, direct or delta 75.0 %; pin changes 2",
			"prompt tokens 1,000, 90.0 % cached; computed on P 7,000, on D 0; transferred 12",
			"2 × timeout: no whole answer",
			"interrupted: this is what was seen until then"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := base
			tc.change(&s)
			if diff := cmp.Diff(tc.want, facts(s)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWhatStockSGLangGives(t *testing.T) {
	for path, want := range map[string]string{
		"Unified": "yes", "DeltaTransfer": "yes (≥ 0.5.16)", "ConditionalAggregation": "no: draft PR #34773",
		"NativeAdmission": "no: a patched engine", "": "unknown",
	} {
		if got := stock(path); got != want {
			t.Errorf("%q: %q, want %q", path, got, want)
		}
	}
}

func TestComparisonHasAColumnPerRun(t *testing.T) {
	a := sampleReport().Summary
	b := a
	b.DirectPath, b.Errors, b.PinChanges = "Unified", 0, nil
	rows := ComparisonRows([]Summary{a, b})
	byName := make(map[string][]string)
	for _, r := range rows {
		if len(r.Values) != 2 {
			t.Errorf("%q has %d values", r.Name, len(r.Values))
		}
		byName[r.Name] = r.Values
	}
	want := map[string][]string{
		"errors":                                {"1", "0"},
		"pin changes":                           {"1", "–"},
		"a stock SGLang image gives this today": {"no: draft PR #34773", "yes"},
	}
	for name, values := range want {
		if diff := cmp.Diff(values, byName[name]); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
}

func TestTheTableShowsOnlyModesThatRan(t *testing.T) {
	r := &Result{Turns: []Turn{{Mode: "seed", TTFT: time.Millisecond, E2E: time.Second}}}
	var b bytes.Buffer
	if err := WriteTable(&b, Summarize(r, Labels{TimeScale: 1, DirectPath: "Unified"})); err != nil {
		t.Fatal(err)
	}
	for word, want := range map[string]bool{"seed": true, "direct ": false, "fallback": false, "errors": false, "Unified": true} {
		if got := strings.Contains(b.String(), word); got != want {
			t.Errorf("%q in the table: %v, want %v\n%s", word, got, want, b.String())
		}
	}
}

// Failures are grouped by kind, the most frequent first, with an example of
// bounded length.
func TestFailuresAreGrouped(t *testing.T) {
	r := &Result{}
	for range 3 {
		r.Turns = append(r.Turns, Turn{Failure: Failure{Kind: "timeout", Message: "slow"}})
	}
	r.Turns = append(r.Turns, Turn{}, Turn{Failure: Failure{Kind: "stream", Message: strings.Repeat("x", 1000)}},
		Turn{Failure: Failure{Kind: "in-band", Message: "died"}})
	got := countFailures(r.Turns)
	var kinds []string
	for _, f := range got {
		kinds = append(kinds, f.Kind)
		if len(f.Example) > 310 {
			t.Errorf("an example of %d bytes", len(f.Example))
		}
	}
	if diff := cmp.Diff([]string{"timeout", "in-band", "stream"}, kinds); diff != "" || got[0].Count != 3 {
		t.Errorf("%d × the first:\n%s", got[0].Count, diff)
	}
}

func TestITL(t *testing.T) {
	cases := map[string]struct {
		turn Turn
		want time.Duration
	}{
		"the time after the first token, shared by the others": {
			Turn{TTFT: time.Second, E2E: 4 * time.Second, CompletionTokens: 4}, time.Second},
		"one token has none":     {Turn{TTFT: time.Second, E2E: 4 * time.Second, CompletionTokens: 1}, 0},
		"no content has none":    {Turn{E2E: 4 * time.Second, CompletionTokens: 4}, 0},
		"a failed turn has none": {Turn{TTFT: 1, E2E: 4, CompletionTokens: 4, Failure: Failure{Kind: "x"}}, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := tc.turn.ITL(); got != tc.want {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

func TestASummaryOfAnInterruptedRunSaysSo(t *testing.T) {
	s := Summarize(&Result{Interrupted: true}, Labels{TimeScale: 1})
	data, err := json.Marshal(s)
	if err != nil || !bytes.Contains(data, []byte(`"interrupted":true`)) {
		t.Errorf("%s (%v)", data, err)
	}
	whole, _ := json.Marshal(Summarize(&Result{}, Labels{TimeScale: 1}))
	if bytes.Contains(whole, []byte("interrupted")) || bytes.Contains(whole, []byte("failures")) {
		t.Errorf("a whole run says %s", whole)
	}
}

// Every class that the page uses has a style, for a pool of any size and for
// modes and failures of any kind.
func TestEveryClassHasAStyle(t *testing.T) {
	r := sampleResult()
	for _, mode := range modeNames() {
		r.Turns = append(r.Turns, Turn{Mode: mode, TTFT: time.Second, E2E: time.Second})
	}
	for i := range r.Load {
		for w := range 20 {
			r.Load[i].Workers = append(r.Load[i].Workers, WorkerLoad{Pod: fmt.Sprint("d-", w), Used: w, Capacity: 100})
		}
	}
	page := page1(t, Report{Result: r, Summary: Summarize(r, sampleLabels())})
	style, body, ok := strings.Cut(page, "</style>")
	if !ok {
		t.Fatal("no style")
	}
	plain := map[string]bool{"compare": true} // has rules for its rows only
	used := 0
	for _, m := range regexp.MustCompile(`class="([^"]*)"`).FindAllStringSubmatch(body, -1) {
		for class := range strings.FieldsSeq(m[1]) {
			used++
			if !plain[class] && !regexp.MustCompile(`\.`+class+`[ ,{]`).MatchString(style) {
				t.Errorf("class %q has no style", class)
			}
		}
	}
	if used < 50 {
		t.Errorf("%d classes found: this test reads the page wrongly", used)
	}
}

// The legend's colours are the lines' colours, also beyond the eighth worker.
func TestLegendsMatchTheirLines(t *testing.T) {
	r := &Result{Load: make([]LoadSample, 2)}
	for i := range r.Load {
		r.Load[i].At = time.Duration(i) * time.Second
		for w := range 10 {
			r.Load[i].Workers = append(r.Load[i].Workers, WorkerLoad{Pod: fmt.Sprint("d-", w), Used: 1, Capacity: 2})
		}
	}
	page := page1(t, Report{Result: r, Summary: Summarize(r, Labels{TimeScale: 1})})
	for w := range 10 {
		class := fmt.Sprint("w-", w%8)
		legend := fmt.Sprintf(`<li><i class="%s"></i>d-%d</li>`, class, w)
		line := fmt.Sprintf(`class="load %s"><title>d-%d, 50 %% at the end`, class, w)
		if !strings.Contains(page, legend) || !strings.Contains(page, line) {
			t.Errorf("d-%d: no %q with %q", w, legend, line)
		}
	}
}

// Both colour schemes define the same colours.
func TestTheDarkSchemeLacksNoColour(t *testing.T) {
	page := page1(t, sampleReport())
	light, rest, _ := strings.Cut(page, "@media (prefers-color-scheme: dark)")
	dark, _, _ := strings.Cut(rest, "* {")
	names := func(s string) []string {
		var out []string
		for _, m := range regexp.MustCompile(`(--[a-z]+):`).FindAllStringSubmatch(s, -1) {
			out = append(out, m[1])
		}
		slices.Sort(out)
		return out
	}
	if diff := cmp.Diff(names(light), names(dark)); diff != "" || len(names(light)) < 10 {
		t.Errorf("light and dark differ:\n%s", diff)
	}
}
