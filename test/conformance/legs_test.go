package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sidecar"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

// outcomes is how many turns ended with an outcome.
func outcomes(p *kit.Pool, outcome string) float64 {
	return p.Metric("kvc_router_turns_total", "outcome", outcome)
}

// shortCap shortens the wait of a deferred abort.
func shortCap(d time.Duration) func(*sidecar.Config) {
	return func(c *sidecar.Config) { c.AbortCap = d }
}

func TestR47_PrefillFailsAndDecodeWouldWait(t *testing.T) {
	deaths := map[string]struct {
		die    kit.Script
		status int
	}{
		"400":            {func(ex *kit.Exchange) { ex.Wait(20 * time.Millisecond); ex.Refuse(400) }, 400},
		"413":            {func(ex *kit.Exchange) { ex.Wait(20 * time.Millisecond); ex.Refuse(413) }, 413},
		"500":            {func(ex *kit.Exchange) { ex.Wait(20 * time.Millisecond); ex.Refuse(500) }, 500},
		"reset":          {func(ex *kit.Exchange) { ex.Wait(20 * time.Millisecond); ex.RST() }, 502},
		"an error event": {pieces(kit.Event(`{"error":{"message":"x","type":"E","code":500}}`), kit.Done), 502},
		"R55: an abort with 200": {func(ex *kit.Exchange) {
			ex.JSON(200, `{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x","status_code":500}}}`)
		}, 502},
	}
	for name, tc := range deaths {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", stream ", stream), func(t *testing.T) {
				p := kit.New(t, kit.Options{Prefill: 1, Sidecar: shortCap(100 * time.Millisecond)})
				p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.Hang() })
				p.P[0].Engine.Always(tc.die)
				start := time.Now()
				a := p.Do(kit.Request{Body: kit.Chat("ann", 0, stream), Session: "s"})
				if a.Status != tc.status {
					t.Errorf("status %d: %.200s, want %d", a.Status, a.Body, tc.status)
				}
				if tc.status < 500 && a.Body != kit.EngineError(tc.status) {
					t.Errorf("P's own answer became %s", a.Body)
				}
				if took := time.Since(start); took > soon {
					t.Errorf("the client waited %v", took)
				}
				p.D[0].Engine.AwaitIdle() // the slots are free
				p.Quiet()
			})
		}
	}
}

// R54: once D streams, P's failure is an in-band error, and the turn is not
// taken for resident.
func TestR54_PrefillFailsAfterDecodeStreams(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1})
	d, pre := p.D[0].Engine, p.P[0].Engine
	three := kit.Token("a") + kit.Token("b") + kit.Token("c")
	read := make(chan struct{})
	d.Next(func(ex *kit.Exchange) { ex.Stream(); ex.Send(three); ex.Hang() })
	pre.Next(func(ex *kit.Exchange) { ex.Until(read); ex.Refuse(500) })
	c := kit.Dial(t, p.Addr)
	c.Post("/v1/chat/completions", kit.Chat("ann", 0, true), "X-Session-Id: s")
	resp := c.Response()
	got := readUntil(t, resp.Body, three)
	close(read)
	checkInBandError(t, got, readAll(t, resp.Body))
	p.Quiet()
	if n := outcomes(p, "prefill_error"); n != 1 {
		t.Errorf("%v turns with outcome prefill_error", n)
	}
	if s := p.D[0].Status(p); s.Sessions != 0 {
		t.Errorf("%d sessions are resident", s.Sessions)
	}
}

