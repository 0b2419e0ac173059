package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// DefaultSessionHeader carries the session's id when Target does not say.
const DefaultSessionHeader = "X-Session-Id"

// Target is the server under test.
type Target struct {
	URL           string // base, …/v1 or …/v1/chat/completions
	Model         string // "" = the first of /v1/models
	APIKey        string
	SessionHeader string // "" = DefaultSessionHeader; "-" = send none
	// KeepEOS leaves ignore_eos out of the request, for servers that refuse
	// members they do not know; answers may then be shorter than recorded.
	KeepEOS bool
	Client  *http.Client // nil = a client of the package's own
}

// base is the URL up to and with /v1.
func (t *Target) base() (string, error) {
	u, err := url.Parse(t.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("url %q: want http(s)://host:port", t.URL)
	}
	p := strings.TrimSuffix(u.Path, "/")
	p = strings.TrimSuffix(p, "/chat/completions")
	if !strings.HasSuffix(p, "/v1") {
		p += "/v1"
	}
	u.Path, u.RawQuery, u.Fragment = p, "", ""
	return u.String(), nil
}

// open checks that the server is there and learns the model's name from it.
func (t *Target) open(ctx context.Context) error {
	base, err := t.base()
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/models", nil)
	if err != nil {
		return fmt.Errorf("ask for the models: %w", err)
	}
	t.authorize(req)
	resp, err := t.Client.Do(req)
	if err != nil {
		return fmt.Errorf("no answer from %s: %w", base, err)
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or given up
	if t.Model != "" {
		return nil
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("read %s/models: %w", base, err)
	}
	if resp.StatusCode != http.StatusOK || json.Unmarshal(data, &list) != nil || len(list.Data) == 0 {
		return fmt.Errorf("%s/models names no model (status %d): name one with --model", base, resp.StatusCode)
	}
	t.Model = list.Data[0].ID
	return nil
}

func (t *Target) authorize(r *http.Request) {
	if t.APIKey != "" {
		r.Header.Set("Authorization", "Bearer "+t.APIKey)
	}
}

// ask is one turn to send.
type ask struct {
	session  string
	messages []byte // elements of a JSON array; never changed later
	tokens   int    // wanted length of the answer
}

// chat sends one turn and reads the whole answer.
func (t *Target) chat(ctx context.Context, a ask) Turn {
	req, err := t.request(ctx, a)
	if err != nil {
		return Turn{Failure: Failure{Kind: "request", Message: err.Error()}}
	}
	start := time.Now()
	resp, err := t.Client.Do(req)
	if err != nil {
		return Turn{E2E: time.Since(start), Failure: failure(ctx, err)}
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or given up
	turn := Turn{}
	turn.fromHeader(resp.Header)
	if resp.StatusCode != http.StatusOK {
		turn.Failure = refused(resp)
	} else {
		turn.readStream(ctx, resp.Body, start)
	}
	if turn.E2E == 0 {
		turn.E2E = time.Since(start)
	}
	return turn
}

// request builds the body around the messages without copying them.
func (t *Target) request(ctx context.Context, a ask) (*http.Request, error) {
	base, err := t.base()
	if err != nil {
		return nil, err
	}
	head, err := t.head(a)
	if err != nil {
		return nil, err
	}
	tail := []byte("]}")
	body := func() (io.ReadCloser, error) {
		return io.NopCloser(io.MultiReader(
			bytes.NewReader(head), bytes.NewReader(a.messages), bytes.NewReader(tail))), nil
	}
	first, _ := body()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/chat/completions", first)
	if err != nil {
		return nil, err
	}
	req.GetBody = body
	req.ContentLength = int64(len(head) + len(a.messages) + len(tail))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "text/event-stream")
	t.authorize(req)
	switch t.SessionHeader {
	case "-":
	case "":
		req.Header.Set(DefaultSessionHeader, a.session)
	default:
		req.Header.Set(t.SessionHeader, a.session)
	}
	return req, nil
}

// head is the body up to the messages.
func (t *Target) head(a ask) ([]byte, error) {
	model, err := json.Marshal(t.Model)
	if err != nil {
		return nil, err
	}
	b := append([]byte(`{"model":`), model...)
	b = append(b, `,"stream":true,"stream_options":{"include_usage":true},"temperature":0,"max_tokens":`...)
	b = strconv.AppendInt(b, int64(max(1, a.tokens)), 10)
	if !t.KeepEOS {
		b = append(b, `,"ignore_eos":true`...)
	}
	return append(b, `,"messages":[`...), nil
}

// refused reads an answer that is not 200.
func refused(resp *http.Response) Failure {
	f := Failure{Kind: "status " + strconv.Itoa(resp.StatusCode)}
	data, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		f.Message = err.Error()
		return f
	}
	f.Message = errorMessage(data)
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
		f.retryAfter = time.Duration(s) * time.Second
	}
	return f
}

// errorMessage finds the sentence in an error body of OpenAI's or any shape.
func errorMessage(data []byte) string {
	var v struct {
		Error json.RawMessage `json:"error"`
	}
	var shaped struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(data, &v) == nil && json.Unmarshal(v.Error, &shaped) == nil && shaped.Message != "" {
		return shaped.Message
	}
	return clip(strings.TrimSpace(string(data)), 200)
}

func clip(s string, n int) string {
	if len(s) > n {
		return strings.ToValidUTF8(s[:n], "") + "…"
	}
	return s
}

// failure names what broke a request on the way.
func failure(ctx context.Context, err error) Failure {
	f := Failure{Kind: "connection", Message: err.Error()}
	switch {
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), errTooSlow):
		f.Kind = "timeout"
	case ctx.Err() != nil:
		f.Kind = kindInterrupted
	}
	return f
}
