package sidecar

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/feed"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

// world drives a book without sockets and keeps count beside it.
type world struct {
	b       *book
	clock   *clock
	running map[string]*turn
	leases  map[string]kvc.Question // given and neither presented nor released
	n       int
	ended   int64 // prompt tokens of ended turns
}

const worldTokens = 6000

func newWorld() *world {
	c := newClock()
	b := newBook(c.now)
	b.out = feed.NewServer(feed.ServerConfig{Snapshot: b.snapshot, Load: func() feed.Load { return feed.Load{} }})
	l := kvc.NewLedger(kvc.LedgerConfig{
		CapacityTokens: worldTokens, PageSize: 1, TokensPerBlock: 24,
		DirectPath: kvc.ConditionalAggregation, Params: kvc.Corrected(),
	})
	inc := &incarnation{info: &sglang.ServerInfo{MaxTotalTokens: worldTokens}, epoch: "w/1"}
	b.adopt(inc, l, feed.Hello{Epoch: "w/1"}, 0)
	return &world{b: b, clock: c, running: map[string]*turn{}, leases: map[string]kvc.Question{}}
}

// question is some turn of one of a few sessions, over a shared beginning.
func (w *world) question(t *rapid.T) kvc.Question {
	w.n++
	session := rapid.IntRange(1, 4).Draw(t, "session")
	blocks := []block.Hash{1, 2, 3}
	for i := range rapid.IntRange(0, 60).Draw(t, "blocks") {
		blocks = append(blocks, block.Hash(session*1000+i))
	}
	key := kvc.SessionKey(fmt.Sprintf("%016x", session))
	return kvc.Question{
		Attempt: fmt.Sprintf("%032x", w.n), Blocks: blocks,
		Request: kvc.Request{
			Session: key, Lineage: key, Turn: rapid.IntRange(0, 3).Draw(t, "turn"), OutputTokens: 100,
			InputTokens: len(blocks) * 24,
		},
	}
}

func (w *world) turn(q kvc.Question) *turn {
	return &turn{q: q, in: admission.Turn{Leg: admission.LegDecode, Attempt: q.Attempt}, path: kvc.ConditionalAggregation}
}

func (w *world) admit(t *rapid.T) {
	q := w.question(t)
	v, err := w.b.admit(q, rapid.SampledFrom([]string{"", "w/1", "w/2"}).Draw(t, "epoch"))
	if err != nil {
		t.Fatal(err)
	}
	if v.CanAdmit {
		w.leases[v.Lease.ID] = q
	}
}

// pick draws a key in a stable order.
func pick[V any](t *rapid.T, m map[string]V) (string, bool) {
	if len(m) == 0 {
		return "", false
	}
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return rapid.SampledFrom(keys).Draw(t, "key"), true
}

func (w *world) present(t *rapid.T) {
	lease, ok := pick(t, w.leases)
	if !ok {
		return
	}
	tn := w.turn(w.leases[lease])
	tn.mismatch = rapid.IntRange(0, 4).Draw(t, "mismatch") == 0
	delete(w.leases, lease)
	reason, err := w.b.enterLease(tn, lease)
	if err != nil {
		t.Fatal(err)
	}
	if reason == kvc.ReasonNone {
		w.running[tn.q.Attempt] = tn
	}
}

func (w *world) fallback(t *rapid.T) {
	tn := w.turn(w.question(t))
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // whoever has to wait leaves at once
	reason, err := w.b.join(ctx, tn, 2, time.Hour)
	if err == nil && reason == kvc.ReasonNone {
		w.running[tn.q.Attempt] = tn
	}
}

func (w *world) end(t *rapid.T) {
	attempt, ok := pick(t, w.running)
	if !ok {
		return
	}
	tn := w.running[attempt]
	delete(w.running, attempt)
	u := kvc.Usage{PromptTokens: tn.q.InputTokens, CompletionTokens: rapid.IntRange(0, 100).Draw(t, "out")}
	o := rapid.SampledFrom([]kvc.Outcome{kvc.OutcomeOK, kvc.OutcomeOK, kvc.OutcomeError, kvc.OutcomeCancelled}).Draw(t, "outcome")
	w.ended += int64(u.PromptTokens)
	for range rapid.IntRange(1, 2).Draw(t, "times") { // a second end does nothing
		w.b.end(tn, u, o)
	}
}

