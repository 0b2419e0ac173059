package kit

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
	"github.com/kvc-dev/kvc/router/sglang"
)

// PeerConfig describes a mock sidecar.
type PeerConfig struct {
	ID     kvc.WorkerID
	Role   fleet.Role
	Path   kvc.DirectPath
	Tokens *admission.Tokens
	Rooms  *Rooms
	NoHint bool // 103 never arrive
}

// Peer is a mock sidecar together with the engine behind it: it speaks
// docs/wire.md as scripted, and answers turns like an Engine.
type Peer struct {
	*Engine
	cfg  PeerConfig
	feed *feed.Server
	stop context.CancelFunc
	runs sync.WaitGroup

	// Under Worker.mu.
	admit    func(http.ResponseWriter, *http.Request, admission.Question)
	asked    []admission.Question
	released []string // leases given back
	resident map[kvc.SessionKey]kvc.SessionInfo
	blocks   map[block.Hash]kvc.SessionKey
	chain    []block.Hash // in the order they came
}

// NewPeer starts a mock sidecar; the test's end stops it.
func NewPeer(t testing.TB, addr string, c PeerConfig) *Peer {
	t.Helper()
	e := &Engine{Worker: &Worker{t: t}, cfg: EngineConfig{Role: c.Role, Rooms: c.Rooms}, cache: map[block.Hash]bool{}}
	p := &Peer{
		Engine: e, cfg: c, resident: map[kvc.SessionKey]kvc.SessionInfo{}, blocks: map[block.Hash]kvc.SessionKey{},
	}
	paths := map[string]string{}
	for _, r := range []block.Route{block.Chat, block.Completions, block.Generate} {
		paths[string(r)] = string(c.Path)
	}
	p.feed = feed.NewServer(feed.ServerConfig{
		Hello: feed.Hello{Wire: 1, Format: block.Format, Worker: string(c.ID), Epoch: string(c.ID) + "/1",
			Role: string(c.Role), Model: Model, CapacityTokens: 1_000_000, PageSize: 1, DirectPath: paths},
		Snapshot: p.snapshot,
		Load:     func() feed.Load { return feed.Load{} },
	})
	p.Engine.script, p.Worker.control = p.serveTurn, p.serveWire
	p.after = p.ended
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.runs.Go(func() { _ = p.feed.Run(ctx) })
	p.start(addr)
	t.Cleanup(p.Stop)
	return p
}

// Stop ends the peer.
func (p *Peer) Stop() {
	p.stop()
	p.Worker.Stop()
	p.runs.Wait()
}

func (p *Peer) snapshot() (kvc.Snapshot, uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var s kvc.Snapshot
	for _, i := range p.resident {
		s.Sessions = append(s.Sessions, i)
	}
	for _, h := range p.chain {
		s.Blocks = append(s.Blocks, kvc.OwnedBlocks{Owner: p.blocks[h], Blocks: []block.Hash{h}})
	}
	return s, p.feed.Seq()
}

// Admit scripts the answers to POST /admit_direct_append.
func (p *Peer) Admit(f func(w http.ResponseWriter, r *http.Request, q admission.Question)) {
	p.note(func() { p.admit = f })
}

// Verdict is an ordinary admission, or the refusal with a reason.
func (p *Peer) Verdict(mode kvc.Mode, reason kvc.Reason) admission.Verdict {
	id := string(p.cfg.ID)
	v := admission.Verdict{Worker: id, Epoch: id + "/1", State: "Active", Reason: string(reason)}
	if reason == kvc.ReasonNone {
		v.CanAdmit, v.Mode = true, mode.String()
		v.Lease = &admission.Lease{ID: hex32(), Tokens: 100, TTLMS: 5000}
	}
	return v
}

func hex32() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand never fails
	return hex.EncodeToString(b[:])
}

// Asked are the questions that came by RPC.
func (p *Peer) Asked() []admission.Question {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

// Released are the leases given back.
func (p *Peer) Released() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.released)
}

func (p *Peer) serveWire(w http.ResponseWriter, r *http.Request) {
	w.Header().Set(admission.HeaderWire, admission.WireVersion)
	w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
	p.note(func() { p.Engine.control = append(p.Engine.control, r.Clone(context.Background())) })
	if !p.cfg.Tokens.Accepts(r.Header) {
		admission.WriteError(w, http.StatusUnauthorized, "unknown bearer token")
		return
	}
	switch {
	case r.URL.Path == admission.PathFeed:
		p.feed.ServeHTTP(w, r)
	case r.URL.Path == admission.PathHint:
		if !p.cfg.NoHint {
			w.Header().Set(admission.HeaderHint, admission.WireVersion)
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del(admission.HeaderHint)
		}
		w.WriteHeader(http.StatusNoContent)
	case r.URL.Path == admission.PathAdmit:
		p.serveAdmit(w, r)
	case strings.HasPrefix(r.URL.Path, admission.PathLeases+"/"):
		p.note(func() { p.released = append(p.released, strings.TrimPrefix(r.URL.Path, admission.PathLeases+"/")) })
		w.WriteHeader(http.StatusNoContent)
	default:
		http.NotFound(w, r)
	}
}

func (p *Peer) serveAdmit(w http.ResponseWriter, r *http.Request) {
	var q admission.Question
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		p.t.Errorf("admission question: %v", err)
		return
	}
	var admit func(http.ResponseWriter, *http.Request, admission.Question)
	p.note(func() { p.asked, admit = append(p.asked, q), p.admit })
	if admit != nil {
		admit(w, r, q)
		return
	}
	v := p.Verdict(p.modeOf(kvc.SessionKey(q.Session), q.Turn), kvc.ReasonNone)
	admission.WriteJSON(w, http.StatusOK, "application/json", v)
}

