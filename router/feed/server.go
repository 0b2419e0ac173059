package feed

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
)

const (
	// maxBehind is how far a follower may be behind before it is disconnected,
	// and so how much is kept for resuming, in bytes.
	maxBehind = 8 << 20
	// heartbeat is the time between load frames; wire.md asks for one a second.
	heartbeat = 500 * time.Millisecond
)

// ServerConfig is what a Server needs from the worker's sidecar.
type ServerConfig struct {
	// Hello is the worker's description; T, Seq, Resume and State are filled in.
	Hello Hello
	// Seq is the last seq ever published under this epoch (from the journal),
	// 0 for a new epoch.
	Seq uint64
	// Snapshot copies the ledger's state together with the seq of its last
	// change. It must first publish changes that are still pending, under the
	// lock that serialises the ledger.
	Snapshot func() (kvc.Snapshot, uint64)
	// Load reads the gauges for a heartbeat.
	Load func() Load
}

// Server is one worker's feed. Publish calls number the changes; any number of
// followers share the encoded lines. Safe for concurrent use; it calls Snapshot
// and Load without holding its own lock, so Publish may be called under the
// caller's.
type Server struct {
	cfg ServerConfig

	mu        sync.Mutex
	hello     Hello
	seq       uint64
	log       []entry // changes and heartbeats, oldest first
	first     uint64  // position of log[0]
	base      uint64  // every change behind this seq is in log
	size      int     // bytes in log
	more      chan struct{}
	ended     chan struct{} // closed when the epoch's followers must leave
	followers map[*follower]struct{}
}

// entry is one line; changes carry their own seq, heartbeats the current one.
type entry struct {
	seq  uint64
	line []byte
}

// follower is one connection.
type follower struct {
	next uint64 // position in the log
	stop context.CancelFunc
}

// NewServer returns a feed that stands at c.Seq with nothing to resume from.
func NewServer(c ServerConfig) *Server {
	s := &Server{
		cfg: c, hello: c.Hello, seq: c.Seq, base: c.Seq,
		more: make(chan struct{}), ended: make(chan struct{}), followers: map[*follower]struct{}{},
	}
	s.hello.Head = Head{T: KindHello}
	return s
}

// Run sends heartbeats until ctx ends, then ends every follower's stream.
func (s *Server) Run(ctx context.Context) error {
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			s.mu.Lock()
			s.endFollowers()
			s.mu.Unlock()
			return nil
		case <-tick.C:
			s.Beat()
		}
	}
}

// Beat sends one load frame now.
func (s *Server) Beat() {
	load := s.cfg.Load()
	for _, rate := range []*float64{&load.PrefillTokensPerS, &load.DecodeTokensPerS, &load.TokensPerBlock} {
		if math.IsNaN(*rate) || math.IsInf(*rate, 0) {
			*rate = 0 // JSON has no spelling for it
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	load.Head = Head{T: KindLoad, Seq: s.seq}
	if line, err := Encode(&load); err == nil {
		s.append(entry{s.seq, line})
	}
}

// Seq is the seq of the last change published.
func (s *Server) Seq() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seq
}

// Publish sends ledger changes in order and returns the seq of the last one.
func (s *Server) Publish(changes ...kvc.Change) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range changes {
		for _, f := range framesOf(c) {
			s.publish(f)
		}
	}
	return s.seq
}

// PublishState announces Active or Draining; zero deadlines are none. The state
// also opens every later connection.
func (s *Server) PublishState(state string, soft, hard time.Time) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := &State{Head: Head{T: KindState}, State: state, SoftDeadlineMS: unixMS(soft), HardDeadlineMS: unixMS(hard)}
	s.hello.State, s.hello.SoftDeadlineMS, s.hello.HardDeadlineMS = f.State, f.SoftDeadlineMS, f.HardDeadlineMS
	s.publish(f)
	return s.seq
}

// Restart begins another series: a new engine (its epoch is in hello) or a
// changed description. Followers are disconnected, come back, and find a
// snapshot. The state is kept.
func (s *Server) Restart(hello Hello, seq uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	hello.Head = Head{T: KindHello}
	hello.State, hello.SoftDeadlineMS, hello.HardDeadlineMS =
		s.hello.State, s.hello.SoftDeadlineMS, s.hello.HardDeadlineMS
	s.hello, s.seq, s.base = hello, seq, seq
	s.first += uint64(len(s.log)) + 1 // nobody who stood in the old series can go on in this one
	s.log, s.size = nil, 0
	s.endFollowers()
}

func (s *Server) endFollowers() {
	close(s.ended)
	s.ended = make(chan struct{})
}

