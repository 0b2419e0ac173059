package conformance

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

// delicate are members that a decode-and-encode round trip would change: order,
// number spelling, escapes, white space, duplicates (R19, R20, R22).
var delicate = map[string]string{
	"tools whose keys are not alphabetical": `"tools":[{"type":"function","function":{"name":"z","parameters":{"type":"object",` +
		`"properties":{"zeta":{"type":"string"},"alpha":{"enum":["b","a"]}},"required":["zeta"]},"description":"d"}}]`,
	"an integer beyond 2^53":      `"seed":9007199254740993`,
	"a float that is whole":       `"temperature":1.0`,
	"odd number spellings":        `"logit_bias":{"50256":-1E+2,"7":1.50,"8":-0.0,"9":1e-7}`,
	"an ordered schema":           `"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"properties":{"b":{"anyOf":[{"type":"null"},{"anyOf":[{"minimum":0}]}]},"a":{}}}}}`,
	"chat_template_kwargs":        `"chat_template_kwargs":{"enable_thinking":false,"x":[1,{"y":null}]}`,
	"escapes and raw characters":  `"user":"\u0041\/\ud83c\udf0d 北 \u2028 <&>"`,
	"white space":                 "\"stop\" :\t[ \"\\n\" ,\n \"x\" ] ",
	"a duplicate of its own":      `"top_p":0.5,"top_p":0.25`,
	"an escaped key":              `"m\u0069n_p":0.1`,
	"fields only engines know":    `"return_hidden_states":true,"custom_logit_processor":"{}","lora_path":null`,
	"an empty key and long value": `"":"` + strings.Repeat("x", 5000) + `"`,
}

// conversation is a chat body with extra members, at turn 0 or 1.
func conversation(k int, extra string) string {
	return kit.Chat("ann", k, k == 1, extra)
}

func TestR19_R20_ByteIdentity(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1, Aliases: []string{"alias"}})
	for name, member := range delicate {
		t.Run(name, func(t *testing.T) {
			d, pre := p.D[0].Engine, p.P[0].Engine
			seed := conversation(0, member)
			wantMode(t, p.OK(kit.Request{Body: seed, Session: name}), kvc.Seed)
			dGot, pGot := d.Last(), pre.Last()
			checkSame(t, "D's seed leg", dGot.Body, seed)
			checkSame(t, "P's leg", pGot.Body, seed)
			for _, key := range injected {
				if a, b := dGot.Member(key), pGot.Member(key); key != "do_local_prefill" && (a == nil || fmt.Sprint(a) != fmt.Sprint(b)) {
					t.Errorf("P and D disagree on %s: %v and %v", key, b, a)
				}
			}
			p.Settled()
			direct := conversation(1, member)
			wantMode(t, p.OK(kit.Request{Body: direct, Session: name}), kvc.Direct)
			got := d.Last()
			checkSame(t, "D's direct leg", got.Body, direct, "stream_options")
			if len(pre.Turns()) == 0 || got.Member("bootstrap_room") != nil || got.Member("do_local_prefill") != true {
				t.Errorf("a direct turn came with %s", got.Body[len(got.Body)-200:])
			}
			// A second edit must not fall back to anything else (R22).
			aliased := strings.Replace(direct, `"model":"m"`, `"model":"alias"`, 1)
			p.OK(kit.Request{Body: aliased, Session: name})
			checkSame(t, "an aliased leg", d.Last().Body, direct, "stream_options")
		})
	}
}

// checkSame compares a worker's body, less what we inject, with the client's.
func checkSame(t *testing.T, what string, got []byte, want string, more ...string) {
	t.Helper()
	for _, key := range append(injected, more...) {
		if n := copies(t, got, key); n > 1 {
			t.Errorf("%s holds %d copies of %s", what, n, key)
		}
	}
	if s := less(t, got, more...); kit.Sum([]byte(s)) != kit.Sum([]byte(want)) {
		t.Errorf("%s differs from the client's body:\n%.600s\n%.600s", what, s, want)
	}
}

