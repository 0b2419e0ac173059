package feed

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 10 * time.Second

// worker is a ledger's stand-in beside a feed server on a real socket.
type worker struct {
	*Server
	http *httptest.Server

	mu       sync.Mutex // serialises the ledger, as a sidecar does
	sessions map[kvc.SessionKey]kvc.SessionInfo
	blocks   map[block.Hash]kvc.SessionKey
	order    []block.Hash
	wrap     func(http.Handler) http.Handler
	requests []string // queries of the connections
	load     Load
}

func hello(epoch string) Hello {
	return Hello{
		Wire: Wire, Format: block.Format, Worker: "w1", Epoch: epoch, Role: "decode",
		Model: "m", CapacityTokens: 1000, PageSize: 1,
		DirectPath: map[string]string{"chat": "Unified"},
	}
}

func newWorker(t *testing.T, h Hello, seq uint64) *worker {
	w := &worker{sessions: map[kvc.SessionKey]kvc.SessionInfo{}, blocks: map[block.Hash]kvc.SessionKey{}}
	w.Server = NewServer(ServerConfig{Hello: h, Seq: seq, Snapshot: w.snapshot, Load: func() Load {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.load
	}})
	w.http = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.requests = append(w.requests, r.URL.RawQuery)
		wrap := w.wrap
		w.mu.Unlock()
		if wrap != nil {
			wrap(w.Server).ServeHTTP(rw, r)
			return
		}
		w.ServeHTTP(rw, r)
	}))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		w.http.CloseClientConnections()
		w.http.Close()
	})
	return w
}

func (w *worker) snapshot() (kvc.Snapshot, uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s kvc.Snapshot
	for _, info := range w.sessions {
		s.Sessions = append(s.Sessions, info)
	}
	for _, h := range w.order {
		s.Blocks = append(s.Blocks, kvc.OwnedBlocks{Owner: w.blocks[h], Blocks: []block.Hash{h}})
	}
	return s, w.Seq()
}

// change applies changes to the worker and publishes them.
func (w *worker) change(cs ...kvc.Change) uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range cs {
		switch c.Kind {
		case kvc.ChangeSession:
			w.sessions[c.Session.Key] = c.Session
		case kvc.ChangeSessionGone:
			delete(w.sessions, c.Session.Key)
		case kvc.ChangeAdd:
			for _, h := range c.Blocks {
				w.blocks[h] = c.Owner
				w.order = append(w.order, h)
			}
		case kvc.ChangeOwn:
			for _, h := range c.Blocks {
				w.blocks[h] = c.Owner
			}
		case kvc.ChangeEvict:
			for _, h := range c.Blocks {
				delete(w.blocks, h)
				w.order = slices.DeleteFunc(w.order, func(x block.Hash) bool { return x == h })
			}
		case kvc.ChangeClear:
			clear(w.blocks)
			clear(w.sessions)
			w.order = nil
		}
	}
	return w.Publish(cs...)
}

func (w *worker) wrapWith(f func(http.Handler) http.Handler) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrap = f
}

func (w *worker) seen() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.requests...)
}

// add is n blocks of owner, numbered from first.
func add(owner kvc.SessionKey, first, n int) kvc.Change {
	hs := make([]block.Hash, n)
	for i := range hs {
		hs[i] = block.Hash(first + i)
	}
	return kvc.Change{Kind: kvc.ChangeAdd, Owner: owner, Blocks: hs}
}

func session(key kvc.SessionKey, tail block.Hash) kvc.Change {
	return kvc.Change{Kind: kvc.ChangeSession, Session: kvc.SessionInfo{
		Key: key, Lineage: key, Tail: tail, Blocks: 1, ResidentTokens: 30, LastUse: time.UnixMilli(1234567),
	}}
}

// picture is a Sink that remembers.
type picture struct {
	mu       sync.Mutex
	hello    Hello
	sessions map[kvc.SessionKey]kvc.SessionInfo
	blocks   map[block.Hash]kvc.SessionKey
	state    string
	soft     time.Time
	turns    []kvc.TurnInfo
	loads    int
	resets   int
	hellos   int
	trust    []string // "+" and causes, in order
	changed  chan struct{}
}

