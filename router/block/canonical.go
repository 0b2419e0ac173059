package block

import (
	"errors"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/scan"
)

// What a client is told when the prompt cannot be read.
var (
	errMessages = errors.New("messages must be an array of messages")
	errPrompt   = errors.New("prompt must be a string, an array of strings or an array of token ids")
	errText     = errors.New("text must be a string or an array of strings")
	errInputIDs = errors.New("input_ids must be an array of token ids")
)

// Of hashes the prompt of a scanned body. scratch may be nil; its arrays are
// reused. model is the engine's served name after aliasing; the salt is the
// body's cache_salt, and extra_key and lora_path separate chains likewise. The
// error is a sentence for the client; it means the prompt member is missing or
// of no possible type. Odd content inside messages is hashed as it stands.
func Of(r Route, b *scan.Body, model string, scratch *Scratch) (Chain, error) {
	salt, _ := b.String("cache_salt")
	w := newWriter(scratch, Seed(model, salt))
	w.separate(b, "extra_key")
	w.separate(b, "lora_path")
	var c Chain
	var err error
	switch r {
	case Completions:
		c, err = w.prompts(member(b, "prompt"), errPrompt)
	case Generate:
		c, err = w.generate(b)
	default:
		c, err = w.chat(b)
	}
	if err != nil {
		return Chain{}, err
	}
	return c, nil
}

// separate gives prompts with different values of a member different chains.
func (w *writer) separate(b *scan.Body, key string) {
	if raw := member(b, key); raw != nil {
		w.seed = xxh3.HashSeed(raw, xxh3.HashStringSeed(key, w.seed))
	}
}

// member is a raw top-level value; nil when it is absent or null.
func member(b *scan.Body, key string) []byte {
	v, ok := b.Get(key)
	if !ok || isNull(v.Raw) {
		return nil
	}
	return v.Raw
}

func isNull(raw []byte) bool { return len(raw) == 0 || raw[0] == 'n' }

// end closes a chain of canonical bytes.
func (w *writer) end(turn int) Chain {
	w.flush()
	return Chain{Blocks: w.blocks, Bytes: w.size(), Turn: turn}
}

func (w *writer) chat(b *scan.Body) (Chain, error) {
	messages := member(b, "messages")
	if messages == nil || messages[0] != '[' {
		return Chain{}, errMessages
	}
	if ids := member(b, "input_ids"); ids != nil && ids[0] == '[' {
		return w.chatIDs(messages, ids)
	}
	if string(member(b, "tool_choice")) != `"none"` {
		for it := scan.Iterate(member(b, "tools")); it.Next(); {
			w.field('D')
			w.value(it.Value(), 2)
		}
	}
	if system := member(b, "system"); system != nil {
		w.field('M')
		w.write([]byte("system"))
		w.content(system)
	}
	turn := 0
	for it := scan.Iterate(messages); it.Next(); {
		if w.message(&it) {
			turn++
		}
	}
	return w.end(turn), nil
}

// chatIDs reads a chat whose client rendered the template itself: the engine
// takes its input_ids and ignores the text.
func (w *writer) chatIDs(messages, ids []byte) (Chain, error) {
	c, err := w.idChain(ids, errInputIDs)
	for it := scan.Iterate(messages); it.Next(); {
		if role, _ := scan.Find(it.Value(), "role"); string(role.Raw) == `"assistant"` {
			c.Turn++
		}
	}
	return c, err
}

// message writes the message at at and reports whether the assistant said it.
func (w *writer) message(at *scan.Iter) (assistant bool) {
	if at.First() != '{' {
		w.field('M')
		w.value(at.Value(), 0)
		return false
	}
	var m message
	it := at.Enter()
	for it.Next() {
		m.take(&it)
	}
	at.Leave(&it)
	w.field('M')
	if len(m.role) > 0 && m.role[0] == '"' {
		w.text(m.role[1 : len(m.role)-1])
	}
	w.str('N', m.name)
	w.str('R', m.answers)
	w.content(m.content)
	for it := scan.Iterate(m.calls); it.Next(); {
		w.toolCall(it.Value())
	}
	if !isNull(m.call) {
		w.function(nil, m.call)
	}
	return string(m.role) == `"assistant"`
}

// message is what is hashed of one message, raw.
type message struct{ role, name, answers, content, calls, call []byte }

// take keeps the current member of it. Of copies the last one stays, as in the
// engine.
func (m *message) take(it *scan.Iter) {
	switch string(it.Name()) {
	case "role":
		m.role = it.Value()
	case "name":
		m.name = it.Value()
	case "tool_call_id":
		m.answers = it.Value()
	case "content":
		m.content = it.Value()
	case "tool_calls":
		m.calls = it.Value()
	case "function_call":
		m.call = it.Value()
	}
}

