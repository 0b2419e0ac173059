package feed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

func TestFollowerGetsSnapshotThenChanges(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 40)
	w.change(add("a", 1, 3), session("a", 3)) // 41, 42
	f, p := follow(t, w)
	agree(t, w, f, p)
	gone := kvc.Change{Kind: kvc.ChangeSessionGone, Session: kvc.SessionInfo{Key: "a"}}
	turn := kvc.TurnInfo{
		Attempt: "x", Session: "a", Mode: kvc.Delta, Outcome: kvc.OutcomeOK,
		Usage: kvc.Usage{PromptTokens: 5, CachedTokens: 3, CompletionTokens: 2},
	}
	w.change(
		add("b", 10, 2), session("b", 11), gone,
		kvc.Change{Kind: kvc.ChangeOwn, Owner: kvc.Shared, Blocks: []block.Hash{1, 10}},
		kvc.Change{Kind: kvc.ChangeEvict, Blocks: []block.Hash{11}},
		kvc.Change{Kind: kvc.ChangeTurn, Turn: turn},
	)
	w.PublishState("Draining", time.UnixMilli(99), time.Time{})
	agree(t, w, f, p)
	p.until(t, "a heartbeat", func() bool { return p.loads > 0 })
	p.mu.Lock()
	defer p.mu.Unlock()
	if diff := cmp.Diff([]kvc.TurnInfo{turn}, p.turns); diff != "" {
		t.Error(diff)
	}
	if p.state != "Draining" || !p.soft.Equal(time.UnixMilli(99)) {
		t.Errorf("state %q until %v", p.state, p.soft)
	}
	if p.hello.Seq != 42 || p.hello.CapacityTokens != 1000 || p.hello.DirectPath["chat"] != "Unified" {
		t.Errorf("hello %+v", p.hello)
	}
	if pos := f.Position(); pos != (Position{Epoch: "w1/1", Seq: 49, Trusted: true}) {
		t.Errorf("Position = %+v", pos)
	}
}

func TestClearReachesFollowers(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	w.change(add("a", 1, 3), session("a", 3))
	f, p := follow(t, w)
	agree(t, w, f, p)
	w.change(kvc.Change{Kind: kvc.ChangeClear}, add("b", 7, 1))
	agree(t, w, f, p)
}

// filter passes the feed through edit, line by line; edit returns what is sent
// instead. It is called with every line of every connection.
func filter(edit func(connection int, line []byte) []byte) func(http.Handler) http.Handler {
	var n atomic.Int32
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(&editor{ResponseWriter: w, edit: edit, n: int(n.Add(1))}, r)
		})
	}
}

type editor struct {
	http.ResponseWriter
	edit func(int, []byte) []byte
	n    int
}

func (e *editor) Unwrap() http.ResponseWriter { return e.ResponseWriter }
func (e *editor) Write(line []byte) (int, error) {
	out := e.edit(e.n, line)
	if out == nil {
		return 0, io.ErrClosedPipe
	}
	if _, err := e.ResponseWriter.Write(out); err != nil {
		return 0, err
	}
	return len(line), nil
}

func is(k Kind, line []byte) bool {
	return bytes.Contains(line, []byte(`"t":"`+string(k)+`"`))
}

