package kit

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/router/sidecar"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// Options describe a pool. The zero value is one decode worker and no prefill
// worker behind real sidecars, on the ConditionalAggregation profile.
type Options struct {
	Decode, Prefill int
	Path            kvc.DirectPath
	// Peers puts mock sidecars in the place of the real ones.
	Peers bool
	// NoHint keeps mock sidecars from answering hint probes, so that every
	// question comes by RPC.
	NoHint bool

	PoolToken string // between router and sidecars; "" = open
	EngineKey string // between sidecars and engines; "" = none
	Aliases   []string
	Capacity  int           // tokens of each decode engine
	Transfer  time.Duration // of each KV hand-off

	Router  func(*proxy.Options)
	Sidecar func(*sidecar.Config)
	Log     io.Writer // of router and sidecars; nil = discarded
}

// Node is one worker of a pool. Engine is set behind real sidecars, and is the
// Peer's own otherwise.
type Node struct {
	Name    string
	ID      kvc.WorkerID
	Role    fleet.Role
	Engine  *Engine
	Sidecar *sidecar.Sidecar // nil with Peers
	Peer    *Peer            // nil without
	URL     string           // what the router speaks to

	registry *prometheus.Registry
	kill     func()
	close    func()
	dead     atomic.Bool
}

// Pool is a router and its workers on real sockets.
type Pool struct {
	t       testing.TB
	opt     Options
	Router  *proxy.Proxy
	Metrics *telemetry.Router
	D, P    []*Node
	Base    string // the data port's URL
	Addr    string
	Client  *http.Client

	rooms  *Rooms
	tokens *admission.Tokens
	log    *slog.Logger
	admin  *httptest.Server
	close  func()
}

// New starts a pool and waits until the router follows every worker. At the
// test's end it is closed, and what must be back at zero is checked.
func New(t testing.TB, o Options) *Pool {
	t.Helper()
	known := goleak.IgnoreCurrent()
	t.Cleanup(func() { noLeaks(t, known) })
	if o.Decode == 0 {
		o.Decode = 1
	}
	if o.Path == "" {
		o.Path = kvc.ConditionalAggregation
	}
	p := &Pool{t: t, opt: o, rooms: new(Rooms), log: slog.New(slog.DiscardHandler)}
	if o.Log != nil {
		p.log = slog.New(slog.NewTextHandler(o.Log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	if o.PoolToken != "" {
		p.tokens = admission.StaticTokens(o.PoolToken)
	}
	for i := range o.Decode {
		p.D = append(p.D, p.node(fleet.Decode, i))
	}
	for i := range o.Prefill {
		p.P = append(p.P, p.node(fleet.Prefill, i))
	}
	p.startRouter()
	t.Cleanup(p.Close)
	p.Ready()
	return p
}

// noLeaks waits until no goroutine of the test's is left. net/http lets one
// linger for half a second after it cut an upload, longer than goleak waits.
func noLeaks(t testing.TB, known goleak.Option) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(Patience / 2); time.Now().Before(deadline); {
		if err = goleak.Find(known); err == nil {
			return
		}
	}
	t.Error(err)
}

// node starts one worker.
func (p *Pool) node(role fleet.Role, i int) *Node {
	n := &Node{Name: fmt.Sprintf("%s-%d", role, i), Role: role}
	n.ID = kvc.WorkerID(fmt.Sprintf("uid-%s-%d-%s", role, i, hex32()[:8]))
	p.startNode(n)
	return n
}

func (p *Pool) startNode(n *Node) {
	if p.opt.Peers {
		n.Peer = NewPeer(p.t, "127.0.0.1:0",
			PeerConfig{ID: n.ID, Role: n.Role, Path: p.opt.Path, Tokens: p.tokens, Rooms: p.rooms, NoHint: p.opt.NoHint})
		n.Engine, n.URL, n.close = n.Peer.Engine, n.Peer.URL(), n.Peer.Stop
		return
	}
	mode := string(n.Role)
	if p.opt.Path == kvc.Unified {
		mode = "null"
	}
	capacity := 0
	if n.Role == fleet.Decode {
		capacity = p.opt.Capacity
	}
	n.Engine = NewEngine(p.t, "127.0.0.1:0", EngineConfig{Role: n.Role, Mode: mode, Tokens: capacity,
		Key: p.opt.EngineKey, Rooms: p.rooms, Transfer: p.opt.Transfer})
	p.startSidecar(n)
}

// startSidecar runs a real sidecar, wired as cmd/sidecar does.
func (p *Pool) startSidecar(n *Node) {
	n.registry = prometheus.NewPedanticRegistry()
	cfg := sidecar.Config{
		Worker: string(n.ID), Pod: n.Name, Role: n.Role, DirectPath: p.opt.Path,
		EngineURL: n.Engine.URL(), EngineKey: p.opt.EngineKey, Tokens: p.tokens,
		Poll: 25 * time.Millisecond, Registry: n.registry, Log: p.log,
	}
	if p.opt.Sidecar != nil {
		p.opt.Sidecar(&cfg)
	}
	s, err := sidecar.New(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	n.Sidecar = s
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.Run(ctx) })
	l, url := p.listen()
	n.URL = url
	srv := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug)}
	wg.Go(func() { _ = srv.Serve(l) })
	n.kill = func() {
		n.dead.Store(true)
		_ = srv.Close()
	}
	n.close = func() {
		stop()
		_ = srv.Close()
		wg.Wait()
	}
}

