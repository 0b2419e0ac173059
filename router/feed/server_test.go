package feed

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// reader is a raw connection to the feed.
type reader struct {
	t    *testing.T
	body *bufio.Reader
	resp *http.Response
}

func open(t *testing.T, w *worker, query string) *reader {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.http.URL+"/kvc/v1/feed"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cancel(); _ = resp.Body.Close() })
	return &reader{t, bufio.NewReaderSize(resp.Body, 2*MaxLine), resp}
}

// next returns the next frame that is no heartbeat, and its line.
func (r *reader) next() (Frame, string) {
	r.t.Helper()
	for {
		line, err := r.body.ReadString('\n')
		if err != nil {
			r.t.Fatal(err)
		}
		if len(line) > MaxLine {
			r.t.Fatalf("a line of %d bytes", len(line))
		}
		f, err := Decode([]byte(line))
		if err != nil {
			r.t.Fatalf("%v in %.200s", err, line)
		}
		if _, beat := f.(*Load); !beat {
			return f, strings.TrimSuffix(line, "\n")
		}
	}
}

// The lines of wire.md §4, member by member.
func TestGoldenLines(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 41)
	w.mu.Lock()
	w.load = Load{
		Used: 9, Locked: 8, Protected: 7, Reserved: 6, Running: 5,
		PrefillTokensPerS: math.NaN(), TokensPerBlock: 24.5,
	}
	w.mu.Unlock()
	w.change(add("a", 1, 2), session("a", 0xabc))
	r := open(t, w, "")
	if got := r.resp.Header.Get("Content-Type") + " " + r.resp.Header.Get("X-Kvc-Wire"); got != "application/x-ndjson 1" {
		t.Errorf("headers %q", got)
	}
	w.change(
		session("b", 0),
		kvc.Change{Kind: kvc.ChangeOwn, Owner: kvc.Shared, Blocks: []block.Hash{1}},
		kvc.Change{Kind: kvc.ChangeEvict, Blocks: []block.Hash{2}},
		kvc.Change{Kind: kvc.ChangeSessionGone, Session: kvc.SessionInfo{Key: "b"}},
		kvc.Change{Kind: kvc.ChangeTurn, Turn: kvc.TurnInfo{
			Attempt: "x", Session: "a", Mode: kvc.Direct, Outcome: kvc.OutcomeCancelled,
			Usage: kvc.Usage{PromptTokens: 3, CachedTokens: 2, CompletionTokens: 1},
		}},
		kvc.Change{Kind: kvc.ChangeClear},
	)
	w.PublishState("Draining", time.UnixMilli(5), time.UnixMilli(6))
	want := []string{
		`{"t":"hello","seq":43,"wire":1,"format":"kvc-b96-v1","worker":"w1","epoch":"w1/1","role":"decode","dp_rank":0,` +
			`"model":"m","capacity_tokens":1000,"page_size":1,"direct_path":{"chat":"Unified"},"resume":false}`,
		`{"t":"snap","seq":43,"part":0,"last":false,"sessions":[{"key":"a","lineage":"a","tail":"0000000000000abc",` +
			`"blocks":1,"resident_tokens":30,"last_use_ms":1234567,"active":0}],"blocks":[]}`,
		`{"t":"snap","seq":43,"part":1,"last":true,"sessions":[],` +
			`"blocks":[{"owner":"a","b":"AQAAAAAAAAA="},{"owner":"a","b":"AgAAAAAAAAA="}]}`,
		`{"t":"session","seq":44,"key":"b","lineage":"b","blocks":1,"resident_tokens":30,"last_use_ms":1234567,"active":0}`,
		`{"t":"own","seq":45,"owner":"0000000000000000","b":"AQAAAAAAAAA="}`,
		`{"t":"evict","seq":46,"b":"AgAAAAAAAAA="}`,
		`{"t":"session","seq":47,"key":"b","active":0,"gone":true}`,
		`{"t":"turn","seq":48,"attempt":"x","session":"a","mode":"direct","prompt_tokens":3,"cached_tokens":2,` +
			`"completion_tokens":1,"outcome":"cancelled"}`,
		`{"t":"clear","seq":49}`,
		`{"t":"state","seq":50,"state":"Draining","soft_deadline_ms":5,"hard_deadline_ms":6}`,
	}
	for _, line := range want {
		if _, got := r.next(); got != line {
			t.Errorf("got  %s\nwant %s", got, line)
		}
	}
	w.Beat()
	for {
		line, err := r.body.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		if f, _ := Decode([]byte(line)); f.head().Seq == 50 {
			want := `{"t":"load","seq":50,"used":9,"locked":8,"protected":7,"reserved":6,"running":5,"waiting":0,` +
				`"transferring":0,"waiting_uncached_tokens":0,"prefill_tokens_per_s":0,"decode_tokens_per_s":0,` +
				`"tokens_per_block":24.5}` + "\n"
			if line != want {
				t.Errorf("got  %swant %s", line, want)
			}
			return
		}
	}
}

