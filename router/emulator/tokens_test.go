package emulator

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/scan"
)

// Any bytes come back from their ids, and no id leaves 31 bits.
func TestTokensAreReversible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.SliceOf(rapid.Byte()).Draw(t, "text")
		ids := appendTokens(nil, text)
		for _, id := range ids {
			if id < 0 || isSpecial(id) {
				t.Fatalf("id %d is negative or special", id)
			}
		}
		if got := tokensText(ids); got != string(text) {
			t.Fatalf("%q came back as %q", text, got)
		}
	})
}

func TestPieces(t *testing.T) {
	cases := map[string]struct {
		text string
		want []string
	}{
		"ASCII is cut every four bytes":                  {"hello there", []string{"hell", "o th", "ere"}},
		"other text is cut every three bytes":            {"日本", []string{"日", "本"}},
		"a piece with one other byte has three":          {"abé!!", []string{"ab\xc3", "\xa9!!"}},
		"a tail of one byte":                             {"hello", []string{"hell", "o"}},
		"nothing":                                        {"", nil},
		"zero bytes are bytes":                           {"\x00\x00\x00\x00\x00", []string{"\x00\x00\x00\x00", "\x00"}},
		"a short tail that is not ASCII is packed whole": {"abcdé", []string{"abcd", "\xc3\xa9"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, id := range appendTokens(nil, []byte(tc.text)) {
				got = append(got, string(appendText(nil, id)))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("pieces %q, want %q", got, tc.want)
			}
		})
	}
}

func quoted(s string) string { return string(scan.Quoted(s)) }

func chatIDs(t interface{ Fatal(...any) }, messages string) []int32 {
	b, err := scan.Parse([]byte(`{"messages":[`+messages+`]}`), scan.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	prompts, err := chatPrompt(b)
	if err != nil {
		t.Fatal(err)
	}
	return prompts[0]
}

// What makes Direct turns possible: the next turn's prompt begins with this
// turn's prompt and the ids that were generated, end token included.
func TestTheNextTurnBeginsWithThisOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		role := rapid.SampledFrom([]string{"system", "user", "tool", "narrator"})
		history := ""
		for range rapid.IntRange(0, 4).Draw(t, "messages") {
			history += fmt.Sprintf(`{"role":%q,"content":%s},`, role.Draw(t, "role"), quoted(rapid.String().Draw(t, "text")))
		}
		history += `{"role":"user","content":"go on"}`
		prompt := chatIDs(t, history)

		w := newWriter(rapid.Uint64().Draw(t, "seed"), prompt, 0)
		w.plan(rapid.IntRange(1, 600).Draw(t, "limit"), 0, rapid.Bool().Draw(t, "ignoreEOS"))
		var out []int32
		for i := range w.total() {
			out = append(out, w.token(i))
		}
		answer := tokensText(out)
		next := chatIDs(t, history+`,{"role":"assistant","content":`+quoted(strings.TrimSpace(answer))+`},{"role":"user","content":"more"}`)
		want := slices.Concat(prompt, out)
		if w.stop && want[len(want)-1] != tokEnd || !slices.Equal(next[:len(want)], want) {
			t.Fatalf("the next turn does not begin with prompt and answer %q", answer)
		}
	})
}

func TestWriterLengths(t *testing.T) {
	cases := map[string]struct {
		limit, least int
		ignore       bool
		total        int // 0 = below limit
	}{
		"ignore_eos gives exactly the limit":       {7000, 0, true, 7000},
		"a limit below the drawn stop is reached":  {10, 0, false, 10},
		"otherwise it stops by itself":             {7000, 0, false, 0},
		"but not below the least":                  {7000, 6000, false, 6000},
		"and a least above the limit is the limit": {100, 6000, false, 100},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := newWriter(1, []int32{1, 2, 3}, 0)
			w.plan(tc.limit, tc.least, tc.ignore)
			got := w.total()
			if tc.total != 0 && got != tc.total || tc.total == 0 && (got < shortestStop || got >= longestStop) {
				t.Errorf("total = %d, want %d", got, tc.total)
			}
			if !tc.ignore && got < tc.limit && w.token(got-1) != tokEnd {
				t.Error("an answer that stops by itself does not end with the end token")
			}
		})
	}
}

