package turns

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/emulator"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/router/sidecar"
	"github.com/kvc-dev/kvc/router/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	model    = "Qwen/Qwen3-32B"
	scale    = 100 // emulated per real time
	patience = 30 * time.Second
)

func testLog() *slog.Logger {
	if os.Getenv("KVC_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return slog.New(slog.DiscardHandler)
}

// pod is an emulator with its sidecar.
type pod struct {
	t       *testing.T
	name    string
	id      string
	role    fleet.Role
	path    kvc.DirectPath
	journal string
	tokens  *admission.Tokens

	engine     *emulator.Server
	stopEngine func()
	sidecar    *http.Server
	addr       string
	stopSide   func(kill bool)
}

func (w *world) newPod(name string, role fleet.Role, path kvc.DirectPath) *pod {
	w.t.Helper()
	p := &pod{t: w.t, name: name, id: uuid.NewString(), role: role, path: path, journal: w.t.TempDir(), tokens: w.tokens}
	p.startEngine()
	p.startSidecar("127.0.0.1:0")
	w.t.Cleanup(func() {
		p.stopSide(false)
		p.stopEngine()
	})
	return p
}

func (p *pod) startEngine() {
	cfg := emulator.Config{ModelPath: model, TimeScale: scale, Seed: 1, EnableCacheReport: true, PageSize: 16,
		MaxTotalTokens: 200000, BootstrapPort: -1, HealthDelay: time.Millisecond, APIKey: "engine-key"}
	switch {
	case p.role == fleet.Prefill:
		cfg.Mode = emulator.ModePrefill
	case p.path == kvc.Unified:
		cfg.Mode = emulator.ModeNull
	default:
		cfg.Mode = emulator.ModeDecode
		cfg.DecodeRadix = true
		cfg.ConditionalAgg = p.path == kvc.ConditionalAggregation
	}
	e, err := emulator.New(cfg, testLog())
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = e.Run(ctx) }()
	p.engine = e
	p.stopEngine = sync.OnceFunc(func() { cancel(); <-done; e.Close() })
}

func (p *pod) startSidecar(addr string) {
	s, err := sidecar.New(sidecar.Config{Worker: p.id, Pod: p.name, Role: p.role, DirectPath: p.path,
		EngineURL: "http://" + p.engine.Addr(), EngineKey: "engine-key", Tokens: p.tokens,
		JournalDir: p.journal, TimeScale: scale, Log: testLog(), Poll: 100 * time.Millisecond, AbortCap: 2 * time.Second})
	if err != nil {
		p.t.Fatal(err)
	}
	var l net.Listener
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if l, err = net.Listen("tcp", addr); err == nil || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx) }()
	srv := &http.Server{Handler: s.Handler(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	p.sidecar, p.addr = srv, l.Addr().String()
	var once sync.Once
	p.stopSide = func(kill bool) {
		once.Do(func() {
			if kill {
				_ = srv.Close()
			}
			cancel()
			<-done
			_ = srv.Close()
			<-served
		})
	}
}

func (p *pod) worker() fleet.Worker {
	w := fleet.Worker{Name: p.name, ID: kvc.WorkerID(p.id), Role: p.role, URL: "http://" + p.addr, State: fleet.Active}
	if p.role == fleet.Prefill {
		w.Bootstrap = &fleet.Bootstrap{Host: "127.0.0.1", Port: p.engine.BootstrapPort()}
	}
	return w
}

// world is a router with its pods.
type world struct {
	t      *testing.T
	tokens *admission.Tokens
	path   kvc.DirectPath
	pods   []*pod
	proxy  *proxy.Proxy
	srv    *httptest.Server
	client *http.Client
}

func newWorld(t *testing.T, path kvc.DirectPath, prefill, decode int) *world {
	t.Helper()
	w := &world{t: t, tokens: admission.StaticTokens("pool-token"), path: path,
		client: &http.Client{Transport: &http.Transport{}}}
	for i := range prefill {
		w.pods = append(w.pods, w.newPod(fmt.Sprintf("prefill-%d", i), fleet.Prefill, path))
	}
	for i := range decode {
		w.pods = append(w.pods, w.newPod(fmt.Sprintf("decode-%d", i), fleet.Decode, path))
	}
	w.startRouter()
	t.Cleanup(w.stopRouter)
	return w
}

func (w *world) startRouter() {
	w.proxy = proxy.New(proxy.Options{Params: kvc.Corrected().Scaled(scale), TimeScale: scale, Tokens: w.tokens,
		AskTimeout: 2 * time.Second, Metrics: telemetry.NewRouter(), Log: testLog()})
	w.srv = httptest.NewServer(w.proxy.Handler())
	w.apply()
	w.eventually("every feed trusted", func() bool {
		for _, s := range w.proxy.Status().Workers {
			if !s.Trusted {
				return false
			}
		}
		return true
	})
	time.Sleep(50 * time.Millisecond) // the hint probes, which no status shows
}

func (w *world) apply() {
	f := &fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "ns", Name: "pool", Model: model, Aliases: []string{"qwen"}}}
	for _, p := range w.pods {
		f.Workers = append(f.Workers, p.worker())
	}
	w.proxy.Apply(f)
}

