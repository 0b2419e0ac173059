package kit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
)

// Patience bounds every wait for something that has to happen; it is long
// because test machines are slow, and never reached when the test passes.
const Patience = 30 * time.Second

// Script answers one turn.
type Script func(*Exchange)

// Seen is one turn as a worker got it.
type Seen struct {
	Conn    int // which connection, counted from 1
	Path    string
	Header  http.Header
	Head    string // request line and headers, the exact bytes
	Body    []byte
	Arrived time.Time

	once sync.Once
	scan *scan.Body // nil when the body is no JSON object
}

// Sum is the body's sha256 in hex.
func (s *Seen) Sum() string { return Sum(s.Body) }

// Sum is the sha256 of b in hex.
func Sum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Member is a top-level member of the body as encoding/json reads it, numbers
// as json.Number; nil when there is none.
func (s *Seen) Member(key string) any {
	s.once.Do(func() { s.scan, _ = scan.Parse(s.Body, scan.Limits{}) })
	if s.scan == nil {
		return nil
	}
	v, ok := s.scan.Get(key)
	if !ok {
		return nil
	}
	var out any
	d := json.NewDecoder(bytes.NewReader(v.Raw))
	d.UseNumber()
	_ = d.Decode(&out) // it was validated
	return out
}

// Worker is a mock worker: an HTTP server that records what turns look like on
// the wire and lets a script answer them.
type Worker struct {
	t    testing.TB
	addr string
	srv  *http.Server
	done chan struct{}

	mu      sync.Mutex
	conns   int
	open    map[*recorder]struct{}
	seen    []*Seen
	script  Script
	scripts []Script // of the next turns, before script
	changed chan struct{}

	control func(w http.ResponseWriter, r *http.Request) // every path that is no turn
	before  func(*Exchange)                              // of each turn
	after   func(*Exchange)
}

// turnPaths are the paths of turns.
func turnPaths() []string {
	return []string{"/v1/chat/completions", "/v1/completions", "/generate"}
}

// start begins to listen on addr ("127.0.0.1:0" for any port).
func (w *Worker) start(addr string) {
	w.t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		w.t.Fatalf("mock worker: %v", err)
	}
	w.addr, w.done = l.Addr().String(), make(chan struct{})
	w.open, w.changed = map[*recorder]struct{}{}, make(chan struct{})
	w.srv = &http.Server{
		Handler:           http.HandlerFunc(w.serve),
		ReadHeaderTimeout: time.Minute,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	go func() {
		defer close(w.done)
		_ = w.srv.Serve(&listener{l, w})
	}()
}

type connKey struct{}

// Stop kills the worker: its port is closed and every connection is reset.
func (w *Worker) Stop() {
	_ = w.srv.Close()
	w.mu.Lock()
	for c := range w.open {
		reset(c.Conn)
	}
	w.mu.Unlock()
	<-w.done
}

// Addr is host:port.
func (w *Worker) Addr() string { return w.addr }

// URL is the worker's base URL.
func (w *Worker) URL() string { return "http://" + w.addr }

// Always sets the script of every turn from now on.
func (w *Worker) Always(s Script) { w.note(func() { w.script = s }) }

// Next queues scripts for the next turns, one each, before the lasting one.
func (w *Worker) Next(s ...Script) { w.note(func() { w.scripts = append(w.scripts, s...) }) }

// Turns are the turns received so far.
func (w *Worker) Turns() []*Seen {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.seen)
}

// Last is the newest turn.
func (w *Worker) Last() *Seen {
	w.t.Helper()
	turns := w.Turns()
	if len(turns) == 0 {
		w.t.Fatal("the worker got no turn")
	}
	return turns[len(turns)-1]
}

// AwaitTurns waits until n turns have arrived.
func (w *Worker) AwaitTurns(n int) []*Seen {
	w.t.Helper()
	w.Await("turns", func() bool { return len(w.seen) >= n })
	return w.Turns()
}

// Await waits until ok, which is called under the worker's lock after each thing
// noted.
func (w *Worker) Await(what string, ok func() bool) {
	w.t.Helper()
	deadline := time.After(Patience)
	for {
		w.mu.Lock()
		done, changed := ok(), w.changed
		w.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			w.t.Fatalf("worker %s: waited in vain for %s", w.addr, what)
		}
	}
}

// note changes something under the lock and wakes who waits.
func (w *Worker) note(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *Worker) serve(rw http.ResponseWriter, r *http.Request) {
	conn, _ := r.Context().Value(connKey{}).(*recorder)
	if r.Method != http.MethodPost || !slices.Contains(turnPaths(), r.URL.Path) {
		w.control(rw, r)
		conn.take()
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		conn.take()
		return // the peer gave up while it sent
	}
	head, _, _ := strings.Cut(conn.take(), "\r\n\r\n")
	ex := &Exchange{
		worker: w, w: rw, r: r, conn: conn,
		Seen: &Seen{Conn: conn.id, Path: r.URL.Path, Header: r.Header.Clone(), Head: head, Body: body, Arrived: time.Now()},
	}
	var s Script
	w.note(func() {
		w.seen = append(w.seen, ex.Seen)
		s = w.script
		if len(w.scripts) > 0 {
			s, w.scripts = w.scripts[0], w.scripts[1:]
		}
	})
	if w.after != nil {
		defer w.after(ex)
	}
	if w.before != nil {
		w.before(ex)
	}
	s(ex)
	if ex.gone != nil {
		_ = conn.Close()
		<-ex.gone
	}
}

// listener hands out recorded connections.
type listener struct {
	net.Listener
	w *Worker
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	r := &recorder{Conn: c, w: l.w}
	l.w.note(func() {
		l.w.conns++
		r.id = l.w.conns
		l.w.open[r] = struct{}{}
	})
	return r, nil
}

// recorder keeps the bytes of the request that is being read, bounded.
type recorder struct {
	net.Conn
	w  *Worker
	id int

	mu  sync.Mutex
	buf []byte
}

const recorded = 1 << 20

func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.Conn.Read(p)
	r.mu.Lock()
	if len(r.buf) < recorded {
		r.buf = append(r.buf, p[:n]...)
	}
	r.mu.Unlock()
	return n, err
}

// take returns what was read since the last take.
func (r *recorder) take() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := string(r.buf)
	r.buf = r.buf[:0]
	return s
}

func (r *recorder) Close() error {
	r.w.note(func() { delete(r.w.open, r) })
	return r.Conn.Close()
}

// OpenConns is the number of connections open to the worker.
func (w *Worker) OpenConns() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.open)
}

// reset closes a connection with RST instead of FIN.
func reset(c net.Conn) {
	if r, ok := c.(*recorder); ok {
		c = r.Conn
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}
