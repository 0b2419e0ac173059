package main

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/controllers/local"
	"github.com/kvc-dev/kvc/router/replay"
)

//go:embed demo.yaml.tmpl
var demoManifest string

// demo is one run of kvc demo.
type demo struct {
	w          workload
	out        output
	directPath string
	preset     string
	compare    bool
	keep       bool
	timeScale  float64

	stdout, stderr io.Writer
}

// demoProfiles are the engine profiles that the demo can run. NativeAdmission
// needs an engine that answers admission itself; the emulator does not.
func demoProfiles() []v1alpha1.DirectPath {
	return []v1alpha1.DirectPath{
		v1alpha1.DirectPathConditionalAggregation, v1alpha1.DirectPathUnified, v1alpha1.DirectPathDeltaTransfer,
	}
}

// newDemoCmd runs the main job: a pool without GPUs, a workload, a report.
func newDemoCmd() *cobra.Command {
	var d demo
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run an emulated pool, send it agent sessions, show what happened",
		Long: "demo starts one prefill and three decode workers that need no GPU, replays coding-agent sessions\n" +
			"against them, and reports how each turn was served. Times are emulated; the scale is printed.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.stdout, d.stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			return d.run(cmd.Context())
		},
	}
	f := cmd.Flags()
	d.w.register(f)
	d.out.register(f, "kvc-report.html")
	f.IntVar(&d.w.turns, "turns", 300, "turns to send in all (0 = every turn of the trace)")
	f.IntVar(&d.w.concurrency, "concurrency", 24, "sessions in flight")
	f.StringVar(&d.directPath, "direct-path", string(v1alpha1.DirectPathConditionalAggregation),
		"engine profile: ConditionalAggregation, Unified (4 decode workers, no prefill) or DeltaTransfer")
	f.StringVar(&d.preset, "preset", string(v1alpha1.PresetCorrected),
		"algorithms as written (Paper) or as ruled (Corrected)")
	f.BoolVar(&d.compare, "compare", false, "run the three profiles on the same workload and show them side by side")
	f.BoolVar(&d.keep, "keep", false, "leave the pool running afterwards, until Ctrl-C")
	f.Float64Var(&d.timeScale, "time-scale", 0, "emulated milliseconds per real one "+
		"(default: KVC_TIME_SCALE, else about 30, more when few sessions are in flight)")
	return cmd
}

// run does the profiles one after another, so that they do not share the CPU.
func (d *demo) run(ctx context.Context) error {
	profiles, err := d.profiles()
	if err != nil {
		return err
	}
	if err := d.out.check(); err != nil {
		return err
	}
	if d.timeScale == 0 {
		d.timeScale = d.defaultScale()
	}
	d.say("Times are emulated: KVC_TIME_SCALE=%g, so 1 s here shows %g s of a real pool.\n", d.timeScale, d.timeScale)
	var runs []replay.Report
	for i, p := range profiles {
		run, err := d.profile(ctx, p, d.keep && i == len(profiles)-1)
		if err != nil {
			return err
		}
		runs = append(runs, run)
		if ctx.Err() != nil {
			break
		}
	}
	return d.finish(runs)
}

func (d *demo) profiles() ([]v1alpha1.DirectPath, error) {
	if !slices.Contains(demoProfiles(), v1alpha1.DirectPath(d.directPath)) {
		return nil, usageError{fmt.Errorf("--direct-path %q: want ConditionalAggregation, Unified or DeltaTransfer",
			d.directPath)}
	}
	if p := v1alpha1.RoutingPreset(d.preset); p != v1alpha1.PresetPaper && p != v1alpha1.PresetCorrected {
		return nil, usageError{fmt.Errorf("--preset %q: want Paper or Corrected", d.preset)}
	}
	if _, _, err := d.w.source(); err != nil {
		return nil, err
	}
	if d.compare {
		return demoProfiles(), nil
	}
	return []v1alpha1.DirectPath{v1alpha1.DirectPath(d.directPath)}, nil
}

// defaultScale keeps 300 turns under a minute on two cores: a turn takes about
// 80 emulated seconds, most of them think time and decoding, shared by the
// sessions in flight.
func (d *demo) defaultScale() float64 {
	if os.Getenv(v1alpha1.EnvTimeScale) != "" {
		return envTimeScale()
	}
	const secondsPerTurn, wanted, least, most = 80, 34, 10, 250
	seconds := secondsPerTurn * float64(max(1, d.w.turns)) / float64(max(1, d.w.concurrency))
	return float64(int(min(most, max(least, seconds/wanted))))
}