func (w *world) check(t *rapid.T) {
	var s admission.SidecarStatus
	w.b.fill(&s)
	if s.Used > worldTokens || min(s.Used, s.Locked, s.Protected, s.Reserved) < 0 {
		t.Fatalf("Inv1: %+v", s)
	}
	if s.InFlight != len(w.running) {
		t.Fatalf("in flight %d, want %d", s.InFlight, len(w.running))
	}
	if s.Totals.PromptTokens != w.ended {
		t.Fatalf("prompt tokens %d, want %d: a turn ended twice or never", s.Totals.PromptTokens, w.ended)
	}
	if c := w.b.counts(); c.leases > len(w.leases) || c.queued != 0 {
		t.Fatalf("leases %d of %d given, queued %d", c.leases, len(w.leases), c.queued)
	}
}

// R56, R57, R82: in every interleaving the books balance, and when all is over
// nothing is left.
func TestBookBalances(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld()
		t.Repeat(map[string]func(*rapid.T){
			"admit": w.admit, "present": w.present, "fallback": w.fallback, "end": w.end, "": w.check,
			"release": func(t *rapid.T) {
				if lease, ok := pick(t, w.leases); ok {
					delete(w.leases, lease)
					w.b.release(lease)
				}
			},
			"wait": func(t *rapid.T) {
				w.clock.advance(time.Duration(rapid.IntRange(1, 200).Draw(t, "seconds")) * time.Second)
				w.b.tick()
			},
			"forget": func(t *rapid.T) {
				w.b.do(func(l *kvc.Ledger, now time.Time) { l.Forget("0000000000000001", now) })
			},
			"flush": func(*rapid.T) {
				w.b.do(func(l *kvc.Ledger, now time.Time) {
					clear(w.b.grants)
					l.Clear(now)
				})
			},
			"drain": func(t *rapid.T) {
				s := lifecycle{name: stateActive}
				if rapid.Bool().Draw(t, "draining") {
					s = lifecycle{name: stateDraining, soft: w.clock.now().Add(time.Minute)}
				}
				w.b.setState(s)
			},
		})
		for _, tn := range maps.Clone(w.running) {
			delete(w.running, tn.q.Attempt)
			w.b.end(tn, kvc.Usage{}, kvc.OutcomeError)
		}
		w.clock.advance(time.Hour)
		w.b.tick()
		var s admission.SidecarStatus
		w.b.fill(&s)
		if s.InFlight+s.Locked+s.Reserved+s.Protected != 0 || w.b.counts().leases != 0 {
			t.Fatalf("left behind: %+v", s)
		}
	})
}

// mirror is what a router knows from the feed alone.
type mirror struct {
	mu       sync.Mutex
	owner    map[block.Hash]kvc.SessionKey
	sessions map[kvc.SessionKey]kvc.SessionInfo
	turns    map[string]kvc.TurnInfo
	twice    []string // attempts with two turn frames
	trusted  bool
}

func newMirror() *mirror {
	return &mirror{
		turns: map[string]kvc.TurnInfo{}, owner: map[block.Hash]kvc.SessionKey{},
		sessions: map[kvc.SessionKey]kvc.SessionInfo{},
	}
}

