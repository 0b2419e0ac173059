package sglang_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

func TestObserveEvent(t *testing.T) {
	chunk := func(delta, finish string) string {
		return `{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":` + delta + `,"logprobs":null,"finish_reason":` + finish + `,"matched_stop":null}]}`
	}
	generate := func(text, finish string) string {
		return `{"text":"` + text + `","output_ids":[],"meta_info":{"id":"x","finish_reason":` + finish + `,"prompt_tokens":120,"completion_tokens":7,"cached_tokens":64}}`
	}
	all := kvc.Usage{PromptTokens: 120, CachedTokens: 64, CompletionTokens: 7}
	const usage = `{"choices":[],"usage":{"prompt_tokens":120,"total_tokens":127,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64},"reasoning_tokens":0}}`
	cases := map[string]struct {
		data      string
		want      sglang.Observed
		usageOnly bool
	}{
		"chat: the role chunk has no content":   {data: chunk(`{"role":"assistant","content":"","reasoning_content":null}`, "null")},
		"chat: a token":                         {data: chunk(`{"content":"a"}`, "null"), want: sglang.Observed{Content: true}},
		"chat: thinking is content":             {data: chunk(`{"reasoning_content":"a"}`, "null"), want: sglang.Observed{Content: true}},
		"chat: a tool call is content":          {data: chunk(`{"tool_calls":[{"index":0}]}`, "null"), want: sglang.Observed{Content: true}},
		"chat: the finish chunk":                {data: chunk(`{"reasoning_content":null}`, `"tool_calls"`), want: sglang.Observed{Finish: "tool_calls"}},
		"R16: the usage chunk":                  {data: usage, want: sglang.Observed{Usage: all, HasUsage: true}, usageOnly: true},
		"R16: usage beside choices":             {data: `{"choices":[{"index":0,"delta":{},"finish_reason":null}],"usage":{"prompt_tokens":120,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":64}}}`, want: sglang.Observed{Usage: all, HasUsage: true}},
		"R16: empty choices without usage":      {data: `{"choices":[]}`},
		"R16: empty choices, null usage":        {data: `{"choices":[],"usage":null}`},
		"no details: nothing cached":            {data: `{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":null}}`, want: sglang.Observed{Usage: kvc.Usage{PromptTokens: 5, CompletionTokens: 1}, HasUsage: true}, usageOnly: true},
		"R17: several choices":                  {data: `{"choices":[{"index":0,"delta":{},"finish_reason":null},{"index":1,"delta":{"content":"x"},"finish_reason":"length"}]}`, want: sglang.Observed{Content: true, Finish: "length"}},
		"completions: a token":                  {data: `{"object":"text_completion","choices":[{"index":0,"text":"a","finish_reason":null}]}`, want: sglang.Observed{Content: true}},
		"completions: the end":                  {data: `{"choices":[{"index":0,"text":"","finish_reason":"stop"}]}`, want: sglang.Observed{Finish: "stop"}},
		"generate: a token":                     {data: generate("a", "null"), want: sglang.Observed{Usage: all, HasUsage: true, Content: true}},
		"generate: the end":                     {data: generate("a", `{"type":"length","length":7}`), want: sglang.Observed{Usage: all, HasUsage: true, Content: true, Finish: "length"}},
		"generate: an abort with a status":      {data: generate("", `{"type":"abort","message":"Decode transfer failed","status_code":500,"err_type":null}`), want: sglang.Observed{Usage: all, HasUsage: true, Finish: "abort", ErrorCode: 500}},
		"generate: an abort that was asked for": {data: generate("", `{"type":"abort","message":"Aborted by AbortReq."}`), want: sglang.Observed{Usage: all, HasUsage: true, Finish: "abort"}},
		"an in-band error":                      {data: `{"error":{"object":"error","message":"x","type":"INTERNAL_SERVER_ERROR","param":null,"code":500}}`, want: sglang.Observed{ErrorCode: 500}},
		"an in-band 400":                        {data: `{"error":{"message":"x","code":400,"retryable":false}}`, want: sglang.Observed{ErrorCode: 400}},
		"an error with a word for a code":       {data: `{"error":{"message":"x","code":"server_error"}}`, want: sglang.Observed{ErrorCode: 500}},
		"an error without a code":               {data: `{"error":{"message":"x"}}`, want: sglang.Observed{ErrorCode: 500}},
		"an error that is text":                 {data: `{"error":"boom"}`, want: sglang.Observed{ErrorCode: 500}},
		"a flat error":                          {data: `{"object":"error","message":"x","type":"BadRequest","code":400}`, want: sglang.Observed{ErrorCode: 400}},
		"an error late in the object":           {data: `{"id":"x","choices":[],"error":{"code":503}}`, want: sglang.Observed{ErrorCode: 503}},
		"a null error":                          {data: `{"id":"x","choices":[],"error":null}`},
		"the end marker":                        {data: `[DONE]`, want: sglang.Observed{Done: true}},
		"the end marker with space":             {data: `[DONE] `, want: sglang.Observed{Done: true}},
		"R01: the end marker as content":        {data: chunk(`{"content":"[DONE]"}`, "null"), want: sglang.Observed{Content: true}},
		"R01: members as content":               {data: chunk(`{"content":"\"finish_reason\":\"stop\",\"usage\":{\"prompt_tokens\":1},\"error\":{}"}`, "null"), want: sglang.Observed{Content: true}},
		"no JSON":                               {data: `hello`},
		"broken JSON":                           {data: `{"usage":{"prompt_tokens":1`},
		"an array":                              {data: `[{"usage":{"prompt_tokens":1}}]`},
		"an absurd count":                       {data: `{"choices":[],"usage":{"prompt_tokens":1e300,"completion_tokens":-1}}`, usageOnly: true},
		"empty":                                 {data: ``},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got sglang.Observed
			if usageOnly := sglang.ObserveEvent(&got, []byte(tc.data)); usageOnly != tc.usageOnly {
				t.Errorf("usageOnly = %v", usageOnly)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("Observed (-want +got):\n%s", diff)
			}
			// The cheap gate misses nothing that matters once content was seen.
			late := sglang.Observed{Content: true}
			sglang.ObserveEvent(&late, []byte(tc.data))
			want := tc.want
			want.Content = true
			if want.Finish == "" && tc.want.Usage == all && !tc.usageOnly && late.HasUsage == false {
				want.Usage, want.HasUsage = kvc.Usage{}, false // a running generate's counts come again with its end
			}
			if diff := cmp.Diff(want, late); diff != "" {
				t.Errorf("after the first content (-want +got):\n%s", diff)
			}
		})
	}
}