func (w *world) stopRouter() {
	w.client.CloseIdleConnections()
	w.srv.Close()
	w.proxy.Close()
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("%s did not come true within %v", what, patience)
		}
	}
}

func (w *world) pod(name string) *pod {
	for _, p := range w.pods {
		if p.name == name {
			return p
		}
	}
	w.t.Fatalf("no pod %s", name)
	return nil
}

// synced waits until the router has followed every feed to its end.
func (w *world) synced() {
	w.t.Helper()
	c := admission.Client{HTTP: w.client, Tokens: w.tokens}
	w.eventually("router at every feed's seq", func() bool {
		for _, s := range w.proxy.Status().Workers {
			st, err := c.Status(context.Background(), "http://"+w.pod(s.Pod).addr)
			if err != nil || !s.Trusted || !st.Ready || st.Seq != s.Seq || s.InFlight != 0 || st.InFlight != 0 {
				return false
			}
		}
		return true
	})
}

// talk is a growing chat.
type talk struct {
	w       *world
	session string
	model   string
	msgs    []message
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

type turn struct {
	code   int
	mode   string
	worker string
	text   string
	raw    string
	header http.Header
	err    error
}

// say sends the next turn and appends the answer.
func (c *talk) say(user string, stream bool) turn {
	c.w.t.Helper()
	c.msgs = append(c.msgs, message{"user", user})
	t := c.send(stream)
	c.msgs = append(c.msgs, message{"assistant", t.text})
	return t
}

func (c *talk) send(stream bool) turn {
	c.w.t.Helper()
	body, err := json.Marshal(map[string]any{"model": c.model, "stream": stream, "messages": c.msgs, "max_tokens": 48,
		"ignore_eos": true})
	if err != nil {
		c.w.t.Fatal(err)
	}
	return c.w.post("/v1/chat/completions", body, c.session)
}

func (w *world) post(path string, body []byte, session string) turn {
	w.t.Helper()
	req, err := http.NewRequest(http.MethodPost, w.srv.URL+path, bytes.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	if session != "" {
		req.Header.Set("x-session-id", session)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	raw, err := io.ReadAll(resp.Body)
	t := turn{code: resp.StatusCode, mode: resp.Header.Get(admission.HeaderMode), header: resp.Header,
		worker: resp.Header.Get(admission.HeaderWorker), raw: string(raw), err: err}
	t.text = textOf(t.raw)
	return t
}

// textOf is the generated text of a chat answer, streamed or not.
func textOf(raw string) string {
	type choice struct {
		Message, Delta struct{ Content string }
	}
	var b strings.Builder
	for line := range strings.Lines(raw) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		var v struct{ Choices []choice }
		if json.Unmarshal([]byte(line), &v) == nil {
			for _, c := range v.Choices {
				b.WriteString(c.Message.Content + c.Delta.Content)
			}
		}
	}
	return b.String()
}

func long(s string, n int) string { return strings.Repeat(s+" reads the file and plans. ", n) }
