package kvc

import "time"

// Params are the constants of the algorithms and one named field per ruling
// (algorithms.md §5, Q1–Q18), so that each ruling can be switched and measured
// alone. The zero value is not usable: start from Paper or Corrected and change
// fields. Durations are emulated time; see Scaled.
type Params struct {
	Preset string // "Paper" or "Corrected", for reports

	// StickyBonus is α: the blocks of overlap that the pinned worker is worth
	// (Q6). At 1, one block elsewhere ties with the pin and stickiness wins;
	// it takes StickyBonus+1 exclusive blocks to beat the pin. Both presets: 1.
	StickyBonus int
	// RejectThreshold is τ_reject: refusals of a session after which a worker
	// is passed over.
	RejectThreshold int
	// MaxAppendTokens is τ_append: the longest append a worker prefills itself.
	MaxAppendTokens int
	// HighWaterPercent is ρ, applied once, in the worker.
	HighWaterPercent int
	// MaxProbes is ε, the most workers asked in one dispatch; 0 leaves it to
	// ProbeLimit (Q3).
	MaxProbes int
	// MaxAttempts bounds the Runs of one dispatch, the first included: a leg
	// that failed before its first byte is tried elsewhere at most
	// MaxAttempts-1 times. No ruling: the paper has no transport. Both: 3.
	MaxAttempts int

	Need         NeedRule    // Q1: what a request adds
	Used         UsedRule    // Q1: what it is added to
	Reserve      ReserveRule // Q1: room for the answer
	ReserveGuess int         // Q1: reserve, in tokens, while neither max_tokens nor a learnt p95 says less

	// ProtectIdle is how long after its last turn a session's KV is not
	// reclaimable (Q1, Q16). Paper: 0, since there nothing is reclaimable.
	ProtectIdle time.Duration

	Probe       ProbeRule       // Q2
	ProbeLimit  ProbeLimitRule  // Q3
	LargeAppend LargeAppendRule // Q4
	Overlap     OverlapRule     // Q5

	ResetAt    ResetAtRule    // Q7: when a success clears rejects
	ResetScope ResetScopeRule // Q7: which rejects it clears

	Fault FaultRule // Q8: what an unanswered question counts as
	// RejectHalfLife is how fast rejects[s,d] decays (Q8). 0 (Paper): never.
	RejectHalfLife time.Duration
	// HalfOpenAfter is the time since the last refusal after which a
	// passed-over worker is worth one question again, however high its count
	// (Q8). 0 (Paper): never.
	HalfOpenAfter time.Duration

	Inflight InflightRule // Q9
	Assigned AssignedRule // Q9
	// AssignedHalfLife is how fast assigned[d] decays (Q9). 0 (Paper): never.
	AssignedHalfLife time.Duration
	Newcomer         NewcomerRule  // Q9: where assigned[d] of a new worker starts
	Residency        ResidencyRule // Q9: when resident[d] is updated

	Fallback    FallbackRule    // Q10: which decode worker
	FallbackPin FallbackPinRule // Q10: whether Fallback moves the session

	Lease LeaseRule // Q11
	// LeaseTTL is how long an unpresented lease lives (Q11).
	LeaseTTL time.Duration

	PinAt PinAtRule // R86: when the pin moves
	Spill SpillRule // Q12: whether one refusal at home moves the session
	// ReseedCostPerToken is what rebuilding one token of KV elsewhere costs
	// (Q12): a refusal whose retry-after is shorter than the input's cost is
	// worth one wait at home. 0 (Paper): never wait. The default is the paper's
	// reseed of 50–90 K tokens in 3–7 s.
	ReseedCostPerToken time.Duration

	Prefill PrefillRule // Q13: which prefill worker
	Legs    LegsRule    // Q13: order of the two legs

	Turns TurnsRule // Q14: concurrent turns of one session
	Forks ForksRule // Q14: a request that leaves the session's last prompt

	Incarnations IncarnationsRule // Q15
	IdleLock     IdleLockRule     // Q16
	AppendBy     AppendByRule     // Q17
	NoID         NoIDRule         // Q18
}

