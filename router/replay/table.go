package replay

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// WriteTable prints a run for people: turns and times by mode, then the totals.
func WriteTable(w io.Writer, s Summary) error {
	var b strings.Builder
	t := newTable(&b)
	t.SetTitle(fmt.Sprintf("%s\n%s: %d turns of %d sessions, %d in flight",
		strings.Trim(s.DirectPath+" · "+s.Preset, " ·"), s.Workload, s.Requests, s.Sessions, s.Concurrency))
	t.AppendHeader(table.Row{"mode", "turns", "share", "TTFT p50", "TTFT p90", "TTFT p99", "E2E p50", "ITL p50"})
	for _, mode := range modeNames() {
		if n := *s.Modes.Of(mode); n > 0 {
			t.AppendRow(modeRow(s, mode, n))
		}
	}
	if s.Errors > 0 {
		t.AppendRow(table.Row{"errors", s.Errors, share(s.Errors, s.Requests)})
	}
	t.AppendSeparator()
	t.AppendRow(modeRow(s, All, s.Requests-s.Errors))
	t.SetColumnConfigs(rightAligned(2, 8))
	t.Render()
	b.WriteString(strings.Join(facts(s), "\n") + "\n")
	_, err := io.WriteString(w, b.String())
	return err
}

func newTable(w io.Writer) table.Writer {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	t.Style().Title.Align = text.AlignLeft
	return t
}

func rightAligned(from, to int) []table.ColumnConfig {
	var cs []table.ColumnConfig
	for i := from; i <= to; i++ {
		cs = append(cs, table.ColumnConfig{Number: i, Align: text.AlignRight, AlignHeader: text.AlignRight})
	}
	return cs
}

func modeRow(s Summary, mode string, n int) table.Row {
	f, e, i := s.TTFT[mode], s.E2E[mode], s.ITL[mode]
	return table.Row{mode, n, share(n, s.Requests),
		millis(f.P50), millis(f.P90), millis(f.P99), millis(e.P50), millis(i.P50)}
}

// facts are the sentences below the table.
func facts(s Summary) []string {
	out := []string{fmt.Sprintf("times are emulated: 1 ms here = %s ms real (KVC_TIME_SCALE %s); %.1f s of wall clock",
		trim(1/s.TimeScale), trim(s.TimeScale), s.WallS)}
	if s.DirectShareAfterFirst != nil {
		line := fmt.Sprintf("direct %.1f %% of the turns after the first", 100**s.DirectShareAfterFirst)
		if s.Modes.Delta > 0 {
			line += fmt.Sprintf(", direct or delta %.1f %%", 100**s.ResidentShareAfterFirst)
		}
		if s.PinChanges != nil {
			line += fmt.Sprintf("; pin changes %d", *s.PinChanges)
		}
		out = append(out, line)
	}
	line := fmt.Sprintf("prompt tokens %s, %s cached", count(int64(s.PromptTokens)), share(s.CachedTokens, s.PromptTokens))
	if s.PrefillTokens != nil {
		line += fmt.Sprintf("; computed on P %s, on D %s; transferred %s", count(*s.PrefillTokens),
			count(*s.DecodePrefillTokens), count(*s.TransferredTokens))
	}
	out = append(out, line)
	for _, f := range s.Failures {
		out = append(out, fmt.Sprintf("%d × %s: %s", f.Count, f.Kind, f.Example))
	}
	if s.Interrupted {
		out = append(out, "interrupted: this is what was seen until then")
	}
	return out
}

// WriteComparison prints runs of the same workload side by side.
func WriteComparison(w io.Writer, runs []Summary) error {
	var b strings.Builder
	t := newTable(&b)
	t.SetTitle("The same workload on each engine profile (times are emulated ms)")
	head := table.Row{""}
	for _, s := range runs {
		head = append(head, s.DirectPath)
	}
	t.AppendHeader(head)
	for _, r := range ComparisonRows(runs) {
		row := table.Row{r.Name}
		for _, v := range r.Values {
			row = append(row, v)
		}
		t.AppendRow(row)
	}
	t.SetColumnConfigs(rightAligned(2, 1+len(runs)))
	t.Render()
	_, err := io.WriteString(w, b.String())
	return err
}

// Row is one line of a comparison.
type Row struct {
	Name   string
	Values []string
}

// ComparisonRows are the lines of the side-by-side table.
func ComparisonRows(runs []Summary) []Row {
	lines := []struct {
		name string
		f    func(Summary) string
	}{
		{"a stock SGLang image gives this today", func(s Summary) string { return stock(s.DirectPath) }},
		{"turns", func(s Summary) string { return strconv.Itoa(s.Requests) }},
		{"errors", func(s Summary) string { return strconv.Itoa(s.Errors) }},
		{"direct, after the first turn", func(s Summary) string { return percent(s.DirectShareAfterFirst) }},
		{"direct or delta, after the first turn", func(s Summary) string { return percent(s.ResidentShareAfterFirst) }},
		{"TTFT p50", func(s Summary) string { return millis(s.TTFT[All].P50) }},
		{"TTFT p90", func(s Summary) string { return millis(s.TTFT[All].P90) }},
		{"TTFT p99", func(s Summary) string { return millis(s.TTFT[All].P99) }},
		{"E2E p50", func(s Summary) string { return millis(s.E2E[All].P50) }},
		{"ITL p50", func(s Summary) string { return millis(s.ITL[All].P50) }},
		{"prompt tokens computed on P", func(s Summary) string { return known(s.PrefillTokens) }},
		{"prompt tokens computed on D", func(s Summary) string { return known(s.DecodePrefillTokens) }},
		{"tokens transferred P to D", func(s Summary) string { return known(s.TransferredTokens) }},
		{"pin changes", func(s Summary) string { return known(s.PinChanges) }},
	}
	var out []Row
	for _, l := range lines {
		r := Row{Name: l.name}
		for _, s := range runs {
			r.Values = append(r.Values, l.f(s))
		}
		out = append(out, r)
	}
	return out
}

// stock says whether a released SGLang can run a profile (architecture.md).
func stock(directPath string) string {
	switch directPath {
	case "Unified":
		return "yes"
	case "DeltaTransfer":
		return "yes (≥ 0.5.16)"
	case "ConditionalAggregation":
		return "no: draft PR #34773"
	case "NativeAdmission":
		return "no: a patched engine"
	}
	return "unknown"
}

func percent(v *float64) string {
	if v == nil {
		return "–"
	}
	return fmt.Sprintf("%.1f %%", 100**v)
}

func known(v *int64) string {
	if v == nil {
		return "–"
	}
	return count(*v)
}

func share(n, of int) string {
	if of == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(n)/float64(of))
}

// millis prints emulated milliseconds; short ones with a digit behind the point.
func millis(v float64) string {
	switch {
	case v == 0:
		return "–"
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return count(int64(v + .5))
}

// count prints an integer with thousands separated.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	var b strings.Builder
	for i, c := range s {
		if i > 0 && (len(s)-i)%3 == 0 && s[i-1] != '-' {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return b.String()
}

func trim(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }
