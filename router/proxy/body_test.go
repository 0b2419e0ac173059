package proxy

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
)

// R19–R22: both legs get the client's exact bytes, whatever is in them.
func TestBytesAreTheClients(t *testing.T) {
	bodies := map[string]string{
		"tools whose keys are not alphabetical": `{"model":"m","tools":[{"type":"function","function":{"name":"z","parameters":` +
			`{"type":"object","properties":{"zeta":{"type":"string"},"alpha":{"anyOf":[{"b":1},{"a":2}]}}}}}],"messages":[]}`,
		"numbers and odd spacing": " {\"seed\" : 9007199254740993 ,\"temperature\":1.0,\"x\":1e400,\t\"model\":\"m\",\"messages\":[ ] }\n",
		"unknown members":         `{"model":"m","rid":"my-rid","chat_template_kwargs":{"enable_thinking":false},"zz":{"q":[1,{"w":null}]},"messages":[]}`,
		"escapes and unicode":     `{"model":"m","messages":[{"role":"user","content":"\u0041\ud83c\udf0d北\\n"}]}`,
	}
	p, d, pf := onePool(t, testOptions())
	for name, body := range bodies {
		t.Run(name, func(t *testing.T) {
			n := len(d.seen())
			if a := p.post("/v1/chat/completions", body); a.code != 200 {
				t.Fatalf("%d %s", a.code, a.body)
			}
			for _, w := range []*mockWorker{d, pf} {
				if got := string(w.leg(n).body); got != body {
					t.Errorf("%s got\n%s\nwant\n%s", w.name, got, body)
				}
			}
		})
	}
}

// R22, R53, R124, R125: an alias, forged rendezvous members and a billing block
// are edited out by splicing; every other byte stays.
func TestEditsSpliceBytes(t *testing.T) {
	cases := map[string]struct{ in, want string }{
		"an alias becomes the served name": {
			`{"stream":false, "model" : "alias","chat_template_kwargs":{"b":1,"a":2},"messages":[]}`,
			`{"stream":false, "model" : "m","chat_template_kwargs":{"b":1,"a":2},"messages":[]}`},
		"no model is filled in":     {`{"messages":[]}`, `{"messages":[],"model":"m"}`},
		"an empty model is too":     {`{"model":" ","messages":[]}`, `{"model":"m","messages":[]}`},
		"forged rendezvous members": {`{"bootstrap_host":"2.2.2.2","model":"m","bootstrap_port":1,"bootstrap_room":7,"messages":[],"do_local_prefill":true}`, `{"model":"m","messages":[]}`},
		"duplicate forged members":  {`{"model":"m","bootstrap_room":1,"messages":[],"bootstrap_room":2}`, `{"model":"m","messages":[]}`},
		"a disguised member":        {`{"model":"m","bootstrap\u005froom":1,"messages":[]}`, `{"model":"m","messages":[]}`},
		"ranks":                     {`{"routed_dp_rank":1,"data_parallel_rank":2,"model":"m","messages":[]}`, `{"model":"m","messages":[]}`},
	}
	p, d, pf := onePool(t, testOptions())
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			n := len(d.seen())
			if a := p.post("/v1/chat/completions", tc.in); a.code != 200 {
				t.Fatalf("%d %s", a.code, a.body)
			}
			for _, w := range []*mockWorker{d, pf} {
				if got := string(w.leg(n).body); got != tc.want {
					t.Errorf("%s got  %s\nwant %s", w.name, got, tc.want)
				}
			}
		})
	}
}

// R125: the leading block that changes every turn is cut in both legs, so that
// the turns' blocks stay equal; the switch keeps it.
func TestBillingHeaderIsCut(t *testing.T) {
	body := func(n int) string {
		return fmt.Sprintf(`{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":`+
			`"x-anthropic-billing-header: cc=%d"},{"type":"text","text":"%s"}]},{"role":"user","content":"hi"}]}`, n, longText("sys"))
	}
	p, d, pf := onePool(t, testOptions())
	for n := range 2 {
		if a := p.post("/v1/chat/completions", body(n)); a.code != 200 {
			t.Fatalf("%d %s", a.code, a.body)
		}
	}
	for _, w := range []*mockWorker{d, pf} {
		one, two := w.leg(0), w.leg(1)
		if !bytes.Equal(one.body, two.body) || bytes.Contains(one.body, []byte("billing")) {
			t.Errorf("%s got\n%s\nand\n%s", w.name, one.body, two.body)
		}
		if *one.turn.Blocks != *two.turn.Blocks || one.turn.Blocks.Count == 0 {
			t.Errorf("%s: blocks %v and %v, want the same", w.name, one.turn.Blocks, two.turn.Blocks)
		}
	}
	if got := p.sum("kvc_router_billing_header_cuts_total"); got != 2 {
		t.Errorf("cuts counted %v, want 2", got)
	}
	o := testOptions()
	o.KeepBillingHeader = true
	p2, d2, _ := onePool(t, o)
	if p2.post("/v1/chat/completions", body(1)); string(d2.leg(0).body) != body(1) {
		t.Errorf("switched off, the body still changed: %s", d2.leg(0).body)
	}
}