func newPicture() *picture {
	return &picture{
		sessions: map[kvc.SessionKey]kvc.SessionInfo{}, blocks: map[block.Hash]kvc.SessionKey{},
		changed: make(chan struct{}, 1),
	}
}

func (p *picture) do(f func()) {
	p.mu.Lock()
	f()
	p.mu.Unlock()
	select {
	case p.changed <- struct{}{}:
	default:
	}
}

func (p *picture) Hello(h Hello) { p.do(func() { p.hello = h; p.hellos++ }) }
func (p *picture) Reset(s kvc.Snapshot) {
	p.do(func() {
		p.resets++
		clear(p.sessions)
		clear(p.blocks)
		for _, i := range s.Sessions {
			p.sessions[i.Key] = i
		}
		for _, o := range s.Blocks {
			for _, h := range o.Blocks {
				p.blocks[h] = o.Owner
			}
		}
	})
}
func (p *picture) Session(s kvc.SessionInfo)      { p.do(func() { p.sessions[s.Key] = s }) }
func (p *picture) SessionGone(key kvc.SessionKey) { p.do(func() { delete(p.sessions, key) }) }
func (p *picture) Add(owner kvc.SessionKey, hs []block.Hash) {
	p.do(func() {
		for _, h := range hs {
			p.blocks[h] = owner
		}
	})
}
func (p *picture) Own(owner kvc.SessionKey, hs []block.Hash) { p.Add(owner, hs) }
func (p *picture) Evict(hs []block.Hash) {
	p.do(func() {
		for _, h := range hs {
			delete(p.blocks, h)
		}
	})
}
func (p *picture) Clear()              { p.do(func() { clear(p.blocks); clear(p.sessions) }) }
func (p *picture) Turn(t kvc.TurnInfo) { p.do(func() { p.turns = append(p.turns, t) }) }
func (p *picture) Load(Load)           { p.do(func() { p.loads++ }) }
func (p *picture) State(s string, soft, _ time.Time) {
	p.do(func() { p.state, p.soft = s, soft })
}
func (p *picture) Trusted(ok bool, c Cause) {
	p.do(func() {
		if ok {
			p.trust = append(p.trust, "+")
		} else {
			p.trust = append(p.trust, string(c))
		}
	})
}

// until waits for an event after which ok holds.
func (p *picture) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for {
		p.mu.Lock()
		done := ok()
		p.mu.Unlock()
		if done {
			return
		}
		select {
		case <-p.changed:
		case <-time.After(20 * time.Millisecond): // Position moves after the Sink was told
		case <-deadline:
			t.Fatalf("still waiting for %s; picture %+v", what, p)
		}
	}
}

func (p *picture) trusts() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.trust...)
}

// follow starts a follower that ends with the test.
func follow(t *testing.T, w *worker, change ...func(*FollowerConfig)) (*Follower, *picture) {
	cfg := FollowerConfig{
		URL: w.http.URL, Worker: "w1", MinBackoff: 2 * time.Millisecond, MaxBackoff: 20 * time.Millisecond,
		Silence: time.Minute, // a stalled machine is not what is tested
	}
	for _, f := range change {
		f(&cfg)
	}
	p := newPicture()
	f := NewFollower(cfg, p)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = f.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	return f, p
}

// agree waits until follower and worker show the same seq and the same picture.
func agree(t *testing.T, w *worker, f *Follower, p *picture) {
	t.Helper()
	p.until(t, fmt.Sprintf("seq %d", w.Seq()), func() bool {
		pos := f.Position()
		return pos.Trusted && pos.Seq == w.Seq()
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if !maps.Equal(w.blocks, p.blocks) {
		t.Errorf("blocks (-worker +follower):\n%s", cmp.Diff(w.blocks, p.blocks))
	}
	if diff := cmp.Diff(w.sessions, p.sessions); diff != "" {
		t.Errorf("sessions (-worker +follower):\n%s", diff)
	}
}
