package state

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Options configure a State. The zero value of every field is usable.
type Options struct {
	Params kvc.Params // already scaled; default: kvc.Corrected

	MaxSessions int           // default 1 Mi sessions
	MaxBlocks   int           // default 10 Mi blocks, over all workers
	SessionTTL  time.Duration // default 15 min; a session unused for longer is new again

	Clock func() time.Time // default time.Now
}

// Worker is one routable incarnation, in the fleet's order.
type Worker struct {
	ID       kvc.WorkerID
	Role     fleet.Role
	Draining bool // serves only the sessions it holds
}

// Load is a worker's heartbeat, in tokens, requests and tokens per second.
type Load struct {
	Capacity                          int
	Used, Locked, Protected, Reserved int
	Running, Waiting, Transferring    int
	WaitingUncached                   int
	PrefillTokensPerSecond            float64
	DecodeTokensPerSecond             float64
	TokensPerBlock                    float64 // 0 = unknown
}

// State is the router's beliefs. All methods are safe for concurrent use.
type State struct {
	index *index
	clock func() time.Time

	setMu sync.Mutex   // one SetWorkers at a time
	feeds sync.RWMutex // held for reading from looking a slot up to having changed its blocks

	mu       sync.Mutex
	params   kvc.Params
	slots    []slot // by slot number; never shrinks
	slotOf   map[kvc.WorkerID]int
	version  uint64 // of the worker set
	fleet    kvc.Fleet
	partial  bool // some worker is draining or suspect: not everyone sees the whole fleet
	known    set  // slots whose feed is trusted
	cursors  kvc.Cursors
	sessions *table
	spans    spans
	ratio    float64 // tokens per block

	pinChanges int64
	modes      [len(kvc.Modes) + 1]int64
}

// slot is what is believed of one worker.
type slot struct {
	id        kvc.WorkerID
	gen       uint32
	born      uint64 // version of the worker set that brought it
	role      fleet.Role
	live      bool // in the worker set
	draining  bool
	suspect   bool // breaker open, or otherwise to be avoided
	trusted   bool
	inflight  int
	running   int // turns that are really out, whatever the preset counts
	prefill   int // outstanding tokens
	assigned  float64
	assignedT int64
	load      Load
	report    uint32                    // of its sessions: a snapshot starts a new one
	sessions  int                       // that it reports
	modes     [len(kvc.Modes) + 1]int64 // of the turns it streamed
}

// New returns a State that knows no workers.
func New(o Options) *State {
	if o.Params.Preset == "" && o.Params.RejectThreshold == 0 {
		o.Params = kvc.Corrected()
	}
	if o.MaxSessions <= 0 {
		o.MaxSessions = 1 << 20
	}
	if o.MaxBlocks <= 0 {
		o.MaxBlocks = 10 << 20
	}
	if o.SessionTTL <= 0 {
		o.SessionTTL = 15 * time.Minute
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	return &State{
		index:    newIndex(o.MaxBlocks),
		clock:    o.Clock,
		params:   o.Params,
		slotOf:   make(map[kvc.WorkerID]int),
		sessions: newTable(o.MaxSessions, o.SessionTTL),
		spans:    make(spans),
		ratio:    block.IDs,
	}
}

func (s *State) now() int64 { return s.clock().UnixNano() }

// SetParams replaces the tunables (hot reload); dispatches under way keep
// theirs.
func (s *State) SetParams(p kvc.Params) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.params = p
}

// Params returns the tunables.
func (s *State) Params() kvc.Params {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.params
}

// SetWorkers replaces the worker set. A worker that left is forgotten at once
// with everything believed of it (Q15); updates that still arrive for it are
// discarded (R103). A new worker starts without residency, untrusted until its
// feed is. More than MaxWorkers are an error; the first MaxWorkers are used.
func (s *State) SetWorkers(ws []Worker) error {
	var err error
	if len(ws) > MaxWorkers {
		err = fmt.Errorf("worker set has %d workers: the router tells at most %d apart; split the pool", len(ws), MaxWorkers)
		ws = ws[:MaxWorkers]
	}
	s.setMu.Lock()
	defer s.setMu.Unlock()
	s.mu.Lock()
	gone := s.retire(ws)
	s.mu.Unlock()
	s.feeds.Lock() // whoever still writes for a worker that left has finished
	for _, i := range gone {
		s.index.sweep(i, nil)
	}
	s.feeds.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	s.version++
	for _, w := range ws {
		s.enlist(w, now)
	}
	s.rebuild(ws)
	return err
}