// R23: what is not a JSON object is a 400 that no worker hears of.
func TestBrokenBodies(t *testing.T) {
	p, d := unified(t, testOptions())
	for name, body := range map[string]string{
		"empty": "", "an array": "[]", "a string": `"x"`, "truncated": `{"model":"m","mess`,
		"deep nesting": `{"a":` + strings.Repeat("[", 10000) + strings.Repeat("]", 10000) + `}`,
		"NUL bytes":    "\x00\x00", "trailing bytes": `{"model":"m"} x`,
	} {
		t.Run(name, func(t *testing.T) {
			a := p.post("/v1/chat/completions", body)
			a.wantError(t, 400, "not a JSON object", `"code":"invalid_json"`)
			if a.reason() != reasonBody {
				t.Errorf("reason %q", a.reason())
			}
		})
	}
	if len(d.seen())+len(d.questions()) != 0 {
		t.Error("a worker was contacted")
	}
}

// R28, R65: each refused member is named with its remedy.
func TestRefusedMembers(t *testing.T) {
	p, d, _ := onePool(t, testOptions())
	cases := map[string]struct {
		path, body string
		code       int
		param      string
	}{
		"an unknown model":            {"/v1/chat/completions", `{"model":"gpt-4","messages":[]}`, 404, "model"},
		"a model that is no string":   {"/v1/chat/completions", `{"model":7,"messages":[]}`, 400, "model"},
		"n on chat":                   {"/v1/chat/completions", `{"model":"m","n":3,"messages":[]}`, 400, "n"},
		"n written as 2.0":            {"/v1/chat/completions", `{"model":"m","n":2.0,"messages":[]}`, 400, "n"},
		"n written as a string":       {"/v1/chat/completions", `{"model":"m","n":"2","messages":[]}`, 400, "n"},
		"n beyond every integer":      {"/v1/completions", `{"model":"m","n":99999999999999999999,"prompt":"x"}`, 400, "n"},
		"a string n on /generate":     {"/generate", `{"text":"x","sampling_params":{"n":"2"}}`, 400, "sampling_params.n"},
		"best_of on completions":      {"/v1/completions", `{"model":"m","best_of":2,"prompt":"x"}`, 400, "best_of"},
		"several prompts":             {"/v1/completions", `{"model":"m","prompt":["a","b"]}`, 400, "prompt"},
		"several id prompts":          {"/v1/completions", `{"model":"m","prompt":[[1],[2]]}`, 400, "prompt"},
		"n in sampling_params":        {"/generate", `{"text":"x","sampling_params":{"n":2}}`, 400, "sampling_params.n"},
		"a batch of texts":            {"/generate", `{"text":["a","b"]}`, 400, "text"},
		"a batch of ids":              {"/generate", `{"input_ids":[[1,2],[3]]}`, 400, "input_ids"},
		"a list of sampling settings": {"/generate", `{"text":"a","sampling_params":[{}]}`, 400, "sampling_params"},
		"an object session":           {"/generate", `{"text":"a","session_params":{"id":"s"}}`, 400, "session_params"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			a := p.post(tc.path, tc.body)
			a.wantError(t, tc.code, fmt.Sprintf(`"param":%q`, tc.param), tc.param)
		})
	}
	for name, tc := range map[string]struct{ path, body string }{
		"n of 1":           {"/v1/chat/completions", `{"model":"m","n":1,"messages":[]}`},
		"n of null":        {"/v1/chat/completions", `{"model":"m","n":null,"messages":[]}`},
		"one id prompt":    {"/v1/completions", `{"model":"m","prompt":[1,2,3]}`},
		"ids on /generate": {"/generate", `{"input_ids":[1,2,3],"sampling_params":{"n":1}}`},
	} {
		if a := p.post(tc.path, tc.body); a.code != 200 {
			t.Errorf("%s: %d %s", name, a.code, a.body)
		}
	}
	if n := len(d.seen()); n != 4 {
		t.Errorf("%d turns reached D, want the 4 good ones", n)
	}
	u, _ := unified(t, testOptions())
	if a := u.post("/v1/chat/completions", `{"model":"m","n":3,"messages":[]}`); a.code != 200 {
		t.Errorf("n=3 without disaggregation: %d %s", a.code, a.body)
	}
}

