package proxy

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/fleet"
)

// unified is a pool of one worker without prefill, on which every turn runs.
func unified(t *testing.T, o Options) (*pool, *mockWorker) {
	t.Helper()
	d := newMockWorker(t, "decode-0", fleet.Decode)
	d.path = "Unified"
	d.feed.Restart(d.hello(), 0)
	return newPool(t, o, d), d
}

// R01, R03, R04, R10: the client's bytes are the worker's bytes wherever the
// stream was cut, and what accounting sees is the same too.
func TestStreamBytesAreTheWorkersForEveryCut(t *testing.T) {
	text := `data: [DONE]` + " 北🌍e\u0301 "
	events := []string{": ping\n\n", "event: ping\ndata: {}\n\n", "id: 7\nevent: odd\ndata: {\"a\":\ndata: 1}\n\n"}
	for i, e := range chatEvents(strings.ReplaceAll(text, `"`, "")) {
		events = append(events, e)
		if i == 1 {
			events = append(events, "data: "+`{"choices":[{"index":0,"delta":{"content":"x\\ndata: [DONE]\\n"},"finish_reason":null}]}`+"\n\n")
		}
	}
	whole := strings.Join(events, "")
	p, d := unified(t, testOptions())
	step := 7
	if testing.Short() {
		step = 61
	}
	for cut := 1; cut < len(whole); cut += step {
		d.set(func() {
			d.play = func(l *leg) {
				l.startStream()
				l.send(whole[:cut])
				l.send(whole[cut:])
			}
		})
		before := p.sum("kvc_router_tokens_total", "kind=completion")
		a := p.chat("", true)
		if a.err != nil || string(a.body) != whole {
			t.Fatalf("cut at %d: %v, bytes differ:\n%q\nwant\n%q", cut, a.err, a.body, whole)
		}
		if got := p.sum("kvc_router_tokens_total", "kind=completion") - before; got != 2 {
			t.Fatalf("cut at %d: %v completion tokens counted, want 2", cut, got)
		}
	}
	if got := p.sum("kvc_router_turns_total", "outcome=upstream_error"); got != 0 {
		t.Errorf("%v whole streams were taken for broken ones", got)
	}
}

// R05, R06, R59: a stream that breaks after bytes ends with one in-band error
// in the API's shape and the end marker; nobody else is asked.
func TestBrokenStreamEndsWithAnInBandError(t *testing.T) {
	breaks := map[string]func(*leg){
		"reset":             func(l *leg) { l.reset() },
		"FIN without end":   func(*leg) { panic(http.ErrAbortHandler) },
		"reset in an event": func(l *leg) { l.send(`data: {"choices":[{"ind`); l.reset() },
	}
	for name, brk := range breaks {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/generate"} {
			t.Run(name+" on "+path, func(t *testing.T) {
				p, d, _ := onePool(t, testOptions())
				other := newMockWorker(t, "decode-1", fleet.Decode)
				d.set(func() {
					d.play = func(l *leg) {
						l.startStream()
						for _, e := range chatEvents("part")[:2] {
							l.send(e)
						}
						brk(l)
					}
				})
				body := `{"model":"m","stream":true,"prompt":"` + longText("p") + `"}`
				switch path {
				case "/v1/chat/completions":
					body = chatBody("p", true)
				case "/generate":
					body = `{"stream":true,"text":"` + longText("p") + `"}`
				}
				a := p.post(path, body)
				want := strings.Join(chatEvents("part")[:2], "")
				rest, ok := strings.CutPrefix(string(a.body), want)
				if a.err != nil || !ok {
					t.Fatalf("%v; the events before the break are missing:\n%s", a.err, a.body)
				}
				if !strings.HasPrefix(rest, `data: {"error":{"message":"`) || !strings.HasSuffix(rest, "\n\ndata: [DONE]\n\n") ||
					strings.Count(rest, "data: ") != 2 {
					t.Errorf("after the break came %q, want one error event and the end marker", rest)
				}
				if strings.Contains(rest, "finish_reason") {
					t.Errorf("a finish reason was invented: %s", rest)
				}
				if n := len(d.seen()) + len(other.seen()); n != 1 {
					t.Errorf("%d decode legs, want 1: no retry after the first byte", n)
				}
				if got := p.sum("kvc_router_turns_total", "outcome=upstream_error"); got != 1 {
					t.Errorf("outcome upstream_error counted %v times, want 1", got)
				}
			})
		}
	}
}

