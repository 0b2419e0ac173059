package conformance

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

// streamBody asks for a stream with usage, so that no byte of the engine's
// answer is for the sidecar to drop.
const streamBody = `{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"hi"}]}`

func TestR01_TextThatLooksLikeTheEnd(t *testing.T) {
	p := unified(t, kit.Options{})
	twenty := func(seventh string) (out []string) {
		for i := range 20 {
			out = append(out, kit.Token(fmt.Sprint("word ", i)))
		}
		out[7] = seventh
		return append(out, kit.Finish("stop"), kit.Done)
	}
	literal := kit.Token("the end is marked by data: [DONE]\n\n and no more")
	at := strings.Index(literal, "data: [DONE]")
	tool := kit.Event(`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"echo\":\"data: [DONE]\"}"}}]},"finish_reason":null}]}`)
	cases := map[string][]string{
		"in a content delta":                    twenty(literal),
		"in a tool call":                        twenty(tool),
		"as the whole content":                  twenty(kit.Token("[DONE]")),
		"at the start of a segment":             append(append(twenty("")[:7:7], literal[:at], literal[at:]), twenty("")[8:]...),
		"an error's look-alike":                 twenty(kit.Token(`{"error":{"code":500}} "finish_reason":"abort"`)),
		"bytes after the true end marker":       append(twenty(kit.Token("x")), ": bye\n\n", kit.Token("after the end")),
		"a stream that never marks its end":     twenty(kit.Token("x"))[:20],
		"R10: pings, names, ids, several lines": {": ping\n\n", "event: ping\ndata: {}\n\n", "id: 7\nevent: odd\ndata: {\"a\":\ndata: 1}\n\n", kit.Token("x"), kit.Done},
		"CRLF line ends":                        {"data: {\"choices\":[]}\r\n\r\n", ": x\r\n\r\n", "data: [DONE]\r\n\r\n"},
	}
	for name, parts := range cases {
		t.Run(name, func(t *testing.T) {
			p.D[0].Engine.Next(pieces(parts...))
			a := p.OK(kit.Request{Body: streamBody})
			if want := strings.Join(parts, ""); a.Body != want {
				t.Errorf("the client got\n%q\nthe worker sent\n%q", a.Body, want)
			}
		})
	}
}

// recorded is a stream with every kind of line and characters of several bytes.
func recorded() string {
	var s strings.Builder
	s.WriteString(": hello\n\n")
	for i := range 3 {
		s.WriteString(kit.Token(fmt.Sprintf("北🌍é%d data: [DONE]", i)))
	}
	s.WriteString("event: ping\ndata: {}\n\n" + kit.Finish("stop"))
	s.WriteString(kit.Event(`{"choices":[],"usage":{"prompt_tokens":120,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":64}}}`))
	return s.String() + kit.Done
}

// cutAndRelay streams in, cut at the given offsets, many runs at a time.
func cutAndRelay(t *testing.T, p *kit.Pool, in string, runs [][]int) {
	t.Helper()
	var mu sync.Mutex
	scripts := map[string][]string{}
	p.D[0].Engine.Always(func(ex *kit.Exchange) {
		mu.Lock()
		parts := scripts[ex.Seen.Header.Get("X-Run")]
		mu.Unlock()
		ex.Stream()
		for i, s := range parts {
			if i > 0 {
				ex.Wait(200 * time.Microsecond) // so that the pieces are read apart
			}
			ex.Send(s)
		}
	})
	work := make(chan int)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range work {
				run := fmt.Sprint("run-", i)
				mu.Lock()
				from := 0
				for _, at := range runs[i] {
					scripts[run] = append(scripts[run], in[from:at])
					from = at
				}
				scripts[run] = append(scripts[run], in[from:])
				mu.Unlock()
				a := p.Do(kit.Request{Body: streamBody, Header: http.Header{"X-Run": {run}}})
				if a.Err != nil || a.Body != in {
					t.Errorf("cut at %v: %v, the client got\n%q\nwant\n%q", runs[i], a.Err, a.Body, in)
				}
			}
		})
	}
	for i := range runs {
		work <- i
	}
	close(work)
	wg.Wait()
}