func (m *mirror) locked(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

func (m *mirror) Hello(feed.Hello) {}
func (m *mirror) Reset(s kvc.Snapshot) {
	m.locked(func() {
		clear(m.owner)
		clear(m.sessions)
		for _, o := range s.Blocks {
			for _, h := range o.Blocks {
				m.owner[h] = o.Owner
			}
		}
		for _, i := range s.Sessions {
			m.sessions[i.Key] = i
		}
	})
}
func (m *mirror) Session(i kvc.SessionInfo)      { m.locked(func() { m.sessions[i.Key] = i }) }
func (m *mirror) SessionGone(key kvc.SessionKey) { m.locked(func() { delete(m.sessions, key) }) }
func (m *mirror) Add(o kvc.SessionKey, bs []block.Hash) {
	m.locked(func() {
		for _, h := range bs {
			m.owner[h] = o
		}
	})
}
func (m *mirror) Own(o kvc.SessionKey, bs []block.Hash) { m.Add(o, bs) }
func (m *mirror) Evict(bs []block.Hash) {
	m.locked(func() {
		for _, h := range bs {
			delete(m.owner, h)
		}
	})
}
func (m *mirror) Clear()                             { m.Reset(kvc.Snapshot{}) }
func (m *mirror) State(string, time.Time, time.Time) {}
func (m *mirror) Load(feed.Load)                     {}
func (m *mirror) Trusted(ok bool, _ feed.Cause)      { m.locked(func() { m.trusted = ok }) }
func (m *mirror) Turn(i kvc.TurnInfo) {
	m.locked(func() {
		if _, ok := m.turns[i.Attempt]; ok {
			m.twice = append(m.twice, i.Attempt)
		}
		m.turns[i.Attempt] = i
	})
}

// A follower that saw every change under load holds exactly what the ledger
// does, and heard of the end of every turn once.
func TestFollowerMirrorsTheLedger(t *testing.T) {
	e := newEngine(t)
	e.info["max_total_num_tokens"] = 4000 // so that much is evicted
	e.turn = func(w http.ResponseWriter, r *http.Request, body map[string]any) {
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
		answerUsage(900, 0)(w, r, body)
	}
	r := startRig(t, e).ready()
	m := newMirror()
	f := feed.NewFollower(feed.FollowerConfig{URL: r.base, Worker: "uid-1"}, m)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	r.until("followed", func(admission.SidecarStatus) bool { m.mu.Lock(); defer m.mu.Unlock(); return m.trusted })
	var wg sync.WaitGroup
	for worker := range 6 {
		wg.Go(func() {
			for i := range 25 {
				key := kvc.SessionKey(fmt.Sprintf("%016x", worker*3+i%3+1))
				in := ask(key, i)
				if i%5 == 4 {
					in.Admit = admission.AdmitNone
				}
				turnCtx, stop := context.WithTimeout(t.Context(), time.Duration(1+i%7*5)*time.Millisecond)
				r.send(turnCtx, in, chatPath, fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"%s %0400d"}]}`, key, i%4))
				stop()
				if i%9 == 8 {
					_ = r.ctl.Forget(t.Context(), r.base, string(key))
				}
			}
		})
	}
	wg.Wait()
	s := r.quiet()
	r.until("followed to the end", func(s admission.SidecarStatus) bool { return f.Position().Seq == s.Seq })
	snap, _ := r.s.book.snapshot()
	want := newMirror()
	want.Reset(snap)
	if d := cmp.Diff(want.owner, m.owner); d != "" {
		t.Errorf("blocks and owners (-ledger +follower):\n%s", d)
	}
	if len(want.sessions) != len(m.sessions) {
		t.Errorf("sessions: ledger %d, follower %d", len(want.sessions), len(m.sessions))
	}
	for key, w := range want.sessions {
		g := m.sessions[key]
		if g.Tail != w.Tail || g.Blocks != w.Blocks || g.ResidentTokens != w.ResidentTokens || g.Active != 0 {
			t.Errorf("session %s: ledger %+v, follower %+v", key, w, g)
		}
	}
	if len(m.twice) > 0 || float64(len(m.turns)) != r.metric("kvc_sidecar_turns_total") {
		t.Errorf("%d turn frames (twice: %v) of %v turns", len(m.turns), m.twice, r.metric("kvc_sidecar_turns_total"))
	}
	if s.Totals.EvictedTokens == 0 {
		t.Error("nothing was evicted; the test proves less than it says")
	}
	cancel()
	<-done
}
