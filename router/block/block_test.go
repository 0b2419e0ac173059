package block_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

func of(t testing.TB, r block.Route, body string) block.Chain {
	t.Helper()
	b, err := scan.Parse([]byte(body), scan.Limits{})
	if err != nil {
		t.Fatalf("Parse(%.80q): %v", body, err)
	}
	c, err := block.Of(r, b, "m", nil)
	if err != nil {
		t.Fatalf("Of(%.80q): %v", body, err)
	}
	return c
}

var filler = strings.Repeat("some text that fills blocks; ", 20)

// R30: keys differ exactly when the prompt differs.
func TestR30SamePrompt(t *testing.T) {
	user := func(content string) string { return `{"messages":[{"role":"user","content":` + content + `}]}` }
	long, _ := json.Marshal(filler + "é 北\n")
	cases := map[string][2]string{
		"escapes do not matter":           {user(`"A\u00e9\/` + filler + `"`), user(`"\u0041é/` + filler + `"`)},
		"white space does not matter":     {user(string(long)), " { \"messages\" : [ { \"role\" : \"user\" ,\n\"content\" : " + string(long) + " } ] } "},
		"key order does not matter":       {`{"messages":[{"role":"user","content":"` + filler + `"}]}`, `{"messages":[{"content":"` + filler + `","role":"user"}]}`},
		"a string is one text part":       {user(`"` + filler + `"`), user(`[{"type":"text","text":"` + filler + `"}]`)},
		"cache_control does not matter":   {user(`[{"type":"text","text":"` + filler + `"}]`), user(`[{"type":"text","cache_control":{"type":"ephemeral"},"text":"` + filler + `"}]`)},
		"unknown keys do not matter":      {user(`"` + filler + `"`), `{"seed":1,"messages":[{"role":"user","x":{"y":1},"content":"` + filler + `"}],"stream":true}`},
		"an escaped key is the key":       {user(`"` + filler + `"`), `{"m\u0065ssages":[{"rol\u0065":"user","cont\u0065nt":"` + filler + `"}]}`},
		"null and absent are one":         {`{"messages":[{"role":"user","content":"` + filler + `"}],"system":null,"cache_salt":null,"tools":null}`, user(`"` + filler + `"`)},
		"empty text is no text":           {user(`["",{"type":"text","text":"` + filler + `"}]`), user(`"` + filler + `"`)},
		"reasoning is left to the engine": {`{"messages":[{"role":"assistant","reasoning_content":"hm","content":"` + filler + `"}]}`, `{"messages":[{"role":"assistant","content":"` + filler + `"}]}`},
		"tools under tool_choice none are not rendered": {`{"tools":[{"a":1}],"tool_choice":"none","messages":[{"content":"` + filler + `"}]}`,
			`{"messages":[{"content":"` + filler + `"}]}`},
		"the last duplicate counts, as in the engine": {`{"messages":[{"role":"user","content":"x","content":"` + filler + `"}]}`, user(`"` + filler + `"`)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			a, b := of(t, block.Chat, tc[0]), of(t, block.Chat, tc[1])
			if !equal(a.Blocks, b.Blocks) || a.Bytes != b.Bytes || len(a.Blocks) == 0 {
				t.Errorf("%v (%d bytes) and %v (%d bytes) differ", a.Blocks, a.Bytes, b.Blocks, b.Bytes)
			}
		})
	}
}

