package emulator

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

// stepped is an engine whose clock stands still until the driver moves it to
// the engine's next event, and the driver waits until handlers have taken what
// the last one brought. So every token is a chunk of its own, on any machine.
type stepped struct {
	*node
	now atomic.Int64
}

func (s *stepped) pending() (pending bool) {
	s.engine.read(func(c *core) {
		for q := range c.seqs {
			q.out.mu.Lock()
			pending = pending || len(q.out.batch.tokens) > 0
			q.out.mu.Unlock()
		}
	})
	return pending
}

func (s *stepped) step() {
	if s.pending() {
		return
	}
	s.engine.read(func(c *core) {
		if at, _, ok := c.next(); ok {
			s.now.Store(int64(at))
		}
	})
	s.engine.do(func(*core) {})
}

// transcript replays one golden file.
type transcript struct {
	t       *testing.T
	mu      sync.Mutex
	engines map[string]*stepped
	stop    chan struct{}
	wg      sync.WaitGroup
}

func (x *transcript) drive() {
	defer x.wg.Done()
	for {
		select {
		case <-x.stop:
			return
		case <-time.After(200 * time.Microsecond):
		}
		x.mu.Lock()
		for _, e := range x.engines {
			if !e.ended.Load() {
				e.step()
			}
		}
		x.mu.Unlock()
	}
}

func (x *transcript) close() {
	close(x.stop)
	x.wg.Wait()
	for _, e := range x.engines {
		e.kill()
	}
}

func scanArg[T any](t *testing.T, d *datadriven.TestData, key string, to *T) {
	if d.HasArg(key) {
		d.ScanArgs(t, key, to)
	}
}

// engine starts one: engine name=… mode=… and flags.
func (x *transcript) engine(d *datadriven.TestData) string {
	cfg := Config{ModelPath: "m", Seed: 1, HealthDelay: time.Millisecond, RouteRetry: time.Millisecond}
	var name, mode string
	d.ScanArgs(x.t, "name", &name)
	scanArg(x.t, d, "mode", &mode)
	cfg.Mode = Mode(mode)
	scanArg(x.t, d, "page", &cfg.PageSize)
	scanArg(x.t, d, "tokens", &cfg.MaxTotalTokens)
	scanArg(x.t, d, "context", &cfg.ContextLength)
	scanArg(x.t, d, "interval", &cfg.StreamInterval)
	scanArg(x.t, d, "key", &cfg.APIKey)
	cfg.EnableCacheReport = d.HasArg("cache-report")
	cfg.DecodeRadix = d.HasArg("radix")
	cfg.ConditionalAgg = d.HasArg("conditional-agg")
	cfg.IncrementalStream = d.HasArg("incremental")
	if d.HasArg("waiting-timeout-ms") {
		var ms int
		d.ScanArgs(x.t, "waiting-timeout-ms", &ms)
		cfg.WaitingTimeout = time.Duration(ms) * time.Millisecond
		cfg.BootstrapTimeout = cfg.WaitingTimeout
	}
	e := &stepped{}
	e.node = bootWith(x.t, cfg, func(s *Server) {
		s.engine.clock = func() time.Duration { return time.Duration(e.now.Load()) }
	})
	x.mu.Lock()
	x.engines[name] = e
	x.mu.Unlock()
	return "ok\n"
}

func (x *transcript) named(d *datadriven.TestData, key string) *stepped {
	var name string
	d.ScanArgs(x.t, key, &name)
	e := x.engines[name]
	if e == nil {
		d.Fatalf(x.t, "no engine is called %q", name)
	}
	return e
}

// body replaces $p (an engine's name) by the port of that engine's bootstrap
// server.
func (x *transcript) body(s string) string {
	for name, e := range x.engines {
		s = strings.ReplaceAll(s, "$"+name, fmt.Sprint(e.BootstrapPort()))
	}
	return s
}

func (x *transcript) run(d *datadriven.TestData) string {
	method, path := http.MethodPost, ""
	scanArg(x.t, d, "method", &method)
	scanArg(x.t, d, "path", &path)
	switch d.Cmd {
	case "engine":
		return x.engine(d)
	case "request":
		return show(x.named(d, "to").do(x.t.Context(), method, path, x.body(d.Input)))
	case "bootstrap":
		e := x.named(d, "to")
		at := fmt.Sprintf("http://127.0.0.1:%d", e.BootstrapPort())
		return show(e.doAt(x.t.Context(), method, at+path, d.Input))
	case "pair":
		pair := pd{x.named(d, "p").node, x.named(d, "d").node}
		p, dd := pair.both(path, x.body(d.Input))
		return "prefill: " + show(p) + "decode: " + show(dd)
	}
	d.Fatalf(x.t, "unknown command %q", d.Cmd)
	return ""
}

// show normalises what differs from run to run: drawn ids, times, ports.
func show(r reply) string {
	if r.err != nil {
		return "error: " + r.err.Error() + "\n"
	}
	for _, n := range normal() {
		r.body = n.re.ReplaceAllString(r.body, n.to)
	}
	return fmt.Sprintf("%d %s\n%s\n", r.status, r.kind, strings.TrimSuffix(r.body, "\n"))
}

type rule struct {
	re *regexp.Regexp
	to string
}

func normal() []rule {
	return []rule{
		{regexp.MustCompile(`\b[0-9a-f]{32}\b`), "RID"},
		{regexp.MustCompile(`"created":\d+`), `"created":0`},
		{regexp.MustCompile(`"e2e_latency":[0-9.e-]+`), `"e2e_latency":0`},
		{regexp.MustCompile(`"response_sent_to_client_ts":[0-9.e+]+`), `"response_sent_to_client_ts":0`},
		{regexp.MustCompile(`"timestamp":[0-9.e+]+`), `"timestamp":0`},
		{regexp.MustCompile(`"timestamp":"[^"]+"`), `"timestamp":""`},
		{regexp.MustCompile(`"(rank_port|prefill_http_port|port|disaggregation_bootstrap_port)":\d+`), `"$1":0`},
		{regexp.MustCompile(`"(ts_tic|gen_throughput|last_gen_throughput)":[0-9.e+-]+`), `"$1":0`},
		{regexp.MustCompile(`"total_prefill_busy_us":\d+`), `"total_prefill_busy_us":0`},
		{regexp.MustCompile(`127\.0\.0\.1:\d+`), "127.0.0.1:PORT"},
	}
}

// TestGolden replays the transcripts of testdata/golden. Each one names, in a
// comment, the part of docs/sglang-contract.md that it holds the emulator to.
func TestGolden(t *testing.T) {
	datadriven.Walk(t, "testdata/golden", func(t *testing.T, path string) {
		x := &transcript{t: t, engines: map[string]*stepped{}, stop: make(chan struct{})}
		x.wg.Add(1)
		go x.drive()
		defer x.close()
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			x.t = t
			return x.run(d)
		})
	})
}

// Every transcript must say which part of the contract it speaks for.
func TestGoldenFilesNameTheContract(t *testing.T) {
	seen := 0
	datadriven.Walk(t, "testdata/golden", func(t *testing.T, path string) {
		seen++
		b := datadrivenHeader(t, path)
		if !strings.HasPrefix(b, "# ") || !strings.Contains(b, "contract §") {
			t.Errorf("%s: the first line must be a comment that names a contract section", path)
		}
	})
	if seen < 10 {
		t.Errorf("%d transcripts, want at least 10", seen)
	}
}

func datadrivenHeader(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}
