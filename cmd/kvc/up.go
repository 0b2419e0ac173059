package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/controllers/local"
)

// upOptions are the flags of kvc up.
type upOptions struct {
	file        string
	listen      string
	adminListen string
	dir         string
	timeScale   float64
}

// newUpCmd runs a pool on this machine until it is interrupted.
func newUpCmd() *cobra.Command {
	var o upOptions
	cmd := &cobra.Command{
		Use:   "up -f pool.yaml",
		Short: "Run a pool on this machine",
		Long: "up runs the pods of a KVCPool manifest as processes of this machine, with a router in front:\n" +
			"SGLang where the GPUs for it are, the emulator where there are none. Ctrl-C stops all of them.",
		Example: "  kvc up -f config/samples/pool_short.yaml",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.file == "" {
				return usageError{errors.New("up needs a manifest: kvc up -f pool.yaml")}
			}
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&o.file, "file", "f", "", "the KVCPool manifest; - reads standard input")
	f.StringVar(&o.listen, "listen", "127.0.0.1:8000", "where clients reach the router; port 0 chooses a free one")
	f.StringVar(&o.adminListen, "admin-listen", "127.0.0.1:0", "the router's admin address; port 0 chooses a free one")
	f.StringVar(&o.dir, "dir", "", "keep fleet file, token and logs here (default: a new temporary directory)")
	f.Float64Var(&o.timeScale, "time-scale", 0,
		"an emulated millisecond takes 1/S real ones (default: KVC_TIME_SCALE, or 1)")
	return cmd
}

func (o upOptions) run(ctx context.Context, in io.Reader, out io.Writer) error {
	pool, err := readPool(o.file, in)
	if err != nil {
		return err
	}
	bin, err := programDir()
	if err != nil {
		return err
	}
	screen := newScreen(out)
	c, err := local.Start(ctx, local.Options{
		Pool: pool, BinDir: bin, Dir: o.dir, Listen: o.listen, AdminListen: o.adminListen,
		TimeScale: o.timeScale, Log: newEventLog(screen),
	})
	if err != nil {
		return err
	}
	defer c.Stop()
	for _, n := range c.Notices() {
		screen.printf("note: %s\n", n)
	}
	screen.printf("starting %s; logs in %s\n", pool.Name, filepath.Join(c.Dir(), "logs"))
	err = watch(ctx, c, screen)
	screen.clear()
	screen.printf("stopping\n")
	return err
}

// watch shows the pool until ctx is done, or until it turns out not to start.
func watch(ctx context.Context, c *local.Cluster, screen *screen) error {
	const refresh = time.Second
	loadTimeout := time.Duration(*c.Pool().Spec.Model.LoadTimeoutSeconds) * time.Second
	waitCtx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	ready := make(chan error, 1)
	go func() { ready <- c.WaitReady(waitCtx) }()
	ticker := time.NewTicker(refresh)
	defer ticker.Stop()
	reader := statusReader{url: c.AdminURL(), client: &http.Client{Timeout: refresh}}
	defer reader.client.CloseIdleConnections()
	for {
		screen.show(rows(c.Workers(), reader.read(ctx)))
		select {
		case <-ctx.Done():
			return nil // the way to end it
		case err := <-ready:
			if ctx.Err() != nil {
				return nil
			}
			if err != nil {
				return err
			}
			screen.clear()
			screen.printf("%s", welcome(c))
		case <-c.Changed():
		case <-ticker.C:
		}
	}
}

// welcome says what is running and how to use it.
func welcome(c *local.Cluster) string {
	pool := c.Pool()
	s := &pool.Spec
	model := s.Model.ServedName
	return strings.Join([]string{
		fmt.Sprintf("%s is ready: %d prefill, %d decode, %s on %s", pool.Name, *s.Prefill.Replicas, *s.Decode.Replicas,
			v1alpha1.ResolveDirectPath(s), s.Engine.Type),
		fmt.Sprintf("  OpenAI URL  %s/v1   model %s", c.URL(), model),
		fmt.Sprintf("  try         curl -s %s/v1/chat/completions -H 'content-type: application/json' \\", c.URL()),
		fmt.Sprintf("                -d '{\"model\":%q,\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}'", model),
		fmt.Sprintf("  admin       %s/metrics", c.AdminURL()),
		"  fleet file  " + c.FleetPath(),
		"  Ctrl-C stops everything", "",
	}, "\n")
}

// readPool reads a manifest from a file, or from in when the name is "-".
func readPool(name string, in io.Reader) (*v1alpha1.KVCPool, error) {
	if name == "-" {
		data, err := io.ReadAll(in)
		if err != nil {
			return nil, fmt.Errorf("read the manifest from standard input: %w", err)
		}
		return v1alpha1.ParsePool("standard input", data)
	}
	data, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s does not exist; "+
			"give the path of a KVCPool manifest, such as config/samples/pool_short.yaml", name)
	}
	if err != nil {
		return nil, fmt.Errorf("read the manifest: %w", err)
	}
	return v1alpha1.ParsePool(name, data)
}

// programDir is where kvc itself lies: its sibling programs are beside it.
func programDir() (string, error) {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	if err != nil {
		return "", fmt.Errorf("find kvc's own directory: %w", err)
	}
	return filepath.Dir(self), nil
}
