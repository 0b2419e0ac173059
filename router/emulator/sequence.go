package emulator

import (
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/radix"
)

// bootstrap is where a sequence meets its other half (contract §2.1).
type bootstrap struct {
	set  bool // a room was given
	host string
	port int
	room uint64
}

// fakeHost is SGLang's address for transfers that succeed without happening:
// health checks and warm-up use it (contract §2.6).
const fakeHost = "2.2.2.2"

func (b bootstrap) fake() bool { return b.host == fakeHost }

// finish is why a sequence ended (contract §6.1, §2.5).
type finish struct {
	kind     string // stop, length, abort
	length   int
	matchID  int32  // stop: the token, when matchStr is empty
	matchStr string // stop: the string
	message  string // abort
	status   int    // abort: HTTP status, 0 = none
}

func abortFinish(status int, message string) finish {
	return finish{kind: "abort", message: message, status: status}
}

// state is where in the engine a sequence is.
type state uint8

const (
	stateNew       state = iota
	stateBootstrap       // prefill: waiting for the decode side's pages
	statePrealloc        // decode: waiting for the handshake, then for KV
	stateTransfer        // decode: KV allocated, waiting for it to arrive
	stateJoining         // decode: KV arrived, waiting to enter the batch
	stateWaiting         // waiting to be prefilled here
	statePrefill         // being prefilled in chunks
	stateInflight        // prefill: KV is on the wire
	stateRunning
	stateRetracted
	stateDone
)

// sampling is what a request says about its output.
type sampling struct {
	maxNew    int // 0 = unset
	minNew    int
	ignoreEOS bool
	stop      []string
	stopIDs   []int32
}

// sequence is one prompt with one answer.
type sequence struct {
	rid      string
	ids      []int32 // the prompt, for whoever writes the answer
	index    int     // position in the answer
	sample   int     // which of n answers to the same prompt
	tokens   []int32
	prompt   int // tokens[:prompt] came with the request
	sampling sampling
	boot     bootstrap
	local    bool // do_local_prefill (contract §2.6)
	remote   bool // on a decode worker, prefilled elsewhere
	out      *outbox

	logprobs    bool // return_logprob
	logprobFrom int  // first prompt token that has one

	// What follows belongs to the core.
	state       state
	writer      writer
	turn        *radix.Turn
	computed    int // tokens whose KV is here
	cached      int // of the prompt, found in the cache
	fromHost    int // of those, found in the host tier
	loadBack    int // tokens still to be loaded from the host tier
	reported    int // cached_tokens of the answer
	peerPrefix  int // prefill: tokens the decode side has already
	peerGone    bool
	known       bool // decode: the prefill worker's route is known
	first       int32
	tail        string // recent text, for stop strings
	retractions int
	order       uint64 // of arrival

	arrived, firstAt, doneAt time.Duration
}

func (s *sequence) generated() int { return len(s.tokens) - s.prompt }

// outbox carries tokens from the engine to the handler that writes the answer.
// The engine never waits for a slow client.
type outbox struct {
	mu    sync.Mutex
	batch batch
	ready chan struct{}
}

// batch is what happened to a sequence since its handler looked last.
type batch struct {
	tokens []int32
	done   bool
	finish finish
	// Valid once done.
	cached, fromHost, retractions int
	latency                       time.Duration
	// cached is also valid with the first token.
}

func newOutbox() *outbox { return &outbox{ready: make(chan struct{}, 1)} }

func (o *outbox) put(f func(*batch)) {
	o.mu.Lock()
	f(&o.batch)
	o.mu.Unlock()
	select {
	case o.ready <- struct{}{}:
	default:
	}
}

// take returns what has come since the last call.
func (o *outbox) take() batch {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := o.batch
	o.batch.tokens = nil
	return b
}

// stopMatch looks for a stop condition at the newest token.
func (s *sequence) stopMatch(id int32) (f finish, ok bool) {
	if slices.Contains(s.sampling.stopIDs, id) {
		return finish{kind: "stop", matchID: id}, true
	}
	if len(s.sampling.stop) == 0 {
		return finish{}, false
	}
	s.tail += string(appendText(nil, id))
	longest := 0
	for _, stop := range s.sampling.stop {
		if stop != "" && strings.Contains(s.tail, stop) {
			return finish{kind: "stop", matchStr: stop}, true
		}
		longest = max(longest, len(stop))
	}
	if keep := longest + 4; len(s.tail) > keep {
		s.tail = s.tail[len(s.tail)-keep:]
	}
	return finish{}, false
}

// failed reports whether the finish is an HTTP error when not streamed
// (contract §2.5: 400 and 5xx are errors, an abort without a status is not).
func (f finish) failed() bool { return f.kind == "abort" && f.status >= http.StatusBadRequest }
