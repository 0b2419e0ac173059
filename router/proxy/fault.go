package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// Causes of a cancelled attempt, read back with context.Cause.
var (
	errIdle       = errors.New("the worker fell silent")
	errClientGone = errors.New("the client hung up")
	errEnded      = errors.New("the attempt ended")
	errBreaker    = errors.New("the worker's breaker is open")
)

// fault is why an attempt did not serve the turn. Before the first byte it is
// retried or becomes the answer; after it, it becomes an in-band error.
type fault struct {
	outcome string // telemetry outcome of the turn, should it end with this
	retry   string // telemetry cause, should it be retried; "" = never retried
	neutral bool   // says nothing about the worker's health (R67)

	// An engine's own answer passes unchanged (wire.md §9) …
	status int
	header http.Header
	body   []byte
	// … and what the router has to say instead when there is none.
	refusal *refusal

	err error // for the log
}

func (f *fault) Error() string {
	switch {
	case f.err != nil:
		return f.outcome + ": " + f.err.Error()
	case f.status != 0:
		return f.outcome + ": status " + strconv.Itoa(f.status)
	}
	return f.outcome
}

func (f *fault) Unwrap() error { return f.err }

// health is what a breaker learns: nil, neutral or the fault.
func (f *fault) health() error {
	switch {
	case f == nil:
		return nil
	case f.neutral:
		return errNeutral
	}
	return f
}

// write makes the fault the client's whole answer.
func (f *fault) write(w http.ResponseWriter) {
	if f.refusal != nil {
		f.refusal.write(w)
		return
	}
	h := w.Header()
	copyAnswerHeader(h, f.header)
	h.Set("Content-Length", strconv.Itoa(len(f.body)))
	w.WriteHeader(f.status)
	_, _ = w.Write(f.body) // a client that left needs no answer
}

// inBand is the fault as the end of a stream.
func (f *fault) inBand() *refusal {
	if f.refusal != nil {
		return f.refusal
	}
	return upstreamFault(reasonUpstream, "The worker failed while it was answering.")
}

func clientGone() *fault {
	return &fault{outcome: telemetry.OutcomeClientCancelled, neutral: true, err: errClientGone,
		refusal: &refusal{status: 499, reason: "client-cancelled", message: "The client closed the request."}}
}

func idleFault() *fault {
	return &fault{outcome: telemetry.OutcomeIdle, err: errIdle,
		refusal: &refusal{status: http.StatusGatewayTimeout, reason: reasonIdle, code: "idle_timeout",
			message: "The worker sent nothing for too long."}}
}

func transportFault(err error) *fault {
	return &fault{outcome: telemetry.OutcomeUpstreamError, retry: telemetry.RetryTransport, err: err,
		refusal: upstreamFault(reasonUpstream, "The worker's connection failed.")}
}

func emptyFault() *fault {
	return &fault{outcome: telemetry.OutcomeUpstreamError, retry: telemetry.RetryEmpty,
		refusal: upstreamFault(reasonUpstream, "The worker ended its answer before it began.")}
}

func prefillFault(err error) *fault {
	return &fault{outcome: telemetry.OutcomePrefillError, retry: telemetry.RetryPrefill, err: err,
		refusal: upstreamFault(reasonPrefill, "The prefill worker failed.")}
}

// streamFault is an error event that came before any content: as good as a
// status line, so the client gets one (R08).
func streamFault(code int) *fault {
	f := &fault{outcome: telemetry.OutcomeUpstreamError, retry: telemetry.RetryDecodeStatus,
		refusal: upstreamFault(reasonUpstream, "The worker could not answer.")}
	if code >= 400 && code < 500 {
		f.retry, f.neutral, f.outcome = "", true, telemetry.OutcomeUpstreamRefused
		f.refusal.status, f.refusal.code = code, "upstream_refused"
	}
	return f
}

// answerFault reads a non-2xx answer of an engine or its sidecar.
func answerFault(resp *http.Response, prefill bool) *fault {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	f := &fault{status: resp.StatusCode, header: resp.Header, body: body, err: err,
		outcome: telemetry.OutcomeUpstreamError, retry: telemetry.RetryDecodeStatus}
	if prefill {
		f.outcome, f.retry = telemetry.OutcomePrefillError, telemetry.RetryPrefill
	}
	code := resp.StatusCode
	switch {
	case err != nil:
		f.refusal = upstreamFault(reasonUpstream, "The worker's answer broke off.")
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		// Our own keys are wrong: no client could do better, and no other
		// worker either (wire.md §0: a configuration fault).
		f.neutral, f.retry = true, ""
		f.refusal = upstreamFault(reasonWorkerAuth, "The worker refused the router's credentials.")
	case resp.Header.Get(admission.HeaderOrigin) == admission.OriginSidecar:
		f.sidecar(prefill)
	case code < 500:
		f.neutral, f.retry = true, "" // the client's own mistake: neutral, and final
		if !prefill {
			f.outcome = telemetry.OutcomeUpstreamRefused
		}
	}
	return f
}

// sidecar reads an answer that the engine never saw the question of.
func (f *fault) sidecar(prefill bool) {
	switch {
	case f.status == http.StatusConflict:
		f.conflict(prefill)
	case f.status == http.StatusServiceUnavailable && !prefill:
		f.noPlace(f.header)
	default:
		f.refusal = upstreamFault(reasonUpstream, "The worker could not take the request.")
		f.neutral = f.status < 500
	}
}

// conflict is a sidecar's 409: the lease is gone, or the worker is another one now.
func (f *fault) conflict(prefill bool) {
	f.neutral, f.refusal = true, contended(0)
	if prefill {
		return // it holds no leases: it is another incarnation, and another try finds another worker
	}
	f.retry = telemetry.RetryLeaseExpired
	if w, err := parseVerdict(f.body); err == nil && kvc.Reason(w.Reason) == kvc.ReasonStaleEpoch {
		f.retry = telemetry.RetryStaleEpoch
	}
}

// noPlace is a sidecar's 503: its bounded queue had no place in time, or it
// drains. The former ends the turn: the wait was the last resort (wire.md §9).
func (f *fault) noPlace(h http.Header) {
	f.neutral = true
	if kvc.Reason(h.Get(admission.HeaderReason)) == kvc.ReasonDraining {
		f.refusal = noWorker()
		return
	}
	f.retry, f.outcome = "", telemetry.OutcomeContended
	f.refusal = contended(retryAfter(h))
}

func retryAfter(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || n < 0 || n > 3600 {
		return 0
	}
	return time.Duration(n) * time.Second
}

// why turns the error of a leg into its fault: a cancelled leg ends with the
// cause of the cancel.
func why(ctx context.Context, err error) *fault {
	cause := context.Cause(ctx)
	if f, ok := errors.AsType[*fault](cause); ok {
		return f
	}
	switch {
	case errors.Is(cause, errIdle):
		return idleFault()
	case cause != nil:
		return clientGone()
	case errors.Is(err, errBreaker):
		// Nobody was asked: the worker is out of the fleet for a while (R68).
		return &fault{outcome: telemetry.OutcomeUnavailable, retry: telemetry.RetryTransport, neutral: true,
			err: err, refusal: noWorker()}
	}
	return transportFault(err)
}
