package proxy

import (
	"context"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/fleet"
)

// settleMost bounds how long turns wait for the first feeds, in real time.
const settleMost = 2 * time.Second

// settling holds the first turns of a router until it knows what its workers
// hold. Without it, a router that was restarted would send sessions anywhere for
// the moment until the feeds are read, and their KV would be computed again.
type settling struct {
	once sync.Once
	arm  sync.Once
	done chan struct{}
}

func newSettling() *settling { return &settling{done: make(chan struct{})} }

// end lets turns pass, for good.
func (s *settling) end() { s.once.Do(func() { close(s.done) }) }

// begin starts the clock.
func (s *settling) begin(most time.Duration) {
	s.arm.Do(func() { time.AfterFunc(most, s.end) })
}

// over reports whether turns pass.
func (s *settling) over() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// wait holds a turn; it returns early when the client leaves.
func (s *settling) wait(ctx context.Context) {
	select {
	case <-s.done:
	case <-ctx.Done():
	}
}

// settle looks whether every decode worker's feed is read. A worker that does
// not answer is waited for no longer than settleMost; one that comes later is
// not waited for.
func (p *Proxy) settle() {
	if p.settling.over() {
		return
	}
	for _, w := range *p.workers.Load() {
		if w.Role != fleet.Decode {
			continue
		}
		p.settling.begin(p.opt.SettleTimeout)
		if !w.trusted.Load() {
			return
		}
	}
	p.settling.end()
}
