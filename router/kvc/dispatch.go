package kvc

import (
	"slices"
	"time"
)

// Action is what the driver of a Dispatch has to do next.
type Action uint8

const (
	// Stop: nothing can be done; Step.Reason says why.
	Stop Action = iota
	// Ask the worker for admission, then call Answer.
	Ask
	// Run the turn, then call Streaming and Done, or Failed.
	Run
)

// Step is one instruction of the machine.
type Step struct {
	Do      Action
	Worker  WorkerID // decode worker
	Prefill WorkerID // tentative on Ask; on Run the prefill leg's worker, "" = none
	// PrefillUncached is how many tokens of the prompt Prefill is believed to
	// lack; DeltaTransfer compares MaxAppendTokens with it.
	PrefillUncached int
	Mode            Mode // on Run
	// Reason accompanies a Run (ReasonLargeAppend; why a Fallback) and explains
	// a Stop (ReasonNoWorker, ReasonNoPrefill, ReasonRetry).
	Reason Reason
	// Wait is how long to wait before this Ask: the worker is the session's
	// home, it refused, and waiting is cheaper than a reseed (Q12).
	Wait time.Duration
}

// Reply is how an Ask ended.
type Reply struct {
	// Unknown: timeout, 5xx, connection error, or a worker whose breaker is
	// open. Never a reject, unless the Paper preset is asked for (Q8).
	Unknown bool
	Verdict Verdict
}

// EffectKind names one change of the router's beliefs.
type EffectKind uint8

const (
	EffectReject        EffectKind = iota // rejects[s,d]++
	EffectResetRejects                    // rejects[s,d] = 0 (Q7)
	EffectHalveOthers                     // the session's pairs other than (s,d) are halved (Q7)
	EffectResetSession                    // every pair of the session = 0 (Q7)
	EffectPin                             // pin[s] = d
	EffectInflight                        // inflight[d] += N (N is +1 or -1)
	EffectAssigned                        // assigned[d]++
	EffectPrefillTokens                   // outstanding[p] += N
)

// Effect is one change for router/state to apply. Effects are data, so that the
// simulator, the tests and the proxy apply the same ones.
type Effect struct {
	Kind    EffectKind
	Session SessionKey
	Worker  WorkerID
	N       int
}

// Dispatch is Algorithm 3 as a machine without I/O. Drive it:
//
//	for {
//		switch step := d.Next(); step.Do {
//		case Ask:  d.Answer(reply)
//		case Run:  run it; d.Streaming() at the first byte; or d.Failed() when a
//		           leg failed before the first byte and another attempt is safe
//		case Stop: refuse
//		}
//	}
//	d.Done(outcome) // exactly once counts; later calls do nothing
//
// After every call, Effects returns what has to be applied to the beliefs, once,
// before the next call.
//
// A worker that does not answer is neither refusing nor lost: the next choice
// of Route is asked, and the session keeps its home (Q8, Q12).
type Dispatch struct {
	r Request
	f Fleet
	v View
	p Params

	phase    phase
	step     Step
	probes   int // questions answered or given up
	refused  int // of them, refusals
	attempts int // Runs so far

	tried     []WorkerID // decode workers not to ask again
	failed    []WorkerID // decode workers not to use again
	unknown   []WorkerID // decode workers that did not answer: Fallback's last choice
	failedP   []WorkerID // prefill workers not to use again
	waited    bool       // the one wait at home was spent
	expired   bool       // the one renewal of an expired lease was spent
	holdsD    bool       // inflight[step.Worker] is ours
	holdsP    int        // of outstanding[step.Prefill]
	nextP     int        // the cursor after step.Prefill
	effects   []Effect
	effectBuf [8]Effect
	ownCursor Cursors
}

// phase is where the machine stands.
type phase uint8

const (
	choosing  phase = iota // Next has to decide
	asking                 // an Ask is out
	running                // a Run is out, nothing seen of it yet
	streaming              // a Run is out and its first byte was seen
	stopped                // nothing more can be done
	done
)

// NewDispatch starts the dispatch of one request over the fleet.
func NewDispatch(r Request, f Fleet, v View, p Params) *Dispatch {
	d := &Dispatch{r: r, f: f, v: v, p: p}
	if d.f.Cursors == nil {
		d.f.Cursors = &d.ownCursor
	}
	d.effects = d.effectBuf[:0]
	return d
}