func TestR30DifferentPrompt(t *testing.T) {
	base := `{"tools":[{"type":"function","function":{"name":"a","description":"` + filler + `","parameters":{"x":1,"y":2}}}],"messages":[{"role":"user","content":"` +
		filler + `"},{"role":"assistant","content":"` + filler + `"}]}`
	edit := func(old, repl string) string {
		if !strings.Contains(base, old) {
			t.Fatalf("no %q in the base", old)
		}
		return strings.Replace(base, old, repl, 1)
	}
	same := func(n int) func(int, int) bool { return func(common, _ int) bool { return common == n } }
	tail := func(common, all int) bool { return common > 0 && common < all }
	cases := map[string]struct {
		body string
		want func(common, all int) bool
	}{
		"a tool's name":                   {edit(`"a"`, `"b"`), same(0)},
		"the order of a tool's arguments": {edit(`"x":1,"y":2`, `"y":2,"x":1`), tail},
		"the spelling of a number":        {edit(`"x":1`, `"x":1.0`), tail},
		"no tools":                        {edit(`"tools"`, `"no_tools"`), same(0)},
		"a salt":                          {edit(`{"tools"`, `{"cache_salt":"s","tools"`), same(0)},
		"an extra key":                    {edit(`{"tools"`, `{"extra_key":"s","tools"`), same(0)},
		"an adapter":                      {edit(`{"tools"`, `{"lora_path":"s","tools"`), same(0)},
		"a system prompt":                 {edit(`"messages":[`, `"messages":[{"role":"system","content":"x"},`), tail},
		"the first message":               {edit(`"user","content":"some`, `"user","content":"same`), tail},
		"the role of the first message":   {edit(`"role":"user"`, `"role":"tool"`), tail},
		"the last message":                {edit(`"assistant","content":"some`, `"assistant","content":"same`), tail},
		"a message in two":                {edit(`"user","content":"`+filler, `"user","content":"some text"},{"role":"user","content":"`+filler[9:]), tail},
		"a part in two":                   {edit(`"content":"`+filler+`"}]`, `"content":["some text"," that fills`+filler[20:]+`"]}]`), tail},
	}
	b := of(t, block.Chat, base)
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := of(t, block.Chat, tc.body)
			if n := block.CommonPrefix(b.Blocks, c.Blocks); !tc.want(n, len(b.Blocks)) {
				t.Errorf("%d of %d blocks in common", n, len(b.Blocks))
			}
		})
	}
	if b, c := of(t, block.Completions, `{"prompt":"`+filler+`"}`), of(t, block.Chat, `{"messages":[{"role":"","content":"`+filler+`"}]}`); block.CommonPrefix(b.Blocks, c.Blocks) != 0 {
		t.Error("a completion prompt poses as a chat")
	}
	if block.Seed("a", "bc") == block.Seed("ab", "c") || block.Seed("m", "") == block.Seed("", "m") {
		t.Error("model and salt run into each other")
	}
}

// Text cannot pose as structure: the frame byte is no UTF-8, and where a body
// holds it all the same it reads as U+FFFD.
func TestTextIsNoStructure(t *testing.T) {
	pair := of(t, block.Chat, `{"messages":[{"role":"user","content":"`+filler+`"},{"role":"user","content":"`+filler+`"}]}`)
	forged := of(t, block.Chat, `{"messages":[{"role":"user","content":"`+filler+"\xffMuser\xffT"+filler+`"}]}`)
	if n := block.CommonPrefix(pair.Blocks, forged.Blocks); n > len(filler)/block.Bytes {
		t.Errorf("%d blocks in common, want only those of the first message", n)
	}
	replaced := of(t, block.Chat, `{"messages":[{"role":"user","content":"`+filler+"\ufffdMuser\ufffdT"+filler+`"}]}`)
	if !equal(forged.Blocks, replaced.Blocks) {
		t.Error("the frame byte does not read as U+FFFD")
	}
}

