package kvc

// View is what Route reads of the router's beliefs for one request. Overlap is
// already the per-request vector (Q5): exclusive resident prefix blocks.
// Implementations need not be safe for concurrent use; router/state hands one
// out under its lock.
type View interface {
	Overlap(d WorkerID) int
	Pin(s SessionKey) (WorkerID, bool)
	Inflight(d WorkerID) int
	Assigned(d WorkerID) float64          // decayed cumulative dispatches (Q9)
	Rejects(s SessionKey, d WorkerID) int // decayed (Q8)
	PrefillUncached(p WorkerID) int       // this prompt's tokens not cached on P
	PrefillOutstanding(p WorkerID) int    // uncached tokens already sent to P and unfinished (Q13)
}

// Fleet is the routable workers in their stable order.
type Fleet struct {
	Decode  []WorkerID
	Prefill []WorkerID // empty for Unified
}

// Action is what the driver of a Dispatch has to do next.
type Action uint8

const (
	// Stop: nothing can be done; Step.Reason says why (ReasonNoWorker).
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
	Prefill WorkerID // tentative on Ask, used on Run if the mode needs it; "" on Unified
	Mode    Mode     // on Run
	Reason  Reason
}

// Reply is how an Ask ended.
type Reply struct {
	// Unknown: timeout, 5xx, connection error, or a worker whose breaker is
	// open. Never a reject (Q8).
	Unknown bool
	Verdict Verdict
}

// EffectKind names one change of the router's beliefs.
type EffectKind uint8

const (
	EffectReject        EffectKind = iota // rejects[s,d]++
	EffectResetRejects                    // rejects[s,d] = 0 and the session's other pairs are halved (Q7)
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
// After every call, Effects returns what has to be applied to the beliefs, once.
type Dispatch struct{} // fields: see below

// NewDispatch starts the dispatch of one request over the fleet.
func NewDispatch(r Request, f Fleet, v View, p Params) *Dispatch { panic("contract") }

// Next returns the next instruction. Between an instruction and its answer it
// returns the same instruction again.
func (d *Dispatch) Next() Step { panic("contract") }

// Answer reports how the Ask of the last Next ended.
func (d *Dispatch) Answer(Reply) { panic("contract") }

// Failed reports that the Run of the last Next failed before its first byte;
// the worker is not tried again in this dispatch.
func (d *Dispatch) Failed() { panic("contract") }

// Streaming reports the first byte of the answer.
func (d *Dispatch) Streaming() { panic("contract") }

// Done ends the dispatch and gives back everything it holds.
func (d *Dispatch) Done(Outcome) { panic("contract") }

// Effects drains the belief changes since the last call.
func (d *Dispatch) Effects() []Effect { panic("contract") }

// Attempts counts the Runs so far.
func (d *Dispatch) Attempts() int { panic("contract") }
