package kvc

import "slices"

// What a dispatch holds, and every change of belief it makes.

func (d *Dispatch) emit(k EffectKind, w WorkerID, n int) {
	d.effects = append(d.effects, Effect{Kind: k, Session: d.r.Session, Worker: w, N: n})
}

// takeD counts the dispatch into inflight[step.Worker].
func (d *Dispatch) takeD() {
	d.holdsD = true
	d.emit(EffectInflight, d.step.Worker, 1)
}

// giveD gives it back, once (Q9).
func (d *Dispatch) giveD() {
	if d.holdsD {
		d.holdsD = false
		d.emit(EffectInflight, d.step.Worker, -1)
	}
}

// takeP picks the prefill worker and counts the prompt into its queue: a soft
// reservation, since the verdict may say that no prefill leg is needed. Taking
// turns therefore advances only when the worker is used.
func (d *Dispatch) takeP() {
	cursor := d.f.Cursors.Prefill
	p, ok := pickPrefill(d.f.Prefill, d.failedP, d.v, &d.p, &cursor)
	if !ok {
		return
	}
	d.nextP = cursor
	d.step.Prefill, d.step.PrefillUncached = p, d.v.PrefillUncached(p)
	if n := d.step.PrefillUncached; n > 0 {
		d.holdsP = n
		d.emit(EffectPrefillTokens, p, n)
	}
}

// giveP takes the prompt off the prefill worker's queue, once.
func (d *Dispatch) giveP() {
	if d.holdsP > 0 {
		d.emit(EffectPrefillTokens, d.step.Prefill, -d.holdsP)
		d.holdsP = 0
	}
}

func (d *Dispatch) letGo() {
	d.giveD()
	d.giveP()
}

func (d *Dispatch) stop(why Reason) {
	d.phase = stopped
	d.step = Step{Do: Stop, Reason: why}
}

// pin moves the session's home to the worker of this step. A success away from
// a home that still counts is a spill and moves nothing (Q12).
func (d *Dispatch) pin() {
	if d.r.Session == "" {
		return
	}
	home, ok := d.home()
	if ok && (home == d.step.Worker || d.p.Spill == SpillKeepsPin && !d.passedOver(home)) {
		return
	}
	d.emit(EffectPin, d.step.Worker, 1)
}

// fallbackPin gives a home to a session that has none (Q10). The new home
// starts with a clean count: Q12's bound counts refusals since the last move.
func (d *Dispatch) fallbackPin() {
	if d.r.Session == "" || d.p.FallbackPin == FallbackPinNever {
		return
	}
	if _, ok := d.home(); ok {
		return
	}
	d.emit(EffectPin, d.step.Worker, 1)
	if d.p.ResetAt != ResetNever {
		d.emit(EffectResetRejects, d.step.Worker, 0)
	}
}

// home is the session's pin, unless that worker is gone.
func (d *Dispatch) home() (WorkerID, bool) {
	home, ok := d.v.Pin(d.r.Session)
	return home, ok && slices.Contains(d.f.Decode, home)
}

func (d *Dispatch) passedOver(w WorkerID) bool {
	return d.v.Rejects(d.r.Session, w) >= d.p.RejectThreshold
}

// reset is reset-on-success (Algorithm 3, line 8) with the scope of Q7.
func (d *Dispatch) reset() {
	if d.r.Session == "" {
		return
	}
	if d.p.ResetScope == ResetSession {
		d.emit(EffectResetSession, d.step.Worker, 0)
		return
	}
	d.emit(EffectResetRejects, d.step.Worker, 0)
	if d.p.ResetScope == ResetPairHalvesOthers {
		d.emit(EffectHalveOthers, d.step.Worker, 0)
	}
}
