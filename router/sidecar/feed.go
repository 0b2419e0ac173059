package sidecar

import (
	"context"
	"net/http"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
)

// newFeed is the worker's feed. It has no epoch until an engine is adopted, and
// no follower either: serveFeed keeps them out.
func (s *Sidecar) newFeed() *feed.Server {
	return feed.NewServer(feed.ServerConfig{Snapshot: s.book.snapshot, Load: s.gauges})
}

// keepFeed sends heartbeats, whatever the engine does.
func (s *Sidecar) keepFeed(ctx context.Context) {
	if err := s.feed.Run(ctx); err != nil {
		s.cfg.Log.Error("feed heartbeat", "error", err)
	}
}

// hello describes an incarnation to followers.
func (s *Sidecar) hello(inc *incarnation, l *kvc.Ledger) feed.Hello {
	return feed.Hello{
		Wire: feed.Wire, Format: block.Format, Worker: s.cfg.Worker, Epoch: inc.epoch, Role: string(s.cfg.Role),
		Model: inc.model, CapacityTokens: inc.info.MaxTotalTokens, PageSize: inc.info.PageSize,
		DirectPath: pathNames(inc), TokensPerBlock: l.TokensPerBlock(),
	}
}

// snapshot copies the ledger for a new follower, with the number of the last
// change in it.
func (b *book) snapshot() (kvc.Snapshot, uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.l == nil {
		return kvc.Snapshot{}, b.out.Seq()
	}
	b.publish()
	return b.l.Snapshot(), b.out.Seq()
}

// gauges is the heartbeat: the ledger's counts and the engine's last load.
func (s *Sidecar) gauges() feed.Load {
	g, ratio := s.book.gauges()
	l := s.lastLoad()
	return feed.Load{
		Used: g.Used, Locked: g.Locked, Protected: g.Protected, Reserved: g.Reserved,
		Running: l.Running, Waiting: l.Waiting, Transferring: l.Transferring(),
		WaitingUncachedTokens: l.WaitingUncachedTokens,
		PrefillTokensPerS:     l.PrefillRate(), DecodeTokensPerS: l.GenThroughput,
		TokensPerBlock: ratio,
	}
}

func (b *book) gauges() (g kvc.Gauges, tokensPerBlock float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.l == nil {
		return g, block.IDs
	}
	g = b.l.Gauges(b.now())
	b.publish() // deadlines that came due
	return g, b.l.TokensPerBlock()
}

func (s *Sidecar) serveFeed(w http.ResponseWriter, r *http.Request) {
	if s.book.current() == nil {
		unready().write(w)
		return
	}
	s.feed.ServeHTTP(w, r)
}

func sessionOf(i kvc.SessionInfo) feed.Session {
	out := feed.Session{
		Key: string(i.Key), Lineage: string(i.Lineage), Blocks: i.Blocks,
		ResidentTokens: i.ResidentTokens, LastUseMS: unixMS(i.LastUse), Active: i.Active,
		ProtectedUntilMS: unixMS(i.ProtectedUntil),
	}
	if i.Tail != 0 {
		out.Tail = i.Tail.String()
	}
	return out
}
