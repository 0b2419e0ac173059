package proxy

import (
	"sync"

	"github.com/kvc-dev/kvc/router/telemetry"
)

// series knows which worker names have metric series: a name's go when its last
// worker has left the fleet and its last leg has ended (R105), not earlier, or
// the leg's end would bring them back with nonsense.
type series struct {
	metrics *telemetry.Router

	mu    sync.Mutex
	names map[string]*nameUse
}

type nameUse struct{ workers, legs int }

// worker counts a worker of the fleet in (+1) or out (-1).
func (s *series) worker(name string, by int) {
	s.change(name, func(u *nameUse) { u.workers += by })
}

// leg counts a leg to a worker in (+1) or out (-1).
func (s *series) leg(w *worker, by int) {
	s.change(w.Name, func(u *nameUse) {
		u.legs += by
		s.metrics.Inflight(w.Name, string(w.Role), by)
	})
}

// set changes one of a name's gauges, if the name still has series.
func (s *series) set(name string, f func(*telemetry.Router)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names[name] != nil {
		f(s.metrics)
	}
}

func (s *series) change(name string, f func(*nameUse)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.names == nil {
		s.names = make(map[string]*nameUse)
	}
	u := s.names[name]
	if u == nil {
		u = new(nameUse)
		s.names[name] = u
	}
	if f(u); u.workers == 0 && u.legs == 0 {
		delete(s.names, name)
		s.metrics.WorkerGone(name)
	}
}
