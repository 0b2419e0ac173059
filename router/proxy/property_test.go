package proxy

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// cutReader gives a text in pieces of the given sizes, then an error.
type cutReader struct {
	text  string
	sizes []int
	err   error
}

func (r *cutReader) Read(b []byte) (int, error) {
	if r.text == "" {
		return 0, r.err
	}
	n := len(r.text)
	if len(r.sizes) > 0 {
		n = min(n, max(1, r.sizes[0]))
		r.sizes = r.sizes[1:]
	}
	n = copy(b, r.text[:n])
	r.text = r.text[n:]
	return n, nil
}

// stubMachine counts what the relay tells the machine.
type stubMachine struct{ streaming, done int }

func (*stubMachine) Next() kvc.Step     { return kvc.Step{} }
func (*stubMachine) Answer(kvc.Reply)   {}
func (*stubMachine) Failed()            {}
func (*stubMachine) FailedPrefill()     {}
func (m *stubMachine) Streaming()       { m.streaming++ }
func (m *stubMachine) Done(kvc.Outcome) { m.done++ }
func (*stubMachine) Attempts() int      { return 1 }

// relayOf relays an event stream from body to a recorder.
func relayOf(p *Proxy, body io.Reader) (w *httptest.ResponseRecorder, tn *turn, m *stubMachine, f *fault) {
	w, m = httptest.NewRecorder(), &stubMachine{}
	tn = &turn{proxy: p, w: w, r: httptest.NewRequest(http.MethodPost, "/v1/chat/completions", nil), arrived: time.Now(),
		id: "id", machine: m, mode: kvc.Direct, worker: "decode-0", log: &decision{}}
	d := p.newWorker(fleet.Worker{Name: "decode-0", ID: "d", Role: fleet.Decode})
	a := tn.newAttempt("0123456789abcdef0123456789abcdef", d, nil)
	a.head <- headResult{resp: &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"text/event-stream"}},
		Body: io.NopCloser(body)}}
	f = tn.relay(a)
	return w, tn, m, f
}

