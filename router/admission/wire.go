package admission

// Headers of wire.md §0–1.
const (
	HeaderWire            = "X-Kvc-Wire"
	HeaderOrigin          = "X-Kvc-Origin" // sidecar | engine
	HeaderLeg             = "X-Kvc-Leg"    // prefill | decode
	HeaderAttempt         = "X-Kvc-Attempt"
	HeaderAdmit           = "X-Kvc-Admit" // ask | lease | none
	HeaderLease           = "X-Kvc-Lease"
	HeaderEpoch           = "X-Kvc-Epoch"
	HeaderSession         = "X-Kvc-Session"
	HeaderLineage         = "X-Kvc-Lineage"
	HeaderTurn            = "X-Kvc-Turn"
	HeaderClass           = "X-Kvc-Class"
	HeaderInputTokens     = "X-Kvc-Input-Tokens"
	HeaderAppendTokens    = "X-Kvc-Append-Tokens"
	HeaderOutputTokens    = "X-Kvc-Output-Tokens"
	HeaderPrefillUncached = "X-Kvc-Prefill-Uncached-Tokens"
	HeaderBlocks          = "X-Kvc-Blocks"
	HeaderBootstrap       = "X-Kvc-Bootstrap" // <host>,<port>,<room>
	HeaderVerdict         = "X-Kvc-Verdict"
	HeaderHint            = "X-Kvc-Hint"

	// Router to client.
	HeaderMode     = "X-Kvc-Mode"
	HeaderWorker   = "X-Kvc-Worker"
	HeaderReason   = "X-Kvc-Reason"
	HeaderAttempts = "X-Kvc-Attempts"

	WireVersion        = "1"
	ContentTypeVerdict = "application/vnd.kvc.verdict+json"

	PathAdmit    = "/admit_direct_append"
	PathHint     = "/kvc/v1/hint"
	PathFeed     = "/kvc/v1/feed"
	PathStatus   = "/kvc/v1/status"
	PathSessions = "/kvc/v1/sessions" // GET list; DELETE …/{key}
	PathLeases   = "/kvc/v1/leases"   // DELETE …/{id}
	PathState    = "/kvc/v1/state"    // PUT
	PathPreStop  = "/kvc/v1/prestop"  // GET …/{nonce}
	PathExplain  = "/kvc/v1/explain"  // router admin: GET ?request_id= or POST a body
)

// Question is the body of POST /admit_direct_append.
type Question struct {
	Attempt               string `json:"attempt"`
	Session               string `json:"session,omitempty"`
	Lineage               string `json:"lineage,omitempty"`
	Epoch                 string `json:"epoch"`
	Turn                  int    `json:"turn"`
	Class                 string `json:"class,omitempty"`
	InputTokens           int    `json:"input_tokens"`
	AppendTokens          int    `json:"append_tokens"`
	OutputTokens          int    `json:"output_tokens"`
	PrefillUncachedTokens int    `json:"prefill_uncached_tokens,omitempty"`
	Format                string `json:"format"`
	Blocks                string `json:"blocks"`
	Route                 string `json:"route"`
}

// Lease on the wire.
type Lease struct {
	ID     string `json:"id"`
	Tokens int    `json:"tokens"`
	TTLMS  int64  `json:"ttl_ms"`
}

// Verdict is the RPC's answer, the 409 body and the x-kvc-verdict header.
type Verdict struct {
	CanAdmit       bool   `json:"can_admit"`
	Mode           string `json:"mode"`
	Reason         string `json:"reason"`
	Worker         string `json:"worker"`
	Epoch          string `json:"epoch"`
	Lease          *Lease `json:"lease,omitempty"`
	ResidentTokens int    `json:"resident_tokens"`
	AppendTokens   int    `json:"append_tokens"`
	FreeTokens     int    `json:"free_tokens"`
	State          string `json:"state"` // Active | Draining
	RetryAfterMS   int64  `json:"retry_after_ms"`
	PauseMS        int64  `json:"pause_ms"`
}

