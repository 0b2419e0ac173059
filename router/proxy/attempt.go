package proxy

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// maxErrorBody bounds an engine's own error body (wire.md §9).
const maxErrorBody = 1 << 20

// attempt is one try of a turn: a decode leg, and a prefill leg when the mode
// needs it. Cancelling its context ends both, and the cause says why; so the
// first error of either leg is what the other one ends with.
type attempt struct {
	t    *turn
	id   string // x-kvc-attempt, 32 hex digits
	d, p *worker
	boot *admission.Bootstrap // nil without a prefill worker
	// uncached is what p is believed to lack of the prompt, in tokens.
	uncached int

	ctx    context.Context
	cancel context.CancelCauseFunc
	detach func() bool // stops following the client

	wrote   chan struct{}    // closed when the decode request is fully written
	verdict chan kvc.Verdict // the 103 of a fused question
	head    chan headResult  // the decode leg's answer, once
	queued  bool             // a fallback: the worker says by a 103 when it begins
	sure    bool             // the worker surely runs the turn: admitted, leased or queued
	prefill chan struct{}    // closed when the prefill leg has ended; nil = not sent
	resp    *http.Response   // taken from head
	taken   bool
	sent    bool        // the decode leg was sent
	report  func(error) // d's data breaker; nil = not sent, or told
}

type headResult struct {
	resp *http.Response
	err  error
}

// newAttemptID is 128 random bits.
func newAttemptID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand never fails
	return hex.EncodeToString(b[:])
}

// rooms hands out rendezvous numbers, each unique among live attempts (R52): a
// duplicate crashes both engines' schedulers.
type rooms struct {
	mu   sync.Mutex
	live map[int64]struct{}
}

// take returns a room from 1 to 2^63-1.
func (r *rooms) take() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live == nil {
		r.live = make(map[int64]struct{})
	}
	for {
		var b [8]byte
		_, _ = rand.Read(b[:])
		room := int64(binary.LittleEndian.Uint64(b[:]) >> 1)
		if _, taken := r.live[room]; room != 0 && !taken {
			r.live[room] = struct{}{}
			return room
		}
	}
}

func (r *rooms) free(room int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.live, room)
}

// newAttempt prepares a try on d, with p as its prefill worker (nil = none).
// It follows the client: a hang-up cancels it.
func (t *turn) newAttempt(id string, d, p *worker) *attempt {
	a := &attempt{t: t, id: id, d: d, p: p,
		wrote: make(chan struct{}), verdict: make(chan kvc.Verdict, 1), head: make(chan headResult, 1)}
	client := t.r.Context()
	a.ctx, a.cancel = context.WithCancelCause(context.WithoutCancel(client))
	a.detach = context.AfterFunc(client, func() { a.cancel(errClientGone) })
	if p != nil && p.Bootstrap != nil {
		a.boot = &admission.Bootstrap{Host: p.Bootstrap.Host, Port: p.Bootstrap.Port, Room: t.proxy.rooms.take()}
	}
	return a
}

// header is what a leg says beside the body (wire.md §1).
func (a *attempt) header(w *worker, turn admission.Turn) http.Header {
	t := a.t
	h := outboundHeader(t.r.Header, t.id)
	turn.Attempt, turn.Epoch = a.id, w.epoch()
	turn.Session, turn.Lineage = t.req.Session, t.req.Lineage
	turn.InputTokens, turn.AppendTokens, turn.OutputTokens = t.req.InputTokens, t.req.AppendTokens, t.req.OutputTokens
	check := admission.CheckOf(t.prompt.chain.Blocks)
	turn.Blocks, turn.Bootstrap = &check, a.boot
	turn.Write(h)
	t.proxy.out.authorize(h)
	return h
}

// sendDecode sends the decode leg; its answer arrives on head.
func (a *attempt) sendDecode(admit admission.Admit, lease string) {
	report, ok := a.d.data.allow()
	if !ok {
		a.head <- headResult{err: errBreaker}
		return
	}
	a.sent, a.report, a.sure = true, report, admit != admission.AdmitAsk
	a.queued = admit == admission.AdmitNone
	a.d.turns.start(a.id, a.t.req.Session)
	a.t.proxy.series.leg(a.d, +1)
	h := a.header(a.d, admission.Turn{Leg: admission.LegDecode, Admit: admit, Lease: lease,
		Turn: a.t.req.Turn, Class: a.t.req.Class, PrefillUncached: a.uncached})
	var once sync.Once // a transport may write a request twice
	ctx := httptrace.WithClientTrace(a.ctx, &httptrace.ClientTrace{
		Got1xxResponse: a.on1xx,
		WroteRequest:   func(httptrace.WroteRequestInfo) { once.Do(func() { close(a.wrote) }) },
	})
	req := a.request(ctx, a.d, h)
	go func() {
		resp, err := a.t.proxy.out.data.RoundTrip(req) //nolint:bodyclose // end closes it
		a.head <- headResult{resp, err}
	}()
}