func (p *Pool) listen() (net.Listener, string) {
	var lc net.ListenConfig
	l, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		p.t.Fatal(err)
	}
	return l, "http://" + l.Addr().String()
}

// startRouter runs the real router, wired as cmd/router does.
func (p *Pool) startRouter() {
	p.Metrics = telemetry.NewRouter()
	o := proxy.Options{Tokens: p.tokens, Metrics: p.Metrics, Log: p.log, AskTimeout: 5 * time.Second}
	if p.opt.Router != nil {
		p.opt.Router(&o)
	}
	p.Router = proxy.New(o)
	p.Apply()
	l, base := p.listen()
	p.Base, p.Addr = base, l.Addr().String()
	srv := &http.Server{Handler: p.Router.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug)}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	p.admin = httptest.NewServer(p.Router.Admin())
	transport := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}
	p.Client = &http.Client{Transport: transport}
	p.close = sync.OnceFunc(func() {
		transport.CloseIdleConnections()
		_ = srv.Close()
		wg.Wait()
		p.admin.Close()
		p.Router.Close()
	})
}

// Apply tells the router the fleet as it stands.
func (p *Pool) Apply() {
	f := &fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "local", Name: "test", Model: Model, Aliases: p.opt.Aliases}}
	for _, n := range p.Nodes() {
		w := fleet.Worker{Name: n.Name, ID: n.ID, Role: n.Role, URL: n.URL, State: fleet.Active}
		if n.Role == fleet.Prefill {
			w.Bootstrap = &fleet.Bootstrap{Host: "127.0.0.1", Port: 8998}
		}
		f.Workers = append(f.Workers, w)
	}
	p.Router.Apply(f)
}

// Nodes are all workers, decode first.
func (p *Pool) Nodes() []*Node { return append(slices.Clone(p.D), p.P...) }

// Ready waits until the router trusts every feed and, for workers that give
// hints, knows so.
func (p *Pool) Ready() {
	p.t.Helper()
	for _, n := range p.Nodes() {
		if n.Sidecar != nil {
			p.Eventually("sidecar "+n.Name+" ready", func() bool { return n.Status(p).Ready })
		}
	}
	p.Eventually("feeds trusted and hints probed", func() bool {
		s := p.Router.Status()
		for _, w := range s.Workers {
			if !w.Trusted {
				return false
			}
		}
		return len(s.Workers) == len(p.Nodes()) && p.Metric("kvc_router_hint_probes_total") >= float64(len(p.D))
	})
}

// Kill ends the worker's real sidecar as a kill -9 would: every connection
// breaks, nothing is drained.
func (n *Node) Kill() { n.kill() }

// Status is the real sidecar's.
func (n *Node) Status(p *Pool) admission.SidecarStatus {
	p.t.Helper()
	c := &admission.Client{HTTP: p.Client, Tokens: p.tokens}
	s, err := c.Status(context.Background(), n.URL)
	if err != nil {
		p.t.Fatalf("status of %s: %v", n.Name, err)
	}
	return s
}

// Eventually polls for states that have no event.
func (p *Pool) Eventually(what string, ok func() bool) {
	p.t.Helper()
	for deadline := time.Now().Add(Patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("waited in vain until %s", what)
		}
	}
}

// Do sends a request and reads the whole answer.
func (p *Pool) Do(r Request) Answer {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 6*Patience)
	defer cancel()
	resp, err := p.Client.Do(r.build(ctx, p.t, p.Base))
	if err != nil {
		return Answer{Err: err}
	}
	return read(resp)
}