// SidecarStatus is GET /kvc/v1/status of a sidecar (wire.md §5). Seq is an
// additive member: the feed's seq, so that a closed-loop client can wait until
// the router has followed everything.
type SidecarStatus struct {
	Wire       int               `json:"wire"`
	Worker     string            `json:"worker"`
	Pod        string            `json:"pod"`
	Role       string            `json:"role"`
	Epoch      string            `json:"epoch"`
	Seq        uint64            `json:"seq"`
	State      string            `json:"state"`
	Ready      bool              `json:"ready"`
	Reason     string            `json:"reason"`
	Engine     EngineStatus      `json:"engine"`
	DirectPath map[string]string `json:"direct_path"`
	ConfigHash string            `json:"config_hash"`

	CapacityTokens int `json:"capacity_tokens"`
	Used           int `json:"used"`
	Locked         int `json:"locked"`
	Protected      int `json:"protected"`
	Reserved       int `json:"reserved"`
	Sessions       int `json:"sessions"`
	InFlight       int `json:"in_flight"`

	EvictionCostTokens int          `json:"eviction_cost_tokens"`
	Queues             QueueStatus  `json:"queues"`
	Totals             WorkerTotals `json:"totals"`
	SoftDeadlineMS     int64        `json:"soft_deadline_ms"`
	HardDeadlineMS     int64        `json:"hard_deadline_ms"`
}

// State is the body of PUT /kvc/v1/state (wire.md §6). Deadlines are Unix ms, 0
// = none.
type State struct {
	State          string `json:"state"` // Active | Draining
	SoftDeadlineMS int64  `json:"soft_deadline_ms"`
	HardDeadlineMS int64  `json:"hard_deadline_ms"`
}

// EngineStatus is what the sidecar knows of its engine.
type EngineStatus struct {
	Version   string `json:"version"`
	StartedMS int64  `json:"started_ms"`
}

// QueueStatus counts requests in the engine's queues.
type QueueStatus struct {
	Prefill  int `json:"prefill"`
	Transfer int `json:"transfer"`
	Waiting  int `json:"waiting"`
}

// WorkerTotals are monotonic since the sidecar's start.
type WorkerTotals struct {
	PrefillUncachedTokens int64            `json:"prefill_uncached_tokens"`
	PromptTokens          int64            `json:"prompt_tokens"`
	GeneratedTokens       int64            `json:"generated_tokens"`
	EvictedTokens         int64            `json:"evicted_tokens"`
	TransferredTokens     int64            `json:"transferred_tokens"` // additive: KV tokens received from P
	Refusals              map[string]int64 `json:"refusals"`
}

// RouterStatus is GET /kvc/v1/status on the router's admin port.
type RouterStatus struct {
	Wire       int                    `json:"wire"`
	Router     string                 `json:"router"`
	StartedMS  int64                  `json:"started_ms"`
	Ready      bool                   `json:"ready"`
	ConfigHash string                 `json:"config_hash"`
	Workers    []RouterWorker         `json:"workers"`
	Classes    map[string]ClassStatus `json:"classes"`
	Modes      map[string]int64       `json:"modes"`
	PinChanges int64                  `json:"pin_changes"`
	Sessions   int                    `json:"sessions"`
}

// RouterWorker is one worker as the router sees it. URL and the load fields are
// additive (the live table of kvc up reads them).
type RouterWorker struct {
	Worker   string `json:"worker"`
	Pod      string `json:"pod"`
	Role     string `json:"role"`
	State    string `json:"state"`
	Trusted  bool   `json:"trusted"`
	Seq      uint64 `json:"seq"`
	InFlight int    `json:"in_flight"`
	Breaker  string `json:"breaker"`

	CapacityTokens int `json:"capacity_tokens"`
	Used           int `json:"used"`
	Sessions       int `json:"sessions"`

	Modes map[string]int64 `json:"modes"` // turns it has begun to answer
}

// ClassStatus is monotonic since the router's start, but Queued.
type ClassStatus struct {
	Requests int64 `json:"requests"`
	TTFTOK   int64 `json:"ttft_ok"`
	ITLOK    int64 `json:"itl_ok"`
	Shed     int64 `json:"shed"`
	Queued   int64 `json:"queued"`
}
