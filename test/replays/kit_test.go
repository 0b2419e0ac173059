package replays

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
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
	"github.com/kvc-dev/kvc/router/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	model    = "Qwen/Qwen3-32B"
	patience = 30 * time.Second
)

// pool is a 1P3D (on Unified 0P4D) pool behind a router, with a recorder in front of each decode
// engine and one in the client.
type pool struct {
	t      *testing.T
	scale  float64
	tokens *admission.Tokens
	proxy  *proxy.Proxy
	router *httptest.Server
	file   *fleet.File

	engines []func() // stop them

	sent     *hashes // what the client sent
	received *hashes // what decode engines read, without the spliced members
}

func newPool(t *testing.T, path kvc.DirectPath, scale float64) *pool {
	t.Helper()
	p := &pool{t: t, scale: scale, tokens: admission.StaticTokens("pool-token"), sent: newHashes(), received: newHashes(),
		file: &fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "ns", Name: "pool", Model: model}}}
	decode := 4
	if path != kvc.Unified { // a null-mode engine cannot receive KV
		p.add("prefill-0", fleet.Prefill, path)
		decode = 3
	}
	for i := range decode {
		p.add(fmt.Sprintf("decode-%d", i), fleet.Decode, path)
	}
	p.proxy = proxy.New(proxy.Options{Params: kvc.Corrected().Scaled(scale), TimeScale: scale, Tokens: p.tokens,
		AskTimeout: 2 * time.Second, // the machine may be busy with other tests
		Metrics:    telemetry.NewRouter(), Log: slog.New(slog.DiscardHandler), MaxBody: 64 << 20})
	p.router = httptest.NewServer(p.proxy.Handler())
	t.Cleanup(func() {
		for _, stop := range p.engines { // first: legs that wait for their peer end with their engine
			stop()
		}
		p.router.Close()
		p.proxy.Close()
	})
	p.proxy.Apply(p.file)
	p.eventually("every feed trusted", func() bool {
		s := p.proxy.Status().Workers
		return len(s) == 4 && !slices.ContainsFunc(s, func(w admission.RouterWorker) bool { return !w.Trusted })
	})
	return p
}

// add starts an engine, its recorder and its sidecar.
func (p *pool) add(name string, role fleet.Role, path kvc.DirectPath) {
	p.t.Helper()
	engine := p.engine(role, path)
	address := "http://" + engine.Addr()
	if role == fleet.Decode {
		address = p.recorder(address)
	}
	id := uuid.NewString()
	s, err := sidecar.New(sidecar.Config{Worker: id, Pod: name, Role: role, DirectPath: path, EngineURL: address,
		Tokens: p.tokens, TimeScale: p.scale, Log: slog.New(slog.DiscardHandler), Poll: 100 * time.Millisecond})
	if err != nil {
		p.t.Fatal(err)
	}
	srv := httptest.NewServer(s.Handler())
	ctx, cancel := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() { s.Run(ctx) })
	p.t.Cleanup(func() { cancel(); loops.Wait(); srv.CloseClientConnections(); srv.Close() })
	w := fleet.Worker{Name: name, ID: kvc.WorkerID(id), Role: role, URL: srv.URL, State: fleet.Active}
	if role == fleet.Prefill {
		w.Bootstrap = &fleet.Bootstrap{Host: "127.0.0.1", Port: engine.BootstrapPort()}
	}
	p.file.Workers = append(p.file.Workers, w)
}

func (p *pool) engine(role fleet.Role, path kvc.DirectPath) *emulator.Server {
	p.t.Helper()
	cfg := emulator.Config{ModelPath: model, TimeScale: p.scale, Seed: 1, EnableCacheReport: true, PageSize: 64,
		MaxTotalTokens: 600_000, ContextLength: 262_144, BootstrapPort: -1, Mode: emulator.ModePrefill}
	switch {
	case role == fleet.Prefill:
	case path == kvc.Unified:
		cfg.Mode = emulator.ModeNull
	default:
		cfg.Mode, cfg.DecodeRadix = emulator.ModeDecode, true
		cfg.ConditionalAgg = path == kvc.ConditionalAggregation
	}
	e, err := emulator.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() { _ = e.Run(ctx) })
	stop := sync.OnceFunc(func() { cancel(); loops.Wait(); e.Close() })
	p.t.Cleanup(stop)
	p.engines = append(p.engines, stop)
	return e
}

