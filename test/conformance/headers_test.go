package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

// connectionHeaders belong to one connection and never cross (R35).
var connectionHeaders = []string{
	"Connection", "Keep-Alive", "TE", "Trailer", "Upgrade", "Proxy-Authorization", "Proxy-Authenticate",
	"Proxy-Connection", "X-Foo", "X-Trailed", "HTTP2-Settings",
}

func TestR35_HopByHopHeadersOfTheRequest(t *testing.T) {
	for name, peers := range map[string]bool{"at the engine": false, "at the sidecar": true} {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Prefill: 1, Peers: peers})
			c := kit.Dial(t, p.Addr)
			body := kit.Chat("ann", 0, false)
			c.Send("POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n" +
				"Connection: keep-alive, X-Foo\r\nconnection: te\r\nX-Foo: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nUpgrade: h2c\r\n" +
				"Proxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n" +
				"X-Stays: yes\r\nTrailer: X-Trailed\r\nTransfer-Encoding: chunked\r\n\r\n" +
				fmt.Sprintf("%x\r\n%s\r\n0\r\nX-Trailed: 1\r\n\r\n", len(body), body))
			if a := c.Answer(); a.Status != http.StatusOK {
				t.Fatalf("status %d: %s", a.Status, a.Body)
			}
			for _, n := range p.Nodes() {
				got := n.Engine.AwaitLegs(1)[0]
				for _, h := range connectionHeaders {
					if hasHeader(got.Head, h) {
						t.Errorf("%s got %s in\n%s", n.Name, h, got.Head)
					}
				}
				if hasHeader(got.Head, "Transfer-Encoding") || !hasHeader(got.Head, "Content-Length") || !hasHeader(got.Head, "X-Stays") {
					t.Errorf("%s got\n%s", n.Name, got.Head)
				}
			}
		})
	}
}

func TestR35_HopByHopHeadersOfTheAnswer(t *testing.T) {
	const head = "HTTP/1.1 200 OK\r\nConnection: keep-alive, X-Foo\r\nX-Foo: 1\r\nKeep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\n" +
		"Proxy-Connection: close\r\nUpgrade: h2c\r\nTE: trailers\r\nTrailer: X-Trailed\r\nSet-Cookie: a=1\r\nSet-Cookie: b=2\r\n" +
		"X-Kvc-Worker: forged\r\nX-Stays: yes\r\n"
	whole := `{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}]}`
	stream := kit.Token("hi") + kit.Finish("stop") + kit.Done
	for name, tc := range map[string]struct{ answer, body string }{
		"whole": {head + fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(whole), whole), whole},
		"whole, in chunks": {head + "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" +
			fmt.Sprintf("%x\r\n%s\r\n0\r\nX-Trailed: 1\r\n\r\n", len(whole), whole), whole},
		"a stream with a length (R36)": {head + fmt.Sprintf("Content-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s", len(stream), stream), stream},
		"a refusal":                    {strings.Replace(head, "200 OK", "400 No", 1) + fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(whole), whole), whole},
	} {
		for from, peers := range map[string]bool{"an engine": false, "a sidecar": true} {
			t.Run(name+", of "+from, func(t *testing.T) {
				p := unified(t, kit.Options{Peers: peers})
				p.D[0].Engine.Always(func(ex *kit.Exchange) { ex.Raw(tc.answer) })
				c := kit.Dial(t, p.Addr)
				c.Post("/v1/chat/completions", streamBody)
				a := c.Answer()
				if a.Body != tc.body {
					t.Errorf("body %q, want %q", a.Body, tc.body)
				}
				if strings.Contains(name, "stream") && a.Header.Get("Content-Length") != "" {
					t.Errorf("R36: a stream came with Content-Length %s", a.Header.Get("Content-Length"))
				}
				checkAnswerHeader(t, a.Header)
			})
		}
	}
}

func checkAnswerHeader(t *testing.T, got http.Header) {
	t.Helper()
	for _, h := range connectionHeaders {
		if v := got.Get(h); v != "" && h != "Connection" {
			t.Errorf("the client got %s: %s", h, v)
		}
	}
	if strings.Contains(strings.ToLower(got.Get("Connection")), "x-foo") || got.Get("X-Kvc-Worker") == "forged" {
		t.Errorf("headers %v", got)
	}
	if got.Get("X-Stays") != "yes" || len(got["Set-Cookie"]) != 2 {
		t.Errorf("end-to-end headers were lost: %v", got)
	}
}

