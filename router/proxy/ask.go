package proxy

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/telemetry"
)

const (
	// homeAskMost bounds the wait for the home's verdict: a pause of its must
	// not cost a reseed (architecture.md), a dead one must not cost more.
	homeAskMost = time.Second
	// uploadMost bounds the upload of a fused question's body.
	uploadMost = 10 * time.Second
)

// ask puts the question of an Ask to its worker. Whatever is not a verdict is
// Unknown: it feeds the breaker and is never a reject (Q8, R80).
func (t *turn) ask(step kvc.Step) kvc.Reply {
	t.dropUnused()
	w := t.proxy.worker(step.Worker)
	if w == nil {
		return kvc.Reply{Unknown: true}
	}
	if !t.pause(step.Wait) || !t.awaitTurnEnd(w) {
		return kvc.Reply{Unknown: true}
	}
	believed, ok := t.proxy.state.Home(t.req.Session)
	home := ok && believed == w.ID
	start := time.Now()
	way := "rpc"
	var reply kvc.Reply
	var result string
	if home && w.hints() {
		way = "fused"
		reply, result = t.askFused(w, step)
	} else {
		reply, result = t.askRPC(w, step, t.askDeadline(home))
	}
	t.proxy.metrics.Asked(way, result, time.Since(start))
	t.log.asked(w.Name, way, result, reply)
	t.proxy.log.Debug("asked", "request_id", t.id, "worker", w.Name, "way", way, "result", result,
		"mode", reply.Verdict.Mode.String(), "reason", reply.Verdict.Reason)
	return reply
}

// pause waits as the machine ordered (Q12); false means that the client left.
func (t *turn) pause(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-t.r.Context().Done():
		return false
	}
}

// awaitTurnEnd holds a session's turn back until its cancelled one has ended in
// the engine (R64). False means that the worker is not to be asked: the client
// left, or the wait cost as much as a reseed elsewhere (a turn cancelled in
// hand-off may take 30 s to end).
func (t *turn) awaitTurnEnd(w *worker) bool {
	ended := w.turns.cancelled(t.req.Session)
	if ended == nil {
		return true
	}
	timer := time.NewTimer(min(max(t.reseedCost(), turnEndLeast), turnEndWait))
	defer timer.Stop()
	select {
	case <-ended:
		t.proxy.metrics.Waited(true)
		return true
	case <-timer.C:
		t.proxy.metrics.Waited(false)
	case <-t.r.Context().Done():
	}
	return false
}

// reseedCost is what rebuilding the prompt elsewhere would take.
func (t *turn) reseedCost() time.Duration {
	return time.Duration(t.req.InputTokens) * t.proxy.state.Params().ReseedCostPerToken
}

// askDeadline is how long a verdict may take, in real time.
func (t *turn) askDeadline(home bool) time.Duration {
	short := t.proxy.askTimeout()
	if !home {
		return short
	}
	return max(short, min(t.reseedCost(), homeAskMost))
}

// askRPC asks by POST /admit_direct_append: the prompt is not uploaded.
func (t *turn) askRPC(w *worker, step kvc.Step, deadline time.Duration) (kvc.Reply, string) {
	unknown := kvc.Reply{Unknown: true}
	ctx, cancel := context.WithTimeout(t.r.Context(), deadline)
	defer cancel()
	select {
	case w.asks <- struct{}{}:
		defer func() { <-w.asks }()
	default:
		select {
		case w.asks <- struct{}{}:
			defer func() { <-w.asks }()
		case <-ctx.Done():
			return unknown, telemetry.AskSkipped
		}
	}
	report, ok := w.admit.allow()
	if !ok {
		return unknown, telemetry.AskSkipped
	}
	id := newAttemptID()
	q := admission.NewQuestion(kvc.Question{Attempt: id, Request: t.req, Blocks: t.prompt.chain.Blocks,
		PrefillUncachedTokens: step.PrefillUncached}, w.epoch(), t.prompt.route)
	answer, err := t.proxy.client.Ask(ctx, w.URL, q)
	v, result, fault := readVerdict(answer, err)
	if t.r.Context().Err() != nil {
		fault = errNeutral // the client's hang-up is not the worker's slowness
	}
	report(fault)
	if result != telemetry.AskAdmitted && result != telemetry.AskRefused {
		return unknown, result
	}
	if v.CanAdmit {
		t.grant = &grant{attempt: id, lease: v.Lease.ID, worker: w}
	}
	return kvc.Reply{Verdict: v}, result
}