// The rulings. The first value of each set is the paper's letter, the last the
// corrected one; values between are readings or ablations.
type (
	// NeedRule is what a request adds to a worker's use (Q1).
	NeedRule string
	// UsedRule is what of a worker's KV counts as used at admission (Q1).
	UsedRule string
	// ReserveRule is the room kept for the answer (Q1).
	ReserveRule string
	// ProbeRule is who may be asked again in one dispatch (Q2).
	ProbeRule string
	// ProbeLimitRule is ε when MaxProbes is 0 (Q3).
	ProbeLimitRule string
	// LargeAppendRule is the answer to an append beyond MaxAppendTokens (Q4).
	LargeAppendRule string
	// OverlapRule is what counts as reuse (Q5).
	OverlapRule string
	// ResetAtRule is when a success clears the session's rejects (Q7).
	ResetAtRule string
	// ResetScopeRule is which rejects a success clears (Q7).
	ResetScopeRule string
	// FaultRule is what a timeout, 5xx or connection error counts as (Q8).
	FaultRule string
	// InflightRule is the life of inflight[d] (Q9).
	InflightRule string
	// AssignedRule is when assigned[d] is raised (Q9).
	AssignedRule string
	// NewcomerRule is where assigned[d] of a new worker starts (Q9).
	NewcomerRule string
	// ResidencyRule is when the router updates resident[d] (Q9).
	ResidencyRule string
	// FallbackRule is which decode worker serves a Fallback (Q10).
	FallbackRule string
	// FallbackPinRule is whether a Fallback sets the pin (Q10).
	FallbackPinRule string
	// LeaseRule is whether an admission reserves what it promised (Q11).
	LeaseRule string
	// PinAtRule is when the pin moves (R86).
	PinAtRule string
	// SpillRule tells spill from migration (Q12).
	SpillRule string
	// PrefillRule is which prefill worker is used (Q13).
	PrefillRule string
	// LegsRule is the order of the prefill and the decode leg (Q13).
	LegsRule string
	// TurnsRule is the order of concurrent turns of one session (Q14).
	TurnsRule string
	// ForksRule is what a fork of a conversation becomes (Q14).
	ForksRule string
	// IncarnationsRule is what happens to the belief about a worker that left (Q15).
	IncarnationsRule string
	// IdleLockRule is what holds an idle session's KV (Q16).
	IdleLockRule string
	// AppendByRule is whose append length decides (Q17).
	AppendByRule string
	// NoIDRule is what a request without a session id is (Q18).
	NoIDRule string
)

// Q1–Q6: admission and the probe loop.
const (
	NeedWholeInput NeedRule = "WholeInput" // the whole input, resident or not
	NeedMissing    NeedRule = "Missing"    // the input beyond the session's resident prefix on d

	UsedEverything UsedRule = "Everything" // every resident token; nothing is reclaimable
	UsedBusy       UsedRule = "Busy"       // locked + protected + reserved; the rest is reclaimable

	ReserveNothing ReserveRule = "Nothing"
	ReserveLearnt  ReserveRule = "Learnt" // min(max_tokens, learnt p95 of the session)

	ProbeRepick ProbeRule = "Repick" // Route over the raw counts: the same worker again until it is passed over
	ProbeOnce   ProbeRule = "Once"   // at most one question per worker; none left = none

	ProbesAllButOne  ProbeLimitRule = "AllButOne"  // |D|-1: no question at all with one worker
	ProbesAtMostFour ProbeLimitRule = "AtMostFour" // min(|D|, 4), never below 1

	LargeAppendReject  LargeAppendRule = "Reject"  // real-large-append, and it counts
	LargeAppendInPlace LargeAppendRule = "InPlace" // ⟨True, Reseed, large-append⟩ on the same worker

	// OverlapPrefix is the longest resident chain from block 0. Hashes are
	// chained and residency is prefix-closed, so it is the paper's set
	// intersection.
	OverlapPrefix    OverlapRule = "Prefix"
	OverlapExclusive OverlapRule = "Exclusive" // minus blocks not exclusive to the session's lineage
)

