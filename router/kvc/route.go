package kvc

import "slices"

// Route picks the decode worker for r (Algorithm 1).
//
// Workers that rejected the session RejectThreshold times are passed over; when
// that leaves nobody, the least-rejected worker is returned, ties by score. A
// tie of scores goes to the earlier entry of workers, so equal inputs give equal
// answers. ok is false only when workers is empty.
//
// Route never reads capacity: it would move sessions away from their KV and
// leave orphans behind. Capacity speaks through Admit alone.
func Route(r Request, workers []WorkerID, v View, p Params) (best WorkerID, ok bool) {
	return route(&r, workers, nil, v, &p)
}

// route is Route over workers without skip (Q2).
func route(r *Request, workers, skip []WorkerID, v View, p *Params) (best WorkerID, ok bool) {
	pin, pinned := v.Pin(r.Session)
	var top Score
	for _, d := range workers {
		if slices.Contains(skip, d) || v.Rejects(r.Session, d) >= p.RejectThreshold {
			continue
		}
		if s := score(d, pinned && pin == d, v, p); !ok || s.Compare(top) > 0 {
			best, top, ok = d, s, true
		}
	}
	if !ok {
		return leastRejected(r, workers, skip, v, p)
	}
	return best, true
}

// leastRejected is Algorithm 1's lines 3–4: everyone was passed over.
func leastRejected(r *Request, workers, skip []WorkerID, v View, p *Params) (best WorkerID, ok bool) {
	pin, pinned := v.Pin(r.Session)
	var top Score
	var least int
	for _, d := range workers {
		if slices.Contains(skip, d) {
			continue
		}
		n, s := v.Rejects(r.Session, d), score(d, pinned && pin == d, v, p)
		if !ok || n < least || n == least && s.Compare(top) > 0 {
			best, least, top, ok = d, n, s, true
		}
	}
	return best, ok
}