// The other surfaces, and the options of a stream that the sidecar edits.
func TestR19_OtherSurfacesAndStreamOptions(t *testing.T) {
	p := unified(t, kit.Options{})
	bodies := map[string]kit.Request{
		"completions":           {Path: "/v1/completions", Body: `{ "prompt" : [1, 2,3],"model":"m", "echo" : true, "seed":9007199254740993 }`},
		"generate":              {Path: "/generate", Body: `{"sampling_params":{"temperature":1.0,"max_new_tokens":4},"input_ids":[7,8],"return_logprob":true}`},
		"generate streams":      {Path: "/generate", Body: `{"text":"x\u0041","stream":true}`},
		"options of the client": {Body: `{"model":"m","stream":true,"stream_options":{"x":1.0,"include_usage":true},"messages":[]}`},
		"usage not asked for":   {Body: `{"model":"m","stream_options":{"include_usage":true},"messages":[]}`},
	}
	for name, r := range bodies {
		t.Run(name, func(t *testing.T) {
			p.OK(r)
			checkSame(t, "the body", p.D[0].Engine.Last().Body, r.Body)
		})
	}
	const in = `{"stream":true,"stream_options" : {"x":1.0, "include_usage" : false,"y":2},"model":"m","messages":[]}`
	a := p.OK(kit.Request{Body: in})
	checkSame(t, "edited options", p.D[0].Engine.Last().Body, strings.Replace(in, "false", "true", 1))
	if strings.Contains(a.Body, `"usage":{`) {
		t.Errorf("R16: the client got usage that it did not ask for: %s", a.Body)
	}
}

// randomJSON draws a value of bounded depth with keys nobody knows.
func randomJSON(r *rand.Rand, depth int) string {
	spaces := []string{"", "", " ", "\n\t"}
	sp := func() string { return spaces[r.IntN(len(spaces))] }
	scalars := []string{"null", "true", "false", "0", "-1.50", "1E3", "9007199254740993", `""`, `"\u00e9\/"`, `"北"`, `"a\"b\\"`}
	if depth == 0 || r.IntN(3) == 0 {
		return scalars[r.IntN(len(scalars))]
	}
	var parts []string
	object := r.IntN(2) == 0
	for i := range r.IntN(4) {
		v := sp() + randomJSON(r, depth-1) + sp()
		if object {
			v = fmt.Sprintf(`%s"k%d_%d":%s`, sp(), r.IntN(1000), i, v)
		}
		parts = append(parts, v)
	}
	if object {
		return "{" + strings.Join(parts, ",") + "}"
	}
	return "[" + strings.Join(parts, ",") + "]"
}

func TestR21_UnknownFieldsArriveOnce(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1})
	rnd := rand.New(rand.NewPCG(21, 1))
	runs := 200
	if testing.Short() {
		runs = 20
	}
	for i := range runs {
		var extra []string
		for j := range 1 + rnd.IntN(5) {
			extra = append(extra, fmt.Sprintf(`"unknown_%d_%d":%s`, rnd.IntN(1000), j, randomJSON(rnd, 3)))
		}
		member := strings.Join(extra, ",")
		session := fmt.Sprint("s", i)
		for k, mode := range []kvc.Mode{kvc.Seed, kvc.Direct} {
			body := conversation(k, member)
			body = strings.Replace(body, "help ann", "help "+session, 1) // one prompt per session
			a := p.OK(kit.Request{Body: body, Session: session})
			wantMode(t, a, mode)
			checkSame(t, "D's body", p.D[0].Engine.Last().Body, body, map[bool][]string{true: {"stream_options"}}[k == 1]...)
			if mode == kvc.Seed {
				checkSame(t, "P's body", p.P[0].Engine.Last().Body, body)
			}
			p.Settled()
		}
		if t.Failed() {
			t.Fatalf("with %s", member)
		}
	}
}

// R53: a client cannot give orders to an engine.
func TestR53_ClientsRendezvousIsStripped(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1})
	const orders = `"bootstrap_room":7,"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_\u0072oom":8,"do_local_prefill":false,` +
		`"rid":"mine","routed_dp_rank":3,"bootstrap_room":9`
	for k, mode := range []kvc.Mode{kvc.Seed, kvc.Direct} {
		a := p.OK(kit.Request{Body: conversation(k, orders), Session: "s"})
		wantMode(t, a, mode)
		got := p.D[0].Engine.Last()
		for _, bad := range []string{`"evil"`, ":7", ":8", ":9,", "mine", "routed_dp_rank"} {
			if strings.Contains(string(got.Body[:300]), bad) {
				t.Errorf("%s: the engine got %s in %.300s", mode, bad, got.Body)
			}
		}
		for _, key := range injected {
			if n := copies(t, got.Body, key); n > 1 {
				t.Errorf("%s: %d copies of %s", mode, n, key)
			}
		}
		if a.Header.Get("X-Request-Id") != "mine" {
			t.Errorf("%s: the client's rid came back as %q", mode, a.Header.Get("X-Request-Id"))
		}
		p.Settled()
	}
}

