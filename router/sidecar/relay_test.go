package sidecar

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

// cuts reads s in the pieces that end at the given offsets.
type cuts struct {
	s    string
	ends []int
	at   int
}

func (c *cuts) Read(p []byte) (int, error) {
	if c.at == len(c.s) {
		return 0, io.EOF
	}
	end := len(c.s)
	for _, e := range c.ends {
		if e > c.at {
			end = min(end, e)
		}
	}
	n := copy(p, c.s[c.at:end])
	c.at += n
	return n, nil
}

// recorded is a stream with everything that must pass: comments, other events,
// multi-byte text, a marker inside content, usage, the end.
var recorded = ": ping\n\n" + "event: ping\ndata: {}\n\n" + chunk("北京 🌍") + chunk(`data: [DONE]`) +
	"id: 7\ndata: {\"id\":\"r\",\ndata: \"choices\":[]}\n\n" + finishEvent + usageEvent + doneEvent

func relayed(t *testing.T, drop bool, body io.Reader) (string, *relay) {
	t.Helper()
	w := httptest.NewRecorder()
	rl := &relay{drop: drop, onBytes: func() error { return nil }}
	if err := rl.stream(w, body); err != nil {
		t.Fatalf("stream: %v", err)
	}
	return w.Body.String(), rl
}

// R03, R04, R10, R16: wherever the reads are cut, the same bytes arrive and the
// same usage is seen.
func TestStreamIsTheSameForEveryCut(t *testing.T) {
	want := map[bool]string{false: recorded, true: strings.Replace(recorded, usageEvent, "", 1)}
	for i := 1; i < len(recorded); i++ {
		for drop, text := range want {
			got, rl := relayed(t, drop, &cuts{s: recorded, ends: []int{i, min(i+7, len(recorded))}})
			if got != text {
				t.Fatalf("drop %t, cut at %d: %s", drop, i, cmp.Diff(text, got))
			}
			u := kvc.Usage{PromptTokens: 120, CachedTokens: 64, CompletionTokens: 20}
			if !rl.obs.HasUsage || rl.obs.Usage != u || !rl.obs.Done || rl.obs.Finish != "stop" {
				t.Fatalf("drop %t, cut at %d: observed %+v", drop, i, rl.obs)
			}
		}
	}
}

func TestStreamKeepsAnUnfinishedTail(t *testing.T) {
	for _, drop := range []bool{false, true} {
		text := chunk("a") + "data: {\"half"
		if got, _ := relayed(t, drop, strings.NewReader(text)); got != text {
			t.Errorf("drop %t: got %q, want every byte of %q", drop, got, text)
		}
	}
}

func FuzzRelay(f *testing.F) {
	f.Add(recorded, 5, 11)
	f.Add("data: x\r\n\r\ndata: y\n\n", 8, 9)
	f.Fuzz(func(t *testing.T, s string, a, b int) {
		if got, _ := relayed(t, false, &cuts{s: s, ends: []int{a, b}}); got != s {
			t.Fatalf("without drop: got %q, want %q", got, s)
		}
		whole, _ := relayed(t, true, strings.NewReader(s))
		if cut, _ := relayed(t, true, &cuts{s: s, ends: []int{a, b}}); cut != whole {
			t.Fatalf("with drop, cut at %d and %d: got %q, want %q", a, b, cut, whole)
		}
	})
}

// R16: the chunk we asked for is ours to remove; the client's own passes.
func TestUsageChunk(t *testing.T) {
	cases := map[string]struct {
		options string
		want    bool // the client gets the chunk
	}{
		"a client that did not ask does not get it":       {"", false},
		"a client that asked gets it":                     {`"stream_options":{"include_usage":true},`, true},
		"a client that declined does not get it":          {`"stream_options":{"include_usage":false,"x":1},`, false},
		"a client with other options does not get it":     {`"stream_options":{"continuous_usage_stats":false},`, false},
		"a client with null options does not get it":      {`"stream_options":null,`, false},
		"a client that asked keeps its options unchanged": {`"stream_options": {"x":1.0, "include_usage" : true},`, true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).ready()
			body := strings.Replace(chat(0, true), "{", "{"+tc.options, 1)
			a := r.send(t.Context(), ask(session, 0), chatPath, body)
			want := chunk("he") + chunk("llo") + finishEvent
			if tc.want {
				want += usageEvent
			}
			if want += doneEvent; a.body != want {
				t.Errorf("client got %s", cmp.Diff(want, a.body))
			}
			o, ok := r.e.last().body["stream_options"].(map[string]any)
			if !ok || o["include_usage"] != true {
				t.Errorf("engine got stream_options %v, want include_usage", r.e.last().body["stream_options"])
			}
			if tc.want && !bytes.Contains(r.e.last().raw, []byte(strings.TrimSuffix(tc.options, ","))) {
				t.Errorf("the client's own options changed: %s", r.e.last().raw)
			}
			if s := r.quiet(); s.Totals.PromptTokens != 120 {
				t.Errorf("prompt tokens %d, want usage read either way", s.Totals.PromptTokens)
			}
		})
	}
}

