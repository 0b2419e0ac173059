package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const emptyFleet = "version: 1\npool: {namespace: n, name: p, model: m}\nworkers: []\n"

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Every bad start is one clear sentence that names the flag, the file or the
// variable, and the remedy.
func TestBadStarts(t *testing.T) {
	fleet := file(t, "fleet.yaml", emptyFleet)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cases := map[string]struct {
		args  []string
		scale string
		want  []string
	}{
		"no fleet":              {nil, "", []string{"--fleet: missing", "kvc up"}},
		"a fleet that is none":  {[]string{"--fleet", "/no/such/file"}, "", []string{"--fleet /no/such/file: no such file", "kvc up"}},
		"a bad fleet":           {[]string{"--fleet", file(t, "f", "version: 1\nmodel: x\n")}, "", []string{":2: model: unknown key"}},
		"an unknown flag":       {[]string{"--flet", fleet}, "", []string{"--flet"}},
		"an argument":           {[]string{"--fleet", fleet, "x"}, "", []string{`"x"`}},
		"an unknown preset":     {[]string{"--fleet", fleet, "--preset", "paper"}, "", []string{"--preset", "Corrected or Paper"}},
		"a threshold of zero":   {[]string{"--fleet", fleet, "--kvcache-migration-reject-threshold", "0"}, "", []string{"1 or more"}},
		"an append of zero":     {[]string{"--fleet", fleet, "--kvcache-direct-max-uncached-tokens=-1"}, "", []string{"1 or more"}},
		"a body limit of zero":  {[]string{"--fleet", fleet, "--max-body-bytes", "0"}, "", []string{"--max-body-bytes"}},
		"a bad scale":           {[]string{"--fleet", fleet}, "fast", []string{`KVC_TIME_SCALE="fast"`, "0.01"}},
		"a scale of zero":       {[]string{"--fleet", fleet}, "0", []string{"KVC_TIME_SCALE"}},
		"a missing token file":  {[]string{"--fleet", fleet, "--token-file", "/no/token"}, "", []string{"--token-file", "/no/token"}},
		"a missing routing":     {[]string{"--fleet", fleet, "--routing-file", "/no/routing"}, "", []string{"--routing-file", "/no/routing"}},
		"a bad routing file":    {[]string{"--fleet", fleet, "--routing-file", file(t, "r", `{"routing":{"presett":"x"}}`)}, "", []string{"presett"}},
		"a log level":           {[]string{"--fleet", fleet, "--log-level", "loud"}, "", []string{"loud", "debug, info"}},
		"a log format":          {[]string{"--fleet", fleet, "--log-format", "xml"}, "", []string{"xml", "text or json"}},
		"a port in use":         {[]string{"--fleet", fleet, "--listen", l.Addr().String()}, "", []string{"--listen", "in use", "another port"}},
		"an admin port in use":  {[]string{"--fleet", fleet, "--listen", "127.0.0.1:0", "--admin-listen", l.Addr().String()}, "", []string{"--admin-listen", "in use"}},
		"an address that is no": {[]string{"--fleet", fleet, "--listen", "nonsense"}, "", []string{"--listen nonsense"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Setenv("KVC_TIME_SCALE", tc.scale)
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			err := run(ctx, tc.args, io.Discard)
			if err == nil {
				t.Fatal("run ended well")
			}
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q lacks %q", err, w)
				}
			}
		})
	}
}

// lockedBuffer is a log that a test reads while it grows.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) find(re string) []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return regexp.MustCompile(re).FindStringSubmatch(b.b.String())
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come true", what)
		}
	}
}

// The command serves both ports, follows its files, and ends well on a signal
// (R111).
func TestRun(t *testing.T) {
	fleet, routing := file(t, "fleet.yaml", emptyFleet), file(t, "routing.json", `{"routing":{"preset":"Paper"}}`)
	token := file(t, "token", "secret\n")
	var log lockedBuffer
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, []string{"--fleet", fleet, "--routing-file", routing, "--token-file", token,
			"--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--log-format", "json"}, &log)
	}()
	var data, admin string
	eventually(t, "ports open", func() bool {
		m := log.find(`"listen":"([^"]+)","admin":"([^"]+)"`)
		if m != nil {
			data, admin = "http://"+m[1], "http://"+m[2]
		}
		return m != nil
	})
	client := &http.Client{}
	defer client.CloseIdleConnections()
	get := func(u string) (int, string) {
		resp, err := client.Get(u)
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
	eventually(t, "fleet applied", func() bool {
		_, b := get(data + "/readyz")
		return strings.Contains(b, "no decode worker")
	})
	if code, b := get(data + "/v1/models"); code != 200 || !strings.Contains(b, `"id":"m"`) {
		t.Errorf("models: %d %s", code, b)
	}
	if code, b := get(admin + "/metrics"); code != 200 || !strings.Contains(b, "kvc_router_requests_inflight 0") {
		t.Errorf("metrics: %d %.200s", code, b)
	}
	if code, _ := get(data + "/metrics"); code != 404 {
		t.Errorf("metrics on the data port: %d, want 404", code)
	}
	_, before := get(admin + "/kvc/v1/status")

	if err := os.WriteFile(fleet, []byte(strings.Replace(emptyFleet, "model: m", "model: other", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new fleet", func() bool { _, b := get(data + "/v1/models"); return strings.Contains(b, `"id":"other"`) })
	if err := os.WriteFile(routing, []byte(`{"routing":{"preset":"Corrected"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new routing file", func() bool {
		_, after := get(admin + "/kvc/v1/status")
		hash := regexp.MustCompile(`"config_hash":"[0-9a-f]{16}"`)
		return hash.FindString(after) != "" && hash.FindString(after) != hash.FindString(before)
	})
	if err := os.WriteFile(routing, []byte(`{"routing":`), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the refusal of a bad routing file", func() bool { return log.find("routing file refused") != nil })
	cancel()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("run = %v after a signal, want nil", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("run did not end")
	}
	if log.find("secret") != nil {
		t.Error("the token was logged")
	}
}

// A fleet file that vanishes or breaks later does not stop the router.
func TestHelpIsNoError(t *testing.T) {
	var out bytes.Buffer
	err := run(context.Background(), []string{"--help"}, &out)
	if err == nil || !strings.Contains(err.Error(), "help requested") || !strings.Contains(out.String(), "--kvcache-direct-max-uncached-tokens") {
		t.Errorf("run --help = %v, printed %q", err, out.String())
	}
}
