package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/kvc-dev/kvc/controllers/local"
	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
)

// row is one worker as a person sees it.
type row struct {
	name, role, state string
	known             bool // the router has reported on it; without, the rest is unknown
	used, capacity    int  // tokens
	sessions          int
	inFlight          int
	modes             map[string]int64
}

// rows joins what the runner knows of the processes with what the router knows
// of the workers. A nil status leaves the load unknown.
func rows(workers []local.Worker, status *admission.RouterStatus) []row {
	reported := map[string]admission.RouterWorker{}
	if status != nil {
		for _, w := range status.Workers {
			reported[w.Worker] = w
		}
	}
	out := make([]row, 0, len(workers))
	for _, w := range workers {
		r := row{name: w.Name, role: w.Role, state: processState(w)}
		if seen, ok := reported[w.ID]; ok {
			r.known = true
			r.used, r.capacity = seen.Used, seen.CapacityTokens
			r.sessions, r.inFlight, r.modes = seen.Sessions, seen.InFlight, seen.Modes
			if r.state == stateReady {
				r.state = routerState(seen)
			}
		}
		out = append(out, r)
	}
	return out
}

const stateReady = "ready"

// processState is what the runner alone can tell.
func processState(w local.Worker) string {
	switch {
	case w.Ready && w.SidecarPID == 0:
		return "sidecar restarting"
	case w.Ready:
		return stateReady
	case w.Pods > 0 && w.ID == "":
		return "engine ended"
	case w.Pods > 1:
		return because("restarting (pod "+strconv.Itoa(w.Pods)+")", w.Waiting)
	}
	return because("starting", w.Waiting)
}

func because(state, why string) string {
	if why == "" {
		return state
	}
	return state + ": " + why
}

// routerState is what the router adds for a worker that runs.
func routerState(w admission.RouterWorker) string {
	switch {
	case w.State == "Draining":
		return "draining"
	case w.Breaker == "open" || w.Breaker == "half-open":
		return "breaker " + w.Breaker
	case !w.Trusted:
		return "feed not followed"
	}
	return stateReady
}

// cells are the row's columns after its name, role and state.
func (r row) cells() (kv, sessions, inFlight, modes string) {
	if !r.known {
		return "-", "-", "-", ""
	}
	kv = tokens(r.used)
	if r.capacity > 0 {
		kv = fmt.Sprintf("%3d%% of %s", 100*r.used/r.capacity, tokens(r.capacity))
	}
	return kv, strconv.Itoa(r.sessions), strconv.Itoa(r.inFlight), shares(r.modes)
}

// line is the row as one line of a log.
func (r row) line() string {
	kv, sessions, inFlight, modes := r.cells()
	if !r.known {
		return fmt.Sprintf("%s %s", r.name, r.state)
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s kv %s sessions %s in-flight %s %s",
		r.name, r.state, strings.TrimSpace(kv), sessions, inFlight, modes))
}

// tableOf draws the rows; width is the terminal's, 0 = unknown.
func tableOf(rows []row, width int) string {
	t := table.NewWriter()
	t.SetStyle(table.StyleLight)
	t.Style().Options = table.OptionsNoBordersAndSeparators
	t.Style().Format.Header = text.FormatUpper
	t.Style().Size.WidthMax = width
	t.AppendHeader(table.Row{"worker", "role", "state", "KV use", "sessions", "in flight", "turns by mode"})
	t.SetColumnConfigs([]table.ColumnConfig{
		{Number: 5, Align: text.AlignRight}, {Number: 6, Align: text.AlignRight},
	})
	for _, r := range rows {
		kv, sessions, inFlight, modes := r.cells()
		t.AppendRow(table.Row{r.name, r.role, r.state, kv, sessions, inFlight, modes})
	}
	return t.Render() + "\n"
}

// shares says what the turns ran as, most interesting first; "" for none yet.
func shares(modes map[string]int64) string {
	var total int64
	for _, n := range modes {
		total += n
	}
	if total == 0 {
		return ""
	}
	var out []string
	for _, m := range kvc.Modes {
		if n := modes[m.String()]; n > 0 {
			out = append(out, fmt.Sprintf("%s %.0f%%", m, 100*float64(n)/float64(total)))
		}
	}
	return strings.Join(out, " ") + " of " + strconv.FormatInt(total, 10)
}

// tokens writes a count with three or four significant digits.
func tokens(n int) string {
	const thousand = 1000
	switch {
	case n >= thousand*thousand:
		return strconv.FormatFloat(float64(n)/thousand/thousand, 'f', 2, 64) + "M"
	case n >= thousand:
		return strconv.FormatFloat(float64(n)/thousand, 'f', 1, 64) + "K"
	}
	return strconv.Itoa(n)
}

// statusReader asks the router's admin port.
type statusReader struct {
	url    string
	client *http.Client
}

// read returns nil when the router does not answer: unknown, never 0.
func (s statusReader) read(ctx context.Context) *admission.RouterStatus {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+admission.PathStatus, nil)
	if err != nil {
		return nil
	}
	res, err := s.client.Do(req)
	if err != nil {
		return nil
	}
	defer func() { _ = res.Body.Close() }()
	var status admission.RouterStatus
	if res.StatusCode != http.StatusOK || json.NewDecoder(res.Body).Decode(&status) != nil {
		return nil
	}
	return &status
}