// request is a leg's HTTP request: the client's method and path, the shared body.
func (a *attempt) request(ctx context.Context, w *worker, h http.Header) *http.Request {
	body := a.t.prompt.body
	scheme, host, _ := strings.Cut(w.URL, "://")
	req := (&http.Request{
		Method: a.t.r.Method,
		URL:    &url.URL{Scheme: scheme, Host: host, Path: a.t.r.URL.Path},
		Proto:  "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: body.reader(), ContentLength: int64(len(body.b)),
	}).WithContext(ctx)
	req.GetBody = func() (io.ReadCloser, error) { return body.reader(), nil }
	return req
}

// on1xx takes the verdict of a fused question from its 103.
func (a *attempt) on1xx(code int, h textproto.MIMEHeader) error {
	line := h.Get(admission.HeaderVerdict)
	if code != http.StatusEarlyHints || line == "" {
		return nil
	}
	v, ok := earlyVerdict([]byte(line))
	if !ok {
		a.t.proxy.metrics.WireFault("early_hint")
		return nil
	}
	select {
	case a.verdict <- v:
	default: // a second 103 says nothing new
	}
	return nil
}

// earlyVerdict reads the verdict of a 103, which can only admit.
func earlyVerdict(line []byte) (kvc.Verdict, bool) {
	w, err := parseVerdict(line)
	if err != nil {
		return kvc.Verdict{}, false
	}
	v, err := w.Core()
	return v, err == nil && v.CanAdmit
}

func closeBody(resp *http.Response) {
	if resp != nil {
		_ = resp.Body.Close()
	}
}

func parseVerdict(b []byte) (admission.Verdict, error) {
	var w admission.Verdict
	if err := json.Unmarshal(b, &w); err != nil {
		return w, fmt.Errorf("decode verdict: %w", err)
	}
	return w, nil
}

// take waits for the decode leg's answer, a.resp, which end closes.
func (a *attempt) take() error {
	r := <-a.head
	a.taken, a.resp = true, r.resp
	return r.err
}

// awaitPlace waits until a queued turn has its place on the decode worker, so
// that prefills do not run into their clock behind it (R60). False means that it
// got none. A worker whose 103 do not arrive is not waited for.
func (a *attempt) awaitPlace(limit time.Duration) bool {
	if !a.queued || !a.d.hints() {
		return true
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-a.verdict:
		return true
	case <-timer.C:
		return true
	case h := <-a.head:
		a.head <- h // for relay
		select {
		case <-a.verdict: // both had come
			return true
		default:
			return false
		}
	case <-a.ctx.Done():
		return false
	}
}

// sendPrefill sends the prefill leg. Its failure ends the attempt, with the
// fault as the cause.
func (a *attempt) sendPrefill() {
	a.prefill = make(chan struct{})
	p := a.t.proxy
	report, ok := a.p.data.allow()
	if !ok {
		report = func(error) {} // it was chosen before its breaker opened: one more try does no harm
	}
	req := a.request(a.ctx, a.p, a.header(a.p, admission.Turn{Leg: admission.LegPrefill}))
	p.series.leg(a.p, +1)
	p.background.Go(func() {
		f := a.runPrefill(req)
		report(f.health())
		p.series.leg(a.p, -1)
		if f != nil {
			a.cancel(f) // keeps an earlier cause
		}
		close(a.prefill)
	})
}

