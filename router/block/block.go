package block

// Hash identifies a block and, because hashes are chained, the whole prefix
// that ends with it.
type Hash uint64

// Format is the id of the canonical bytes and block length (wire.md §0).
const Format = "kvc-b96-v1"

const (
	// Bytes is the length of one block of canonical prompt bytes.
	Bytes = 96
	// IDs is the number of token ids in one block when the client sends ids.
	IDs = 24
)

// Route is the API surface a body belongs to.
type Route string

// The surfaces whose bodies Of reads (wire.md §2 route).
const (
	Chat        Route = "chat"
	Completions Route = "completions"
	Generate    Route = "generate"
)

// Chain is the canonical prompt of one request.
type Chain struct {
	Blocks []Hash // full blocks only, root first
	Bytes  int    // canonical bytes, tail included; 0 when IDs > 0
	IDs    int    // token ids, tail included, when the client sent ids
	Turn   int    // assistant messages in the request: a stateless estimate of t(r)
}

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
