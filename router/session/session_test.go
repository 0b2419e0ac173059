package session_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
	"github.com/kvc-dev/kvc/router/session"
)

func body(t testing.TB, s string) *scan.Body {
	t.Helper()
	b, err := scan.Parse([]byte(s), scan.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// headers builds a header map as net/http would; the names stay as given.
func headers(kv ...string) map[string][]string {
	h := map[string][]string{}
	for i := 0; i < len(kv); i += 2 {
		h[kv[i]] = append(h[kv[i]], kv[i+1])
	}
	return h
}

// R83: whatever the client and the proxies before us make of the name.
func TestR83Sources(t *testing.T) {
	cases := map[string]struct {
		header map[string][]string
		body   string
		want   session.ID
	}{
		"the usual spelling":           {headers("X-Session-Id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"underscores":                  {headers("X_session_id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"any case":                     {headers("x-SESSION-iD", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"mixed - and _":                {headers("x_session-id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"Codex":                        {headers("Session_id", "s"), `{}`, session.ID{Raw: "s", Source: "header:session-id"}},
		"Claude Code":                  {headers("X-Claude-Code-Session-Id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-claude-code-session-id"}},
		"our own":                      {headers("X-Kvc-Session", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-kvc-session"}},
		"a body field":                 {nil, `{"prompt_cache_key":"s"}`, session.ID{Raw: "s", Source: "body:prompt_cache_key"}},
		"a nested body field":          {nil, `{"session_params":{"id":"s"}}`, session.ID{Raw: "s", Source: "body:session_params.id"}},
		"an escaped body field":        {nil, `{"session\u005fid":"\u0073"}`, session.ID{Raw: "s", Source: "body:session_id"}},
		"a conflict: first in list":    {headers("X-Session-Id", "b", "Session-Id", "a"), `{"session_id":"c"}`, session.ID{Raw: "a", Source: "header:session-id"}},
		"two spellings: hyphens win":   {headers("X_session_id", "b", "X-Session-Id", "a"), `{}`, session.ID{Raw: "a", Source: "header:x-session-id"}},
		"a header before the body":     {headers("X-Session-Id", "a"), `{"session_id":"c"}`, session.ID{Raw: "a", Source: "header:x-session-id"}},
		"space around it":              {headers("X-Session-Id", " \ts "), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"an empty value passes on":     {headers("Session-Id", "", "X-Session-Id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"the second value of a header": {headers("Session-Id", " ", "Session-Id", "s"), `{}`, session.ID{Raw: "s", Source: "header:session-id"}},
		"a null field passes on":       {nil, `{"prompt_cache_key":null,"session_id":"s"}`, session.ID{Raw: "s", Source: "body:session_id"}},
		"a number is no id":            {nil, `{"prompt_cache_key":7,"session_params":"x","session_id":"s"}`, session.ID{Raw: "s", Source: "body:session_id"}},
		"a parent": {headers("X-Session-Id", "s", "X_parent_session_id", "p"), `{}`,
			session.ID{Raw: "s", Parent: "p", Source: "header:x-session-id"}},
		"its own parent is none": {headers("X-Session-Id", "s", "X-Parent-Session-Id", "s"), `{}`, session.ID{Raw: "s", Source: "header:x-session-id"}},
		"a sub-agent is a child": {headers("X-Claude-Code-Session-Id", "s", "X-Claude-Code-Agent-Id", "a1"), `{}`,
			session.ID{Raw: "s/a1", Parent: "s", Source: "header:x-claude-code-session-id"}},
		"a sub-agent of a sub-agent": {headers("X-Claude-Code-Session-Id", "s", "X-Claude-Code-Agent-Id", "a2", "X-Claude-Code-Parent-Agent-Id", "a1"), `{}`,
			session.ID{Raw: "s/a2", Parent: "s/a1", Source: "header:x-claude-code-session-id"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, ok := session.FromRequest(session.Default(), tc.header, body(t, tc.body))
			if !ok {
				t.Fatal("no id found")
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("FromRequest (-want +got):\n%s", diff)
			}
		})
	}
}

func TestR83ConfiguredNames(t *testing.T) {
	c := session.Config{Headers: []string{"My_Session"}, BodyFields: []string{"a.b.c"}}
	if id, ok := session.FromRequest(c, headers("My-Session", "s"), nil); !ok || id.Source != "header:My_Session" {
		t.Errorf("FromRequest = %+v, %v", id, ok)
	}
	if id, ok := session.FromRequest(c, headers("X-Session-Id", "s"), body(t, `{"a":{"b":{"c":"d"}}}`)); !ok || id.Raw != "d" {
		t.Errorf("FromRequest = %+v, %v, want the nested field and not an unlisted header", id, ok)
	}
}

// R84: an id per request is no session, even where somebody configured it.
func TestR84RequestIDsAreNoSessions(t *testing.T) {
	perRequest := []string{"X-Request-Id", "x_request_id", "Request-Id", "X-Correlation-ID", "Traceparent", "X-Amzn-Trace-Id", "Idempotency-Key", "rid"}
	h := map[string][]string{}
	for _, name := range perRequest {
		h[name] = []string{"abc"}
	}
	c := session.Default()
	if id, ok := session.FromRequest(c, h, body(t, `{"rid":"abc","user":"u","messages":[]}`)); ok {
		t.Errorf("FromRequest = %+v, want none", id)
	}
	for _, name := range perRequest {
		c := session.Config{Headers: []string{name}, BodyFields: []string{name}}
		if id, ok := session.FromRequest(c, h, body(t, `{"rid":"abc"}`)); ok {
			t.Errorf("%s: FromRequest = %+v, want none", name, id)
		}
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("Validate = %v, want %s named", err, name)
		}
	}
	if err := c.Validate(); err != nil {
		t.Errorf("the default is refused: %v", err)
	}
	if err := (session.Config{Headers: []string{" "}}).Validate(); err == nil {
		t.Error("an empty name is accepted")
	}
}

// R85: hostile ids neither fail a request nor fill memory.
func TestR85HostileIDs(t *testing.T) {
	long := strings.Repeat("a", 10<<10)
	cases := map[string]struct {
		value string
		want  bool
	}{
		"empty":             {"", false},
		"blank":             {" \t ", false},
		"a newline":         {"a\nb", false},
		"a carriage return": {"a\rSet-Cookie: x", false},
		"a NUL":             {"a\x00b", false},
		"DEL":               {"a\x7f", false},
		"10 KiB":            {long, true},
		"at the limit":      {strings.Repeat("a", session.MaxID), true},
		"invalid UTF-8":     {"a\xffb", true},
		"odd characters":    {`../"<script>;`, true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			inHeader, ok := session.FromRequest(session.Default(), headers("X-Session-Id", tc.value), nil)
			if ok != tc.want || len(inHeader.Raw) > session.MaxID {
				t.Errorf("header: %+v, %v", inHeader, ok)
			}
			inBody, ok := session.FromRequest(session.Default(), nil, body(t, `{"session_id":`+string(scan.Quoted(tc.value))+`}`))
			if ok != tc.want || inBody.Raw != inHeader.Raw {
				t.Errorf("body: %+v, %v, header said %q", inBody, ok, inHeader.Raw)
			}
		})
	}
	one, _ := session.FromRequest(session.Default(), headers("X-Session-Id", long), nil)
	two, _ := session.FromRequest(session.Default(), headers("X-Session-Id", long+"b"), nil)
	again, _ := session.FromRequest(session.Default(), headers("X-Session-Id", long), nil)
	if one == two || one != again {
		t.Errorf("long ids: %v, %v, %v, want equal for equal", one, two, again)
	}
	child, _ := session.FromRequest(session.Default(), headers("X-Session-Id", strings.Repeat("s", 200), "X-Claude-Code-Agent-Id", strings.Repeat("a", 200)), nil)
	if len(child.Raw) > session.MaxID {
		t.Errorf("a child's id has %d bytes", len(child.Raw))
	}
}

func TestKey(t *testing.T) {
	// The vectors are xxh3_64 of the bytes in wire.md §0.
	for args, want := range map[[3]string]kvc.SessionKey{
		{"local", "demo", "s1"}: "a25b1b25dd379bb9",
		{"llm", "qwen3-32b", "derived:000102030405060708090a0b0c0d0e0f"}: "1ea52f86caff7773",
	} {
		if got := session.Key(args[0], args[1], args[2]); got != want {
			t.Errorf("Key(%v) = %s, want %s", args, got, want)
		}
	}
	if want := xxh3.HashString("kvc-session-v1\x00ns/pool\x00id"); string(session.Key("ns", "pool", "id")) != fmt.Sprintf("%016x", want) {
		t.Errorf("Key is not xxh3_64 of the documented bytes, %016x", want)
	}
	if session.Key("a", "b", "s") == session.Key("a", "c", "s") || session.Key("a", "b", "s") == session.Key("a", "b", "t") {
		t.Error("keys of different pools or ids are equal")
	}
}

func TestDerived(t *testing.T) {
	if got := session.Derived([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff}); got != "derived:000102030405060708090a0b0c0d0eff" {
		t.Errorf("Derived = %s", got)
	}
}

type tails map[block.Hash]kvc.SessionKey

func (t tails) ByTail(h block.Hash) (key, lineage kvc.SessionKey, ok bool) {
	key, ok = t[h]
	return key, "root-of-" + key, ok
}

// Q18: a request without an id continues the conversation with the deepest tail.
func TestQ18Continue(t *testing.T) {
	known := tails{3: "shallow", 5: "deep", 99: "other"}
	cases := map[string]struct {
		blocks []block.Hash
		want   kvc.SessionKey
	}{
		"the deepest tail wins":                {[]block.Hash{1, 2, 3, 4, 5, 6, 7}, "deep"},
		"the tail may be the last block":       {[]block.Hash{1, 2, 3, 4, 5}, "deep"},
		"an earlier fork continues its own":    {[]block.Hash{1, 2, 3, 8}, "shallow"},
		"a first turn continues nobody":        {[]block.Hash{1, 2}, ""},
		"a prompt below one block is nobody's": {nil, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			key, lineage, ok := session.Continue(tc.blocks, known)
			if key != tc.want || ok != (tc.want != "") {
				t.Errorf("Continue = %q, %v, want %q", key, ok, tc.want)
			}
			if ok && lineage != "root-of-"+key || !ok && lineage != "" {
				t.Errorf("lineage = %q", lineage)
			}
		})
	}
}

func FuzzFromRequest(f *testing.F) {
	f.Add("X-Session-Id", "s", `{"session_id":"x"}`)
	f.Add("x_session_id", "a\nb", `{"session_params":{"id":"x"}}`)
	f.Fuzz(func(t *testing.T, name, value, raw string) {
		b, err := scan.Parse([]byte(raw), scan.Limits{})
		if err != nil {
			b = nil
		}
		id, ok := session.FromRequest(session.Default(), map[string][]string{name: {value}, "X-Claude-Code-Agent-Id": {value}}, b)
		if ok != (id.Raw != "") || len(id.Raw) > session.MaxID || len(id.Parent) > session.MaxID || strings.ContainsAny(id.Raw+id.Parent, "\r\n\x00") {
			t.Fatalf("FromRequest = %+v, %v", id, ok)
		}
	})
}

func BenchmarkFromRequest(b *testing.B) {
	h := http.Header{}
	for _, name := range []string{"Accept", "Accept-Encoding", "Authorization", "Content-Length", "Content-Type", "User-Agent", "X-Stainless-Lang", "X-Stainless-Os", "X-Stainless-Runtime", "X-Session-Id"} {
		h.Set(name, "some value")
	}
	c := session.Default()
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := session.FromRequest(c, h, nil); !ok {
			b.Fatal("no id")
		}
	}
}