// sized is a chat body of exactly n bytes.
func sized(n int) string {
	const head, tail = `{"model":"m","messages":[{"role":"user","content":"`, `"}]}`
	return head + strings.Repeat("x", n-len(head)-len(tail)) + tail
}

// The router strips too: a sidecar may be older than it.
func TestR53_StrippedAtTheRouter(t *testing.T) {
	p := unified(t, kit.Options{Peers: true})
	p.OK(kit.Request{Body: conversation(0, `"bootstrap_room":7,"bootstrap_h\u006fst":"evil","do_local_prefill":true,"bootstrap_port":1`)})
	checkSame(t, "the body", p.D[0].Engine.AwaitLegs(1)[0].Body, kit.Chat("ann", 0, false))
	for _, key := range injected {
		if n := copies(t, p.D[0].Engine.AwaitLegs(1)[0].Body, key); n != 0 {
			t.Errorf("%d copies of %s passed the router", n, key)
		}
	}
}

func TestR25_BodySizes(t *testing.T) {
	const limit = 2 << 20
	log := logged()
	p := unified(t, kit.Options{Log: log, Router: func(o *proxy.Options) { o.MaxBody = limit }})
	for name, n := range map[string]int{"32 KiB + 1": 32<<10 + 1, "1 MiB + 1": 1<<20 + 1,
		"limit - 1": limit - 1, "limit": limit, "limit + 1": limit + 1} {
		for length, chunked := range map[string]bool{"with Content-Length": false, "chunked": true} {
			t.Run(name+" "+length, func(t *testing.T) {
				before := p.Metric("kvc_router_refusals_total", "reason", "body-too-large")
				a := send(t, p, sized(n), chunked)
				if n <= limit {
					if a.Status != http.StatusOK {
						t.Fatalf("status %d: %s", a.Status, a.Body)
					}
					checkSame(t, "the body", p.D[0].Engine.Last().Body, sized(n))
					return
				}
				wantJSONError(t, a, http.StatusRequestEntityTooLarge)
				if got := p.Metric("kvc_router_refusals_total", "reason", "body-too-large"); got != before+1 {
					t.Errorf("refusals went from %v to %v", before, got)
				}
				if !strings.Contains(log.String(), "body over the limit") {
					t.Error("no log line tells of it")
				}
			})
		}
	}
	t.Run("a claimed length over the limit is refused before the upload (T2)", func(t *testing.T) {
		c := kit.Dial(t, p.Addr)
		c.Send(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n", limit+1))
		if resp := c.Response(); resp.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("status %d before a byte of the body", resp.StatusCode)
		}
	})
}

func TestR25_DefaultLimit(t *testing.T) {
	if proxy.DefaultMaxBody < 64<<20 {
		t.Errorf("default limit %d, want at least 64 MiB", proxy.DefaultMaxBody)
	}
	p := unified(t, kit.Options{})
	body := sized(16 << 20)
	if a := send(t, p, body, true); a.Status != http.StatusOK {
		t.Fatalf("status %d: %.300s", a.Status, a.Body)
	}
	if got := less(t, p.D[0].Engine.Last().Body); got != body {
		t.Errorf("%d bytes arrived of %d, or others", len(got), len(body))
	}
}

// send posts a body, with its length or in chunks.
func send(t *testing.T, p *kit.Pool, body string, chunked bool) kit.Answer {
	t.Helper()
	var r io.Reader = strings.NewReader(body)
	if chunked {
		r = io.MultiReader(r) // hides the length
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.Base+"/v1/chat/completions", r)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := p.Client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return kit.Answer{Status: resp.StatusCode, Header: resp.Header, Body: string(b), Err: err}
}

func TestR26_RetrySendsTheWholeBodyAgain(t *testing.T) {
	p := kit.New(t, kit.Options{Decode: 2, Prefill: 1})
	p.D[0].Engine.Always(func(ex *kit.Exchange) {
		if ex.Seen.Member("rid") != nil {
			ex.JSON(http.StatusServiceUnavailable, `{"error":"`+strings.Repeat("busy ", 2000)+`"}`)
			return
		}
		ex.JSON(http.StatusOK, `{}`)
	})
	var wg sync.WaitGroup
	var mu sync.Mutex
	want := map[string]bool{}
	for i := range 200 {
		wg.Go(func() {
			body := kit.Chat(fmt.Sprint("client ", i), 0, false)
			mu.Lock()
			want[kit.Sum([]byte(body))] = true
			mu.Unlock()
			if a := p.Do(kit.Request{Body: body}); a.Status != http.StatusOK {
				t.Errorf("status %d: %.200s", a.Status, a.Body)
			}
		})
	}
	wg.Wait()
	got := map[string]bool{}
	for _, s := range p.D[1].Engine.Turns() {
		got[kit.Sum([]byte(less(t, s.Body)))] = true
	}
	for sum := range want {
		if !got[sum] {
			t.Error("a body did not arrive at the second worker as it was sent")
		}
	}
	if p.Metric("kvc_router_retries_total") == 0 || len(p.D[0].Engine.Turns()) == 0 {
		t.Error("nothing was retried: the repro is no repro")
	}
	p.Quiet()
	p.Client.CloseIdleConnections()
	if n := p.D[0].Engine.OpenConns(); n > 250 {
		t.Errorf("%d connections to the refusing worker are open", n)
	}
}