func TestR38_CredentialsOfEachSide(t *testing.T) {
	const client, pool, engine = "client-key-K1", "pool-token", "engine-key-K2"
	for name, key := range map[string]string{"with an engine key": engine, "without one": ""} {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Prefill: 1, PoolToken: pool, EngineKey: key})
			h := http.Header{"Authorization": {"Bearer " + client}, "X-Api-Key": {client}, "Api-Key": {client}, "Cookie": {"k=" + client}}
			for route, r := range surfaces(true) {
				r.Header, r.Session = h, route
				p.OK(r)
			}
			p.OK(kit.Request{Body: kit.Chat("ann", 0, false), Header: h, Session: "s"})
			p.Settled()
			wantMode(t, p.OK(kit.Request{Body: kit.Chat("ann", 1, false), Header: h, Session: "s"}), kvc.Direct)
			models(t, p, h)
			cancelOne(t, p, h) // so that /abort_request is called too
			for _, n := range p.Nodes() {
				checkKeys(t, n, 4, key, client, pool)
			}
		})
	}
	t.Run("what the router says to sidecars", func(t *testing.T) {
		p := kit.New(t, kit.Options{Prefill: 1, PoolToken: pool, Peers: true})
		h := http.Header{"Authorization": {"Bearer " + client}, "X-Api-Key": {client}}
		p.OK(kit.Request{Body: kit.Chat("ann", 0, false), Header: h, Session: "s"})
		p.Settled()
		p.OK(kit.Request{Body: kit.Chat("ann", 1, false), Header: h, Session: "s"})
		for _, n := range p.Nodes() {
			checkKeys(t, n, map[fleet.Role]int{fleet.Decode: 4, fleet.Prefill: 2}[n.Role], pool, client, engine)
		}
	})
}

// checkKeys checks every request that a worker got, turns and all others; they
// have to cover some number of routes.
func checkKeys(t *testing.T, n *kit.Node, routes int, want string, never ...string) {
	t.Helper()
	if want != "" {
		want = "Bearer " + want
	}
	paths := map[string]bool{}
	for _, s := range n.Engine.AwaitLegs(1) {
		paths[s.Path] = true
		if got := strings.Join(s.Header["Authorization"], "|"); got != want {
			t.Errorf("%s: a turn came with Authorization %q, want %q", n.Name, got, want)
		}
		for _, bad := range never {
			if strings.Contains(s.Head, bad) {
				t.Errorf("%s: a key of another side leaked:\n%s", n.Name, s.Head)
			}
		}
		if n.Peer == nil && hasHeaderPrefix(s.Head, "x-kvc-") {
			t.Errorf("R41: %s got our own headers:\n%s", n.Name, s.Head)
		}
	}
	for _, r := range n.Engine.Control() {
		paths[r.URL.Path] = true
		if got := r.Header.Get("Authorization"); got != want {
			t.Errorf("%s: %s came with Authorization %q, want %q", n.Name, r.URL.Path, got, want)
		}
	}
	if len(paths) < routes {
		t.Errorf("%s: only %v were called: the case covers too little", n.Name, paths)
	}
}

func models(t *testing.T, p *kit.Pool, h http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.Base+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = h.Clone()
	resp, err := p.Client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("/v1/models: status %d", resp.StatusCode)
	}
}

// cancelOne starts a direct turn of session s and hangs up.
func cancelOne(t *testing.T, p *kit.Pool, h http.Header) {
	t.Helper()
	p.Settled()
	d := p.D[0].Engine
	n := len(d.Turns())
	d.Next(func(ex *kit.Exchange) { ex.Hang() })
	stop, done := p.Start(kit.Request{Body: kit.Chat("ann", 2, true), Header: h, Session: "s"})
	d.AwaitTurns(n + 1)
	stop()
	<-done
	d.AwaitAborts(1)
}

func hasHeaderPrefix(head, prefix string) bool {
	return strings.Contains(strings.ToLower(head), "\r\n"+prefix)
}