func read(resp *http.Response) Answer {
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return Answer{Status: resp.StatusCode, Header: resp.Header, Body: string(b), Err: err}
}

// OK is Do for a request that has to succeed.
func (p *Pool) OK(r Request) Answer {
	p.t.Helper()
	a := p.Do(r)
	if a.Err != nil || a.Status != http.StatusOK {
		p.t.Fatalf("status %d, %v: %s", a.Status, a.Err, a.Body)
	}
	return a
}

// Start sends a request and returns when cancel or the answer's head ends it;
// done is closed when the client has seen the end.
func (p *Pool) Start(r Request) (cancel func(), done <-chan Answer) {
	p.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	req := r.build(ctx, p.t, p.Base)
	out := make(chan Answer, 1)
	go func() {
		defer stop()
		resp, err := p.Client.Do(req)
		if err != nil {
			out <- Answer{Err: err}
			return
		}
		out <- read(resp)
	}()
	return stop, out
}

// Settled waits until the router's belief has caught up with every feed, so
// that the next turn is routed by what the last one left.
func (p *Pool) Settled() {
	p.t.Helper()
	p.Eventually("beliefs have settled", func() bool {
		seqs := map[string]uint64{}
		for _, w := range p.Router.Status().Workers {
			seqs[w.Worker] = w.Seq
		}
		for _, n := range p.Nodes() {
			seq, idle := n.seq(p)
			if !idle || seqs[string(n.ID)] != seq {
				return false
			}
		}
		return true
	})
}

// seq is that of the worker's last change, and whether it runs no turn.
func (n *Node) seq(p *Pool) (seq uint64, idle bool) {
	if n.Peer != nil {
		return n.Peer.feed.Seq(), true
	}
	s := n.Status(p)
	return s.Seq, s.InFlight == 0
}

// Metric is the sum of a router metric's series that carry the given labels; of
// a histogram, the number of observations.
func (p *Pool) Metric(name string, labels ...string) float64 {
	p.t.Helper()
	return gather(p.t, p.Metrics.Registry(), name, labels...)
}

// Metric is the same of the node's real sidecar.
func (n *Node) Metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	return gather(t, n.registry, name, labels...)
}

func gather(t testing.TB, g prometheus.Gatherer, name string, labels ...string) float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	total := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			have := map[string]string{}
			for _, l := range m.GetLabel() {
				have[l.GetName()] = l.GetValue()
			}
			match := true
			for i := 0; i+1 < len(labels); i += 2 {
				match = match && have[labels[i]] == labels[i+1]
			}
			if match {
				total += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return total
}

// Quiet waits until nothing is left of any turn: router gauges, sidecar leases,
// reservations and locks (R56).
func (p *Pool) Quiet() {
	p.t.Helper()
	var left string
	quiet := func() bool { left = p.busy(); return left == "" }
	for deadline := time.Now().Add(Patience); !quiet(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Errorf("not quiet: %s", left)
			return
		}
	}
}

// busy names something that is not back at zero.
func (p *Pool) busy() string {
	for _, g := range []string{"kvc_router_requests_inflight", "kvc_router_inflight"} {
		if v := p.Metric(g); v != 0 {
			return fmt.Sprintf("%s = %v", g, v)
		}
	}
	for _, w := range p.Router.Status().Workers {
		if w.InFlight != 0 {
			return fmt.Sprintf("the router believes %d turns on %s", w.InFlight, w.Pod)
		}
	}
	for _, n := range p.Nodes() {
		if n.Sidecar == nil || n.dead.Load() {
			continue
		}
		if s := n.Status(p); s.InFlight != 0 || s.Reserved != 0 || s.Locked != 0 {
			return fmt.Sprintf("%s: in flight %d, reserved %d, locked %d", n.Name, s.InFlight, s.Reserved, s.Locked)
		}
	}
	return ""
}

// Close checks that the pool is quiet and ends it.
func (p *Pool) Close() {
	p.t.Helper()
	if !p.t.Failed() {
		p.Quiet()
	}
	p.close()
	for _, n := range p.Nodes() {
		n.close()
	}
	for purpose := range map[string]bool{"data": true, "admission": true, "feed": true} {
		p.await("open connections, "+purpose, func() bool {
			return p.Metric("kvc_router_open_connections", "purpose", purpose) == 0
		})
	}
}

// await is Eventually for a test that may have failed already.
func (p *Pool) await(what string, ok func() bool) {
	for deadline := time.Now().Add(Patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Errorf("left behind: %s", what)
			return
		}
	}
}
