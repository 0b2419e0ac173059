package kit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Answer is what a client got.
type Answer struct {
	Status int
	Header http.Header
	Body   string
	Err    error // of reading the body
}

// Error reads an error body: OpenAI's object, or SGLang's flat one.
func (a Answer) Error() (message, kind string, code any) {
	var o struct {
		Error struct {
			Message string
			Type    string
			Code    any
		}
	}
	if json.Unmarshal([]byte(a.Body), &o) != nil {
		return "", "", nil
	}
	return o.Error.Message, o.Error.Type, o.Error.Code
}

// Events are the data payloads of an event stream.
func (a Answer) Events() []string {
	var out []string
	for e := range strings.SplitSeq(a.Body, "\n\n") {
		if data, ok := strings.CutPrefix(e, "data: "); ok {
			out = append(out, data)
		}
	}
	return out
}

// Request describes a client's call.
type Request struct {
	Path    string // default /v1/chat/completions
	Body    string
	Header  http.Header
	Session string // x-session-id, "" = none
}

func (r Request) build(ctx context.Context, t testing.TB, base string) *http.Request {
	t.Helper()
	if r.Path == "" {
		r.Path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+r.Path, strings.NewReader(r.Body))
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(req.Header, r.Header)
	if req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.Session != "" {
		req.Header.Set("X-Session-Id", r.Session)
	}
	return req
}

// Raw is a client on a bare socket.
type Raw struct {
	net.Conn
	t  testing.TB
	br *bufio.Reader
}

// Dial opens a raw connection; the test's end closes it.
func Dial(t testing.TB, addr string) *Raw {
	t.Helper()
	var d net.Dialer
	c, err := d.DialContext(context.Background(), "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * Patience))
	return &Raw{Conn: c, t: t, br: bufio.NewReader(c)}
}

// Send writes exact bytes.
func (r *Raw) Send(s string) {
	r.t.Helper()
	if _, err := io.WriteString(r.Conn, s); err != nil {
		r.t.Fatalf("raw client: %v", err)
	}
}

// Post sends a JSON body in one request; head lines are added as they are.
func (r *Raw) Post(path, body string, head ...string) {
	r.t.Helper()
	r.Send("POST " + path + " HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n" +
		strings.Join(append(head, fmt.Sprintf("Content-Length: %d\r\n\r\n", len(body))), "\r\n") + body)
}

// Answer reads a whole answer.
func (r *Raw) Answer() Answer {
	r.t.Helper()
	resp := r.Response()
	defer func() { _ = resp.Body.Close() }()
	return read(resp)
}

// Response reads an answer's head.
func (r *Raw) Response() *http.Response {
	r.t.Helper()
	resp, err := http.ReadResponse(r.br, &http.Request{Method: http.MethodPost})
	if err != nil {
		r.t.Fatalf("raw client: read answer: %v", err)
	}
	return resp
}

// Reset ends the connection with RST.
func (r *Raw) Reset() { reset(r.Conn) }

// Chat is a conversation's body at its k-th turn (0 = the first): a system
// prompt of many blocks, k exchanges, a question. Equal names and turns give
// equal bytes, and turn k+1 extends turn k.
func Chat(name string, k int, stream bool, extra ...string) string {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"model":%q,"stream":%t,`, Model, stream)
	for _, x := range extra {
		b.WriteString(x + ",")
	}
	fmt.Fprintf(&b, `"messages":[{"role":"system","content":%q}`, strings.Repeat("You help "+name+". ", 60))
	for i := range k + 1 {
		fmt.Fprintf(&b, `,{"role":"user","content":%q}`, strings.Repeat(fmt.Sprintf("question %d of %s; ", i, name), 12))
		if i < k {
			b.WriteString(`,{"role":"assistant","content":"one two three"}`)
		}
	}
	b.WriteString("]}")
	return b.String()
}
