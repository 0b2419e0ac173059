package emulator

import (
	"strings"

	"github.com/kvc-dev/kvc/router/scan"
)

func trimBrackets(host string) string {
	if strings.HasPrefix(host, "[") {
		return strings.Trim(host, "[]")
	}
	return host
}

// chatPrompt renders the messages through the emulator's chat template:
//
//	start role text end … start assistant
//
// Every text is tokenised on its own, so that a conversation begins with the
// ids of its earlier turns, generated text included.
func chatPrompt(b *scan.Body) ([][]int32, error) {
	if v, ok := b.Get("input_ids"); ok && v.Raw[0] == '[' {
		ids, err := idList(v.Raw)
		if err == nil && len(ids) == 0 {
			err = badf("input_ids: the list is empty")
		}
		return [][]int32{ids}, err
	}
	v, ok := b.Get("messages")
	if !ok {
		return nil, badf("messages: Field required")
	}
	if v.Raw[0] != '[' {
		return nil, badf("messages: Input should be a valid list")
	}
	t := template{ids: make([]int32, 0, len(v.Raw)/4+4096)}
	if tools, ok := b.Get("tools"); ok && tools.Raw[0] == '[' {
		t.ids = append(t.ids, tokStart, tokTools)
		t.ids = append(appendTokens(t.ids, tools.Raw), tokEnd)
	}
	for it := scan.Iterate(v.Raw); it.Next(); {
		if err := t.message(it.Value()); err != nil {
			return nil, err
		}
	}
	if len(t.ids) == 0 {
		return nil, badf("Messages cannot be empty.")
	}
	return [][]int32{append(t.ids, tokStart, tokAssistant)}, nil
}

// template renders messages to ids; buf is reused between texts.
type template struct {
	ids []int32
	buf []byte
}

func (t *template) text(raw []byte) {
	t.buf = scan.AppendUnescaped(t.buf[:0], raw)
	t.ids = appendTokens(t.ids, t.buf)
}

func (t *template) message(raw []byte) error {
	if raw[0] != '{' {
		return badf("messages: every message must be an object")
	}
	var content, calls []byte
	var role string
	for it := scan.Iterate(raw); it.Next(); {
		switch v := it.Value(); {
		case it.KeyIs("role") && v[0] == '"':
			role = string(scan.AppendUnescaped(nil, v))
		case it.KeyIs("content"):
			content = v
		case it.KeyIs("tool_calls"):
			calls = v
		}
	}
	if role == "" {
		return badf("messages: every message needs a role")
	}
	t.ids = append(t.ids, tokStart)
	if id, ok := roleToken(role); ok {
		t.ids = append(t.ids, id)
	} else {
		t.ids = appendTokens(t.ids, []byte(role))
	}
	if err := t.content(content); err != nil {
		return err
	}
	if len(calls) > 0 && calls[0] == '[' {
		t.ids = appendTokens(append(t.ids, tokToolCall), calls)
	}
	t.ids = append(t.ids, tokEnd)
	return nil
}

func (t *template) content(raw []byte) error {
	switch {
	case len(raw) == 0 || raw[0] == 'n':
		return nil
	case raw[0] == '"':
		t.text(raw)
		return nil
	case raw[0] != '[':
		return badf("messages: content must be a string or a list of parts")
	}
	for it := scan.Iterate(raw); it.Next(); {
		part := it.Value()
		if text, ok := scan.Find(part, "text"); ok && text.Raw[0] == '"' {
			t.text(text.Raw)
			continue
		}
		t.ids = appendTokens(append(t.ids, tokImage), part)
	}
	return nil
}

// plainPrompts reads text, prompt or input_ids, alone or in a list.
func plainPrompts(s surface, b *scan.Body) (prompts [][]int32, batch bool, err error) {
	v, ok := b.Get("prompt")
	if s == surfaceGenerate {
		v, ok = b.Get("text")
		if ids, have := b.Get("input_ids"); have && ids.Raw[0] == '[' {
			v, ok = ids, true
		}
		if !ok || v.Raw[0] == 'n' {
			return nil, false, badf("Either text, input_ids or input_embeds should be provided.")
		}
	}
	switch {
	case !ok:
		return nil, false, badf("prompt: Field required")
	case v.Raw[0] == '"':
		prompts = [][]int32{textIDs(v.Raw)}
	case v.Raw[0] == '[':
		prompts, batch, err = promptList(v.Raw)
	default:
		err = badf("the prompt must be a string, a list of token ids, or a list of either")
	}
	if err != nil {
		return nil, false, err
	}
	for _, p := range prompts {
		if len(p) == 0 {
			return nil, false, badf("the prompt is empty")
		}
	}
	return prompts, batch, nil
}

func promptList(raw []byte) (prompts [][]int32, batch bool, err error) {
	it := scan.Iterate(raw)
	if !it.Next() {
		return nil, false, badf("the prompt is empty")
	}
	if c := it.Value()[0]; c != '"' && c != '[' {
		ids, err := idList(raw)
		return [][]int32{ids}, false, err
	}
	for it := scan.Iterate(raw); it.Next(); {
		switch v := it.Value(); v[0] {
		case '"':
			prompts = append(prompts, textIDs(v))
		case '[':
			ids, err := idList(v)
			if err != nil {
				return nil, false, err
			}
			prompts = append(prompts, ids)
		default:
			return nil, false, badf("the prompts must all be strings or all be lists of token ids")
		}
	}
	return prompts, true, nil
}

func textIDs(raw []byte) []int32 {
	text := scan.AppendUnescaped(nil, raw)
	return appendTokens(make([]int32, 0, len(text)/4+1024), text)
}

// idList reads a JSON list of token ids.
func idList(raw []byte) ([]int32, error) {
	ids := make([]int32, 0, len(raw)/4+1024)
	for it := scan.Iterate(raw); it.Next(); {
		n, ok := scan.ParseInt(it.Value())
		if !ok || n < 0 || n > 1<<31-1 {
			return nil, badf("input_ids: every id must be an integer from 0 to 2147483647")
		}
		ids = append(ids, int32(n))
	}
	return ids, nil
}
