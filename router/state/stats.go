package state

import (
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Stats are the counters of GET /kvc/v1/status and the metrics.
type Stats struct {
	Sessions        int
	SessionsEvicted int64 // by the bound or the TTL, since start
	PinChanges      int64 // since start
	Modes           map[kvc.Mode]int64
	Blocks          int   // resident blocks known
	BlocksDropped   int64 // not indexed because the index is full, since start
	Workers         []WorkerStats
}

// WorkerStats is what is believed of one worker of the set.
type WorkerStats struct {
	ID        kvc.WorkerID
	Role      fleet.Role
	Draining  bool
	Available bool
	Trusted   bool
	Running   int // turns that are out, in every preset
	Inflight  int // the belief that Route reads (Q9)
	Assigned  float64
	// PrefillOutstanding is the uncached tokens sent to a prefill worker and
	// not answered yet.
	PrefillOutstanding int
	Sessions           int // that it reports
	Blocks             int
	Load               Load
	// Modes counts the turns that it has begun to answer, by what they ran as.
	Modes map[kvc.Mode]int64
}

// Stats copies the counters; workers are in the fleet's order, decode first.
func (s *State) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{
		Sessions:        len(s.sessions.m),
		SessionsEvicted: s.sessions.evicted,
		PinChanges:      s.pinChanges,
		Modes:           byMode(&s.modes),
		Blocks:          int(s.index.size.Load()),
		BlocksDropped:   s.index.dropped.Load(),
	}
	now := s.now()
	for _, ids := range [][]kvc.WorkerID{s.fleet.Decode, s.fleet.Prefill} {
		for _, id := range ids {
			st.Workers = append(st.Workers, s.workerStats(s.slotOf[id], now))
		}
	}
	return st
}

func (s *State) workerStats(i int, now int64) WorkerStats {
	sl := &s.slots[i]
	return WorkerStats{
		ID: sl.id, Role: sl.role, Draining: sl.draining, Available: !sl.suspect, Trusted: sl.trusted,
		Running: sl.running, Inflight: sl.inflight, Assigned: sl.assignedNow(now, &s.params),
		PrefillOutstanding: sl.prefill, Sessions: sl.sessions,
		Blocks: int(s.index.held[i].Load()), Load: sl.load, Modes: byMode(&sl.modes),
	}
}

// byMode turns counters into a map that has every mode a turn can end with.
func byMode(counts *[len(kvc.Modes) + 1]int64) map[kvc.Mode]int64 {
	out := make(map[kvc.Mode]int64, len(kvc.Modes))
	for _, m := range kvc.Modes {
		out[m] = counts[m]
	}
	return out
}
