package replay

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// shape is one element of a plot.
type shape struct {
	name  string
	attrs map[string]string
	title string
	text  string
}

func (s shape) num(t *testing.T, attr string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(s.attrs[attr], 64)
	if err != nil {
		t.Fatalf("<%s %s=%q>: %v", s.name, attr, s.attrs[attr], err)
	}
	return v
}

// shapes parses a plot.
func shapes(t *testing.T, svg string) []shape {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(svg))
	var out []shape
	var stack []int
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("%v in %s", err, svg)
		}
		switch e := tok.(type) {
		case xml.StartElement:
			s := shape{name: e.Name.Local, attrs: make(map[string]string)}
			for _, a := range e.Attr {
				s.attrs[a.Name.Local] = a.Value
			}
			stack = append(stack, len(out))
			out = append(out, s)
		case xml.EndElement:
			stack = stack[:len(stack)-1]
		case xml.CharData:
			if n := len(stack); n > 0 && out[stack[n-1]].name == "title" {
				out[stack[n-2]].title += string(e)
			} else if n > 0 {
				out[stack[n-1]].text += string(e)
			}
		}
	}
}

func only(all []shape, name, class string) []shape {
	var out []shape
	for _, s := range all {
		if s.name == name && (class == "" || strings.Contains(s.attrs["class"], class)) {
			out = append(out, s)
		}
	}
	return out
}

// drawRun draws a run with turns of any mode, time and outcome.
func drawRun(t *rapid.T) *Result {
	r := &Result{Sessions: 1}
	at := time.Duration(0)
	for i := range rapid.IntRange(0, 60).Draw(t, "turns") {
		at += time.Duration(rapid.IntRange(0, 5000).Draw(t, "gap")) * time.Millisecond
		turn := Turn{Session: "s", Index: i, At: at, Mode: rapid.SampledFrom(modeNames()).Draw(t, "mode"),
			TTFT:         time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "ttft")),
			PromptTokens: rapid.IntRange(0, 1e6).Draw(t, "prompt"), CompletionTokens: rapid.IntRange(0, 5).Draw(t, "out")}
		turn.E2E = turn.TTFT + time.Second
		if rapid.IntRange(0, 5).Draw(t, "fails") == 0 {
			turn.Failure = Failure{Kind: "stream", Message: "<&>"}
		}
		r.Turns = append(r.Turns, turn)
	}
	for i := range rapid.IntRange(0, 8).Draw(t, "samples") {
		l := LoadSample{At: time.Duration(i) * time.Second}
		for w := range rapid.IntRange(0, 4).Draw(t, "workers") {
			l.Workers = append(l.Workers, WorkerLoad{Pod: fmt.Sprintf("d-%d", w), Used: rapid.IntRange(0, 200).Draw(t, "used"),
				Capacity: rapid.SampledFrom([]int{0, 100}).Draw(t, "capacity")})
		}
		r.Load = append(r.Load, l)
	}
	return r
}

// Whatever happened in a run, every mark of every plot lies inside it.
func TestMarksLieInsideTheirPlots(outer *testing.T) {
	rapid.Check(outer, func(t *rapid.T) {
		r := drawRun(t)
		s := Summarize(r, Labels{TimeScale: rapid.SampledFrom([]float64{.01, 1, 500}).Draw(t, "scale")})
		for name, svg := range map[string]string{
			"ttft": string(ttftPlot(r, s)), "shares": string(sharesPlot(r, s)), "load": string(loadPlot(r, s))} {
			if svg == "" {
				continue
			}
			all := shapes(outer, svg)
			var w, h float64
			if _, err := fmt.Sscanf(all[0].attrs["viewBox"], "0 0 %g %g", &w, &h); err != nil {
				t.Fatal(err)
			}
			for _, m := range all {
				checkInside(t, name, m, w, h)
			}
		}
	})
}