// R25: the limit is configurable, holds with and without a length, and names
// its remedy; what is below passes whole.
func TestBodyLimit(t *testing.T) {
	o := testOptions()
	o.MaxBody = 3 << 20
	p, d := unified(t, o)
	body := func(n int) []byte {
		head := `{"model":"m","messages":[{"role":"user","content":"`
		tail := `"}]}`
		return []byte(head + strings.Repeat("a", n-len(head)-len(tail)) + tail)
	}
	send := func(b []byte, known bool) answer {
		req := p.request(t.Context(), "/v1/chat/completions", b)
		if !known {
			req.Body, req.ContentLength = io.NopCloser(io.MultiReader(bytes.NewReader(b))), -1
		}
		resp, err := p.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got, err := io.ReadAll(resp.Body)
		return answer{resp.StatusCode, resp.Header, got, err}
	}
	for _, known := range []bool{true, false} {
		for _, n := range []int{32<<10 + 1, 1<<20 + 1, 3<<20 - 1, 3 << 20} {
			seen := len(d.seen())
			if a := send(body(n), known); a.code != 200 {
				t.Fatalf("%d bytes (length known: %t): %d %s", n, known, a.code, a.body)
			}
			if got := d.leg(seen).body; !bytes.Equal(got, body(n)) {
				t.Errorf("%d bytes arrived as %d", n, len(got))
			}
		}
		a := send(body(3<<20+1), known)
		a.wantError(t, 413, "3145728", "--max-body-bytes")
	}
	if got := p.sum("kvc_router_refusals_total", "reason=body-too-large"); got != 2 {
		t.Errorf("refusals counted %v, want 2", got)
	}
}

// T2: an upload over the limit never starts.
func TestExpectContinueIsRefusedBeforeTheUpload(t *testing.T) {
	p, _ := unified(t, testOptions())
	c, err := net.Dial("tcp", p.srv.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", int64(1)<<40)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	got := make([]byte, 64)
	n, err := io.ReadAtLeast(c, got, 12)
	if err != nil || !strings.HasPrefix(string(got[:n]), "HTTP/1.1 413") {
		t.Errorf("answer %q, %v; want 413 without 100 Continue", got[:n], err)
	}
}

// R24: agents compress; bombs, unknown codings and corrupt streams are refused.
func TestCompressedBodies(t *testing.T) {
	o := testOptions()
	o.MaxBody = 1 << 20
	p, d := unified(t, o)
	plain := []byte(chatBody("z", false))
	gz := func(b []byte) []byte {
		var buf bytes.Buffer
		w := gzip.NewWriter(&buf)
		_, _ = w.Write(b)
		_ = w.Close()
		return buf.Bytes()
	}
	zs := func(b []byte) []byte {
		w, err := zstd.NewWriter(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		return w.EncodeAll(b, nil)
	}
	bomb := bytes.Repeat([]byte("a"), 2<<20)
	cases := map[string]struct {
		coding string
		body   []byte
		code   int
	}{
		"gzip":             {"gzip", gz(plain), 200},
		"zstd":             {"zstd", zs(plain), 200},
		"identity":         {"identity", plain, 200},
		"gzip in capitals": {"GZIP", gz(plain), 200},
		"a gzip bomb":      {"gzip", gz(bomb), 413},
		"a zstd bomb":      {"zstd", zs(bomb), 413},
		"unknown":          {"br", plain, 415},
		"two codings":      {"gzip, zstd", plain, 415},
		"corrupt gzip":     {"gzip", []byte("not gzip at all"), 400},
		"corrupt zstd":     {"zstd", []byte("not zstd at all"), 400},
		"truncated gzip":   {"gzip", gz(plain)[:20], 400},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			n := len(d.seen())
			a := p.post("/v1/chat/completions", string(tc.body), "Content-Encoding", tc.coding)
			if tc.code != 200 {
				a.wantError(t, tc.code)
				return
			}
			if a.code != 200 {
				t.Fatalf("%d %s", a.code, a.body)
			}
			l := d.leg(n)
			if !bytes.Equal(l.body, plain) || l.header.Get("Content-Encoding") != "" {
				t.Errorf("D got coding %q and %q", l.header.Get("Content-Encoding"), l.body)
			}
		})
	}
}