// R125: the header that changes every turn is cut in both legs; all else stays.
func TestR125_BillingHeader(t *testing.T) {
	header := func(k int) string {
		return fmt.Sprintf("x-anthropic-billing-header: cc_version=2.1.%d; cc_entrypoint=cli; cch=%05x;", k, 7919*k)
	}
	marker := `,"cache_control":{"type":"ephemeral"}`
	turn := func(k int, system string) string {
		var m []string
		for i := range 2*k + 1 {
			mark := ""
			if i >= 2*k-1 {
				mark = marker
			}
			m = append(m, fmt.Sprintf(`{"role":"%s","content":[{"type":"text","text":"%s"%s}]}`,
				[]string{"user", "assistant"}[i%2], strings.Repeat(fmt.Sprint("message ", i, " "), 20), mark))
		}
		return `{"model":"m","messages":[{"role":"system","content":` + system + `},` + strings.Join(m, ",") + `]}`
	}
	prompt := strings.Repeat("You are an agent. ", 40)
	shapes := map[string]func(header string) string{
		"a block of its own": func(h string) string {
			if h != "" {
				h = `{"type":"text","text":"` + h + `"}, `
			}
			return `[` + h + `{"type":"text","text":"` + prompt + `"}]`
		},
		"one string": func(h string) string {
			if h != "" {
				h += `\n\n`
			}
			return `"` + h + prompt + `"`
		},
	}
	for name, system := range shapes {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Prefill: 1})
			for k := range 10 {
				a := p.OK(kit.Request{Body: turn(k, system(header(k))), Session: name})
				want := turn(k, system(""))
				wantMode(t, a, map[bool]kvc.Mode{true: kvc.Seed, false: kvc.Direct}[k == 0])
				checkSame(t, "D's body", p.D[0].Engine.Last().Body, want)
				if k == 0 {
					checkSame(t, "P's body", p.P[0].Engine.Last().Body, want)
				}
				p.Settled()
			}
			if got := p.Metric("kvc_router_billing_header_cuts_total"); got != 10 {
				t.Errorf("%v cuts were counted, want 10", got)
			}
			if n := p.D[0].Metric(t, "kvc_sidecar_block_mismatches_total"); n != 0 {
				t.Errorf("router and sidecar hashed different prompts %v times", n)
			}
		})
	}
	t.Run("switched off", func(t *testing.T) {
		p := unified(t, kit.Options{Router: func(o *proxy.Options) { o.KeepBillingHeader = true }})
		body := turn(1, shapes["one string"](header(1)))
		p.OK(kit.Request{Body: body})
		checkSame(t, "the body", p.D[0].Engine.Last().Body, body)
	})
}

// R23: what is no JSON object is refused before anyone is asked.
func TestR23_BrokenBodies(t *testing.T) {
	p := unified(t, kit.Options{})
	before := len(p.D[0].Engine.Turns())
	for name, body := range map[string]string{
		"empty": "", "an array": "[]", "a string": `"x"`, "cut off": `{"model":"m","messages":[`,
		"10,000 deep":  `{"messages":` + strings.Repeat("[", 10_000) + strings.Repeat("]", 10_000) + `}`,
		"NUL bytes":    "{\"model\":\"m\x00\"}",
		"trailing":     `{"model":"m","messages":[]}x`,
		"no messages":  `{"model":"m"}`,
		"odd messages": `{"model":"m","messages":"hi"}`,
	} {
		t.Run(name, func(t *testing.T) {
			wantJSONError(t, p.Do(kit.Request{Body: body}), http.StatusBadRequest)
		})
	}
	if n := len(p.D[0].Engine.Turns()); n != before {
		t.Errorf("%d broken requests reached the engine", n-before)
	}
	if p.Metric("kvc_router_breaker_open") != 0 {
		t.Error("a breaker is open")
	}
}