func checkInside(t *rapid.T, plot string, m shape, w, h float64) {
	for attr, v := range m.attrs {
		most := w
		switch attr {
		case "x", "x1", "x2", "cx", "width":
		case "y", "y1", "y2", "cy", "height":
			most = h
		default:
			continue
		}
		n, err := strconv.ParseFloat(v, 64)
		if err != nil || math.IsNaN(n) || n < -1 || n > most+1 {
			t.Fatalf("%s: <%s %s=%q> outside 0…%g", plot, m.name, attr, v, most)
		}
	}
	for point := range strings.FieldsSeq(m.attrs["points"]) {
		var x, y float64
		if _, err := fmt.Sscanf(point, "%g,%g", &x, &y); err != nil || x < 0 || x > w || y < 0 || y > h {
			t.Fatalf("%s: point %s outside %g × %g", plot, point, w, h)
		}
	}
}

func TestTTFTPlot(t *testing.T) {
	r := sampleResult()
	s := Summarize(r, sampleLabels())
	all := shapes(t, string(ttftPlot(r, s)))

	dots := map[string]int{}
	for _, mode := range modeNames() {
		dots[mode] = len(only(all, "circle", "m-"+mode))
	}
	want := map[string]int{"direct": 7, "seed": 2, "reseed": 1, "delta": 1, "fallback": 0, "unknown": 0}
	if diff := cmp.Diff(want, dots); diff != "" {
		t.Errorf("dots by mode:\n%s", diff)
	}
	// A slower turn stands further to the right.
	fast, slow := math.Inf(1), math.Inf(-1)
	for _, d := range only(all, "circle", "m-direct") {
		fast = min(fast, d.num(t, "cx"))
	}
	for _, d := range only(all, "circle", "m-seed") {
		slow = max(slow, d.num(t, "cx"))
	}
	if fast >= slow {
		t.Errorf("the fastest direct turn is at %g, the slowest seed at %g", fast, slow)
	}
	var titles []string
	for _, tick := range only(all, "rect", "tick") {
		titles = append(titles, tick.title)
	}
	wantTitles := []string{"direct p50: 70.0 ms", "direct p99: 100 ms", "direct p90: 100 ms",
		"delta p50: 200 ms", "delta p99: 200 ms", "delta p90: 200 ms",
		"seed p50: 400 ms", "seed p99: 600 ms", "seed p90: 600 ms",
		"reseed p50: 500 ms", "reseed p99: 500 ms", "reseed p90: 500 ms"}
	if diff := cmp.Diff(wantTitles, titles); diff != "" {
		t.Errorf("ticks:\n%s", diff)
	}
}

func TestNamesOfTicksDoNotOverlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p50 := rapid.Float64Range(1, 1e5).Draw(t, "p50")
		p90 := p50 * rapid.Float64Range(1, 5).Draw(t, "x")
		q := Quantiles{P50: p50, P90: p90, P99: p90 * rapid.Float64Range(1, 5).Draw(t, "y")}
		c := newCanvas(100, "x")
		c.ticks("direct", q, span{0, 6.5, plotLeft, plotWidth - plotRight}, 50)
		var xs []float64
		for _, part := range strings.Split(c.String(), "<text")[1:] {
			var x float64
			if _, err := fmt.Sscanf(part, ` x="%g"`, &x); err != nil {
				t.Fatal(err)
			}
			for _, other := range xs {
				if math.Abs(other-x) < 25 {
					t.Fatalf("names at %g and %g", other, x)
				}
			}
			xs = append(xs, x)
		}
		if strings.Count(c.String(), "<rect") != 3 || len(xs) == 0 {
			t.Fatalf("%d ticks, %d names", strings.Count(c.String(), "<rect"), len(xs))
		}
	})
}

