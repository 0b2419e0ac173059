package kvc

import "cmp"

// Score ranks one worker for one request. Earlier fields decide first; Compare
// never trades one field against another.
type Score struct {
	Reuse    int     // reusable resident prefix blocks, plus the bonus on the pinned worker
	Sticky   int     // 1 on the pinned worker
	Inflight int     // less is better
	Assigned float64 // less is better
}

// Compare is above 0 when s is the better worker, below 0 when o is, and 0 when
// only the order of the workers can decide.
func (s Score) Compare(o Score) int {
	if c := cmp.Compare(s.Reuse, o.Reuse); c != 0 {
		return c
	}
	if c := cmp.Compare(s.Sticky, o.Sticky); c != 0 {
		return c
	}
	if c := cmp.Compare(o.Inflight, s.Inflight); c != 0 {
		return c
	}
	return cmp.Compare(o.Assigned, s.Assigned)
}

// ScoreOf is the score that Route gives to d (Algorithm 1, lines 6–10), for
// explanations.
func ScoreOf(r Request, d WorkerID, v View, p Params) Score {
	pin, pinned := v.Pin(r.Session)
	return score(d, pinned && pin == d, v, &p)
}

func score(d WorkerID, pinned bool, v View, p *Params) Score {
	s := Score{Reuse: v.Overlap(d), Inflight: v.Inflight(d), Assigned: v.Assigned(d)}
	if pinned {
		s.Sticky = 1
		s.Reuse += p.StickyBonus
	}
	return s
}
