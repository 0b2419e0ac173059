package block

import "github.com/kvc-dev/kvc/router/scan"

// Seed starts a chain: model, format version and cache salt.
func Seed(model, salt string) uint64 { panic("contract") }

// Of hashes the prompt of a scanned body. scratch may be nil; its arrays are
// reused. model is the engine's served name after aliasing; the salt is the
// body's cache_salt.
func Of(r Route, b *scan.Body, model string, scratch *Scratch) (Chain, error) { panic("contract") }

// Scratch holds reusable buffers.
type Scratch struct{}

// BillingHeader returns the span (for scan.Splice.Cut) of a leading system text
// block that starts with "x-anthropic-billing-header:" (R125); ok is false when
// there is none.
func BillingHeader(r Route, b *scan.Body) (cut [2]int, ok bool) { panic("contract") }

// CommonPrefix is the number of equal leading blocks.
func CommonPrefix(a, b []Hash) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// Encode is base64 (std, padded) of little-endian u64 in chain order (wire.md §0).
func Encode(hs []Hash) string { panic("contract") }

// Decode reads Encode's form.
func Decode(s string) ([]Hash, error) { panic("contract") }

// String is 16 lower-case hex digits.
func (h Hash) String() string { panic("contract") }

// ParseHash reads String's form.
func ParseHash(s string) (Hash, error) { panic("contract") }