// R07: an answer that ends before it began is an error or a retry, never an
// empty success.
func TestNothingSentIsNeverASuccess(t *testing.T) {
	cases := map[string]script{
		"stream, reset before any event": func(l *leg) { l.startStream(); l.reset() },
		"stream, FIN before any event":   func(l *leg) { l.startStream(); panic(http.ErrAbortHandler) },
		"stream, clean and empty":        func(l *leg) { l.startStream() },
		"stream, half an event":          func(l *leg) { l.startStream(); l.send("data: {\"cho"); l.reset() },
		"whole, reset":                   func(l *leg) { l.reset() },
		"whole, cut short": func(l *leg) {
			l.w.Header().Set("Content-Length", "1000")
			_, _ = io.WriteString(l.w, `{"half`)
			l.flush()
			panic(http.ErrAbortHandler)
		},
		"whole, clean and empty": func(l *leg) { l.w.WriteHeader(200) },
	}
	for name, play := range cases {
		t.Run(name, func(t *testing.T) {
			p, d := unified(t, testOptions())
			d.set(func() { d.play = play })
			stream := strings.HasPrefix(name, "stream")
			p.chat("", stream).wantError(t, 502, "worker")

			// With a second worker the same break is served there.
			d2 := newMockWorker(t, "decode-1", fleet.Decode)
			d2.path = "Unified"
			d2.feed.Restart(d2.hello(), 0)
			p.file.Workers = append(p.file.Workers, d2.fleetWorker())
			p.apply()
			p.settled()
			if a := p.chat("", stream); a.code != 200 || a.header.Get("X-Kvc-Attempts") > "3" {
				t.Errorf("with a healthy worker beside it: %d %s", a.code, a.body)
			}
		})
	}
}

// R08: what is known before the first token is a status line, the same for
// stream and whole answers, with the engine's own body unchanged.
func TestEngineErrorsPassUnchanged(t *testing.T) {
	for _, code := range []int{400, 404, 413, 422, 429, 500, 503} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(code, stream), func(t *testing.T) {
				p, d := unified(t, testOptions())
				const body = `{"object":"error","message":"no","type":"X","param":null,"code":1}`
				d.set(func() { d.play = status(code, body) })
				a := p.chat("", stream)
				if a.code != code || string(a.body) != body || a.header.Get("Content-Type") != "application/json" {
					t.Errorf("got %d %q %s", a.code, a.header.Get("Content-Type"), a.body)
				}
				if n := len(d.seen()); n != 1 {
					t.Errorf("%d legs to the only worker, want 1", n)
				}
			})
		}
	}
}

// An engine in stream mode reports aborts as the first event of a 200.
func TestErrorEventBeforeContentIsAStatus(t *testing.T) {
	p, d := unified(t, testOptions())
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			l.send(`data: {"error":{"object":"error","message":"boom","type":"InternalServerError","param":null,"code":500}}` + "\n\n")
			l.send("data: [DONE]\n\n")
		}
	})
	p.chat("", true).wantError(t, 502)
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			l.send(`data: {"error":{"object":"error","message":"bad","type":"BadRequestError","param":null,"code":400}}` + "\n\n")
		}
	})
	p.chat("", true).wantError(t, 400)
}

// R09: an event leaves at once, not when the next one comes.
func TestEventsAreNotHeldBack(t *testing.T) {
	p, d := unified(t, testOptions())
	next := make(chan struct{})
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			for _, e := range chatEvents("now") {
				l.send(e)
				<-next
			}
		}
	})
	resp, err := p.client.Do(p.request(t.Context(), "/v1/chat/completions", []byte(chatBody("s", true))))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for _, e := range chatEvents("now") {
		got := make([]byte, len(e))
		if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != e {
			t.Fatalf("got %q, %v; want %q before the next event exists", got, err, e)
		}
		next <- struct{}{}
	}
}

