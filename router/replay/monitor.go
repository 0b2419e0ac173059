package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
)

// Monitor reads the router's and the sidecars' status beside a run.
type Monitor struct {
	AdminURL string            // the router's admin port, "" = none
	Sidecars map[string]string // worker id to sidecar URL; nil = none known
	Token    string            // of the pool, for the sidecars
	Every    time.Duration     // between samples, real; 0 = 250 ms
	Client   *http.Client      // nil = one of the monitor's own
	// SettleWithin limits a wait for the router to follow; 0 = 10 s, real.
	SettleWithin time.Duration
}

// ReadRouter fetches the router's status.
func (m *Monitor) ReadRouter(ctx context.Context) (*admission.RouterStatus, error) {
	var s admission.RouterStatus
	if err := m.get(ctx, m.AdminURL+admission.PathStatus, &s); err != nil {
		return nil, fmt.Errorf("read the router's status: %w", err)
	}
	return &s, nil
}

// ReadSidecars fetches every sidecar's status by worker id.
func (m *Monitor) ReadSidecars(ctx context.Context) (map[string]admission.SidecarStatus, error) {
	out := make(map[string]admission.SidecarStatus, len(m.Sidecars))
	for id, base := range m.Sidecars {
		var s admission.SidecarStatus
		if err := m.get(ctx, base+admission.PathStatus, &s); err != nil {
			return nil, fmt.Errorf("read the status of worker %s: %w", id, err)
		}
		out[id] = s
	}
	return out, nil
}

func (m *Monitor) get(ctx context.Context, url string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if m.Token != "" {
		req.Header.Set("Authorization", "Bearer "+m.Token)
	}
	client := m.Client
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or given up
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %d", url, resp.StatusCode)
	}
	return json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(v)
}

// start samples until the returned function is called, which yields what was
// seen. A nil monitor sees nothing.
func (m *Monitor) start(ctx context.Context, zero time.Time) (func() ([]LoadSample, Counters), error) {
	if m == nil || m.AdminURL == "" && len(m.Sidecars) == 0 {
		return func() ([]LoadSample, Counters) { return nil, Counters{} }, nil
	}
	before, err := m.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // an interrupted run is reported too
	var samples []LoadSample
	var wg sync.WaitGroup
	wg.Go(func() { samples = m.sample(ctx, zero) })
	return func() ([]LoadSample, Counters) {
		after, err := m.snapshot(ctx)
		cancel()
		wg.Wait()
		if err != nil {
			return samples, Counters{}
		}
		if after.router != nil {
			samples = append(samples, loadOf(after.router, time.Since(zero)))
		}
		return samples, after.since(before)
	}, nil
}

func (m *Monitor) sample(ctx context.Context, zero time.Time) []LoadSample {
	if m.AdminURL == "" {
		return nil
	}
	every := m.Every
	if every <= 0 {
		every = 250 * time.Millisecond
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	var out []LoadSample
	for {
		if s, err := m.ReadRouter(ctx); err == nil {
			out = append(out, loadOf(s, time.Since(zero)))
		}
		select {
		case <-ctx.Done():
			return out
		case <-tick.C:
		}
	}
}

func loadOf(s *admission.RouterStatus, at time.Duration) LoadSample {
	l := LoadSample{At: at}
	for _, w := range s.Workers {
		l.Workers = append(l.Workers, WorkerLoad{Pod: w.Pod, Role: w.Role, Used: w.Used, Capacity: w.CapacityTokens})
	}
	return l
}

// snapshot is the monotonic counters at one moment.
type snapshot struct {
	router  *admission.RouterStatus
	workers map[string]admission.SidecarStatus
}

func (m *Monitor) snapshot(ctx context.Context) (s snapshot, err error) {
	if m.AdminURL != "" {
		if s.router, err = m.ReadRouter(ctx); err != nil {
			return s, err
		}
	}
	if len(m.Sidecars) > 0 {
		s.workers, err = m.ReadSidecars(ctx)
	}
	return s, err
}

// since is what was added since an earlier snapshot. A worker that is new or
// restarted counts from zero.
func (s snapshot) since(before snapshot) Counters {
	var c Counters
	if s.router != nil {
		n := s.router.PinChanges
		if before.router != nil && before.router.StartedMS == s.router.StartedMS {
			n -= before.router.PinChanges
		}
		c.PinChanges = &n
	}
	if s.workers == nil {
		return c
	}
	var prefill, decode, transferred, evicted int64
	for id, w := range s.workers {
		t := w.Totals
		if old, ok := before.workers[id]; ok && old.Epoch == w.Epoch {
			t.PrefillUncachedTokens -= old.Totals.PrefillUncachedTokens
			t.TransferredTokens -= old.Totals.TransferredTokens
			t.EvictedTokens -= old.Totals.EvictedTokens
		}
		if w.Role == "prefill" {
			prefill += t.PrefillUncachedTokens
		} else {
			decode += t.PrefillUncachedTokens
			transferred += t.TransferredTokens
			evicted += t.EvictedTokens
		}
	}
	c.PrefillTokens, c.DecodePrefill, c.TransferredTokens, c.EvictedTokens = &prefill, &decode, &transferred, &evicted
	return c
}

// settle waits until no worker has a turn under way and the router has followed
// every worker's ledger to its last change.
func (m *Monitor) settle(ctx context.Context) error {
	within := m.SettleWithin
	if within <= 0 {
		within = 10 * time.Second
	}
	deadline := time.Now().Add(within)
	wait := time.Millisecond
	for {
		behind, err := m.behind(ctx)
		if err == nil && behind == "" {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(deadline) {
			if err == nil {
				err = errors.New(behind)
			}
			return fmt.Errorf("wait for the router to follow the workers: %w", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
		wait = min(2*wait, 50*time.Millisecond)
	}
}

// behind names a worker that is busy or that the router has not followed.
func (m *Monitor) behind(ctx context.Context) (string, error) {
	workers, err := m.ReadSidecars(ctx)
	if err != nil {
		return "", err
	}
	router, err := m.ReadRouter(ctx)
	if err != nil {
		return "", err
	}
	followed := make(map[string]uint64, len(router.Workers))
	for _, w := range router.Workers {
		followed[w.Worker] = w.Seq
	}
	for id, w := range workers {
		if w.InFlight > 0 {
			return fmt.Sprintf("worker %s still has %d turns under way", id, w.InFlight), nil
		}
		if followed[id] < w.Seq {
			return fmt.Sprintf("worker %s is at change %d, the router at %d", id, w.Seq, followed[id]), nil
		}
	}
	return "", nil
}
