package proxy

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/session"
	"github.com/kvc-dev/kvc/router/state"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// Options configure a Proxy. Zero values mean the defaults named here.
type Options struct {
	Params  kvc.Params     // already scaled; default kvc.Corrected
	Session session.Config // default session.Default
	// SessionTTL is how long a session is remembered, scaled; default 15 min.
	SessionTTL time.Duration

	MaxBody     int64         // largest request body in bytes, decoded; default 64 MiB (R25)
	IdleTimeout time.Duration // silence of a worker that ends a turn; default 10 min (R12)
	AskTimeout  time.Duration // an unanswered question is unknown after this; default 50 ms
	DialTimeout time.Duration // default 3 s
	// SettleTimeout is how long the first turns wait at most for the feeds of the
	// first workers; default 2 s.
	SettleTimeout time.Duration
	// AsksPerWorker bounds the questions in flight to one worker; default 64 (R81).
	AsksPerWorker int
	// KeepBillingHeader turns R125 off.
	KeepBillingHeader bool
	// Preset, if not empty, replaces a routing file's preset.
	Preset v1alpha1.RoutingPreset
	// Override applies command line flags to the constants of a routing file.
	Override func(*kvc.Params)
	// TimeScale divides the durations of a routing file; default 1.
	TimeScale float64

	Tokens  *admission.Tokens // nil = an open pool
	Metrics *telemetry.Router // default: one of its own
	Log     *slog.Logger      // default: discard
}

// DefaultMaxBody is the default of Options.MaxBody.
const DefaultMaxBody = 64 << 20

