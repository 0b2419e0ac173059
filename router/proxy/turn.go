package proxy

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/session"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// machine is Algorithm 3 with the beliefs applied (router/state's turn).
type machine interface {
	Next() kvc.Step
	Answer(kvc.Reply)
	Failed()
	FailedPrefill()
	Streaming()
	Done(kvc.Outcome)
	Attempts() int
}

// turn is one client request on its way.
type turn struct {
	proxy   *Proxy
	w       http.ResponseWriter
	r       *http.Request
	arrived time.Time
	id      string // x-request-id
	pool    *fleet.Pool
	prompt  *prompt
	req     kvc.Request
	machine machine

	open  *attempt // a fused question that was admitted, waiting for its Run
	grant *grant   // a lease granted by the RPC, waiting for its Run
	last  *fault   // of the last attempt that failed
	log   *decision

	// What the client and the metrics are told.
	mode    kvc.Mode
	reason  kvc.Reason
	worker  string // pod name
	outcome string // telemetry's
	// abort says that the answer broke where only breaking the client's
	// connection can still tell.
	abort bool
}

// grant is an admission that no leg has presented yet.
type grant struct {
	attempt string
	lease   string
	worker  *worker
}

// serveTurn handles one of the turn surfaces.
func (p *Proxy) serveTurn(route block.Route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		t := &turn{proxy: p, w: w, r: r, arrived: time.Now(), outcome: telemetry.OutcomeInvalid}
		p.metrics.Requests(+1)
		defer p.metrics.Requests(-1)
		refuse := t.accept(route)
		if refuse != nil {
			t.refuse(refuse)
			return
		}
		defer t.prompt.body.release()
		t.serve()
		if t.abort {
			panic(http.ErrAbortHandler)
		}
	}
}

// accept reads and understands the request.
func (t *turn) accept(route block.Route) *refusal {
	p := t.proxy
	t.id = requestID(t.r.Header, "")
	if p.closing.Load() {
		return shuttingDown()
	}
	f := p.fleet.Load()
	if f == nil {
		return noWorker()
	}
	t.pool = &f.Pool
	body, refuse := p.readBody(t.w, t.r)
	if refuse != nil {
		return refuse
	}
	p.settling.wait(t.r.Context())
	if t.prompt, refuse = p.parse(route, body, t.pool, p.disaggregated(route)); refuse != nil {
		return refuse
	}
	t.id = requestID(t.r.Header, t.prompt.rid)
	if t.prompt.billing {
		p.metrics.BillingCut()
	}
	return nil
}

// serve places and runs an accepted turn. Its one finaliser is Done (R57).
func (t *turn) serve() {
	p := t.proxy
	p.metrics.Session(string(t.understandSession()))
	m, err := p.state.Enter(t.r.Context(), t.req, t.prompt.chain.Blocks, p.path(t.prompt.route))
	if err != nil { // the client left while the session's turn before was running
		p.metrics.TurnEnded("", "", telemetry.OutcomeClientCancelled)
		return
	}
	t.machine, t.req = m, m.Request()
	t.log = p.decisions.start(t)
	outcome := kvc.OutcomeError
	defer func() {
		t.dropUnused()
		t.machine.Done(outcome)
		p.metrics.TurnEnded(t.mode.String(), string(t.reason), t.outcome)
		if t.mode != kvc.ModeNone {
			p.metrics.TurnTook(t.mode.String(), time.Since(t.arrived))
		}
		t.log.end(t)
	}()
	outcome = t.drive()
}

// drive runs the machine until the client has its answer.
func (t *turn) drive() kvc.Outcome {
	for {
		if t.r.Context().Err() != nil {
			return t.giveUp(clientGone())
		}
		switch step := t.machine.Next(); step.Do {
		case kvc.Ask:
			t.machine.Answer(t.ask(step))
		case kvc.Run:
			f := t.run(step)
			if f == nil {
				return t.kvcOutcome()
			}
			if !t.retry(f) {
				return t.giveUp(f)
			}
		case kvc.Stop:
			return t.stop(step)
		}
	}
}

