package scan

import (
	"bytes"
	"encoding/binary"
	"math/bits"
)

// Iter walks the elements of one array or the members of one object without
// allocating. The zero Iter is empty. Use:
//
//	for it := scan.Iterate(v.Raw); it.Next(); {
//		it.KeyIs("role"), it.Value()
//	}
type Iter struct {
	b          []byte
	pos        int
	object     bool
	key        []byte // raw, between the quotes
	start, end int
}

// Iterate walks a raw value that Parse has validated. A value that is neither
// an array nor an object has no elements.
func Iterate(raw []byte) Iter {
	if len(raw) == 0 || raw[0] != '[' && raw[0] != '{' {
		return Iter{}
	}
	return Iter{b: raw, pos: 1, object: raw[0] == '{'}
}

// Next moves to the next element and reports whether there is one.
func (it *Iter) Next() bool {
	if it.b == nil {
		return false
	}
	i := skipSpace(it.b, it.close())
	if it.b[i] == ',' {
		i = skipSpace(it.b, i+1)
	}
	if it.b[i] == ']' || it.b[i] == '}' {
		*it = Iter{pos: i + 1}
		return false
	}
	if it.object {
		end := skipString(it.b, i)
		it.key = it.b[i+1 : end-1]
		i = skipSpace(it.b, end)
		i = skipSpace(it.b, i+1) // the colon
	}
	it.start, it.end = i, 0
	return true
}

// close is the offset after the current element, or after what opens the walk.
// The end of an element is looked for only when somebody needs it.
func (it *Iter) close() int {
	if it.start == 0 {
		return it.pos
	}
	if it.end == 0 {
		it.end = skipValue(it.b, it.start)
	}
	return it.end
}

// Value is the raw current element, aliasing the iterated value.
func (it *Iter) Value() []byte {
	end := it.close()
	return it.b[it.start:end:end]
}

// First is the first byte of the current element, which tells its kind.
func (it *Iter) First() byte { return it.b[it.start] }

// Span is the current element as offsets into the iterated value.
func (it *Iter) Span() (start, end int) { return it.start, it.close() }

// Enter walks the current element without looking for its end first, which
// saves a pass over it. Walk it to its end, then hand the child to Leave.
// First must be '[' or '{'.
func (it *Iter) Enter() Iter {
	return Iter{b: it.b[it.start:], pos: 1, object: it.b[it.start] == '{'}
}

// Leave takes the end of the current element from the child that walked it.
func (it *Iter) Leave(child *Iter) {
	if child.b == nil {
		it.end = it.start + child.pos
	}
}

// KeyIs reports whether the current member is named name; escapes in the key
// do not hide it.
func (it *Iter) KeyIs(name string) bool { return EqualKey(it.key, name) }

// Key is the current member's name as it stands between its quotes; use it
// with EqualKey. It is empty in an array.
func (it *Iter) Key() []byte { return it.key }

// Name is the current member's name, unescaped; it allocates only when the name
// holds an escape.
func (it *Iter) Name() []byte {
	if plain(it.key) {
		return it.key
	}
	return appendUnescaped(nil, it.key)
}

// EqualKey compares a raw member name with a plain one.
func EqualKey(raw []byte, name string) bool {
	if string(raw) == name {
		return true
	}
	// An escape is longer than what it stands for.
	if len(raw) <= len(name) || plain(raw) {
		return false
	}
	var buf [64]byte
	return string(appendUnescaped(buf[:0], raw)) == name
}

// Find finds a member of a raw object; as in Get the last copy wins. Offsets
// are relative to raw.
func Find(raw []byte, key string) (v Value, ok bool) {
	if len(raw) == 0 || raw[0] != '{' {
		return Value{}, false
	}
	for it := Iterate(raw); it.Next(); {
		if it.KeyIs(key) {
			v, ok = Value{Start: it.start, End: it.end, Raw: it.Value()}, true
		}
	}
	return v, ok
}

// skipString returns the offset after the string whose opening quote is at i.
// Two fast searches settle a string without escapes; the rest is walked.
func skipString(b []byte, i int) int {
	i++
	end := i + bytes.IndexByte(b[i:], '"')
	slash := bytes.IndexByte(b[i:end], '\\')
	if slash < 0 {
		return end + 1
	}
	return skipEscaped(b, i+slash)
}

// skipEscaped returns the offset after the string that i stands inside of, at
// no escaped byte. It is skipPlain for text dense with escapes.
func skipEscaped(b []byte, i int) int {
	for i+8 <= len(b) {
		w := binary.LittleEndian.Uint64(b[i:])
		quote, slash := w^('"'*ones), w^('\\'*ones)
		m := ((quote-ones)&^quote | (slash-ones)&^slash) & highs
		if m == 0 {
			i += 8
			continue
		}
		i += bits.TrailingZeros64(m) / 8
		if b[i] == '"' {
			return i + 1
		}
		i += 2
	}
	for b[i] != '"' {
		if b[i] == '\\' {
			i++
		}
		i++
	}
	return i + 1
}

// skipValue returns the offset after the validated value at i.
func skipValue(b []byte, i int) int {
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		return skipContainer(b, i)
	}
	for i < len(b) && !ends(b[i]) {
		i++
	}
	return i
}

// ends reports a byte that ends a number or a literal.
func ends(c byte) bool {
	return c == ',' || c == ']' || c == '}' || c == ' ' || c == '\n' || c == '\r' || c == '\t'
}

func skipContainer(b []byte, i int) int {
	for depth := 0; ; {
		switch b[i] {
		case '"':
			i = skipString(b, i)
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
		i++
	}
}
