package replay

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"slices"
)

//go:embed report.html.tmpl
var reportTemplate string

// Report is one replay with what is known about it.
type Report struct {
	Result  *Result
	Summary Summary
}

// WriteHTML writes a page that needs nothing else: no script, no font, no
// address outside it. Several runs are compared at its top.
func WriteHTML(w io.Writer, runs []Report) error {
	t, err := template.New("report").Parse(reportTemplate)
	if err != nil {
		return fmt.Errorf("parse the report's template: %w", err)
	}
	if err := t.Execute(w, newPage(runs)); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// WriteTurns writes one JSON object per turn, in the order of their start.
// Times are emulated milliseconds.
func WriteTurns(w io.Writer, r Report) error {
	turns := slices.Clone(r.Result.Turns)
	slices.SortStableFunc(turns, func(a, b Turn) int { return cmp.Compare(a.At, b.At) })
	e := json.NewEncoder(w)
	for i := range turns {
		if err := e.Encode(newTurnLine(&turns[i], r.Summary.TimeScale)); err != nil {
			return fmt.Errorf("write the turns: %w", err)
		}
	}
	return nil
}

type turnLine struct {
	Session          string   `json:"session"`
	Turn             int      `json:"turn"`
	At               float64  `json:"at_ms"`
	Mode             string   `json:"mode"`
	Reason           string   `json:"reason"`
	Worker           string   `json:"worker"`
	Attempts         int      `json:"attempts"`
	TTFT             float64  `json:"ttft_ms"`
	E2E              float64  `json:"e2e_ms"`
	PromptTokens     int      `json:"prompt_tokens"`
	CachedTokens     int      `json:"cached_tokens"`
	CompletionTokens int      `json:"completion_tokens"`
	Failure          *Failure `json:"failure,omitempty"`
}

func newTurnLine(t *Turn, scale float64) turnLine {
	l := turnLine{Session: t.Session, Turn: t.Index, At: round(emulatedMS(t.At, scale)), Mode: t.Mode, Reason: t.Reason,
		Worker: t.Worker, Attempts: t.Attempts, TTFT: round(emulatedMS(t.TTFT, scale)),
		E2E: round(emulatedMS(t.E2E, scale)), PromptTokens: t.PromptTokens, CachedTokens: t.CachedTokens,
		CompletionTokens: t.CompletionTokens}
	if !t.OK() {
		l.Failure = &t.Failure
	}
	return l
}

type page struct {
	Runs    []section
	Compare []Row
	Heads   []string
}

type section struct {
	Summary  Summary
	Facts    []string
	Tiles    []tile
	Modes    []modeLine
	Legend   []string
	Workers  []workerKey
	TTFT     template.HTML
	Shares   template.HTML
	Load     template.HTML
	Failures []FailureCount
}

// workerKey is a worker's entry in the legend, with the class of its line.
type workerKey struct{ Pod, Class string }

type tile struct{ Value, Name string }

type modeLine struct {
	Mode, Turns, Share, P50, P90, P99, E2E, ITL string
}

func newPage(runs []Report) page {
	var p page
	var all []Summary
	for _, r := range runs {
		p.Runs = append(p.Runs, newSection(r))
		p.Heads = append(p.Heads, r.Summary.DirectPath)
		all = append(all, r.Summary)
	}
	if len(runs) > 1 {
		p.Compare = ComparisonRows(all)
	}
	return p
}

func newSection(r Report) section {
	s := r.Summary
	sec := section{
		Summary: s, Facts: facts(s), Failures: s.Failures,
		TTFT: ttftPlot(r.Result, s), Shares: sharesPlot(r.Result, s), Load: loadPlot(r.Result, s),
		Tiles: []tile{
			{percent(s.DirectShareAfterFirst), "direct, after the first turn"},
			{millis(s.TTFT[All].P50) + " ms", "TTFT p50"},
			{millis(s.TTFT[All].P99) + " ms", "TTFT p99"},
			{share(s.CachedTokens, s.PromptTokens), "of prompt tokens cached"},
			{count(int64(s.Errors)), "errors"},
		},
	}
	for i, pod := range podsOf(r.Result) {
		sec.Workers = append(sec.Workers, workerKey{pod, workerClass(i)})
	}
	for _, mode := range modeNames() {
		n := *s.Modes.Of(mode)
		if n == 0 {
			continue
		}
		sec.Legend = append(sec.Legend, mode)
		sec.Modes = append(sec.Modes, newModeLine(s, mode, n))
	}
	if s.Errors > 0 {
		sec.Legend = append(sec.Legend, "errors")
	}
	sec.Modes = append(sec.Modes, newModeLine(s, All, s.Requests-s.Errors))
	return sec
}

func newModeLine(s Summary, mode string, n int) modeLine {
	f := s.TTFT[mode]
	return modeLine{mode, count(int64(n)), share(n, s.Requests), millis(f.P50), millis(f.P90), millis(f.P99),
		millis(s.E2E[mode].P50), millis(s.ITL[mode].P50)}
}
