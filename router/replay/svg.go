package replay

import (
	"fmt"
	"html"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The plots are drawn here rather than by a chart library so that they follow
// the reader's light or dark scheme (colours are classes of the page's style),
// carry a title on every mark, and need nothing but the page.
const (
	plotWidth = 760
	plotLeft  = 84
	plotRight = 16
	plotTop   = 10
	axisRoom  = 34
)

type canvas struct {
	strings.Builder
	height int
}

func (c *canvas) printf(format string, args ...any) { _, _ = fmt.Fprintf(c, format, args...) }

func newCanvas(height int, label string) *canvas {
	c := &canvas{height: height}
	c.printf(`<svg viewBox="0 0 %d %d" role="img" aria-label="%s">`, plotWidth, height, html.EscapeString(label))
	return c
}

func (c *canvas) done() template.HTML {
	c.WriteString("</svg>")
	return template.HTML(c.String()) //nolint:gosec // every text written is escaped
}

func (c *canvas) text(x, y float64, anchor, s string) {
	c.printf(`<text x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, x, y, anchor, html.EscapeString(s))
}

func (c *canvas) line(x1, y1, x2, y2 float64, class string) {
	c.printf(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`, x1, y1, x2, y2, class)
}

// box is a rectangle with a title that shows on hover.
type box struct {
	x, y, w, h   float64
	class, title string
}

func (c *canvas) box(b box) {
	c.printf(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" class="%s"><title>%s</title></rect>`,
		b.x, b.y, b.w, b.h, b.class, html.EscapeString(b.title))
}

// span maps a value range to pixels.
type span struct{ lo, hi, from, to float64 }

func (s span) at(v float64) float64 {
	if s.hi <= s.lo {
		return s.from
	}
	return s.from + (min(max(v, s.lo), s.hi)-s.lo)/(s.hi-s.lo)*(s.to-s.from)
}

// ttftPlot shows every turn's time to first token on a logarithmic axis, one
// row a mode, with the middle half as a box and p50, p90, p99 as ticks.
func ttftPlot(r *Result, s Summary) template.HTML {
	rows := presentModes(s)
	if len(rows) == 0 {
		return ""
	}
	const rowHeight = 44
	bottom := plotTop + rowHeight*len(rows)
	c := newCanvas(bottom+axisRoom, "time to first token by mode")
	x := logSpan(s.TTFT)
	c.decades(x, float64(bottom))
	c.text(plotWidth-plotRight, float64(bottom)+30, "end", "emulated time to first token")
	for i, mode := range rows {
		y := float64(plotTop + rowHeight*i + rowHeight/2)
		c.text(plotLeft-10, y+4, "end", mode)
		c.dots(r, dotRow{mode: mode, y: y, x: x, scale: s.TimeScale})
		c.ticks(mode, s.TTFT[mode], x, y)
	}
	return c.done()
}

// decades draws a logarithmic axis; x is in powers of ten.
func (c *canvas) decades(x span, bottom float64) {
	for e := math.Floor(x.lo); e <= x.hi; e++ {
		for _, m := range []float64{1, 2, 5} {
			v := e + math.Log10(m)
			if v < x.lo || v > x.hi {
				continue // beyond the edges
			}
			c.line(x.at(v), plotTop, x.at(v), bottom, "grid")
			c.text(x.at(v), bottom+16, "middle", msLabel(m*math.Pow(10, e)))
		}
	}
}

// ticks marks a row's quantiles; names that would overlap are left out.
func (c *canvas) ticks(mode string, q Quantiles, x span, y float64) {
	const apart = 26
	var named []float64
	for _, tick := range []struct {
		name string
		v    float64
	}{{"p50", q.P50}, {"p99", q.P99}, {"p90", q.P90}} {
		px := x.at(math.Log10(max(tick.v, 1e-3)))
		c.box(box{px - 1.5, y - 15, 3, 30, "tick", fmt.Sprintf("%s %s: %s ms", mode, tick.name, millis(tick.v))})
		if !slices.ContainsFunc(named, func(other float64) bool { return math.Abs(other-px) < apart }) {
			c.text(px, y-17, "middle", tick.name)
			named = append(named, px)
		}
	}
}

func presentModes(s Summary) []string {
	var out []string
	for _, m := range modeNames() {
		if s.TTFT[m].Count > 0 {
			out = append(out, m)
		}
	}
	return out
}

func logSpan(q ModeQuantiles) span {
	lo, hi := math.Inf(1), math.Inf(-1)
	for m, v := range q {
		if m != All {
			lo, hi = min(lo, v.P50), max(hi, v.Max)
		}
	}
	lo, hi = max(lo, 1e-2), max(hi, 1e-1)
	return span{math.Floor(math.Log10(lo)) - .3, math.Ceil(math.Log10(hi)*4) / 4, plotLeft, plotWidth - plotRight}
}

type dotRow struct {
	mode  string
	y     float64
	x     span
	scale float64
}

// maxDots keeps a report of a long run small.
const maxDots = 500

func (c *canvas) dots(r *Result, row dotRow) {
	n, stride := 0, 1
	for i := range r.Turns {
		if r.Turns[i].Mode == row.mode {
			n++
		}
	}
	stride += n / maxDots
	k := 0
	for i := range r.Turns {
		t := &r.Turns[i]
		if t.Mode != row.mode || t.TTFT <= 0 {
			continue
		}
		if k++; k%stride != 0 {
			continue
		}
		dy := float64((k*7919)%21) - 10 // spread, the same for the same run
		c.printf(`<circle cx="%.1f" cy="%.1f" r="2.4" class="dot m-%s"/>`,
			row.x.at(math.Log10(max(emulatedMS(t.TTFT, row.scale), 1e-3))), row.y+dy, row.mode)
	}
}

const plotHeight = 190

// sharesPlot shows which share of the turns ran in each mode, over time.
func sharesPlot(r *Result, s Summary) template.HTML {
	const bins = 40
	end := endOf(r)
	if end <= 0 || len(r.Turns) == 0 {
		return ""
	}
	counts := make([]map[string]int, bins)
	for i := range r.Turns {
		t := &r.Turns[i]
		b := min(bins-1, int(float64(t.At)/float64(end)*bins))
		if counts[b] == nil {
			counts[b] = make(map[string]int)
		}
		if t.OK() {
			counts[b][t.Mode]++
		} else {
			counts[b]["errors"]++
		}
	}
	c := newCanvas(plotTop+plotHeight+axisRoom, "mode shares over time")
	y := c.axes(end, s.TimeScale, 100)
	w := float64(plotWidth-plotLeft-plotRight) / bins
	for b, byMode := range counts {
		c.column(byMode, float64(plotLeft)+float64(b)*w, w, y)
	}
	return c.done()
}

func (c *canvas) column(byMode map[string]int, x, w float64, y span) {
	total := 0
	for _, n := range byMode {
		total += n
	}
	below := 0.0
	for _, mode := range append(modeNames(), "errors") {
		n := byMode[mode]
		if n == 0 {
			continue
		}
		p := 100 * float64(n) / float64(total)
		c.box(box{x + .5, y.at(below + p), w - 1, y.at(below) - y.at(below+p), "m-" + mode,
			fmt.Sprintf("%s: %d of %d turns", mode, n, total)})
		below += p
	}
}

// axes draws a percent axis and an axis of emulated time.
func (c *canvas) axes(end time.Duration, scale, most float64) span {
	y := span{0, most, plotTop + plotHeight, plotTop}
	for p := 0.0; p <= most; p += 25 {
		c.line(plotLeft, y.at(p), plotWidth-plotRight, y.at(p), "grid")
		c.text(plotLeft-10, y.at(p)+4, "end", fmt.Sprintf("%.0f %%", p))
	}
	seconds := end.Seconds() * scale
	x := span{0, seconds, plotLeft, plotWidth - plotRight}
	step := niceStep(seconds / 6)
	for t := 0.0; t <= seconds; t += step {
		c.text(x.at(t), plotTop+plotHeight+16, "middle", secondsLabel(t))
	}
	c.text(plotWidth-plotRight, plotTop+plotHeight+30, "end", "emulated time")
	return y
}

// loadPlot shows the KV use of every worker over time.
func loadPlot(r *Result, s Summary) template.HTML {
	if len(r.Load) < 2 {
		return ""
	}
	end := r.Load[len(r.Load)-1].At
	c := newCanvas(plotTop+plotHeight+axisRoom, "KV use per worker over time")
	y := c.axes(end, s.TimeScale, 100)
	x := span{0, float64(end), plotLeft, plotWidth - plotRight}
	for i, pod := range podsOf(r) {
		var points []string
		last := 0.0
		for _, l := range thinned(r.Load) {
			for _, w := range l.Workers {
				if w.Pod == pod && w.Capacity > 0 {
					last = 100 * float64(w.Used) / float64(w.Capacity)
					points = append(points, fmt.Sprintf("%.1f,%.1f", x.at(float64(l.At)), y.at(last)))
				}
			}
		}
		c.printf(`<polyline points="%s" class="load %s"><title>%s, %.0f %% at the end</title></polyline>`,
			strings.Join(points, " "), workerClass(i), html.EscapeString(pod), last)
	}
	return c.done()
}

// workerClass is the colour of the i-th worker; they repeat after eight.
func workerClass(i int) string { return "w-" + strconv.Itoa(i%8) }

// thinned keeps at most a few hundred samples.
func thinned(l []LoadSample) []LoadSample {
	stride := 1 + len(l)/400
	var out []LoadSample
	for i := 0; i < len(l); i += stride {
		out = append(out, l[i])
	}
	return out
}

// podsOf lists the workers in the order in which they appear.
func podsOf(r *Result) []string {
	var out []string
	seen := make(map[string]bool)
	for _, l := range r.Load {
		for _, w := range l.Workers {
			if !seen[w.Pod] {
				seen[w.Pod] = true
				out = append(out, w.Pod)
			}
		}
	}
	return out
}

func endOf(r *Result) time.Duration {
	var end time.Duration
	for i := range r.Turns {
		end = max(end, r.Turns[i].At+1)
	}
	return end
}

// niceStep is the least step of an axis of seconds that is at least v: round in
// seconds below a minute, in minutes below an hour, in hours beyond.
func niceStep(v float64) float64 {
	for _, unit := range []float64{1, 60} {
		for _, m := range []float64{1, 2, 5, 10, 20, 30} {
			if step := m * unit; v <= step {
				return step
			}
		}
	}
	step := 3600.0
	for step < v {
		step *= 2
	}
	return step
}

func secondsLabel(s float64) string {
	switch {
	case s >= 3600:
		return trim(s/3600) + " h"
	case s >= 60:
		return trim(s/60) + " min"
	}
	return trim(s) + " s"
}

func msLabel(ms float64) string {
	if ms >= 1000 {
		return trim(ms/1000) + " s"
	}
	return trim(ms) + " ms"
}
