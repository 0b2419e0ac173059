package block_test

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

func FuzzBlockDecode(f *testing.F) {
	f.Add("")
	f.Add("CAcGBQQDAgH//////////w==")
	f.Add("AAAA")
	f.Fuzz(func(t *testing.T, s string) {
		hs, err := block.Decode(s)
		if err == nil && block.Encode(hs) != s {
			t.Fatalf("Decode(%q) = %v, which encodes as %q", s, hs, block.Encode(hs))
		}
		if h, err := block.ParseHash(s); err == nil && h.String() != s {
			t.Fatalf("ParseHash(%q) = %v", s, h)
		}
	})
}

// FuzzBlockOf: no body makes Of or BillingHeader panic; a message more extends
// the chain; a cut body parses.
func FuzzBlockOf(f *testing.F) {
	f.Add([]byte(`{"messages":[{"role":"user","content":"`+filler+`"}],"tools":[{"a":[1,{"b":null}]}]}`), "more")
	f.Add([]byte(`{"messages":[{"role":"system","content":[{"type":"text","text":"`+header+`\nx"},{"type":"image_url","image_url":{"url":"u"}}]}]}`), "\\u0041")
	f.Add([]byte(`{"system":[{"text":"`+header+`"}],"messages":[{"content":[{"type":"tool_use","input":{}},{"type":"tool_result","content":[]}]}]}`), "x")
	f.Add([]byte(`{"prompt":["a"],"text":"b","input_ids":[[1,2]],"messages":[]}`), "")
	f.Add([]byte(`{"prompt":[1,2,3],"messages":[null,1,"x",[],{"tool_calls":[1,{"function":7}],"function_call":{}}]}`), "")
	f.Fuzz(func(t *testing.T, in []byte, more string) {
		b, err := scan.Parse(in, scan.Limits{})
		if err != nil {
			return
		}
		s := new(block.Scratch)
		for _, r := range []block.Route{block.Completions, block.Generate, block.Chat} {
			c, err := block.Of(r, b, "m", s)
			if err == nil && len(c.Blocks) > 0 && len(c.Blocks) != c.Bytes/block.Bytes+c.IDs/block.IDs {
				t.Fatalf("%s: %d blocks of %d bytes and %d ids", r, len(c.Blocks), c.Bytes, c.IDs)
			}
		}
		if cut, ok := block.BillingHeader(block.Chat, b); ok {
			out := b.Apply(nil, scan.Splice{Cut: [][2]int{cut}})
			if _, err := scan.Parse(out, scan.Limits{}); err != nil {
				t.Fatalf("cut %v of %q = %q: %v", cut, in, out, err)
			}
		}
		grows(t, b, more)
	})
}

// grows appends one message to a chat and compares the chains.
func grows(t *testing.T, b *scan.Body, more string) {
	v, ok := b.Get("messages")
	if !ok || v.Raw[0] != '[' {
		return
	}
	before, err := block.Of(block.Chat, b, "m", nil)
	if err != nil {
		return
	}
	list := strings.TrimSpace(string(v.Raw[1 : len(v.Raw)-1]))
	if list != "" {
		list += ","
	}
	longer := []byte("[" + list + `{"role":"user","content":` + string(scan.Quoted(more)) + "}]")
	out := b.Apply(nil, scan.Splice{Set: []scan.Member{{Key: "messages", Value: longer}}})
	next, err := scan.Parse(out, scan.Limits{})
	if err != nil {
		t.Fatalf("longer body %q: %v", out, err)
	}
	after, err := block.Of(block.Chat, next, "m", nil)
	if err != nil || block.CommonPrefix(before.Blocks, after.Blocks) != len(before.Blocks) || after.Bytes < before.Bytes {
		t.Fatalf("a message more: %+v, %v, does not extend %+v", after, err, before)
	}
}
