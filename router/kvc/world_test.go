package kvc

import (
	"maps"
	"slices"
)

// pair is an index of rejects.
type pair struct {
	s SessionKey
	d WorkerID
}

// beliefs is a View made of maps, and the sequential model of how effects
// change it.
type beliefs struct {
	overlap     map[WorkerID]int
	pin         map[SessionKey]WorkerID
	inflight    map[WorkerID]int
	assigned    map[WorkerID]float64
	rejects     map[pair]int
	uncached    map[WorkerID]int
	outstanding map[WorkerID]int

	pinChanges, rejected, lowest int
}

func newBeliefs() *beliefs {
	return &beliefs{
		overlap: map[WorkerID]int{}, pin: map[SessionKey]WorkerID{}, inflight: map[WorkerID]int{},
		assigned: map[WorkerID]float64{}, rejects: map[pair]int{},
		uncached: map[WorkerID]int{}, outstanding: map[WorkerID]int{},
	}
}

func (b *beliefs) Overlap(d WorkerID) int               { return b.overlap[d] }
func (b *beliefs) Pin(s SessionKey) (WorkerID, bool)    { d, ok := b.pin[s]; return d, ok }
func (b *beliefs) Inflight(d WorkerID) int              { return b.inflight[d] }
func (b *beliefs) Assigned(d WorkerID) float64          { return b.assigned[d] }
func (b *beliefs) Rejects(s SessionKey, d WorkerID) int { return b.rejects[pair{s, d}] }
func (b *beliefs) PrefillUncached(p WorkerID) int       { return b.uncached[p] }
func (b *beliefs) PrefillOutstanding(p WorkerID) int    { return b.outstanding[p] }

// apply is what router/state does with effects, one map at a time.
func (b *beliefs) apply(es []Effect) {
	for _, e := range es {
		k := pair{e.Session, e.Worker}
		switch e.Kind {
		case EffectReject:
			b.rejects[k]++
			b.rejected++
		case EffectResetRejects:
			delete(b.rejects, k)
		case EffectHalveOthers:
			for o, n := range b.rejects {
				if o.s == e.Session && o.d != e.Worker {
					b.rejects[o] = n / 2
				}
			}
		case EffectResetSession:
			maps.DeleteFunc(b.rejects, func(o pair, _ int) bool { return o.s == e.Session })
		case EffectPin:
			if old, ok := b.pin[e.Session]; ok && old != e.Worker {
				b.pinChanges++
			}
			b.pin[e.Session] = e.Worker
		case EffectInflight:
			b.inflight[e.Worker] += e.N
			b.lowest = min(b.lowest, b.inflight[e.Worker])
		case EffectAssigned:
			b.assigned[e.Worker]++
		case EffectPrefillTokens:
			b.outstanding[e.Worker] += e.N
			b.lowest = min(b.lowest, b.outstanding[e.Worker])
		}
	}
}

// idle reports whether nothing is held by anyone.
func (b *beliefs) idle() bool {
	for _, m := range []map[WorkerID]int{b.inflight, b.outstanding} {
		for _, n := range m {
			if n != 0 {
				return false
			}
		}
	}
	return b.lowest == 0
}

// driver plays one dispatch by hand and applies its effects after every call.
type driver struct {
	*Dispatch
	b *beliefs
}

func start(r Request, f Fleet, b *beliefs, p Params) *driver {
	return &driver{NewDispatch(r, f, b, p), b}
}

func (d *driver) next() Step {
	s := d.Next()
	d.b.apply(d.Effects())
	return s
}

func (d *driver) do(call func()) {
	call()
	d.b.apply(d.Effects())
}

func (d *driver) answer(v Verdict) { d.do(func() { d.Answer(Reply{Verdict: v}) }) }
func (d *driver) admit(m Mode)     { d.answer(Verdict{CanAdmit: true, Mode: m}) }
func (d *driver) reject(r Reason)  { d.answer(Verdict{Reason: r}) }
func (d *driver) unanswered()      { d.do(func() { d.Answer(Reply{Unknown: true}) }) }
func (d *driver) firstByte()       { d.do(d.Streaming) }
func (d *driver) fail()            { d.do(d.Failed) }
func (d *driver) failPrefill()     { d.do(d.FailedPrefill) }
func (d *driver) finish()          { d.do(func() { d.Done(OutcomeOK) }) }

// serve drives the dispatch to its end against workers that answer by admit,
// and returns the last step and every worker that was asked.
func (d *driver) serve(admit func(WorkerID) Verdict) (last Step, asked []WorkerID) {
	for {
		last = d.next()
		switch last.Do {
		case Ask:
			asked = append(asked, last.Worker)
			d.answer(admit(last.Worker))
		case Run:
			d.firstByte()
			d.finish()
			return last, asked
		case Stop:
			d.finish()
			return last, asked
		}
	}
}

func ids(prefix string, n int) []WorkerID {
	ws := make([]WorkerID, n)
	for i := range ws {
		ws[i] = WorkerID(prefix + string(rune('1'+i)))
	}
	return ws
}

func contains(ws []WorkerID, w WorkerID) bool { return slices.Contains(ws, w) }
