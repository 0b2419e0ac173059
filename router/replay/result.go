package replay

import (
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
)

// ModeUnknown is the mode of a turn whose answer did not name one.
const ModeUnknown = "unknown"

// modeNames is every mode in display order.
func modeNames() []string {
	var names []string
	for _, m := range kvc.Modes {
		names = append(names, m.String())
	}
	return append(names, ModeUnknown)
}

func modeOf(header string) string {
	if m, ok := kvc.ParseMode(header); ok && m != kvc.ModeNone {
		return header
	}
	return ModeUnknown
}

// kindInterrupted is the failure of a turn that the client itself gave up
// because the run was interrupted: no fault of the server.
const kindInterrupted = "interrupted"

// Failure says why a turn has no whole answer. The zero value is success.
type Failure struct {
	Kind    string `json:"kind"` // connection, timeout, status N, in-band, stream, request
	Message string `json:"message"`

	retryAfter time.Duration
}

// Turn is what the client saw of one request. Durations are real; reports
// multiply them by the time scale.
type Turn struct {
	Session string
	Index   int           // in its session, 0 = first
	At      time.Duration // when it was sent, since the start of the run

	Mode     string // direct … fallback, or unknown
	Worker   string
	Reason   string
	Attempts int

	TTFT   time.Duration // to the first content, 0 = none came
	E2E    time.Duration
	Chunks int
	Finish string

	PromptTokens, CachedTokens, CompletionTokens int

	Failure Failure

	text string
}

// OK reports whether the whole answer came.
func (t *Turn) OK() bool { return t.Failure.Kind == "" }

// ITL is the mean time between two tokens, 0 when there were not two.
func (t *Turn) ITL() time.Duration {
	if !t.OK() || t.CompletionTokens < 2 || t.TTFT == 0 {
		return 0
	}
	return (t.E2E - t.TTFT) / time.Duration(t.CompletionTokens-1)
}

// Result is one run.
type Result struct {
	Turns       []Turn // in the order of completion
	Wall        time.Duration
	Sessions    int // that sent at least one turn
	Interrupted bool

	Load     []LoadSample
	Counters Counters // what the run added, from the router and the sidecars
}

// LoadSample is the KV use of every worker at one moment.
type LoadSample struct {
	At      time.Duration
	Workers []WorkerLoad
}

// WorkerLoad is one worker's KV use in tokens.
type WorkerLoad struct {
	Pod            string
	Role           string
	Used, Capacity int
}

// Counters are differences over the run. A nil pointer is unknown, never 0.
type Counters struct {
	PinChanges        *int64
	PrefillTokens     *int64 // computed on prefill workers
	DecodePrefill     *int64 // prompt tokens computed on decode workers
	TransferredTokens *int64 // KV received from prefill workers
	EvictedTokens     *int64
}