// runPrefill waits for the prefill leg's end. Its answer is read for faults
// only: an aborted prefill is a 200 (R55).
func (a *attempt) runPrefill(req *http.Request) *fault {
	broken := func(err error) *fault {
		f := prefillFault(err)
		f.neutral = a.ctx.Err() != nil
		return f
	}
	resp, err := a.t.proxy.out.data.RoundTrip(req)
	if err != nil {
		return broken(err)
	}
	defer closeBody(resp)
	if resp.StatusCode/100 != 2 {
		return answerFault(resp, true)
	}
	var seen sglang.Observed
	if err := observe(&seen, resp); err != nil {
		return broken(err)
	}
	if seen.ErrorCode == 0 && seen.Finish != "abort" {
		return nil
	}
	f := streamFault(seen.ErrorCode)
	f.outcome = prefillFault(nil).outcome
	return f
}

// observe reads an answer to its end, for accounting.
func observe(o *sglang.Observed, resp *http.Response) error {
	if !isEventStream(resp.Header) {
		b, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
		sglang.ObserveBody(o, b)
		return err
	}
	var ev sglang.Events
	buf := make([]byte, 8<<10)
	for {
		n, err := resp.Body.Read(buf)
		ev.Feed(buf[:n], func(_, data []byte) { sglang.ObserveEvent(o, data) })
		if err != nil {
			return noEOF(err)
		}
	}
}

func isEventStream(h http.Header) bool {
	const want = "text/event-stream"
	ct := h.Get("Content-Type")
	return len(ct) >= len(want) && strings.EqualFold(ct[:len(want)], want)
}

const (
	// prefillGrace is what a prefill leg gets to end by itself after its decode
	// leg ended well: aborting it past the hand-off costs more than its end (R50).
	prefillGrace = 5 * time.Second
	// turnEndWait bounds the wait for a cancelled turn's end at its worker
	// (wire.md §1), and how long a turn that may not have been admitted is
	// waited for.
	turnEndWait  = 30 * time.Second
	turnEndLeast = 3 * time.Second // what a sidecar may take to abort an engine that does not answer, and some
	turnEndGuess = time.Second
)

// ending says who ended an attempt's decode leg.
type ending int

const (
	endedWell ending = iota // the worker, with a whole answer
	broken                  // the worker, otherwise: it has no turn left to wait for
	cancelled               // the router: the worker may still be ending it (R64)
)

// end closes an attempt; the decode leg is over when it returns.
func (a *attempt) end(how ending, health error) {
	a.detach()
	if how != endedWell || a.prefill == nil {
		a.cancel(errEnded)
	}
	if !a.taken {
		_ = a.take() // it was cancelled: there is nothing to learn
	}
	closeBody(a.resp)
	a.tell(health)
	if a.sent {
		a.t.proxy.series.leg(a.d, -1)
		switch {
		case how != cancelled:
			a.d.turns.end(a.id)
		case a.sure:
			a.d.turns.leave(a.id, turnEndWait)
		default:
			a.d.turns.leave(a.id, turnEndGuess)
		}
	}
	a.endPrefill()
}

// tell gives the decode worker's breaker the first word on its health.
func (a *attempt) tell(health error) {
	if a.report != nil {
		a.report(health)
		a.report = nil
	}
}

// endingOf is how a leg that failed with a cancelled or a live context ended.
func (a *attempt) endingOf() ending {
	if a.ctx.Err() != nil {
		return cancelled
	}
	return broken
}

// prefillWord is how long a decode leg's failure waits for the prefill leg's
// word on it: decode fails because prefill did, and the cause is the better
// answer (R47).
const prefillWord = 50 * time.Millisecond

// settle lets the prefill leg explain the decode leg's failure.
func (a *attempt) settle(f *fault) *fault {
	if a.prefill == nil || f.neutral || f.outcome == telemetry.OutcomePrefillError {
		return f
	}
	timer := time.NewTimer(prefillWord)
	defer timer.Stop()
	select {
	case <-a.prefill:
	case <-timer.C:
	}
	if p, ok := errors.AsType[*fault](context.Cause(a.ctx)); ok {
		return p
	}
	return f
}

// endPrefill waits for the prefill leg, in the background, and frees the room.
func (a *attempt) endPrefill() {
	free := func() {
		a.cancel(errEnded)
		if a.boot != nil {
			a.t.proxy.rooms.free(a.boot.Room)
		}
	}
	if a.prefill == nil {
		free()
		return
	}
	a.t.proxy.background.Go(func() {
		defer free()
		grace := time.NewTimer(prefillGrace)
		defer grace.Stop()
		select {
		case <-a.prefill:
			return
		case <-grace.C:
		case <-a.ctx.Done():
		}
		a.cancel(errEnded)
		<-a.prefill
	})
}