// Damage on the way costs trust until the next snapshot, and nothing else.
func TestDamagedStream(t *testing.T) {
	cases := map[string]struct {
		edit  func(n int, line []byte) []byte
		trust []string
	}{
		"a lost change is a gap": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return []byte{}
			}
			return line
		}, []string{"+", "gap", "+"}},
		"a change twice is a rollback": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return append(bytes.Clone(line), line...)
			}
			return line
		}, []string{"+", "rollback", "+"}},
		"a line that is no JSON": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return []byte("{\"t\":\"add\",\n")
			}
			return line
		}, []string{"+", "malformed", "+"}},
		"a line beyond 1 MiB": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return bytes.Repeat([]byte("x"), 2*MaxLine)
			}
			return line
		}, []string{"+", "malformed", "+"}},
		"a block list that is no base64": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return bytes.Replace(line, []byte(`"b":"`), []byte(`"b":"!`), 1)
			}
			return line
		}, []string{"+", "malformed", "+"}},
		"a line cut in two, then the connection: resumed, trust kept": {func(n int, line []byte) []byte {
			if n == 1 && is(KindAdd, line) {
				return nil
			}
			return line
		}, []string{"+"}},
		"a snapshot without its first part": {func(n int, line []byte) []byte {
			if n == 1 && is(KindSnap, line) {
				return bytes.Replace(line, []byte(`"part":0`), []byte(`"part":1`), 1)
			}
			return line
		}, []string{"+"}},
		"changes without a snapshot": {func(n int, line []byte) []byte {
			if n == 1 && is(KindSnap, line) {
				return []byte{}
			}
			return line
		}, []string{"+"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, hello("w1/1"), 3)
			w.change(session("a", 3))
			w.wrapWith(filter(tc.edit))
			f, p := follow(t, w)
			p.until(t, "the first snapshot", func() bool { return f.Position().Trusted })
			for i := range 5 {
				w.change(add("a", 10*i+100, 3))
			}
			agree(t, w, f, p)
			if diff := cmp.Diff(tc.trust, p.trusts()); diff != "" {
				t.Errorf("trust (-want +got):\n%s", diff)
			}
		})
	}
}

// A half line must not be taken for a whole one even if it parses.
func TestTruncatedLineIsNoFrame(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	var cut atomic.Bool
	w.wrapWith(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if cut.Swap(true) {
				next.ServeHTTP(rw, r)
				return
			}
			h := hello("w1/1")
			h.Head = Head{T: KindHello, Seq: 7}
			line, _ := Encode(&h)
			_, _ = rw.Write(line)
			_, _ = io.WriteString(rw, `{"t":"snap","seq":7,"part":0,"last":true}`) // no line break
		})
	})
	f, p := follow(t, w)
	agree(t, w, f, p)
	if p.resets != 1 {
		t.Errorf("%d snapshots applied, want only the server's own", p.resets)
	}
}

// A lost connection costs nothing: the follower resumes where it was.
func TestResume(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 10)
	w.change(add("a", 1, 3))
	f, p := follow(t, w)
	agree(t, w, f, p)
	for i := range 3 {
		w.http.CloseClientConnections()
		w.change(add("b", 100+10*i, 2), session("b", 101))
		agree(t, w, f, p)
	}
	if p.resets != 1 {
		t.Errorf("%d snapshots, want 1", p.resets)
	}
	if diff := cmp.Diff([]string{"+"}, p.trusts()); diff != "" {
		t.Error(diff)
	}
	for _, q := range w.seen()[1:] {
		if !strings.HasPrefix(q, "epoch=w1%2F1&since=") {
			t.Errorf("reconnected with %q", q)
		}
	}
}

// Another engine, and a sidecar that lost the end of its journal.
func TestRestartedWorker(t *testing.T) {
	for name, tc := range map[string]struct {
		epoch string
		seq   uint64
		cause string
	}{
		"a new epoch begins anew, whatever its numbers": {"w1/2", 11, "epoch"},
		"the same epoch with lower numbers":             {"w1/1", 4, "rollback"},
		"the same epoch, the log is gone":               {"w1/1", 50, "gap"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, hello("w1/1"), 10)
			w.change(add("a", 1, 3), session("a", 3))
			f, p := follow(t, w)
			agree(t, w, f, p)
			w.mu.Lock()
			clear(w.blocks)
			clear(w.sessions)
			w.order = nil
			w.Restart(hello(tc.epoch), tc.seq)
			w.mu.Unlock()
			w.change(add("b", 50, 2))
			p.until(t, "trust again", func() bool { return len(p.trust) == 3 })
			agree(t, w, f, p)
			if diff := cmp.Diff([]string{"+", tc.cause, "+"}, p.trusts()); diff != "" {
				t.Error(diff)
			}
			if pos := f.Position(); pos.Epoch != tc.epoch || pos.Seq != tc.seq+1 {
				t.Errorf("Position = %+v", pos)
			}
		})
	}
}

