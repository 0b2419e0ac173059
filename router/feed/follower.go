package feed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Cause says why a feed is not trusted (a metric label; the set is closed).
type Cause string

// The causes. Whatever the cause, the worker stays routable; its overlap is 0.
const (
	CauseNone         Cause = ""
	CauseStart        Cause = "start"        // never had a snapshot
	CauseGap          Cause = "gap"          // a seq is missing
	CauseRollback     Cause = "rollback"     // a seq came twice
	CauseEpoch        Cause = "epoch"        // another engine, or a sidecar that lost its journal
	CauseFormat       Cause = "format"       // other block hashes than ours
	CauseWire         Cause = "wire"         // the peer speaks a later version
	CauseWorker       Cause = "worker"       // another worker answers at this address
	CauseSilence      Cause = "silence"      // no frame for three seconds
	CauseMalformed    Cause = "malformed"    // a line that is no frame
	CauseUnauthorized Cause = "unauthorized" // 401 or 403: a configuration fault
)

// Sink is told what a follower learns. All calls of one follower come from one
// goroutine, in order. Blocks and sessions of a feed are hashes.
type Sink interface {
	// Hello opens every connection, also one that resumes.
	Hello(h Hello)
	// Reset replaces everything known of the worker's residency. State is nil.
	Reset(s kvc.Snapshot)
	Session(s kvc.SessionInfo)
	SessionGone(key kvc.SessionKey)
	Add(owner kvc.SessionKey, blocks []block.Hash)
	Evict(blocks []block.Hash)
	Own(owner kvc.SessionKey, blocks []block.Hash) // owner is the new one
	Clear()
	State(state string, soft, hard time.Time)
	Turn(t kvc.TurnInfo)
	Load(l Load)
	// Trusted says whether the residency may be believed; called on changes
	// only. Before the first call it may not.
	Trusted(ok bool, cause Cause)
}

// FollowerConfig is how one worker's feed is reached.
type FollowerConfig struct {
	URL    string        // the sidecar: http(s)://host:port
	Worker kvc.WorkerID  // the incarnation that must answer
	Token  func() string // bearer token, read at every connection; nil = none
	Client *http.Client  // nil = one of its own; must have no Timeout
	Log    *slog.Logger  // nil = discard

	Silence    time.Duration // 0 = 3 s
	MinBackoff time.Duration // 0 = 100 ms
	MaxBackoff time.Duration // 0 = 5 s
	// FaultBackoff follows a configuration fault, which no retry mends: 401, a
	// later wire version, another worker. 0 = 30 s.
	FaultBackoff time.Duration
}

// Position is how far a follower has come. Everything up to Seq has been given
// to the Sink.
type Position struct {
	Epoch   string
	Seq     uint64
	Trusted bool
	Cause   Cause // why not
}

// Follower keeps a Sink up to date with one worker.
type Follower struct {
	cfg  FollowerConfig
	sink Sink

	mu  sync.Mutex
	pos Position

	heard time.Time // last frame, or the start
	tries int       // failed attempts since the last frame
}

// NewFollower returns a follower that has heard nothing yet.
func NewFollower(c FollowerConfig, s Sink) *Follower {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&c.Silence, 3*time.Second)
	def(&c.MinBackoff, 100*time.Millisecond)
	def(&c.MaxBackoff, 5*time.Second)
	def(&c.FaultBackoff, 30*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return &Follower{cfg: c, sink: s, pos: Position{Cause: CauseStart}}
}

// Position is safe for concurrent use.
func (f *Follower) Position() Position {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pos
}

// Run follows the worker until ctx ends, and returns ctx's error.
func (f *Follower) Run(ctx context.Context) error {
	client := f.cfg.Client
	if client == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		defer t.CloseIdleConnections()
		client = &http.Client{Transport: t}
	}
	f.heard = time.Now()
	for ctx.Err() == nil {
		err := f.follow(ctx, client)
		if ctx.Err() != nil {
			break
		}
		f.distrustSilence()
		f.cfg.Log.Debug("feed connection ended", "worker", f.cfg.Worker, "err", err)
		f.wait(ctx, f.backoff(err))
	}
	return ctx.Err()
}

// fault is a broken rule of the feed. Residency is not to be believed until the
// next snapshot.
type fault struct {
	cause Cause
	text  string
}

func (e *fault) Error() string { return string(e.cause) + ": " + e.text }

func faultf(c Cause, format string, args ...any) error {
	return &fault{c, fmt.Sprintf(format, args...)}
}

