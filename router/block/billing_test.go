package block_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

const header = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"

func TestR125BillingHeader(t *testing.T) {
	sys := func(content string) string {
		return `{"messages":[{"role":"system","content":` + content + `},{"role":"user","content":"` + header + `"}]}`
	}
	top := func(system string) string {
		return `{"system":` + system + `, "messages":[{"role":"user","content":"` + header + `"}]}`
	}
	part := func(text string) string { return `{"type":"text","text":"` + text + `"}` }
	cases := map[string]struct{ in, want string }{
		"system, the block of its own":    {top(`[` + part(header) + `, ` + part("You are") + `]`), top(`[` + part("You are") + `]`)},
		"system, the only block":          {top(`[` + part(header) + `]`), top(`[` + part("") + `]`)},
		"system, merged in one block":     {top(`[` + part(header+`\n\nYou are`) + `]`), top(`[` + part("You are") + `]`)},
		"system, merged, more blocks":     {top(`[` + part(header+`\nYou are`) + `,` + part("x") + `]`), top(`[` + part("You are") + `,` + part("x") + `]`)},
		"system, merged without a break":  {top(`[` + part(header+`You are: x=1; y=2;`) + `]`), top(`[` + part("You are: x=1; y=2;") + `]`)},
		"system, a string":                {top(`"` + header + `\r\nYou are"`), top(`"You are"`)},
		"chat, the block of its own":      {sys(`[` + part(header) + `,` + part("You are") + `]`), sys(`[` + part("You are") + `]`)},
		"chat, a string":                  {sys(`"` + header + `\n\nYou are"`), sys(`"You are"`)},
		"chat, a string of nothing else":  {sys(`"` + header + `"`), sys(`""`)},
		"chat, role developer":            {strings.Replace(sys(`"`+header+`\nx"`), "system", "developer", 1), strings.Replace(sys(`"x"`), "system", "developer", 1)},
		"a field without semicolon":       {sys(`"x-anthropic-billing-header: cch=1\nYou are"`), sys(`"You are"`)},
		"another form, a line of its own": {sys(`"x-anthropic-billing-header: 0123\nYou are"`), sys(`"You are"`)},
		"another form, nothing else":      {top(`[` + part("x-anthropic-billing-header: 0123") + `,` + part("x") + `]`), top(`[` + part("x") + `]`)},
		"a null system member":            {`{"system":null,` + sys(`"` + header + `\nx"`)[1:], `{"system":null,` + sys(`"x"`)[1:]},
		"not in front":                    {sys(`[` + part("You are") + `,` + part(header) + `]`), ""},
		"not at the start of the text":    {sys(`"You are\n` + header + `"`), ""},
		"a user message":                  {`{"messages":[{"role":"user","content":"` + header + `\nx"}]}`, ""},
		"a second system message":         {`{"messages":[{"role":"user","content":"x"},{"role":"system","content":"` + header + `"}]}`, ""},
		"a long text of another form":     {sys(`"x-anthropic-billing-header: ` + strings.Repeat("prose ", 100) + `"`), ""},
		"no content":                      {`{"messages":[{"role":"system"}],"x":"` + header + `"}`, ""},
		"no messages":                     {`{"x":"` + header + `"}`, ""},
		"empty parts":                     {sys(`[]`), ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b, err := scan.Parse([]byte(tc.in), scan.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			cut, ok := block.BillingHeader(block.Chat, b)
			if ok != (tc.want != "") {
				t.Fatalf("BillingHeader = %v, %v", cut, ok)
			}
			if !ok {
				return
			}
			got := string(b.Apply(nil, scan.Splice{Cut: [][2]int{cut}}))
			if got != tc.want {
				t.Errorf("cut body = %s\nwant       %s", got, tc.want)
			}
			if _, err := scan.Parse([]byte(got), scan.Limits{}); err != nil {
				t.Errorf("the cut body is broken: %v", err)
			}
		})
	}
}

func TestR125OnlyWhereAPromptHasASystem(t *testing.T) {
	for _, r := range []block.Route{block.Completions, block.Generate} {
		b, err := scan.Parse([]byte(`{"system":"`+header+`","prompt":"`+header+`"}`), scan.Limits{})
		if err != nil {
			t.Fatal(err)
		}
		if cut, ok := block.BillingHeader(r, b); ok {
			t.Errorf("BillingHeader on %s = %v", r, cut)
		}
	}
}

// R125: ten turns of one conversation, the header different and the cache
// marker elsewhere in every turn, hash as one growing chain.
func TestR125TurnsHashEqual(t *testing.T) {
	marker := `,"cache_control":{"type":"ephemeral"}`
	turn := func(k int, anthropic bool) string {
		system := fmt.Sprintf(`[{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.%d; cch=%05x;"},{"type":"text","text":"%s"}]`, k, k*7919, filler)
		var m []string
		if !anthropic {
			m = append(m, `{"role":"system","content":`+system+`}`)
		}
		for i := range 2*k + 1 {
			mark := ""
			if i >= 2*k-1 {
				mark = marker
			}
			m = append(m, fmt.Sprintf(`{"role":"%s","content":[{"type":"text","text":"message %d %s"%s}]}`, []string{"user", "assistant"}[i%2], i, filler, mark))
		}
		body := `{"messages":[` + strings.Join(m, ",") + `]`
		if anthropic {
			body += `,"system":` + system
		}
		return body + `}`
	}
	for name, anthropic := range map[string]bool{"messages": true, "chat": false} {
		t.Run(name, func(t *testing.T) {
			var last block.Chain
			for k := range 10 {
				b, err := scan.Parse([]byte(turn(k, anthropic)), scan.Limits{})
				if err != nil {
					t.Fatal(err)
				}
				cut, ok := block.BillingHeader(block.Chat, b)
				if !ok {
					t.Fatalf("turn %d: no header found", k)
				}
				c := of(t, block.Chat, string(b.Apply(nil, scan.Splice{Cut: [][2]int{cut}})))
				if block.CommonPrefix(last.Blocks, c.Blocks) != len(last.Blocks) || c.Turn != k {
					t.Fatalf("turn %d: %d of %d blocks survive", k, block.CommonPrefix(last.Blocks, c.Blocks), len(last.Blocks))
				}
				if whole := of(t, block.Chat, turn(k, anthropic)); block.CommonPrefix(last.Blocks, whole.Blocks) != 0 {
					t.Fatal("the uncut body shares blocks: the repro is no repro")
				}
				last = c
			}
		})
	}
}