func TestR48_DecodeFailsAndPrefillWouldWait(t *testing.T) {
	cases := map[string]func(p *kit.Pool){
		"reset":           func(p *kit.Pool) { p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.RST() }) },
		"closed in order": func(p *kit.Pool) { p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.FIN() }) },
		"the worker dies once it has admitted": func(p *kit.Pool) {
			p.D[0].Peer.Admit(func(w http.ResponseWriter, _ *http.Request, _ admission.Question) {
				admission.WriteJSON(w, http.StatusOK, "application/json", p.D[0].Peer.Verdict(kvc.Seed, kvc.ReasonNone))
				go p.D[0].Peer.Stop()
			})
		},
		"503": func(p *kit.Pool) { p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.Refuse(503) }) },
	}
	for name, fail := range cases {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Decode: 2, Prefill: 1, Peers: true})
			var freed sync.WaitGroup
			pre := p.P[0].Peer
			first := make(chan struct{})
			pre.Next(func(ex *kit.Exchange) { // the first leg hangs until it is cancelled
				close(first)
				ex.Hang()
				freed.Done()
			})
			freed.Add(1)
			// The first pair fails once P has its leg; the session's second pair is the other D's.
			fail(p)
			start := time.Now()
			a := p.OK(kit.Request{Body: kit.Chat("ann", 0, true), Session: "s"})
			if a.Header.Get("X-Kvc-Worker") != "decode-1" {
				t.Errorf("served by %s", a.Header.Get("X-Kvc-Worker"))
			}
			select {
			case <-first:
				freed.Wait() // P's slot is free
			default:
				freed.Done() // P had not been asked yet when D failed
			}
			if took := time.Since(start); took > soon {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// pair is where a leg's rendezvous points to.
func pair(s *kit.Seen) string {
	return fmt.Sprint(s.Member("bootstrap_host"), s.Member("bootstrap_port"), s.Member("bootstrap_room"))
}

func TestR52_FreshRoomPerAttempt(t *testing.T) {
	t.Run("after a pair that failed past its bootstrap", func(t *testing.T) {
		p := kit.New(t, kit.Options{Decode: 2, Prefill: 2})
		var once sync.Once
		for _, n := range p.D {
			n.Engine.Always(func(ex *kit.Exchange) {
				failed := false
				once.Do(func() { failed = true })
				if !failed {
					n.Engine.Serve(ex)
					return
				}
				p.Eventually("P has its leg too", func() bool { return len(p.P[0].Engine.Turns())+len(p.P[1].Engine.Turns()) == 1 })
				ex.Refuse(500)
			})
		}
		p.OK(kit.Request{Body: kit.Chat("ann", 0, true), Session: "s"})
		checkRooms(t, p, 2, 2)
	})
	t.Run("of many requests at once", func(t *testing.T) {
		p := kit.New(t, kit.Options{Decode: 2, Prefill: 2})
		var wg sync.WaitGroup
		const clients = 40
		for i := range clients {
			wg.Go(func() { p.OK(kit.Request{Body: kit.Chat(fmt.Sprint("client ", i), 0, true)}) })
		}
		wg.Wait()
		checkRooms(t, p, clients, clients)
	})
}

// checkRooms checks that each attempt had one room of its own, the same on both
// legs.
func checkRooms(t *testing.T, p *kit.Pool, attempts, both int) {
	t.Helper()
	p.Quiet()
	owner, legs := map[string]string{}, map[string]int{}
	for _, n := range p.Nodes() {
		for _, s := range n.Engine.Turns() {
			at, rid := pair(s), fmt.Sprint(s.Member("rid"))
			if other, ok := owner[at]; ok && other != rid {
				t.Errorf("attempts %s and %s met in one room", rid, other)
			}
			owner[at] = rid
			if legs[rid]++; legs[rid] > 2 {
				t.Errorf("attempt %s has %d legs", rid, legs[rid])
			}
			room, _ := s.Member("bootstrap_room").(json.Number)
			if n, err := room.Int64(); err != nil || n < 1 {
				t.Errorf("room %q is outside 1..2^63-1", room)
			}
		}
	}
	met := 0
	for _, n := range legs {
		if n == 2 {
			met++
		}
	}
	if len(owner) != attempts || len(legs) != attempts || met != both {
		t.Errorf("%d rooms of %d attempts, %d whose legs met; want %d and %d", len(owner), len(legs), met, attempts, both)
	}
}

// TestR50 is about the sidecar: D must not be aborted while KV is in hand-off.
func TestR50_AbortDuringHandOff(t *testing.T) {
	seed := kit.Request{Body: kit.Chat("ann", 0, true), Session: "s"}
	t.Run("before the hand-off P is cancelled at once and D ends by its own error", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1, Transfer: time.Minute})
		cancel, done := p.Start(seed)
		p.P[0].Engine.AwaitPhase("transfer")
		start := time.Now()
		cancel()
		<-done
		p.P[0].Engine.AwaitIdle()
		if took := time.Since(start); took > soon {
			t.Errorf("P was cancelled after %v", took)
		}
		p.D[0].Engine.AwaitIdle()
		if c := p.D[0].Engine.Crashed(); len(c) > 0 {
			t.Errorf("D was aborted in its transfer: %v", c)
		}
		p.Quiet()
	})
	t.Run("D's abort waits for the first item", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1})
		// P is past the point where a cancel stops it: the hand-off goes on.
		moved := make(chan struct{})
		d := p.D[0].Engine
		d.Next(func(ex *kit.Exchange) {
			select {
			case <-moved:
			case <-ex.Gone():
				t.Error("D was aborted in its transfer")
				return
			}
			ex.Stream()
			ex.Send(kit.Token("first"))
			ex.Hang() // now it may go
		})
		p.P[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
		cancel, done := p.Start(seed)
		d.AwaitTurns(1)
		p.P[0].Engine.AwaitTurns(1)
		cancel()
		<-done
		p.Eventually("the sidecar defers", func() bool { return p.D[0].Metric(t, "kvc_sidecar_aborts_deferred_total") == 1 })
		close(moved)
		d.AwaitIdle()
		if rids := d.AwaitAborts(1); rids[0] != fmt.Sprint(d.Last().Member("rid")) {
			t.Errorf("aborted %v", rids)
		}
		p.Quiet()
	})
	t.Run("the cap ends a hand-off that never does", func(t *testing.T) {
		const limit = 300 * time.Millisecond
		p := kit.New(t, kit.Options{Prefill: 1, Sidecar: shortCap(limit)})
		p.D[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
		p.P[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
		cancel, done := p.Start(seed)
		p.D[0].Engine.AwaitTurns(1)
		start := time.Now()
		cancel()
		<-done
		p.D[0].Engine.AwaitIdle()
		if took := time.Since(start); took < limit || took > limit+soon {
			t.Errorf("D was cancelled after %v, the cap is %v", took, limit)
		}
		p.Quiet()
	})
	t.Run("a direct turn is aborted at once", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1})
		p.OK(seed)
		p.Settled()
		p.D[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
		cancel, done := p.Start(kit.Request{Body: kit.Chat("ann", 1, true), Session: "s"})
		p.D[0].Engine.AwaitTurns(2)
		start := time.Now()
		cancel()
		<-done
		p.D[0].Engine.AwaitIdle()
		if took := time.Since(start); took > soon {
			t.Errorf("D was cancelled after %v", took)
		}
	})
	t.Run("deferred work is waited for at shutdown", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1})
		moved := make(chan struct{})
		p.D[0].Engine.Next(func(ex *kit.Exchange) {
			if !ex.Until(moved) {
				t.Error("shutdown aborted D in its transfer")
				return
			}
			ex.Stream()
			ex.Send(kit.Token("first"))
			ex.Hang()
		})
		p.P[0].Engine.Next(func(ex *kit.Exchange) { ex.Hang() })
		cancel, done := p.Start(seed)
		p.D[0].Engine.AwaitTurns(1)
		p.P[0].Engine.AwaitTurns(1)
		cancel()
		<-done
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			ctx, stop := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer stop()
			p.D[0].Sidecar.Drain(ctx)
		}()
		select {
		case <-drained:
			t.Error("the sidecar did not wait for the hand-off")
		case <-time.After(200 * time.Millisecond):
		}
		close(moved)
		<-drained
	})
}

