package block_test

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

// BenchmarkOf400KB hashes the prompt of a long agent session; the body is
// scanned already.
func BenchmarkOf400KB(b *testing.B) {
	agent := strings.Repeat(`The test in server_test.go, line 41, fails because the handler returns early:\n\n\tif err != nil { return }\n`, 40)
	dense := strings.Repeat(`\tif err := run(\"x\"); err != nil {\n\t\treturn fmt.Errorf(\"run: %w\", err)\n\t}\n`, 50)
	prose := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 90)
	chinese := strings.Repeat("快速的棕色狐狸跳过懒狗。", 110)
	for name, text := range map[string]string{
		"prose": prose, "agent (3 % escapes)": agent, "dense (13 % escapes)": dense, "chinese": chinese,
	} {
		b.Run(name, func(b *testing.B) {
			var s strings.Builder
			s.WriteString(`{"messages":[{"role":"system","content":"x"}`)
			for s.Len() < 400_000 {
				s.WriteString(`,{"role":"user","content":[{"type":"text","text":"` + text + `"}]}`)
			}
			s.WriteString(`]}`)
			body, err := scan.Parse([]byte(s.String()), scan.Limits{})
			if err != nil {
				b.Fatal(err)
			}
			scratch := new(block.Scratch)
			b.SetBytes(int64(s.Len()))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := block.Of(block.Chat, body, "m", scratch); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkOf100kIDs(b *testing.B) {
	body, err := scan.Parse([]byte(`{"input_ids":[`+strings.Repeat("151645,", 99_999)+`7]}`), scan.Limits{})
	if err != nil {
		b.Fatal(err)
	}
	scratch := new(block.Scratch)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := block.Of(block.Generate, body, "m", scratch); err != nil {
			b.Fatal(err)
		}
	}
}