// backoff is how long to wait after err: jittered and doubling, long after a
// configuration fault, and short after the kind of fault that a snapshot mends.
func (f *Follower) backoff(err error) time.Duration {
	if broken, ok := errors.AsType[*fault](err); ok {
		f.distrust(broken.cause)
		switch broken.cause {
		case CauseUnauthorized, CauseWire, CauseWorker:
			f.cfg.Log.Warn("feed refused", "worker", f.cfg.Worker, "cause", broken.cause, "err", broken.text)
			return f.cfg.FaultBackoff
		}
	}
	d := f.cfg.MinBackoff << min(f.tries, 16)
	f.tries++
	d = min(d, f.cfg.MaxBackoff)
	return d/2 + rand.N(d/2+1)
}

// wait sleeps, but not past the moment at which silence has to be noticed.
func (f *Follower) wait(ctx context.Context, d time.Duration) {
	for d > 0 && ctx.Err() == nil {
		nap := d
		if f.Position().Trusted {
			nap = min(nap, max(f.cfg.Silence-time.Since(f.heard), 0)+time.Millisecond)
		}
		timer := time.NewTimer(nap)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		d -= nap
		f.distrustSilence()
	}
}

func (f *Follower) distrustSilence() {
	if time.Since(f.heard) >= f.cfg.Silence {
		f.distrust(CauseSilence)
	}
}

// distrust tells the sink once.
func (f *Follower) distrust(c Cause) {
	f.mu.Lock()
	was := f.pos.Trusted
	f.pos.Trusted = false
	if was || c != CauseSilence {
		f.pos.Cause = c
	}
	f.mu.Unlock()
	if was {
		f.cfg.Log.Info("feed no longer trusted", "worker", f.cfg.Worker, "cause", c)
		f.sink.Trusted(false, c)
	}
}

// advance records that everything up to seq was given to the sink.
func (f *Follower) advance(epoch string, seq uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pos.Epoch, f.pos.Seq = epoch, seq
}

func (f *Follower) trust() {
	f.mu.Lock()
	was := f.pos.Trusted
	f.pos.Trusted, f.pos.Cause = true, CauseNone
	f.mu.Unlock()
	if !was {
		f.sink.Trusted(true, CauseNone)
	}
}

// follow is one connection, from request to its end.
func (f *Follower) follow(ctx context.Context, client *http.Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// Silence ends the connection: a peer that is gone without a FIN would
	// otherwise hold it for hours.
	patience := f.cfg.Silence
	if f.Position().Trusted {
		patience = max(f.cfg.Silence-time.Since(f.heard), time.Millisecond)
	}
	alarm := time.AfterFunc(patience, cancel)
	defer alarm.Stop()

	resp, err := f.connect(ctx, client)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	c := &conn{f: f}
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := readLine(lines)
		if err != nil {
			return err
		}
		if err := c.frame(line); err != nil {
			return err
		}
		f.heard = time.Now()
		f.tries = 0
		alarm.Reset(f.cfg.Silence)
	}
}

func (f *Follower) connect(ctx context.Context, client *http.Client) (*http.Response, error) {
	target := strings.TrimSuffix(f.cfg.URL, "/") + "/kvc/v1/feed"
	if p := f.Position(); p.Trusted {
		target += "?" + url.Values{"epoch": {p.Epoch}, "since": {strconv.FormatUint(p.Seq, 10)}}.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, fmt.Errorf("feed url: %w", err)
	}
	req.Header.Set("X-Kvc-Wire", strconv.Itoa(Wire))
	if f.cfg.Token != nil {
		if token := f.cfg.Token(); token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("get feed: %w", err)
	}
	switch resp.StatusCode {
	case http.StatusOK:
		return resp, nil
	case http.StatusUnauthorized, http.StatusForbidden:
		err = faultf(CauseUnauthorized, "the sidecar answered %s: check the token file on both sides", resp.Status)
	default:
		err = fmt.Errorf("get feed: the sidecar answered %s", resp.Status)
	}
	_ = resp.Body.Close()
	return nil, err
}

// readLine returns one line without its break. A line without a break is
// truncated, so no frame.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if err == nil {
		return line[:len(line)-1], nil
	}
	long := append([]byte(nil), line...)
	for errors.Is(err, bufio.ErrBufferFull) {
		line, err = r.ReadSlice('\n')
		if long = append(long, line...); len(long) > MaxLine {
			return nil, faultf(CauseMalformed, "%v", errLine)
		}
	}
	if errors.Is(err, io.EOF) && len(long) > 0 {
		return nil, io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	return long[:len(long)-1], nil
}