// Theorem of R30: turn k's chain is a prefix of turn k+1's, whatever the
// messages are.
func TestR30ChainsOfAConversationGrow(t *testing.T) {
	part := rapid.Custom(func(t *rapid.T) any {
		text := rapid.StringN(0, 80, 300).Draw(t, "text")
		return rapid.SampledFrom([]any{
			map[string]any{"type": "text", "text": text},
			map[string]any{"type": "image_url", "image_url": map[string]any{"url": text}},
			map[string]any{"type": "tool_result", "tool_use_id": "t1", "content": text},
			map[string]any{"type": "tool_use", "id": "t1", "name": text, "input": map[string]any{"a": []any{1, text, nil}}},
			map[string]any{"type": "odd", "odd": []any{true, text}},
		}).Draw(t, "part")
	})
	message := rapid.Custom(func(t *rapid.T) any {
		m := map[string]any{"role": rapid.SampledFrom([]string{"system", "user", "assistant", "tool"}).Draw(t, "role")}
		switch rapid.IntRange(0, 3).Draw(t, "kind") {
		case 0:
			m["content"] = rapid.StringN(0, 200, 900).Draw(t, "content")
		case 1:
			m["content"] = rapid.SliceOfN(part, 0, 4).Draw(t, "parts")
		case 2:
			m["content"] = nil
			m["tool_calls"] = []any{map[string]any{"id": "c1", "function": map[string]any{"name": "f", "arguments": rapid.String().Draw(t, "args")}}}
		default:
			m["content"] = []any{rapid.String().Draw(t, "bare"), 7, nil}
		}
		return m
	})
	rapid.Check(t, func(t *rapid.T) {
		messages := rapid.SliceOfN(message, 1, 8).Draw(t, "messages")
		var last block.Chain
		for k := 1; k <= len(messages); k++ {
			body, err := json.Marshal(map[string]any{"messages": messages[:k], "tools": []any{map[string]any{"name": "f"}}})
			if err != nil {
				t.Fatal(err)
			}
			b, err := scan.Parse(body, scan.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			c, err := block.Of(block.Chat, b, "m", nil)
			if err != nil {
				t.Fatal(err)
			}
			if block.CommonPrefix(last.Blocks, c.Blocks) != len(last.Blocks) || c.Bytes < last.Bytes || c.Turn < last.Turn {
				t.Fatalf("turn %d: %+v does not extend %+v", k, c, last)
			}
			if len(c.Blocks) != c.Bytes/block.Bytes {
				t.Fatalf("%d blocks of %d bytes", len(c.Blocks), c.Bytes)
			}
			last = c
		}
	})
}

func TestTurnCountsAssistantMessages(t *testing.T) {
	for body, want := range map[string]int{
		`{"messages":[]}`:                   0,
		`{"messages":[{"role":"user"}]}`:    0,
		`{"messages":[1,"x",null,[],{}]}`:   0,
		`{"messages":[{"role":"a\u0073"}]}`: 0,
		`{"messages":[{"role":"user"},{"role":"assistant"},{"role":"tool"},{"role":"assistant"},{"role":"user"}]}`: 2,
		`{"messages":[{"role":"user"},{"role":"assistant"}],"input_ids":[1,2,3]}`:                                  1,
	} {
		if c := of(t, block.Chat, body); c.Turn != want {
			t.Errorf("Turn of %s = %d, want %d", body, c.Turn, want)
		}
	}
}

func TestBatchesHaveSizeButNoBlocks(t *testing.T) {
	cases := map[string]struct {
		route      block.Route
		body       string
		bytes, ids int
	}{
		"texts":              {block.Completions, `{"prompt":["` + filler + `","` + filler + `"]}`, 2 * (len(filler) + 2), 0},
		"id lists":           {block.Generate, `{"input_ids":[[` + strings.Repeat("7,", 30) + `7],[1,2]]}`, 0, 33},
		"embeddings instead": {block.Generate, `{"input_embeds":[[0.5]]}`, 0, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := of(t, tc.route, tc.body)
			if len(c.Blocks) != 0 || c.Bytes != tc.bytes || c.IDs != tc.ids {
				t.Errorf("Of = %+v, want %d bytes, %d ids and no block", c, tc.bytes, tc.ids)
			}
		})
	}
}

func TestIDs(t *testing.T) {
	a := of(t, block.Generate, `{"input_ids":[`+strings.Repeat("7, ", 47)+"7\n]}")
	if len(a.Blocks) != 2 || a.IDs != 48 || a.Bytes != 0 {
		t.Errorf("48 ids = %+v, want two blocks", a)
	}
	b := of(t, block.Generate, `{"text":"ignored","input_ids":[`+strings.Repeat("7,", 24)+strings.Repeat("8,", 23)+`9]}`)
	if block.CommonPrefix(a.Blocks, b.Blocks) != 1 {
		t.Error("chains of ids do not share their first block alone")
	}
	c := of(t, block.Chat, `{"messages":[{"role":"user","content":"x"}],"input_ids":[`+strings.Repeat("7,", 47)+`7]}`)
	if !equal(a.Blocks, c.Blocks) {
		t.Error("a chat that brings its ids is hashed otherwise")
	}
}

