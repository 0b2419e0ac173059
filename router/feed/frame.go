// Package feed is a worker's residency, load and drain state as a stream
// (wire.md §4): frames, server and follower.
package feed

// Frame is one line of the feed. T decides which members are meaningful.
type Frame struct {
	T   string `json:"t"` // hello snap session add evict own clear state turn load
	Seq uint64 `json:"seq"`

	// hello
	Wire           int               `json:"wire,omitempty"`
	Format         string            `json:"format,omitempty"`
	Worker         string            `json:"worker,omitempty"`
	Epoch          string            `json:"epoch,omitempty"`
	Role           string            `json:"role,omitempty"`
	DPRank         int               `json:"dp_rank,omitempty"`
	Model          string            `json:"model,omitempty"`
	CapacityTokens int               `json:"capacity_tokens,omitempty"`
	PageSize       int               `json:"page_size,omitempty"`
	DirectPath     map[string]string `json:"direct_path,omitempty"`
	Resume         bool              `json:"resume,omitempty"`
	TokensPerBlock float64           `json:"tokens_per_block,omitempty"` // additive: the learnt ratio (Q17)

	// snap
	Part     int       `json:"part,omitempty"`
	Last     bool      `json:"last,omitempty"`
	Sessions []Session `json:"sessions,omitempty"`
	Blocks   []Owned   `json:"blocks,omitempty"`

	// session
	*Session

	// add, evict, own
	Owner string `json:"owner,omitempty"`
	B     string `json:"b,omitempty"`

	// state
	State          string `json:"state,omitempty"`
	SoftDeadlineMS int64  `json:"soft_deadline_ms,omitempty"`
	HardDeadlineMS int64  `json:"hard_deadline_ms,omitempty"`

	// turn
	Attempt          string `json:"attempt,omitempty"`
	TurnSession      string `json:"session,omitempty"`
	Mode             string `json:"mode,omitempty"`
	PromptTokens     int    `json:"prompt_tokens,omitempty"`
	CachedTokens     int    `json:"cached_tokens,omitempty"`
	CompletionTokens int    `json:"completion_tokens,omitempty"`
	Outcome          string `json:"outcome,omitempty"`

	// load
	*Load
}

// Session is the SESSION object.
type Session struct {
	Key              string `json:"key"`
	Lineage          string `json:"lineage,omitempty"`
	Tail             string `json:"tail,omitempty"`
	BlockCount       int    `json:"blocks,omitempty"`
	ResidentTokens   int    `json:"resident_tokens,omitempty"`
	LastUseMS        int64  `json:"last_use_ms,omitempty"`
	Active           int    `json:"active"`
	ProtectedUntilMS int64  `json:"protected_until_ms,omitempty"`
	Gone             bool   `json:"gone,omitempty"`
}

// Owned is a run of blocks with their owner lineage.
type Owned struct {
	Owner string `json:"owner"`
	B     string `json:"b"`
}

// Load is the heartbeat's body, in tokens, requests and tokens per second.
type Load struct {
	Used                  int     `json:"used"`
	Locked                int     `json:"locked"`
	Protected             int     `json:"protected"`
	Reserved              int     `json:"reserved"`
	Running               int     `json:"running"`
	Waiting               int     `json:"waiting"`
	Transferring          int     `json:"transferring"`
	WaitingUncachedTokens int     `json:"waiting_uncached_tokens"`
	PrefillTokensPerS     float64 `json:"prefill_tokens_per_s"`
	DecodeTokensPerS      float64 `json:"decode_tokens_per_s"`
}
