package kvc

import "slices"

// PickPrefill picks the prefill worker for r (Q13): the one that would finish
// this prompt first, that is the fewest tokens already sent there plus the
// tokens of this prompt that it does not hold. Ties go to the one that holds
// more of the prompt, then to the earlier entry. Under PrefillRoundRobin the
// workers take turns by cursor, which is advanced. ok is false only when
// workers is empty.
func PickPrefill(workers []WorkerID, v View, p Params, cursor *int) (best WorkerID, ok bool) {
	return pickPrefill(workers, nil, v, &p, cursor)
}

func pickPrefill(workers, skip []WorkerID, v View, p *Params, cursor *int) (best WorkerID, ok bool) {
	if p.Prefill == PrefillRoundRobin {
		return roundRobin(workers, skip, cursor)
	}
	var cost, lacks int
	for _, w := range workers {
		if slices.Contains(skip, w) {
			continue
		}
		n := v.PrefillUncached(w)
		c := n + v.PrefillOutstanding(w)
		if !ok || c < cost || c == cost && n < lacks {
			best, cost, lacks, ok = w, c, n, true
		}
	}
	return best, ok
}

// roundRobin returns the next worker that is not skipped and advances cursor.
func roundRobin(workers, skip []WorkerID, cursor *int) (next WorkerID, ok bool) {
	for range workers {
		w := workers[uint(*cursor)%uint(len(workers))]
		*cursor++
		if !slices.Contains(skip, w) {
			return w, true
		}
	}
	return "", false
}
