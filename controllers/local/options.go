package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// Options of a run.
type Options struct {
	// Pool is what to run, defaulted and valid. It is not changed.
	Pool *v1alpha1.KVCPool
	// BinDir holds the programs router, sidecar and emulator.
	BinDir string
	// Dir keeps the run's files: fleet, token, logs, journals. "" makes a new
	// one under the system's directory for temporary files. Logs stay after Stop.
	Dir string
	// Listen is where clients reach the router, host:port; port 0 or "" chooses.
	Listen string
	// AdminListen is the router's admin address; port 0 or "" chooses.
	AdminListen string
	// TimeScale is KVC_TIME_SCALE; 0 leaves the environment's.
	TimeScale float64
	// Log receives what happens to processes; nil discards it.
	Log *slog.Logger
	// Grace is how long a process may take to end after SIGTERM before it is
	// killed. 0 = 5 s.
	Grace time.Duration

	// gpus lists the machine's GPUs; nil asks nvidia-smi. backoff is the first
	// delay between restarts; 0 = 200 ms. Both are for tests.
	gpus    func(context.Context) ([]string, error)
	backoff time.Duration
}

const (
	defaultGrace   = 5 * time.Second
	defaultBackoff = 200 * time.Millisecond
	loopback       = "127.0.0.1"
)

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Grace == 0 {
		o.Grace = defaultGrace
	}
	if o.backoff == 0 {
		o.backoff = defaultBackoff
	}
	if o.gpus == nil {
		o.gpus = nvidiaGPUs
	}
	return o
}

// checkPrograms says in one sentence which programs are missing.
func (o Options) checkPrograms() error {
	names := []string{"router", "sidecar"}
	if o.Pool.Spec.Engine.Type == v1alpha1.EngineEmulator {
		names = append(names, "emulator")
	}
	for _, name := range names {
		info, err := os.Stat(filepath.Join(o.BinDir, name))
		switch {
		case errors.Is(err, os.ErrNotExist):
			return fmt.Errorf("%s has no program %q; build them all with `make build` and keep them in one directory",
				o.BinDir, name)
		case err != nil:
			return fmt.Errorf("find program %s: %w", name, err)
		case info.IsDir() || info.Mode()&0o111 == 0:
			return fmt.Errorf("%s is not an executable file; build it with `make build`", filepath.Join(o.BinDir, name))
		}
	}
	return nil
}

// timeScaleEnv is the KVC_TIME_SCALE entry for every process; "" adds none.
func (o Options) timeScaleEnv() (string, error) {
	if o.TimeScale == 0 {
		return "", nil
	}
	const least = 0.01
	if !(o.TimeScale >= least) { // NaN included
		return "", fmt.Errorf("time scale %v is not a number of %v or more", o.TimeScale, least)
	}
	return v1alpha1.EnvTimeScale + "=" + strconv.FormatFloat(o.TimeScale, 'g', -1, 64), nil
}