func TestR03_EveryCutOfTheStream(t *testing.T) {
	p := unified(t, kit.Options{})
	in := recorded()
	var runs [][]int
	for at := 1; at < len(in); at++ {
		runs = append(runs, []int{at})
	}
	rnd := rand.New(rand.NewPCG(3, 3))
	for range 200 {
		a := 1 + rnd.IntN(len(in)-3)
		b := a + 1 + rnd.IntN(len(in)-a-1)
		c := b + rnd.IntN(len(in)-b)
		runs = append(runs, []int{a, b, c})
	}
	if testing.Short() {
		runs = runs[:100]
	}
	before := p.Metric("kvc_router_tokens_total", "kind", "prompt")
	cutAndRelay(t, p, in, runs)
	p.Quiet()
	for kind, want := range map[string]int{"prompt": 120, "completion": 20, "cached": 64} {
		if got := p.Metric("kvc_router_tokens_total", "kind", kind); got != before+float64(want*len(runs)) {
			t.Errorf("R02: %v %s tokens were counted in %d runs of %d", got, kind, len(runs), want)
		}
	}
	if got := p.Metric("kvc_router_turns_total", "outcome", "ok"); got != float64(len(runs)) {
		t.Errorf("%v of %d turns ended ok", got, len(runs))
	}
}

func TestR04_CharactersCutBetweenReads(t *testing.T) {
	p := unified(t, kit.Options{})
	in := kit.Token("北") + kit.Token("🌍") + kit.Token("e\u0301\u0323 ffi") + kit.Done
	var runs [][]int
	for i := 1; i < len(in); i++ {
		if in[i]&0xC0 == 0x80 { // an inner byte
			runs = append(runs, []int{i})
		}
	}
	cutAndRelay(t, p, in, runs)

	t.Run("a whole answer", func(t *testing.T) {
		body := `{"choices":[{"message":{"content":"北🌍"},"finish_reason":"stop"}]}`
		at := strings.Index(body, "北") + 1
		p.D[0].Engine.Next(func(ex *kit.Exchange) {
			ex.Header(http.StatusOK, "Content-Type", "application/json")
			ex.Send(body[:at])
			ex.Wait(time.Millisecond)
			ex.Send(body[at:])
		})
		if a := p.OK(kit.Request{Body: `{"model":"m","messages":[]}`}); a.Body != body {
			t.Errorf("the client got %q", a.Body)
		}
	})
	t.Run("the request", func(t *testing.T) {
		p.D[0].Engine.Always(p.D[0].Engine.Serve)
		body := `{"model":"m","messages":[{"role":"user","content":"北🌍"}]}`
		c := kit.Dial(t, p.Addr)
		c.Send(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body)))
		for _, piece := range chunks([]byte(body), 1) {
			c.Send(piece)
		}
		if a := c.Answer(); a.Status != http.StatusOK {
			t.Fatalf("status %d: %s", a.Status, a.Body)
		}
		if got := less(t, p.D[0].Engine.Last().Body); got != body {
			t.Errorf("the engine got %q, want %q", got, body)
		}
	})
}

func TestR05_UpstreamDiesMidStream(t *testing.T) {
	five := kit.Token("a") + kit.Token("b") + kit.Token("c") + kit.Token("d") + kit.Token("e")
	deaths := map[string]func(p *kit.Pool, ex *kit.Exchange){
		"reset":                       func(_ *kit.Pool, ex *kit.Exchange) { ex.RST() },
		"end without the last chunk":  func(_ *kit.Pool, ex *kit.Exchange) { ex.FIN() },
		"reset inside an event":       func(_ *kit.Pool, ex *kit.Exchange) { ex.Send("data: {\"choi"); ex.RST() },
		"the engine process dies":     func(p *kit.Pool, ex *kit.Exchange) { go p.D[0].Engine.Stop(); ex.Hang() },
		"the sidecar process dies":    func(p *kit.Pool, ex *kit.Exchange) { go p.D[0].Kill(); ex.Hang() },
		"a broken chunk in the frame": func(_ *kit.Pool, ex *kit.Exchange) { ex.Raw("zz\r\n"); ex.FIN() },
	}
	for name, die := range deaths {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Prefill: 1})
			read := make(chan struct{})
			d := p.D[0].Engine
			d.Next(func(ex *kit.Exchange) {
				if !d.Meet(ex) {
					return
				}
				ex.Stream()
				ex.Send(five)
				ex.Until(read)
				die(p, ex)
			})
			c := kit.Dial(t, p.Addr)
			c.Post("/v1/chat/completions", kit.Chat("ann", 0, true), "X-Session-Id: s1")
			resp := c.Response()
			defer resp.Body.Close()
			got := readUntil(t, resp.Body, five)
			close(read)
			rest := readAll(t, resp.Body)
			checkInBandError(t, got, rest)
			p.Quiet()
			if n := p.Metric("kvc_router_turns_total", "outcome", "upstream_error"); n != 1 {
				t.Errorf("%v turns with outcome upstream_error, want 1", n)
			}
			if strings.HasSuffix(name, "process dies") {
				return
			}
			if s := p.D[0].Status(p); s.Sessions != 0 || s.Used != 0 {
				t.Errorf("the lost turn was credited: %d sessions, %d tokens used", s.Sessions, s.Used)
			}
			p.Settled()
			a := p.OK(kit.Request{Body: kit.Chat("ann", 1, false), Session: "s1"})
			wantMode(t, a, kvc.Reseed)
		})
	}
}

