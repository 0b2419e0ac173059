package scan

import (
	"encoding/binary"
	"math/bits"
	"slices"
	"strconv"
)

// parser is one pass over b. Its methods take the offset of the first byte of
// something and return the offset after it, or -1 with err set.
type parser struct {
	b        []byte
	maxDepth int
	err      *SyntaxError
}

func (p *parser) fail(i int, msg string) int {
	if p.err == nil {
		p.err = &SyntaxError{Offset: min(i, len(p.b)), Msg: msg}
	}
	return -1
}

// unexpected fails at i, where something of kind want should stand.
func (p *parser) unexpected(i int, want string) int {
	if i >= len(p.b) {
		return p.fail(i, "the body ends where "+want+" should stand")
	}
	if p.b[i] == 0 {
		return p.fail(i, "a NUL byte stands where "+want+" should stand")
	}
	return p.fail(i, want+" should stand here")
}

// body parses the whole input into b's member table.
func (p *parser) body(b *Body, maxMembers int) error {
	i := p.space(0)
	if i >= len(p.b) {
		p.fail(i, "the body is empty; send one JSON object")
		return p.err
	}
	if p.b[i] != '{' {
		p.fail(i, "the body must be one JSON object")
		return p.err
	}
	b.open = i
	if i = p.members(b, i+1, maxMembers); i < 0 {
		return p.err
	}
	if i = p.space(i); i < len(p.b) {
		p.fail(i, "unexpected data after the JSON object")
		return p.err
	}
	return nil
}

// members parses top-level members from after the '{' to after the '}'.
func (p *parser) members(b *Body, i, maxMembers int) int {
	i = p.space(i)
	if i < len(p.b) && p.b[i] == '}' {
		return i + 1
	}
	for {
		m := member{start: i}
		if i, m.val = p.key(i); i < 0 {
			return -1
		}
		m.setKey(p.b[m.start+1 : i-1])
		if m.end = p.value(m.val, 1); m.end < 0 {
			return -1
		}
		if len(b.members) >= maxMembers {
			return p.fail(m.start, "more than "+strconv.Itoa(maxMembers)+" top-level members")
		}
		b.members = append(b.members, m)
		next, more := p.next(m.end, '}')
		if !more {
			return next
		}
		i = next
	}
}

func (m *member) setKey(raw []byte) {
	m.key = slices.Clip(raw)
	if !plain(raw) {
		m.key, m.keyEscaped = appendUnescaped(make([]byte, 0, len(raw)), raw), true
	}
}

// key parses a member's name and colon: end is the offset after the closing
// quote, val that of the value.
func (p *parser) key(i int) (end, val int) {
	if i >= len(p.b) || p.b[i] != '"' {
		return p.unexpected(i, "a member name in double quotes"), -1
	}
	if end = p.str(i); end < 0 {
		return -1, -1
	}
	i = p.space(end)
	if i >= len(p.b) || p.b[i] != ':' {
		return p.unexpected(i, "a colon"), -1
	}
	return end, p.space(i + 1)
}

// next parses what follows an element: a comma (more, next is the offset of the
// next element) or the closing byte (next is the offset after it).
func (p *parser) next(i int, closing byte) (next int, more bool) {
	i = p.space(i)
	if i < len(p.b) {
		if p.b[i] == ',' {
			return p.space(i + 1), true
		}
		if p.b[i] == closing {
			return i + 1, false
		}
	}
	if closing == '}' {
		return p.unexpected(i, "a comma or a closing brace"), false
	}
	return p.unexpected(i, "a comma or a closing bracket"), false
}

// value parses any value inside depth enclosing containers.
func (p *parser) value(i, depth int) int {
	if i >= len(p.b) {
		return p.unexpected(i, "a value")
	}
	switch c := p.b[i]; c {
	case '"':
		return p.str(i)
	case '{', '[':
		return p.container(i, depth)
	case 't':
		return p.literal(i, "true")
	case 'f':
		return p.literal(i, "false")
	case 'n':
		return p.literal(i, "null")
	default:
		if c == '-' || isDigit(c) {
			return p.number(i)
		}
		return p.unexpected(i, "a value")
	}
}

func (p *parser) container(i, depth int) int {
	if depth >= p.maxDepth {
		return p.fail(i, "nested deeper than "+strconv.Itoa(p.maxDepth)+" levels")
	}
	if p.b[i] == '{' {
		return p.object(i+1, depth+1)
	}
	return p.array(i+1, depth+1)
}