func (o *Options) setDefaults() {
	if o.Params.Preset == "" {
		o.Params = kvc.Corrected()
	}
	if len(o.Session.Headers)+len(o.Session.BodyFields) == 0 {
		o.Session = session.Default()
	}
	def(&o.MaxBody, DefaultMaxBody)
	def(&o.IdleTimeout, 10*time.Minute)
	def(&o.SettleTimeout, settleMost)
	def(&o.AskTimeout, 50*time.Millisecond)
	def(&o.DialTimeout, 3*time.Second)
	def(&o.AsksPerWorker, 64)
	def(&o.TimeScale, 1)
	if o.Metrics == nil {
		o.Metrics = telemetry.NewRouter()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

func def[T int | int64 | float64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// Proxy is one router: its beliefs, its connections, its two handlers. It
// stores nothing that the workers' feeds cannot rebuild.
type Proxy struct {
	opt       Options
	id        string
	started   time.Time
	metrics   *telemetry.Router
	log       *slog.Logger
	state     *state.State
	out       *outbound
	client    *admission.Client
	session   atomic.Pointer[session.Config]
	askLimit  atomic.Int64 // ns
	config    atomic.Pointer[string]
	fleet     atomic.Pointer[fleet.File]
	decisions *decisionLog
	settling  *settling

	mu      sync.Mutex // one change of the fleet at a time
	workers atomic.Pointer[map[kvc.WorkerID]*worker]
	life    context.Context // of the followers
	die     context.CancelFunc

	rooms      rooms
	series     series
	bufs       sync.Pool // *bytes.Buffer
	relayBufs  sync.Pool // *[]byte
	scratch    sync.Pool // *block.Scratch
	background sync.WaitGroup
	closing    atomic.Bool
	classes    classCounters
}

// New returns a router that knows no workers: give it a fleet with Apply, and
// end it with Close.
func New(o Options) *Proxy {
	o.setDefaults()
	p := &Proxy{
		opt: o, id: newAttemptID(), started: time.Now(), metrics: o.Metrics, log: o.Log,
		state:     state.New(state.Options{Params: o.Params, SessionTTL: o.SessionTTL}),
		out:       newOutbound(o.Tokens, o.Metrics, o.DialTimeout),
		decisions: newDecisionLog(),
		settling:  newSettling(),
	}
	p.series.metrics = o.Metrics
	p.client = p.out.client()
	p.session.Store(&o.Session)
	p.askLimit.Store(int64(o.AskTimeout))
	p.workers.Store(&map[kvc.WorkerID]*worker{})
	p.life, p.die = context.WithCancel(context.Background())
	p.metrics.PinChanges(func() float64 { return float64(p.state.Stats().PinChanges) })
	return p
}

// Reconfigure takes a routing file's constants; turns under way keep theirs.
// hash is the file's config_hash.
func (p *Proxy) Reconfigure(f *v1alpha1.RoutingFile, hash string) {
	routing := f.Routing
	if p.opt.Preset != "" {
		routing.Preset = p.opt.Preset
	}
	params := routing.Params()
	if p.opt.Override != nil {
		p.opt.Override(&params)
	}
	p.state.SetParams(params.Scaled(p.opt.TimeScale))
	if ms := f.Routing.Admission.TimeoutMilliseconds; ms != nil {
		p.askLimit.Store(int64(time.Duration(*ms) * time.Millisecond))
	}
	cfg := session.Default()
	if len(f.Session.Headers)+len(f.Session.BodyFields) > 0 {
		cfg.Headers, cfg.BodyFields = f.Session.Headers, f.Session.BodyFields
	}
	p.session.Store(&cfg)
	p.config.Store(&hash)
}

func (p *Proxy) askTimeout() time.Duration { return time.Duration(p.askLimit.Load()) }

// worker returns a worker of the fleet; nil when it is not (any more) one.
func (p *Proxy) worker(id kvc.WorkerID) *worker { return (*p.workers.Load())[id] }

// path is the decode workers' engine profile for a surface; "" = unknown. A
// pool has one.
func (p *Proxy) path(route block.Route) kvc.DirectPath {
	for _, w := range *p.workers.Load() {
		if d := w.path(route); w.Role == fleet.Decode && d != "" {
			return d
		}
	}
	return ""
}

// disaggregated reports whether turns of a surface run on two workers.
func (p *Proxy) disaggregated(route block.Route) bool {
	if path := p.path(route); path != "" {
		return path != kvc.Unified
	}
	for _, w := range *p.workers.Load() {
		if w.Role == fleet.Prefill {
			return true
		}
	}
	return false
}

// lineage is the root session's key (Q5): what the workers say, else the
// parent's, else the session itself.
func (p *Proxy) lineage(s, parent kvc.SessionKey) kvc.SessionKey {
	if l, _, ok := p.state.Known(s); ok && l != "" {
		return l
	}
	if parent == "" || parent == s {
		return s
	}
	if l, _, ok := p.state.Known(parent); ok && l != "" {
		return l
	}
	return parent
}

// tokens converts a chain's length; the ratio counts, it never cuts (Q17).
func (p *Proxy) tokens(c *block.Chain) int {
	if c.IDs > 0 {
		return c.IDs
	}
	return int(float64(c.Bytes) / block.Bytes * p.state.TokensPerBlock())
}

func (p *Proxy) relayBuf() *[]byte {
	if b, ok := p.relayBufs.Get().(*[]byte); ok {
		return b
	}
	b := make([]byte, relayBuffer)
	return &b
}

func (p *Proxy) recycle(b *bytes.Buffer) {
	if b.Cap() <= pooledMost {
		b.Reset()
		p.bufs.Put(b)
	}
}

// Shutdown refuses new turns and makes the router unready; turns under way go
// on (R111). Close follows when they have ended or may no longer.
func (p *Proxy) Shutdown() { p.closing.Store(true) }

// Close ends the followers and waits for what runs in the background.
func (p *Proxy) Close() {
	p.Shutdown()
	p.mu.Lock()
	ws := *p.workers.Load()
	p.workers.Store(&map[kvc.WorkerID]*worker{})
	p.mu.Unlock()
	p.die()
	for _, w := range ws {
		<-w.done
	}
	p.background.Wait()
	p.out.close()
}

// Handler serves the data port. Whatever is not listed is refused: engine admin
// routes never pass (R117).
func (p *Proxy) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", p.serveTurn(block.Chat))
	mux.HandleFunc("POST /v1/completions", p.serveTurn(block.Completions))
	mux.HandleFunc("POST /generate", p.serveTurn(block.Generate))
	mux.HandleFunc("GET /v1/models", p.serveModels)
	mux.HandleFunc("GET /v1/models/{name...}", p.serveModel)
	mux.HandleFunc("GET /healthz", p.serveHealth)
	mux.HandleFunc("GET /readyz", p.serveReady)
	mux.HandleFunc("/", p.serveUnknown)
	for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/generate"} {
		mux.HandleFunc(path, serveMethod("POST"))
	}
	mux.HandleFunc("/v1/models", serveMethod("GET"))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if unclean(r.URL.Path) {
			p.serveUnknown(w, r) // the mux would redirect, and few clients send a body twice
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// unclean reports whether a path has empty or dot elements.
func unclean(path string) bool {
	return strings.Contains(path, "//") || strings.Contains(path, "/./") || strings.Contains(path, "/../") ||
		strings.HasSuffix(path, "/.") || strings.HasSuffix(path, "/..")
}

func (p *Proxy) serveUnknown(w http.ResponseWriter, r *http.Request) {
	p.metrics.Refused(reasonRoute)
	unknownRoute(r.Method, quotePath(r.URL.Path)).write(w)
}

func quotePath(s string) string {
	if len(s) > 100 {
		s = s[:100] + "…"
	}
	return s
}

func serveMethod(want string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Allow", want)
		(&refusal{status: http.StatusMethodNotAllowed, reason: reasonMethod, code: "method_not_allowed",
			message: "This route takes " + want + " only."}).write(w)
	}
}
