package feed

import (
	"encoding/json"
	"errors"
	"fmt"
)

const (
	// Wire is the version spoken here. A higher one makes the peer untrusted.
	Wire = 1
	// MaxLine is the longest frame, its line break included, in bytes.
	MaxLine = 1 << 20
)

// Kind is the frame's "t".
type Kind string

// The frames of wire version 1.
const (
	KindHello   Kind = "hello"
	KindSnap    Kind = "snap"
	KindSession Kind = "session"
	KindAdd     Kind = "add"
	KindEvict   Kind = "evict"
	KindOwn     Kind = "own"
	KindClear   Kind = "clear"
	KindState   Kind = "state"
	KindTurn    Kind = "turn"
	KindLoad    Kind = "load"
)

// raises reports whether frames of this kind raise seq by one.
func (k Kind) raises() bool {
	return k != KindHello && k != KindSnap && k != KindLoad
}

// Head is what every frame has. Seq numbers the ledger's changes.
type Head struct {
	T   Kind   `json:"t"`
	Seq uint64 `json:"seq"`
}

func (h *Head) head() *Head { return h }

// Frame is one line of the feed: *Hello, *Snap, *Session, *Blocks, *State,
// *Turn, *Load, or *Head for a clear and for kinds of later versions.
type Frame interface {
	// head gives access to the members that all frames share.
	head() *Head
}

// Hello opens every connection. State and its deadlines are additive members:
// a state frame is sent only when the state changes.
type Hello struct {
	Head
	Wire           int               `json:"wire"`
	Format         string            `json:"format"`
	Worker         string            `json:"worker"`
	Epoch          string            `json:"epoch"`
	Role           string            `json:"role"` // prefill | decode
	DPRank         int               `json:"dp_rank"`
	Model          string            `json:"model"`
	CapacityTokens int               `json:"capacity_tokens"`
	PageSize       int               `json:"page_size"`
	DirectPath     map[string]string `json:"direct_path,omitempty"` // by route: chat, completions, generate
	Resume         bool              `json:"resume"`
	TokensPerBlock float64           `json:"tokens_per_block,omitempty"` // additive: the learnt ratio (Q17)
	State          string            `json:"state,omitempty"`
	SoftDeadlineMS int64             `json:"soft_deadline_ms,omitempty"`
	HardDeadlineMS int64             `json:"hard_deadline_ms,omitempty"`
}

// Snap is one part of a snapshot; all parts carry the same seq.
type Snap struct {
	Head
	Part     int       `json:"part"`
	Last     bool      `json:"last"`
	Sessions []Session `json:"sessions"`
	Blocks   []Owned   `json:"blocks"`
}

// Session is the SESSION object, in a frame of its own or in a snapshot, where
// its head is empty. Times are Unix milliseconds; 0 is none.
type Session struct {
	*Head                   // nil in a snapshot
	Key              string `json:"key"`
	Lineage          string `json:"lineage,omitempty"`
	Tail             string `json:"tail,omitempty"` // absent before the first full block
	Blocks           int    `json:"blocks,omitempty"`
	ResidentTokens   int    `json:"resident_tokens,omitempty"`
	LastUseMS        int64  `json:"last_use_ms,omitempty"`
	Active           int    `json:"active"`
	ProtectedUntilMS int64  `json:"protected_until_ms,omitempty"`
	Gone             bool   `json:"gone,omitempty"`
}

func (s *Session) head() *Head {
	if s.Head == nil {
		s.Head = &Head{T: KindSession}
	}
	return s.Head
}

// Owned is a run of blocks with their owner lineage, as block.Encode spells it.
type Owned struct {
	Owner string `json:"owner,omitempty"`
	B     string `json:"b"`
}

// Blocks is an add, evict or own frame.
type Blocks struct {
	Head
	Owned
}

// State is a state frame. Deadlines are Unix milliseconds; 0 is none.
type State struct {
	Head
	State          string `json:"state"` // Active | Draining
	SoftDeadlineMS int64  `json:"soft_deadline_ms,omitempty"`
	HardDeadlineMS int64  `json:"hard_deadline_ms,omitempty"`
}

// Turn is a turn frame, sent once the engine has ended the turn.
type Turn struct {
	Head
	Attempt          string `json:"attempt"`
	Session          string `json:"session,omitempty"`
	Mode             string `json:"mode"`
	PromptTokens     int    `json:"prompt_tokens"`
	CachedTokens     int    `json:"cached_tokens"`
	CompletionTokens int    `json:"completion_tokens"`
	Outcome          string `json:"outcome"`
}

// Load is the heartbeat, in tokens, requests and tokens per second.
type Load struct {
	Head
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
	TokensPerBlock        float64 `json:"tokens_per_block,omitempty"` // additive: the learnt ratio (Q17)
}

var (
	errLine    = errors.New("a feed line is longer than 1 MiB")
	errNoOwner = errors.New("a block list without owner")
	errNoKey   = errors.New("a session without key")
)

// Encode spells a frame as one line, its line break included.
func Encode(f Frame) ([]byte, error) {
	f.head()
	line, err := json.Marshal(f)
	if err != nil {
		return nil, fmt.Errorf("encode %s frame: %w", f.head().T, err)
	}
	if len(line) >= MaxLine {
		return nil, errLine
	}
	return append(line, '\n'), nil
}

// Decode reads one line. Unknown members are ignored, and so are unknown kinds
// (their Head is returned); a frame without kind or seq is an error, since
// absent means unknown and never 0.
func Decode(line []byte) (Frame, error) {
	if len(line) > MaxLine {
		return nil, errLine
	}
	var h struct {
		T   Kind    `json:"t"`
		Seq *uint64 `json:"seq"`
	}
	if err := json.Unmarshal(line, &h); err != nil {
		return nil, fmt.Errorf("decode frame: %w", err)
	}
	if h.T == "" || h.Seq == nil {
		return nil, errors.New("decode frame: t and seq are required")
	}
	f := blank(h.T)
	if err := json.Unmarshal(line, f); err != nil {
		return nil, fmt.Errorf("decode %s frame: %w", h.T, err)
	}
	*f.head() = Head{T: h.T, Seq: *h.Seq}
	return f, nil
}

// blank is the empty frame of a kind.
func blank(k Kind) Frame {
	switch k {
	case KindHello:
		return &Hello{}
	case KindSnap:
		return &Snap{}
	case KindSession:
		return &Session{}
	case KindAdd, KindEvict, KindOwn:
		return &Blocks{}
	case KindState:
		return &State{}
	case KindTurn:
		return &Turn{}
	case KindLoad:
		return &Load{}
	default:
		return &Head{}
	}
}