// R12: silence ends a stream with an in-band error; there is no other timer.
func TestSilenceEndsAStream(t *testing.T) {
	o := testOptions()
	o.IdleTimeout = 200 * time.Millisecond
	p, d := unified(t, o)
	d.set(func() {
		d.play = func(l *leg) {
			l.startStream()
			for range 8 { // 400 ms in all: twice the limit, but never silent so long
				l.send(chatEvents("tick")[1])
				time.Sleep(50 * time.Millisecond)
			}
			l.hang()
		}
	})
	a := p.chat("", true)
	if n := strings.Count(string(a.body), "tick"); n != 8 || !strings.Contains(string(a.body), `"code":"idle_timeout"`) {
		t.Errorf("%d ticks, body %s", n, a.body)
	}
	recvLeg(t, d.gone, "cancel of the silent leg")
	d.set(func() { d.play = func(l *leg) { l.hang() } })
	p.chat("", false).wantError(t, 504, "idle_timeout")
}

// R36: no Content-Length where the router may add bytes; R35, R37, R43: only
// what may cross crosses, and our names are ours alone.
func TestAnswerHeaders(t *testing.T) {
	p, d := unified(t, testOptions())
	d.set(func() {
		d.play = func(l *leg) {
			h := l.w.Header()
			for k, v := range map[string]string{"Connection": "x-foo", "X-Foo": "1", "Keep-Alive": "t", "Upgrade": "h3",
				"Proxy-Authenticate": "x", "X-Kvc-Mode": "evil", "X-Kvc-Anything": "evil", "X-Request-Id": "theirs",
				"X-Engine": "kept", "Server": "uvicorn"} {
				h.Set(k, v)
			}
			h["Set-Cookie"] = []string{"a=1", "b=2"}
			h.Set("Content-Type", "text/event-stream; charset=utf-8")
			body := strings.Join(chatEvents("x"), "")
			h.Set("Content-Length", strconv.Itoa(len(body)))
			_, _ = io.WriteString(l.w, body)
		}
	})
	a := p.post("/v1/chat/completions", chatBody("s", true), "X-Request-Id", "mine-1")
	for _, name := range []string{"X-Foo", "Keep-Alive", "Upgrade", "Proxy-Authenticate", "Content-Length", "X-Kvc-Anything", "X-Kvc-Origin"} {
		if v := a.header.Get(name); v != "" {
			t.Errorf("%s: %q crossed", name, v)
		}
	}
	for name, want := range map[string]string{"X-Engine": "kept", "Server": "uvicorn", "X-Request-Id": "mine-1",
		"Content-Type": "text/event-stream; charset=utf-8", "X-Kvc-Mode": "seed", "X-Kvc-Worker": "decode-0", "X-Kvc-Attempts": "1"} {
		if v := a.header.Values(name); len(v) != 1 || v[0] != want {
			t.Errorf("%s = %q, want %q once", name, v, want)
		}
	}
	if v := a.header.Values("Set-Cookie"); len(v) != 2 {
		t.Errorf("Set-Cookie = %q, want both", v)
	}
}

// A JSON answer larger than what is held streams, and when it breaks the
// client's connection breaks too.
func TestHugeAnswers(t *testing.T) {
	p, d := unified(t, testOptions())
	huge := `{"text":"` + strings.Repeat("x", wholeMost) + `"}`
	d.set(func() { d.play = status(200, huge) })
	if a := p.chat("", false); a.err != nil || string(a.body) != huge {
		t.Errorf("huge answer: %d bytes, %v; want %d", len(a.body), a.err, len(huge))
	}
	d.set(func() {
		d.play = func(l *leg) {
			_, _ = io.WriteString(l.w, huge[:wholeMost+5])
			l.flush()
			panic(http.ErrAbortHandler)
		}
	})
	if a := p.chat("", false); a.err == nil {
		t.Error("a broken huge answer looked whole")
	}
}
