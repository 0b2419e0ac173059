package local

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
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
		if c.pollReady(probing, readyURL, func(why string) { change(func(s *service) { s.waiting = why }) }) {
			change(func(s *service) { s.ready, s.failed, s.waiting = true, 0, "" })
		}
	}()
	select {
	case <-p.done:
	case <-ctx.Done():
		p.terminate(c.opts.Grace)
	}
	stop()
	<-polled // readiness must not be noted after the end
	return p.describeEnd()
}

// pollReady asks until the answer is 200; false when ctx is done first. waiting
// hears each new reason why it is not.
func (c *Cluster) pollReady(ctx context.Context, url string, waiting func(why string)) bool {
	ticker := time.NewTicker(pollReadiness)
	defer ticker.Stop()
	said := ""
	for {
		ready, why := c.isReady(ctx, url)
		if ready {
			return true
		}
		if why != said {
			said = why
			waiting(why)
		}
		select {
		case <-ctx.Done():
			return false
		case <-ticker.C:
		}
	}
}

// isReady asks once; why is what the program itself says of it, "" when it does
// not answer at all.
func (c *Cluster) isReady(ctx context.Context, url string) (ready bool, why string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false, ""
	}
	res, err := c.probe.Do(req)
	if err != nil {
		return false, ""
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode == http.StatusOK {
		return true, ""
	}
	const most = 4096
	body, err := io.ReadAll(io.LimitReader(res.Body, most))
	if err != nil {
		return false, ""
	}
	return false, complaint(body)
}

// complaint is the message of an OpenAI-shaped error, or else the first line of
// an answer.
func complaint(body []byte) string {
	var shaped struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &shaped) == nil && shaped.Error.Message != "" {
		return shaped.Error.Message
	}
	return firstLine(bytes.TrimSpace(body))
}

// describeEnd says how a process ended, with its last words and where to read
// the others. A process that was killed had no chance to say why.
func (p *process) describeEnd() string {
	out := p.exitReason()
	if last := tail(p.log, p.from); last != "" && !p.killed() {
		out += "; its last lines: " + last
	}
	return out + " (log: " + p.log + ")"
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
