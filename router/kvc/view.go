package kvc

// View is what Route and Dispatch read of the router's beliefs (the paper's Σ)
// for one request. Overlap is already the per-request vector (Q5): exclusive
// resident prefix blocks. Implementations need not be safe for concurrent use;
// router/state hands one out under its lock.
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

	// Path is the decode workers' engine profile. It matters only when Prefill
	// is empty: a profile that needs a prefill leg then has nowhere to run a
	// Seed. "" means Unified when there is no prefill worker.
	Path DirectPath

	// Cursors are the round-robin positions of the Paper preset, owned by the
	// caller and advanced by Dispatch. nil starts every dispatch at 0.
	Cursors *Cursors
}

// Cursors are round-robin positions, one per set (R94).
type Cursors struct{ Prefill, Decode int }

// needsPrefill reports whether a turn of mode m wants a prefill leg here.
func (f Fleet) needsPrefill(m Mode) bool {
	if m == Direct {
		return false
	}
	return len(f.Prefill) > 0 || (f.Path != "" && f.Path.NeedsPrefill(m))
}
