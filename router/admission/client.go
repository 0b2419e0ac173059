package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync/atomic"
)

const maxAnswer = 1 << 20

// Client speaks to sidecars. The zero value uses http.DefaultClient and no
// token. Deadlines are the caller's, through ctx.
type Client struct {
	HTTP   *http.Client
	Tokens *Tokens
}

// StatusError is an answer that is none: the worker could not be asked. It is
// never a refusal (Q8).
type StatusError struct {
	Method, Path string
	Code         int
	Message      string // the body's first line, bounded
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s %s: status %d: %s", e.Method, e.Path, e.Code, e.Message)
}

// Ask puts the question of wire.md §2 to the sidecar at base. Any error means
// "not answered", which is not a refusal.
func (c *Client) Ask(ctx context.Context, base string, q Question) (Verdict, error) {
	body, err := json.Marshal(q)
	if err != nil {
		return Verdict{}, fmt.Errorf("encode question: %w", err)
	}
	var v Verdict
	err = c.call(ctx, http.MethodPost, base+PathAdmit, body, &v)
	return v, err
}

// Release gives back a lease that will not be presented. Unknown leases are fine.
func (c *Client) Release(ctx context.Context, base, lease string) error {
	return c.call(ctx, http.MethodDelete, base+PathLeases+"/"+url.PathEscape(lease), nil, nil)
}

// Forget unprotects and forgets a session.
func (c *Client) Forget(ctx context.Context, base, key string) error {
	return c.call(ctx, http.MethodDelete, base+PathSessions+"/"+url.PathEscape(key), nil, nil)
}

// Status reads a sidecar's status.
func (c *Client) Status(ctx context.Context, base string) (SidecarStatus, error) {
	var s SidecarStatus
	err := c.call(ctx, http.MethodGet, base+PathStatus, nil, &s)
	return s, err
}

// SetState tells a sidecar to serve or to drain. It is idempotent.
func (c *Client) SetState(ctx context.Context, base string, s State) error {
	body, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode state: %w", err)
	}
	return c.call(ctx, http.MethodPut, base+PathState, body, nil)
}

// Hint reports whether 103 Early Hints survive the way to the sidecar (wire.md
// §3). Without them only the RPC may be used.
func (c *Client) Hint(ctx context.Context, base string) (bool, error) {
	var hinted atomic.Bool // a late 103 may come when the call has given up
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			if code == http.StatusEarlyHints && h.Get(HeaderHint) == WireVersion {
				hinted.Store(true)
			}
			return nil
		},
	})
	err := c.call(ctx, http.MethodGet, base+PathHint, nil, nil)
	return hinted.Load() && err == nil, err
}

func (c *Client) call(ctx context.Context, method, target string, body []byte, into any) error {
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	req.Header.Set(HeaderWire, WireVersion)
	if len(body) > 0 {
		req.Header.Set("Content-Type", "application/json")
	}
	c.Tokens.Authorize(req.Header)
	hc := c.HTTP
	if hc == nil {
		hc = http.DefaultClient
	}
	resp, err := hc.Do(req)
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, req.URL.Path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("%s %s: read answer: %w", method, req.URL.Path, err)
	}
	if resp.StatusCode/100 != 2 {
		return &StatusError{Method: method, Path: req.URL.Path, Code: resp.StatusCode, Message: firstLine(data)}
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%s %s: decode answer: %w", method, req.URL.Path, err)
	}
	return nil
}

func firstLine(b []byte) string {
	s, _, _ := strings.Cut(string(b[:min(len(b), 256)]), "\n")
	return strings.ToValidUTF8(s, "?")
}