// retire marks the workers that are not in ws as gone and returns their slots,
// whose blocks are to be swept before anyone else gets the slot. Where belief is
// kept (Q15, the letter) a slot is given up only when the new workers need it.
func (s *State) retire(ws []Worker) (gone []int) {
	free := MaxWorkers - len(s.slots)
	for _, w := range ws {
		if _, ok := s.slotOf[w.ID]; !ok {
			free--
		}
	}
	for i := range s.slots {
		sl := &s.slots[i]
		if sl.id == "" {
			free++
			continue
		}
		if slices.ContainsFunc(ws, func(w Worker) bool { return w.ID == sl.id }) {
			continue
		}
		sl.live = false
		if s.params.Incarnations != kvc.IncarnationsKept || free < 0 {
			free++
			gone = append(gone, i)
		}
	}
	for _, i := range gone {
		sl := &s.slots[i]
		delete(s.slotOf, sl.id)
		s.known.remove(i)
		s.spans.forget(i)
		*sl = slot{gen: sl.gen + 1}
	}
	return gone
}

func (s *State) enlist(w Worker, now int64) {
	i, ok := s.slotOf[w.ID]
	if !ok {
		i = slices.IndexFunc(s.slots, func(sl slot) bool { return sl.id == "" })
		if i < 0 {
			i = len(s.slots)
			s.slots = append(s.slots, slot{})
		}
		start := 0.0
		if s.params.Newcomer == kvc.NewcomerAtMinimum {
			start = s.leastAssigned(w.Role, now)
		}
		s.slots[i] = slot{id: w.ID, gen: s.slots[i].gen, born: s.version, assigned: start, assignedT: now}
		s.slotOf[w.ID] = i
	}
	sl := &s.slots[i]
	sl.role, sl.live, sl.draining = w.Role, true, w.Draining
}

// leastAssigned is where a new worker starts, so that it does not win every tie
// until it has caught up (Q9, R91).
func (s *State) leastAssigned(r fleet.Role, now int64) float64 {
	least := math.Inf(1)
	for i := range s.slots {
		if sl := &s.slots[i]; sl.live && sl.role == r {
			least = min(least, sl.assignedNow(now, &s.params))
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}

func (sl *slot) assignedNow(now int64, p *kvc.Params) float64 {
	return decay(sl.assigned, now-sl.assignedT, p.AssignedHalfLife)
}

// rebuild makes the whole fleet. Its slices are never changed afterwards:
// dispatches hold them.
func (s *State) rebuild(ws []Worker) {
	var f kvc.Fleet
	for _, w := range ws {
		if w.Role == fleet.Prefill {
			f.Prefill = append(f.Prefill, w.ID)
		} else {
			f.Decode = append(f.Decode, w.ID)
		}
	}
	f.Cursors = &s.cursors
	s.fleet = f
	s.markPartial()
}

func (s *State) markPartial() {
	s.partial = slices.ContainsFunc(s.slots, func(sl slot) bool { return sl.live && (sl.draining || sl.suspect) })
}

// SetAvailable says whether a worker should be chosen at all (a breaker is
// open, it is not ready). While no worker of its role is available, all are
// (R76).
func (s *State) SetAvailable(w kvc.WorkerID, yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i, ok := s.slotOf[w]; ok {
		s.slots[i].suspect = !yes
		s.markPartial()
	}
}

// fleetFor is the fleet as a request of ss (nil: none) sees it: without suspect
// workers while others are left, and without draining workers unless they hold
// the session.
func (s *State) fleetFor(ss *session, path kvc.DirectPath) kvc.Fleet {
	f := s.fleet
	f.Path = path
	if !s.partial {
		return f
	}
	f.Decode = s.choose(f.Decode, func(i int) bool { return !s.slots[i].draining || s.holds(ss, i) })
	f.Prefill = s.choose(f.Prefill, func(i int) bool { return !s.slots[i].draining })
	return f
}

func (s *State) choose(ws []kvc.WorkerID, allowed func(slot int) bool) []kvc.WorkerID {
	var fine, all []kvc.WorkerID
	for _, w := range ws {
		if i, ok := s.slotOf[w]; ok && allowed(i) {
			all = append(all, w)
			if !s.slots[i].suspect {
				fine = append(fine, w)
			}
		}
	}
	if len(fine) > 0 {
		return fine
	}
	return all
}

// holds reports whether slot i is believed to hold the session.
func (s *State) holds(ss *session, i int) bool {
	if ss == nil {
		return false
	}
	is := func(r ref) bool { return int(r.slot) == i && r.gen == s.slots[i].gen }
	return ss.pinned && !ss.lost && is(ss.pin) ||
		slices.ContainsFunc(ss.homes, func(h home) bool { return is(h.ref) })
}

// TokensPerBlock is the ratio that the workers have learnt, for counts only
// (Q17); about 24.
func (s *State) TokensPerBlock() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ratio
}

// ownerID is a lineage as the index keeps it. A request without a lineage
// makes its blocks shared.
func ownerID(l kvc.SessionKey) uint64 {
	if l == "" || l == kvc.Shared {
		return shared
	}
	if len(l) == 16 {
		if n, err := strconv.ParseUint(string(l), 16, 64); err == nil {
			return n
		}
	}
	return xxh3.HashString(string(l))
}
