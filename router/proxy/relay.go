package proxy

import (
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/sglang"
	"github.com/kvc-dev/kvc/router/telemetry"
)

const (
	relayBuffer = 32 << 10
	// wholeMost is the largest JSON answer that is held until it is complete,
	// so that a broken one can still be retried or become an error (R07).
	wholeMost = 8 << 20
)

// relay gives the decode leg's answer to the client and ends the attempt. nil
// means that the client has an answer, to its end or to an in-band error.
func (t *turn) relay(a *attempt) *fault {
	idle := newIdleTimer(t.proxy.opt.IdleTimeout, a)
	defer idle.stop()
	if err := a.take(); err != nil {
		return a.failed(why(a.ctx, err))
	}
	if a.resp.StatusCode/100 != 2 {
		f := a.settle(answerFault(a.resp, false))
		a.end(broken, f.health())
		return f
	}
	a.tell(nil)
	if isEventStream(a.resp.Header) {
		return t.relayStream(a, idle)
	}
	return t.relayWhole(a, idle)
}

// failed ends an attempt whose decode leg broke before its first byte.
func (a *attempt) failed(f *fault) *fault {
	how := a.endingOf()
	f = a.settle(f)
	a.end(how, f.health())
	return f
}

// idleTimer cancels an attempt whose worker falls silent; there is no timer on
// the whole (R12).
type idleTimer struct {
	limit time.Duration
	timer *time.Timer
	last  time.Time
}

func newIdleTimer(limit time.Duration, a *attempt) *idleTimer {
	return &idleTimer{limit: limit, last: time.Now(),
		timer: time.AfterFunc(limit, func() { a.cancel(errIdle) })}
}

// touch says that bytes came. The timer is moved at most a hundred times per
// limit: moving it for each token would cost more than the copy.
func (i *idleTimer) touch() (moved bool) {
	now := time.Now()
	if now.Sub(i.last) <= i.limit/100 {
		return false
	}
	i.last = now
	i.timer.Reset(i.limit)
	return true
}

func (i *idleTimer) stop() { i.timer.Stop() }

// commit sends the status line and headers: from here on there is no retry
// (R59), and the turn is known to work (R86).
func (t *turn) commit(resp *http.Response, length int) {
	h := t.w.Header()
	copyAnswerHeader(h, resp.Header)
	t.explainHeader()
	if length >= 0 {
		h.Set("Content-Length", strconv.Itoa(length))
	}
	t.w.WriteHeader(resp.StatusCode)
	t.machine.Streaming()
}

// firstToken observes the time to the first content.
func (t *turn) firstToken() { t.proxy.metrics.FirstToken(t.mode.String(), time.Since(t.arrived)) }

// ended counts a finished answer.
func (t *turn) ended(seen *sglang.Observed, outcome string) {
	t.outcome = outcome
	if seen.HasUsage {
		t.proxy.metrics.Tokens(seen.Usage.PromptTokens, seen.Usage.CachedTokens, seen.Usage.CompletionTokens)
	}
	t.log.usage(seen.Usage)
}

// relayWhole gives a JSON answer to the client.
func (t *turn) relayWhole(a *attempt, idle *idleTimer) *fault {
	buf := t.proxy.buffer()
	defer t.proxy.recycle(buf)
	body := &touchReader{a.resp.Body, idle}
	_, err := buf.ReadFrom(io.LimitReader(body, wholeMost+1))
	switch {
	case err != nil:
		return a.failed(why(a.ctx, err))
	case buf.Len() == 0 && a.resp.StatusCode == http.StatusOK:
		f := emptyFault()
		a.end(broken, f)
		return f
	case buf.Len() > wholeMost:
		t.relayHuge(a, buf.Bytes(), body)
		return nil
	}
	var seen sglang.Observed
	sglang.ObserveBody(&seen, buf.Bytes())
	t.commit(a.resp, buf.Len())
	t.firstToken()
	a.end(endedWell, nil)
	outcome := telemetry.OutcomeOK
	if _, err := t.w.Write(buf.Bytes()); err != nil {
		outcome = telemetry.OutcomeClientCancelled
	}
	t.ended(&seen, outcome)
	return nil
}

// relayHuge streams an answer too large to hold. When it breaks, the client's
// connection is broken too: there is no other way left to say so.
func (t *turn) relayHuge(a *attempt, head []byte, rest io.Reader) {
	t.commit(a.resp, -1)
	t.firstToken()
	_, err := t.w.Write(head)
	if err == nil {
		_, err = io.Copy(t.w, rest)
	}
	if err == nil {
		a.end(endedWell, nil)
		t.outcome = telemetry.OutcomeOK
		return
	}
	t.outcome = why(a.ctx, err).outcome
	t.abort = true
	a.end(a.endingOf(), errNeutral)
}

// touchReader keeps the idle timer running.
type touchReader struct {
	r    io.Reader
	idle *idleTimer
}

func (r *touchReader) Read(b []byte) (int, error) {
	n, err := r.r.Read(b)
	r.idle.touch()
	return n, err
}

