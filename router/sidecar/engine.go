package sidecar

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"syscall"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/sglang"
)

const (
	missedPolls = 3                // before an engine that fell silent is not ready
	infoRecheck = 30 * time.Second // /server_info is asked again at least this often
	// /server_info asks the scheduler, which may be in the middle of a long prefill.
	identifyTimeout = 5 * time.Second
	probeTimeout    = 60 * time.Second // a probe may wait behind real turns
	warmTimeout     = 30 * time.Second // the engine's /health answers within 20 s
)

// routes of an engine, in display order.
var routes = [...]block.Route{block.Chat, block.Completions, block.Generate}

// incarnation is one run of the engine. It never changes once adopted.
type incarnation struct {
	info      *sglang.ServerInfo
	identity  string // tells this process from the next
	epoch     string // wire.md §0
	startedMS int64
	model     string // the name it serves under
	paths     map[block.Route]kvc.DirectPath
}

// path is how this route executes a resident turn.
func (i *incarnation) path(r block.Route) kvc.DirectPath { return i.paths[r] }

// identityOf is what stays the same as long as the engine process lives.
func identityOf(s *sglang.ServerInfo) string {
	return s.Version + "|" + s.Model() + "|" + string(s.StartupTime)
}

// watch follows the engine until ctx ends: it adopts each new incarnation,
// corrects the ledger, and sends the heartbeat whatever the engine does.
func (s *Sidecar) watch(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Poll)
	defer tick.Stop()
	for {
		s.poll(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-s.suspected:
		}
	}
}

// poll is one look at the engine.
func (s *Sidecar) poll(ctx context.Context) {
	if s.book.current() == nil || s.doubtful() {
		if err := s.identify(ctx); err != nil {
			s.missed(err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	load, err := s.engine.Loads(sglang.WithConnWatch(ctx, s.doubt))
	if err != nil {
		s.missed(err)
	} else {
		s.misses = 0
		s.load.Store(load)
		s.correct(ctx, load)
		s.polls.Add(1)
	}
}

// doubt makes the next poll ask who the engine is.
func (s *Sidecar) doubt() { s.doubted.Store(true) }

// suspect also makes that poll happen now: the engine broke a connection.
func (s *Sidecar) suspect() {
	s.doubt()
	poke(s.suspected)
}

func (s *Sidecar) doubtful() bool {
	return s.doubted.Load() || s.cfg.Now().Sub(s.identified) > infoRecheck
}

func (s *Sidecar) missed(err error) {
	s.doubt()
	if errors.Is(err, syscall.ECONNREFUSED) {
		s.died = true // nobody listens: whoever answers next is another process
	} else if s.alive.Swap(false) {
		s.misses = 0 // busy, not dead: output still flows (R104)
		return
	}
	s.misses++
	if s.misses >= missedPolls || s.book.current() == nil {
		s.setReady(false, fmt.Sprintf("the engine at %s does not answer: %v", s.cfg.EngineURL, err))
		s.warmed.Store(false)
	}
}

// identify asks the engine who it is and adopts it when it is another.
func (s *Sidecar) identify(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, identifyTimeout)
	defer cancel()
	s.doubted.Store(false)
	info, err := s.engine.ServerInfo(ctx)
	if err != nil {
		s.doubt()
		return err
	}
	s.identified = s.cfg.Now()
	if err := s.check(info); err != nil {
		s.setReady(false, err.Error())
		return nil
	}
	if inc := s.book.current(); inc == nil || s.died || inc.identity != identityOf(info) {
		s.adopt(info)
	}
	s.died = false
	s.warmUp()
	return nil
}

// check refuses an engine that was started for something else than this
// sidecar was. The words name the engine's flag.
func (s *Sidecar) check(i *sglang.ServerInfo) error {
	mode := i.Mode
	if mode == "" {
		mode = "null"
	}
	if want := s.wantedMode(); want != "" && mode != want {
		return fmt.Errorf("the engine runs with --disaggregation-mode %s; start it with %s", mode, want)
	}
	if i.MaxTotalTokens <= 0 {
		return errors.New("the engine reports no max_total_num_tokens yet")
	}
	if s.cfg.Role == fleet.Prefill {
		return nil
	}
	const forgets = "the engine keeps no prefix between turns; "
	switch s.cfg.DirectPath {
	case kvc.DeltaTransfer, kvc.ConditionalAggregation:
		if !i.DecodeRadixCache {
			return errors.New(forgets + "start it with --disaggregation-decode-enable-radix-cache")
		}
	case kvc.Unified:
		if i.DisableRadixCache {
			return errors.New(forgets + "start it without --disable-radix-cache")
		}
	}
	return nil
}

// wantedMode is the engine's --disaggregation-mode; a patched engine may run any.
func (s *Sidecar) wantedMode() string {
	switch {
	case s.cfg.Role == fleet.Prefill:
		return "prefill"
	case s.cfg.DirectPath == kvc.Unified:
		return "null"
	case s.cfg.DirectPath == kvc.NativeAdmission:
		return ""
	}
	return "decode"
}

// adopt starts the incarnation's ledger: restored when the journal is of this
// very engine, empty otherwise (wire.md §0).
func (s *Sidecar) adopt(info *sglang.ServerInfo) {
	now := s.cfg.Now()
	started, known := info.Started()
	if !known {
		started = now
	}
	inc := &incarnation{
		info: info, identity: identityOf(info), model: info.Model(),
		startedMS: started.UnixMilli(), paths: s.plannedPaths(),
	}
	inc.epoch = s.cfg.Worker + "/" + strconv.FormatInt(inc.startedMS, 10)
	l := s.newLedger(info)
	first := s.book.current() == nil
	var back restored
	if first {
		back = s.restore(inc, l)
	}
	if first && !back.ok && (back.served || started.Before(s.started)) {
		// Another sidecar may have served this engine under the plain epoch.
		inc.epoch += "/" + strconv.FormatInt(s.started.UnixMilli(), 10)
		l = s.newLedger(info) // a restore that failed may have left something behind
	}
	s.warmed.Store(false)
	s.setReady(false, "the engine is warming up")
	s.book.adopt(inc, l, s.hello(inc, l), back.seq)
	s.cfg.Log.Info("engine adopted", "epoch", inc.epoch, "capacity_tokens", info.MaxTotalTokens, "restored", back.ok)
}

func (s *Sidecar) newLedger(info *sglang.ServerInfo) *kvc.Ledger {
	return kvc.NewLedger(kvc.LedgerConfig{
		CapacityTokens: info.MaxTotalTokens, PageSize: info.PageSize, MaxInputTokens: info.MaxInputTokens,
		Prefill: s.cfg.Role == fleet.Prefill, DirectPath: s.cfg.DirectPath,
		Params: s.params(), TokensPerBlock: block.IDs,
	})
}

// plannedPaths is the configured profile on every route, until a probe says less.
func (s *Sidecar) plannedPaths() map[block.Route]kvc.DirectPath {
	m := map[block.Route]kvc.DirectPath{}
	if s.cfg.Role == fleet.Decode {
		for _, r := range routes {
			m[r] = s.cfg.DirectPath
		}
	}
	return m
}