// recorder passes everything to an engine and keeps the hash of each turn.
func (p *pool) recorder(engine string) string {
	target, err := url.Parse(engine)
	if err != nil {
		p.t.Fatal(err)
	}
	transport := &http.Transport{}
	pass := &httputil.ReverseProxy{FlushInterval: -1, Transport: transport,
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
		ErrorLog:     slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/chat/completions" {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			if len(body) > probeBytes {
				p.received.add(without(body, spliced()...))
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		pass.ServeHTTP(w, r)
	}))
	p.t.Cleanup(func() { srv.CloseClientConnections(); srv.Close(); transport.CloseIdleConnections() })
	return srv.URL
}

// probeBytes is more than a sidecar's own question to its engine has, and less
// than any recorded turn.
const probeBytes = 1 << 10

// spliced are the members that sidecars add (wire.md §1).
func spliced() []string {
	return []string{"rid", "do_local_prefill", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
}

// client is an HTTP client that keeps the hash of each body it sends.
func (p *pool) client() *http.Client {
	base := &http.Transport{MaxIdleConnsPerHost: 16}
	p.t.Cleanup(base.CloseIdleConnections)
	return &http.Client{Transport: roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodPost {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return nil, err
			}
			p.sent.add(body)
			r = r.Clone(r.Context())
			r.Body = io.NopCloser(bytes.NewReader(body))
		}
		return base.RoundTrip(r)
	})}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (p *pool) eventually(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("%s did not come true within %v", what, patience)
		}
	}
}

// hashes counts bodies by their hash.
type hashes struct {
	mu sync.Mutex
	n  map[[sha256.Size]byte]int
	of map[[sha256.Size]byte]string // the start of the body
}

func newHashes() *hashes {
	return &hashes{n: make(map[[sha256.Size]byte]int), of: make(map[[sha256.Size]byte]string)}
}

func (h *hashes) add(body []byte) {
	sum := sha256.Sum256(body)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.n[sum]++
	h.of[sum] = fmt.Sprintf("%d bytes: %.120s", len(body), body)
}

// missing describes the bodies of h that other never saw.
func (h *hashes) missing(other *hashes) (list []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	other.mu.Lock()
	defer other.mu.Unlock()
	for sum := range h.n {
		if other.n[sum] == 0 {
			list = append(list, h.of[sum])
		}
	}
	return list
}

// without removes top-level members and one comma each, leaving all other bytes
// alone. It is written on encoding/json, so that it shares nothing with the
// scanner whose work it judges.
func without(body []byte, names ...string) []byte {
	d := json.NewDecoder(bytes.NewReader(body))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return body
	}
	var out []byte
	done, first := 1, true // body[:done] is handled; it ends with the brace
	out = append(out, body[:1]...)
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return body
		}
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return body
		}
		end := int(d.InputOffset())
		if name, ok := key.(string); !ok || !slices.Contains(names, name) {
			member := body[done:end] // with the comma before it
			if i := bytes.IndexByte(member, ','); first && done > 1 {
				out, member = append(out, member[:i]...), member[i+1:]
			}
			out, first = append(out, member...), false
		}
		done = end
	}
	return append(out, body[done:]...)
}

// traces is the folder of the published traces.
func traces(t *testing.T) string {
	t.Helper()
	dir := os.Getenv("KVC_TRACES")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared", "traces")
	}
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("no trace files here (set KVC_TRACES to their folder): %v", err)
	}
	return dir
}

func decode(t *testing.T, path string, o trace.Options) []trace.Session {
	t.Helper()
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("this trace is not here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	o.Name = path
	tr, err := trace.Decode(f, o)
	if err != nil {
		t.Fatal(err)
	}
	trace.LongestThink(tr.Records, time.Minute)
	return tr.Sessions()
}
