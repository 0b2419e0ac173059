package sidecar

import (
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
)

// status is wire.md §5, taken at one moment.
func (s *Sidecar) status() admission.SidecarStatus {
	out := admission.SidecarStatus{
		Wire: 1, Worker: s.cfg.Worker, Pod: s.cfg.Pod, Role: string(s.cfg.Role), ConfigHash: s.configHash(),
	}
	r := s.ready.Load()
	out.Ready, out.Reason = r.ready, r.reason
	s.book.fill(&out)
	queued := s.book.counts().queued
	load := s.lastLoad()
	out.Queues = admission.QueueStatus{
		Prefill:  load.Disaggregation.PrefillBootstrap + load.Disaggregation.PrefillInflight,
		Transfer: load.Disaggregation.DecodePrealloc + load.Disaggregation.DecodeTransfer,
		Waiting:  load.Waiting + queued,
	}
	return out
}

// fill adds what only the lock makes consistent, the feed's number included: a
// reader who waits for that number has seen everything counted here.
func (b *book) fill(out *admission.SidecarStatus) {
	b.mu.Lock()
	defer b.mu.Unlock()
	out.State, out.SoftDeadlineMS, out.HardDeadlineMS = b.state.name, unixMS(b.state.soft), unixMS(b.state.hard)
	out.InFlight = len(b.turns) + len(b.queue)
	out.Totals = b.totals.wire(b.l)
	if b.l == nil {
		out.Seq = b.out.Seq()
		return
	}
	now := b.now()
	b.expire(now)
	g := b.l.Gauges(now)
	b.publish() // deadlines that came due above
	out.Seq = b.out.Seq()
	out.Epoch = b.inc.epoch
	out.Engine = admission.EngineStatus{Version: b.inc.info.Version, StartedMS: b.inc.startedMS}
	out.CapacityTokens = b.inc.info.MaxTotalTokens
	out.Used, out.Locked, out.Protected, out.Reserved = g.Used, g.Locked, g.Protected, g.Reserved
	out.Sessions = g.Sessions
	out.EvictionCostTokens = b.l.EvictionCost()
	out.DirectPath = pathNames(b.inc)
}

func pathNames(inc *incarnation) map[string]string {
	m := make(map[string]string, len(inc.paths))
	for r, p := range inc.paths {
		m[string(r)] = string(p)
	}
	return m
}

func (s *Sidecar) getStatus(w http.ResponseWriter, _ *http.Request) {
	admission.WriteJSON(w, http.StatusOK, "application/json", s.status())
}

// maxSessionPage bounds one page of GET /kvc/v1/sessions.
const maxSessionPage = 1000

// getSessions pages SESSION objects in key order.
func (s *Sidecar) getSessions(w http.ResponseWriter, r *http.Request) {
	limit := 100
	if v := r.URL.Query().Get("limit"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			admission.WriteError(w, http.StatusBadRequest, "limit: want a number of at least 1")
			return
		}
		limit = min(n, maxSessionPage)
	}
	page := struct {
		Sessions []feed.Session `json:"sessions"`
	}{[]feed.Session{}}
	s.book.do(func(l *kvc.Ledger, _ time.Time) {
		if l == nil {
			return
		}
		for _, info := range l.Sessions(kvc.SessionKey(r.URL.Query().Get("after")), limit) {
			page.Sessions = append(page.Sessions, sessionOf(info))
		}
	})
	admission.WriteJSON(w, http.StatusOK, "application/json", page)
}