// checkInBandError checks what follows the relayed events: one error, no finish
// reason, the end marker.
func checkInBandError(t *testing.T, got, rest string) {
	t.Helper()
	a := kit.Answer{Body: rest}
	events := a.Events()
	if len(events) != 2 || events[1] != "[DONE]" {
		t.Fatalf("after the events came %q, want one error and the end marker", rest)
	}
	if message, kind, _ := (kit.Answer{Body: events[0]}).Error(); message == "" || kind == "" {
		t.Errorf("error event %s lacks message or type", events[0])
	}
	if strings.Contains(got+rest, `"finish_reason":"`) {
		t.Errorf("a finish reason was invented: %s", got+rest)
	}
}

func TestR05_WholeAnswerBreaksOff(t *testing.T) {
	for name, die := range map[string]kit.Script{
		"short of its length": func(ex *kit.Exchange) {
			ex.Raw("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{\"choices\":")
			ex.FIN()
		},
		"reset in the middle": func(ex *kit.Exchange) {
			ex.Header(http.StatusOK, "Content-Type", "application/json")
			ex.Send(`{"choices":`)
			ex.RST()
		},
		"R07: headers only": func(ex *kit.Exchange) {
			ex.Header(http.StatusOK, "Content-Type", "application/json")
			ex.RST()
		},
		"R07: a stream of headers only": func(ex *kit.Exchange) { ex.Stream(); ex.RST() },
		"R07: an empty stream":          func(ex *kit.Exchange) { ex.Stream() },
		"R07: nothing at all":           func(ex *kit.Exchange) { ex.RST() },
	} {
		t.Run(name, func(t *testing.T) {
			p := unified(t, kit.Options{})
			p.D[0].Engine.Always(die)
			a := p.Do(kit.Request{Body: `{"model":"m","messages":[{"role":"user","content":"hi"}]}`})
			wantJSONError(t, a, http.StatusBadGateway)
		})
	}
}

func TestR08_ErrorsBeforeTheFirstToken(t *testing.T) {
	for _, status := range []int{400, 404, 413, 422, 429, 500, 503} {
		for route := range surfaces(true) {
			t.Run(fmt.Sprint(status, " on ", route), func(t *testing.T) {
				var got [2]kit.Answer
				for i, stream := range []bool{false, true} {
					// A pool of its own: a 500 is a fault, and would take the worker out of the fleet.
					t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
						p := unified(t, kit.Options{})
						p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.Refuse(status) })
						got[i] = p.Do(surfaces(stream)[route])
					})
				}
				whole, streamed := got[0], got[1]
				if streamed.Status != whole.Status || streamed.Body != whole.Body {
					t.Errorf("streamed %d %s, whole %d %s", streamed.Status, streamed.Body, whole.Status, whole.Body)
				}
				if ct := streamed.Header.Get("Content-Type"); ct != "application/json" {
					t.Errorf("Content-Type %q", ct)
				}
				if streamed.Status != status || streamed.Body != kit.EngineError(status) {
					t.Errorf("the engine's own answer became %d %s", streamed.Status, streamed.Body)
				}
			})
		}
	}
}

// The same mistake inside a 200 stream, before any content, is a status too.
func TestR08_ErrorEventBeforeTheFirstToken(t *testing.T) {
	for name, tc := range map[string]struct {
		event  string
		status int
	}{
		"chat 400": {`{"error":{"object":"error","message":"too long","type":"BadRequestError","param":null,"code":400}}`, http.StatusBadRequest},
		"chat 500": {`{"error":{"object":"error","message":"x","type":"INTERNAL_SERVER_ERROR","param":null,"code":500}}`, http.StatusBadGateway},
		"generate": {`{"text":"","output_ids":[],"meta_info":{"finish_reason":{"type":"abort","message":"too long","status_code":400}}}`, http.StatusBadRequest},
	} {
		t.Run(name, func(t *testing.T) {
			p := unified(t, kit.Options{})
			p.D[0].Engine.Always(pieces(kit.Event(tc.event), kit.Done))
			wantJSONError(t, p.Do(kit.Request{Body: streamBody}), tc.status)
		})
	}
}
