package emulator

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a running engine under test.
type node struct {
	*Server
	t      *testing.T
	client *http.Client
	stop   context.CancelFunc
	done   chan error
	ended  atomic.Bool
}

// boot starts an engine; it is stopped with the test.
func boot(t *testing.T, cfg Config) *node {
	t.Helper()
	n := bootWith(t, cfg, nil)
	t.Cleanup(func() { n.kill() })
	return n
}

func bootWith(t *testing.T, cfg Config, before func(*Server)) *node {
	t.Helper()
	if cfg.ModelPath == "" {
		cfg.ModelPath = "m"
	}
	if cfg.BootstrapPort == 0 && cfg.Mode == ModePrefill {
		cfg.BootstrapPort = -1
	}
	s, err := New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	if before != nil {
		before(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	n := &node{
		Server: s, t: t, stop: cancel, done: make(chan error, 1),
		client: &http.Client{Transport: &http.Transport{}},
	}
	go func() { n.done <- s.Run(ctx) }()
	return n
}

// kill ends the engine as SIGKILL would: connections break, nothing is drained.
func (n *node) kill() {
	if n.ended.Swap(true) {
		return
	}
	n.crash("killed by the test")
	<-n.done
	n.stop()
	n.client.CloseIdleConnections()
}

func (n *node) url(path string) string { return "http://" + n.Addr() + path }

// reply is a whole HTTP answer.
type reply struct {
	status int
	kind   string
	body   string
	err    error
}

func (n *node) do(ctx context.Context, method, path, body string) reply {
	return n.doAt(ctx, method, n.url(path), body)
}

func (n *node) doAt(ctx context.Context, method, url, body string) reply {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return reply{err: err}
	}
	resp, err := n.client.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header.Get("Content-Type"), string(b), err}
}

func (n *node) post(path, body string) reply {
	return n.do(context.Background(), http.MethodPost, path, body)
}

func (n *node) get(path string) reply { return n.do(context.Background(), http.MethodGet, path, "") }

// stream opens a streamed answer and returns once its first bytes are there.
func (n *node) stream(path, body string) (first string, rest io.ReadCloser, hangUp context.CancelFunc) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.url(path), strings.NewReader(body))
	if err != nil {
		n.t.Fatal(err)
	}
	resp, err := n.client.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	buf := make([]byte, 4096)
	k, err := resp.Body.Read(buf)
	if err != nil {
		n.t.Fatalf("read the first bytes: %v", err)
	}
	return string(buf[:k]), resp.Body, cancel
}

// eventually waits for cond, which other goroutines bring about.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// idle waits until the engine holds nothing and checks that the books balance.
func (n *node) idle() {
	n.t.Helper()
	eventually(n.t, "the engine is idle", func() (ok bool) {
		n.engine.read(func(c *core) { ok = len(c.seqs) == 0 })
		return ok
	})
	n.engine.read(func(c *core) {
		mustCheck(n.t, c)
		if c.kv.Held() != 0 || len(c.rooms) != 0 {
			n.t.Errorf("at rest %d tokens are held and %d rooms taken", c.kv.Held(), len(c.rooms))
		}
	})
}

// pd is a pair of engines.
type pd struct{ p, d *node }

func bootPair(t *testing.T, p, d Config) pd {
	t.Helper()
	p.Mode, d.Mode = ModePrefill, ModeDecode
	for _, c := range []*Config{&p, &d} {
		or(&c.TimeScale, 100)
		or(&c.HeartbeatInterval, 200*time.Millisecond)
		or(&c.BootstrapTimeout, 20*time.Second)
		or(&c.RouteRetry, 5*time.Millisecond)
	}
	return pd{boot(t, p), boot(t, d)}
}

// room adds the bootstrap members to a JSON object.
func (x pd) room(body string, room uint64) string {
	return strings.TrimSuffix(body, "}") + fmt.Sprintf(
		`,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%d}`, x.p.BootstrapPort(), room)
}

// both sends one body to both engines at the same time.
func (x pd) both(path, body string) (p, d reply) {
	var wg sync.WaitGroup
	wg.Go(func() { p = x.p.post(path, body) })
	d = x.d.post(path, body)
	wg.Wait()
	return p, d
}

func (r reply) want(t *testing.T, status int, parts ...string) {
	t.Helper()
	if r.err != nil {
		t.Fatalf("request: %v", r.err)
	}
	if r.status != status {
		t.Errorf("status = %d, want %d; body %s", r.status, status, r.body)
	}
	for _, p := range parts {
		if !strings.Contains(r.body, p) {
			t.Errorf("the body lacks %q:\n%s", p, r.body)
		}
	}
}

func events(body string) (data []string) {
	for line := range bytes.SplitSeq([]byte(body), []byte("\n")) {
		if d, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			data = append(data, string(d))
		}
	}
	return data
}

// recorded asks a registry without a socket.
func recorded(g *registry, method, path, body string) reply {
	w := httptest.NewRecorder()
	g.handler().ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return reply{status: w.Code, kind: w.Header().Get("Content-Type"), body: w.Body.String()}
}