func TestColumnsOfSharesFillThePlot(t *testing.T) {
	r := sampleResult()
	all := shapes(t, string(sharesPlot(r, Summarize(r, sampleLabels()))))
	height := map[string]float64{}
	for _, b := range only(all, "rect", "m-") {
		height[b.attrs["x"]] += b.num(t, "height")
	}
	if len(height) != 11 { // twelve turns, two of them in one bin
		t.Errorf("%d columns", len(height))
	}
	for x, h := range height {
		if math.Abs(h-plotHeight) > .2 {
			t.Errorf("the column at %s is %g high, want %d", x, h, plotHeight)
		}
	}
	if n := len(only(all, "rect", "m-errors")); n != 1 {
		t.Errorf("%d marks for the one failure", n)
	}
	if b := only(all, "rect", "m-seed")[0]; b.title != "seed: 2 of 2 turns" {
		t.Errorf("the first column says %q", b.title)
	}
}

func TestLoadPlotFollowsWorkersThatComeAndGo(t *testing.T) {
	w := func(pod string, used int) WorkerLoad { return WorkerLoad{Pod: pod, Used: used, Capacity: 100} }
	r := &Result{Load: []LoadSample{
		{At: 0, Workers: []WorkerLoad{w("a", 10)}},
		{At: time.Second, Workers: []WorkerLoad{w("a", 20), w("b", 90)}},
		{At: 2 * time.Second, Workers: []WorkerLoad{w("b", 50), {Pod: "c"}}}, // c has not said its capacity
	}}
	lines := only(shapes(t, string(loadPlot(r, Summarize(r, Labels{TimeScale: 1})))), "polyline", "load")
	var got []string
	for _, l := range lines {
		got = append(got, fmt.Sprintf("%s, %d points", l.title, len(strings.Fields(l.attrs["points"]))))
	}
	want := []string{"a, 20 % at the end, 2 points", "b, 50 % at the end, 2 points", "c, 0 % at the end, 0 points"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, podsOf(r)); diff != "" {
		t.Error(diff)
	}
}

func TestNoPlotOfNothing(t *testing.T) {
	empty := &Result{}
	failed := &Result{Turns: []Turn{{Mode: ModeUnknown, Failure: Failure{Kind: "x"}}}, Load: []LoadSample{{}}}
	for name, r := range map[string]*Result{"no turns": empty, "one failure and one sample": failed} {
		s := Summarize(r, Labels{TimeScale: 1})
		if ttftPlot(r, s) != "" || loadPlot(r, s) != "" {
			t.Errorf("%s: a plot of nothing", name)
		}
	}
	if sharesPlot(empty, Summarize(empty, Labels{TimeScale: 1})) != "" {
		t.Error("shares of no turns")
	}
}

func TestSpans(t *testing.T) {
	s := span{lo: 10, hi: 20, from: 100, to: 0}
	for v, want := range map[float64]float64{10: 100, 15: 50, 20: 0, 5: 100, 99: 0} {
		if got := s.at(v); got != want {
			t.Errorf("at(%g) = %g, want %g", v, got, want)
		}
	}
	if got := (span{lo: 1, hi: 1, from: 7}).at(3); got != 7 {
		t.Errorf("an empty span maps to %g", got)
	}
}

func TestAxesOfTimeHaveFewRoundLabels(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seconds := rapid.Float64Range(.5, 1e6).Draw(t, "seconds")
		step := niceStep(seconds / 6)
		if n := seconds / step; n > 6.001 {
			t.Fatalf("%g s in steps of %g: %g labels", seconds, step, n)
		}
		if label := secondsLabel(step); len(label) > 7 || strings.Contains(label, ".") {
			t.Fatalf("a step of %g s is called %q", step, label)
		}
	})
}

func TestThinningKeepsTheEnds(t *testing.T) {
	for _, n := range []int{0, 1, 399, 400, 5000} {
		l := make([]LoadSample, n)
		for i := range l {
			l[i].At = time.Duration(i)
		}
		got := thinned(l)
		if len(got) > 400 || n > 0 && (len(got) == 0 || got[0].At != 0) {
			t.Errorf("%d samples became %d", n, len(got))
		}
		if n > 0 && len(l)-1-int(got[len(got)-1].At) > 1+n/400 {
			t.Errorf("of %d samples the last kept is %d", n, got[len(got)-1].At)
		}
	}
}
