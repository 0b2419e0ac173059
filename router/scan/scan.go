package scan

import (
	"fmt"
	"math"
	"slices"
	"strconv"
)

// Value is a span of the body.
type Value struct {
	Start, End int
	Raw        []byte // body[Start:End], aliasing the body
}

// Defaults of Limits.
const (
	DefaultMaxDepth   = 512
	DefaultMaxMembers = 4096
)

// Limits bound what Parse accepts.
type Limits struct {
	MaxDepth   int // nesting, the body itself is 1; 0 = DefaultMaxDepth
	MaxMembers int // top-level members, duplicates counted; 0 = DefaultMaxMembers
}

// SyntaxError says where a body is not a JSON object.
type SyntaxError struct {
	Offset int    // in bytes, from 0
	Msg    string // a sentence fragment, without the offset
}

// Error names the offset and the fault. It never quotes the body, which may be
// a prompt.
func (e *SyntaxError) Error() string {
	return fmt.Sprintf("invalid JSON at byte %d: %s", e.Offset, e.Msg)
}

// member is one top-level member. The key is compared unescaped: a client that
// writes "mod\u0065l" means model, and an engine reads it so (R53).
type member struct {
	start      int // of the key's opening quote
	key        []byte
	val        int
	end        int
	keyEscaped bool // key is a decoded copy
}

// Body is a scanned JSON object.
type Body struct {
	raw     []byte
	open    int // offset of the object's '{'
	members []member
	inline  [24]member // most bodies need no second allocation
}

// Parse validates b as one JSON object in a single pass and records its
// top-level members. b is aliased, not copied. With duplicate keys the last
// one wins for Get (as in the engines' parsers) and every copy is removed by Del.
// The error is a *SyntaxError.
func Parse(b []byte, l Limits) (*Body, error) {
	body := new(Body)
	if err := body.Reset(b, l); err != nil {
		return nil, err
	}
	return body, nil
}

// Reset is Parse into an existing Body, whose member table is reused. After an
// error the Body is empty.
func (b *Body) Reset(raw []byte, l Limits) error {
	if l.MaxDepth <= 0 {
		l.MaxDepth = DefaultMaxDepth
	}
	if l.MaxMembers <= 0 {
		l.MaxMembers = DefaultMaxMembers
	}
	b.raw, b.open = raw, 0
	if b.members == nil {
		b.members = b.inline[:0]
	}
	b.members = b.members[:0]
	p := parser{b: raw, maxDepth: l.MaxDepth}
	if err := p.body(b, l.MaxMembers); err != nil {
		b.raw, b.members = nil, b.members[:0]
		return err
	}
	return nil
}

// find is the index of the last member with this key, or -1.
func (b *Body) find(key string) int {
	for i := range slices.Backward(b.members) {
		if string(b.members[i].key) == key {
			return i
		}
	}
	return -1
}

func (b *Body) value(i int) Value {
	m := &b.members[i]
	return Value{Start: m.val, End: m.end, Raw: b.raw[m.val:m.end:m.end]}
}

// Get returns the raw value of a top-level member.
func (b *Body) Get(key string) (Value, bool) {
	i := b.find(key)
	if i < 0 {
		return Value{}, false
	}
	return b.value(i), true
}

// String returns a string member, unescaped; ok is false when it is absent or not a string.
func (b *Body) String(key string) (s string, ok bool) {
	v, ok := b.Get(key)
	if !ok || v.Raw[0] != '"' {
		return "", false
	}
	return string(AppendUnescaped(nil, v.Raw)), true
}

// Int returns an integral number member. 3, 3.0 and 3e0 are the same integer;
// 3.5, "3" and what does not fit are none.
func (b *Body) Int(key string) (n int64, ok bool) {
	v, ok := b.Get(key)
	if !ok {
		return 0, false
	}
	return ParseInt(v.Raw)
}

// ParseInt reads a raw JSON number that has an integral value.
func ParseInt(raw []byte) (n int64, ok bool) {
	if len(raw) == 0 || raw[0] != '-' && (raw[0] < '0' || raw[0] > '9') {
		return 0, false
	}
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

// Bool returns a boolean member.
func (b *Body) Bool(key string) (v, ok bool) {
	raw, ok := b.Get(key)
	if !ok {
		return false, false
	}
	switch string(raw.Raw) {
	case "true":
		return true, true
	case "false":
		return false, true
	}
	return false, false
}

// Keys calls f for every top-level member in body order, duplicates included,
// until f returns false.
func (b *Body) Keys(f func(key string, v Value) bool) {
	for i := range b.members {
		if !f(string(b.members[i].key), b.value(i)) {
			return
		}
	}
}

// Bytes returns the scanned body.
func (b *Body) Bytes() []byte { return b.raw }