// Next returns the next instruction. Between an instruction and its answer it
// returns the same instruction again.
func (d *Dispatch) Next() Step {
	if d.phase == choosing {
		d.choose()
	}
	return d.step
}

// choose is the loop of Algorithm 3, one round of it (lines 3–6), and its end
// (lines 25–28).
func (d *Dispatch) choose() {
	if d.attempts >= max(d.p.MaxAttempts, 1) {
		d.stop(ReasonRetry)
		return
	}
	if d.probes < d.p.Probes(len(d.f.Decode)) {
		skip := d.failed
		if d.p.Probe == ProbeOnce {
			skip = d.tried
		}
		if w, ok := route(&d.r, d.f.Decode, skip, d.v, &d.p); ok {
			d.ask(w, 0)
			return
		}
	}
	d.fallback()
}

// ask puts the question to w and, so that simultaneous dispatches see each
// other, reserves in the same step (R90).
func (d *Dispatch) ask(w WorkerID, wait time.Duration) {
	d.phase = asking
	d.step = Step{Do: Ask, Worker: w, Wait: wait}
	if d.p.Inflight == InflightLeased {
		d.takeD()
	}
	d.takeP()
}

// fallback is plain PD: no admission, the worker's bounded queue decides.
func (d *Dispatch) fallback() {
	w, ok := d.fallbackWorker()
	if !ok {
		reason := ReasonNoWorker
		if d.attempts > 0 {
			reason = ReasonRetry
		}
		d.stop(reason)
		return
	}
	d.step = Step{Worker: w, Mode: Fallback, Reason: d.fallbackReason()}
	if d.p.Inflight == InflightLeased {
		d.takeD()
	}
	d.takeP()
	d.run()
}

func (d *Dispatch) fallbackReason() Reason {
	switch {
	case d.attempts > 0:
		return ReasonRetry
	case d.probes > 0 && d.refused == 0:
		return ReasonUnanswered
	default:
		return ReasonAllRefused
	}
}

// fallbackWorker is the least-loaded worker (Q10); those that did not answer
// come last.
func (d *Dispatch) fallbackWorker() (best WorkerID, ok bool) {
	if d.p.Fallback == FallbackRoundRobin {
		return roundRobin(d.f.Decode, d.failed, &d.f.Cursors.Decode)
	}
	var top Score
	var topKnown bool
	for _, w := range d.f.Decode {
		if slices.Contains(d.failed, w) {
			continue
		}
		known := !slices.Contains(d.unknown, w)
		s := Score{Inflight: d.v.Inflight(w), Assigned: d.v.Assigned(w)}
		if !ok || known && !topKnown || known == topKnown && s.Compare(top) > 0 {
			best, top, topKnown, ok = w, s, known, true
		}
	}
	return best, ok
}

// run turns the current step into a Run, or stops when its mode needs a
// prefill worker and there is none.
func (d *Dispatch) run() {
	switch {
	case !d.f.needsPrefill(d.step.Mode):
		d.giveP()
		d.step.Prefill, d.step.PrefillUncached = "", 0
	case d.step.Prefill == "":
		d.giveD()
		d.stop(ReasonNoPrefill)
		return
	default:
		d.f.Cursors.Prefill = d.nextP
	}
	d.phase = running
	d.step.Do, d.step.Wait = Run, 0
	d.attempts++
	if d.p.Assigned == AssignedAtRun {
		d.emit(EffectAssigned, d.step.Worker, 1)
	}
}

// Answer reports how the Ask of the last Next ended. After a Run it reports
// that the worker refused the turn before its first byte (409); an expired
// lease is asked for anew, once.
func (d *Dispatch) Answer(a Reply) {
	switch {
	case d.phase == running && !a.Verdict.CanAdmit:
		d.refusedRun(a)
	case d.phase != asking:
	case !a.Unknown && a.Verdict.CanAdmit:
		d.admitted(a.Verdict)
	default:
		d.refuse(a)
	}
}

// admitted is Algorithm 3, lines 8–19.
func (d *Dispatch) admitted(v Verdict) {
	d.tried = append(d.tried, d.step.Worker)
	d.step.Mode, d.step.Reason = v.Mode, v.Reason
	if d.p.ResetAt == ResetAtAdmission {
		d.reset()
	}
	if d.p.PinAt == PinAtAdmission {
		d.pin()
	}
	if d.p.Inflight == InflightNeverLowered {
		d.emit(EffectInflight, d.step.Worker, 1)
	}
	d.run()
}

