package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"time"
)

// maxBody bounds what is read of an engine's control answers. /server_info
// repeats every server argument per rank, some 20 KB.
const maxBody = 8 << 20

// Client calls one engine's control routes. The zero Key sends no
// Authorization. Deadlines are the caller's, through ctx.
type Client struct {
	Base string // http://host:port, no trailing slash
	Key  string // the engine's --api-key
	HTTP *http.Client
}

// NewTransport returns a transport fit for one engine beside us: no
// compression (the relay reads what it passes), no proxy, no total timeout, and
// as many idle connections as there are turns.
func NewTransport() *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		DisableCompression:  true,
		MaxIdleConns:        1024,
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     90 * time.Second,
		WriteBufferSize:     64 << 10,
		ReadBufferSize:      32 << 10,
	}
}

// APIError is an engine's non-2xx answer.
type APIError struct {
	Path   string
	Status int
	Body   string // bounded
}

func (e *APIError) Error() string {
	return fmt.Sprintf("engine %s: status %d: %s", e.Path, e.Status, e.Body)
}

// Refused reports whether err is an engine's answer with this status.
func Refused(err error, status int) bool {
	var api *APIError
	return errors.As(err, &api) && api.Status == status
}

// ServerInfo is what the sidecar reads of GET /server_info (sglang-contract §4.2).
type ServerInfo struct {
	Version            string          `json:"version"`
	ModelPath          string          `json:"model_path"`
	ServedModelName    string          `json:"served_model_name"`
	Mode               string          `json:"disaggregation_mode"` // null | prefill | decode; "" = null
	PageSize           int             `json:"page_size"`
	MaxTotalTokens     int             `json:"max_total_num_tokens"` // K_d
	MaxInputTokens     int             `json:"max_req_input_len"`    // longest prompt it takes; 0 = not said
	MaxRunningRequests int             `json:"max_running_requests"`
	DPSize             int             `json:"dp_size"`
	BootstrapPort      int             `json:"disaggregation_bootstrap_port"`
	DecodeRadixCache   bool            `json:"disaggregation_decode_enable_radix_cache"`
	ConditionalAgg     bool            `json:"disaggregation_decode_enable_conditional_agg"`
	DisableRadixCache  bool            `json:"disable_radix_cache"`
	CacheReport        bool            `json:"enable_cache_report"` // cached_tokens is given
	Metrics            bool            `json:"enable_metrics"`      // /metrics is served
	StartupTime        json.RawMessage `json:"startup_time"`        // identity of the process, see Started
}

// Model is the name the engine serves under.
func (s *ServerInfo) Model() string {
	if s.ServedModelName != "" {
		return s.ServedModelName
	}
	return s.ModelPath
}

// Started is the engine's start, when startup_time is an absolute time in Unix
// seconds. Some releases give a duration there: ok is false, and the raw text
// still tells one process from the next.
func (s *ServerInfo) Started() (t time.Time, ok bool) {
	var sec float64
	if json.Unmarshal(s.StartupTime, &sec) != nil || sec < 1e9 || sec > 1e11 {
		return time.Time{}, false
	}
	return time.UnixMilli(int64(sec * 1000)), true
}

// ServerInfo asks for /server_info, and on engines before 0.5.12 for the old name.
func (c *Client) ServerInfo(ctx context.Context) (*ServerInfo, error) {
	var s ServerInfo
	err := c.call(ctx, http.MethodGet, "/server_info", nil, &s)
	if Refused(err, http.StatusNotFound) {
		err = c.call(ctx, http.MethodGet, "/get_server_info", nil, &s)
	}
	if err != nil {
		return nil, err
	}
	return &s, nil
}

// Health asks for /health, a one-token generation that takes a second or more
// (sglang-contract §4.1).
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, "/health", nil, nil)
}

// Abort ends the request with this rid. Engines match rids by prefix, so rid
// must be complete and of a fixed length; unknown rids are fine.
func (c *Client) Abort(ctx context.Context, rid string) error {
	if rid == "" {
		return errors.New("abort: empty rid")
	}
	return c.call(ctx, http.MethodPost, "/abort_request", map[string]string{"rid": rid}, nil)
}

// Admission is a patched engine's own answer to /admit_direct_append (the
// NativeAdmission profile).
type Admission struct {
	CanAdmit       bool   `json:"can_admit"`
	Mode           string `json:"mode"`
	Reason         string `json:"reason"`
	ResidentTokens int    `json:"resident_tokens"`
	AppendTokens   int    `json:"append_tokens"`
	FreeTokens     int    `json:"free_tokens"`
}

// AdmitDirectAppend relays an admission question to the engine itself.
func (c *Client) AdmitDirectAppend(ctx context.Context, question any) (*Admission, error) {
	var a Admission
	if err := c.call(ctx, http.MethodPost, "/admit_direct_append", question, &a); err != nil {
		return nil, err
	}
	return &a, nil
}

// call does one control request. into is what JSON is decoded into, *[]byte for
// the body itself, or nil.
func (c *Client) call(ctx context.Context, method, path string, body, into any) error {
	req, err := c.request(ctx, method, path, body)
	if err != nil {
		return fmt.Errorf("engine %s: %w", path, err)
	}
	hc := c.HTTP
	if hc == nil {
		hc = http.DefaultClient
	}
	resp, err := hc.Do(req)
	if err != nil {
		return fmt.Errorf("engine %s: %w", path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return fmt.Errorf("engine %s: read: %w", path, err)
	}
	if resp.StatusCode/100 != 2 {
		text := strings.ToValidUTF8(string(data[:min(len(data), 512)]), "?")
		return &APIError{Path: path, Status: resp.StatusCode, Body: text}
	}
	switch into := into.(type) {
	case nil:
	case *[]byte:
		*into = data
	default:
		if err := json.Unmarshal(data, into); err != nil {
			return fmt.Errorf("engine %s: decode: %w", path, err)
		}
	}
	return nil
}

func (c *Client) request(ctx context.Context, method, path string, body any) (*http.Request, error) {
	var rd io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		rd = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, rd)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+c.Key)
	}
	return req, nil
}

// WithConnWatch returns a context under which fresh is called when a request
// had to open a new connection: after an engine's restart the kept-alive one is
// gone, however short the restart was (R99).
func WithConnWatch(ctx context.Context, fresh func()) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(i httptrace.GotConnInfo) {
			if !i.Reused {
				fresh()
			}
		},
	})
}
