package trace

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzTrace feeds every loader arbitrary bytes. Whatever decodes obeys the
// bounds, and its first turns can be spoken.
func FuzzTrace(f *testing.F) {
	formats := append(Formats(), Auto)
	for i, format := range Formats() {
		f.Add(uint8(i), []byte(sample(f, format)))
	}
	f.Add(uint8(6), []byte{0x1f, 0x8b, 0})
	f.Fuzz(func(t *testing.T, which uint8, data []byte) {
		format := formats[int(which)%len(formats)]
		tr, err := Decode(bytes.NewReader(data), Options{Format: format,
			Boilerplate: Boilerplate{"a": {ToolTokens: 100, SystemTokens: 160}}})
		if err != nil {
			if _, ok := errors.AsType[*Error](err); !ok {
				t.Fatalf("an error that names no place: %v", err)
			}
			return
		}
		if len(tr.Records) > bytes.Count(data, []byte("\n"))+1 && data[0] != 0x1f {
			t.Fatalf("%d records of %d bytes", len(tr.Records), len(data))
		}
		for _, r := range tr.Records {
			checkRecord(t, r)
		}
	})
}

func checkRecord(t *testing.T, r Record) {
	t.Helper()
	switch {
	case r.Session == "" || len(r.Session) > maxNameBytes:
		t.Fatalf("session %q", r.Session)
	case r.InputTokens < 1 || r.InputTokens > maxLineBytes || r.OutputTokens < 0 || r.OutputTokens > maxLineBytes:
		t.Fatalf("counts %d in, %d out", r.InputTokens, r.OutputTokens)
	case r.AppendTokens < 0 || r.Think < 0 || r.Time < 0 || r.Turn < 0:
		t.Fatalf("negative: %+v", r)
	case len(r.Blocks) > 0 && (blockCount(r.Blocks)-1)*r.BlockTokens >= r.InputTokens:
		t.Fatalf("%d blocks of %d for %d tokens", blockCount(r.Blocks), r.BlockTokens, r.InputTokens)
	case r.SharedTokens < 0 || len(r.Blocks) > 0 && r.SharedTokens > r.InputTokens:
		t.Fatalf("%d shared of %d tokens", r.SharedTokens, r.InputTokens)
	}
	if r.InputTokens < 1<<12 {
		c := NewConversation(r.Session)
		if len(c.Turn(r)) == 0 {
			t.Fatal("a turn without messages")
		}
	}
}

func FuzzBoilerplate(f *testing.F) {
	f.Add([]byte("session,tool_tokens,system_tokens\na,1,2\n"))
	f.Add([]byte("session,tool_tokens,system_tokens\na,1\n"))
	f.Add([]byte("\"\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := ReadBoilerplate(bytes.NewReader(data), "f")
		var e *Error
		if err != nil && !errors.As(err, &e) {
			t.Fatalf("an error that names no place: %v", err)
		}
		for s, o := range b {
			if o.ToolTokens < 0 || o.SystemTokens < 0 {
				t.Fatalf("%q: %+v", s, o)
			}
		}
	})
}
