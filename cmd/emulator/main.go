package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/kvc-dev/kvc/router/emulator"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "emulator:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stderr io.Writer) error {
	cfg, err := parse(args, os.Getenv, stderr)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(stderr, nil))
	s, err := emulator.New(cfg, log)
	if err != nil {
		return err
	}
	log.InfoContext(ctx, "the server is fired up and ready to roll",
		"address", s.Addr(), "mode", cfg.Mode, "bootstrap_port", s.BootstrapPort(), "time_scale", cfg.TimeScale)
	return s.Run(ctx)
}
