package sglang_test

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/sglang"
)

const chatChunk = `{"id":"kvc-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1764000000,"model":"qwen3-32b","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"matched_stop":null}]}`

// BenchmarkChunk is what one streamed token costs beside the copy: splitting
// and observing. The relay's whole budget is 1 µs a chunk.
func BenchmarkChunk(b *testing.B) {
	generate := `{"text":"` + strings.Repeat("word ", 400) + `","output_ids":[1,2,3],"meta_info":{"id":"kvc-1","finish_reason":null,"prompt_tokens":120,"completion_tokens":400,"cached_tokens":64}}`
	for name, event := range map[string]string{"chat": chatChunk, "generate cumulative 2 KiB": generate} {
		for kind, end := range map[string]string{"LF": "\n\n", "CRLF": "\r\n\r\n"} {
			b.Run(name+" "+kind, func(b *testing.B) {
				raw := []byte("data: " + event + end)
				var e sglang.Events
				o := sglang.Observed{Content: true}
				observe := func(_, data []byte) { sglang.ObserveEvent(&o, data) }
				b.SetBytes(int64(len(raw)))
				b.ReportAllocs()
				for b.Loop() {
					e.Feed(raw, observe)
				}
			})
		}
	}
}

func BenchmarkChunkSplitInTwo(b *testing.B) {
	raw := []byte("data: " + chatChunk + "\n\n")
	var e sglang.Events
	o := sglang.Observed{Content: true}
	observe := func(_, data []byte) { sglang.ObserveEvent(&o, data) }
	b.ReportAllocs()
	for b.Loop() {
		e.Feed(raw[:100], observe)
		e.Feed(raw[100:], observe)
	}
}

func BenchmarkUsageChunk(b *testing.B) {
	data := []byte(`{"id":"kvc-1","object":"chat.completion.chunk","created":1764000000,"model":"m","choices":[],"usage":{"prompt_tokens":120,"total_tokens":140,"completion_tokens":20,"prompt_tokens_details":{"cached_tokens":64},"reasoning_tokens":0}}`)
	b.ReportAllocs()
	for b.Loop() {
		o := sglang.Observed{Content: true}
		if !sglang.ObserveEvent(&o, data) || o.Usage.CachedTokens != 64 {
			b.Fatalf("%+v", o)
		}
	}
}
