package proxy

import (
	"maps"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"github.com/kvc-dev/kvc/router/admission"
)

const headerRequestID = "X-Request-Id"

// outboundHeader is the one rule for what of a client's headers travels to a
// worker: everything (R34) but hop-by-hop and framing headers (R35), our own
// names (R37), credentials (R38), codings we could not read back (R39), and
// headers that engines obey as routing orders.
func outboundHeader(in http.Header, requestID string) http.Header {
	h := admission.Forwarded(in)
	for _, name := range [...]string{
		// Credentials of the client; the token of the pool is set per call.
		"Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Cookie",
		// The body travels decoded, and the answer has to be readable.
		"Content-Encoding", "Accept-Encoding", "Content-Md5", "Digest", "Content-Digest",
		// Orders to the engine that only the router may give.
		"X-Data-Parallel-Rank", "X-Smg-Target-Worker",
		// They would make Go's transport replay a generation (R72); retries are ours.
		"Idempotency-Key", "X-Idempotency-Key",
	} {
		h.Del(name)
	}
	h.Set("Content-Type", "application/json")
	h.Set("Accept-Encoding", "identity")
	h.Set(headerRequestID, requestID)
	return h
}

// copyAnswerHeader gives a worker's header to the client, filtered the same way.
func copyAnswerHeader(dst, src http.Header) {
	src = src.Clone()
	admission.StripHopByHop(src)
	admission.StripInternal(src)
	src.Del(headerRequestID)
	maps.Copy(dst, src)
}

// requestID is the client's id when it is usable, else the body's rid, else a
// new one (R40).
func requestID(h http.Header, rid string) string {
	for _, s := range [...]string{h.Get(headerRequestID), rid} {
		if usableID(s) {
			return s
		}
	}
	return "req-" + strings.ReplaceAll(uuid.NewString(), "-", "")
}

func usableID(s string) bool {
	if s == "" || len(s) > 128 {
		return false
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7f {
			return false
		}
	}
	return true
}
