package emulator

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// maxBody bounds a request body; SGLang itself has no bound.
const maxBody = 256 << 20

// Server is one emulated engine with its sockets.
type Server struct {
	cfg    Config
	log    *slog.Logger
	engine *engine
	start  time.Time

	api, bootstrap, rank net.Listener
	peers                *peers
	rooms                *rooms
	registry             *registry
	metrics              http.Handler

	inflight atomic.Int64
	stopping atomic.Bool
	crashed  chan error
}

// New builds an engine and opens its sockets, so that a port in use is known
// at once. Close it with Run's context, or Close when Run is never called.
func New(cfg Config, log *slog.Logger) (*Server, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, log: log, start: time.Now(), crashed: make(chan error, 1),
		engine: newEngine(cfg.core(), cfg.TimeScale),
	}
	s.peers = newPeers(s)
	s.rooms = newRooms(s)
	s.registry = newRegistry()
	s.engine.perform = s.perform
	s.metrics = newMetrics(s)
	if err := s.listen(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// listen opens the sockets of the engine's mode.
func (s *Server) listen() (err error) {
	open := func(what string, port int) (net.Listener, error) {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", net.JoinHostPort(s.cfg.Host, strconv.Itoa(port)))
		if err != nil {
			return nil, fmt.Errorf("open the %s port: %w; choose another with its flag", what, err)
		}
		return l, nil
	}
	if s.api, err = open("--port", s.cfg.Port); err != nil {
		return err
	}
	s.cfg.Port = port(s.api)
	if s.cfg.Mode != ModePrefill {
		return nil
	}
	if s.bootstrap, err = open("--disaggregation-bootstrap-port", max(s.cfg.BootstrapPort, 0)); err != nil {
		return err
	}
	s.cfg.BootstrapPort = port(s.bootstrap)
	s.rank, err = open("transfer", 0)
	return err
}

func port(l net.Listener) int { return l.Addr().(*net.TCPAddr).Port }

// Addr is the API's address, host:port.
func (s *Server) Addr() string { return s.api.Addr().String() }

// BootstrapPort is the port of the rendezvous; 0 unless the engine prefills.
func (s *Server) BootstrapPort() int {
	if s.bootstrap == nil {
		return 0
	}
	return port(s.bootstrap)
}

// Close closes the sockets of a server that was not run.
func (s *Server) Close() {
	for _, l := range []net.Listener{s.api, s.bootstrap, s.rank} {
		if l != nil {
			_ = l.Close() // nothing was served
		}
	}
}

// errCrash is the end of an engine whose scheduler died.
type errCrash struct{ why string }

func (e *errCrash) Error() string { return "scheduler died: " + e.why }

// Run serves until ctx ends, then drains: health turns 503, requests in flight
// are finished, without a deadline, as SGLang does on SIGTERM (contract §4.1).
// It returns an error when the engine crashed.
func (s *Server) Run(ctx context.Context) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	g, life := errgroup.WithContext(life)
	g.Go(func() error { s.engine.run(life); return nil })
	s.serve(life, g, s.api, s.handler())
	if s.cfg.Mode == ModePrefill {
		s.registry.registerSelf(s)
		s.serve(life, g, s.bootstrap, s.registry.handler())
		s.serve(life, g, s.rank, s.rooms.handler())
	}
	g.Go(func() error {
		select {
		case err := <-s.crashed:
			return err
		case <-ctx.Done():
		case <-life.Done():
			return nil
		}
		s.stopping.Store(true)
		s.drain(life)
		end()
		return nil
	})
	err := g.Wait()
	s.peers.close()
	return err
}

// drainCheck is how often a stopping engine looks whether it is idle; SGLang
// looks every 5 s.
const drainCheck = 20 * time.Millisecond

func (s *Server) drain(ctx context.Context) {
	t := time.NewTicker(drainCheck)
	defer t.Stop()
	for s.inflight.Load() > 0 {
		select {
		case <-t.C:
		case err := <-s.crashed:
			s.log.Error("the scheduler died while draining", "error", err)
			return
		case <-ctx.Done():
			return
		}
	}
}

// flushTime is how long the last answers may take to leave the process.
const flushTime = time.Second

// serve runs one HTTP server until ctx ends. A crash cuts its connections.
func (s *Server) serve(ctx context.Context, g *errgroup.Group, l net.Listener, h http.Handler) {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 30 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	g.Go(func() error {
		<-ctx.Done()
		if s.stopping.Load() {
			flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTime)
			defer cancel()
			_ = srv.Shutdown(flush) // what is left after that is cut
		}
		return srv.Close()
	})
	g.Go(func() error {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve %s: %w", l.Addr(), err)
		}
		return nil
	})
}

