package proxy

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// outbound is every way the router speaks to sidecars. Turns, questions and
// feeds have connections of their own, so that one cannot starve another (R73);
// none is capped (R74), and the environment's proxy is never used.
type outbound struct {
	data   *http.Transport
	asks   *http.Transport
	feeds  *http.Transport
	tokens *admission.Tokens
}

func newOutbound(tokens *admission.Tokens, m *telemetry.Router, dialTimeout time.Duration) *outbound {
	return &outbound{
		data:   newTransport(m, "data", dialTimeout),
		asks:   newTransport(m, "admission", dialTimeout),
		feeds:  newTransport(m, "feed", dialTimeout),
		tokens: tokens,
	}
}

func newTransport(m *telemetry.Router, purpose string, dialTimeout time.Duration) *http.Transport {
	d := net.Dialer{Timeout: dialTimeout, KeepAlive: 15 * time.Second}
	return &http.Transport{
		Proxy: nil,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			m.Conns(purpose, +1)
			return &countedConn{Conn: c, closed: func() { m.Conns(purpose, -1) }}, nil
		},
		TLSHandshakeTimeout:   5 * time.Second,
		MaxIdleConnsPerHost:   1024,
		IdleConnTimeout:       90 * time.Second,
		DisableCompression:    true,
		ExpectContinueTimeout: time.Second,
		WriteBufferSize:       64 << 10, // turns are long uploads
		ReadBufferSize:        16 << 10,
	}
}

// countedConn tells once that it was closed.
type countedConn struct {
	net.Conn
	once   sync.Once
	closed func()
}

func (c *countedConn) Close() error {
	c.once.Do(c.closed)
	return c.Conn.Close()
}

// authorize is the one function that gives an outgoing request its credentials
// (R38): the pool's token, or none.
func (o *outbound) authorize(h http.Header) { o.tokens.Authorize(h) }

// client speaks the admission wire over the questions' connections.
func (o *outbound) client() *admission.Client {
	return &admission.Client{HTTP: &http.Client{Transport: o.asks, CheckRedirect: noRedirect}, Tokens: o.tokens}
}

func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

func (o *outbound) close() {
	o.data.CloseIdleConnections()
	o.asks.CloseIdleConnections()
	o.feeds.CloseIdleConnections()
}
