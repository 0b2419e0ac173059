package state

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/kvc"
)

func TestExplainSaysWhy(t *testing.T) {
	cases := map[string]struct {
		do   func(*State)
		want map[kvc.WorkerID]string // part of why
	}{
		"nothing anywhere": {func(*State) {}, map[kvc.WorkerID]string{
			"d1": "chosen: nothing to reuse anywhere, least loaded", "d2": "equal, but later"}},
		"home": {func(s *State) { s.Add("d2", "s", chain(1, 10)); serveOn(s, "d2") }, map[kvc.WorkerID]string{
			"d2": "chosen: the session's home, 10 blocks", "d1": "less to reuse: 0 < 11"}},
		"blocks without a pin": {func(s *State) { s.Add("d2", "s", chain(1, 10)) }, map[kvc.WorkerID]string{
			"d2": "chosen: most to reuse, 10 blocks", "d1": "less to reuse: 0 < 10"}},
		"not the home": {func(s *State) { serveOn(s, "d2"); s.Add("d1", "s", chain(1, 1)) }, map[kvc.WorkerID]string{
			"d2": "chosen", "d1": "as much to reuse, but not the session's home"}},
		"busy": {func(s *State) { s.Begin(kvc.Request{}, nil, "").Next() }, map[kvc.WorkerID]string{
			"d1": "more in flight: 1 > 0", "d2": "chosen"}},
		"used before": {func(s *State) { serveOn(s, "d1"); s.Forget("s") }, map[kvc.WorkerID]string{
			"d1": "more assigned: 1.00 > 0.00", "d2": "chosen"}},
		"refused": {func(s *State) { rejected(s, "d1") }, map[kvc.WorkerID]string{
			"d1": "passed over: refused the session 3 times", "d2": "chosen"}},
		"refused by all": {func(s *State) { rejected(s, "d1", "d2", "d3") }, map[kvc.WorkerID]string{
			"d1": "chosen: every worker was passed over", "d2": "passed over"}},
		"suspect": {func(s *State) { s.SetAvailable("d1", false) }, map[kvc.WorkerID]string{
			"d1": "not available", "d2": "chosen"}},
		"draining": {func(s *State) {
			ws := workers(3, 1)
			ws[0].Draining = true
			_ = s.SetWorkers(ws)
		}, map[kvc.WorkerID]string{"d1": "draining", "d2": "chosen"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := newState(t, newClock(), Options{}, 3, 1)
			tc.do(s)
			x := s.Explain(kvc.Request{Session: "s", Lineage: "s"}, chain(1, 10))
			for _, d := range x.Decode {
				if part, ok := tc.want[d.Worker]; ok && !strings.Contains(d.Why, part) {
					t.Errorf("%s: %q, want %q", d.Worker, d.Why, part)
				}
				if d.Chosen != strings.HasPrefix(d.Why, "chosen") {
					t.Errorf("%s: chosen %v, but %q", d.Worker, d.Chosen, d.Why)
				}
			}
		})
	}
}

// rejected makes each worker refuse session s three times.
func rejected(s *State, ds ...kvc.WorkerID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ss := s.sessions.touch("s", "s", s.now())
	for _, d := range ds {
		for range 3 {
			ss.rejected(ref{int16(s.slotOf[d]), s.slots[s.slotOf[d]].gen}, s.now(), &s.params)
		}
	}
}

// Explain says what the next turn does, and changes nothing.
func TestExplainAgreesWithTheNextTurn(t *testing.T) {
	s := newState(t, newClock(), Options{}, 3, 2)
	s.Add("d3", kvc.Shared, chain(1, 4))
	s.Add("d3", "s", chain(1, 10)[4:])
	s.Add("p2", "s", chain(1, 8))
	before := s.Stats()
	x := s.Explain(kvc.Request{Session: "s", Lineage: "s"}, chain(1, 12))
	if after := s.Stats(); after.Sessions != before.Sessions || worker(after, "d3").Inflight != 0 {
		t.Errorf("Explain changed the state: %+v", after)
	}
	if x.Blocks != 12 || x.Shared != 4 || x.Input != 12*24 || x.Append != 2*24 || x.Preset != "Corrected" || x.Home != "" {
		t.Errorf("explanation %+v", x)
	}
	turn := s.Begin(kvc.Request{Session: "s"}, chain(1, 12), "")
	step := turn.Next()
	for _, d := range x.Decode {
		if d.Chosen != (d.Worker == step.Worker) {
			t.Errorf("%s: chosen %v, the turn asks %s", d.Worker, d.Chosen, step.Worker)
		}
		if d.Worker == "d3" && (d.Resident != 10 || d.Reuse != 6) {
			t.Errorf("d3: %d resident, %d reusable; want 10, 6", d.Resident, d.Reuse)
		}
	}
	for _, p := range x.Prefill {
		if p.Chosen != (p.Worker == step.Prefill) {
			t.Errorf("%s: chosen %v, the turn takes %s", p.Worker, p.Chosen, step.Prefill)
		}
		if p.Worker == "p2" && p.Uncached != 4*24 {
			t.Errorf("p2 lacks %d tokens, want 96", p.Uncached)
		}
	}
}

func TestExplainWithoutWorkers(t *testing.T) {
	x := New(Options{}).Explain(kvc.Request{}, chain(1, 3))
	if len(x.Decode) != 0 || len(x.Prefill) != 0 || x.Append != 72 {
		t.Errorf("explanation %+v", x)
	}
}