// R33–R41, R53: what of a client's headers travels to the workers.
func TestOutboundHeaders(t *testing.T) {
	o := testOptions()
	o.Tokens = admission.StaticTokens("pool-token")
	p, d, pf := onePool(t, o)
	a := p.post("/v1/chat/completions", chatBody("s", false),
		"Authorization", "Bearer client-key", "X-Api-Key", "client-key", "Cookie", "k=client-key",
		"X-Custom", "kept", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"Connection", "x-hop", "X-Hop", "1", "Te", "trailers", "Proxy-Authorization", "client-key",
		"X-Kvc-Leg", "decode", "x-kvc-lease", "forged", "X-KVC-Session", "forged", "x-override-bootstrap-host", "2.2.2.2",
		"X-Data-Parallel-Rank", "3", "Accept-Encoding", "br", "X-Request-Id", "rid-1", "Idempotency-Key", "k")
	if a.code != 200 {
		t.Fatalf("%d %s", a.code, a.body)
	}
	for _, w := range []*mockWorker{d, pf} {
		h := w.leg(0).header
		for name, want := range map[string]string{"Authorization": "Bearer pool-token", "X-Custom": "kept",
			"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Request-Id": "rid-1",
			"Accept-Encoding": "identity", "X-Kvc-Wire": "1", "Content-Type": "application/json"} {
			if v := h.Values(name); len(v) != 1 || v[0] != want {
				t.Errorf("%s: %s = %q, want %q once", w.name, name, v, want)
			}
		}
		for _, name := range []string{"X-Api-Key", "Cookie", "X-Hop", "Te", "Proxy-Authorization",
			"X-Override-Bootstrap-Host", "X-Data-Parallel-Rank", "Idempotency-Key"} {
			if v := h.Get(name); v != "" {
				t.Errorf("%s: %s = %q travelled", w.name, name, v)
			}
		}
		if strings.Contains(fmt.Sprint(h), "forged") || strings.Contains(fmt.Sprint(h), "client-key") {
			t.Errorf("%s got forged or secret values: %v", w.name, h)
		}
	}
	// R38: without a token of ours nothing is sent, least of all the client's.
	p2, d2, _ := onePool(t, testOptions())
	p2.post("/v1/chat/completions", chatBody("s", false), "Authorization", "Bearer client-key")
	if v := d2.leg(0).header.Get("Authorization"); v != "" {
		t.Errorf("Authorization %q travelled", v)
	}
}

// R26, R52: a retry carries the same bytes, a fresh attempt id and a fresh room.
func TestRetryCarriesTheSameBytes(t *testing.T) {
	d1, d2 := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	pf := newMockWorker(t, "prefill-0", fleet.Prefill)
	d1.set(func() { d1.play = status(503, `{"error":{"message":"busy","type":"x"}}`) })
	p := newPool(t, testOptions(), d1, d2, pf)
	done := make(chan error, 24)
	for i := range cap(done) {
		go func() {
			body := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(fmt.Sprint(i), 200+rand.IntN(50000)) + `"}]}`
			resp, err := p.client.Do(p.request(t.Context(), "/v1/chat/completions", []byte(body)))
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					err = fmt.Errorf("status %d", resp.StatusCode)
				}
			}
			done <- err
		}()
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	p.quiet()
	rooms, attempts := map[int64]bool{}, map[string]bool{}
	bodies := map[string]int{}
	for _, l := range append(d1.seen(), d2.seen()...) {
		if rooms[l.turn.Bootstrap.Room] || attempts[l.turn.Attempt] {
			t.Error("a room or an attempt id was used twice")
		}
		rooms[l.turn.Bootstrap.Room], attempts[l.turn.Attempt] = true, true
		bodies[string(l.body)]++
	}
	for _, l := range pf.seen() {
		if !rooms[l.turn.Bootstrap.Room] || !attempts[l.turn.Attempt] {
			t.Error("P has a room or an attempt of its own")
		}
	}
	if len(bodies) != cap(done) {
		t.Errorf("%d different bodies arrived, want %d", len(bodies), cap(done))
	}
	if n := len(d1.seen()); n == 0 || p.sum("kvc_router_retries_total", "cause=decode_5xx") != float64(n) {
		t.Errorf("retries counted %v, want %d", p.sum("kvc_router_retries_total"), n)
	}
}