// retry tells the machine that an attempt failed before its first byte, when
// another one is safe and could help.
func (t *turn) retry(f *fault) bool {
	if t.last == nil || !errors.Is(f.err, errBreaker) {
		t.last = f // an open breaker says less than what opened it
	}
	if f.retry == "" || t.r.Context().Err() != nil {
		return false
	}
	t.proxy.metrics.Retry(f.retry)
	t.proxy.log.Debug("attempt failed before its first byte", "request_id", t.id, "worker", t.worker,
		"mode", t.mode.String(), "cause", f.retry, "error", f)
	t.log.event("retry", "", f.retry)
	switch f.retry {
	case telemetry.RetryPrefill:
		t.machine.FailedPrefill()
	case telemetry.RetryLeaseExpired:
		t.machine.Answer(kvc.Reply{Verdict: kvc.Verdict{Reason: kvc.ReasonLeaseExpired}})
	case telemetry.RetryStaleEpoch:
		t.machine.Answer(kvc.Reply{Verdict: kvc.Verdict{Reason: kvc.ReasonStaleEpoch}})
	default:
		t.machine.Failed()
	}
	return true
}

// stop answers a turn that no worker is left for.
func (t *turn) stop(step kvc.Step) kvc.Outcome {
	if t.last != nil {
		return t.giveUp(t.last)
	}
	t.reason = step.Reason
	return t.giveUp(&fault{outcome: telemetry.OutcomeUnavailable, refusal: noWorker()})
}

// giveUp makes a fault the client's answer; nothing was sent before.
func (t *turn) giveUp(f *fault) kvc.Outcome {
	t.outcome = f.outcome
	if f.outcome == telemetry.OutcomeClientCancelled {
		return kvc.OutcomeCancelled // nobody is left to read an answer
	}
	if f.refusal != nil {
		t.proxy.metrics.Refused(f.refusal.reason)
	}
	if !f.neutral {
		t.proxy.log.Warn("turn failed", "request_id", t.id, "worker", t.worker, "mode", t.mode.String(),
			"attempts", t.machine.Attempts(), "outcome", f.outcome, "error", f)
	}
	t.explainHeader()
	f.write(t.w)
	return kvc.OutcomeError
}

// refuse answers a request that no worker was asked for.
func (t *turn) refuse(e *refusal) {
	t.proxy.metrics.Refused(e.reason)
	if e.status == http.StatusRequestEntityTooLarge {
		t.proxy.log.Warn("request refused: body over the limit", "request_id", t.id, "limit", t.proxy.opt.MaxBody)
	}
	t.w.Header().Set(headerRequestID, t.id)
	e.write(t.w)
}

func (t *turn) kvcOutcome() kvc.Outcome {
	switch t.outcome {
	case telemetry.OutcomeOK:
		return kvc.OutcomeOK
	case telemetry.OutcomeClientCancelled:
		return kvc.OutcomeCancelled
	}
	return kvc.OutcomeError
}

// explainHeader tells the client how its turn ran.
func (t *turn) explainHeader() {
	h := t.w.Header()
	h.Set(headerRequestID, t.id)
	h.Set(admission.HeaderAttempts, strconv.Itoa(t.machine.Attempts()))
	if t.mode != kvc.ModeNone {
		h.Set(admission.HeaderMode, t.mode.String())
	}
	if t.worker != "" {
		h.Set(admission.HeaderWorker, t.worker)
	}
	if t.reason != kvc.ReasonNone {
		h.Set(admission.HeaderReason, string(t.reason))
	}
}

// dropUnused gives back an admission that no attempt used.
func (t *turn) dropUnused() {
	if a := t.open; a != nil {
		t.open = nil
		a.end(cancelled, errNeutral)
	}
	if g := t.grant; g != nil {
		t.grant = nil
		t.proxy.releaseLease(g)
	}
}

