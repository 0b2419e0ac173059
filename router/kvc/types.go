package kvc

import (
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// WorkerID names one incarnation of one worker: the pod's UID on Kubernetes, a
// UUID per process locally (wire.md §0). A restarted engine is another WorkerID.
type WorkerID string

// SessionKey is the hashed session id of wire.md §0 (16 hex digits). The empty
// key is a sessionless request: it has no pin and no reject memory.
type SessionKey string

// Shared is the lineage of blocks that more than one lineage has used (Q5).
const Shared SessionKey = "0000000000000000"

// Mode says what a turn ran as. The set is closed (it is a metric label).
type Mode uint8

// The outcomes of the paper plus Delta, the resident turn of an engine that
// still needs a prefill leg.
const (
	ModeNone Mode = iota
	Direct        // no prefill leg
	Delta         // resident, yet prefill and decode are both called
	Seed          // first turn, through a prefill worker
	Reseed        // known session whose KV is gone, through a prefill worker
	Fallback      // plain PD, without admission
)

// Modes lists every mode that a turn can end with, in display order.
var Modes = [...]Mode{Direct, Delta, Seed, Reseed, Fallback}

// String returns the wire spelling (lower case); "" for ModeNone.
func (m Mode) String() string {
	return [...]string{"", "direct", "delta", "seed", "reseed", "fallback"}[m]
}

// ParseMode reads the wire spelling; ok is false for anything else.
func ParseMode(s string) (m Mode, ok bool) {
	for m := ModeNone; m <= Fallback; m++ {
		if m.String() == s {
			return m, true
		}
	}
	return ModeNone, false
}

// DirectPath says how an engine executes a resident turn (architecture.md,
// engine profiles). The zero value is not a profile.
type DirectPath string

// The four engine profiles.
const (
	ConditionalAggregation DirectPath = "ConditionalAggregation"
	NativeAdmission        DirectPath = "NativeAdmission"
	Unified                DirectPath = "Unified"
	DeltaTransfer          DirectPath = "DeltaTransfer"
)

// NeedsPrefill reports whether a turn of mode m on this profile has a prefill
// leg. On Unified every mode runs on the decode worker alone.
func (d DirectPath) NeedsPrefill(m Mode) bool {
	return d != Unified && m != Direct
}

// Reason explains a verdict or a routing outcome. The set is closed (it is a
// metric label): the paper's three, wire.md §2, and the router's own.
type Reason string

const (
	ReasonNone                  Reason = ""
	ReasonRealLargeAppend       Reason = "real-large-append"
	ReasonNoCapacity            Reason = "no-d-capacity"
	ReasonNotResidentNoCapacity Reason = "session-not-resident-no-capacity"
	ReasonClassBudget           Reason = "class-budget"
	ReasonDraining              Reason = "draining"
	ReasonStaleEpoch            Reason = "stale-epoch"
	ReasonLeaseExpired          Reason = "lease-expired"
	ReasonQueueFull             Reason = "queue-full"
	ReasonLargeAppend           Reason = "large-append" // accompanies an admission (Q4)
	ReasonAllRefused            Reason = "all-refused"  // Fallback: every probed worker refused
	ReasonUnanswered            Reason = "unanswered"   // Fallback: no probe was answered
	ReasonSessionless           Reason = "sessionless"
	ReasonRetry                 Reason = "retry" // a leg failed before the first byte
	ReasonNoWorker              Reason = "no-worker"
	ReasonNoPrefill             Reason = "no-prefill-worker" // the profile needs a P leg and there is no P
)

// CountsAsReject reports whether a refusal with this reason raises rejects[s,d]
// (wire.md §2: only the paper's three do).
func (r Reason) CountsAsReject() bool {
	return r == ReasonRealLargeAppend || r == ReasonNoCapacity || r == ReasonNotResidentNoCapacity
}

// Request is the paper's r as the router sees it. Token counts are estimates
// (Q17: the worker's own numbers win).
type Request struct {
	Session SessionKey // s(r); "" = sessionless
	Lineage SessionKey // the root session's key (Q5); "" = sessionless
	Turn    int        // t(r), 0 = first turn

	InputTokens  int // whole prompt
	AppendTokens int // prompt beyond the longest prefix believed resident anywhere
	OutputTokens int // reserve: min(max_tokens, learnt p95), Q1

	Class string // SLO class, "" = default
}

// Question is what a decode worker is asked (wire.md §2). Blocks is the chain
// over the request's own body, which the worker hashed itself when it has the
// body; the token counts are then recomputed too.
type Question struct {
	Attempt string // 32 hex digits; the same attempt asked twice gets the same answer
	Request
	Blocks []block.Hash // root first

	PrefillUncachedTokens int // chosen P's expected uncached tokens (DeltaTransfer's τ_append)
}

// Lease is a reservation that the worker frees by itself (Q11).
type Lease struct {
	ID     string // 32 hex digits
	Tokens int    // reserved
	TTL    time.Duration
}

// Verdict is the worker's authoritative answer.
type Verdict struct {
	CanAdmit       bool
	Mode           Mode // ModeNone when refused
	Reason         Reason
	Lease          Lease
	ResidentTokens int
	AppendTokens   int
	FreeTokens     int
	RetryAfter     time.Duration
	Pause          time.Duration
}

// Usage is what the engine reported for a finished turn, in tokens.
type Usage struct {
	PromptTokens     int
	CachedTokens     int
	CompletionTokens int
}

// Outcome of a turn on a worker.
type Outcome string

const (
	OutcomeOK        Outcome = "ok"
	OutcomeError     Outcome = "error"
	OutcomeCancelled Outcome = "cancelled"
)