func TestGenerateNeedsNoUsageChunk(t *testing.T) {
	r := newRig(t).ready()
	stream := event(`{"text":" Par","meta_info":{"prompt_tokens":8,"completion_tokens":1,"cached_tokens":0,"finish_reason":null}}`) +
		event(`{"text":" Paris","meta_info":{"prompt_tokens":8,"completion_tokens":2,"cached_tokens":4,"finish_reason":{"type":"length","length":2}}}`) +
		doneEvent
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.Header().Set("Content-Type", "text/event-stream")
			send(w, stream)
		}
	})
	a := r.send(t.Context(), ask(session, 0), "/generate", `{"text":"`+strings.Repeat("The capital of France is ", 20)+`","stream":true}`)
	if a.body != stream {
		t.Errorf("client got %s", cmp.Diff(stream, a.body))
	}
	if _, ok := r.e.last().body["stream_options"]; ok {
		t.Error("stream_options was added to /generate")
	}
	if s := r.quiet(); s.Totals.PromptTokens != 8 || s.Totals.GeneratedTokens != 2 || s.Sessions != 1 {
		t.Errorf("totals %+v, want the last meta_info", s.Totals)
	}
}

// R05: a stream that breaks must look broken.
func TestEngineDeathMidStreamAbortsOurAnswer(t *testing.T) {
	r := newRig(t).ready()
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.Header().Set("Content-Type", "text/event-stream")
			send(w, chunk("he"))
			send(w, chunk("llo"))
			panic(http.ErrAbortHandler)
		}
	})
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, true))
	if a.status != 200 || a.err == nil || a.body != chunk("he")+chunk("llo") {
		t.Errorf("status %d, error %v, body %q; want both chunks, then a broken answer", a.status, a.err, a.body)
	}
	s := r.quiet()
	if s.Used != 0 {
		t.Errorf("used %d: the lost turn was credited", s.Used)
	}
	if r.metric("kvc_sidecar_turns_total", "outcome", "error") != 1 {
		t.Error("the turn does not count as an error")
	}
	r.e.set(func() { r.e.turn = answerChat })
	if v := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false)).verdict(t); v.Mode != "reseed" {
		t.Errorf("next turn %+v, want a reseed", v)
	}
}

func TestOutcomesThatCreditNothing(t *testing.T) {
	cases := map[string]func(w http.ResponseWriter, _ *http.Request, _ map[string]any){
		"an in-band error": func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.Header().Set("Content-Type", "text/event-stream")
			send(w, event(`{"error":{"object":"error","message":"x","type":"INTERNAL_SERVER_ERROR","param":null,"code":500}}`)+doneEvent)
		},
		"a stream that ends without an end": func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.Header().Set("Content-Type", "text/event-stream")
			send(w, chunk("x"))
		},
		"a 500": func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.WriteHeader(http.StatusInternalServerError)
			send(w, `{"object":"error"}`)
		},
	}
	for name, turn := range cases {
		t.Run(name, func(t *testing.T) {
			r := newRig(t).ready()
			r.e.set(func() { r.e.turn = turn })
			if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, true)); a.err != nil {
				t.Errorf("the engine's own ending was broken off: %v", a.err)
			}
			if s := r.quiet(); s.Used != 0 || r.metric("kvc_sidecar_turns_total", "outcome", "error") != 1 {
				t.Errorf("used %d, want an error that credits nothing", s.Used)
			}
		})
	}
}

