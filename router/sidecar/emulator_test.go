package sidecar

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/emulator"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// emulate runs an emulated engine for one test and returns its address.
func emulate(t *testing.T, cfg emulator.Config) *emulator.Server {
	t.Helper()
	cfg.ModelPath, cfg.MaxTotalTokens, cfg.PageSize = "m", 200000, 16
	cfg.EnableCacheReport, cfg.EnableMetrics, cfg.TimeScale, cfg.Seed = true, true, 200, 1
	if cfg.Mode == emulator.ModePrefill {
		cfg.BootstrapPort = -1
	}
	s, err := emulator.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("emulator: %v", err)
		}
	})
	return s
}

// beside starts a sidecar for an emulated engine.
func beside(t *testing.T, s *emulator.Server, role fleet.Role, path kvc.DirectPath) *rig {
	t.Helper()
	r := startRig(t, &engine{t: t, srv: nil}, func(c *Config) {
		c.EngineURL, c.EngineKey, c.Role, c.DirectPath, c.TimeScale = "http://"+s.Addr(), "", role, path, 200
		c.AbortCap = time.Second
	})
	return r.ready()
}

func conversation(turns int) string {
	return strings.Replace(chat(turns, true), `"seed"`, `"max_tokens":8,"ignore_eos":true,"seed"`, 1)
}

// The three ways of a resident turn, over real rendezvous and real caches.
func TestProfilesAgainstTheEmulator(t *testing.T) {
	cases := map[kvc.DirectPath]struct {
		engine   emulator.Config
		resident string
		prefill  bool // resident turns need P, too
	}{
		kvc.ConditionalAggregation: {emulator.Config{Mode: emulator.ModeDecode, DecodeRadix: true, ConditionalAgg: true}, "direct", false},
		kvc.DeltaTransfer:          {emulator.Config{Mode: emulator.ModeDecode, DecodeRadix: true}, "delta", true},
		kvc.Unified:                {emulator.Config{Mode: emulator.ModeNull}, "direct", false},
	}
	for path, tc := range cases {
		t.Run(string(path), func(t *testing.T) {
			d := beside(t, emulate(t, tc.engine), fleet.Decode, path)
			var p *rig
			boot := &admission.Bootstrap{Host: "127.0.0.1", Port: 1, Room: 1}
			if path != kvc.Unified {
				pe := emulate(t, emulator.Config{Mode: emulator.ModePrefill})
				p = beside(t, pe, fleet.Prefill, "")
				boot.Port = pe.BootstrapPort()
			}
			var want []string
			for i := range 4 {
				boot.Room = int64(1000 + i)
				mode := tc.resident
				if i == 0 {
					mode = "seed"
				}
				want = append(want, mode)
				bothLegs(t, d, p, boot, i, mode)
			}
			s := d.quiet()
			if s.Sessions != 1 || s.Totals.GeneratedTokens != 32 || s.Used == 0 {
				t.Errorf("D after %v: %+v", want, s)
			}
			if path == kvc.ConditionalAggregation && s.Totals.PrefillUncachedTokens >= s.Totals.PromptTokens/2 {
				t.Errorf("direct turns prefilled %d of %d prompt tokens; the cache was not used",
					s.Totals.PrefillUncachedTokens, s.Totals.PromptTokens)
			}
			if got := d.metric("kvc_sidecar_ledger_clears_total"); got != 0 {
				t.Errorf("the ledger was cleared %v times without a flush", got)
			}
			if p != nil && p.quiet().Totals.PrefillUncachedTokens == 0 {
				t.Error("P prefilled nothing")
			}
		})
	}
}