// A follower that comes later learns the state from the hello: state frames are
// sent on changes only.
func TestHelloCarriesTheState(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	if seq := w.PublishState("Draining", time.UnixMilli(77), time.Time{}); seq != 1 {
		t.Errorf("PublishState = %d, want its seq, 1", seq)
	}
	f, p := follow(t, w)
	agree(t, w, f, p)
	if p.state != "Draining" || p.soft.UnixMilli() != 77 {
		t.Errorf("state %q until %v", p.state, p.soft)
	}
	w.Restart(hello("w1/2"), 0)
	r := open(t, w, "")
	if h, _ := r.next(); h.(*Hello).State != "Draining" {
		t.Errorf("after a restart of the engine: %+v", h)
	}
}

func TestResumeOrSnapshot(t *testing.T) {
	for name, tc := range map[string]struct {
		query string
		want  []uint64 // seqs of what follows the hello
	}{
		"everything since 41":              {"?epoch=w1/1&since=41", []uint64{42, 43}},
		"nothing was missed":               {"?epoch=w1/1&since=43", nil},
		"before the log: a snapshot":       {"?epoch=w1/1&since=39", []uint64{43}},
		"the future: a snapshot":           {"?epoch=w1/1&since=44", []uint64{43}},
		"another epoch: a snapshot":        {"?epoch=w1/0&since=42", []uint64{43}},
		"no epoch given: a snapshot":       {"?since=42", []uint64{43}},
		"the first seq of the log: resume": {"?epoch=w1/1&since=40", []uint64{41, 42, 43}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, hello("w1/1"), 40)
			w.Beat()
			w.change(add("a", 1, 1))
			w.Beat()
			w.change(add("a", 2, 1), session("a", 2))
			r := open(t, w, tc.query)
			h, _ := r.next()
			resumed := len(tc.want) != 1
			if got := h.(*Hello); got.Resume != resumed || got.Seq != 43 {
				t.Fatalf("hello %+v, want resume %v at 43", got, resumed)
			}
			for _, seq := range tc.want {
				f, line := r.next()
				s, snap := f.(*Snap)
				if f.head().Seq != seq || snap == resumed {
					t.Errorf("got %s, want seq %d, resumed %v", line, seq, resumed)
				}
				for snap && !s.Last {
					f, _ = r.next()
					s = f.(*Snap)
				}
			}
			w.change(add("a", 3, 1))
			if f, line := r.next(); f.head().Seq != 44 || f.head().T != KindAdd {
				t.Errorf("then got %s, want add 44", line)
			}
		})
	}
	t.Run("a since that is no number is refused", func(t *testing.T) {
		w := newWorker(t, hello("w1/1"), 0)
		r := open(t, w, "?epoch=w1/1&since=x")
		if r.resp.StatusCode != http.StatusBadRequest {
			t.Errorf("status %d", r.resp.StatusCode)
		}
	})
}

