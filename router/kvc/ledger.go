package kvc

import (
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// LedgerConfig describes one worker's engine.
type LedgerConfig struct {
	CapacityTokens int // K_d, the engine's max_total_num_tokens
	PageSize       int
	Prefill        bool // a P worker's prompt cache: no admission, no protection
	DirectPath     DirectPath
	Params         Params
	TokensPerBlock float64 // initial ratio; learnt from usage afterwards (about 24)
}

// Gauges are the ledger's token counts.
type Gauges struct {
	Used, Locked, Protected, Reserved int
	Sessions, Active                  int
}

// ChangeKind names one ledger change; each becomes one feed frame (wire.md §4).
type ChangeKind uint8

const (
	ChangeSession ChangeKind = iota
	ChangeSessionGone
	ChangeAdd
	ChangeEvict
	ChangeOwn
	ChangeClear
	ChangeTurn
)

// Change is one ledger change, in order.
type Change struct {
	Kind    ChangeKind
	Session SessionInfo  // ChangeSession, ChangeSessionGone (Key only)
	Owner   SessionKey   // ChangeAdd, ChangeOwn
	Blocks  []block.Hash // ChangeAdd, ChangeEvict, ChangeOwn
	Turn    TurnInfo     // ChangeTurn
}

// SessionInfo is the SESSION object of wire.md §4.
type SessionInfo struct {
	Key, Lineage   SessionKey
	Tail           block.Hash // last full block of its last prompt
	Blocks         int
	ResidentTokens int
	LastUse        time.Time
	Active         int
	ProtectedUntil time.Time
}

// TurnInfo is the turn frame of wire.md §4.
type TurnInfo struct {
	Attempt string
	Session SessionKey
	Mode    Mode
	Usage   Usage
	Outcome Outcome
}

// Ledger is M_d: what one worker holds, who may use it, and what is promised.
// It is not safe for concurrent use; the sidecar serialises it. Time comes in.
type Ledger struct{}

// NewLedger returns an empty ledger.
func NewLedger(c LedgerConfig) *Ledger { panic("contract") }

// Admit is Algorithm 2. Admitting reserves a lease; the same attempt asked
// again gets the same verdict and lease.
func (l *Ledger) Admit(q Question, now time.Time) Verdict { panic("contract") }

// Begin starts a turn that presents a lease (id, attempt); false with
// ReasonLeaseExpired when the lease is gone or names another attempt.
func (l *Ledger) Begin(lease, attempt string, now time.Time) (Reason, bool) { panic("contract") }

// BeginUnadmitted starts a Fallback turn (x-kvc-admit: none) or, on a P worker,
// any turn: it is accounted, never refused here (the sidecar's bounded queue
// asks Fits first).
func (l *Ledger) BeginUnadmitted(q Question, mode Mode, now time.Time) { panic("contract") }

// Fits reports whether the turn can start without exceeding K_d.
func (l *Ledger) Fits(q Question, now time.Time) bool { panic("contract") }

// Release frees a lease that was not presented; unknown ids are fine.
func (l *Ledger) Release(lease string, now time.Time) { panic("contract") }

// End finishes a turn exactly once; later calls for the attempt do nothing.
// Only OutcomeOK credits residency.
func (l *Ledger) End(attempt string, u Usage, o Outcome, now time.Time) { panic("contract") }

// Forget unprotects a session and forgets it; its blocks leave by LRU.
func (l *Ledger) Forget(s SessionKey, now time.Time) { panic("contract") }

// Clear empties the ledger (the engine's cache was flushed).
func (l *Ledger) Clear(now time.Time) { panic("contract") }

// Tick expires leases and protections. Next says when to call it again.
func (l *Ledger) Tick(now time.Time) (next time.Duration) { panic("contract") }

// SetParams replaces the tunables (hot reload).
func (l *Ledger) SetParams(p Params) { panic("contract") }

// Gauges returns the token counts.
func (l *Ledger) Gauges(now time.Time) Gauges { panic("contract") }

// TokensPerBlock is the ratio learnt so far.
func (l *Ledger) TokensPerBlock() float64 { panic("contract") }

// Changes drains the changes since the last call.
func (l *Ledger) Changes() []Change { panic("contract") }

// OwnedBlocks is one owner's resident blocks, in chain order per chain.
type OwnedBlocks struct {
	Owner  SessionKey
	Blocks []block.Hash
}

// Snapshot is the ledger's whole durable state: the feed's snapshot and the
// journal are both made of it.
type Snapshot struct {
	Sessions []SessionInfo
	Blocks   []OwnedBlocks
	// Chain order and token counts needed by Restore; opaque to others.
	State []byte
}

// Snapshot copies the durable state (running turns and leases are not durable).
func (l *Ledger) Snapshot() Snapshot { panic("contract") }

// Restore replaces the durable state.
func (l *Ledger) Restore(s Snapshot) error { panic("contract") }