// Q7–Q12: counters, leases and pins.
const (
	ResetNever        ResetAtRule = "Never"      // the paper's v1, which thrashes
	ResetAtAdmission  ResetAtRule = "Admission"  // Algorithm 3, line 8
	ResetAtFirstToken ResetAtRule = "FirstToken" // of a Direct, Delta, Seed or Reseed

	ResetPair             ResetScopeRule = "Pair"             // (s,d) to 0
	ResetSession          ResetScopeRule = "Session"          // every pair of s to 0 (the paper's §3.4)
	ResetPairHalvesOthers ResetScopeRule = "PairHalvesOthers" // (s,d) to 0, the session's others halved

	FaultRejects FaultRule = "Rejects" // Algorithm 3, line 20: anything but "admitted" is a refusal
	FaultNeutral FaultRule = "Neutral" // feeds the worker's breaker, never rejects

	InflightNeverLowered InflightRule = "NeverLowered" // raised at admission, and that is all
	InflightLeased       InflightRule = "Leased"       // taken at Run in every mode, given back exactly once

	AssignedNever AssignedRule = "Never"
	AssignedAtRun AssignedRule = "AtRun"

	NewcomerAtZero    NewcomerRule = "AtZero"    // wins every tie until it has caught up
	NewcomerAtMinimum NewcomerRule = "AtMinimum" // of the others

	ResidencyFromFeed   ResidencyRule = "FromFeed"   // only what workers report
	ResidencyOptimistic ResidencyRule = "Optimistic" // added at the first token, corrected by the feed

	FallbackRoundRobin  FallbackRule = "RoundRobin"
	FallbackLeastLoaded FallbackRule = "LeastLoaded" // ready workers only; by inflight, then assigned, then order

	FallbackPinNever  FallbackPinRule = "Never"
	FallbackPinIfNone FallbackPinRule = "IfNone" // only when the session has no pin in the fleet

	LeasePromise  LeaseRule = "Promise"  // the verdict reserves nothing
	LeaseReserves LeaseRule = "Reserves" // {id, tokens, ttl} until presented or expired

	PinAtAdmission  PinAtRule = "Admission" // Algorithm 3, line 9
	PinAtFirstToken PinAtRule = "FirstToken"

	SpillMovesPin SpillRule = "MovesPin" // one refusal plus one acceptance elsewhere moves the session
	SpillKeepsPin SpillRule = "KeepsPin" // the pin moves when home is passed over or lost
)

// Q13–Q18: prefill, sessions, workers.
const (
	PrefillRoundRobin       PrefillRule = "RoundRobin"
	PrefillLeastOutstanding PrefillRule = "LeastOutstanding" // tokens this prompt lacks there + tokens already sent there

	// LegsInSequence is the paper's text. SGLang's hand-off needs both legs in
	// flight, so the proxy runs them together under either preset; only the
	// simulator can obey.
	LegsInSequence LegsRule = "InSequence"
	LegsTogether   LegsRule = "Together"

	TurnsUnordered TurnsRule = "Unordered"
	TurnsInOrder   TurnsRule = "InOrder" // one running turn per session

	ForksIgnored     ForksRule = "Ignored"
	ForksAreChildren ForksRule = "Children" // a child session of the same lineage

	IncarnationsKept    IncarnationsRule = "Kept"    // the text is silent: belief outlives the worker
	IncarnationsCleared IncarnationsRule = "Cleared" // with the worker, at once

	IdleLockUntilReleased IdleLockRule = "UntilReleased" // idle KV can never be evicted
	IdleLockRunning       IdleLockRule = "Running"       // locked while a turn runs, then ProtectIdle, then LRU

	AppendByRouter AppendByRule = "Router"
	AppendByWorker AppendByRule = "Worker" // recomputed; the router's number is a hint

	NoIDSessionless NoIDRule = "Sessionless"
	NoIDContinues   NoIDRule = "Continues" // the conversation whose tail it extends, else a new one
)

