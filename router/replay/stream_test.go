package replay

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

// read feeds a stream to a turn and returns what the turn saw of it.
func read(body io.Reader) Turn {
	var t Turn
	t.readStream(context.Background(), body, time.Now())
	return t
}

// seen is what must not depend on timing.
type seen struct {
	Text, Finish, Kind         string
	Chunks                     int
	Prompt, Cached, Completion int
	First                      bool
}

func seenOf(t Turn) seen {
	return seen{Text: t.text, Finish: t.Finish, Kind: t.Failure.Kind, Chunks: t.Chunks, Prompt: t.PromptTokens,
		Cached: t.CachedTokens, Completion: t.CompletionTokens, First: t.TTFT > 0}
}

const done = "data: [DONE]\n\n"

func delta(text string) string {
	return fmt.Sprintf(`data: {"choices":[{"index":0,"delta":{"content":%q}}]}`+"\n\n", text)
}

func TestStreamsOfEveryShape(t *testing.T) {
	const usage = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11%s}}` + "\n\n"
	cases := map[string]struct {
		in   string
		want seen
	}{
		"content in pieces": {delta("a") + delta("b") + done, seen{Text: "ab", Chunks: 2, First: true}},
		"an empty answer":   {done, seen{}},
		"a role alone is no content": {`data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n" + done,
			seen{}},
		"reasoning is the first token and not part of the answer": {
			`data: {"choices":[{"delta":{"content":null,"reasoning_content":"hm"}}]}` + "\n\n" + delta("a") + done,
			seen{Text: "a", Chunks: 2, First: true}},
		"a tool call is the first token": {
			`data: {"choices":[{"delta":{"content":null,"tool_calls":[{"index":0}]}}]}` + "\n\n" + done,
			seen{Chunks: 1, First: true}},
		"null tool calls are none": {`data: {"choices":[{"delta":{"tool_calls":null}}]}` + "\n\n" + done, seen{}},
		"the finish reason":        {`data: {"choices":[{"delta":{},"finish_reason":"stop"}]}` + "\n\n" + done, seen{Finish: "stop"}},
		"usage with cached tokens": {fmt.Sprintf(usage, `,"prompt_tokens_details":{"cached_tokens":7}`) + done,
			seen{Prompt: 9, Completion: 2, Cached: 7}},
		"usage with null details":  {fmt.Sprintf(usage, `,"prompt_tokens_details":null`) + done, seen{Prompt: 9, Completion: 2}},
		"usage without details":    {fmt.Sprintf(usage, "") + done, seen{Prompt: 9, Completion: 2}},
		"null usage on every one":  {`data: {"choices":[],"usage":null}` + "\n\n" + done, seen{}},
		"a null error is none":     {`data: {"choices":[],"error":null}` + "\n\n" + done, seen{}},
		"comments and other lines": {": ping\n\nevent: x\nid: 7\nretry: 5\n" + delta("a") + done, seen{Text: "a", Chunks: 1, First: true}},
		"carriage returns":         {strings.ReplaceAll(delta("a")+done, "\n", "\r\n"), seen{Text: "a", Chunks: 1, First: true}},
		"no space behind the colon": {strings.ReplaceAll(delta("a")+done, "data: ", "data:"),
			seen{Text: "a", Chunks: 1, First: true}},
		"the words [DONE] inside an answer": {delta("[DONE]") + delta("data: [DONE]\n\n") + done,
			seen{Text: "[DONE]data: [DONE]\n\n", Chunks: 2, First: true}},
		"what follows the end is not read": {delta("a") + done + delta("b"), seen{Text: "a", Chunks: 1, First: true}},
		"an error in OpenAI's shape":       {delta("a") + `data: {"error":{"message":"x"}}` + "\n\n" + done, seen{Text: "a", Kind: "in-band", Chunks: 1, First: true}},
		"an error that is a string":        {`data: {"error":"x"}` + "\n\n" + done, seen{Kind: "in-band"}},
		"no end":                           {delta("a"), seen{Text: "a", Kind: "stream", Chunks: 1, First: true}},
		"nothing at all":                   {"", seen{Kind: "stream"}},
		"a chunk cut in two":               {`data: {"choices":[{"del` + "\n\n" + done, seen{Kind: "stream"}},
		"several choices":                  {`data: {"choices":[{"delta":{"content":"a"}},{"delta":{"content":"b"}}]}` + "\n\n" + done, seen{Text: "ab", Chunks: 2, First: true}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, seenOf(read(strings.NewReader(tc.in)))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// However the network cuts a stream, the turn is the same.
func TestStreamsAreTheSameHoweverTheyAreCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var b strings.Builder
		for range rapid.IntRange(0, 8).Draw(t, "events") {
			b.WriteString(rapid.SampledFrom([]string{
				delta("x"), delta("é→\n"), ": ping\n\n", "\n", "event: m\n",
				`data: {"choices":[{"delta":{},"finish_reason":"length"}]}` + "\n\n",
				`data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}` + "\r\n\r\n",
			}).Draw(t, "event"))
		}
		if rapid.Bool().Draw(t, "ends") {
			b.WriteString(done)
		}
		want := seenOf(read(strings.NewReader(b.String())))
		for name, r := range map[string]io.Reader{
			"byte by byte":       iotest.OneByteReader(strings.NewReader(b.String())),
			"half of each read":  iotest.HalfReader(strings.NewReader(b.String())),
			"the end with data":  iotest.DataErrReader(strings.NewReader(b.String())),
			"cuts at random":     &cutter{s: b.String(), sizes: rapid.SliceOfN(rapid.IntRange(1, 9), 1, 9).Draw(t, "cuts")},
			"through a small IO": bufio.NewReaderSize(strings.NewReader(b.String()), 16),
		} {
			if diff := cmp.Diff(want, seenOf(read(r))); diff != "" {
				t.Fatalf("%s:\n%s", name, diff)
			}
		}
	})
}

