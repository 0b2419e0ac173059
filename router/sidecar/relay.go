package sidecar

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/sglang"
)

const (
	relayBuffer    = 32 << 10
	maxErrorBody   = 1 << 20  // an engine's own error passes up to here (wire.md §9)
	maxObserved    = 16 << 20 // of a whole answer, kept to read its usage
	writeDeadline  = 60 * time.Second
	deadlineLapse  = 5 * time.Second // how often the write deadline is moved
	eventStreamTyp = "text/event-stream"
)

var relayBuffers = sync.Pool{New: func() any { b := make([]byte, relayBuffer); return &b }}

// errEngine marks an answer that the engine broke off.
var errEngine = errors.New("engine broke off its answer")

// relay passes an engine's answer on and reads its usage in passing.
type relay struct {
	obs  sglang.Observed
	sse  sglang.Events
	drop bool // remove the usage-only chunk that we asked for

	out []byte // drop: the events to write

	onBytes  func() error // called before each write; an error ends the relay
	deadline time.Time    // when the write deadline is moved next; real time
}

// stream relays server-sent events as they come, one flush a read. Without drop
// every byte is written as it was read, wherever the reads were cut (R03, R04);
// with drop, whole events are.
func (rl *relay) stream(w http.ResponseWriter, body io.Reader) error {
	see := rl.observe
	if rl.drop {
		see = rl.sift
	}
	err := rl.pump(w, body, func(p []byte) []byte {
		rl.out = rl.out[:0]
		rl.sse.Feed(p, see)
		if rl.drop {
			return rl.out
		}
		return p
	})
	rl.out = rl.out[:0]
	rl.sse.End(see)
	if err == nil && len(rl.out) > 0 {
		_, err = w.Write(rl.out)
	}
	return err
}

// observe reads one event in passing.
func (rl *relay) observe(_, data []byte) { sglang.ObserveEvent(&rl.obs, data) }

// sift reads one event and keeps it unless it is the usage chunk we asked for.
func (rl *relay) sift(raw, data []byte) {
	if !sglang.ObserveEvent(&rl.obs, data) {
		rl.out = append(rl.out, raw...)
	}
}

// whole relays any other answer and keeps a bounded copy to read usage from.
func (rl *relay) whole(w http.ResponseWriter, body io.Reader) error {
	var copied bytes.Buffer
	err := rl.pump(w, body, func(p []byte) []byte {
		if copied.Len() < maxObserved {
			copied.Write(p)
		}
		return p
	})
	if err == nil {
		sglang.ObserveBody(&rl.obs, copied.Bytes())
	}
	return err
}

// pump moves bytes through pass. A read error is reported as errEngine, a write
// error as it is: who failed decides what the turn's outcome is.
func (rl *relay) pump(w http.ResponseWriter, body io.Reader, pass func([]byte) []byte) error {
	bp, _ := relayBuffers.Get().(*[]byte)
	defer relayBuffers.Put(bp)
	ctl := http.NewResponseController(w)
	for {
		n, rerr := body.Read(*bp)
		if n > 0 {
			if err := rl.onBytes(); err != nil {
				return err
			}
			if err := rl.write(w, ctl, pass((*bp)[:n])); err != nil {
				return err
			}
		}
		if rerr == io.EOF {
			return nil
		}
		if rerr != nil {
			return errors.Join(errEngine, rerr)
		}
	}
}

// write writes and flushes. The deadline ends a peer that stopped reading.
func (rl *relay) write(w http.ResponseWriter, ctl *http.ResponseController, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if now := time.Now(); now.After(rl.deadline) {
		rl.deadline = now.Add(deadlineLapse)
		_ = ctl.SetWriteDeadline(now.Add(writeDeadline)) // unsupported only by recorders in tests
	}
	if _, err := w.Write(p); err != nil {
		return err
	}
	return ctl.Flush()
}

func isEventStream(h http.Header) bool {
	return strings.HasPrefix(h.Get("Content-Type"), eventStreamTyp)
}
