// Package block turns prompt bytes or token ids into chained block hashes.
//
// It decides when two prompts share a prefix: equal hash means equal whole
// prefix. It refuses to know tokens, templates and engines; its bytes stand for
// the prompt only in that different prompts give different bytes.
//
// # Canonical bytes (format kvc-b96-v1)
//
// The prompt is written as a stream of fields. A field is the byte 0xFF, one
// letter, and a payload that runs to the next 0xFF. UTF-8 never holds 0xFF; in
// a body that does, it is read as U+FFFD, so no text can pose as structure.
// There are no counts and no lengths before a text: a longer conversation only
// appends, and two long texts share the blocks before their first difference.
//
//	M role       a message, or the top-level system prompt (role "system")
//	N name       of a participant, or of the function called
//	R id         the tool call that this content answers
//	T text       one text part; an empty text writes nothing
//	I hash       an image, audio, video or document: 16 hex digits of xxh3_64(url or data)
//	C id         a tool call; then N name and A arguments
//	A text       arguments given as text; given as JSON they are a value
//	D            a tool definition; then a value
//	P text       a completion prompt
//	{ } [ ] K S V   a JSON value in the client's own member order: key, string, number or literal
//
// Order: tools (none when tool_choice is "none": the engine renders none), the
// top-level system prompt, messages; inside a message role, name, answered
// call, content, tool calls. String content equals one text part. Strings are
// unescaped, white space between tokens is gone. Not hashed: cache_control,
// thinking and reasoning (templates strip it from earlier turns), every key not
// named here.
//
// The bytes are cut into blocks of 96; h[i] = xxh3_64(block[i], seed h[i-1]),
// with Seed(model, salt) before the first. Token ids are blocks of 24 as
// little-endian u32, and their chain starts from a seed of its own. A rest
// shorter than a block is in no hash.
//
// A chat that brings input_ids is hashed by them: the engine ignores its text.
//
// A batch (several prompts in one body) has no single prefix: no blocks, but
// its size is counted.
package block
