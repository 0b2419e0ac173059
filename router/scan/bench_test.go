package scan_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/scan"
)

// agentBody is a chat request as a coding agent sends it: tools, a long system
// prompt, and many messages of escaped source text.
func agentBody(size int) []byte {
	var s strings.Builder
	s.WriteString(`{"model":"qwen3","stream":true,"seed":9007199254740993,"tools":[`)
	for i := range 12 {
		if i > 0 {
			s.WriteByte(',')
		}
		fmt.Fprintf(&s, `{"type":"function","function":{"name":"tool_%d","description":"Reads %s","parameters":{"type":"object","properties":{"zeta":{"type":"string"},"alpha":{"type":"integer"}}}}}`, i, strings.Repeat("a file and ", 40))
	}
	s.WriteString(`],"messages":[{"role":"system","content":"You are an agent."}`)
	for i := 0; s.Len() < size; i++ {
		fmt.Fprintf(&s, `,{"role":"user","content":"func f%d() {\n\treturn \"%s\"\n}\n"}`, i, strings.Repeat("lorem ipsum dolor sit amet ", 60))
	}
	s.WriteString(`],"max_tokens":900}`)
	return []byte(s.String())
}

var splice = scan.Splice{
	Del: []string{"bootstrap_host", "bootstrap_port", "bootstrap_room"},
	Set: []scan.Member{{Key: "rid", Value: []byte(`"kvc-0123456789abcdef0123456789abcdef"`)}, {Key: "do_local_prefill", Value: []byte("true")}},
}

func BenchmarkParse1MiB(b *testing.B) {
	in := agentBody(1 << 20)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := scan.Parse(in, scan.Limits{}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkSplice1MiB is the edit of one turn, scan included.
func BenchmarkSplice1MiB(b *testing.B) {
	in := agentBody(1 << 20)
	var dst []byte
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		body, err := scan.Parse(in, scan.Limits{})
		if err != nil {
			b.Fatal(err)
		}
		dst = body.Apply(dst, splice)
	}
}

// BenchmarkSplice1MiBEncodingJSON is the same edit through a map.
func BenchmarkSplice1MiBEncodingJSON(b *testing.B) {
	in := agentBody(1 << 20)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		var m map[string]any
		if err := json.Unmarshal(in, &m); err != nil {
			b.Fatal(err)
		}
		for _, key := range splice.Del {
			delete(m, key)
		}
		for _, e := range splice.Set {
			m[e.Key] = json.RawMessage(e.Value)
		}
		if _, err := json.Marshal(m); err != nil {
			b.Fatal(err)
		}
	}
}