func TestOfRefuses(t *testing.T) {
	cases := map[string]struct {
		route block.Route
		body  string
		field string
	}{
		"no messages":           {block.Chat, `{}`, "messages"},
		"messages as an object": {block.Chat, `{"messages":{}}`, "messages"},
		"null messages":         {block.Chat, `{"messages":null}`, "messages"},
		"no prompt":             {block.Completions, `{}`, "prompt"},
		"an empty batch":        {block.Completions, `{"prompt":[]}`, "prompt"},
		"a number for a prompt": {block.Completions, `{"prompt":7}`, "prompt"},
		"a mixed batch":         {block.Completions, `{"prompt":["a",7]}`, "prompt"},
		"ids and text":          {block.Completions, `{"prompt":[7,"a"]}`, "prompt"},
		"a fractional id":       {block.Completions, `{"prompt":[7.5]}`, "prompt"},
		"an id with exponent":   {block.Completions, `{"prompt":[7e1]}`, "prompt"},
		"a negative id":         {block.Generate, `{"input_ids":[-1]}`, "input_ids"},
		"an id beyond 32 bits":  {block.Generate, `{"input_ids":[1,4294967296]}`, "input_ids"},
		"ids as a string":       {block.Generate, `{"input_ids":"1"}`, "input_ids"},
		"text as an object":     {block.Generate, `{"text":{}}`, "text"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b, err := scan.Parse([]byte(tc.body), scan.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			c, err := block.Of(tc.route, b, "m", nil)
			if err == nil || !strings.HasPrefix(err.Error(), tc.field+" must be") {
				t.Errorf("Of = %+v, %v, want an error that names %s", c, err, tc.field)
			}
		})
	}
}

func TestScratchIsReused(t *testing.T) {
	body, err := scan.Parse([]byte(`{"messages":[{"role":"user","content":"`+strings.Repeat(filler+`\n`, 40)+`"}]}`), scan.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	want, _ := block.Of(block.Chat, body, "m", nil)
	s := new(block.Scratch)
	for range 3 {
		got, err := block.Of(block.Chat, body, "m", s)
		if err != nil || !equal(got.Blocks, want.Blocks) {
			t.Fatalf("Of with a scratch = %+v, %v, want %+v", got, err, want)
		}
	}
	if n := testing.AllocsPerRun(50, func() { _, _ = block.Of(block.Chat, body, "m", s) }); n > 2 {
		t.Errorf("Of allocates %v times with a scratch, want at most the seed and the writer", n)
	}
}

func TestCommonPrefix(t *testing.T) {
	cases := []struct {
		a, b []block.Hash
		want int
	}{
		{nil, nil, 0}, {[]block.Hash{1}, nil, 0}, {[]block.Hash{1, 2}, []block.Hash{1, 2, 3}, 2},
		{[]block.Hash{1, 2, 3}, []block.Hash{1, 9, 3}, 1}, {[]block.Hash{2}, []block.Hash{1}, 0},
	}
	for _, tc := range cases {
		if got := block.CommonPrefix(tc.a, tc.b); got != tc.want {
			t.Errorf("CommonPrefix(%v, %v) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
	}
}

func TestEncode(t *testing.T) {
	hs := []block.Hash{0x0102030405060708, 0xffffffffffffffff}
	const want = "CAcGBQQDAgH//////////w=="
	if got := block.Encode(hs); got != want {
		t.Errorf("Encode = %s, want %s", got, want)
	}
	back, err := block.Decode(want)
	if err != nil || !equal(back, hs) {
		t.Errorf("Decode = %v, %v", back, err)
	}
	if back, err := block.Decode(""); err != nil || len(back) != 0 || block.Encode(nil) != "" {
		t.Errorf("Decode of nothing = %v, %v", back, err)
	}
	for _, bad := range []string{"!", "AAAA", "CAcGBQQDAgE", "CAcGBQQDAgE=\n", "CAcGBQQDAgF=", "_AcGBQQDAgE="} {
		if hs, err := block.Decode(bad); err == nil {
			t.Errorf("Decode(%q) = %v, want an error", bad, hs)
		}
	}
}

func TestHashText(t *testing.T) {
	for h, want := range map[block.Hash]string{0: "0000000000000000", 0xab: "00000000000000ab", 0xfedcba9876543210: "fedcba9876543210"} {
		if h.String() != want || fmt.Sprint(h) != want {
			t.Errorf("String = %s, want %s", h, want)
		}
		if back, err := block.ParseHash(want); err != nil || back != h {
			t.Errorf("ParseHash(%s) = %v, %v", want, back, err)
		}
	}
	for _, bad := range []string{"", "ab", "00000000000000AB", "00000000000000a ", "00000000000000abc", "000000000000000g"} {
		if h, err := block.ParseHash(bad); err == nil {
			t.Errorf("ParseHash(%q) = %v, want an error", bad, h)
		}
	}
}
