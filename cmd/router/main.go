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
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/proxy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends at once
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "router:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends, then lets the streams finish (R111).
func run(ctx context.Context, args []string, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	p := proxy.New(o.proxy)
	defer p.Close()
	if o.routing != nil {
		p.Reconfigure(o.routing, o.routingHash)
	}
	data, err := listen(ctx, "--listen", o.listen)
	if err != nil {
		return err
	}
	admin, err := listen(ctx, "--admin-listen", o.adminListen)
	if err != nil {
		return errors.Join(err, data.Close())
	}
	o.log.Info("router starts", "listen", data.Addr().String(), "admin", admin.Addr().String(), "fleet", o.fleetFile)

	// The files and the admin port outlive the signal: streams are still running.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	p.Apply(o.fleet)
	var g errgroup.Group
	dataServer, adminServer := newServer(p.Handler(), o.log), newServer(p.Admin(), o.log)
	failed := make(chan struct{})
	var once sync.Once
	serve := func(f func() error) {
		g.Go(func() error {
			err := f()
			if err != nil && !errors.Is(err, http.ErrServerClosed) {
				once.Do(func() { close(failed) })
				return err
			}
			return nil
		})
	}
	serve(func() error { return dataServer.Serve(data) })
	serve(func() error { return adminServer.Serve(admin) })
	serve(func() error { return followFleet(life, p, o) })
	if o.routingFile != "" {
		serve(func() error { return followRouting(life, p, o) })
	}

	select {
	case <-ctx.Done():
		o.log.Info("router stops; running turns may finish", "deadline", o.grace)
	case <-failed:
	}
	p.Shutdown()
	stopServer(dataServer, o.grace, o.log)
	end()
	stopServer(adminServer, time.Second, o.log)
	return g.Wait()
}

// listen binds a port; its error is a sentence that names the flag.
func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%s %s: the port is in use; stop the other process or choose another port", flag, addr)
	case err != nil:
		return nil, fmt.Errorf("%s %s: %w", flag, addr, err)
	}
	return l, nil
}

// newServer has no timer on whole requests or answers (R12): only headers must
// come in time, and idle connections end.
func newServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       120 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// stopServer waits for running requests up to grace, then cuts them.
func stopServer(s *http.Server, grace time.Duration, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		log.Warn("requests were cut at the deadline", "error", err)
		_ = s.Close()
	}
}

func followFleet(ctx context.Context, p *proxy.Proxy, o *options) error {
	m := o.proxy.Metrics
	src := &fleet.FileSource{Path: o.fleetFile, Log: o.log, Rejected: func(error) { m.Reloaded("fleet", false) }}
	return src.Run(ctx, func(f *fleet.File) {
		m.Reloaded("fleet", true)
		p.Apply(f)
	})
}
