package kit

import (
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Exchange is one turn at a mock worker: what came, and the means to answer it
// byte by byte.
type Exchange struct {
	Seen *Seen

	worker *Worker
	w      http.ResponseWriter
	r      *http.Request
	conn   *recorder
	gone   chan struct{} // after a hijack
	mode   string        // the mode a mock sidecar admitted it as
}

// Streams reports a body with stream:true.
func (e *Exchange) Streams() bool { return e.Seen.Member("stream") == true }

// Gone is closed when the peer has closed the connection or reset the stream.
func (e *Exchange) Gone() <-chan struct{} {
	if e.gone != nil {
		return e.gone
	}
	return e.r.Context().Done()
}

// Hang waits for the peer to give up.
func (e *Exchange) Hang() { <-e.Gone() }

// Wait lets time pass; false means that the peer left first.
func (e *Exchange) Wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-e.Gone():
		return false
	}
}

// Until waits for c; false means that the peer left first.
func (e *Exchange) Until(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	case <-e.Gone():
		return false
	}
}

// Header sends a status line and headers now, given as name, value pairs.
func (e *Exchange) Header(status int, kv ...string) {
	for i := 0; i+1 < len(kv); i += 2 {
		e.w.Header().Add(kv[i], kv[i+1])
	}
	e.w.WriteHeader(status)
	e.flush()
}

// Stream opens an event stream.
func (e *Exchange) Stream() {
	e.Header(http.StatusOK, "Content-Type", "text/event-stream; charset=utf-8")
}

// Send writes s and flushes, so that it travels as one piece.
func (e *Exchange) Send(s string) {
	_, _ = io.WriteString(e.w, s) // a peer that left is the script's to notice
	e.flush()
}

func (e *Exchange) flush() { _ = http.NewResponseController(e.w).Flush() }

// JSON answers with a whole JSON body.
func (e *Exchange) JSON(status int, body string) {
	h := e.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	e.w.WriteHeader(status)
	_, _ = io.WriteString(e.w, body)
}

// Refuse answers with an engine's error body.
func (e *Exchange) Refuse(status int) { e.JSON(status, EngineError(status)) }

// EngineError is an error body in SGLang's own shape, recognisable byte by byte.
func EngineError(status int) string {
	return `{"object":"error", "message":"engine says ` + strconv.Itoa(status) + `","type":"E","param":null,"code":` +
		strconv.Itoa(status) + `}`
}

// take makes the connection the script's own.
func (e *Exchange) take() {
	if e.gone != nil {
		return
	}
	c, _, err := http.NewResponseController(e.w).Hijack()
	if err != nil {
		panic(http.ErrAbortHandler) // the peer left
	}
	e.gone = make(chan struct{})
	go func() {
		defer close(e.gone)
		_, _ = io.Copy(io.Discard, c)
	}()
}

// Raw writes exact bytes, status line included; the connection is the script's
// from then on, and is closed when the script returns without ending it.
func (e *Exchange) Raw(s string) {
	e.take()
	_, _ = io.WriteString(e.conn, s)
}

// RST ends the connection with a reset.
func (e *Exchange) RST() {
	e.take()
	e.worker.note(func() { delete(e.worker.open, e.conn) })
	reset(e.conn)
	<-e.gone
}

// FIN closes the connection in order, wherever the answer stands.
func (e *Exchange) FIN() {
	e.take()
	_ = e.conn.Close()
	<-e.gone
}

// Event is one server-sent event.
func Event(data string) string { return "data: " + data + "\n\n" }

// Done ends an OpenAI stream.
const Done = "data: [DONE]\n\n"

// Token is a chat chunk with some content.
func Token(content string) string {
	return Event(chunkHead + `{"content":` + quote(content) + `},"logprobs":null,"finish_reason":null}]}`)
}

// Finish is the chunk that ends a choice.
func Finish(reason string) string {
	return Event(chunkHead + `{},"finish_reason":` + quote(reason) + `}]}`)
}

const chunkHead = `{"id":"r","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":`

func quote(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string always encodes
	return strings.TrimSpace(b.String())
}