// No frame is longer than 1 MiB, however much there is.
func TestLargeStatesAreSplit(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	w.mu.Lock()
	for i := range 5000 {
		s := session(kvc.SessionKey(fmt.Sprintf("%016x", i)), block.Hash(i+1)).Session
		w.sessions[s.Key] = s
	}
	w.mu.Unlock()
	w.mu.Lock()
	for i := range 12_000 { // runs of one block
		h := block.Hash(1_000_000 + i)
		w.blocks[h] = "0123456789abcdef"
		w.order = append(w.order, h)
	}
	w.mu.Unlock()
	f, p := follow(t, w)
	agree(t, w, f, p)
	if seq := w.change(add("b", 1, 70_000)); seq != 3 {
		t.Errorf("70,000 blocks end at seq %d, want 3 frames of at most 32,768", seq)
	}
	agree(t, w, f, p)

	long := kvc.Snapshot{Blocks: []kvc.OwnedBlocks{{Owner: "x", Blocks: add("x", 1, 300_000).Blocks}}}
	n := 0
	for _, part := range snapshotOf(long, 9) {
		line, err := Encode(part)
		if err != nil {
			t.Fatal(err)
		}
		n += strings.Count(string(line), `"owner"`)
		if part.Last != (part.Part == 9) {
			t.Errorf("part %d last %v", part.Part, part.Last)
		}
	}
	if n != 10 {
		t.Errorf("one run of 300,000 blocks became %d", n)
	}
	if parts := snapshotOf(kvc.Snapshot{}, 9); len(parts) != 1 || !parts[0].Last || parts[0].Seq != 9 {
		t.Errorf("an empty snapshot is one last part, got %+v", parts)
	}
}

// A follower that does not read is disconnected when it is 8 MiB behind; the
// worker and the others go on.
func TestSlowFollowerIsDisconnected(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	conn, err := net.Dial("tcp", w.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.(*net.TCPConn).SetReadBuffer(32 << 10)
	if _, err := io.WriteString(conn, "GET /kvc/v1/feed HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	followers := func(want int) {
		t.Helper()
		for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
			w.Server.mu.Lock()
			n := len(w.followers)
			w.Server.mu.Unlock()
			if n == want {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d followers, want %d", n, want)
			}
		}
	}
	followers(1)
	f, p := follow(t, w)
	agree(t, w, f, p)
	published, big := 0, add("a", 1, maxBlocks).Blocks
	for i := range 90 { // 30 MiB
		published += 11 * maxBlocks
		w.Publish(kvc.Change{Kind: kvc.ChangeEvict, Blocks: big})
		if i%4 == 3 {
			p.until(t, "the good follower", func() bool { return f.Position().Seq == w.Seq() })
		}
	}
	followers(1)
	if len(p.trusts()) != 1 || p.resets != 1 {
		t.Errorf("the good follower suffered: trust %v, %d snapshots", p.trusts(), p.resets)
	}
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	n, err := io.Copy(io.Discard, conn)
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		t.Fatalf("still connected after %d bytes", n)
	}
	if int(n) > published/2 {
		t.Errorf("it was sent %d of %d bytes", n, published)
	}
	w.Server.mu.Lock()
	defer w.Server.mu.Unlock()
	if w.size > maxBehind {
		t.Errorf("%d bytes are kept, want at most %d", w.size, maxBehind)
	}
}

// Run's end ends the streams, so that a server can shut down.
func TestRunEndsTheStreams(t *testing.T) {
	s := NewServer(ServerConfig{
		Hello: hello("w1/1"), Load: func() Load { return Load{} },
		Snapshot: func() (kvc.Snapshot, uint64) { return kvc.Snapshot{}, 0 },
	})
	h := httptest.NewServer(s)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	resp, err := http.Get(h.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewReader(resp.Body)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatal(err)
		}
		if is(KindLoad, line) {
			break // Run is at work
		}
	}
	cancel()
	if _, err := io.Copy(io.Discard, lines); err != nil {
		t.Errorf("the stream ended with %v, want a clean end", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	h.Close() // waits for the handler
}

// A frame that no line can hold leaves a gap: followers take a snapshot.
func TestUnspeakableChange(t *testing.T) {
	w := newWorker(t, hello("w1/1"), 0)
	f, p := follow(t, w)
	agree(t, w, f, p)
	w.Publish(kvc.Change{Kind: kvc.ChangeTurn, Turn: kvc.TurnInfo{Mode: kvc.Seed, Attempt: strings.Repeat("x", MaxLine)}})
	w.change(add("a", 1, 1))
	agree(t, w, f, p)
	p.until(t, "the second snapshot", func() bool { return p.resets == 2 })
}

func TestDecodeRefuses(t *testing.T) {
	for name, line := range map[string]string{
		"nothing":         ``,
		"no object":       `[]`,
		"no kind":         `{"seq":1}`,
		"no seq":          `{"t":"clear"}`,
		"seq null":        `{"t":"clear","seq":null}`,
		"negative seq":    `{"t":"clear","seq":-1}`,
		"blocks as count": `{"t":"snap","seq":1,"blocks":3}`,
		"trailing text":   `{"t":"clear","seq":1} x`,
		"too long":        `{"t":"clear","seq":1,"x":"` + strings.Repeat("x", MaxLine) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			if f, err := Decode([]byte(line)); err == nil {
				t.Errorf("decoded as %+v", f)
			}
		})
	}
	f, err := Decode([]byte(`{"t":"news","seq":3,"session":{"a":1}}`))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&Head{T: "news", Seq: 3}, f); diff != "" {
		t.Errorf("a kind of a later version: %s", diff)
	}
}