// content writes a string, an array of parts, or whatever else stands there.
func (w *writer) content(raw []byte) {
	switch {
	case isNull(raw):
	case raw[0] == '"':
		w.str('T', raw)
	case raw[0] == '[':
		for it := scan.Iterate(raw); it.Next(); {
			w.part(&it)
		}
	default:
		w.value(raw, 1)
	}
}

// part writes the content part at at, in either API's shape.
func (w *writer) part(at *scan.Iter) {
	if at.First() != '{' {
		w.content(at.Value())
		return
	}
	var kind, body []byte
	it := at.Enter()
	for it.Next() {
		switch v := it.Value(); string(it.Name()) {
		case "type":
			kind = v
		case "text", "image_url", "video_url", "audio_url", "input_audio", "source":
			body = v
		}
	}
	at.Leave(&it)
	raw := at.Value()
	switch string(kind) {
	case `"tool_use"`:
		w.toolUse(raw)
	case `"tool_result"`:
		v, _ := scan.Find(raw, "tool_use_id")
		w.str('R', v.Raw)
		v, _ = scan.Find(raw, "content")
		w.content(v.Raw)
	case `"thinking"`, `"redacted_thinking"`:
	case `"text"`, `"input_text"`, `"output_text"`:
		w.str('T', body)
	default:
		if !w.mediaPart(body) {
			w.value(raw, 1)
		}
	}
}

// mediaPart writes a url, or an object that holds one or the data itself.
func (w *writer) mediaPart(raw []byte) bool {
	if w.media(raw) {
		return true
	}
	for _, key := range [...]string{"url", "data"} {
		if v, ok := scan.Find(raw, key); ok && w.media(v.Raw) {
			return true
		}
	}
	return false
}

func (w *writer) toolUse(raw []byte) {
	id, _ := scan.Find(raw, "id")
	name, _ := scan.Find(raw, "name")
	input, _ := scan.Find(raw, "input")
	w.call(id.Raw, name.Raw, input.Raw)
}

func (w *writer) toolCall(raw []byte) {
	id, _ := scan.Find(raw, "id")
	f, ok := scan.Find(raw, "function")
	if !ok {
		f.Raw = raw
	}
	w.function(id.Raw, f.Raw)
}

// function writes a call of an object with name and arguments.
func (w *writer) function(id, raw []byte) {
	name, _ := scan.Find(raw, "name")
	args, _ := scan.Find(raw, "arguments")
	w.call(id, name.Raw, args.Raw)
}

func (w *writer) call(id, name, args []byte) {
	if !w.str('C', id) {
		w.field('C')
	}
	w.str('N', name)
	if !isNull(args) && !w.str('A', args) {
		w.value(args, 0)
	}
}

// prompts writes the prompt of a completion: text or ids, one or a batch.
func (w *writer) prompts(raw []byte, bad error) (Chain, error) {
	switch {
	case raw == nil:
		return Chain{}, bad
	case raw[0] == '"':
		w.prompt(raw)
		return w.end(0), nil
	case raw[0] != '[':
		return Chain{}, bad
	}
	first := scan.Iterate(raw)
	if !first.Next() {
		return Chain{}, bad
	}
	switch first.Value()[0] {
	case '"', '[':
		return w.batch(raw, bad)
	}
	return w.idChain(raw, bad)
}

func (w *writer) prompt(raw []byte) {
	w.field('P')
	w.text(raw[1 : len(raw)-1])
}

func (w *writer) idChain(raw []byte, bad error) (Chain, error) {
	w.seed = xxh3.HashStringSeed("ids", w.seed)
	n, ok := w.ids(raw)
	if !ok {
		return Chain{}, bad
	}
	w.flush()
	return Chain{Blocks: w.blocks, IDs: n}, nil
}

// batch writes a list of prompts. One prompt in a list is that prompt; more
// have no common prefix, so only their size is kept.
func (w *writer) batch(raw []byte, bad error) (Chain, error) {
	it := scan.Iterate(raw)
	it.Next()
	only := it.Value()
	if !it.Next() {
		if only[0] == '[' {
			return w.idChain(only, bad)
		}
		w.prompt(only)
		return w.end(0), nil
	}
	ids := 0
	for it := scan.Iterate(raw); it.Next(); {
		switch v := it.Value(); v[0] {
		case '"':
			w.prompt(v)
		case '[':
			n, ok := w.ids(v)
			if !ok {
				return Chain{}, bad
			}
			ids += n
		default:
			return Chain{}, bad
		}
	}
	if ids > 0 {
		return Chain{IDs: ids}, nil
	}
	return Chain{Bytes: w.size()}, nil
}

// generate reads SGLang's own surface: input_ids or text. With neither (a
// prompt of embeddings) there is nothing to hash.
func (w *writer) generate(b *scan.Body) (Chain, error) {
	if ids := member(b, "input_ids"); ids != nil {
		if ids[0] != '[' {
			return Chain{}, errInputIDs
		}
		return w.prompts(ids, errInputIDs)
	}
	if text := member(b, "text"); text != nil {
		return w.prompts(text, errText)
	}
	return Chain{}, nil
}
