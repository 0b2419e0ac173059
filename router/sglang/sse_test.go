package sglang_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/sglang"
)

// event is one report of Events; Data is "-" for none.
type event struct{ Raw, Data string }

// split feeds the parts and gathers the events, those of End included.
func split(parts ...string) (out []event) {
	var e sglang.Events
	gather := func(raw, data []byte) {
		ev := event{Raw: string(raw), Data: "-"}
		if data != nil {
			ev.Data = string(data)
		}
		out = append(out, ev)
	}
	for _, p := range parts {
		e.Feed([]byte(p), gather)
	}
	e.End(gather)
	return out
}

func TestEvents(t *testing.T) {
	cases := map[string]struct {
		in   string
		want []event
	}{
		"LF":                       {"data: a\n\ndata: b\n\n", []event{{"data: a\n\n", "a"}, {"data: b\n\n", "b"}}},
		"CRLF":                     {"data: a\r\n\r\ndata: b\r\n\r\n", []event{{"data: a\r\n\r\n", "a"}, {"data: b\r\n\r\n", "b"}}},
		"CR":                       {"data: a\r\rdata: b\r\r", []event{{"data: a\r\r", "a"}, {"data: b\r\r", "b"}}},
		"CRLF, then LF":            {"data: a\r\n\ndata: b\n\r\n", []event{{"data: a\r\n\n", "a"}, {"data: b\n\r\n", "b"}}},
		"no space after the colon": {"data:a\n\n", []event{{"data:a\n\n", "a"}}},
		"two spaces: one is data":  {"data:  a\n\n", []event{{"data:  a\n\n", " a"}}},
		"empty data":               {"data:\n\n", []event{{"data:\n\n", ""}}},
		"data without colon":       {"data\n\n", []event{{"data\n\n", ""}}},
		"another field":            {"database: x\n\n", []event{{"database: x\n\n", "-"}}},
		"several data lines":       {"data: a\ndata: b\n\n", []event{{"data: a\ndata: b\n\n", "a\nb"}}},
		"several data lines, CR":   {"data: a\rdata\rdata:b\r\r", []event{{"data: a\rdata\rdata:b\r\r", "a\n\nb"}}},
		"R10: a comment":           {": ping\n\ndata: a\n\n", []event{{": ping\n\n", "-"}, {"data: a\n\n", "a"}}},
		"R10: event and id lines":  {"event: ping\nid: 7\ndata: {}\nretry: 5\n\n", []event{{"event: ping\nid: 7\ndata: {}\nretry: 5\n\n", "{}"}}},
		"R10: an event name alone": {"event: ping\n\n", []event{{"event: ping\n\n", "-"}}},
		"stray blank lines":        {"\n\ndata: a\n\n\n", []event{{"\n", "-"}, {"\n", "-"}, {"data: a\n\n", "a"}, {"\n", "-"}}},
		"R01: the end marker inside": {"data: {\"x\":\"data: [DONE]\\n\\n\"}\n\ndata: b\n\n",
			[]event{{"data: {\"x\":\"data: [DONE]\\n\\n\"}\n\n", `{"x":"data: [DONE]\n\n"}`}, {"data: b\n\n", "b"}}},
		"cut off in a line":        {"data: a\n\ndata: b", []event{{"data: a\n\n", "a"}, {"data: b", "-"}}},
		"cut off before the blank": {"data: a\n", []event{{"data: a\n", "-"}}},
		"cut off inside CRLF CRLF": {"data: a\r\n\r", []event{{"data: a\r\n\r", "a"}}},
		"nothing":                  {"", nil},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, split(tc.in)); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}
		})
	}
}

// recorded is a stream with every kind of line, several line endings and
// characters of several bytes.
func recorded() string {
	var s strings.Builder
	for i := range 12 {
		end := []string{"\n", "\r\n", "\r"}[i%3]
		if i%4 == 0 {
			s.WriteString(": ping" + end + end)
		}
		fmt.Fprintf(&s, "event: x%sdata: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"北🌍é %d data: [DONE]\"},\"finish_reason\":null}]}%sid: %d%s%s", end, i, end, i, end, end)
	}
	s.WriteString("data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n")
	s.WriteString("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":120,\"completion_tokens\":20,\"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n")
	return s.String()
}

