package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/replay"
	"github.com/kvc-dev/kvc/router/trace"
)

// workload is what to send: the flags that bench and demo have in common.
type workload struct {
	name      string
	traceFile string
	format    string
	index     string
	texts     []string
	limit     int
	maxThink  time.Duration

	turns       int
	concurrency int
	seed        uint64
}

func (w *workload) register(f *pflag.FlagSet) {
	f.StringVar(&w.name, "workload", "agent", "built-in workload: agent (coding-agent sessions)")
	f.StringVar(&w.traceFile, "trace", "", "replay this trace file (JSON lines, .gz too) instead")
	f.StringVar(&w.format, "format", "", "schema of the trace: "+formatList()+" (default: recognised)")
	f.StringVar(&w.index, "trace-index", "", "sessions index of a weka trace, for the opening that sessions share "+
		"(default: sessions_index.csv.gz beside the trace)")
	f.StringSliceVar(&w.texts, "text", nil, "replay these text sessions (files, or a folder of them) instead")
	f.IntVar(&w.limit, "limit", 0, "read only the first records of the trace (0 = all)")
	f.DurationVar(&w.maxThink, "max-think", 10*time.Minute, "cut longer (emulated) idle times of a trace (0 = keep)")
	f.Uint64Var(&w.seed, "seed", 1, "seed of the built-in workload")
}

func formatList() string {
	var out []string
	for _, f := range trace.Formats() {
		out = append(out, string(f))
	}
	return strings.Join(out, ", ")
}

// source opens the workload; the label says what it is.
func (w *workload) source() (src replay.Source, label string, err error) {
	switch {
	case w.traceFile != "" && len(w.texts) > 0:
		return nil, "", usageError{errors.New("--trace and --text exclude each other: give one of them")}
	case len(w.texts) > 0:
		return w.textSource()
	case w.traceFile != "":
		t, err := w.readTrace(w.traceFile, trace.Format(w.format))
		if err != nil {
			return nil, "", err
		}
		return replay.NewRecorded(t.Sessions()), fmt.Sprintf("%s (%s)", filepath.Base(w.traceFile), t.Format), nil
	case w.name != "agent":
		return nil, "", usageError{fmt.Errorf("unknown workload %q: the built-in one is agent", w.name)}
	}
	if w.turns == 0 {
		return nil, "", usageError{errors.New("--turns 0 never ends with the built-in workload: give a number")}
	}
	name := "agent-" + strconv.FormatUint(w.seed, 10)
	g := trace.NewGenerator(trace.Agent(), rand.NewPCG(w.seed, 0), name)
	return replay.NewGenerated(g), "built-in agent sessions", nil
}

// textSource reads text sessions; folders stand for the files in them.
func (w *workload) textSource() (replay.Source, string, error) {
	var all []trace.Session
	for _, path := range w.texts {
		files := []string{path}
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			if files, err = filepath.Glob(filepath.Join(path, "*.jsonl*")); err != nil {
				return nil, "", fmt.Errorf("list %s: %w", path, err)
			}
		}
		for _, file := range files {
			t, err := w.readTrace(file, trace.LMCacheText)
			if err != nil {
				return nil, "", err
			}
			all = append(all, t.Sessions()...)
		}
	}
	if len(all) == 0 {
		return nil, "", fmt.Errorf("no text sessions (*.jsonl, *.jsonl.gz) in %s", strings.Join(w.texts, ", "))
	}
	return replay.NewRecorded(all), strconv.Itoa(len(all)) + " text sessions", nil
}

func (w *workload) readTrace(path string, format trace.Format) (*trace.Trace, error) {
	boilerplate, err := w.readIndex(path)
	if err != nil {
		return nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open the trace: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	t, err := trace.Decode(f, trace.Options{Name: path, Format: format, Limit: w.limit, Boilerplate: boilerplate})
	if err != nil {
		return nil, err
	}
	trace.LongestThink(t.Records, w.maxThink)
	return t, nil
}

// readIndex reads the sessions index; the one beside the trace may be absent.
func (w *workload) readIndex(tracePath string) (trace.Boilerplate, error) {
	path := w.index
	if path == "" {
		path = filepath.Join(filepath.Dir(tracePath), "sessions_index.csv.gz")
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && w.index == "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the sessions index: %w", err)
	}
	defer func() { _ = f.Close() }() // read only
	return trace.ReadBoilerplate(f, path)
}

