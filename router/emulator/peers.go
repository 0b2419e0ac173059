package emulator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// perform carries out what the core asked for.
func (s *Server) perform(f effect) {
	switch f.kind {
	case effectDiscover:
		s.peers.spawn(f.seq, s.peers.discover)
	case effectJoin:
		s.peers.spawn(f.seq, s.peers.join)
	case effectAbortRoom:
		s.peers.spawn(nil, func(ctx context.Context, _ *sequence) { s.peers.abort(ctx, f.seq) })
	case effectDelivered:
		s.rooms.tell(f.seq.boot.room, roomAnswer{First: f.seq.first, CachedTokens: f.seq.reported})
	case effectRefused:
		s.rooms.tell(f.seq.boot.room, roomAnswer{Error: "the transfer failed"})
	case effectCrash:
		s.fault(f.seq)
	}
}

// fault is a request that kills the scheduler of a real engine (contract §2.1,
// §2.2); here only when asked for.
func (s *Server) fault(q *sequence) {
	if s.cfg.Crash {
		s.crash(fmt.Sprintf("bootstrap_room %d of %s", q.boot.room, q.rid))
	}
}

func (s *Server) crash(why string) {
	select {
	case s.crashed <- &errCrash{why}:
	default:
	}
}

// peers is the decode side of the rendezvous: which prefill workers are known,
// their heartbeats, and the rooms waited for.
type peers struct {
	s      *Server
	client *http.Client
	ctx    context.Context // of every goroutine here
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	known map[string]*peer // by bootstrap address
	waits map[*sequence]context.CancelFunc
	over  bool
}

// peer is one prefill worker that answered.
type peer struct {
	addr string
	rank string // host:port of its data plane
}

func newPeers(s *Server) *peers {
	p := &peers{s: s, known: map[string]*peer{}, waits: map[*sequence]context.CancelFunc{}}
	p.client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 90 * time.Second}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// close ends every goroutine and waits for them.
func (p *peers) close() {
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	p.cancel()
	p.wg.Wait()
	p.client.CloseIdleConnections()
}

// spawn runs f until it returns or its sequence is done.
func (p *peers) spawn(q *sequence, f func(context.Context, *sequence)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	if q != nil {
		p.waits[q] = cancel
	}
	p.wg.Go(func() {
		defer cancel()
		f(ctx, q)
	})
}

// release ends what still waits for q.
func (p *peers) release(q *sequence) {
	p.mu.Lock()
	cancel := p.waits[q]
	delete(p.waits, q)
	p.mu.Unlock()
	if cancel != nil {
		cancel()
	}
}

func (p *peers) address(q *sequence) string {
	port := q.boot.port
	or(&port, p.s.cfg.BootstrapPort)
	return net.JoinHostPort(q.boot.host, strconv.Itoa(port))
}

// discover finds the prefill worker of q: up to 15 attempts a second apart, then
// the handshake has failed (contract §2.3 step 1).
func (p *peers) discover(ctx context.Context, q *sequence) {
	addr := p.address(q)
	var err error
	for i := range routeAttempts {
		if i > 0 && !sleep(ctx, p.s.cfg.RouteRetry) {
			return
		}
		var found *peer
		if found, err = p.lookup(ctx, addr); err == nil {
			p.remember(found)
			p.s.engine.do(func(c *core) { c.discovered(q) })
			return
		}
		if _, mismatch := errors.AsType[*mismatchError](err); mismatch {
			break
		}
	}
	if ctx.Err() != nil {
		return
	}
	p.s.engine.do(func(c *core) { c.transferLost(q, handshakeFailed(q, err)) })
}

func handshakeFailed(q *sequence, err error) string {
	return fmt.Sprintf("Decode handshake failed for request rank=0 decode_req.req.rid='%s' "+
		"decode_req.req.bootstrap_room=%d with exception %s",
		q.rid, q.boot.room, transferError(q.boot.room, err.Error()))
}

func lostMessage(q *sequence, why string) string {
	return fmt.Sprintf("Decode transfer failed for request rank=0 decode_req.req.rid='%s' "+
		"decode_req.req.bootstrap_room=%d with exception %s",
		q.rid, q.boot.room, transferError(q.boot.room, why))
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// mismatchError is a prefill worker that cannot serve this decode worker: a real
// scheduler dies of it (contract §1.2).
type mismatchError struct{ what string }

func (e *mismatchError) Error() string { return e.what }

// lookup asks a prefill worker for its route and its rank's address, unless it
// is known.
func (p *peers) lookup(ctx context.Context, addr string) (*peer, error) {
	p.mu.Lock()
	known := p.known[addr]
	p.mu.Unlock()
	if known != nil {
		return known, nil
	}
	var info route
	const all = "-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	if err := p.get(ctx, "http://"+addr+"/route?prefill_dp_rank="+all, &info); err != nil {
		return nil, fmt.Errorf("could not fetch prefill parallel info from %s: %w", addr, err)
	}
	if err := p.compatible(&info); err != nil {
		if p.s.cfg.Crash {
			p.s.crash(err.Error())
		}
		return nil, err
	}
	var rank rankAddress
	const first = "0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
	if err := p.get(ctx, "http://"+addr+"/route?prefill_dp_rank="+first, &rank); err != nil {
		return nil, fmt.Errorf("could not fetch bootstrap info from %s: %w", addr, err)
	}
	return &peer{addr: addr, rank: net.JoinHostPort(rank.RankIP, strconv.Itoa(rank.RankPort))}, nil
}