func TestR83_SessionsByWhateverName(t *testing.T) {
	spellings := []struct {
		header http.Header
		body   string
		source string
	}{
		{http.Header{"X-Session-Id": {"s"}}, "", "header:x-session-id"},
		{http.Header{"X_session_id": {"s"}}, "", "header:x-session-id"},
		{http.Header{"x-SESSION-id": {"s"}}, "", "header:x-session-id"},
		{http.Header{"Session-Id": {"s"}}, "", "header:session-id"},
		{http.Header{"session_id": {"s"}}, "", "header:session-id"},
		{http.Header{"X-Claude-Code-Session-Id": {"s"}}, "", "header:x-claude-code-session-id"},
		{http.Header{"X-Kvc-Session": {"s"}}, "", "header:x-kvc-session"},
		{nil, `"session_id":"s"`, "body:session_id"},
		{nil, `"prompt_cache_key":"s"`, "body:prompt_cache_key"},
		{http.Header{"X-Session-Id": {"other"}, "Session-Id": {"s"}}, `"session_id":"third"`, "header:session-id"}, // first in the list
	}
	p := kit.New(t, kit.Options{Decode: 3, Prefill: 1})
	// Two sessions share every prompt, so only the id can tell them apart.
	home := p.OK(kit.Request{Body: kit.Chat("ann", 0, false), Session: "s"}).Header.Get("X-Kvc-Worker")
	p.Settled()
	for k, s := range spellings {
		before := p.Metric("kvc_router_session_source_total", "source", s.source)
		var extra []string
		if s.body != "" {
			extra = append(extra, s.body)
		}
		c := kit.Dial(t, p.Addr)
		var head []string
		for name, values := range s.header {
			head = append(head, name+": "+values[0])
		}
		c.Post("/v1/chat/completions", kit.Chat("ann", k+1, false, extra...), head...)
		a := c.Answer()
		if a.Header.Get("X-Kvc-Worker") != home {
			t.Errorf("%v %s: served by %s, the session is on %s", s.header, s.body, a.Header.Get("X-Kvc-Worker"), home)
		}
		wantMode(t, a, kvc.Direct)
		if got := p.Metric("kvc_router_session_source_total", "source", s.source); got != before+1 {
			t.Errorf("%v %s: the source %s was not counted", s.header, s.body, s.source)
		}
		p.Settled()
	}
	if n := p.D[0].Status(p).Sessions + p.D[1].Status(p).Sessions + p.D[2].Status(p).Sessions; n != 1 {
		t.Errorf("%d sessions are resident, want the one", n)
	}
}

// R84: ids that are new in every request are no sessions.
func TestR84_RequestIDsAreNoSessions(t *testing.T) {
	p := kit.New(t, kit.Options{Prefill: 1})
	for k := range 4 {
		h := http.Header{"X-Request-Id": {fmt.Sprint("req", k)}, "Traceparent": {fmt.Sprintf("00-%032x-%016x-01", k+1, k+1)}}
		a := p.OK(kit.Request{Body: kit.Chat("ann", k, false), Header: h})
		wantMode(t, a, map[bool]kvc.Mode{true: kvc.Seed, false: kvc.Direct}[k == 0]) // continued by its text (Q18)
		p.Settled()
	}
	if n := p.D[0].Status(p).Sessions; n != 1 {
		t.Errorf("%d sessions, want one conversation", n)
	}
}

// R85: hostile ids fail nothing.
func TestR85_HostileSessionIDs(t *testing.T) {
	p := unified(t, kit.Options{})
	for name, r := range map[string]kit.Request{
		"10 KiB":            {Session: strings.Repeat("x", 10<<10)},
		"blank":             {Session: " "},
		"a newline, body":   {Body: kit.Chat("a", 0, false, `"session_id":"a\nb"`)},
		"a NUL, body":       {Body: kit.Chat("a", 0, false, `"session_id":"\u0000"`)},
		"a megabyte, body":  {Body: kit.Chat("a", 0, false, `"session_id":"`+strings.Repeat("x", 1<<20)+`"`)},
		"an object, body":   {Body: kit.Chat("a", 0, false, `"session_id":{"a":1}`)},
		"quotes and braces": {Session: `"},{"`},
	} {
		t.Run(name, func(t *testing.T) {
			if r.Body == "" {
				r.Body = kit.Chat("a", 0, false)
			}
			p.OK(r)
		})
	}
	for i := range 500 {
		p.OK(kit.Request{Body: `{"model":"m","messages":[]}`, Session: fmt.Sprintf("%064x", i)})
	}
}