// releaseLease frees a lease in the background; it would expire anyway.
func (p *Proxy) releaseLease(g *grant) {
	if g.lease == "" {
		return
	}
	p.background.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := p.client.Release(ctx, g.worker.URL, g.lease); err != nil {
			p.log.Debug("lease not released; it will expire", "worker", g.worker.Name, "error", err)
		}
	})
}

// understandSession says whose turn this is (R83, R84; Q18) and what it weighs.
func (t *turn) understandSession() session.Source {
	p, chain := t.proxy, &t.prompt.chain
	cfg := p.session.Load()
	source := session.Source("none")
	id, ok := session.FromRequest(*cfg, t.r.Header, t.prompt.scan)
	if ok {
		source = id.Source
		t.req.Session = session.Key(t.pool.Namespace, t.pool.Name, id.Raw)
		t.req.Lineage = p.lineage(t.req.Session, t.parentKey(id.Parent))
	} else if p.state.Params().NoID == kvc.NoIDContinues {
		source = t.continueSession()
	}
	t.req.Turn = chain.Turn
	if _, _, known := p.state.Known(t.req.Session); known && t.prompt.route != block.Chat && t.req.Session != "" {
		t.req.Turn = max(t.req.Turn, 1) // no roles to count: a known session is not at its first turn
	}
	t.req.InputTokens = p.tokens(chain)
	t.req.OutputTokens = t.prompt.maxOutput
	return source
}

func (t *turn) parentKey(parent string) kvc.SessionKey {
	if parent == "" {
		return ""
	}
	return session.Key(t.pool.Namespace, t.pool.Name, parent)
}

// continueSession finds the conversation that a request without an id
// continues, or starts one. A prompt too short for a block stays sessionless.
func (t *turn) continueSession() session.Source {
	blocks := t.prompt.chain.Blocks
	if key, lineage, ok := session.Continue(blocks, t.proxy.state); ok {
		t.req.Session, t.req.Lineage = key, lineage
		return "continuation"
	}
	if len(blocks) == 0 {
		return "none"
	}
	var random [16]byte
	_, _ = rand.Read(random[:]) // crypto/rand never fails
	t.req.Session = session.Key(t.pool.Namespace, t.pool.Name, session.Derived(random[:]))
	t.req.Lineage = t.req.Session
	return "derived"
}

// run makes one attempt. nil means that the client has its answer, to the end
// or to an in-band error; a fault means that it has seen nothing.
func (t *turn) run(step kvc.Step) *fault {
	t.mode, t.reason = step.Mode, step.Reason
	a, f := t.attemptFor(step)
	if f != nil {
		return f
	}
	t.worker = a.d.Name
	t.log.event("run", a.d.Name, step.Mode.String())
	if step.Prefill != "" && a.p != nil && a.awaitPlace(t.proxy.opt.IdleTimeout) {
		a.sendPrefill()
	}
	return t.relay(a)
}

// attemptFor is the attempt that a Run uses: the admitted fused question, a leg
// with the granted lease, or one without (Fallback).
func (t *turn) attemptFor(step kvc.Step) (*attempt, *fault) {
	if a := t.open; a != nil && a.d.ID == step.Worker && (step.Prefill == "" || a.p != nil && a.p.ID == step.Prefill) {
		t.open = nil
		t.dropUnused()
		return a, nil
	}
	id, admit, lease := newAttemptID(), admission.AdmitNone, ""
	if g := t.grant; g != nil && g.worker.ID == step.Worker && g.lease != "" {
		id, admit, lease = g.attempt, admission.AdmitLease, g.lease
		t.grant = nil
	}
	t.dropUnused()
	d, p := t.proxy.worker(step.Worker), t.proxy.worker(step.Prefill)
	if d == nil || step.Prefill != "" && p == nil {
		return nil, transportFault(errors.New("the worker left the fleet"))
	}
	a := t.newAttempt(id, d, p)
	a.uncached = step.PrefillUncached
	a.sendDecode(admit, lease)
	return a, nil
}
