package main

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func environment(t *testing.T, change map[string]string) {
	t.Helper()
	env := map[string]string{
		"KVC_WORKER": "uid-1", "KVC_POD": "decode-0", "KVC_ROLE": "decode", "KVC_DIRECT_PATH": "Unified",
		"KVC_ENGINE_URL": "http://127.0.0.1:1", "KVC_TIME_SCALE": "", "KVC_ENGINE_KEY": "", "KVC_PRESTOP_NONCE": "",
	}
	maps.Copy(env, change)
	for k, v := range env {
		t.Setenv(k, v)
	}
}

// lines is a log that tells when it grew.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

// A native sidecar must serve before its engine exists, and leave on SIGTERM.
func TestRunServesWithoutAnEngineAndStops(t *testing.T) {
	environment(t, nil)
	addr, log := freeAddr(t), &lines{}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"--listen", addr, "--journal-dir", t.TempDir(), "--drain-timeout", "1s"}, log)
	}()
	get := func(path string) (int, string) {
		hc := &http.Client{Timeout: 5 * time.Second}
		defer hc.CloseIdleConnections()
		resp, err := hc.Get("http://" + addr + path)
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err.Error()
		}
		return resp.StatusCode, string(b)
	}
	deadline := time.Now().Add(10 * time.Second)
	for code, body := get("/healthz"); code != 200; code, body = get("/healthz") {
		if time.Now().After(deadline) {
			t.Fatalf("not serving: %d %s\n%s", code, body, log)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if code, body := get("/readyz"); code != 503 || !strings.Contains(body, "engine") {
		t.Errorf("readyz = %d %s, want 503 naming the engine", code, body)
	}
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("run: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("run did not stop")
	}
}

func TestRunSaysWhatIsWrong(t *testing.T) {
	busy, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		env  map[string]string
		args []string
		want string
	}{
		"no worker":                          {map[string]string{"KVC_WORKER": ""}, nil, "KVC_WORKER"},
		"an unknown role":                    {map[string]string{"KVC_ROLE": "router"}, nil, "KVC_ROLE"},
		"Auto is resolved before":            {map[string]string{"KVC_DIRECT_PATH": "Auto"}, nil, "KVC_DIRECT_PATH"},
		"no engine":                          {map[string]string{"KVC_ENGINE_URL": ""}, nil, "KVC_ENGINE_URL"},
		"a scale that is none":               {map[string]string{"KVC_TIME_SCALE": "fast"}, nil, "KVC_TIME_SCALE"},
		"a scale of 0":                       {map[string]string{"KVC_TIME_SCALE": "0"}, nil, "KVC_TIME_SCALE"},
		"a port in use":                      {nil, []string{"--listen", busy.Addr().String()}, "--listen"},
		"an argument":                        {nil, []string{"start"}, "start"},
		"an unknown flag":                    {nil, []string{"--port", "1"}, "--port"},
		"a token file that is missing":       {nil, []string{"--token-file", file + ".none"}, "--token-file"},
		"an empty token file":                {nil, []string{"--token-file", file}, "one token a line"},
		"a routing file that is missing":     {nil, []string{"--routing-file", file + ".none"}, "routing file"},
		"a routing file that is broken":      {nil, []string{"--routing-file", file}, "routing"},
		"a journal directory that is a file": {nil, []string{"--journal-dir", file}, "--journal-dir"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			environment(t, tc.env)
			args := append([]string{"--journal-dir", ""}, tc.args...)
			err := run(t.Context(), args, io.Discard)
			if err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("run = %v, want one line naming %s", err, tc.want)
			}
		})
	}
}