// output is how a run is reported: the flags that bench and demo have in common.
type output struct {
	json   bool
	report string
	turns  string
}

func (o *output) register(f *pflag.FlagSet, report string) {
	f.BoolVar(&o.json, "json", false, "print one JSON object as the last line")
	f.StringVar(&o.report, "report", report, "write a self-contained HTML report to this file")
	f.StringVar(&o.turns, "turn-log", "", "write one JSON object per turn to this file")
}

// check finds a report that could not be written before the run is made, not
// after it.
func (o *output) check() error {
	for flag, path := range map[string]string{"--report": o.report, "--turn-log": o.turns} {
		if path == "" {
			continue
		}
		if info, err := os.Stat(filepath.Dir(path)); err != nil || !info.IsDir() {
			return fmt.Errorf("%s %s: the folder %s does not exist; create it or name another file",
				flag, path, filepath.Dir(path))
		}
	}
	return nil
}

// newBenchCmd replays a workload against any OpenAI-compatible server.
func newBenchCmd() *cobra.Command {
	var (
		w                           workload
		out                         output
		o                           replay.Options
		metricsURL, fleetFile, pool string
		labels                      replay.Labels
	)
	cmd := &cobra.Command{
		Use:   "bench --url http://host:port",
		Short: "Replay agent sessions against an OpenAI-compatible server",
		Long: "bench sends multi-turn sessions the way agents do: the next turn follows the previous answer\n" +
			"after a think time. It prints a table by mode and can write a JSON line and an HTML report.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.check(); err != nil {
				return err
			}
			m, err := newMonitor(metricsURL, fleetFile, pool)
			if err != nil {
				return err
			}
			o.Monitor, o.Turns, o.Concurrency = m, w.turns, w.concurrency
			o.Settle = m != nil && m.AdminURL != "" && len(m.Sidecars) > 0
			run, err := runBench(cmd.Context(), benchRun{w: w, o: o, labels: labels, stderr: cmd.ErrOrStderr()})
			if err != nil {
				return err
			}
			return out.write(cmd.OutOrStdout(), []replay.Report{run})
		},
	}
	f := cmd.Flags()
	w.register(f)
	out.register(f, "")
	f.IntVar(&w.turns, "turns", 300, "turns to send in all (0 = every turn of the trace)")
	f.IntVar(&w.concurrency, "concurrency", 16, "sessions in flight")
	f.StringVar(&o.Target.URL, "url", "", "server to test, http(s)://host:port (required)")
	f.StringVar(&o.Target.Model, "model", "", "model name (default: the first that /v1/models lists)")
	f.StringVar(&o.Target.SessionHeader, "session-header", "",
		"header of the session id (default x-session-id, - = none)")
	f.BoolVar(&o.Target.KeepEOS, "keep-eos", false, "send no ignore_eos: answers may end before their recorded length")
	f.DurationVar(&o.Timeout, "timeout", 5*time.Minute, "real time limit of one turn")
	f.Float64Var(&o.TimeScale, "time-scale", envTimeScale(), "emulated milliseconds per real one (env KVC_TIME_SCALE)")
	f.StringVar(&metricsURL, "metrics-url", "", "the router's admin address, for KV use and pin changes")
	f.StringVar(&fleetFile, "fleet", "", "the router's fleet file, for the workers' own counters")
	f.StringVar(&pool, "pool-token-file", "", "token of the pool, for the workers' status")
	f.StringVar(&labels.Preset, "preset", "", "preset that the router runs with, for the report")
	f.StringVar(&labels.DirectPath, "direct-path", "", "engine profile of the pool, for the report")
	return cmd
}

// envTimeScale is KVC_TIME_SCALE, 1 when it is not a number.
func envTimeScale() float64 {
	if s, err := strconv.ParseFloat(os.Getenv("KVC_TIME_SCALE"), 64); err == nil && s >= 0.01 {
		return s
	}
	return 1
}