// stream relays one event stream. Bytes pass unchanged; the events are only
// looked at.
type stream struct {
	t    *turn
	a    *attempt
	rc   *http.ResponseController
	ev   sglang.Events
	seen sglang.Observed
	look func(raw, data []byte) // s.event, once

	whole     int    // bytes of the events that the last feed completed
	held      []byte // received and not sent: the start of an event
	committed bool
	token     bool // the first content was seen
}

// relayStream gives an event stream to the client.
func (t *turn) relayStream(a *attempt, idle *idleTimer) *fault {
	s := &stream{t: t, a: a, rc: http.NewResponseController(t.w)}
	s.look = s.event
	s.guard(time.Now())
	defer func() { _ = s.rc.SetWriteDeadline(time.Time{}) }() // the connection serves the next request
	buf := t.proxy.relayBuf()
	defer t.proxy.relayBufs.Put(buf)
	for {
		n, err := a.resp.Body.Read(*buf)
		if n > 0 {
			if idle.touch() {
				s.guard(idle.last)
			}
			if f := s.take((*buf)[:n]); f != nil {
				a.end(endingOfStream(f), f.health())
				return s.after(f)
			}
		}
		if err != nil {
			return s.finish(err)
		}
	}
}

// guard gives the client until the idle limit to take what is written next: one
// that stops reading must not hold a worker (T5).
func (s *stream) guard(now time.Time) {
	_ = s.rc.SetWriteDeadline(now.Add(s.t.proxy.opt.IdleTimeout)) // unsupported: no guard
}

// endingOfStream is how a stream that the router gave up ended.
func endingOfStream(f *fault) ending {
	if f.outcome == telemetry.OutcomeClientCancelled {
		return cancelled
	}
	return broken // the engine's own error event: it has ended the turn
}

// after is what a fault means for the caller: nothing, once the client has seen
// a part.
func (s *stream) after(f *fault) *fault {
	if !s.committed {
		return f
	}
	s.t.ended(&s.seen, f.outcome)
	return nil
}

// event looks at one complete event.
func (s *stream) event(raw, data []byte) {
	s.whole += len(raw)
	if len(data) > 0 {
		sglang.ObserveEvent(&s.seen, data)
	}
}

// take relays what a read brought: every event that is complete. The start of
// one is held back, so that an in-band error never lands inside an event.
func (s *stream) take(chunk []byte) *fault {
	if s.committed && len(s.held) == 0 && s.ev.Whole(chunk) && s.seen.Ordinary(chunk) {
		return s.send(chunk) // nearly all reads: some more tokens, and nothing to learn
	}
	s.whole = 0
	s.ev.Feed(chunk, s.look)
	n := s.whole - len(s.held) // how much of the chunk completes events
	if n <= 0 {
		s.held = append(s.held, chunk...)
		return nil
	}
	if !s.committed {
		// An error before any content is as good as a status line (R08).
		if s.seen.ErrorCode != 0 && !s.seen.Content {
			return streamFault(s.seen.ErrorCode)
		}
		s.committed = true
		s.t.commit(s.a.resp, -1)
	}
	if len(s.held) > 0 {
		_, _ = s.t.w.Write(s.held) // a failure shows again in send
	}
	f := s.send(chunk[:n])
	s.held = append(s.held[:0], chunk[n:]...)
	return f
}

// send writes and flushes.
func (s *stream) send(b []byte) *fault {
	_, err := s.t.w.Write(b)
	if err == nil {
		err = s.rc.Flush()
	}
	if err != nil {
		s.a.cancel(errClientGone)
		return clientGone()
	}
	if !s.token && s.seen.Content {
		s.token = true
		s.t.firstToken()
	}
	return nil
}

// finish ends the stream after the last read.
func (s *stream) finish(err error) *fault {
	if !errors.Is(err, io.EOF) {
		return s.broke(err)
	}
	s.ev.End(s.look) // an event may have ended with the stream
	if !s.committed && len(s.held) == 0 {
		f := emptyFault()
		s.a.end(broken, nil)
		return f
	}
	if len(s.held) > 0 {
		s.guard(time.Now())
		if !s.committed {
			s.committed = true
			s.t.commit(s.a.resp, -1)
		}
		_ = s.send(s.held) // the end is near either way
	}
	s.a.end(endedWell, nil)
	outcome := telemetry.OutcomeOK
	if s.seen.ErrorCode != 0 || s.seen.Finish == "abort" || !s.seen.Done && s.seen.Finish == "" {
		outcome = telemetry.OutcomeUpstreamError
	}
	s.t.ended(&s.seen, outcome)
	return nil
}

// broke ends a stream whose connection failed: with a fault while nothing was
// sent, else with an in-band error, so that a short answer never looks whole
// (R05, R06). What was held of an event is dropped with it.
func (s *stream) broke(err error) *fault {
	f := why(s.a.ctx, err)
	how := s.a.endingOf()
	f = s.a.settle(f)
	s.a.end(how, f.health())
	if s.committed && f.outcome != telemetry.OutcomeClientCancelled {
		s.t.proxy.log.Warn("stream broke", "request_id", s.t.id, "worker", s.t.worker, "outcome", f.outcome, "error", f)
		s.guard(time.Now())                     // the deadline may have passed with the worker's silence
		_, _ = s.t.w.Write(f.inBand().inBand()) // a client that left needs no error
		_ = s.rc.Flush()
	}
	return s.after(f)
}