func (p *peers) compatible(info *route) error {
	switch cfg := &p.s.cfg; {
	case info.PageSize != cfg.PageSize:
		return &mismatchError{fmt.Sprintf("Page size mismatch: prefill server has page_size=%d, but decode server has "+
			"page_size=%d. Both servers must use the same --page-size value.", info.PageSize, cfg.PageSize)}
	case info.KVCacheDtype != cfg.KVCacheDtype:
		return &mismatchError{fmt.Sprintf("KV cache dtype mismatch: prefill server has kv_cache_dtype=%s, but decode "+
			"server has kv_cache_dtype=%s. Both servers must use the same --kv-cache-dtype value.",
			info.KVCacheDtype, cfg.KVCacheDtype)}
	}
	return nil
}

// get reads a JSON answer strictly: decode breaks on members it does not know
// (contract §2.7).
func (p *peers) get(ctx context.Context, url string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end or given up
	body, err := io.ReadAll(io.LimitReader(resp.Body, smallBody))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %s", resp.StatusCode, body)
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	return d.Decode(v)
}

// remember keeps a prefill worker and starts its heartbeat.
func (p *peers) remember(found *peer) {
	p.mu.Lock()
	_, have := p.known[found.addr]
	if !have {
		p.known[found.addr] = found
	}
	p.mu.Unlock()
	if !have {
		p.spawn(nil, func(ctx context.Context, _ *sequence) { p.heartbeat(ctx, found) })
	}
}

// heartbeat watches a prefill worker until it is lost: then every room that
// waits for it fails, and it is forgotten, so that a restarted one is found
// again (contract §2.3 step 6).
func (p *peers) heartbeat(ctx context.Context, to *peer) {
	for failures := 0; failures < p.s.cfg.HeartbeatMaxFailure; {
		if !sleep(ctx, p.s.cfg.HeartbeatInterval) {
			return
		}
		if p.alive(ctx, to) {
			failures = 0
		} else {
			failures++
		}
	}
	if ctx.Err() != nil {
		return
	}
	p.mu.Lock()
	delete(p.known, to.addr)
	p.mu.Unlock()
	why := fmt.Sprintf("Lost connection with prefill instance (bootstrap_addr: %s)", to.addr)
	p.s.engine.do(func(c *core) { c.peerLost(func(q *sequence) bool { return p.address(q) == to.addr }, why) })
}

func (p *peers) alive(ctx context.Context, to *peer) bool {
	ctx, cancel := context.WithTimeout(ctx, p.s.cfg.HeartbeatInterval)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+to.addr+"/health", nil)
	if err != nil {
		return false
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return false
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close()) == nil && resp.StatusCode == http.StatusOK
}

// join tells the prefill worker that the pages of q are allocated, and waits
// for the KV. A connection that breaks says nothing: ZMQ has none, so a real
// engine learns of a dead peer by heartbeat or timeout only.
func (p *peers) join(ctx context.Context, q *sequence) {
	wait, cancel := context.WithTimeout(ctx, p.s.cfg.WaitingTimeout)
	defer cancel()
	a, err := p.post(wait, q)
	if err != nil || q.boot.room == 0 {
		// Room 0 reads as "metadata not written yet" (contract §2.1).
		<-wait.Done()
	}
	switch {
	case ctx.Err() != nil:
	case wait.Err() != nil:
		why := fmt.Sprintf("Request %d timed out after %.1fs in KVPoll.WaitingForInput",
			q.boot.room, p.s.cfg.WaitingTimeout.Seconds())
		p.s.engine.do(func(c *core) { c.transferLost(q, lostMessage(q, why)) })
	case a.Error != "":
		p.s.engine.do(func(c *core) { c.transferLost(q, lostMessage(q, a.Error)) })
	default:
		p.s.engine.do(func(c *core) { c.delivered(q, a.First, a.CachedTokens); c.start() })
	}
}

func (p *peers) roomURL(q *sequence) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.known[p.address(q)]
	if known == nil {
		return "", errors.New("the prefill instance is gone")
	}
	return "http://" + known.rank + "/rooms/" + strconv.FormatUint(q.boot.room, 10), nil
}

func (p *peers) post(ctx context.Context, q *sequence) (a roomAnswer, err error) {
	url, err := p.roomURL(q)
	if err != nil {
		return a, err
	}
	body, err := json.Marshal(roomRequest{DecodePrefixLen: q.cached})
	if err != nil {
		return a, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return a, err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end or given up
	return a, json.NewDecoder(resp.Body).Decode(&a)
}

// abort gives a room up, best effort (contract §2.5).
func (p *peers) abort(ctx context.Context, q *sequence) {
	defer p.release(q)
	url, err := p.roomURL(q)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, url, nil)
	if err != nil {
		return
	}
	if resp, err := p.client.Do(req); err == nil {
		_ = resp.Body.Close() // nothing to read
	}
}