func TestR51_DisconnectsOfEveryKind(t *testing.T) {
	hang := func(ex *kit.Exchange) { ex.Hang() }
	body := func(stream bool) kit.Request { return kit.Request{Body: kit.Chat("ann", 0, stream), Session: "s"} }
	check := func(t *testing.T, p *kit.Pool, start time.Time) {
		t.Helper()
		if took := time.Since(start); took > soon {
			t.Errorf("the worker saw the cancel after %v", took)
		}
		p.Eventually("the outcome is counted", func() bool { return outcomes(p, "client_cancelled") == 1 })
		if p.Metric("kvc_router_breaker_open") != 0 {
			t.Error("a breaker opened")
		}
		p.Quiet()
	}
	for name, tc := range map[string]struct {
		r      kit.Request
		script kit.Script
	}{
		"before headers":                     {body(true), hang},
		"between events":                     {body(true), func(ex *kit.Exchange) { ex.Stream(); ex.Send(kit.Token("a")); ex.Hang() }},
		"while the worker streams":           {body(true), endless},
		"while a whole answer is waited for": {body(false), hang},
		"inside a whole answer": {body(false), func(ex *kit.Exchange) {
			ex.Header(http.StatusOK, "Content-Type", "application/json")
			ex.Send(`{"choices":`)
			ex.Hang()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			p := unified(t, kit.Options{})
			p.D[0].Engine.Always(tc.script)
			c := kit.Dial(t, p.Addr)
			c.Post("/v1/chat/completions", tc.r.Body, "X-Session-Id: s")
			turn := p.D[0].Engine.AwaitTurns(1)[0]
			start := time.Now()
			_ = c.Close()
			p.D[0].Engine.AwaitIdle()
			check(t, p, start)
			if rids := p.D[0].Engine.AwaitAborts(1); rids[0] != fmt.Sprint(turn.Member("rid")) {
				t.Errorf("the engine was asked to abort %v", rids)
			}
		})
	}
	t.Run("reset by the client", func(t *testing.T) {
		p := unified(t, kit.Options{})
		p.D[0].Engine.Always(hang)
		c := kit.Dial(t, p.Addr)
		c.Post("/v1/chat/completions", body(true).Body)
		p.D[0].Engine.AwaitTurns(1)
		start := time.Now()
		c.Reset()
		p.D[0].Engine.AwaitIdle()
		check(t, p, start)
	})
	t.Run("while queued", func(t *testing.T) {
		p := unified(t, kit.Options{Capacity: 500})
		p.D[0].Engine.Always(hang)
		few := func(name string) kit.Request {
			return kit.Request{Body: kit.Chat(name, 0, true, `"max_tokens":10`), Session: name}
		}
		_, first := p.Start(few("ann")) // takes the room
		p.D[0].Engine.AwaitTurns(1)
		stop, second := p.Start(few("bob"))
		p.Eventually("the second turn queues", func() bool { return p.Metric("kvc_router_inflight") == 2 })
		start := time.Now()
		stop()
		<-second
		p.Eventually("the queue is empty", func() bool { return p.Metric("kvc_router_inflight") == 1 })
		if took := time.Since(start); took > soon {
			t.Errorf("the queue was left after %v", took)
		}
		if n := len(p.D[0].Engine.Turns()); n != 1 {
			t.Errorf("the engine got %d turns", n)
		}
		p.D[0].Engine.Stop() // ends the first
		<-first
	})
	t.Run("while an admission question is pending", func(t *testing.T) {
		p := kit.New(t, kit.Options{Path: kvc.Unified, Peers: true})
		asked, freed := make(chan struct{}), make(chan struct{})
		p.D[0].Peer.Admit(func(_ http.ResponseWriter, r *http.Request, _ admission.Question) {
			close(asked)
			<-r.Context().Done()
			close(freed)
		})
		stop, done := p.Start(body(true))
		<-asked
		start := time.Now()
		stop()
		<-done
		<-freed
		check(t, p, start)
		if n := len(p.D[0].Peer.Turns()); n != 0 {
			t.Errorf("%d turns reached the worker", n)
		}
	})
	t.Run("of both legs of a seed", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1, Sidecar: shortCap(50 * time.Millisecond)})
		p.D[0].Engine.Always(hang)
		p.P[0].Engine.Always(hang)
		stop, done := p.Start(body(true))
		p.D[0].Engine.AwaitTurns(1)
		p.P[0].Engine.AwaitTurns(1)
		start := time.Now()
		stop()
		<-done
		p.P[0].Engine.AwaitIdle()
		check(t, p, start)
		p.D[0].Engine.AwaitIdle()
	})
}