// drawEvents is a stream of plausible and odd events.
func drawEvents(t *rapid.T) []string {
	content := rapid.SampledFrom([]string{"x", "北🌍", `\"data: [DONE]\"`, `\n\n`, `finish_reason`, `\"usage\":{`, strings.Repeat("long ", 200)})
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
		switch rapid.IntRange(0, 9).Draw(t, "kind") {
		case 0:
			return ": ping\n\n"
		case 1:
			return "event: odd\nid: 7\ndata: {\"a\":\ndata: 1}\n\n"
		case 2:
			return "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"crlf\"},\"finish_reason\":null}]}\r\n\r\n"
		case 3:
			return `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":5}}}` + "\n\n"
		case 4:
			return `data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
		}
		return `data: {"choices":[{"index":0,"delta":{"content":"` + content.Draw(t, "content") + `"},"finish_reason":null}]}` + "\n\n"
	}), 1, 12).Draw(t, "events")
}

// R01–R04, R10, property: however a stream is cut, the client's bytes are the
// worker's, and accounting sees what it sees of the whole.
func TestRelayProperty(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	rapid.Check(t, func(t *rapid.T) {
		events := append(drawEvents(t), "data: [DONE]\n\n")
		whole := strings.Join(events, "")
		sizes := rapid.SliceOfN(rapid.IntRange(1, 300), 0, 40).Draw(t, "sizes")
		w, tn, m, f := relayOf(p, &cutReader{text: whole, sizes: sizes, err: io.EOF})
		if f != nil {
			t.Fatalf("fault %v", f)
		}
		if d := cmp.Diff(whole, w.Body.String()); d != "" {
			t.Fatalf("bytes differ (-want +got):\n%s", d)
		}
		if tn.outcome != telemetry.OutcomeOK || m.streaming != 1 {
			t.Fatalf("outcome %q, Streaming told %d times", tn.outcome, m.streaming)
		}
		var want sglang.Observed
		var ev sglang.Events
		ev.Feed([]byte(whole), func(_, data []byte) {
			if len(data) > 0 {
				sglang.ObserveEvent(&want, data)
			}
		})
		got := kvc.Usage{}
		if u := tn.log.v.Usage; u != nil {
			got = kvc.Usage{PromptTokens: u.Prompt, CachedTokens: u.Cached, CompletionTokens: u.Completion}
		}
		if got != want.Usage {
			t.Fatalf("usage %+v, want %+v", got, want.Usage)
		}
	})
}

// R05–R07, property: wherever a stream breaks, the client sees whole events,
// then one error and the end mark; or, while nothing whole came, nothing.
func TestBrokenRelayProperty(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	rapid.Check(t, func(t *rapid.T) {
		events := drawEvents(t)
		whole := strings.Join(events, "")
		at := rapid.IntRange(0, len(whole)).Draw(t, "break at")
		sizes := rapid.SliceOfN(rapid.IntRange(1, 300), 0, 20).Draw(t, "sizes")
		w, tn, m, f := relayOf(p, &cutReader{text: whole[:at], sizes: sizes, err: io.ErrUnexpectedEOF})
		kept := ""
		for _, e := range events {
			if len(kept)+len(e) > at {
				break
			}
			kept += e
		}
		if kept == "" && f == nil {
			// "\r\n\r" may be the end of an event already.
			t.Fatalf("nothing whole came, yet the client got %q", w.Body)
		}
		if f != nil {
			if kept != "" || w.Body.Len() != 0 || m.streaming != 0 || f.retry == "" {
				t.Fatalf("fault %v after %q was sent, %d bytes", f, kept, w.Body.Len())
			}
			return
		}
		got, ok := strings.CutPrefix(w.Body.String(), kept)
		if !ok || !strings.HasPrefix(strings.TrimPrefix(got, "\r"), `data: {"error":{`) || !strings.HasSuffix(got, "\n\ndata: [DONE]\n\n") {
			t.Fatalf("after %d whole bytes came %q", len(kept), w.Body.String()[min(len(kept), w.Body.Len()):])
		}
		if tn.outcome != telemetry.OutcomeUpstreamError {
			t.Fatalf("outcome %q", tn.outcome)
		}
	})
}

// A whole answer passes whole, in any cut; a broken one passes not at all.
func TestWholeAnswerProperty(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	rapid.Check(t, func(t *rapid.T) {
		body := `{"choices":[{"message":{"content":"` + rapid.StringMatching(`[a-z ]{0,400}`).Draw(t, "text") + `"}}]}`
		broken := rapid.Bool().Draw(t, "broken")
		end := io.EOF
		if broken {
			end = io.ErrUnexpectedEOF
		}
		w, m := httptest.NewRecorder(), &stubMachine{}
		tn := &turn{proxy: p, w: w, r: httptest.NewRequest(http.MethodPost, "/x", nil), machine: m, log: &decision{}}
		a := tn.newAttempt("a", p.newWorker(fleet.Worker{Name: "d", ID: "d"}), nil)
		a.head <- headResult{resp: &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}},
			Body: io.NopCloser(&cutReader{text: body, sizes: rapid.SliceOf(rapid.IntRange(1, 50)).Draw(t, "sizes"), err: end})}}
		f := tn.relay(a)
		if broken != (f != nil) || broken != (w.Body.Len() == 0) || broken == (m.streaming == 1) {
			t.Fatalf("broken %t: fault %v, %d bytes, Streaming %d", broken, f, w.Body.Len(), m.streaming)
		}
		if !broken && (w.Body.String() != body || w.Header().Get("Content-Length") != fmt.Sprint(len(body))) {
			t.Fatalf("got %q with length %s", w.Body, w.Header().Get("Content-Length"))
		}
	})
}

// drawBody is a request body with members of any kind in any order.
func drawBody(t *rapid.T, must ...string) (members []string) {
	value := rapid.SampledFrom([]string{`1`, `9007199254740993`, `1.0`, `"x"`, `"\u0041\ud83c\udf0d"`, `null`, `true`,
		`{"b":1,"a":{"z":[1,{"y":null}]}}`, `[ 1 , "two" , [ ] ]`, `""`})
	space := rapid.SampledFrom([]string{"", " ", "\n\t"})
	for range rapid.IntRange(0, 6).Draw(t, "extra") {
		members = append(members, fmt.Sprintf(`"zz_%d"%s:%s%s`, len(members), space.Draw(t, "s1"), space.Draw(t, "s2"), value.Draw(t, "v")))
	}
	for _, m := range must {
		at := rapid.IntRange(0, len(members)).Draw(t, "at")
		members = slices.Insert(members, at, m)
	}
	return members
}

// R19–R22, R53, property: the edited body means the client's without the forged
// members and with the served name, and every surviving member's bytes are the
// client's.
func TestEditsProperty(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	pool := &fleet.Pool{Namespace: "n", Name: "p", Model: "served", Aliases: []string{"alias"}}
	rapid.Check(t, func(t *rapid.T) {
		model := rapid.SampledFrom([]string{"", `"model":"served"`, `"model" : "alias"`, `"model":null`, `"mod\u0065l":"alias"`}).Draw(t, "model")
		forged := rapid.SliceOfDistinct(rapid.SampledFrom(strippedMembers()), rapid.ID[string]).Draw(t, "forged")
		must := []string{`"messages":[{"role":"user","content":"hi"}]`}
		if model != "" {
			must = append(must, model)
		}
		for _, key := range forged {
			must = append(must, fmt.Sprintf("%q:%s", key, rapid.SampledFrom([]string{`1`, `"h"`, `[1,2]`, `null`}).Draw(t, "fv")))
		}
		members := drawBody(t, must...)
		in := "{" + strings.Join(members, ",") + "}"
		body := &shared{b: []byte(in), pool: &p.bufs}
		body.refs.Store(1)
		got, refuse := p.parse(block.Chat, body, pool, true)
		if refuse != nil {
			t.Fatalf("refused: %s", refuse.message)
		}
		defer got.body.release()
		var want, have map[string]json.RawMessage
		if err := errors.Join(json.Unmarshal([]byte(in), &want), json.Unmarshal(got.body.b, &have)); err != nil {
			t.Fatalf("%v: %s", err, got.body.b)
		}
		for _, key := range strippedMembers() {
			delete(want, key)
		}
		want["model"] = json.RawMessage(`"served"`)
		if d := cmp.Diff(want, have); d != "" {
			t.Fatalf("members (-want +got):\n%s\nin  %s\nout %s", d, in, got.body.b)
		}
		if len(forged) == 0 && model == `"model":"served"` && string(got.body.b) != in {
			t.Fatalf("nothing to edit, yet the bytes changed: %s", got.body.b)
		}
	})
}

// R24, R25, property: a body arrives as it was, in every coding and cut, unless
// it is over the limit.
func TestReadBodyProperty(t *testing.T) {
	o := testOptions()
	o.MaxBody = 300 << 10
	p := New(o)
	defer p.Close()
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer enc.Close()
	rapid.Check(t, func(t *rapid.T) {
		unit := rapid.SliceOfN(rapid.Byte(), 1, 64).Draw(t, "unit")
		plain := bytes.Repeat(unit, rapid.IntRange(0, 400<<10).Draw(t, "size")/len(unit))
		coding := rapid.SampledFrom([]string{"", "gzip", "zstd"}).Draw(t, "coding")
		sent := plain
		switch coding {
		case "gzip":
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			_, _ = z.Write(plain)
			_ = z.Close()
			sent = b.Bytes()
		case "zstd":
			sent = enc.EncodeAll(plain, nil)
		}
		r := httptest.NewRequest(http.MethodPost, "/", &cutReader{text: string(sent), err: io.EOF,
			sizes: rapid.SliceOfN(rapid.IntRange(1, 20000), 0, 10).Draw(t, "sizes")})
		r.ContentLength = rapid.SampledFrom([]int64{-1, int64(len(sent))}).Draw(t, "length")
		r.Header.Set("Content-Encoding", coding)
		got, refuse := p.readBody(httptest.NewRecorder(), r)
		if over := len(plain) > int(o.MaxBody) || len(sent) > int(o.MaxBody); over {
			if refuse == nil || refuse.status != http.StatusRequestEntityTooLarge {
				t.Fatalf("%d bytes over the limit of %d: %+v", len(plain), o.MaxBody, refuse)
			}
			return
		}
		if refuse != nil {
			t.Fatalf("%d bytes, %q: refused with %s", len(plain), coding, refuse.message)
		}
		defer got.release()
		if !bytes.Equal(got.b, plain) {
			t.Fatalf("%d bytes arrived as %d", len(plain), len(got.b))
		}
	})
}

// R26: a shared body gives each reader its bytes from the start, and its memory
// goes back only when the last reader has closed.
func TestSharedBody(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	buf := p.buffer()
	buf.WriteString("body")
	s := &shared{b: buf.Bytes(), bufs: [2]*bytes.Buffer{buf}, pool: &p.bufs}
	s.refs.Store(1)
	one, two := s.reader(), s.reader()
	for _, r := range []io.ReadCloser{one, two} {
		if b, err := io.ReadAll(r); err != nil || string(b) != "body" {
			t.Fatalf("%q %v", b, err)
		}
	}
	s.release()
	_ = one.Close()
	_ = one.Close() // a transport may close twice
	if buf.Len() == 0 {
		t.Fatal("the memory went back while a reader was open")
	}
	_ = two.Close()
	if buf.Len() != 0 {
		t.Error("the memory did not go back")
	}
}

// Which members of a body are refused under disaggregation, surface by surface.
func TestCheckSamplesProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(-1, 3).Draw(t, "n")
		route := rapid.SampledFrom([]block.Route{block.Chat, block.Completions, block.Generate}).Draw(t, "route")
		pd := rapid.Bool().Draw(t, "disaggregated")
		members := []string{fmt.Sprintf(`"n":%d`, n), `"messages":[]`, `"prompt":"x"`}
		if route == block.Generate {
			members = []string{`"text":"x"`, fmt.Sprintf(`"sampling_params":{"n":%d}`, n), `"n":7`} // a top-level n means nothing here
		}
		p := New(testOptions())
		defer p.Close()
		body := &shared{b: []byte("{" + strings.Join(drawBody(t, members...), ",") + "}"), pool: &p.bufs}
		body.refs.Store(1)
		got, refuse := p.parse(route, body, &fleet.Pool{Model: "m"}, pd)
		if (refuse != nil) != (pd && n > 1) {
			t.Fatalf("route %s n %d disaggregated %t: refusal %+v", route, n, pd, refuse)
		}
		if refuse == nil {
			got.body.release()
		}
	})
}

// maxOutput reads what each surface calls the most tokens to generate.
func TestMaxOutput(t *testing.T) {
	cases := map[string]struct {
		route block.Route
		body  string
		want  int
	}{
		"chat":                        {block.Chat, `{"max_tokens":7}`, 7},
		"the newer name wins":         {block.Chat, `{"max_tokens":7,"max_completion_tokens":9}`, 9},
		"absent":                      {block.Chat, `{}`, 0},
		"null":                        {block.Chat, `{"max_tokens":null}`, 0},
		"negative":                    {block.Completions, `{"max_tokens":-5}`, 0},
		"absurd":                      {block.Completions, `{"max_tokens":9223372036854775807}`, 1 << 30},
		"generate":                    {block.Generate, `{"sampling_params":{"max_new_tokens":5}}`, 5},
		"generate without parameters": {block.Generate, `{"max_tokens":5}`, 0},
	}
	p := New(testOptions())
	defer p.Close()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			full := strings.Replace(tc.body, "{", `{"messages":[],"prompt":"x","text":"x",`, 1)
			full = strings.Replace(full, ",}", "}", 1)
			body := &shared{b: []byte(full), pool: &p.bufs}
			body.refs.Store(1)
			got, refuse := p.parse(tc.route, body, &fleet.Pool{Model: "m"}, false)
			if refuse != nil {
				t.Fatal(refuse.message)
			}
			defer got.body.release()
			if got.maxOutput != tc.want {
				t.Errorf("maxOutput = %d, want %d", got.maxOutput, tc.want)
			}
		})
	}
}

// FuzzAccept: whatever a client sends as a body is refused with a 4xx or
// understood, and what travels on is one JSON object without forged members.
func FuzzAccept(f *testing.F) {
	for _, s := range []string{`{"model":"m","messages":[{"role":"user","content":"x"}]}`, `{"bootstrap_room":1}`,
		`{"model":"alias","n":2}`, `{"text":["a"],"sampling_params":[{}]}`, `{"input_ids":[[1],[2]]}`, "", "{", `{"model":"\ud800"}`,
		`{"messages":[{"role":"system","content":[{"type":"text","text":"x-anthropic-billing-header: a"}]}]}`} {
		f.Add([]byte(s), uint8(0))
		f.Add([]byte(s), uint8(1))
		f.Add([]byte(s), uint8(2))
	}
	p := New(testOptions())
	p.fleet.Store(&fleet.File{Pool: fleet.Pool{Namespace: "n", Name: "p", Model: "m", Aliases: []string{"alias"}}})
	f.Cleanup(p.Close)
	routes := []block.Route{block.Chat, block.Completions, block.Generate}
	f.Fuzz(func(t *testing.T, data []byte, which uint8) {
		body := &shared{b: bytes.Clone(data), pool: &p.bufs}
		body.refs.Store(1)
		got, refuse := p.parse(routes[int(which)%len(routes)], body, &p.fleet.Load().Pool, which&4 == 0)
		if refuse != nil {
			if refuse.status < 400 || refuse.status > 499 || !json.Valid(refuse.body()) {
				t.Fatalf("refused with %d %s", refuse.status, refuse.body())
			}
			return
		}
		defer got.body.release()
		var have map[string]json.RawMessage
		if err := json.Unmarshal(got.body.b, &have); err != nil {
			t.Fatalf("what travels is no JSON object: %v\nin  %q\nout %q", err, data, got.body.b)
		}
		for _, key := range strippedMembers() {
			if _, ok := have[key]; ok {
				t.Fatalf("%s travels\nin  %q\nout %q", key, data, got.body.b)
			}
		}
	})
}
