package proxy

import (
	"context"
	"net/http"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/state"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// Apply takes a fleet. A worker that left is forgotten with everything believed
// of it; its turns under way go on until its connections end. A new id under an
// old name is a new worker (R99).
func (p *Proxy) Apply(f *fleet.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	old := *p.workers.Load()
	next := make(map[kvc.WorkerID]*worker, len(f.Workers))
	var set []state.Worker
	var started []*worker
	for _, fw := range f.Workers {
		w := old[fw.ID]
		if w == nil || !sameWorker(w.Worker, fw) {
			w = p.newWorker(fw)
			p.prepare(w)
			started = append(started, w)
		}
		next[fw.ID] = w
		w.drained.Store(fw.State == fleet.Draining)
		set = append(set, state.Worker{ID: fw.ID, Role: fw.Role, Draining: w.draining()})
	}
	if err := p.state.SetWorkers(set); err != nil {
		p.log.Error("fleet too large", "error", err)
	}
	p.workers.Store(&next)
	p.fleet.Store(f)
	for id, w := range old {
		if next[id] != w {
			w.gone()
			p.series.worker(w.Name, -1)
		}
	}
	for _, w := range started {
		p.follow(w)
	}
	p.settle()
	p.log.Info("fleet applied", "workers", len(f.Workers), "new", len(started))
}

// sameWorker reports whether a worker is reached as before.
func sameWorker(a, b fleet.Worker) bool {
	return a.URL == b.URL && a.Role == b.Role && a.Name == b.Name &&
		(a.Bootstrap == b.Bootstrap || a.Bootstrap != nil && b.Bootstrap != nil && *a.Bootstrap == *b.Bootstrap)
}

// setStates tells the beliefs which workers drain now.
func (p *Proxy) setStates() {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fleet.Load()
	if f == nil {
		return
	}
	ws := *p.workers.Load()
	var set []state.Worker
	for _, fw := range f.Workers {
		if w := ws[fw.ID]; w != nil {
			set = append(set, state.Worker{ID: fw.ID, Role: fw.Role, Draining: w.draining()})
		}
	}
	if err := p.state.SetWorkers(set); err != nil {
		p.log.Error("fleet too large", "error", err)
	}
}

// prepare makes w's follower; others may see w from then on.
func (p *Proxy) prepare(w *worker) {
	w.life, w.gone = context.WithCancel(p.life)
	w.follower = feed.NewFollower(feed.FollowerConfig{
		URL: w.URL, Worker: w.ID, Token: p.out.tokens.First,
		Client: &http.Client{Transport: p.out.feeds, CheckRedirect: noRedirect}, Log: p.log,
	}, &sink{p: p, w: w})
	p.series.worker(w.Name, +1)
	p.series.set(w.Name, func(m *telemetry.Router) { m.Trusted(w.Name, false) })
}

// follow keeps the beliefs about w up to date until it leaves the fleet.
func (p *Proxy) follow(w *worker) {
	go func() {
		defer close(w.done)
		defer w.probes.Wait()
		_ = w.follower.Run(w.life) // it ends with its context only
		w.turns.reset()
	}()
}

// sink applies one worker's feed.
type sink struct {
	p *Proxy
	w *worker
}

var _ feed.Sink = (*sink)(nil)

// Hello opens a connection: perhaps another epoch, so the hint probe is due.
func (s *sink) Hello(h feed.Hello) {
	s.w.hello.Store(&greeting{epoch: h.Epoch, model: h.Model, directPath: h.DirectPath, capacity: h.CapacityTokens})
	if !h.Resume {
		s.w.turns.reset() // the snapshot that follows is newer than any turn left behind
	}
	if s.w.Role == fleet.Decode {
		s.w.probes.Go(func() { s.probeHint(h.Epoch) })
	}
}

// probeHint finds out whether 103 Early Hints arrive (wire.md §3): until they
// are known to, the worker is asked by RPC only.
// An error is no answer, so it is asked again a few times.
func (s *sink) probeHint(epoch string) {
	for try := range hintTries {
		if try > 0 {
			select {
			case <-s.w.life.Done():
				return
			case <-time.After(hintPause):
			}
		}
		ctx, cancel := context.WithTimeout(s.w.life, 2*time.Second)
		ok, err := s.p.client.Hint(ctx, s.w.URL)
		cancel()
		switch {
		case err != nil:
			s.p.metrics.Hint("error")
			continue
		case !ok:
			s.p.metrics.Hint("missing")
		default:
			s.p.metrics.Hint("ok")
			s.w.hinted.Store(&epoch)
		}
		return
	}
}

const (
	hintTries = 5
	hintPause = 500 * time.Millisecond
)

// Reset replaces what is believed of the worker's residency. Sessions live on
// decode workers only: what a prefill worker remembers is a cache.
func (s *sink) Reset(snap kvc.Snapshot) {
	sessions := snap.Sessions
	if s.w.Role == fleet.Prefill {
		sessions = nil
	}
	s.p.state.Reset(s.w.ID, sessions, snap.Blocks)
}

func (s *sink) Session(i kvc.SessionInfo) {
	if s.w.Role == fleet.Decode {
		s.p.state.Session(s.w.ID, i)
	}
}

func (s *sink) SessionGone(key kvc.SessionKey) {
	if s.w.Role == fleet.Decode {
		s.p.state.SessionGone(s.w.ID, key)
	}
}

func (s *sink) Add(owner kvc.SessionKey, blocks []block.Hash) { s.p.state.Add(s.w.ID, owner, blocks) }
func (s *sink) Evict(blocks []block.Hash)                     { s.p.state.Evict(s.w.ID, blocks) }
func (s *sink) Own(owner kvc.SessionKey, blocks []block.Hash) { s.p.state.Own(s.w.ID, owner, blocks) }
func (s *sink) Clear()                                        { s.p.state.Clear(s.w.ID) }

// State is the worker's own word on its lifecycle.
func (s *sink) State(st string, _, _ time.Time) {
	if drains := st == string(fleet.Draining); s.w.saysDraining.Swap(drains) != drains {
		s.p.setStates()
	}
}

// Turn is the worker's word that a turn has ended (R64).
func (s *sink) Turn(t kvc.TurnInfo) {
	s.w.turns.end(t.Attempt)
	s.p.state.Finished(s.w.ID, t)
}

func (s *sink) Load(l feed.Load) {
	capacity := 0
	if g := s.w.hello.Load(); g != nil {
		capacity = g.capacity
	}
	s.p.state.SetLoad(s.w.ID, state.Load{
		Capacity: capacity, Used: l.Used, Locked: l.Locked, Protected: l.Protected, Reserved: l.Reserved,
		Running: l.Running, Waiting: l.Waiting, Transferring: l.Transferring, WaitingUncached: l.WaitingUncachedTokens,
		PrefillTokensPerSecond: l.PrefillTokensPerS, DecodeTokensPerSecond: l.DecodeTokensPerS,
		TokensPerBlock: l.TokensPerBlock,
	})
}

// Trusted says whether the residency may be believed.
func (s *sink) Trusted(ok bool, cause feed.Cause) {
	s.p.state.SetTrusted(s.w.ID, ok)
	s.w.trusted.Store(ok)
	s.p.settle()
	if s.p.worker(s.w.ID) != s.w {
		return // removed: the series are another's, or gone
	}
	s.p.series.set(s.w.Name, func(m *telemetry.Router) { m.Trusted(s.w.Name, ok) })
	if !ok {
		s.p.metrics.Untrusted(string(cause))
	}
}