// endless streams until the peer leaves.
func endless(ex *kit.Exchange) {
	ex.Stream()
	for ex.Wait(time.Millisecond) {
		ex.Send(kit.Token("more"))
	}
}

// R49: prefills whose clients left do not hold the only slot.
func TestR49_CancelledPrefillsFreeTheirSlot(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1, Sidecar: shortCap(50 * time.Millisecond)})
	slot := make(chan struct{}, 1)
	slow := func(ex *kit.Exchange) { // one slot, a prefill of a minute
		select {
		case slot <- struct{}{}:
			defer func() { <-slot }()
			ex.Wait(time.Minute)
		case <-ex.Gone():
		}
	}
	pre := p.P[0].Engine
	pre.Next(slices.Repeat([]kit.Script{slow}, 10)...)
	var stops []func()
	var ends []<-chan kit.Answer
	for i := range 10 {
		stop, done := p.Start(kit.Request{Body: kit.Chat(fmt.Sprint("long ", i), 0, true), Session: fmt.Sprint(i)})
		stops, ends = append(stops, stop), append(ends, done)
	}
	pre.AwaitTurns(10)
	for i, stop := range stops {
		stop()
		<-ends[i]
	}
	start := time.Now()
	pre.AwaitIdle()
	pre.Always(func(ex *kit.Exchange) {
		select {
		case slot <- struct{}{}:
			defer func() { <-slot }()
			pre.Serve(ex)
		case <-ex.Gone():
		}
	})
	p.OK(kit.Request{Body: kit.Chat("short", 0, true), Session: "short"})
	if took := time.Since(start); took > soon {
		t.Errorf("the short request ended %v after the cancels", took)
	}
}