// bothLegs runs one turn as a router would, both legs at once: D's headers come
// with its first token, long after P was called.
func bothLegs(t *testing.T, d, p *rig, boot *admission.Bootstrap, turn int, mode string) {
	t.Helper()
	in := ask(session, turn)
	in.Bootstrap = boot
	var legs sync.WaitGroup
	if p != nil && mode != "direct" {
		leg := in
		leg.Leg, leg.Admit = admission.LegPrefill, ""
		legs.Go(func() {
			if a := p.send(t.Context(), leg, chatPath, conversation(turn)); a.status != 200 || a.err != nil {
				t.Errorf("P leg of turn %d: %d %v %s", turn, a.status, a.err, a.body)
			}
		})
	}
	a := d.send(t.Context(), in, chatPath, conversation(turn))
	legs.Wait()
	if v := a.verdict(t); v.Mode != mode {
		t.Errorf("turn %d: %+v, want %s", turn, v, mode)
	}
	if a.status != 200 || a.err != nil || !strings.HasSuffix(a.body, doneEvent) || strings.Contains(a.body, `"error"`) ||
		strings.Contains(a.body, `"usage":{`) {
		t.Errorf("turn %d: %d %v %s", turn, a.status, a.err, a.body)
	}
	d.quiet()
}

// A stock decode engine does not prefill by itself: the probe finds out.
func TestProbeAgainstAStockEmulator(t *testing.T) {
	s := emulate(t, emulator.Config{Mode: emulator.ModeDecode, DecodeRadix: true})
	r := startRig(t, &engine{t: t}, func(c *Config) {
		c.EngineURL, c.EngineKey, c.TimeScale = "http://"+s.Addr(), "", 200
	})
	r.until("refused", func(s admission.SidecarStatus) bool {
		return !s.Ready && strings.Contains(s.Reason, "--disaggregation-decode-enable-conditional-agg")
	})
}

// Somebody flushes the engine's cache behind our back.
func TestFlushOfAnEmulatorIsNoticed(t *testing.T) {
	s := emulate(t, emulator.Config{Mode: emulator.ModeNull})
	r := beside(t, s, fleet.Decode, kvc.Unified)
	big := strings.Replace(conversation(1), "be kind", strings.Repeat("be kind ", 200), 1)
	r.send(t.Context(), ask(session, 0), chatPath, big)
	if st := r.quiet(); st.Used < evidenceTokens {
		t.Fatalf("used %d", st.Used)
	}
	flush := func() int {
		resp, err := r.hc.Post("http://"+s.Addr()+"/flush_cache", "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	deadline := time.Now().Add(patience)
	for flush() != 200 { // refused while anything runs
		if time.Now().After(deadline) {
			t.Fatal("the engine does not flush")
		}
		time.Sleep(5 * time.Millisecond)
	}
	r.until("cleared", func(s admission.SidecarStatus) bool { return s.Used == 0 && s.Sessions == 0 })
}

// A client that leaves during the hand-off: both engines live on, all is freed.
func TestCancelDuringHandOffAgainstTheEmulator(t *testing.T) {
	pe := emulate(t, emulator.Config{Mode: emulator.ModePrefill, Crash: true})
	de := emulate(t, emulator.Config{Mode: emulator.ModeDecode, DecodeRadix: true, ConditionalAgg: true, Crash: true})
	d := beside(t, de, fleet.Decode, kvc.ConditionalAggregation)
	p := beside(t, pe, fleet.Prefill, "")
	var wg sync.WaitGroup
	for i := range 12 {
		in := ask(kvc.SessionKey(attempts()[16:]), 0)
		in.Bootstrap = &admission.Bootstrap{Host: "127.0.0.1", Port: pe.BootstrapPort(), Room: int64(5000 + i)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*4*time.Millisecond)
		leg := in
		leg.Leg, leg.Admit = admission.LegPrefill, ""
		body := strings.Replace(conversation(0), "be kind", "be "+in.Attempt, 1)
		wg.Go(func() { defer cancel(); d.send(ctx, in, chatPath, body) })
		wg.Go(func() { p.send(ctx, leg, chatPath, body) })
	}
	wg.Wait()
	d.quiet()
	p.quiet()
	bothLegs(t, d, p, &admission.Bootstrap{Host: "127.0.0.1", Port: pe.BootstrapPort(), Room: 9999}, 0, "seed")
}
