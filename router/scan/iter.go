package scan

import "bytes"

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
	i := skipSpace(it.b, it.pos)
	if it.b[i] == ',' {
		i = skipSpace(it.b, i+1)
	}
	if it.b[i] == ']' || it.b[i] == '}' {
		*it = Iter{}
		return false
	}
	if it.object {
		end := skipString(it.b, i)
		it.key = it.b[i+1 : end-1]
		i = skipSpace(it.b, end)
		i = skipSpace(it.b, i+1) // the colon
	}
	it.start, it.end = i, skipValue(it.b, i)
	it.pos = it.end
	return true
}

// Value is the raw current element, aliasing the iterated value.
func (it *Iter) Value() []byte { return it.b[it.start:it.end:it.end] }

// Span is the current element as offsets into the iterated value.
func (it *Iter) Span() (start, end int) { return it.start, it.end }

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
func skipString(b []byte, i int) int {
	i++
	for {
		i += bytes.IndexByte(b[i:], '"')
		slashes := 0
		for b[i-1-slashes] == '\\' {
			slashes++
		}
		i++
		if slashes%2 == 0 {
			return i
		}
	}
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
