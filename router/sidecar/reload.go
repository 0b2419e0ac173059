package sidecar

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/kvc"
)

// tuning is the routing file in force.
type tuning struct {
	params kvc.Params // already divided by the time scale
	hash   string     // config_hash; "" = no file
}

func (s *Sidecar) params() kvc.Params { return s.tuned.Load().params }
func (s *Sidecar) configHash() string { return s.tuned.Load().hash }

// loadRouting reads the routing file. What cannot be read or does not validate
// leaves the last good one in force (R113).
func (s *Sidecar) loadRouting() error {
	data, err := os.ReadFile(s.cfg.RoutingFile)
	if err != nil {
		return fmt.Errorf("read routing file: %w", err)
	}
	hash := fmt.Sprintf("%016x", xxh3.Hash(data))
	if hash == s.configHash() {
		return nil
	}
	f, err := v1alpha1.ParseRoutingFile(data)
	if err != nil {
		return fmt.Errorf("routing file %s: %w", s.cfg.RoutingFile, err)
	}
	p := f.Routing.Params().Scaled(s.cfg.TimeScale)
	s.tuned.Store(&tuning{params: p, hash: hash})
	s.book.do(func(l *kvc.Ledger, _ time.Time) {
		if l != nil {
			l.SetParams(p)
		}
	})
	return nil
}

// watchFiles follows the routing file's directory: a mounted ConfigMap changes
// by a symbolic link beside it, never by a write to it.
func (s *Sidecar) watchFiles(ctx context.Context) {
	if s.cfg.RoutingFile == "" {
		return
	}
	w, err := fsnotify.NewWatcher()
	if err == nil {
		defer func() { _ = w.Close() }()
		err = w.Add(filepath.Dir(s.cfg.RoutingFile))
	}
	if err != nil {
		s.cfg.Log.Warn("routing file is not watched; changes need a restart", "error", err)
		return
	}
	s.reload() // a change between start-up and the watch
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-w.Events:
			if !ok {
				return
			}
			s.reload()
		case err, ok := <-w.Errors:
			if !ok {
				return
			}
			s.cfg.Log.Warn("watch routing file", "error", err)
		}
	}
}

func (s *Sidecar) reload() {
	if err := s.loadRouting(); err != nil {
		s.metrics.reloadErrors.Inc()
		s.cfg.Log.Warn("routing file not taken; the last good one stays", "error", err)
	}
}