// newMonitor is nil when neither the router's admin port nor a fleet is given.
func newMonitor(adminURL, fleetFile, tokenFile string) (*replay.Monitor, error) {
	if adminURL == "" && fleetFile == "" {
		return nil, nil
	}
	m := &replay.Monitor{AdminURL: strings.TrimSuffix(adminURL, "/")}
	if tokenFile != "" {
		data, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, fmt.Errorf("read the pool's token: %w", err)
		}
		first, _, _ := strings.Cut(string(data), "\n")
		m.Token = strings.TrimSpace(first)
	}
	if fleetFile == "" {
		return m, nil
	}
	data, err := os.ReadFile(fleetFile)
	if err != nil {
		return nil, fmt.Errorf("read the fleet file: %w", err)
	}
	file, err := fleet.Parse(fleetFile, data)
	if err != nil {
		return nil, err
	}
	m.Sidecars = sidecarURLs(file)
	return m, nil
}

func sidecarURLs(f *fleet.File) map[string]string {
	out := make(map[string]string, len(f.Workers))
	for _, w := range f.Workers {
		out[string(w.ID)] = w.URL
	}
	return out
}

// benchRun is one replay to do.
type benchRun struct {
	w      workload
	o      replay.Options
	labels replay.Labels
	stderr io.Writer
}

func runBench(ctx context.Context, b benchRun) (replay.Report, error) {
	if b.o.Target.URL == "" {
		return replay.Report{}, usageError{errors.New("--url is missing: name the server, http(s)://host:port")}
	}
	src, label, err := b.w.source()
	if err != nil {
		return replay.Report{}, err
	}
	stop := b.progress()
	res, err := replay.Run(ctx, b.o, src)
	stop()
	if err != nil {
		return replay.Report{}, err
	}
	l := b.labels
	l.Workload, l.Seed, l.Concurrency, l.TimeScale = label, b.w.seed, b.w.concurrency, b.o.TimeScale
	return replay.Report{Result: res, Summary: replay.Summarize(res, l)}, nil
}

// progress shows a bar where a person is looking.
func (b *benchRun) progress() (stop func()) {
	f, ok := b.stderr.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return func() {}
	}
	total := b.w.turns
	if total == 0 {
		total = -1
	}
	bar := progressbar.NewOptions(total, progressbar.OptionSetWriter(f), progressbar.OptionSetDescription("turns"),
		progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(100*time.Millisecond))
	b.o.Progress = func(done, failed int) {
		if failed > 0 {
			bar.Describe(fmt.Sprintf("turns (%d failed)", failed))
		}
		_ = bar.Set(done) // a bar that cannot be drawn is no reason to stop
	}
	return func() { _ = bar.Finish() }
}

// write prints the tables, writes the report, and ends with the JSON line.
func (o *output) write(w io.Writer, runs []replay.Report) error {
	var all []replay.Summary
	for _, r := range runs {
		if err := replay.WriteTable(w, r.Summary); err != nil {
			return err
		}
		all = append(all, r.Summary)
	}
	if len(runs) > 1 {
		if err := replay.WriteComparison(w, all); err != nil {
			return err
		}
	}
	if o.turns != "" {
		if err := writeFile(o.turns, func(w io.Writer) error { return writeTurns(w, runs) }); err != nil {
			return err
		}
	}
	if o.report != "" {
		if err := writeFile(o.report, func(w io.Writer) error { return replay.WriteHTML(w, runs) }); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(w, "report: %s\n", o.report); err != nil {
			return err
		}
	}
	if o.json {
		return json.NewEncoder(w).Encode(jsonOf(all))
	}
	return nil
}

// jsonOf is the summary; of several runs the first, with all of them inside.
func jsonOf(all []replay.Summary) any {
	if len(all) == 1 {
		return all[0]
	}
	return struct {
		replay.Summary
		Compare []replay.Summary `json:"compare"`
	}{all[0], all}
}

func writeTurns(w io.Writer, runs []replay.Report) error {
	for _, r := range runs {
		if err := replay.WriteTurns(w, r); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	if err := write(f); err != nil {
		_ = f.Close() // the first error says more
		return err
	}
	return f.Close()
}