func TestEngineErrorsPassUnchanged(t *testing.T) {
	r := newRig(t).ready()
	long := strings.Repeat("x", maxErrorBody+5000)
	for status, body := range map[int]string{
		400: `{"object":"error","message":"Request kvc exceeds","type":"BadRequest","param":null,"code":400}`,
		401: `{"error":"Unauthorized"}`, 503: long,
	} {
		r.e.set(func() {
			r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
				w.Header().Set("Content-Type", "application/weird")
				w.WriteHeader(status)
				_, _ = io.WriteString(w, body)
			}
		})
		a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
		if a.status != status || a.body != body[:min(len(body), maxErrorBody)] || a.header.Get("Content-Type") != "application/weird" ||
			a.header.Get(admission.HeaderOrigin) != "engine" {
			t.Errorf("status %d: got %d, %d bytes, %v; want the engine's own answer up to 1 MiB", status, a.status, len(a.body), a.header)
		}
	}
	r.quiet()
}

func TestEngineThatDoesNotAnswerIs502(t *testing.T) {
	r := newRig(t).ready()
	r.e.set(func() {
		r.e.turn = func(http.ResponseWriter, *http.Request, map[string]any) { panic(http.ErrAbortHandler) }
	})
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	if a.status != 502 || a.header.Get(admission.HeaderOrigin) != "sidecar" || !strings.Contains(a.body, "did not answer") {
		t.Errorf("got %d %s, want the sidecar's 502", a.status, a.body)
	}
	r.quiet()
}

func TestChunksArriveAsTheyAreSent(t *testing.T) {
	r := newRig(t).ready()
	step := make(chan struct{})
	r.e.set(func() {
		r.e.turn = func(w http.ResponseWriter, _ *http.Request, _ map[string]any) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 {
				send(w, chunk("x"))
				<-step
			}
			send(w, doneEvent)
		}
	})
	resp, _ := r.open(t.Context(), ask(session, 0), chatPath, chat(0, true))
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	for range 3 {
		buf := make([]byte, len(chunk("x")))
		if _, err := io.ReadFull(br, buf); err != nil || string(buf) != chunk("x") {
			t.Fatalf("got %q, %v; want each chunk before the next is sent", buf, err)
		}
		step <- struct{}{}
	}
	if rest, err := io.ReadAll(br); err != nil || string(rest) != doneEvent {
		t.Errorf("rest %q, %v", rest, err)
	}
}

func TestWholeAnswerKeepsItsLength(t *testing.T) {
	r := newRig(t).ready()
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	if a.body != wholeAnswer || a.header.Get("Content-Length") == "" {
		t.Errorf("got %q with length %q", a.body, a.header.Get("Content-Length"))
	}
}

// T5: a peer that stops reading does not hold the engine for ever, nor memory.
func TestRelayReportsWhoFailed(t *testing.T) {
	boom := errors.New("boom")
	w := httptest.NewRecorder()
	rl := &relay{onBytes: func() error { return nil }}
	err := rl.stream(w, io.MultiReader(strings.NewReader(chunk("x")), errReader{boom}))
	if !errors.Is(err, errEngine) || !errors.Is(err, boom) {
		t.Errorf("read error %v, want errEngine", err)
	}
	rl = &relay{onBytes: func() error { return nil }}
	if err := rl.stream(failingWriter{w}, strings.NewReader(chunk("x"))); err == nil || errors.Is(err, errEngine) {
		t.Errorf("write error %v, want the peer's", err)
	}
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

type failingWriter struct{ http.ResponseWriter }

func (failingWriter) Write([]byte) (int, error) { return 0, errors.New("peer") }

// BenchmarkRelay is one SSE chunk over loopback, beside httputil.ReverseProxy in
// the same run; the relay reads usage, the proxy does not. In lockstep each
// chunk is a read and a write of its own, as from an engine; unpaced, whatever
// piled up is one read. cpu-ns is everything: engine, relay and client.
func BenchmarkRelay(b *testing.B) {
	const chunks = 1000
	pace := make(chan struct{}, 1)
	c := chunk("hello world, this is one token")
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		lockstep := r.Header.Get("X-Lockstep") != ""
		w.Header().Set("Content-Type", "text/event-stream")
		for range chunks {
			send(w, c)
			if lockstep {
				<-pace
			}
		}
		send(w, finishEvent+usageEvent+doneEvent)
	}))
	defer engine.Close()
	target, err := url.Parse(engine.URL)
	if err != nil {
		b.Fatal(err)
	}
	transport := sglang.NewTransport()
	defer transport.CloseIdleConnections()
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.FlushInterval, proxy.Transport = -1, transport
	for _, lockstep := range []bool{true, false} {
		for name, h := range map[string]http.Handler{
			"relay": relayOnly(b, engine.URL, transport, false), "relay-drop": relayOnly(b, engine.URL, transport, true),
			"reverseproxy": proxy, "none": nil,
		} {
			mode := map[bool]string{true: "lockstep/", false: "unpaced/"}[lockstep]
			b.Run(mode+name, func(b *testing.B) {
				base := engine.URL
				if h != nil {
					srv := httptest.NewServer(h)
					defer srv.Close()
					base = srv.URL
				}
				wait := pace
				if !lockstep {
					wait = nil
				}
				benchStream(b, base, chunks, len(c), wait)
			})
		}
	}
}

