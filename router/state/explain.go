package state

import (
	"fmt"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Explanation is what Route and PickPrefill would do with a request now, and
// why. Nothing is reserved or remembered.
type Explanation struct {
	Preset  string          `json:"preset"`
	Session kvc.SessionKey  `json:"session,omitempty"`
	Lineage kvc.SessionKey  `json:"lineage,omitempty"`
	Home    kvc.WorkerID    `json:"home,omitempty"`
	Blocks  int             `json:"blocks"`
	Shared  int             `json:"shared_blocks"` // leading blocks not exclusive to the lineage (Q5)
	Input   int             `json:"input_tokens"`
	Append  int             `json:"append_tokens"`
	Decode  []DecodeChoice  `json:"decode"`
	Prefill []PrefillChoice `json:"prefill,omitempty"`
}

// DecodeChoice is one decode worker as Route sees it.
type DecodeChoice struct {
	Worker    kvc.WorkerID `json:"worker"`
	Chosen    bool         `json:"chosen"`
	Why       string       `json:"why"`
	Resident  int          `json:"resident_blocks"` // of this prompt
	Reuse     int          `json:"reuse"`           // Score.Reuse
	Sticky    int          `json:"sticky"`
	Inflight  int          `json:"in_flight"`
	Assigned  float64      `json:"assigned"`
	Rejects   int          `json:"rejects"`
	Trusted   bool         `json:"trusted"`
	Draining  bool         `json:"draining"`
	Available bool         `json:"available"`
	Load      Load         `json:"-"`
}

// PrefillChoice is one prefill worker as PickPrefill sees it, in tokens.
type PrefillChoice struct {
	Worker      kvc.WorkerID `json:"worker"`
	Chosen      bool         `json:"chosen"`
	Uncached    int          `json:"uncached_tokens"`
	Outstanding int          `json:"outstanding_tokens"`
	Trusted     bool         `json:"trusted"`
}

// Explain scores every worker for a request.
func (s *State) Explain(r kvc.Request, blocks []block.Hash) Explanation {
	var v view
	s.mu.Lock()
	now := s.now()
	ss := s.sessions.get(r.Session, now)
	if ss != nil && r.Lineage == "" {
		r.Lineage = ss.lineage
	}
	v.begin(s, ss, now)
	p := s.params
	s.mu.Unlock()
	v.measure(&r, blocks, p.Overlap == kvc.OverlapExclusive)

	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.fleetFor(ss, "")
	x := Explanation{
		Preset: p.Preset, Session: r.Session, Lineage: r.Lineage,
		Blocks: len(blocks), Shared: v.reach.first, Input: r.InputTokens, Append: r.InputTokens,
	}
	x.Home, _ = s.homeOf(ss)
	x.Decode = s.explainDecode(r, f.Decode, &v, p)
	for _, d := range x.Decode {
		x.Append = min(x.Append, max(0, r.InputTokens-v.tokens(d.Resident)))
	}
	cursor := s.cursors.Prefill
	best, _ := kvc.PickPrefill(f.Prefill, &v, p, &cursor)
	for _, w := range f.Prefill {
		x.Prefill = append(x.Prefill, PrefillChoice{
			Worker: w, Chosen: w == best, Trusted: s.slots[s.slotOf[w]].trusted,
			Uncached: v.PrefillUncached(w), Outstanding: v.PrefillOutstanding(w),
		})
	}
	return x
}

func (s *State) explainDecode(r kvc.Request, eligible []kvc.WorkerID, v *view, p kvc.Params) []DecodeChoice {
	best, ok := kvc.Route(r, eligible, v, p)
	var top kvc.Score
	if ok {
		top = kvc.ScoreOf(r, best, v, p)
	}
	in := make(map[kvc.WorkerID]bool, len(eligible))
	for _, w := range eligible {
		in[w] = true
	}
	var out []DecodeChoice
	for _, w := range s.fleet.Decode {
		i, sc := s.slotOf[w], kvc.ScoreOf(r, w, v, p)
		sl := &s.slots[i]
		c := DecodeChoice{
			Worker: w, Chosen: ok && w == best, Resident: v.lcp(i),
			Reuse: sc.Reuse, Sticky: sc.Sticky, Inflight: sc.Inflight, Assigned: sc.Assigned,
			Rejects: v.Rejects(r.Session, w), Trusted: sl.trusted, Draining: sl.draining,
			Available: !sl.suspect, Load: sl.load,
		}
		c.Why = why(&c, in[w], sc, top, p)
		out = append(out, c)
	}
	return out
}

// why is one clause for a person.
func why(c *DecodeChoice, eligible bool, sc, top kvc.Score, p kvc.Params) string {
	switch {
	case !eligible && c.Draining:
		return "draining, and does not hold the session"
	case !eligible:
		return "not available (breaker open or not ready)"
	case c.Chosen:
		return whyChosen(c, sc, p)
	case c.Rejects >= p.RejectThreshold:
		return fmt.Sprintf("passed over: refused the session %d times", c.Rejects)
	case sc.Reuse < top.Reuse:
		return fmt.Sprintf("less to reuse: %d < %d", sc.Reuse, top.Reuse)
	case sc.Sticky < top.Sticky:
		return "as much to reuse, but not the session's home"
	case sc.Inflight > top.Inflight:
		return fmt.Sprintf("more in flight: %d > %d", sc.Inflight, top.Inflight)
	case sc.Assigned > top.Assigned:
		return fmt.Sprintf("more assigned: %.2f > %.2f", sc.Assigned, top.Assigned)
	default:
		return "equal, but later in the fleet's order"
	}
}

func whyChosen(c *DecodeChoice, sc kvc.Score, p kvc.Params) string {
	switch {
	case c.Rejects >= p.RejectThreshold:
		return "chosen: every worker was passed over, this one refused least"
	case sc.Sticky == 1:
		return fmt.Sprintf("chosen: the session's home, %d blocks to reuse", sc.Reuse-p.StickyBonus)
	case sc.Reuse > 0:
		return fmt.Sprintf("chosen: most to reuse, %d blocks", sc.Reuse)
	default:
		return "chosen: nothing to reuse anywhere, least loaded"
	}
}