// profile runs one engine profile from start to stop.
func (d *demo) profile(ctx context.Context, p v1alpha1.DirectPath, keep bool) (replay.Report, error) {
	pool, err := d.pool(p)
	if err != nil {
		return replay.Report{}, err
	}
	bin, err := programDir()
	if err != nil {
		return replay.Report{}, err
	}
	c, err := local.Start(ctx, local.Options{Pool: pool, BinDir: bin, TimeScale: d.timeScale})
	if err != nil {
		return replay.Report{}, err
	}
	defer c.Stop()
	for _, n := range c.Notices() {
		d.say("%s\n", n)
	}
	wait, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := c.WaitReady(wait); err != nil {
		return replay.Report{}, err
	}
	d.say("%s pool of %s at %s, %d sessions in flight …\n", shape(pool), p, c.URL(), d.w.concurrency)
	run, err := d.bench(ctx, c, p)
	if err != nil {
		return replay.Report{}, fmt.Errorf("%w (logs in %s)", err, filepath.Join(c.Dir(), "logs"))
	}
	if run.Summary.Errors == 0 && !keep {
		defer d.tidy(c)
	}
	if keep {
		d.say("The pool keeps running at %s (admin %s, logs in %s); Ctrl-C stops it.\n", c.URL(), c.AdminURL(),
			filepath.Join(c.Dir(), "logs"))
		<-ctx.Done()
	}
	return run, nil
}

// tidy removes the files of a run that went well; logs are for those that did not.
func (d *demo) tidy(c *local.Cluster) {
	c.Stop()
	if err := os.RemoveAll(c.Dir()); err != nil {
		d.say("The run's files stay in %s: %v\n", c.Dir(), err)
	}
}

func (d *demo) bench(ctx context.Context, c *local.Cluster, p v1alpha1.DirectPath) (replay.Report, error) {
	sidecars := make(map[string]string)
	for _, w := range c.Workers() {
		sidecars[w.ID] = w.SidecarURL
	}
	return runBench(ctx, benchRun{
		w: d.w,
		o: replay.Options{
			Target: replay.Target{URL: c.URL()},
			Turns:  d.w.turns, Concurrency: d.w.concurrency, TimeScale: d.timeScale, Settle: true,
			Monitor: &replay.Monitor{AdminURL: c.AdminURL(), Sidecars: sidecars, Token: c.Token()},
		},
		labels: replay.Labels{Preset: d.preset, DirectPath: string(p)},
		stderr: d.stderr,
	})
}

// pool renders the demo's manifest for a profile.
func (d *demo) pool(p v1alpha1.DirectPath) (*v1alpha1.KVCPool, error) {
	t, err := template.New("demo.yaml").Parse(demoManifest)
	if err != nil {
		return nil, fmt.Errorf("parse the demo's manifest: %w", err)
	}
	v := struct {
		DirectPath v1alpha1.DirectPath
		Preset     string
		Prefill    int
		Decode     int
	}{p, d.preset, 1, 3}
	if p == v1alpha1.DirectPathUnified {
		v.Prefill, v.Decode = 0, 4 // the same number of engines; a null-mode engine cannot receive KV
	}
	var b strings.Builder
	if err := t.Execute(&b, v); err != nil {
		return nil, fmt.Errorf("render the demo's manifest: %w", err)
	}
	return v1alpha1.ParsePool("demo.yaml", []byte(b.String()))
}

// shape is "1P3D".
func shape(p *v1alpha1.KVCPool) string {
	return fmt.Sprintf("%dP%dD", *p.Spec.Prefill.Replicas, *p.Spec.Decode.Replicas)
}

// finish shows the runs; failed turns are the command's failure too.
func (d *demo) finish(runs []replay.Report) error {
	if d.out.report != "" {
		path, err := filepath.Abs(d.out.report)
		if err != nil {
			return fmt.Errorf("find the report's folder: %w", err)
		}
		d.out.report = path
	}
	if err := d.out.write(d.stdout, runs); err != nil {
		return err
	}
	failed := 0
	for _, r := range runs {
		failed += r.Summary.Errors
	}
	if failed > 0 {
		return fmt.Errorf("%d turns failed: the table names why", failed)
	}
	return nil
}

func (d *demo) say(format string, args ...any) {
	_, _ = fmt.Fprintf(d.stderr, format, args...) // a person's progress; nothing depends on it
}
