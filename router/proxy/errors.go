package proxy

import (
	"encoding/json"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
)

// Reasons of x-kvc-reason that the router itself gives. Together with
// kvc.Reason the set is closed (it is a metric label).
const (
	reasonBody       = "invalid-body"
	reasonTooLarge   = "body-too-large"
	reasonCoding     = "unsupported-coding"
	reasonModel      = "unknown-model"
	reasonMember     = "invalid-member"
	reasonRoute      = "unknown-route"
	reasonMethod     = "method-not-allowed"
	reasonShutdown   = "shutting-down"
	reasonNoWorker   = "no-worker"
	reasonContended  = "contended"
	reasonUpstream   = "upstream-error"
	reasonPrefill    = "prefill-error"
	reasonIdle       = "idle-timeout"
	reasonWorkerAuth = "worker-auth"
)

// refusal is an answer the router composes itself, in OpenAI's shape (R69). Its
// message never holds an address, a prompt or a key.
type refusal struct {
	status     int
	reason     string // x-kvc-reason
	message    string
	param      string        // "" = null
	code       string        // "" = null
	retryAfter time.Duration // 0 = no Retry-After
}

// kind is the OpenAI error type of a status.
func (e *refusal) kind() string {
	switch {
	case e.status == http.StatusTooManyRequests:
		return "rate_limit_error"
	case e.status == http.StatusServiceUnavailable:
		return "service_unavailable_error"
	case e.status >= 500:
		return "server_error"
	}
	return "invalid_request_error"
}

type errorBody struct {
	Error errorObject `json:"error"`
}

type errorObject struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    *string `json:"code"`
}

// body is the JSON error object.
func (e *refusal) body() []byte {
	o := errorObject{Message: e.message, Type: e.kind()}
	if e.param != "" {
		o.Param = &e.param
	}
	if e.code != "" {
		o.Code = &e.code
	}
	b, err := json.Marshal(errorBody{o})
	if err != nil {
		return []byte(`{"error":{"message":"internal error","type":"server_error","param":null,"code":null}}`)
	}
	return b
}

// write sends the refusal as a whole answer.
func (e *refusal) write(w http.ResponseWriter) {
	h := w.Header()
	b := e.body()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(b)))
	h.Set(admission.HeaderReason, e.reason)
	if e.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(int(math.Ceil(e.retryAfter.Seconds()))))
	}
	w.WriteHeader(e.status)
	_, _ = w.Write(b) // a client that left needs no answer
}

// inBand is the refusal as the end of a stream that had already begun (R06):
// an error event in the API's shape, then the end marker the SDKs wait for.
func (e *refusal) inBand() []byte {
	b := append([]byte("data: "), e.body()...)
	return append(b, "\n\ndata: [DONE]\n\n"...)
}

func badMember(param, message string) *refusal {
	return &refusal{status: http.StatusBadRequest, reason: reasonMember, message: message,
		param: param, code: "invalid_value"}
}

func unknownRoute(method, path string) *refusal {
	return &refusal{status: http.StatusNotFound, reason: reasonRoute, code: "unknown_route",
		message: "Unknown route " + method + " " + path +
			"; this router serves POST /v1/chat/completions, /v1/completions and /generate, and GET /v1/models."}
}

func shuttingDown() *refusal {
	return &refusal{status: http.StatusServiceUnavailable, reason: reasonShutdown, code: "shutting_down",
		message: "This router is shutting down; send the request again.", retryAfter: time.Second}
}

func noWorker() *refusal {
	return &refusal{status: http.StatusServiceUnavailable, reason: reasonNoWorker, code: "no_worker",
		message: "No worker can serve this model now; try again later.", retryAfter: 5 * time.Second}
}

func contended(after time.Duration) *refusal {
	return &refusal{status: http.StatusTooManyRequests, reason: reasonContended, code: "contended",
		message:    "All workers are busy and the wait for a place ended; try again later.",
		retryAfter: max(after, time.Second)}
}

func upstreamFault(reason, message string) *refusal {
	return &refusal{status: http.StatusBadGateway, reason: reason, message: message, code: "upstream_error"}
}