// Every frame survives its own spelling, whatever the line was; and a
// connection never applies what its rules forbid, whatever the lines are.
func FuzzFrame(f *testing.F) {
	for _, line := range []string{
		`{"t":"hello","seq":43,"wire":1,"format":"kvc-b96-v1","worker":"w1","epoch":"w1/1","resume":true,"later":[1]}`,
		`{"t":"snap","seq":1,"part":0,"last":true,"sessions":[{"key":"a","tail":"0000000000000abc"}],"blocks":[{"owner":"a","b":"AQAAAAAAAAA="}]}`,
		`{"t":"session","seq":1,"key":"a","blocks":3,"active":1}`,
		`{"t":"add","seq":2,"owner":"a","b":"AQAAAAAAAAA="}`,
		`{"t":"evict","seq":2,"b":""}`,
		`{"t":"turn","seq":2,"attempt":"x","session":"a","mode":"seed","outcome":"ok"}`,
		`{"t":"state","seq":2,"state":"Draining"}`,
		`{"t":"load","seq":1,"used":3,"prefill_tokens_per_s":1e3}`,
		`{"t":"clear","seq":2}`,
		`{"t":"news","seq":2}`,
	} {
		f.Add([]byte(line))
	}
	start, _ := json.Marshal(hello("w1/1"))
	start = []byte(strings.Replace(string(start), `"t":"",`, `"t":"hello",`, 1))
	f.Fuzz(func(t *testing.T, line []byte) {
		fr, err := Decode(line)
		if err == nil {
			again, err := Encode(fr)
			if err == nil {
				back, err := Decode(again)
				if err != nil {
					t.Fatalf("%s was spelt %s: %v", line, again, err)
				}
				if diff := cmp.Diff(fr, back); diff != "" {
					t.Fatalf("%s changed:\n%s", line, diff)
				}
			}
		}
		c := &conn{f: NewFollower(FollowerConfig{Worker: "w1"}, newPicture())}
		if err := c.frame(start); err != nil {
			t.Fatal(err)
		}
		if err := c.frame([]byte(`{"t":"snap","seq":1,"last":true}`)); err != nil {
			t.Fatal(err)
		}
		before := c.last
		if err := c.frame(line); err == nil && fr.head().T != KindSnap && c.last > before+1 {
			t.Fatalf("%s moved seq from %d to %d", line, before, c.last)
		}
	})
}

// A follower of the old series must not be given changes of the new one, not
// even if it was about to read when the engine restarted.
func TestRestartCutsTheOldSeries(t *testing.T) {
	s := NewServer(ServerConfig{Hello: hello("w1/1"), Seq: 10})
	s.Publish(add("a", 1, 1))
	s.mu.Lock()
	f := &follower{}
	joined := s.join(f, 11)
	s.mu.Unlock()
	if !joined {
		t.Fatal("a follower of everything was refused")
	}
	f.stop = func() {}
	s.Restart(hello("w1/2"), 11)
	s.Publish(add("b", 2, 1))
	if lines, _, err := s.take(f); err == nil {
		t.Errorf("it was given %q", lines)
	}
}