// readVerdict sorts the end of an RPC: its verdict, the metric's word, and what
// the breaker learns.
func readVerdict(answer admission.Verdict, err error) (kvc.Verdict, string, error) {
	if err == nil {
		var v kvc.Verdict
		if v, err = answer.Core(); err == nil {
			if v.CanAdmit {
				return v, telemetry.AskAdmitted, nil
			}
			return v, telemetry.AskRefused, nil
		}
	}
	var se *admission.StatusError
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return kvc.Verdict{}, telemetry.AskTimeout, err
	case errors.As(err, &se) && se.Code/100 == 4:
		return kvc.Verdict{}, telemetry.AskError, errNeutral // a fault of ours or of the set-up (wire.md §0: 401)
	}
	return kvc.Verdict{}, telemetry.AskError, err
}

// askFused sends the turn itself with the question in its headers. Admitted, it
// stays open for the Run that follows.
func (t *turn) askFused(w *worker, step kvc.Step) (kvc.Reply, string) {
	report, ok := w.admit.allow()
	if !ok {
		return kvc.Reply{Unknown: true}, telemetry.AskSkipped
	}
	a := t.newAttempt(newAttemptID(), w, t.proxy.worker(step.Prefill))
	a.uncached = step.PrefillUncached
	a.sendDecode(admission.AdmitAsk, "")
	v, result, fault := a.awaitVerdict(t.askDeadline(true))
	if t.r.Context().Err() != nil {
		fault = errNeutral
	}
	report(fault)
	switch result {
	case telemetry.AskAdmitted:
		a.sure = true
		t.open = a
		return kvc.Reply{Verdict: v}, result
	case telemetry.AskRefused:
		a.end(broken, nil)
		return kvc.Reply{Verdict: v}, result
	}
	// Unknown: cancelled, and over, before anyone else is tried. A late verdict
	// is no fault of the data path (R80); a broken connection is.
	health, how := errNeutral, cancelled
	if a.taken && a.ctx.Err() == nil {
		how = broken
		if a.resp == nil {
			health = fault
		}
	}
	a.end(how, health)
	return kvc.Reply{Unknown: true}, result
}

// awaitVerdict waits for the 103 or the 409. The deadline starts when the
// request is fully written (wire.md §1).
func (a *attempt) awaitVerdict(deadline time.Duration) (kvc.Verdict, string, error) {
	timer := time.NewTimer(uploadMost)
	defer timer.Stop()
	wrote := a.wrote
	for {
		select {
		case <-wrote:
			wrote = nil
			timer.Reset(deadline)
		case v := <-a.verdict:
			return v, telemetry.AskAdmitted, nil
		case h := <-a.head:
			return a.lateVerdict(h)
		case <-timer.C:
			return kvc.Verdict{}, telemetry.AskTimeout, context.DeadlineExceeded
		}
	}
}

// lateVerdict reads a final answer that came without a 103 taken before it.
func (a *attempt) lateVerdict(h headResult) (kvc.Verdict, string, error) {
	select {
	case v := <-a.verdict: // both were ready, and select chose the answer
		a.head <- h
		return v, telemetry.AskAdmitted, nil
	default:
	}
	a.taken, a.resp = true, h.resp
	switch {
	case errors.Is(h.err, errBreaker):
		return kvc.Verdict{}, telemetry.AskSkipped, errNeutral
	case h.err != nil:
		return kvc.Verdict{}, telemetry.AskError, h.err
	}
	if h.resp.StatusCode != http.StatusConflict ||
		h.resp.Header.Get("Content-Type") != admission.ContentTypeVerdict {
		a.t.proxy.metrics.WireFault("no_early_hint")
		return kvc.Verdict{}, telemetry.AskError, statusFault(h.resp.StatusCode)
	}
	b, err := io.ReadAll(io.LimitReader(h.resp.Body, maxErrorBody))
	if err != nil {
		return kvc.Verdict{}, telemetry.AskError, err
	}
	w, err := parseVerdict(b)
	v, result, err := readVerdict(w, err)
	if result == telemetry.AskAdmitted { // a 409 cannot admit
		return kvc.Verdict{}, telemetry.AskError, errNeutral
	}
	return v, result, err
}

// statusFault is what the breaker learns of an answer that should have been a
// verdict: 4xx is not the worker's health.
func statusFault(code int) error {
	if code/100 == 4 {
		return errNeutral
	}
	return &admission.StatusError{Method: http.MethodPost, Path: "turn", Code: code, Message: "no early hint"}
}