// publish numbers one change. One that no line can hold leaves a gap, which
// sends the followers to a snapshot. The caller holds mu.
func (s *Server) publish(f Frame) {
	s.seq++
	f.head().Seq = s.seq
	line, err := Encode(f)
	if err != nil {
		s.base = s.seq
		return
	}
	s.append(entry{s.seq, line})
}

// append adds a line, drops the oldest beyond maxBehind together with the
// followers that still needed them, and wakes the rest.
func (s *Server) append(e entry) {
	s.log = append(s.log, e)
	s.size += len(e.line)
	for s.size > maxBehind {
		s.size -= len(s.log[0].line)
		s.base = max(s.base, s.log[0].seq)
		s.log[0] = entry{}
		s.log = s.log[1:]
		s.first++
	}
	for f := range s.followers {
		if f.next < s.first {
			f.stop()
		}
	}
	close(s.more)
	s.more = make(chan struct{})
}

// ServeHTTP is GET /kvc/v1/feed[?epoch=E&since=N]. Authentication is the
// caller's.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	epoch := r.URL.Query().Get("epoch")
	since, err := strconv.ParseUint(r.URL.Query().Get("since"), 10, 64)
	if err != nil && epoch != "" {
		http.Error(w, "since: want the seq of the last frame, as a decimal number", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Kvc-Wire", strconv.Itoa(Wire))

	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	out := &writer{w: w, ctl: http.NewResponseController(w)}
	_ = out.ctl.SetWriteDeadline(time.Time{}) // the stream outlives the server's own timeout
	f := &follower{stop: func() { out.stop(); cancel() }}
	ended, err := s.greet(out, f, epoch, since)
	defer s.leave(f)
	for err == nil {
		var lines [][]byte
		var more <-chan struct{}
		lines, more, err = s.take(f)
		if err == nil && len(lines) > 0 {
			err = out.write(lines...)
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-ended:
			return
		case <-more:
		}
	}
}

// greet sends the hello and, unless the follower can resume, a snapshot; f then
// stands where it has to go on. The returned channel ends the stream.
func (s *Server) greet(out *writer, f *follower, epoch string, since uint64) (<-chan struct{}, error) {
	s.mu.Lock()
	hello, ended := s.hello, s.ended
	if epoch == hello.Epoch && s.join(f, since) {
		hello.Seq, hello.Resume = s.seq, true
		s.mu.Unlock()
		return ended, out.frames(&hello)
	}
	s.mu.Unlock()
	snap, seq := s.cfg.Snapshot()
	s.mu.Lock()
	hello = s.hello // again: the state may have changed before the snapshot
	hello.Seq = seq
	ok := ended == s.ended && s.join(f, seq)
	s.mu.Unlock()
	if !ok {
		return ended, errBehind
	}
	if err := out.frames(&hello); err != nil {
		return ended, err
	}
	for _, p := range snapshotOf(snap, seq) {
		if err := out.frames(p); err != nil {
			return ended, err
		}
	}
	return ended, nil
}

// join lets f go on behind seq; false when the log does not reach back that
// far, or the follower claims to know the future. The caller holds mu.
func (s *Server) join(f *follower, seq uint64) bool {
	if seq < s.base || seq > s.seq {
		return false
	}
	next, _ := slices.BinarySearchFunc(s.log, seq, func(e entry, seq uint64) int {
		if e.seq > seq {
			return 1
		}
		return -1
	})
	f.next = s.first + uint64(next)
	s.followers[f] = struct{}{}
	return true
}

func (s *Server) leave(f *follower) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.followers, f)
}

var errBehind = fmt.Errorf("a follower was more than %d bytes behind", maxBehind)

// take returns the lines that f has not seen, or else a channel that is closed
// when there are more.
func (s *Server) take(f *follower) (lines [][]byte, more <-chan struct{}, err error) {
	const batch = 256
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.next < s.first {
		return nil, nil, errBehind
	}
	log := s.log[f.next-s.first:]
	for _, e := range log[:min(len(log), batch)] {
		lines = append(lines, e.line)
	}
	f.next += uint64(len(lines))
	return lines, s.more, nil
}

// writer sends lines to one follower; stop makes a blocked write fail.
type writer struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
}

func (o *writer) stop() { _ = o.ctl.SetWriteDeadline(time.Unix(1, 0)) }

func (o *writer) frames(fs ...Frame) error {
	for _, f := range fs {
		line, err := Encode(f)
		if err != nil {
			return err
		}
		if err := o.write(line); err != nil {
			return err
		}
	}
	return nil
}

func (o *writer) write(lines ...[]byte) error {
	for _, line := range lines {
		if _, err := o.w.Write(line); err != nil {
			return err
		}
	}
	return o.ctl.Flush()
}