// R03, R04: wherever the stream is cut, the events are the same, byte for byte.
func TestR03EveryCutGivesTheSameEvents(t *testing.T) {
	in := recorded()
	want := split(in)
	for i := range len(in) + 1 {
		if diff := cmp.Diff(want, split(in[:i], in[i:])); diff != "" {
			t.Fatalf("cut at %d (-want +got):\n%s", i, diff)
		}
	}
	if diff := cmp.Diff(want, split(strings.Split(in, "")...)); diff != "" {
		t.Fatalf("cut into runes (-want +got):\n%s", diff)
	}
	rnd := rand.New(rand.NewPCG(1, 3))
	for range 300 {
		var parts []string
		for rest := in; rest != ""; {
			n := 1 + rnd.IntN(min(len(rest), 90))
			parts, rest = append(parts, rest[:n]), rest[n:]
		}
		if diff := cmp.Diff(want, split(parts...)); diff != "" {
			t.Fatalf("cut into %d parts (-want +got):\n%s", len(parts), diff)
		}
	}
}

// R02, R03: what accounting reads does not depend on the cuts either.
func TestR02ObservationSurvivesEveryCut(t *testing.T) {
	in := recorded()
	for i := range len(in) + 1 {
		var e sglang.Events
		var o sglang.Observed
		usageOnly := 0
		observe := func(_, data []byte) {
			if sglang.ObserveEvent(&o, data) {
				usageOnly++
			}
		}
		e.Feed([]byte(in[:i]), observe)
		e.Feed([]byte(in[i:]), observe)
		if o.Usage.PromptTokens != 120 || o.Usage.CachedTokens != 64 || o.Usage.CompletionTokens != 20 || !o.HasUsage ||
			o.Finish != "stop" || !o.Done || !o.Content || o.ErrorCode != 0 || usageOnly != 1 {
			t.Fatalf("cut at %d: %+v, %d usage chunks", i, o, usageOnly)
		}
	}
}

func TestMid(t *testing.T) {
	for in, want := range map[string]bool{
		"": false, "data: a\n\n": false, "data: a\r\n\r\n": false, "data: a\r\r": false, "data: a\r\n\r": false,
		"d": true, "data: a": true, "data: a\n": true, "data: a\r\n": true, "data: a\r": true, "data: a\n\n:": true,
	} {
		for i := range len(in) + 1 {
			var e sglang.Events
			e.Feed([]byte(in[:i]), func(_, _ []byte) {})
			e.Feed([]byte(in[i:]), func(_, _ []byte) {})
			if e.Mid() != want {
				t.Errorf("Mid after %q, cut at %d = %v, want %v", in, i, e.Mid(), want)
			}
		}
	}
}

// An engine that never ends an event costs MaxEvent, not the process.
func TestHugeEventIsBounded(t *testing.T) {
	var e sglang.Events
	var out bytes.Buffer
	var datas, largest int
	observe := func(raw, data []byte) {
		out.Write(raw)
		largest = max(largest, len(raw))
		if data != nil {
			datas++
		}
	}
	piece := bytes.Repeat([]byte("x"), 32<<10)
	want := []byte("data: ")
	e.Feed(want, observe)
	for range 3 * sglang.MaxEvent / len(piece) {
		want = append(want, piece...)
		e.Feed(piece, observe)
		if !e.Mid() {
			t.Fatal("inside an event Mid is false")
		}
	}
	tail := []byte("\n\ndata: next\n\n")
	want = append(want, tail...)
	e.Feed(tail, observe)
	if !bytes.Equal(out.Bytes(), want) {
		t.Errorf("%d bytes came out, %d went in, or they differ", out.Len(), len(want))
	}
	if datas != 1 || largest > sglang.MaxEvent+2*len(piece) || e.Mid() {
		t.Errorf("%d events with data, largest piece %d, Mid %v", datas, largest, e.Mid())
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte(recorded()), uint16(10), uint16(99))
	f.Add([]byte("data: a\r\n\r\n\r\r\n\n"), uint16(3), uint16(5))
	f.Add([]byte("data\r\r\ndata:x\r\n\r"), uint16(1), uint16(2))
	f.Fuzz(func(t *testing.T, in []byte, a, b uint16) {
		i, j := min(int(a), len(in)), min(int(b), len(in))
		if i > j {
			i, j = j, i
		}
		whole, cut := split(string(in)), split(string(in[:i]), string(in[i:j]), string(in[j:]))
		if diff := cmp.Diff(whole, cut); diff != "" {
			t.Fatalf("cuts at %d and %d (-whole +cut):\n%s", i, j, diff)
		}
		var raw strings.Builder
		var o sglang.Observed
		for _, ev := range whole {
			raw.WriteString(ev.Raw)
			sglang.ObserveEvent(&o, []byte(ev.Data))
		}
		sglang.ObserveBody(&o, in)
		if raw.String() != string(in) {
			t.Fatalf("raw events are %q, the stream is %q", raw.String(), in)
		}
	})
}