// Paper is the pseudocode to the letter: for tests, as an ablation arm, and for
// whoever wants to see it run.
func Paper() Params {
	return Params{
		Preset:           "Paper",
		StickyBonus:      1,
		RejectThreshold:  3,
		MaxAppendTokens:  8192,
		HighWaterPercent: 95,
		MaxAttempts:      3,

		Need:        NeedWholeInput,
		Used:        UsedEverything,
		Reserve:     ReserveNothing,
		Probe:       ProbeRepick,
		ProbeLimit:  ProbesAllButOne,
		LargeAppend: LargeAppendReject,
		Overlap:     OverlapPrefix,
		ResetAt:     ResetAtAdmission,
		ResetScope:  ResetPair,
		Fault:       FaultRejects,
		Inflight:    InflightNeverLowered,
		Assigned:    AssignedNever,
		Newcomer:    NewcomerAtZero,
		Residency:   ResidencyFromFeed,
		Fallback:    FallbackRoundRobin,
		FallbackPin: FallbackPinNever,
		Lease:       LeasePromise,
		LeaseTTL:    5 * time.Second,
		PinAt:       PinAtAdmission,
		Spill:       SpillMovesPin,
		Prefill:     PrefillRoundRobin,
		Legs:        LegsInSequence,

		Turns:        TurnsUnordered,
		Forks:        ForksIgnored,
		Incarnations: IncarnationsKept,
		IdleLock:     IdleLockUntilReleased,
		AppendBy:     AppendByRouter,
		NoID:         NoIDSessionless,
	}
}

// Corrected is the default: the paper with every ruling.
func Corrected() Params {
	return Params{
		Preset:           "Corrected",
		StickyBonus:      1,
		RejectThreshold:  3,
		MaxAppendTokens:  8192,
		HighWaterPercent: 95,
		MaxAttempts:      3,

		Need:         NeedMissing,
		Used:         UsedBusy,
		Reserve:      ReserveLearnt,
		ReserveGuess: 1024,
		ProtectIdle:  120 * time.Second,

		Probe:       ProbeOnce,
		ProbeLimit:  ProbesAtMostFour,
		LargeAppend: LargeAppendInPlace,
		Overlap:     OverlapExclusive,

		ResetAt:        ResetAtFirstToken,
		ResetScope:     ResetPairHalvesOthers,
		Fault:          FaultNeutral,
		RejectHalfLife: 60 * time.Second,
		HalfOpenAfter:  60 * time.Second,

		Inflight:         InflightLeased,
		Assigned:         AssignedAtRun,
		AssignedHalfLife: 10 * time.Minute,
		Newcomer:         NewcomerAtMinimum,
		Residency:        ResidencyOptimistic,
		Fallback:         FallbackLeastLoaded,
		FallbackPin:      FallbackPinIfNone,

		Lease:              LeaseReserves,
		LeaseTTL:           5 * time.Second,
		PinAt:              PinAtFirstToken,
		Spill:              SpillKeepsPin,
		ReseedCostPerToken: 70 * time.Microsecond,

		Prefill: PrefillLeastOutstanding,
		Legs:    LegsTogether,

		Turns:        TurnsInOrder,
		Forks:        ForksAreChildren,
		Incarnations: IncarnationsCleared,
		IdleLock:     IdleLockRunning,
		AppendBy:     AppendByWorker,
		NoID:         NoIDContinues,
	}
}

// Scaled divides every duration by s, the time scale: one emulated millisecond
// takes 1/s real milliseconds. s must be above 0; anything else changes nothing.
func (p Params) Scaled(s float64) Params {
	if !(s > 0) {
		return p
	}
	ttl := p.LeaseTTL
	for _, d := range []*time.Duration{
		&p.ProtectIdle, &p.RejectHalfLife, &p.HalfOpenAfter, &p.AssignedHalfLife,
		&p.LeaseTTL, &p.ReseedCostPerToken,
	} {
		*d = time.Duration(float64(*d) / s)
	}
	if p.LeaseTTL < leaseFloor {
		p.LeaseTTL = min(ttl, leaseFloor)
	}
	return p
}

// leaseFloor is the least a lease lives in real time, however fast emulated time
// runs: it has to outlast one more network round trip and the scheduling of a
// busy machine, which no time scale shortens.
const leaseFloor = 500 * time.Millisecond

// Probes is ε for a fleet of n decode workers (Q3).
func (p Params) Probes(n int) int {
	if p.MaxProbes > 0 {
		return p.MaxProbes
	}
	if p.ProbeLimit == ProbesAllButOne {
		return max(n-1, 0)
	}
	return max(min(n, 4), 1)
}
