package sidecar

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/sglang"
)

// Sidecar is the program beside one engine. New builds it, Run follows the
// engine, Handler serves the pool.
type Sidecar struct {
	cfg     Config
	started time.Time
	book    *book
	feed    *feed.Server
	metrics *metrics
	engine  *sglang.Client
	data    *http.Transport // turns; control calls share it

	tuned   atomic.Pointer[tuning]
	ready   atomic.Pointer[readiness]
	load    atomic.Pointer[sglang.Load]
	doubted atomic.Bool // the next poll asks who the engine is
	warmed  atomic.Bool // this incarnation passed its first health check and probes
	warming atomic.Bool
	alive   atomic.Bool // output was relayed since the last poll that failed

	suspected chan struct{} // capacity 1: poll now
	tasks     sync.WaitGroup
	ctx       context.Context // of Run, for tasks that outlive one poll

	// Of the poll loop alone.
	identified time.Time
	misses     int
	died       bool // the engine's port was closed since it was last identified
	fix        correction
	polls      atomic.Int64 // that the engine answered; for tests

	evidenceMu  sync.Mutex
	missedTurns int // resident turns in a row that found nothing cached
}

// New checks the configuration and reads the routing file; it contacts nobody.
func New(cfg Config) (*Sidecar, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	transport := sglang.NewTransport()
	s := &Sidecar{
		cfg: cfg, started: cfg.Now(), data: transport,
		engine:    &sglang.Client{Base: cfg.EngineURL, Key: cfg.EngineKey, HTTP: &http.Client{Transport: transport}},
		metrics:   newMetrics(cfg.Registry),
		suspected: make(chan struct{}, 1),
		ctx:       context.Background(),
	}
	s.book = newBook(cfg.Now)
	s.feed = s.newFeed()
	s.book.out = s.feed
	s.load.Store(&sglang.Load{})
	s.ready.Store(&readiness{reason: errNotReady.Error()})
	s.tuned.Store(&tuning{params: cfg.Params.Scaled(cfg.TimeScale)})
	cfg.Registry.MustRegister(newGaugeCollector(s))
	if cfg.RoutingFile != "" {
		if err := s.loadRouting(); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Run follows engine, clock, files and journal until ctx ends, then writes the
// journal a last time. It never waits for the engine: a native sidecar that did
// would keep the engine from starting.
func (s *Sidecar) Run(ctx context.Context) {
	s.ctx = ctx
	for _, loop := range []func(context.Context){s.watch, s.watchLedger, s.watchFiles, s.keepJournal, s.keepFeed} {
		s.tasks.Go(func() { loop(ctx) })
	}
	<-ctx.Done()
	s.tasks.Wait()
	s.data.CloseIdleConnections()
}

// Drain stops taking new sessions, waits until nothing is in flight or ctx
// ends, and then ends what is left; deferred aborts are waited for, which the
// cap bounds. The HTTP server is shut down after it.
func (s *Sidecar) Drain(ctx context.Context) {
	s.book.drain()
	if s.book.idle(ctx) == nil {
		return
	}
	s.book.cut()
	capped, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.AbortCap+controlTimeout)
	defer cancel()
	if err := s.book.idle(capped); err != nil {
		n, _ := s.book.inFlight()
		s.cfg.Log.Warn("turns did not end", "in_flight", n)
	}
}

// cut ends every turn that runs.
func (b *book) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, t := range b.turns {
		t.stop()
	}
}

func (s *Sidecar) lastLoad() *sglang.Load { return s.load.Load() }

// Handler serves everything of wire.md §1–6.
func (s *Sidecar) Handler() http.Handler {
	inner := http.NewServeMux()
	for _, r := range routes {
		inner.HandleFunc("POST "+sglang.Path(r), s.serveTurn(r))
	}
	inner.HandleFunc("GET /v1/models", s.passModels)
	inner.Handle("POST "+admission.PathAdmit, admission.Handler(s.answer))
	inner.HandleFunc("GET "+admission.PathHint, hint)
	inner.HandleFunc("GET "+admission.PathFeed, s.serveFeed)
	inner.HandleFunc("GET "+admission.PathStatus, s.getStatus)
	inner.HandleFunc("GET "+admission.PathSessions, s.getSessions)
	inner.HandleFunc("DELETE "+admission.PathSessions+"/{key}", s.forget)
	inner.HandleFunc("DELETE "+admission.PathLeases+"/{id}", s.releaseLease)
	inner.HandleFunc("PUT "+admission.PathState, s.putState)
	inner.HandleFunc("/", notFound)

	outer := http.NewServeMux()
	outer.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	outer.HandleFunc("GET /readyz", s.readyz)
	outer.Handle("GET /metrics", promhttp.HandlerFor(s.cfg.Registry, promhttp.HandlerOpts{}))
	outer.HandleFunc("GET "+admission.PathPreStop+"/{nonce}", s.preStop)
	outer.Handle("/", s.authorized(inner))
	return signed(outer)
}

// signed marks every answer as ours until the engine's takes its place.
func signed(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set(admission.HeaderWire, admission.WireVersion)
		w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
		next.ServeHTTP(w, r)
	})
}

// authorized lets only the pool in. A 401 has no side effect: nothing was read.
func (s *Sidecar) authorized(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !s.cfg.Tokens.Accepts(r.Header) {
			s.metrics.unauthorized.Inc()
			w.Header().Set("WWW-Authenticate", "Bearer")
			admission.WriteError(w, http.StatusUnauthorized, "missing or unknown bearer token; see the pool's internal secret")
			return
		}
		next.ServeHTTP(w, r)
	})
}

func notFound(w http.ResponseWriter, r *http.Request) {
	admission.WriteError(w, http.StatusNotFound, "no such route: "+r.Method+" "+r.URL.Path)
}

// hint lets a router find out whether 103 answers reach it (wire.md §3).
func hint(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set(admission.HeaderHint, admission.WireVersion)
	w.WriteHeader(http.StatusEarlyHints)
	w.Header().Del(admission.HeaderHint)
	w.WriteHeader(http.StatusNoContent)
}

// readyz is the worker's readiness: the engine is warm.
func (s *Sidecar) readyz(w http.ResponseWriter, _ *http.Request) {
	if r := s.ready.Load(); !r.ready {
		admission.WriteError(w, http.StatusServiceUnavailable, r.reason)
		return
	}
	w.WriteHeader(http.StatusOK)
}

// passModels relays the engine's model list: the router asks only sidecars.
func (s *Sidecar) passModels(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
	defer cancel()
	resp, err := s.forward(ctx, r, nil)
	if err != nil {
		admission.WriteError(w, http.StatusBadGateway, "the engine did not answer")
		return
	}
	defer func() { _ = resp.Body.Close() }()
	rl := &relay{onBytes: func() error { return nil }}
	copyHeader(w.Header(), resp)
	w.WriteHeader(resp.StatusCode)
	if rl.whole(w, resp.Body) != nil {
		panic(http.ErrAbortHandler)
	}
}
