package kvc

import (
	"fmt"
	"math"
	"slices"
	"time"
)

// oracle answers a question by Algorithm 2 as it is written down, slowly: sets
// of blocks instead of counters, a walk over the prompt instead of a search,
// one rule after the other. It shares with the ledger the forest and nothing
// else.
type oracle struct {
	l *Ledger
	q Question
}

// prefix is the resident part of the prompt, block by block.
func (o *oracle) prefix() (nodes []*node) {
	for i, h := range o.q.Blocks {
		n := o.l.blocks[h]
		if n == nil || n.depth != i+1 {
			break
		}
		nodes = append(nodes, n)
	}
	return nodes
}

func weigh(set map[*node]bool) (sum int) {
	for n := range set {
		sum += n.weight
	}
	return sum
}

func (o *oracle) path(set map[*node]bool, n *node) {
	for ; n != o.l.root; n = n.parent {
		set[n] = true
	}
}

// busy is what is not reclaimable: the union of what turns and leases lock,
// what sessions protect, and what this turn would lock.
func (o *oracle) busy(also []*node) (tokens int) {
	set := map[*node]bool{}
	for _, t := range o.l.turns {
		if t.held != nil {
			o.path(set, t.held)
		}
		tokens += t.tokens
	}
	for _, s := range o.l.sessions {
		if s.held != nil {
			o.path(set, s.held)
		}
	}
	for _, n := range also {
		set[n] = true
	}
	return tokens + weigh(set)
}

// everything is all that is resident, running or promised.
func (o *oracle) everything() (tokens int) {
	set := map[*node]bool{}
	for _, n := range allNodes(o.l) {
		set[n] = true
	}
	for _, t := range o.l.turns {
		tokens += t.tokens
	}
	return tokens + weigh(set)
}

// ratio is tokens a block: the session's own, the caller's, the worker's.
func (o *oracle) ratio(s *session) float64 {
	if s != nil && s.perBlock > 0 {
		return s.perBlock
	}
	if o.q.InputTokens > 0 {
		return float64(o.q.InputTokens) / (float64(len(o.q.Blocks)) + 0.5)
	}
	return o.l.TokensPerBlock()
}

// tokens splits the prompt into what is resident and what is missing.
func (o *oracle) tokens(found []*node, s *session) (resident, missing int, path []*node) {
	for _, n := range found {
		resident += n.weight
	}
	path = append(path, found...)
	missing = o.q.InputTokens
	if len(o.q.Blocks) > 0 {
		rest := float64(len(o.q.Blocks)-len(found)) + 0.5
		missing = int(math.Round(rest * o.ratio(s)))
	}
	// Q17: the generated tail, as far as the last turn confirmed the one before.
	if s != nil && s.tail != nil && len(found) < len(o.q.Blocks) && len(found) == s.leaf.depth &&
		(len(found) == 0 || found[len(found)-1] == s.leaf) {
		if credit := min(int(s.confirmed*float64(s.tail.weight)), missing-1); credit > 0 {
			resident, missing = resident+credit, missing-credit
			path = append(path, s.tail)
		}
	}
	return resident, max(missing, 1), path
}

// isResident is s(r) ∈ M_d.
func (o *oracle) isResident(found []*node, s *session) bool {
	if o.q.Session == "" || len(found) == 0 {
		return false
	}
	if found[len(found)-1].owner == o.q.Lineage {
		return true
	}
	if s == nil || s.leaf == o.l.root {
		return false
	}
	return slices.Contains(found, s.leaf)
}

// verdict is Algorithm 2.
func (o *oracle) verdict() (v Verdict) {
	p := o.l.cfg.Params
	s := o.l.sessions[o.q.Session]
	found := o.prefix()
	resident, missing, path := o.tokens(found, s)
	reserve := 0
	if p.Reserve == ReserveLearnt {
		reserve = p.ReserveGuess
		if s != nil {
			reserve = s.outputs.p95(reserve)
		}
		if o.q.OutputTokens > 0 {
			reserve = min(reserve, o.q.OutputTokens)
		}
	}
	need, used := missing+reserve, o.everything()
	if p.Need == NeedWholeInput {
		need = resident + missing + reserve
	}
	if p.Used == UsedBusy {
		used = o.busy(path)
	}
	free := o.l.cfg.CapacityTokens*p.HighWaterPercent/100 - used
	capOK := need <= free
	appended := missing
	if p.AppendBy == AppendByRouter && o.q.AppendTokens > 0 {
		appended = o.q.AppendTokens
	}
	if o.l.cfg.DirectPath == DeltaTransfer && o.q.PrefillUncachedTokens > 0 {
		appended = o.q.PrefillUncachedTokens
	}
	v.ResidentTokens, v.AppendTokens, v.FreeTokens = resident, missing, max(free-need, 0)
	direct := Direct
	if o.l.cfg.DirectPath == DeltaTransfer {
		direct = Delta
	}
	first := Reseed
	if o.q.Turn == 0 {
		first = Seed
	}
	if o.isResident(found, s) {
		if appended > p.MaxAppendTokens {
			if p.LargeAppend == LargeAppendReject {
				v.Reason = ReasonRealLargeAppend
				return v
			}
			direct, v.Reason = Reseed, ReasonLargeAppend
		}
		if !capOK {
			v.Reason = ReasonNoCapacity
			return v
		}
		v.CanAdmit, v.Mode = true, direct
		return v
	}
	if !capOK {
		v.Reason = ReasonNotResidentNoCapacity
		return v
	}
	v.CanAdmit, v.Mode = true, first
	return v
}

// disagrees compares the ledger's answer with the oracle's; leases and retry
// times are not the pseudocode's.
func (o *oracle) disagrees(got Verdict, want Verdict) error {
	got.Lease, got.RetryAfter = Lease{}, 0
	if got != want {
		return fmt.Errorf("Admit(%+v)\n = %+v\nwant %+v", o.q.Request, got, want)
	}
	return nil
}

// ask answers like Admit, but from the oracle; to be called before Admit.
func ask(l *Ledger, q Question, now time.Time) (*oracle, Verdict) {
	l.Tick(now) // deadlines that have come count for both
	o := &oracle{l: l, q: q}
	if l.cfg.Prefill {
		return o, Verdict{}
	}
	return o, o.verdict()
}
