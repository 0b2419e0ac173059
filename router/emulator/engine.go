package emulator

import (
	"context"
	"sync"
	"time"
)

// tick is how finely the engine follows the wall clock when nothing but later
// tokens of running sequences is due: tokens that fall into one tick leave
// together, as with --stream-interval.
const tick = 2 * time.Millisecond

// engine runs a core on the wall clock.
type engine struct {
	scale float64
	clock func() time.Duration // emulated time since the start
	kick  chan struct{}

	mu   sync.Mutex
	core *core

	// perform carries out an effect; it is called without the lock and must not
	// block.
	perform func(effect)
}

func newEngine(cfg coreConfig, scale float64) *engine {
	start := time.Now()
	clock := func() time.Duration { return time.Duration(float64(time.Since(start)) * scale) }
	return &engine{scale: scale, clock: clock, kick: make(chan struct{}, 1), core: newCore(cfg)}
}

// do runs f on the core at the present time and carries out what follows.
func (e *engine) do(f func(*core)) {
	e.mu.Lock()
	e.core.advance(e.clock())
	f(e.core)
	effects := e.core.effects
	e.core.effects = nil
	e.mu.Unlock()

	select {
	case e.kick <- struct{}{}:
	default:
	}
	for _, f := range effects {
		e.perform(f)
	}
}

// read runs f on the core without changing anything.
func (e *engine) read(f func(*core)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f(e.core)
}

// run drives the core until ctx ends.
func (e *engine) run(ctx context.Context) {
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.kick:
		case <-t.C:
		}
		t.Reset(e.turn())
	}
}

// turn advances the core and returns how long it may be left alone.
func (e *engine) turn() time.Duration {
	e.mu.Lock()
	e.core.advance(e.clock())
	at, coarse, ok := e.core.next()
	effects := e.core.effects
	e.core.effects = nil
	e.mu.Unlock()

	for _, f := range effects {
		e.perform(f)
	}
	if !ok {
		return time.Hour
	}
	wait := time.Duration(float64(at-e.clock()) / e.scale)
	if coarse {
		wait = max(wait, tick)
	}
	return max(wait, 0)
}

func (e *engine) submit(s *sequence)               { e.do(func(c *core) { c.submit(s) }) }
func (e *engine) abort(s *sequence, why finish)    { e.do(func(c *core) { c.abort(s, why) }) }
func (e *engine) abortPrefix(rid string, all bool) { e.do(func(c *core) { c.abortPrefix(rid, all) }) }
