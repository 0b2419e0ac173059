package state

import (
	"math"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// view is the beliefs as one request sees them. All methods but measure need
// State.mu.
type view struct {
	s       *State
	ss      *session // nil: sessionless
	now     int64
	version uint64 // of the worker set at Begin: younger workers were not measured
	mask    set    // slots whose residency counts
	slots   int
	ratio   float64
	input   int
	reach   reach

	lastID   kvc.WorkerID // the worker asked about last, since Route asks five things of each
	lastSlot int
}

var _ kvc.View = (*view)(nil)

func (v *view) begin(s *State, ss *session, now int64) {
	v.s, v.ss, v.now = s, ss, now
	v.version, v.mask, v.slots, v.ratio = s.version, s.known, len(s.slots), s.ratio
}

// measure computes the request's overlap vector; State.mu need not be held.
func (v *view) measure(r *kvc.Request, blocks []block.Hash, exclusive bool) {
	v.reach = v.s.index.reach(make([]int32, v.slots), blocks, v.mask, ownerID(r.Lineage), exclusive)
	if r.InputTokens == 0 {
		r.InputTokens = v.tokens(len(blocks))
	}
	v.input = r.InputTokens
}

// tokens converts a number of blocks (Q17).
func (v *view) tokens(blocks int) int { return int(math.Round(float64(blocks) * v.ratio)) }

// uncached is how much of the prompt slot i lacks, in tokens.
func (v *view) uncached(i int) int { return max(0, v.input-v.tokens(v.lcp(i))) }

func (v *view) lcp(i int) int {
	if i >= len(v.reach.lcp) || v.s.slots[i].born > v.version || !v.s.known.has(i) {
		return 0
	}
	return int(v.reach.lcp[i])
}

func (v *view) slot(w kvc.WorkerID) (int, bool) {
	if w == v.lastID && v.lastSlot < len(v.s.slots) && v.s.slots[v.lastSlot].id == w {
		return v.lastSlot, true
	}
	i, ok := v.s.slotOf[w]
	if ok {
		v.lastID, v.lastSlot = w, i
	}
	return i, ok
}

func (v *view) ref(i int) ref { return ref{int16(i), v.s.slots[i].gen} }

// Overlap implements kvc.View.
func (v *view) Overlap(d kvc.WorkerID) int {
	i, ok := v.slot(d)
	if !ok {
		return 0
	}
	return max(0, v.lcp(i)-v.reach.first)
}

// Pin implements kvc.View. A session that was never placed by this router has
// the worker that reports it for a home: a restarted router, or another
// replica, carries on.
func (v *view) Pin(kvc.SessionKey) (kvc.WorkerID, bool) {
	if pin, ok := v.s.pinOf(v.ss); ok {
		return v.s.slots[pin.slot].id, true
	}
	if v.ss == nil || v.ss.pinned {
		return "", false
	}
	return v.s.homeOf(v.ss)
}

// Inflight implements kvc.View.
func (v *view) Inflight(d kvc.WorkerID) int {
	i, ok := v.slot(d)
	if !ok {
		return 0
	}
	return v.s.slots[i].inflight
}

// Assigned implements kvc.View.
func (v *view) Assigned(d kvc.WorkerID) float64 {
	i, ok := v.slot(d)
	if !ok {
		return 0
	}
	return v.s.slots[i].assignedNow(v.now, &v.s.params)
}

// Rejects implements kvc.View.
func (v *view) Rejects(_ kvc.SessionKey, d kvc.WorkerID) int {
	if v.ss == nil || len(v.ss.rejects) == 0 {
		return 0
	}
	i, ok := v.slot(d)
	if !ok {
		return 0
	}
	r, ok := v.ss.rejectsOf(v.ref(i))
	if !ok {
		return 0
	}
	return r.count(v.now, &v.s.params)
}

// PrefillUncached implements kvc.View.
func (v *view) PrefillUncached(p kvc.WorkerID) int {
	i, ok := v.slot(p)
	if !ok {
		return v.input
	}
	return v.uncached(i)
}

// PrefillOutstanding implements kvc.View.
func (v *view) PrefillOutstanding(p kvc.WorkerID) int {
	i, ok := v.slot(p)
	if !ok {
		return 0
	}
	return v.s.slots[i].prefill
}
