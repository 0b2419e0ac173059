package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// options are the parsed and checked command line.
type options struct {
	fleetFile   string
	fleet       *fleet.File // as it was at the start
	listen      string
	adminListen string
	routingFile string
	grace       time.Duration

	routing     *v1alpha1.RoutingFile // nil without a file
	routingHash string
	proxy       proxy.Options
	log         *slog.Logger
}

// raw is the command line before it is checked.
type raw struct {
	options
	tokenFile          string
	preset             string
	rejects, maxAppend int
	logFormat, level   string
}

func parse(args []string, stderr io.Writer) (*options, error) {
	var r raw
	f := flags(&r, stderr)
	if err := f.Parse(args); err != nil {
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unexpected argument %q; every option is a flag", f.Arg(0))
	}
	if err := r.check(f, stderr); err != nil {
		return nil, err
	}
	return &r.options, nil
}

func flags(r *raw, stderr io.Writer) *pflag.FlagSet {
	f := pflag.NewFlagSet("router", pflag.ContinueOnError)
	f.SetOutput(stderr)
	f.SortFlags = false
	f.StringVar(&r.fleetFile, "fleet", "", "fleet `file` (wire.md §7), followed while running; required")
	f.StringVar(&r.listen, "listen", ":8000", "`address` clients use")
	f.StringVar(&r.adminListen, "admin-listen", "127.0.0.1:9301", "`address` of metrics, status, explain and pprof")
	f.StringVar(&r.tokenFile, "token-file", "", "`file` with the pool's bearer tokens, one a line; the first is sent")
	f.StringVar(&r.routingFile, "routing-file", "",
		"routing.json (wire.md §8), followed while running; its constants give way to the flags below")
	f.StringVar(&r.preset, "preset", "", "Corrected or Paper; default: the routing file's, else Corrected")
	f.IntVar(&r.rejects, "kvcache-migration-reject-threshold", 0,
		"τ_reject: refusals after which a session passes a worker over; default: the preset's")
	f.IntVar(&r.maxAppend, "kvcache-direct-max-uncached-tokens", 0,
		"τ_append: longest append in `tokens` that a decode worker prefills itself; default: the preset's")
	f.Int64Var(&r.proxy.MaxBody, "max-body-bytes", proxy.DefaultMaxBody, "largest request body, decoded")
	f.DurationVar(&r.proxy.IdleTimeout, "idle-timeout", 10*time.Minute,
		"silence of a worker that ends a turn; there is no timer on whole turns")
	f.DurationVar(&r.proxy.AskTimeout, "admission-timeout", 0,
		"unanswered admission questions are unknown after this; default: the routing file's, else 50ms")
	f.DurationVar(&r.grace, "shutdown-grace", 60*time.Second, "how long running turns may go on after a signal")
	f.BoolVar(&r.proxy.KeepBillingHeader, "keep-billing-header", false,
		"keep leading x-anthropic-billing-header blocks, which defeat the prefix cache")
	f.StringVar(&r.logFormat, "log-format", "text", "text or json")
	f.StringVar(&r.level, "log-level", "info", "debug, info, warn or error")
	return f
}

func (r *raw) check(f *pflag.FlagSet, stderr io.Writer) error {
	var err error
	if r.log, err = telemetry.NewLog(stderr, r.logFormat, r.level); err != nil {
		return err
	}
	switch {
	case r.fleetFile == "":
		return errors.New("--fleet: missing; name the fleet file that `kvc up` writes")
	case r.proxy.MaxBody <= 0:
		return errors.New("--max-body-bytes: has to be above 0")
	case f.Changed("kvcache-migration-reject-threshold") && r.rejects < 1:
		return errors.New("--kvcache-migration-reject-threshold: has to be 1 or more")
	case f.Changed("kvcache-direct-max-uncached-tokens") && r.maxAppend < 1:
		return errors.New("--kvcache-direct-max-uncached-tokens: has to be 1 or more")
	}
	if r.fleet, err = readFleet(r.fleetFile); err != nil {
		return err
	}
	if r.proxy.TimeScale, err = timeScale(os.Getenv("KVC_TIME_SCALE")); err != nil {
		return err
	}
	if r.proxy.Tokens, err = admission.LoadTokens(r.tokenFile); err != nil {
		return fmt.Errorf("--token-file: %w", err)
	}
	r.proxy.Log, r.proxy.Metrics = r.log, telemetry.NewRouter()
	return r.params()
}

// readFleet reads the fleet file once before anything listens, so that a bad
// one is a clear refusal to start and no early request finds an empty fleet.
func readFleet(path string) (*fleet.File, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("--fleet %s: no such file; `kvc up` writes one", path)
	}
	if err != nil {
		return nil, err
	}
	return fleet.Parse(path, data)
}

// params works out the constants: preset, then routing file, then flags.
func (r *raw) params() error {
	base := kvc.Corrected()
	var preset v1alpha1.RoutingPreset
	switch r.preset {
	case "":
	case "Paper":
		base, preset = kvc.Paper(), v1alpha1.PresetPaper
	case "Corrected":
		preset = v1alpha1.PresetCorrected
	default:
		return fmt.Errorf("--preset %q: has to be Corrected or Paper", r.preset)
	}
	r.proxy.Override = func(p *kvc.Params) {
		if r.rejects > 0 {
			p.RejectThreshold = r.rejects
		}
		if r.maxAppend > 0 {
			p.MaxAppendTokens = r.maxAppend
		}
	}
	r.proxy.Preset = preset
	r.proxy.Override(&base)
	r.proxy.Params = base.Scaled(r.proxy.TimeScale)
	r.proxy.SessionTTL = time.Duration(float64(15*time.Minute) / r.proxy.TimeScale)
	if r.routingFile == "" {
		return nil
	}
	data, err := os.ReadFile(r.routingFile)
	if err != nil {
		return fmt.Errorf("--routing-file: %w", err)
	}
	r.routing, err = v1alpha1.ParseRoutingFile(data)
	r.routingHash = configHash(data)
	return err
}

// timeScale reads KVC_TIME_SCALE.
func timeScale(s string) (float64, error) {
	if s == "" {
		return 1, nil
	}
	v, err := strconv.ParseFloat(s, 64)
	if err != nil || !(v >= 0.01) || math.IsInf(v, 0) {
		return 0, fmt.Errorf("KVC_TIME_SCALE=%q: has to be a number of at least 0.01", s)
	}
	return v, nil
}

// configHash is wire.md §8's config_hash.
func configHash(data []byte) string { return fmt.Sprintf("%016x", xxh3.Hash(data)) }

// followRouting applies changes of the routing file; a bad one keeps the last good.
func followRouting(ctx context.Context, p *proxy.Proxy, o *options) error {
	return fleet.Follow(ctx, o.routingFile, func(data []byte, err error) error {
		var f *v1alpha1.RoutingFile
		if err == nil {
			f, err = v1alpha1.ParseRoutingFile(data)
		}
		o.proxy.Metrics.Reloaded("routing", err == nil)
		if err != nil {
			o.log.Error("routing file refused; the last good one stays", "file", o.routingFile, "error", err)
			return nil
		}
		p.Reconfigure(f, configHash(data))
		o.log.Info("routing file applied", "config_hash", configHash(data))
		return nil
	})
}
