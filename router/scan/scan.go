// Package scan finds and splices top-level JSON members without decoding the body.
package scan

// Value is a span of the body.
type Value struct {
	Start, End int
	Raw        []byte // body[Start:End], aliasing the body
}

// Body is a scanned JSON object.
type Body struct{}

// Limits bound what Parse accepts.
type Limits struct {
	MaxDepth int // 0 = 512
}

// SyntaxError says where a body is not a JSON object.
type SyntaxError struct {
	Offset int
	Msg    string
}

func (e *SyntaxError) Error() string { return e.Msg }

// Parse validates b as one JSON object in a single pass and records its
// top-level members. b is aliased, not copied. With duplicate keys the last
// one wins for Get (as in the engines' parsers) and every copy is removed by Del.
func Parse(b []byte, l Limits) (*Body, error) { panic("contract") }

// Get returns the raw value of a top-level member.
func (b *Body) Get(key string) (Value, bool) { panic("contract") }

// String returns a string member, unescaped; ok is false when it is absent or not a string.
func (b *Body) String(key string) (s string, ok bool) { panic("contract") }

// Int returns an integral number member.
func (b *Body) Int(key string) (n int64, ok bool) { panic("contract") }

// Bool returns a boolean member.
func (b *Body) Bool(key string) (v, ok bool) { panic("contract") }

// Keys calls f for every top-level member in body order.
func (b *Body) Keys(f func(key string, v Value) bool) { panic("contract") }

// Bytes returns the scanned body.
func (b *Body) Bytes() []byte { panic("contract") }

// Member is one member to add; Value is raw JSON.
type Member struct {
	Key   string
	Value []byte
}

// Splice is a set of edits: Del removes every copy of a key with its comma, Set
// adds each member once (removing the client's own copies), Cut removes spans
// given as offsets (R125's block, with its comma).
type Splice struct {
	Del []string
	Set []Member
	Cut [][2]int
}

// Apply writes the edited body to dst[:0] and returns it. Bytes outside the
// edits are identical.
func (b *Body) Apply(dst []byte, s Splice) []byte { panic("contract") }
