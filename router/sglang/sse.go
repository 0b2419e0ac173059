// Package sglang is the client for SGLang: stream a turn, server info, loads.
package sglang

import "github.com/kvc-dev/kvc/router/kvc"

// Events splits a byte stream into server-sent events incrementally. It never
// decodes text: a rune cut between reads stays cut in the relayed bytes.
type Events struct{}

// Feed consumes the next bytes and calls f for each complete event with its raw
// bytes (including the blank line; valid until f returns) and its data payload.
func (e *Events) Feed(p []byte, f func(raw, data []byte)) { panic("contract") }

// Mid reports whether the stream stands inside an event (bytes fed after the
// last complete event).
func (e *Events) Mid() bool { panic("contract") }

// Observed is what accounting reads of an answer, streamed or not.
type Observed struct {
	Usage     kvc.Usage
	HasUsage  bool
	Finish    string // last finish reason, "" = none seen
	Done      bool   // [DONE] seen as a whole data line
	ErrorCode int    // in-band error, 0 = none
	Content   bool   // some generated content was seen
}

// ObserveEvent updates o from one SSE data payload of any surface; usageOnly
// reports the OpenAI usage chunk with empty choices (R16).
func ObserveEvent(o *Observed, data []byte) (usageOnly bool) { panic("contract") }

// ObserveBody updates o from a whole non-streamed JSON answer.
func ObserveBody(o *Observed, body []byte) { panic("contract") }
