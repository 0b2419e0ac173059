package proxy

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// worker is what the proxy keeps about one incarnation: how to reach it, and
// whether it answered lately. Beliefs about its cache and load are router/state's.
type worker struct {
	fleet.Worker

	asks  chan struct{} // permits for questions in flight (R81)
	admit *breaker      // admission questions: an open one means "unknown", never a reject (R80)
	data  *breaker      // legs: an open one takes the worker out of the fleet

	hello atomic.Pointer[greeting]
	// hinted is the epoch for which 103 Early Hints are known to arrive.
	hinted atomic.Pointer[string]

	trusted atomic.Bool // its feed is read and may be believed

	turns runningTurns

	drained      atomic.Bool // the fleet says so
	saysDraining atomic.Bool // the worker says so

	follower *feed.Follower
	life     context.Context    // of the follower
	gone     context.CancelFunc // stops the follower
	done     chan struct{}      // the follower has ended
	probes   sync.WaitGroup     // hint probes
}

// draining is true when anyone says so (wire.md §6).
func (w *worker) draining() bool { return w.drained.Load() || w.saysDraining.Load() }

// greeting is what a worker's feed said of itself.
type greeting struct {
	epoch      string
	model      string
	directPath map[string]string
	capacity   int // tokens
}

// epoch is the one the router believes in; "" = unknown.
func (w *worker) epoch() string {
	if g := w.hello.Load(); g != nil {
		return g.epoch
	}
	return ""
}

// path is the worker's engine profile for a surface; "" = unknown.
func (w *worker) path(r block.Route) kvc.DirectPath {
	if g := w.hello.Load(); g != nil {
		return kvc.DirectPath(g.directPath[string(r)])
	}
	return ""
}

// hints reports whether a fused question may be sent (wire.md §3).
func (w *worker) hints() bool {
	h, epoch := w.hinted.Load(), w.epoch()
	return h != nil && epoch != "" && *h == epoch
}

// errNeutral marks an end that says nothing about the worker's health.
var errNeutral = errors.New("neutral")

// breaker opens after consecutive faults and lets one probe through after a
// while (R76). Client errors, cancels and refusals are neutral (R67).
type breaker struct {
	cb *gobreaker.TwoStepCircuitBreaker[any]
}

func newBreaker(faults uint32, pause time.Duration, changed func(gobreaker.State)) *breaker {
	return &breaker{gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		MaxRequests:   1,
		Timeout:       pause,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= faults },
		IsExcluded:    func(err error) bool { return errors.Is(err, errNeutral) },
		OnStateChange: func(_ string, _, to gobreaker.State) { changed(to) },
	})}
}

// allow asks for a try; report its end with done (nil, errNeutral or a fault).
func (b *breaker) allow() (done func(error), ok bool) {
	done, err := b.cb.Allow()
	return done, err == nil
}

// look lets the pause end: the state is worked out when it is looked at.
func (b *breaker) look() { _ = b.cb.State() }

func (b *breaker) String() string { return b.cb.State().String() }

const (
	admitFaults = 5
	dataFaults  = 3
	admitPause  = 2 * time.Second
	dataPause   = 2 * time.Second
)

func (p *Proxy) newWorker(fw fleet.Worker) *worker {
	w := &worker{Worker: fw, asks: make(chan struct{}, p.opt.AsksPerWorker), done: make(chan struct{})}
	w.admit = newBreaker(admitFaults, admitPause, func(to gobreaker.State) {
		p.series.set(fw.Name, func(m *telemetry.Router) { m.Breaker(fw.Name, "admission", to != gobreaker.StateClosed) })
	})
	w.data = newBreaker(dataFaults, dataPause, func(to gobreaker.State) {
		p.series.set(fw.Name, func(m *telemetry.Router) { m.Breaker(fw.Name, "data", to != gobreaker.StateClosed) })
		p.state.SetAvailable(fw.ID, to != gobreaker.StateOpen)
		if to == gobreaker.StateOpen {
			// Nobody is sent to an unavailable worker, so nobody would notice
			// that its pause is over.
			time.AfterFunc(dataPause+time.Millisecond, w.data.look)
		}
	})
	return w
}

// runningTurns knows which turns a worker may still be running, so that a
// session's next turn does not meet its cancelled one in the engine (R64).
type runningTurns struct {
	mu sync.Mutex
	m  map[string]*runningTurn // by attempt
}

type runningTurn struct {
	session kvc.SessionKey
	ended   chan struct{}
	left    bool // the router gave the turn up; only the worker can end it
}

// start registers a decode leg that is about to be sent.
func (r *runningTurns) start(attempt string, s kvc.SessionKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.m == nil {
		r.m = make(map[string]*runningTurn)
	}
	r.m[attempt] = &runningTurn{session: s, ended: make(chan struct{})}
}

// end forgets a turn that the worker ended: its answer was complete, its
// connection broke, or its turn frame came.
func (r *runningTurns) end(attempt string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if t := r.m[attempt]; t != nil {
		close(t.ended)
		delete(r.m, attempt)
	}
}

// leave says that the router cancelled a turn. It is forgotten by its turn
// frame, or after limit.
func (r *runningTurns) leave(attempt string, limit time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.m[attempt]
	if t == nil || t.session == "" {
		if t != nil {
			delete(r.m, attempt)
		}
		return
	}
	t.left = true
	time.AfterFunc(limit, func() { r.end(attempt) })
}

// reset forgets every turn that was left: the worker's new snapshot is newer.
func (r *runningTurns) reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, t := range r.m {
		if t.left {
			close(t.ended)
			delete(r.m, id)
		}
	}
}

// cancelled returns a channel that closes when a cancelled turn of the session
// has ended; nil when there is none.
func (r *runningTurns) cancelled(s kvc.SessionKey) <-chan struct{} {
	if s == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range r.m {
		if t.left && t.session == s {
			return t.ended
		}
	}
	return nil
}
