package replay

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvc-dev/kvc/router/trace"
)

// Source hands out sessions. Next is called by one goroutine at a time.
type Source interface {
	Next() (trace.Session, bool)
}

// Options of a run.
type Options struct {
	Target      Target
	Concurrency int     // sessions in flight
	Turns       int     // to send in all; 0 = all of the source
	TimeScale   float64 // emulated milliseconds per real millisecond

	Timeout time.Duration // real, of one turn; 0 = 5 minutes
	Monitor *Monitor      // nil = no router or sidecars to read
	// Settle waits, at concurrency 1, between two turns until the router has
	// followed every worker, so that equal seeds give equal modes.
	Settle   bool
	Progress func(done, failed int) // after every turn, from any goroutine

	afterFailure time.Duration // pause of a session, real; 0 = failurePause; for tests
}

const (
	defaultTimeout = 5 * time.Minute
	failurePause   = 250 * time.Millisecond // real, after a failed turn
	longestRetry   = 5 * time.Second        // real, of a Retry-After that is heeded
	hopeless       = 20                     // failures without one success end the run
)

var errTooSlow = errors.New("no whole answer within the time limit")

// Run replays the source and returns when the turns or the sessions are used
// up. When ctx ends first the result is what was seen so far, marked
// Interrupted; turns under way then are not counted.
func Run(ctx context.Context, o Options, src Source) (*Result, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	if err := o.Target.open(ctx); err != nil {
		return nil, err
	}
	r := &run{o: o, src: src, spent: make(chan struct{}), start: time.Now()}
	stopMonitor, err := o.Monitor.start(ctx, r.start)
	if err != nil {
		return nil, err
	}
	g, gctx := errgroup.WithContext(ctx)
	for range o.Concurrency {
		g.Go(func() error { return r.sessions(gctx) })
	}
	err = g.Wait()
	r.res.Wall = time.Since(r.start)
	r.res.Load, r.res.Counters = stopMonitor()
	r.res.Interrupted = ctx.Err() != nil
	if r.res.Interrupted {
		err = nil
	}
	o.Target.Client.CloseIdleConnections()
	return &r.res, err
}

func (o *Options) complete() error {
	switch {
	case o.Concurrency < 1:
		return fmt.Errorf("concurrency %d: want at least 1 session in flight", o.Concurrency)
	case o.Turns < 0:
		return fmt.Errorf("turns %d: want a number of turns, or 0 for all", o.Turns)
	case !(o.TimeScale >= 0.01): // also NaN
		return fmt.Errorf("time scale %g: want at least 0.01", o.TimeScale)
	}
	if o.Timeout <= 0 {
		o.Timeout = defaultTimeout
	}
	if o.afterFailure == 0 {
		o.afterFailure = failurePause
	}
	if o.Target.Client == nil {
		o.Target.Client = &http.Client{Transport: &http.Transport{
			Proxy:               http.ProxyFromEnvironment,
			MaxIdleConnsPerHost: o.Concurrency,
			IdleConnTimeout:     30 * time.Second, // before servers drop it: a reset would look like a failure
			DisableCompression:  true,
			WriteBufferSize:     64 << 10,
		}}
	}
	return nil
}

// run is the shared state of the sessions in flight.
type run struct {
	o     Options
	src   Source
	start time.Time

	mu      sync.Mutex
	claimed int
	closed  bool
	spent   chan struct{} // closed when no turn is left to claim
	ok      int
	failed  int
	res     Result
}

// sessions plays one session after another.
func (r *run) sessions(ctx context.Context) error {
	for {
		s, ok := r.next()
		if !ok {
			return nil
		}
		if err := r.play(ctx, s); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

func (r *run) next() (trace.Session, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return trace.Session{}, false
	}
	return r.src.Next()
}

// play is the closed loop of one session: think, send, take the answer.
func (r *run) play(ctx context.Context, s trace.Session) error {
	c := trace.NewConversation(s.ID)
	for i, rec := range s.Turns {
		if !r.think(ctx, rec.Think) || !r.claim(i == 0) {
			return nil
		}
		messages := c.Turn(rec)
		turn := r.send(ctx, ask{session: s.ID, messages: messages, tokens: rec.OutputTokens})
		turn.Session, turn.Index = s.ID, i
		if turn.Failure.Kind == kindInterrupted {
			return nil
		}
		if err := r.record(turn); err != nil {
			return err
		}
		if !turn.OK() {
			if !r.pause(ctx, max(r.o.afterFailure, min(turn.Failure.retryAfter, longestRetry))) {
				return nil
			}
			continue
		}
		c.Answer(turn.text)
		if err := r.settle(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) send(ctx context.Context, a ask) Turn {
	ctx, cancel := context.WithTimeoutCause(ctx, r.o.Timeout, errTooSlow)
	defer cancel()
	at := time.Since(r.start)
	turn := r.o.Target.chat(ctx, a)
	turn.At = at
	if turn.Mode == "" {
		turn.Mode = ModeUnknown
	}
	return turn
}

// think waits d of emulated time; false when the run ends first.
func (r *run) think(ctx context.Context, d time.Duration) bool {
	return r.pause(ctx, time.Duration(float64(d)/r.o.TimeScale))
}

func (r *run) pause(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-r.spent:
		return false
	case <-ctx.Done():
		return false
	}
}

// claim takes one turn of the budget. Sessions that think when the last one is
// taken stop thinking.
func (r *run) claim(first bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.claimed++
	if first {
		r.res.Sessions++
	}
	if r.o.Turns > 0 && r.claimed == r.o.Turns {
		r.closed = true
		close(r.spent)
	}
	return true
}

// record keeps a finished turn; the error ends a run in which nothing works.
func (r *run) record(t Turn) error {
	r.mu.Lock()
	t.text = ""
	r.res.Turns = append(r.res.Turns, t)
	if t.OK() {
		r.ok++
	} else {
		r.failed++
	}
	ok, failed := r.ok, r.failed
	r.mu.Unlock()
	if r.o.Progress != nil {
		r.o.Progress(ok+failed, failed)
	}
	if ok == 0 && failed >= hopeless {
		return fmt.Errorf("the first %d turns all failed, the last with %s: %s", failed, t.Failure.Kind, t.Failure.Message)
	}
	return nil
}

func (r *run) settle(ctx context.Context) error {
	if !r.o.Settle || r.o.Concurrency > 1 || r.o.Monitor == nil {
		return nil
	}
	return r.o.Monitor.settle(ctx)
}