// handler routes the engine's API (contract §4, §6).
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	both := func(path string, h http.HandlerFunc) {
		mux.HandleFunc("GET "+path, h)
		mux.HandleFunc("POST "+path, h)
	}
	mux.HandleFunc("POST /generate", s.generation(surfaceGenerate))
	mux.HandleFunc("PUT /generate", s.generation(surfaceGenerate))
	mux.HandleFunc("POST /v1/chat/completions", s.generation(surfaceChat))
	mux.HandleFunc("POST /v1/completions", s.generation(surfaceCompletions))
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /health_generate", s.health)
	mux.HandleFunc("GET /ping", s.health)
	mux.HandleFunc("GET /v1/models", s.models)
	mux.HandleFunc("GET /v1/models/{id...}", s.model)
	mux.HandleFunc("GET /model_info", s.modelInfo)
	mux.HandleFunc("GET /get_model_info", s.modelInfo)
	mux.HandleFunc("GET /server_info", s.serverInfo)
	mux.HandleFunc("GET /get_server_info", s.serverInfo)
	mux.HandleFunc("GET /v1/loads", s.loads)
	mux.HandleFunc("GET /get_load", s.getLoad)
	mux.HandleFunc("POST /tokenize", s.tokenize)
	mux.HandleFunc("POST /v1/tokenize", s.tokenize)
	mux.HandleFunc("POST /detokenize", s.detokenize)
	mux.HandleFunc("POST /v1/detokenize", s.detokenize)
	both("/flush_cache", s.flushCache)
	mux.HandleFunc("POST /abort_request", s.abortRequest)
	if s.cfg.EnableMetrics {
		mux.Handle("GET /metrics", s.metrics)
	}
	return s.authorized(detail(mux))
}

// detail answers unknown routes and methods as SGLang's HTTP framework does.
func detail(mux *http.ServeMux) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, pattern := mux.Handler(r)
		if pattern != "" {
			mux.ServeHTTP(w, r)
			return
		}
		probe := statusOnly{header: http.Header{}}
		h.ServeHTTP(&probe, r)
		if allow := probe.header.Get("Allow"); allow != "" {
			w.Header().Set("Allow", allow)
		}
		writeJSON(w, probe.status, map[string]string{"detail": http.StatusText(probe.status)})
	})
}

// statusOnly is a ResponseWriter that keeps no body.
type statusOnly struct {
	header http.Header
	status int
}

func (s *statusOnly) Header() http.Header         { return s.header }
func (s *statusOnly) WriteHeader(status int)      { s.status = status }
func (s *statusOnly) Write(p []byte) (int, error) { return len(p), nil }

// authorized wants the API key everywhere but on health and metrics.
func (s *Server) authorized(next http.Handler) http.Handler {
	if s.cfg.APIKey == "" {
		return next
	}
	want := []byte("Bearer " + s.cfg.APIKey)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open := strings.HasPrefix(r.URL.Path, "/health") || strings.HasPrefix(r.URL.Path, "/metrics")
		if !open && subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			writeJSON(w, http.StatusUnauthorized, map[string]string{"error": "Unauthorized"})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// generation serves one of the three generation routes.
func (s *Server) generation(on surface) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		s.inflight.Add(1)
		defer s.inflight.Add(-1)
		body, err := readAll(http.MaxBytesReader(w, r.Body, maxBody), r.ContentLength)
		if err != nil {
			writeBad(w, on, "read the body: "+err.Error())
			return
		}
		var over http.Header
		if s.cfg.HeaderOverrides && on != surfaceCompletions {
			over = r.Header
		}
		req, err := parse(on, body, over)
		if err != nil {
			writeBad(w, on, err.Error())
			return
		}
		if msg := s.tooLong(req); msg != "" {
			s.refuse(w, req, msg)
			return
		}
		s.run(w, r, req)
	}
}

// run submits the sequences and writes their answers. A client that hangs up
// aborts them at once (SGLang notices within about 4 s, contract §2.5).
func (s *Server) run(w http.ResponseWriter, r *http.Request, req *request) {
	for _, q := range req.seqs {
		q.remote = s.cfg.Mode == ModeDecode && q.boot.set
		s.engine.submit(q)
		if s.cfg.Mode == ModePrefill {
			t := time.AfterFunc(s.cfg.BootstrapTimeout, func() {
				s.engine.do(func(c *core) { c.bootstrapTimeout(q, s.cfg.BootstrapTimeout.Seconds()) })
			})
			defer t.Stop()
		}
	}
	defer func() {
		for _, q := range req.seqs {
			s.engine.abort(q, abortFinish(0, "Aborted by AbortReq."))
			s.peers.release(q)
		}
	}()
	if req.stream {
		s.stream(r.Context(), w, req)
	} else {
		s.whole(r.Context(), w, req)
	}
}

// tooLong is the tokenizer's own check, before the scheduler sees the request.
func (s *Server) tooLong(r *request) string {
	for _, q := range r.seqs {
		if q.prompt >= s.cfg.ContextLength {
			return fmt.Sprintf("The input (%d tokens) is longer than the model's context length (%d tokens).",
				q.prompt, s.cfg.ContextLength)
		}
	}
	return ""
}

// refuse answers a request that the tokenizer refused (contract §6.1): inside
// the stream when there is one.
func (s *Server) refuse(w http.ResponseWriter, r *request, msg string) {
	if !r.stream {
		writeAbort(w, r.surface, abortFinish(http.StatusBadRequest, msg))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	_, _ = w.Write(refusal(r.surface, msg)) // a client that is gone needs no answer
}

// readAll reads a body of known or unknown length with one allocation where
// the length is known.
func readAll(r io.Reader, length int64) ([]byte, error) {
	if length < 0 || length > maxBody {
		return io.ReadAll(r)
	}
	b := make([]byte, length)
	_, err := io.ReadFull(r, b)
	return b, err
}