// R18: an event that reports less does not erase what was reported.
func TestR18UsageInTwoEvents(t *testing.T) {
	var o sglang.Observed
	sglang.ObserveEvent(&o, []byte(`{"choices":[],"usage":{"prompt_tokens":120,"prompt_tokens_details":{"cached_tokens":64}}}`))
	sglang.ObserveEvent(&o, []byte(`{"choices":[],"usage":{"completion_tokens":20}}`))
	sglang.ObserveEvent(&o, []byte(`{"choices":[],"usage":{"completion_tokens":21,"prompt_tokens_details":null}}`))
	if want := (kvc.Usage{PromptTokens: 120, CachedTokens: 64, CompletionTokens: 21}); o.Usage != want {
		t.Errorf("Usage = %+v, want %+v", o.Usage, want)
	}
}

func TestObserveBody(t *testing.T) {
	cases := map[string]struct {
		body string
		want sglang.Observed
	}{
		"chat": {"\n" + `{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"total_tokens":10,"completion_tokens":1}}` + "\n",
			sglang.Observed{Usage: kvc.Usage{PromptTokens: 9, CompletionTokens: 1}, HasUsage: true, Finish: "stop", Content: true}},
		"completions": {`{"choices":[{"text":"hi","finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}`,
			sglang.Observed{Usage: kvc.Usage{PromptTokens: 9, CompletionTokens: 1}, HasUsage: true, Finish: "length", Content: true}},
		"generate": {`{"text":"hi","meta_info":{"finish_reason":{"type":"stop","matched":7},"prompt_tokens":9,"completion_tokens":1,"cached_tokens":3}}`,
			sglang.Observed{Usage: kvc.Usage{PromptTokens: 9, CachedTokens: 3, CompletionTokens: 1}, HasUsage: true, Finish: "stop", Content: true}},
		"a batch adds up": {`[{"text":"a","meta_info":{"finish_reason":{"type":"length"},"prompt_tokens":9,"completion_tokens":1}}, {"text":"b","meta_info":{"finish_reason":{"type":"length"},"prompt_tokens":5,"completion_tokens":2,"cached_tokens":4}}]`,
			sglang.Observed{Usage: kvc.Usage{PromptTokens: 14, CachedTokens: 4, CompletionTokens: 3}, HasUsage: true, Finish: "length", Content: true}},
		"R55: an abort with 200":       {`{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"x","status_code":503},"prompt_tokens":9}}`, sglang.Observed{Usage: kvc.Usage{PromptTokens: 9}, HasUsage: true, Finish: "abort", ErrorCode: 503}},
		"a status that is none is 500": {`{"error":{"code":200}}`, sglang.Observed{ErrorCode: 500}},
		"R69: a flat error":            {`{"object":"error","message":"m","type":"404","param":null,"code":404}`, sglang.Observed{ErrorCode: 404}},
		"nothing":                      {" ", sglang.Observed{}},
		"no JSON":                      {"<html>", sglang.Observed{}},
		"a broken batch":               {"[{},", sglang.Observed{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			var got sglang.Observed
			sglang.ObserveBody(&got, []byte(tc.body))
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("Observed (-want +got):\n%s", diff)
			}
			if got.Failed() != (tc.want.ErrorCode != 0 || tc.want.Finish == sglang.FinishAbort) {
				t.Errorf("Failed = %v", got.Failed())
			}
		})
	}
}

func TestObserveAnOrdinaryTokenDoesNotAllocate(t *testing.T) {
	o := sglang.Observed{Content: true}
	data := []byte(chatChunk)
	if n := testing.AllocsPerRun(100, func() { sglang.ObserveEvent(&o, data) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