// refuse is Algorithm 3, lines 20–23.
func (d *Dispatch) refuse(a Reply) {
	w := d.step.Worker
	d.letGo()
	if wait, ok := d.worthWaiting(a); ok && d.phase == asking {
		d.waited = true
		d.ask(w, wait)
		return
	}
	d.phase = choosing
	d.probes++
	d.tried = append(d.tried, w)
	if a.Unknown {
		d.unknown = append(d.unknown, w)
	} else {
		d.refused++
	}
	counts := !a.Unknown && a.Verdict.Reason.CountsAsReject() || a.Unknown && d.p.Fault == FaultRejects
	if counts && d.r.Session != "" {
		d.emit(EffectReject, w, 1)
	}
}

// worthWaiting is Q12's patience: the home that refused expects room sooner
// than the prompt could be rebuilt elsewhere. At most once in a dispatch, and
// the refusal that is waited out does not count.
func (d *Dispatch) worthWaiting(a Reply) (time.Duration, bool) {
	wait := a.Verdict.RetryAfter
	if d.waited || a.Unknown || d.p.Spill != SpillKeepsPin || wait <= 0 {
		return 0, false
	}
	switch a.Verdict.Reason {
	case ReasonNoCapacity, ReasonClassBudget, ReasonQueueFull:
	default: // what waiting does not cure
		return 0, false
	}
	home, ok := d.v.Pin(d.r.Session)
	return wait, ok && home == d.step.Worker && wait < time.Duration(d.r.InputTokens)*d.p.ReseedCostPerToken
}

// refusedRun handles a 409 to a Run: the lease has expired, or the worker
// changed its mind (it started to drain, it restarted).
func (d *Dispatch) refusedRun(a Reply) {
	w := d.step.Worker
	if !a.Unknown && a.Verdict.Reason == ReasonLeaseExpired && !d.expired {
		d.expired = true
		d.attempts-- // nothing ran
		d.letGo()
		d.ask(w, 0)
		return
	}
	d.refuse(a)
	if a.Unknown || a.Verdict.Reason != ReasonLeaseExpired { // else it is willing: only our message was late
		d.failed = append(d.failed, w)
	}
}

// Failed reports that the Run of the last Next failed before its first byte;
// the worker is not tried again in this dispatch. After the first byte it does
// nothing: the client has part of an answer (R59).
func (d *Dispatch) Failed() {
	if d.phase != running {
		return
	}
	d.failed = append(d.failed, d.step.Worker)
	d.tried = append(d.tried, d.step.Worker)
	d.letGo()
	d.phase = choosing
}

// FailedPrefill is Failed for a Run whose prefill leg broke: neither leg's
// worker is tried again. The decode worker is innocent but not free: its abort
// is deferred while KV is in hand-off, and a session has one turn at a time.
func (d *Dispatch) FailedPrefill() {
	if d.phase == running && d.step.Prefill != "" {
		d.failedP = append(d.failedP, d.step.Prefill)
	}
	d.Failed()
}

// Streaming reports the first byte of the answer: the turn is known to work,
// so this is where the session's home moves (R86) and its rejects are cleared
// (Q7). The prefill worker has done its part (R58).
func (d *Dispatch) Streaming() {
	if d.phase != running {
		return
	}
	d.phase = streaming
	d.giveP()
	if d.step.Mode == Fallback {
		d.fallbackPin()
		return
	}
	// The pin is judged first: it moves if the home is passed over, which a
	// reset may end.
	if d.p.PinAt == PinAtFirstToken {
		d.pin()
	}
	if d.p.ResetAt == ResetAtFirstToken {
		d.reset()
	}
}

// Done ends the dispatch and gives back everything it holds. The outcome is
// for whoever applies the effects; the machine treats all alike.
func (d *Dispatch) Done(Outcome) {
	if d.phase == done {
		return
	}
	d.letGo()
	d.phase = done
	d.step = Step{Do: Stop, Reason: d.step.Reason}
}

// Effects drains the belief changes since the last call. The slice is valid
// until the next call of any method.
func (d *Dispatch) Effects() []Effect {
	es := d.effects
	d.effects = d.effects[:0]
	return es
}

// Running is the Run that is out, if one is.
func (d *Dispatch) Running() (s Step, ok bool) {
	return d.step, d.phase == running || d.phase == streaming
}

// Attempts counts the Runs so far.
func (d *Dispatch) Attempts() int { return d.attempts }

// Probes counts the questions answered or given up so far.
func (d *Dispatch) Probes() int { return d.probes }
