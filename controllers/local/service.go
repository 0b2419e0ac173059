package local

import (
	"context"
	"net/http"
	"time"
)

// backoff is the delay between restarts: it doubles up to a bound and starts
// over after a run that was long enough to count as healthy.
type backoff struct {
	base, delay time.Duration
}

const (
	maxBackoff    = 10 * time.Second
	healthyAfter  = 30 * time.Second
	pollReadiness = 25 * time.Millisecond
)

// next returns the delay after a run of the given length.
func (b *backoff) next(ran time.Duration) time.Duration {
	if b.delay == 0 || ran >= healthyAfter {
		b.delay = b.base
		return b.delay
	}
	b.delay = min(2*b.delay, max(maxBackoff, b.base))
	return b.delay
}

// keepInPlace runs a command until ctx is done and restarts it, with the same
// command line, whenever it ends. change reports to the state of its owner.
func (c *Cluster) keepInPlace(ctx context.Context, cmd command, readyURL string, change func(func(*service))) {
	delay := backoff{base: c.opts.backoff}
	for first := true; ctx.Err() == nil; first = false {
		if !first {
			change(func(s *service) { s.restarts++ })
		}
		started := time.Now()
		problem := c.runOnce(ctx, cmd, readyURL, change)
		if ctx.Err() != nil {
			change(func(s *service) { s.pid, s.ready = 0, false })
			return
		}
		c.log.Warn("process ended; starting it again", "process", cmd.name, "reason", problem)
		change(func(s *service) { s.fail(problem) })
		sleep(ctx, delay.next(time.Since(started)))
	}
}

// fail notes that the program ended.
func (s *service) fail(problem string) {
	if s.ready {
		s.failed = 0
	}
	s.pid, s.ready, s.problem = 0, false, problem
	s.failed++
}

// runOnce runs a command until it ends or ctx is done, and says how it ended.
func (c *Cluster) runOnce(ctx context.Context, cmd command, readyURL string, change func(func(*service))) string {
	p, err := c.spawn.run(cmd)
	if err != nil {
		return err.Error()
	}
	change(func(s *service) { s.pid = p.pid })
	probing, stop := context.WithCancel(ctx)
	defer stop()
	polled := make(chan struct{})
	go func() {
		defer close(polled)
		if c.pollReady(probing, readyURL) {
			change(func(s *service) { s.ready, s.failed = true, 0 })
		}
	}()
	select {
	case <-p.done:
	case <-ctx.Done():
		p.terminate(c.opts.Grace)
	}
	stop()
	<-polled // readiness must not be noted after the end
	return p.describeEnd(cmd.log)
}

// pollReady asks until the answer is 200; false when ctx is done first.
func (c *Cluster) pollReady(ctx context.Context, url string) bool {
	ticker := time.NewTicker(pollReadiness)
	defer ticker.Stop()
	for {
		if c.isReady(ctx, url) {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
}

func (c *Cluster) isReady(ctx context.Context, url string) bool {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	res, err := c.probe.Do(req)
	if err != nil {
		return false
	}
	_ = res.Body.Close()
	return res.StatusCode == http.StatusOK
}

// describeEnd says how a process ended, with its last words and where to read
// the others. A process that was killed had no chance to say why.
func (p *process) describeEnd(log string) string {
	out := p.exitReason()
	if last := tail(log, 3); last != "" && !p.killed() {
		out += "; its last lines: " + last
	}
	return out + " (log: " + log + ")"
}

// sleep waits, or returns early when ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