// cutter returns pieces of given sizes, over and over.
type cutter struct {
	s     string
	sizes []int
	i     int
}

func (c *cutter) Read(p []byte) (int, error) {
	if c.s == "" {
		return 0, io.EOF
	}
	n := min(c.sizes[c.i%len(c.sizes)], len(p), len(c.s))
	c.i++
	copy(p, c.s[:n])
	c.s = c.s[n:]
	return n, nil
}

func TestABrokenReadIsAFailureOfTheStream(t *testing.T) {
	broken := errors.New("cable cut")
	turn := read(io.MultiReader(strings.NewReader(delta("a")), iotest.ErrReader(broken)))
	want := Failure{Kind: "stream", Message: "cable cut"}
	if diff := cmp.Diff(want, turn.Failure, cmpopts.IgnoreUnexported(Failure{})); diff != "" {
		t.Error(diff)
	}
	if turn.text != "a" || turn.OK() {
		t.Errorf("text %q, OK %v", turn.text, turn.OK())
	}
}

func FuzzStream(f *testing.F) {
	f.Add([]byte(delta("a") + done))
	f.Add([]byte(`data: {"error":{"message":"x"}}` + "\n\n"))
	f.Add([]byte("data: {\"choices\":[{\"delta\":{\"tool_calls\":[1]}}],\"usage\":{\"prompt_tokens\":1}}\r\n\r\n: x\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		turn := read(strings.NewReader(string(data)))
		switch {
		case turn.OK() && !strings.Contains(string(data), "[DONE]"):
			t.Fatalf("a whole answer without an end: %q", data)
		case turn.Chunks > 0 && turn.TTFT == 0:
			t.Fatalf("%d chunks and no first one: %q", turn.Chunks, data)
		case len(turn.text) > 3*len(data): // JSON escapes of one byte become at most three
			t.Fatalf("%d bytes of text from %d", len(turn.text), len(data))
		}
	})
}

func TestErrorMessages(t *testing.T) {
	long := strings.Repeat("é", 200)
	cases := map[string]struct{ in, want string }{
		"OpenAI's shape":           {`{"error":{"message":"no worker","type":"x","code":503}}`, "no worker"},
		"SGLang's own shape":       {`{"object":"error","message":"too long"}`, `{"object":"error","message":"too long"}`},
		"an error without message": {`{"error":{"code":5}}`, `{"error":{"code":5}}`},
		"plain words":              {"  go away\n", "go away"},
		"nothing":                  {"", ""},
		"a page":                   {long, strings.Repeat("é", 100) + "…"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := errorMessage([]byte(tc.in)); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
