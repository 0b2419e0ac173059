package emulator

import (
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/kvc-dev/kvc/router/scan"
)

// flatError is SGLang's generic and OpenAI error body (contract §6.2).
type flatError struct {
	Object  string  `json:"object"`
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	e := json.NewEncoder(noNewline{w})
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // a client that is gone needs no answer
}

// noNewline drops the newline that json.Encoder ends with.
type noNewline struct{ w http.ResponseWriter }

func (n noNewline) Write(p []byte) (int, error) {
	if _, err := n.w.Write(p[:len(p)-1]); err != nil {
		return 0, err
	}
	return len(p), nil
}

func writeFlat(w http.ResponseWriter, status int, kind, msg string) {
	writeJSON(w, status, flatError{Object: "error", Message: msg, Type: kind, Code: status})
}

// writeBad answers a body that cannot be served: /generate has a shape of its
// own (contract §6.1), the OpenAI routes the flat one.
func writeBad(w http.ResponseWriter, s surface, msg string) {
	if s == surfaceGenerate {
		writeJSON(w, http.StatusBadRequest, map[string]any{"error": map[string]string{"message": msg}})
		return
	}
	writeFlat(w, http.StatusBadRequest, "BadRequest", msg)
}

// writeAbort answers an abort that carries a status, not streamed (contract
// §2.5): 400 becomes a ValueError, the others an HTTPException.
func writeAbort(w http.ResponseWriter, s surface, f finish) {
	switch {
	case f.status != http.StatusBadRequest:
		writeFlat(w, f.status, strconv.Itoa(f.status), f.message)
	case s == surfaceGenerate:
		writeBad(w, s, f.message)
	default:
		writeFlat(w, f.status, "BadRequestError", f.message)
	}
}

// statusName is Python's HTTPStatus name, the type of an error inside a chat
// stream (contract §2.5).
func statusName(status int) string {
	switch status {
	case http.StatusBadRequest:
		return "BAD_REQUEST"
	case http.StatusServiceUnavailable:
		return "SERVICE_UNAVAILABLE"
	default:
		return "INTERNAL_SERVER_ERROR"
	}
}

// appendStreamError appends the error event of a chat or completions stream.
func appendStreamError(dst []byte, f finish) []byte {
	dst = append(dst, `data: {"error":{"object":"error","message":`...)
	dst = scan.AppendQuoted(dst, f.message)
	dst = append(dst, `,"type":`...)
	dst = scan.AppendQuoted(dst, statusName(f.status))
	dst = append(dst, `,"param":null,"code":`...)
	dst = strconv.AppendInt(dst, int64(f.status), 10)
	return append(dst, "}}\n\n"...)
}

// refusal is the event by which a stream ends that never reached the scheduler.
func refusal(s surface, msg string) []byte {
	var b []byte
	if s == surfaceGenerate {
		b = append(b, `data: {"error":{"message":`...)
		b = scan.AppendQuoted(b, msg)
		b = append(b, `,"type":"invalid_request_error","code":400,"retryable":false}}`+"\n\n"...)
	} else {
		b = append(b, `data: {"error":{"object":"error","message":`...)
		b = scan.AppendQuoted(b, msg)
		b = append(b, `,"type":"BadRequestError","param":null,"code":400}}`+"\n\n"...)
	}
	return append(b, "data: [DONE]\n\n"...)
}