func (p *parser) object(i, depth int) int {
	i = p.space(i)
	if i < len(p.b) && p.b[i] == '}' {
		return i + 1
	}
	for {
		_, val := p.key(i)
		if val < 0 {
			return -1
		}
		end := p.value(val, depth)
		if end < 0 {
			return -1
		}
		next, more := p.next(end, '}')
		if !more {
			return next
		}
		i = next
	}
}

func (p *parser) array(i, depth int) int {
	i = p.space(i)
	if i < len(p.b) && p.b[i] == ']' {
		return i + 1
	}
	for {
		end := p.value(i, depth)
		if end < 0 {
			return -1
		}
		next, more := p.next(end, ']')
		if !more {
			return next
		}
		i = next
	}
}

func (p *parser) literal(i int, word string) int {
	if len(p.b)-i < len(word) || string(p.b[i:i+len(word)]) != word {
		return p.unexpected(i, "true, false or null")
	}
	return i + len(word)
}

// number parses -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?.
func (p *parser) number(i int) int {
	b := p.b
	if b[i] == '-' {
		i++
	}
	switch {
	case i < len(b) && b[i] == '0':
		i++
	case i < len(b) && isDigit(b[i]):
		i = digits(b, i)
	default:
		return p.unexpected(i, "a digit")
	}
	if i < len(b) && b[i] == '.' {
		if i = p.someDigits(i + 1); i < 0 {
			return -1
		}
	}
	return p.exponent(i)
}

// exponent parses an optional exponent.
func (p *parser) exponent(i int) int {
	if i >= len(p.b) || p.b[i]|0x20 != 'e' {
		return i
	}
	i++
	if i < len(p.b) && (p.b[i] == '+' || p.b[i] == '-') {
		i++
	}
	return p.someDigits(i)
}

func (p *parser) someDigits(i int) int {
	end := digits(p.b, i)
	if end == i {
		return p.unexpected(i, "a digit")
	}
	return end
}

// str parses a string from its opening quote.
func (p *parser) str(i int) int {
	b := p.b
	for i++; ; {
		i = skipPlain(b, i)
		if i >= len(b) {
			return p.fail(i, "a string is not closed")
		}
		switch b[i] {
		case '"':
			return i + 1
		case '\\':
			n := escapeLen(b[i:])
			if n == 0 {
				return p.fail(i, "a broken escape sequence in a string")
			}
			i += n
		default:
			return p.fail(i, "a control character in a string must be escaped")
		}
	}
}

// escapeLen is the length of the escape sequence at the start of b, 0 = none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if _, ok := hex4(b[2:]); ok {
			return 6
		}
	}
	return 0
}

func (p *parser) space(i int) int { return skipSpace(p.b, i) }

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

func digits(b []byte, i int) int {
	for i < len(b) && isDigit(b[i]) {
		i++
	}
	return i
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// special marks, in the high bit of a byte, the first byte of w that is a
// quote, a backslash or a control character. Marks above the first may be
// false (borrows travel upwards), so only the lowest one counts.
func special(w uint64) uint64 {
	quote, slash := w^('"'*ones), w^('\\'*ones)
	return ((quote-ones)&^quote | (slash-ones)&^slash | (w-0x20*ones)&^w) & highs
}

// skipPlain returns the offset of the next byte of b that cannot stand
// unescaped inside a string, or len(b). Prompts are nearly all plain bytes, so
// this loop is what a scan costs.
func skipPlain(b []byte, i int) int {
	if i+8 <= len(b) { // text dense with escapes rarely gets further
		if m := special(binary.LittleEndian.Uint64(b[i:])); m != 0 {
			return i + bits.TrailingZeros64(m)/8
		}
		i += 8
	}
	for ; i+16 <= len(b); i += 16 {
		lo := special(binary.LittleEndian.Uint64(b[i:]))
		hi := special(binary.LittleEndian.Uint64(b[i+8:]))
		if lo|hi == 0 {
			continue
		}
		if lo != 0 {
			return i + bits.TrailingZeros64(lo)/8
		}
		return i + 8 + bits.TrailingZeros64(hi)/8
	}
	for ; i < len(b); i++ {
		if b[i] < 0x20 || b[i] == '"' || b[i] == '\\' {
			break
		}
	}
	return i
}