func (p *Peer) modeOf(s kvc.SessionKey, turn int) kvc.Mode {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch _, ok := p.resident[s]; {
	case ok:
		return kvc.Direct
	case turn == 0:
		return kvc.Seed
	}
	return kvc.Reseed
}

// Turn is what the router said beside the body.
func (s *Seen) Turn(t testing.TB) admission.Turn {
	t.Helper()
	in, err := admission.ParseTurn(s.Header)
	if err != nil {
		t.Fatalf("turn headers: %v", err)
	}
	return in
}

// Early answers a fused question with 103: admitted.
func (p *Peer) Early(ex *Exchange, v admission.Verdict) {
	line, _ := json.Marshal(v) // plain members always encode
	h := ex.w.Header()
	h.Set(admission.HeaderVerdict, string(line))
	if v.Lease != nil {
		h.Set(admission.HeaderLease, v.Lease.ID)
	}
	ex.w.WriteHeader(http.StatusEarlyHints)
	h.Del(admission.HeaderVerdict)
	h.Del(admission.HeaderLease)
	ex.mode = v.Mode
}

// Conflict answers a turn with 409 and a verdict.
func (p *Peer) Conflict(ex *Exchange, v admission.Verdict) {
	ex.w.Header().Set(admission.HeaderOrigin, admission.OriginSidecar)
	admission.WriteJSON(ex.w, http.StatusConflict, admission.ContentTypeVerdict, v)
}

// Serve is the ordinary sidecar and engine: a fused question is admitted, a leg
// that needs the rendezvous does it, the answer follows, and the session is
// resident from then on.
func (p *Peer) serveTurn(ex *Exchange) {
	ex.w.Header().Set(admission.HeaderOrigin, admission.OriginEngine)
	in := ex.Seen.Turn(p.t)
	p.Admitted(ex)
	if in.Bootstrap != nil && ex.mode != kvc.Direct.String() && !p.meet(ex, in) {
		return
	}
	p.Answer(ex)
	p.Keep(ex)
}

// Admitted admits a fused question, and tells of a fallback that begins; other
// turns pass.
func (p *Peer) Admitted(ex *Exchange) {
	in := ex.Seen.Turn(p.t)
	switch {
	case in.Leg == admission.LegPrefill || p.cfg.NoHint:
	case in.Admit == admission.AdmitAsk:
		p.Early(ex, p.Verdict(p.modeOf(in.Session, in.Turn), kvc.ReasonNone))
	case in.Admit == admission.AdmitNone:
		v := p.Verdict(kvc.Fallback, kvc.ReasonNone)
		v.Lease = nil
		p.Early(ex, v)
	}
}

// meet does the rendezvous that the headers name.
func (p *Peer) meet(ex *Exchange, in admission.Turn) bool {
	room := p.Engine.cfg.Rooms.get(in.Bootstrap.String())
	if in.Leg == admission.LegPrefill {
		if !ex.Until(room.joined) {
			return false
		}
		room.transfer()
		return true
	}
	room.join()
	return ex.Until(room.moved)
}

// Keep makes the turn's session resident and tells the followers.
func (p *Peer) Keep(ex *Exchange) {
	in := ex.Seen.Turn(p.t)
	route, _ := sglang.RouteOf(ex.Seen.Path)
	b, err := scan.Parse(ex.Seen.Body, scan.Limits{})
	if err != nil || in.Session == "" || in.Leg == admission.LegPrefill {
		return
	}
	c, err := block.Of(route, b, Model, nil)
	if err != nil || len(c.Blocks) == 0 {
		return
	}
	info := kvc.SessionInfo{Key: in.Session, Lineage: in.Lineage, Tail: c.Blocks[len(c.Blocks)-1], Blocks: len(c.Blocks),
		ResidentTokens: len(c.Blocks) * block.IDs, LastUse: time.Now(), ProtectedUntil: time.Now().Add(time.Minute)}
	var fresh []block.Hash
	p.note(func() {
		for _, h := range c.Blocks {
			if _, ok := p.blocks[h]; !ok {
				fresh = append(fresh, h)
				p.blocks[h] = in.Lineage
			}
		}
		p.chain = append(p.chain, fresh...)
		p.resident[in.Session] = info
	})
	if len(fresh) > 0 {
		p.feed.Publish(kvc.Change{Kind: kvc.ChangeAdd, Owner: in.Lineage, Blocks: fresh})
	}
	p.feed.Publish(kvc.Change{Kind: kvc.ChangeSession, Session: info})
}

// ended sends the turn frame: the engine is done with the turn.
func (p *Peer) ended(ex *Exchange) {
	in, err := admission.ParseTurn(ex.Seen.Header)
	if err != nil || in.Leg != admission.LegDecode {
		return
	}
	outcome := kvc.OutcomeOK
	select {
	case <-ex.Gone():
		outcome = kvc.OutcomeCancelled
	default:
	}
	mode, _ := kvc.ParseMode(ex.mode)
	end := kvc.TurnInfo{Attempt: in.Attempt, Session: in.Session, Mode: mode, Outcome: outcome}
	p.feed.Publish(kvc.Change{Kind: kvc.ChangeTurn, Turn: end})
}