// The sidecar restarts with its journal: its log is empty but its numbers go
// on, so a follower that had everything resumes.
func TestRestartedSidecarWithJournal(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 10)
	w.change(add("a", 1, 3))
	f, p := follow(t, w)
	agree(t, w, f, p)
	w.Restart(hello("w1/1"), w.Seq())
	w.change(add("a", 4, 3))
	agree(t, w, f, p)
	if p.resets != 1 || len(p.trusts()) != 1 {
		t.Errorf("%d snapshots, trust %v", p.resets, p.trusts())
	}
}

func TestSilence(t *testing.T) {
	t.Run("a connection without frames is given up, and nothing is resumed", func(t *testing.T) {
		w := newWorker(t, hello("w1/1"), 10)
		left := make(chan struct{})
		var once sync.Once
		w.wrapWith(func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
				first := false
				once.Do(func() { first = true })
				if !first {
					next.ServeHTTP(rw, r)
					return
				}
				h := hello("w1/1")
				h.Head = Head{T: KindHello, Seq: 10}
				out := &writer{w: rw, ctl: http.NewResponseController(rw)}
				_ = out.frames(&h, &Snap{Head: Head{T: KindSnap, Seq: 10}, Last: true})
				<-r.Context().Done()
				close(left)
			})
		})
		f, p := follow(t, w, func(c *FollowerConfig) { c.Silence = 1200 * time.Millisecond })
		select {
		case <-left:
		case <-time.After(patience):
			t.Fatal("the follower still holds a silent connection")
		}
		p.until(t, "trust again", func() bool { return len(p.trust) == 3 })
		agree(t, w, f, p)
		if diff := cmp.Diff([]string{"+", "silence", "+"}, p.trusts()); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]string{"", ""}, w.seen()[:2]); diff != "" {
			t.Errorf("queries: %s", diff)
		}
	})
	t.Run("a worker that cannot be reached is distrusted in time", func(t *testing.T) {
		w := newWorker(t, hello("w1/1"), 10)
		f, p := follow(t, w, func(c *FollowerConfig) {
			c.Silence, c.MinBackoff, c.MaxBackoff = 1200*time.Millisecond, time.Hour, time.Hour
		})
		agree(t, w, f, p)
		w.wrapWith(func(http.Handler) http.Handler { return http.NotFoundHandler() })
		cut := time.Now()
		w.http.CloseClientConnections()
		p.until(t, "distrust", func() bool { return len(p.trust) == 2 })
		if took := time.Since(cut); took > 5*time.Second {
			t.Errorf("noticed after %v, want about 1.2 s", took)
		}
		if pos := f.Position(); pos.Trusted || pos.Cause != CauseSilence {
			t.Errorf("Position = %+v", pos)
		}
	})
}

// A configuration fault is not retried hot, and heals when it is mended.
func TestUnauthorizedIsAConfigurationFault(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	var token atomic.Value
	token.Store("wrong")
	w.wrapWith(func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer right" {
				http.Error(rw, "no", http.StatusUnauthorized)
				return
			}
			next.ServeHTTP(rw, r)
		})
	})
	f, p := follow(t, w, func(c *FollowerConfig) {
		c.Token = func() string { return token.Load().(string) }
		c.FaultBackoff = 300 * time.Millisecond
	})
	began := time.Now()
	p.until(t, "the fault", func() bool { return f.Position().Cause == CauseUnauthorized })
	p.until(t, "a third attempt", func() bool { return len(w.seen()) >= 3 })
	if took := time.Since(began); took < 500*time.Millisecond {
		t.Errorf("three attempts within %v: hot", took)
	}
	if len(p.trusts()) != 0 {
		t.Errorf("trust %v: it was never given, so it is not taken", p.trusts())
	}
	token.Store("right")
	agree(t, w, f, p)
}

