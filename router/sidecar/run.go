package sidecar

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
)

// controlTimeout bounds the calls to the engine's control routes on a turn's
// way. A failing one never changes what the data path does (R80).
const controlTimeout = 2 * time.Second

var errGone = errors.New("nobody waits for the answer")

// run forwards a turn that is on the book, and takes it off again.
func (t *turn) run(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.Context()))
	defer cancel()
	t.mu.Lock()
	t.cancel = cancel
	t.deferring = t.handover()
	if t.gone {
		cancel()
	}
	t.mu.Unlock()
	stop := context.AfterFunc(r.Context(), t.stop)
	defer stop()

	rl := &relay{onBytes: t.onBytes}
	outcome := kvc.OutcomeError
	defer func() { t.finish(rl, outcome) }()

	e, refusal := t.edit()
	if refusal != nil {
		refusal.write(w)
		return
	}
	rl.drop = e.usage
	resp, err := t.s.forward(ctx, r, e.apply(t.body))
	if err != nil {
		outcome = t.unanswered(w, err)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	err = t.relay(w, resp, rl)
	outcome = t.outcome(resp, rl, err)
	if err != nil {
		// The router must see a broken answer, not a short one (R05).
		panic(http.ErrAbortHandler)
	}
}

// forward sends the spliced body to the engine. Nothing of ours goes past this
// point: no x-kvc header, no client key, no header override (R38, R41).
func (s *Sidecar) forward(ctx context.Context, r *http.Request, body []byte) (*http.Response, error) {
	target := s.cfg.EngineURL + r.URL.Path
	if r.URL.RawQuery != "" {
		target += "?" + r.URL.RawQuery
	}
	var rd io.Reader
	if body != nil {
		rd = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, r.Method, target, rd)
	if err != nil {
		return nil, err
	}
	req.Header = outbound(r.Header, s.cfg.EngineKey)
	return s.data.RoundTrip(req)
}

// outbound is what of a request's headers the engine sees.
func outbound(in http.Header, key string) http.Header {
	h := admission.Forwarded(in)
	h.Del("Accept-Encoding") // the relay reads what it passes (R39)
	admission.SetBearer(h, key)
	if _, ok := h["User-Agent"]; !ok {
		h["User-Agent"] = []string{""} // do not add ours
	}
	return h
}

// relay passes the engine's answer on.
func (t *turn) relay(w http.ResponseWriter, resp *http.Response, rl *relay) error {
	h := w.Header()
	length := resp.ContentLength
	copyHeader(h, resp)
	if rid := t.clientRID(); rid != "" {
		h.Set("X-Request-Id", rid)
	}
	body := io.Reader(resp.Body)
	sse := isEventStream(resp.Header)
	if resp.StatusCode/100 != 2 {
		sse, body, length = false, io.LimitReader(body, maxErrorBody), -1
	}
	if length >= 0 && !sse {
		h.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	if t.abandoned() {
		return errGone
	}
	w.WriteHeader(resp.StatusCode)
	if sse {
		return rl.stream(w, body)
	}
	return rl.whole(w, body)
}

// copyHeader takes over the engine's headers, less those of its connection.
func copyHeader(h http.Header, resp *http.Response) {
	admission.StripHopByHop(resp.Header)
	admission.StripInternal(resp.Header)
	maps.Copy(h, resp.Header)
	h.Set(admission.HeaderOrigin, admission.OriginEngine)
}

// onBytes sees the engine's first output: the hand-off is over, and an abort
// that waited for it may go now.
func (t *turn) onBytes() error {
	if !t.s.alive.Load() {
		t.s.alive.Store(true)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.streaming {
		t.streaming, t.deferring = true, false
		t.s.metrics.firstByte(t)
	}
	if t.gone {
		return errGone
	}
	return nil
}

// stop ends the turn early: the client is gone, or the hard deadline has come.
// Between forwarding a decode leg with bootstrap and its first byte the engine
// may be receiving KV, and an abort then would leak blocks or crash it (R50): it
// waits for the first byte, an error, or the cap. Everything else ends at once.
func (t *turn) stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone {
		return
	}
	t.gone = true
	switch {
	case t.cancel == nil: // not forwarded yet; run looks
	case t.deferring:
		t.s.metrics.deferred.Inc()
		t.cap = time.AfterFunc(t.s.cfg.AbortCap, t.cancel)
	default:
		t.cancel()
	}
}

func (t *turn) abandoned() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.gone && !t.deferring
}

// unanswered handles an engine that gave no answer at all.
func (t *turn) unanswered(w http.ResponseWriter, err error) kvc.Outcome {
	t.mu.Lock()
	left := t.gone
	t.mu.Unlock()
	if left {
		return kvc.OutcomeCancelled
	}
	t.s.suspect()
	t.s.cfg.Log.Warn("engine did not answer a turn", "attempt", t.in.Attempt, "error", err)
	admission.WriteError(w, http.StatusBadGateway, "the engine did not answer")
	return kvc.OutcomeError
}

// outcome says how the turn ended. Only ok credits residency, so an answer that
// was cut, aborted or failed in-band is never taken for a finished turn.
func (t *turn) outcome(resp *http.Response, rl *relay, err error) kvc.Outcome {
	t.mu.Lock()
	left := t.gone
	t.mu.Unlock()
	switch {
	case rl.obs.Done && rl.obs.ErrorCode == 0 && resp.StatusCode/100 == 2:
		// The whole answer passed. Clients that close at [DONE], before the end
		// of the body, have it all the same.
		return kvc.OutcomeOK
	case errors.Is(err, errEngine) && !left:
		t.s.suspect()
		return kvc.OutcomeError
	case err != nil: // a write error is a peer that left
		return kvc.OutcomeCancelled
	case resp.StatusCode/100 != 2 || rl.obs.Failed():
		return kvc.OutcomeError
	case isEventStream(resp.Header) && !rl.obs.Done && rl.obs.Finish == "":
		return kvc.OutcomeError
	}
	return kvc.OutcomeOK
}

// finish ends the turn at the engine, if it has not ended by itself, and then
// on the book: the turn frame means that the engine is done with it (R64).
func (t *turn) finish(rl *relay, o kvc.Outcome) {
	t.mu.Lock()
	t.cancel()
	if t.cap != nil {
		t.cap.Stop()
	}
	t.mu.Unlock()
	if o == kvc.OutcomeCancelled {
		t.abort()
	}
	if t.s.evidence(t, &rl.obs, o) {
		t.s.clear("cached_tokens") // before this turn's own blocks are credited
	}
	t.s.metrics.ended(t, &rl.obs, o) // first: whoever sees the turn gone finds it counted
	t.s.book.end(t, rl.obs.Usage, o)
}

// abort tells the engine by rid too: it notices a closed connection only after
// seconds, and both legs' queues know the request.
func (t *turn) abort() {
	ctx, cancel := context.WithTimeout(context.Background(), controlTimeout)
	defer cancel()
	if err := t.s.engine.Abort(ctx, t.rid()); err != nil {
		t.s.metrics.abortErrors.Inc()
		t.s.cfg.Log.Warn("abort at the engine", "attempt", t.in.Attempt, "error", err)
	}
}