// relayOnly is the data path without its turn: forward, relay.
func relayOnly(b *testing.B, engine string, transport http.RoundTripper, drop bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, engine, nil)
		if err != nil {
			b.Error(err)
			return
		}
		req.Header = r.Header.Clone()
		resp, err := transport.RoundTrip(req)
		if err != nil {
			b.Error(err)
			return
		}
		defer resp.Body.Close()
		copyHeader(w.Header(), resp)
		rl := &relay{drop: drop, onBytes: func() error { return nil }}
		if err := rl.stream(w, resp.Body); err != nil || rl.obs.Usage.PromptTokens != 120 {
			b.Errorf("relay: %v, %+v", err, rl.obs)
		}
	})
}

// benchStream reads whole streams; with pace, each chunk is acknowledged.
func benchStream(b *testing.B, base string, chunks, size int, pace chan struct{}) {
	hc := &http.Client{Transport: sglang.NewTransport()}
	defer hc.CloseIdleConnections()
	buf := make([]byte, size)
	b.ReportAllocs()
	before := cpu(b)
	for b.Loop() {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, base, nil)
		if err != nil {
			b.Fatal(err)
		}
		if pace != nil {
			req.Header.Set("X-Lockstep", "1")
		}
		resp, err := hc.Do(req)
		if err != nil {
			b.Fatal(err)
		}
		for range chunks {
			if _, err := io.ReadFull(resp.Body, buf); err != nil {
				b.Fatal(err)
			}
			if pace != nil {
				pace <- struct{}{}
			}
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			b.Fatal(err)
		}
		_ = resp.Body.Close()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*chunks), "ns/chunk")
	b.ReportMetric(float64((cpu(b)-before).Nanoseconds())/float64(b.N*chunks), "cpu-ns/chunk")
}

// cpu is the process's time on processors: what a busy machine leaves comparable.
func cpu(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRelayCPU is the same without sockets: what reading usage costs.
func BenchmarkRelayCPU(b *testing.B) {
	body := strings.Repeat(chunk("hello world, this is one token"), 1000) + finishEvent + usageEvent + doneEvent
	for _, drop := range []bool{false, true} {
		b.Run(map[bool]string{false: "keep", true: "drop"}[drop], func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			w := discard{http.Header{}}
			for b.Loop() {
				rl := &relay{drop: drop, onBytes: func() error { return nil }}
				if err := rl.stream(w, &pieces{s: body, n: len(chunk("hello world, this is one token"))}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*1000), "ns/chunk")
		})
	}
}

type pieces struct {
	s string
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.s == "" {
		return 0, io.EOF
	}
	n := copy(b, p.s[:min(p.n, len(p.s))])
	p.s = p.s[n:]
	return n, nil
}

type discard struct{ h http.Header }

func (d discard) Header() http.Header            { return d.h }
func (discard) Write(p []byte) (int, error)      { return len(p), nil }
func (discard) WriteHeader(int)                  {}
func (discard) FlushError() error                { return nil }
func (discard) SetWriteDeadline(time.Time) error { return nil }