func TestBackoff(t *testing.T) {
	f := NewFollower(FollowerConfig{Worker: "w"}, newPicture())
	for _, c := range []Cause{CauseUnauthorized, CauseWire, CauseWorker} {
		if d := f.backoff(faultf(c, "x")); d != 30*time.Second {
			t.Errorf("%s: retried after %v, want 30s", c, d)
		}
	}
	var last time.Duration
	for i := range 10 {
		d := f.backoff(io.EOF)
		ceiling := min(100*time.Millisecond<<i, 5*time.Second)
		if d < ceiling/2 || d > ceiling {
			t.Errorf("attempt %d waits %v, want %v to %v", i, d, ceiling/2, ceiling)
		}
		last = d
	}
	if last < 2500*time.Millisecond {
		t.Errorf("the tenth attempt waits %v only", last)
	}
}

// Peers that no snapshot could make good.
func TestForeignPeers(t *testing.T) {
	t.Run("another block format: load, state and turns still count", func(t *testing.T) {
		h := hello("w1/1")
		h.Format = "kvc-b128-v9"
		w := newWorker(t, h, 0)
		w.change(add("a", 1, 3), session("a", 3))
		f, p := follow(t, w)
		p.until(t, "a heartbeat", func() bool { return p.loads > 0 })
		w.change(add("a", 4, 3), session("a", 6), kvc.Change{Kind: kvc.ChangeTurn, Turn: kvc.TurnInfo{Mode: kvc.Seed}},
			kvc.Change{Kind: kvc.ChangeOwn, Owner: kvc.Shared, Blocks: []block.Hash{1}},
			kvc.Change{Kind: kvc.ChangeEvict, Blocks: []block.Hash{1}}, kvc.Change{Kind: kvc.ChangeClear})
		w.PublishState("Draining", time.Time{}, time.Time{})
		p.until(t, "turn and state", func() bool { return len(p.turns) == 1 && p.state == "Draining" })
		if len(p.blocks)+len(p.sessions)+p.resets+len(p.trust) != 0 {
			t.Errorf("residency of a foreign format was applied: %+v", p)
		}
		if pos := f.Position(); pos.Trusted || pos.Cause != CauseFormat {
			t.Errorf("Position = %+v", pos)
		}
	})
	for name, tc := range map[string]struct {
		edit  func(h *Hello)
		cause Cause
	}{
		"a later wire version": {func(h *Hello) { h.Wire = Wire + 1 }, CauseWire},
		"another worker":       {func(h *Hello) { h.Worker = "w2" }, CauseWorker},
	} {
		t.Run(name, func(t *testing.T) {
			h := hello("w1/1")
			tc.edit(&h)
			w := newWorker(t, h, 0)
			f, p := follow(t, w)
			p.until(t, "the fault", func() bool { return f.Position().Cause == tc.cause })
			if p.hellos != 0 {
				t.Error("the sink met it")
			}
		})
	}
}

// Followers that come, go and fall behind while the worker changes: all agree
// in the end.
func TestManyFollowersUnderChange(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	type pair struct {
		f *Follower
		p *picture
	}
	var pairs []pair
	for i := range 8 {
		f, p := follow(t, w)
		pairs = append(pairs, pair{f, p})
		for j := range 50 {
			w.change(add(kvc.SessionKey(fmt.Sprint("s", i)), 1000*i+10*j+1, 5), session("s", block.Hash(j+1)))
			if j%20 == 19 {
				w.change(kvc.Change{Kind: kvc.ChangeEvict, Blocks: []block.Hash{block.Hash(1000*i + 10*j + 1)}})
			}
		}
		w.http.CloseClientConnections()
	}
	for _, x := range pairs {
		agree(t, w, x.f, x.p)
		for _, c := range x.p.trusts() {
			if c != "+" {
				t.Errorf("trust was lost to %q", c)
			}
		}
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	f := NewFollower(FollowerConfig{URL: "http://127.0.0.1:1"}, newPicture())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	cancel()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Run goes on")
	}
}
