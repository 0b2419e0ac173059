package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// maxQuestion bounds a question: 4,096 blocks take 44 KB, a 1 M token prompt 500 KB.
const maxQuestion = 8 << 20

// Handler serves POST /admit_direct_append. A refusal is a normal answer: 200
// with can_admit false and a reason. A non-2xx status means that the question
// could not be understood (400) or could not be answered (503), and the router
// must not count it as a rejection (Q8).
func Handler(decide func(context.Context, Question) (Verdict, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q Question
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxQuestion)).Decode(&q); err != nil {
			WriteError(w, http.StatusBadRequest, fmt.Sprintf("admission question: %v", err))
			return
		}
		v, err := decide(r.Context(), q)
		var bad *BadQuestionError
		switch {
		case errors.As(err, &bad):
			WriteError(w, http.StatusBadRequest, err.Error())
		case err != nil:
			WriteError(w, http.StatusServiceUnavailable, err.Error())
		default:
			WriteJSON(w, http.StatusOK, "application/json", v)
		}
	})
}

// BadQuestionError marks a question that no worker could answer.
type BadQuestionError struct{ Err error }

func (e *BadQuestionError) Error() string { return "admission question: " + e.Err.Error() }
func (e *BadQuestionError) Unwrap() error { return e.Err }

// WriteJSON sends one JSON value with its length.
func WriteJSON(w http.ResponseWriter, code int, contentType string, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		WriteError(w, http.StatusInternalServerError, err.Error())
		return
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(code)
	_, _ = w.Write(b) // the peer is gone; there is no one left to tell
}

// ErrorBody is an error in OpenAI's shape.
type ErrorBody struct {
	Error ErrorObject `json:"error"`
}

// ErrorObject is the inside of ErrorBody.
type ErrorObject struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    any     `json:"code"` // a number, or a word such as "model_not_found"
}

// NewError composes an error body for an HTTP status.
func NewError(status int, message string) ErrorBody {
	kind := "invalid_request_error"
	switch {
	case status == http.StatusUnauthorized:
		kind = "authentication_error"
	case status == http.StatusTooManyRequests:
		kind = "rate_limit_error"
	case status >= 500:
		kind = "server_error"
	}
	return ErrorBody{Error: ErrorObject{Message: message, Type: kind, Code: status}}
}

// WriteError sends an error in OpenAI's shape.
func WriteError(w http.ResponseWriter, status int, message string) {
	WriteJSON(w, status, "application/json", NewError(status, message))
}