func TestParse(t *testing.T) {
	cases := map[string]struct {
		on   surface
		body string
		err  string // part of the message; "" = accepted
	}{
		"max_completion_tokens wins":    {surfaceChat, `{"messages":[{"role":"user"}],"max_tokens":1,"max_completion_tokens":2}`, ""},
		"content may be null":           {surfaceChat, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"x"}]}]}`, ""},
		"content may be parts":          {surfaceChat, `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]}`, ""},
		"unknown members are ignored":   {surfaceChat, `{"messages":[{"role":"user","content":"x"}],"x":{"y":[1]}}`, ""},
		"null means absent":             {surfaceChat, `{"messages":[{"role":"user"}],"max_tokens":null,"stream":null,"stop":null,"bootstrap_room":null,"rid":null}`, ""},
		"escaped keys count":            {surfaceChat, `{"mess\u0061ges":[{"role":"user"}]}`, ""},
		"messages that are no list":     {surfaceChat, `{"messages":"x"}`, "messages"},
		"a message that is no object":   {surfaceChat, `{"messages":["x"]}`, "messages"},
		"content that is a number":      {surfaceChat, `{"messages":[{"role":"user","content":1}]}`, "content"},
		"stream that is text":           {surfaceChat, `{"messages":[{"role":"user"}],"stream":"yes"}`, "stream"},
		"n of 0":                        {surfaceChat, `{"messages":[{"role":"user"}],"n":0}`, "n must be"},
		"negative max_tokens":           {surfaceChat, `{"messages":[{"role":"user"}],"max_tokens":-1}`, "max_new_tokens"},
		"negative min_tokens":           {surfaceChat, `{"messages":[{"role":"user"}],"min_tokens":-1}`, "min_new_tokens"},
		"no prompt":                     {surfaceCompletions, `{}`, "prompt"},
		"an empty prompt":               {surfaceCompletions, `{"prompt":""}`, "empty"},
		"an empty list":                 {surfaceCompletions, `{"prompt":[]}`, "empty"},
		"a prompt that is a number":     {surfaceCompletions, `{"prompt":1}`, "prompt"},
		"mixed prompts":                 {surfaceCompletions, `{"prompt":["a",1]}`, "prompts"},
		"ids that are text":             {surfaceGenerate, `{"input_ids":[1,"a"]}`, "input_ids"},
		"ids beyond 31 bits":            {surfaceGenerate, `{"input_ids":[2147483648]}`, "input_ids"},
		"ids that are no integers":      {surfaceGenerate, `{"input_ids":[1.5]}`, "input_ids"},
		"too few sampling_params":       {surfaceGenerate, `{"text":["a","b"],"sampling_params":[{}]}`, "sampling_params"},
		"sampling_params that are text": {surfaceGenerate, `{"text":"a","sampling_params":"x"}`, "sampling_params"},
		"too few rids":                  {surfaceGenerate, `{"text":["a","b","c"],"rid":["x","y"]}`, "rid"},
		"a numeric rid":                 {surfaceGenerate, `{"text":"a","rid":7}`, "rid"},
		"too few rooms":                 {surfaceGenerate, `{"text":["a","b"],"bootstrap_room":[1]}`, "bootstrap_room"},
		"a negative room":               {surfaceGenerate, `{"text":"a","bootstrap_room":-1}`, "bootstrap_room"},
		"a host that is a number":       {surfaceGenerate, `{"text":"a","bootstrap_host":1}`, "bootstrap_host"},
		"a port that is text":           {surfaceGenerate, `{"text":"a","bootstrap_port":"x"}`, "bootstrap_port"},
		"a body that is a list":         {surfaceGenerate, `[]`, "JSON"},
		"no body":                       {surfaceGenerate, ``, "JSON"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := parse(tc.on, []byte(tc.body), nil)
			if tc.err == "" && err != nil || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
				t.Errorf("parse: %v, want %q", err, tc.err)
			}
		})
	}
}

func TestBootstrapMembers(t *testing.T) {
	cases := map[string]struct {
		body string
		want []bootstrap
	}{
		"absent": {`{"text":"a"}`, []bootstrap{{}}},
		"a null port is left to the worker": {
			`{"text":"a","bootstrap_host":"h","bootstrap_port":null,"bootstrap_room":9223372036854775807}`,
			[]bootstrap{{set: true, host: "h", room: 1<<63 - 1}},
		},
		"a bracketed IPv6 host": {
			`{"text":"a","bootstrap_host":"[::1]","bootstrap_port":1,"bootstrap_room":2}`,
			[]bootstrap{{set: true, host: "::1", port: 1, room: 2}},
		},
		"scalars over a batch": {
			`{"text":["a","b"],"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":5}`,
			[]bootstrap{{true, "h", 1, 5}, {true, "h", 1, 6}},
		},
		"lists over a batch": {
			`{"text":["a","b"],"bootstrap_host":["h","i"],"bootstrap_port":[1,null],"bootstrap_room":[5,9]}`,
			[]bootstrap{{true, "h", 1, 5}, {true, "i", 0, 9}},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r, err := parse(surfaceGenerate, []byte(tc.body), nil)
			if err != nil {
				t.Fatal(err)
			}
			var got []bootstrap
			for _, s := range r.seqs {
				got = append(got, s.boot)
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("bootstrap %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestHeadersOverrideTheBody(t *testing.T) {
	h := http.Header{}
	for k, v := range map[string]string{
		"x-override-rid": "over", "x-override-bootstrap-host": "h", "x-override-bootstrap-port": "9", "x-override-bootstrap-room": "77",
	} {
		h.Set(k, v)
	}
	r, err := parse(surfaceGenerate, []byte(`{"text":"a","rid":"mine","bootstrap_room":1}`), h)
	if err != nil {
		t.Fatal(err)
	}
	if s := r.seqs[0]; s.rid != "over" || s.boot != (bootstrap{true, "h", 9, 77}) {
		t.Errorf("rid %q, bootstrap %+v", s.rid, s.boot)
	}
	h.Set("x-override-bootstrap-room", "not a number")
	if _, err := parse(surfaceGenerate, []byte(`{"text":"a"}`), h); err == nil || !strings.Contains(err.Error(), "bootstrap_room") {
		t.Errorf("a room that is no number: %v", err)
	}
}

// FuzzParse feeds bodies to every surface: a body is refused with a message or
// gives sequences that hold a prompt.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":[{"text":"x"}]}],"tools":[{"a":1}],"stop":["a"],"n":2}`))
	f.Add([]byte(`{"text":["a","b"],"rid":["x","y"],"bootstrap_room":[1,2],"sampling_params":[{},{"stop":"x"}]}`))
	f.Add([]byte(`{"prompt":[[1,2],[3]],"input_ids":[1],"max_tokens":3}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, on := range []surface{surfaceGenerate, surfaceCompletions, surfaceChat} {
			r, err := parse(on, body, nil)
			if err != nil {
				if err.Error() == "" {
					t.Fatal("a refusal without a message")
				}
				continue
			}
			if !json.Valid(body) {
				t.Fatalf("accepted what is not JSON")
			}
			if len(r.seqs) == 0 {
				t.Fatal("accepted a request without a prompt")
			}
			for _, s := range r.seqs {
				if s.prompt == 0 || s.prompt != len(s.tokens) || s.rid == "" && !bytes.Contains(body, []byte("rid")) {
					t.Fatalf("a sequence of %d tokens, prompt %d, rid %q", len(s.tokens), s.prompt, s.rid)
				}
			}
		}
	})
}

// agentBody is a chat body of about size bytes in turns of a few kilobytes.
func agentBody(size int) []byte {
	var b bytes.Buffer
	b.WriteString(`{"model":"m","stream":true,"max_tokens":900,"messages":[{"role":"system","content":"You are an agent."}`)
	line := strings.Repeat(`if err != nil {\n\treturn fmt.Errorf(\"read the file: %w\", err)\n}\n`, 60)
	for i := 0; b.Len() < size; i++ {
		fmt.Fprintf(&b, `,{"role":%q,"content":"%d %s"}`, []string{"user", "assistant"}[i%2], i, line)
	}
	b.WriteString(`]}`)
	return b.Bytes()
}

func BenchmarkParseChat(b *testing.B) {
	for _, size := range []int{400 << 10, 2 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			body := agentBody(size)
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := parse(surfaceChat, body, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTurn is a whole turn of 100 K tokens through the scheduler, without
// sockets: what a Direct turn costs this machine, not the emulated one.
func BenchmarkTurn100K(b *testing.B) {
	cfg := testCoreConfig(ModeNull)
	cfg.capacity, cfg.pageSize = 600_000, 64
	c := newCore(cfg)
	history := promptIDs(100_000, 0)
	for b.Loop() {
		s := newSeq("s", slices.Clip(slices.Clone(history)), 100)
		c.submit(s)
		settle(c)
	}
}
