package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sidecar"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends at once
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "sidecar:", err)
		os.Exit(1)
	}
}

// options are what the command line adds to the environment.
type options struct {
	listen, tokenFile, routingFile, journalDir string
	maxBody                                    int64
	grace, drainTimeout                        time.Duration
}

func run(ctx context.Context, args []string, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(stderr, nil))
	cfg, err := config(o, log)
	if err != nil {
		return err
	}
	s, err := sidecar.New(cfg)
	if err != nil {
		return err
	}
	ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w; choose another --listen", o.listen, err)
	}
	return serve(ctx, s, ln, o.drainTimeout, log)
}

// serve runs until ctx ends, then drains: the port stays open meanwhile, so that
// routers hear of the state and running streams end well.
func serve(ctx context.Context, s *sidecar.Sidecar, ln net.Listener, drain time.Duration, log *slog.Logger) error {
	loops, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	done := make(chan struct{})
	go func() { defer close(done); s.Run(loops) }()

	srv := &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	go func() { failed <- srv.Serve(ln) }()
	log.Info("sidecar serves", "address", ln.Addr().String())

	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
		s.Drain(limit)
		cancel()
	}
	stop() // ends the feed's followers
	<-done
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if srv.Shutdown(last) != nil {
		_ = srv.Close() // connections that would not go
	}
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

func parse(args []string, stderr io.Writer) (options, error) {
	var o options
	f := pflag.NewFlagSet("sidecar", pflag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.listen, "listen", ":9300", "address of the data and control port")
	f.StringVar(&o.tokenFile, "token-file", "/etc/kvc/token/token",
		"the pool's bearer tokens, one a line; the default is used if it exists")
	f.StringVar(&o.routingFile, "routing-file", "/etc/kvc/routing/routing.json",
		"constants of the algorithms; the default is used if it exists")
	f.StringVar(&o.journalDir, "journal-dir", "/var/lib/kvc/journal",
		`directory of the ledger's journal; "" = no journal`)
	f.Int64Var(&o.maxBody, "max-body-bytes", 64<<20, "longest request body")
	f.DurationVar(&o.grace, "grace", 300*time.Second, "the pod's termination grace, from which prestop counts")
	f.DurationVar(&o.drainTimeout, "drain-timeout", 30*time.Second, "how long running turns may take after SIGTERM")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q; the sidecar takes flags and KVC_* variables only", f.Arg(0))
	}
	optional := func(name string, path *string) {
		if _, err := os.Stat(*path); err != nil && !f.Changed(name) {
			*path = ""
		}
	}
	optional("token-file", &o.tokenFile)
	optional("routing-file", &o.routingFile)
	return o, nil
}

// config reads the environment.
func config(o options, log *slog.Logger) (sidecar.Config, error) {
	scale := 1.0
	if v := os.Getenv("KVC_TIME_SCALE"); v != "" {
		var err error
		if scale, err = strconv.ParseFloat(v, 64); err != nil || scale <= 0 {
			return sidecar.Config{}, fmt.Errorf("KVC_TIME_SCALE: want a number of at least 0.01, not %q", v)
		}
	}
	tokens, err := admission.LoadTokens(o.tokenFile)
	if err != nil {
		return sidecar.Config{}, fmt.Errorf("--token-file: %w", err)
	}
	if o.journalDir != "" {
		if err := os.MkdirAll(o.journalDir, 0o700); err != nil {
			return sidecar.Config{}, fmt.Errorf("--journal-dir: %w; give a writable directory, or \"\" for none", err)
		}
	}
	return sidecar.Config{
		Worker: os.Getenv("KVC_WORKER"), Pod: os.Getenv("KVC_POD"),
		Role: fleet.Role(os.Getenv("KVC_ROLE")), DirectPath: kvc.DirectPath(os.Getenv("KVC_DIRECT_PATH")),
		EngineURL: os.Getenv("KVC_ENGINE_URL"), EngineKey: os.Getenv("KVC_ENGINE_KEY"),
		Tokens: tokens, PreStopNonce: os.Getenv("KVC_PRESTOP_NONCE"),
		RoutingFile: o.routingFile, JournalDir: o.journalDir,
		TimeScale: scale, MaxBodyBytes: o.maxBody, Grace: o.grace, Log: log,
	}, nil
}
