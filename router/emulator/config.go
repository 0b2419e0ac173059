package emulator

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/router/sim"
)

// Version is the SGLang release the emulator speaks like.
const Version = "0.5.23"

// Config is an engine's command line (contract §1) and what the emulator adds.
// The zero value of every field means SGLang's default. Times are unscaled.
type Config struct {
	ModelPath       string // --model-path, required
	ServedModelName string // --served-model-name, default the model path
	Host            string // --host, default 127.0.0.1
	Port            int    // --port; 0 asks the system for a free one
	TPSize          int    // --tp-size, reported only: a preset is a whole worker

	Mode                Mode   // --disaggregation-mode
	TransferBackend     string // --disaggregation-transfer-backend, default mooncake
	BootstrapPort       int    // --disaggregation-bootstrap-port; 0 is 8998, below 0 a free one
	DecodeRadix         bool   // --disaggregation-decode-enable-radix-cache
	ConditionalAgg      bool   // --disaggregation-decode-enable-conditional-agg
	ReservedDecode      int    // --num-reserved-decode-tokens, default 512
	PageSize            int    // --page-size, default 1
	KVCacheDtype        string // --kv-cache-dtype, default auto
	MaxTotalTokens      int    // --max-total-tokens, default the preset's
	MaxRunning          int    // --max-running-requests, default 256
	ContextLength       int    // --context-length, default 131072
	ChunkedPrefillSize  int    // --chunked-prefill-size, default 8192, below 0 = off
	DisableRadix        bool   // --disable-radix-cache
	HostCache           HostCache
	EnableMetrics       bool   // --enable-metrics
	EnableCacheReport   bool   // --enable-cache-report
	APIKey              string // --api-key
	StreamInterval      int    // --stream-interval, default 1
	IncrementalStream   bool   // --incremental-streaming-output
	HealthNoGeneration  bool   // SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
	HeaderOverrides     bool   // SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1
	HealthTimeout       time.Duration
	RouteRetry          time.Duration // between attempts to find a prefill worker, default 1 s
	BootstrapTimeout    time.Duration // SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, default 300 s
	WaitingTimeout      time.Duration // SGLANG_DISAGGREGATION_WAITING_TIMEOUT, default 300 s
	HeartbeatInterval   time.Duration // SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, default 5 s
	HeartbeatMaxFailure int           // default 2

	// Extra is the rest of the command line, reported by /server_info.
	Extra map[string]any

	GPU       string  // preset of the cost model, default h100
	Seed      uint64  // of the generated text
	TimeScale float64 // emulated per real time, default 1
	// TransferSlowdown divides the fabric's bandwidth: a sick link. Default 1.
	TransferSlowdown float64
	// Crash lets the faults of contract §2.1 and §2.2 that kill a real
	// scheduler kill this one too; otherwise the request fails with 500.
	Crash bool
	// StartupDelay is how long (emulated) the engine reports Starting.
	StartupDelay time.Duration
	// HealthDelay is the least time (emulated) a healthy /health takes, default 1 s.
	HealthDelay time.Duration
}

// HostCache is --enable-hierarchical-cache: a tier in host memory that keeps a
// copy of all KV (write_through), so that evicted prefixes are loaded back
// instead of computed again. The zero value is none.
type HostCache struct {
	GB    int     // --hicache-size, 10^9 bytes per rank; wins over Ratio
	Ratio float64 // --hicache-ratio, in sizes of the KV pool
}

func (h HostCache) tokens(pool, ranks int, cost sim.Cost) int {
	if h.GB > 0 {
		return int(float64(h.GB) * 1e9 * float64(ranks) / cost.KVBytesPerToken)
	}
	return int(h.Ratio * float64(pool))
}

// routeAttempts is how often a decode worker asks for a prefill worker's route
// (contract §2.3 step 1).
const routeAttempts = 15

func or[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// complete fills in the defaults and refuses what an engine would refuse.
func (c *Config) complete() error {
	or(&c.ServedModelName, c.ModelPath)
	or(&c.Host, "127.0.0.1")
	or(&c.TPSize, 1)
	or(&c.Mode, ModeNull)
	or(&c.TransferBackend, "mooncake")
	or(&c.BootstrapPort, 8998)
	or(&c.ReservedDecode, 512)
	or(&c.PageSize, 1)
	or(&c.KVCacheDtype, "auto")
	or(&c.MaxRunning, 256)
	or(&c.ContextLength, 131072)
	or(&c.ChunkedPrefillSize, 8192)
	or(&c.StreamInterval, 1)
	or(&c.HealthTimeout, 20*time.Second)
	or(&c.RouteRetry, time.Second)
	or(&c.BootstrapTimeout, 300*time.Second)
	or(&c.WaitingTimeout, 300*time.Second)
	or(&c.HeartbeatInterval, 5*time.Second)
	or(&c.HeartbeatMaxFailure, 2)
	or(&c.GPU, "h100")
	or(&c.TimeScale, 1)
	or(&c.TransferSlowdown, 1)
	or(&c.HealthDelay, time.Second)
	return c.validate()
}

func (c *Config) validate() error {
	if err := c.validatePD(); err != nil {
		return err
	}
	switch {
	case c.ModelPath == "":
		return errors.New("--model-path is required")
	case c.PageSize < 1 || c.MaxTotalTokens < 0 || c.MaxRunning < 1 || c.ContextLength < 2:
		return errors.New("--page-size, --max-total-tokens, --max-running-requests and --context-length must be positive")
	case c.TransferSlowdown < 0:
		return fmt.Errorf("--transfer-slowdown %v: it must be positive", c.TransferSlowdown)
	case c.TimeScale < 0.01:
		return fmt.Errorf("--time-scale %v: it must be at least 0.01", c.TimeScale)
	}
	if _, ok := sim.PresetOf(c.GPU); !ok {
		return fmt.Errorf("--gpu %q: choose one of %s", c.GPU, strings.Join(sim.PresetNames(), ", "))
	}
	return nil
}

// validatePD checks the disaggregation flags.
func (c *Config) validatePD() error {
	switch {
	case !slices.Contains([]Mode{ModeNull, ModePrefill, ModeDecode}, c.Mode):
		return fmt.Errorf("--disaggregation-mode %q: choose null, prefill or decode", c.Mode)
	case !slices.Contains(backends(), c.TransferBackend):
		return fmt.Errorf("--disaggregation-transfer-backend %q: choose one of %s",
			c.TransferBackend, strings.Join(backends(), ", "))
	case c.TransferBackend == "fake" && c.Mode == ModePrefill:
		return errors.New("--disaggregation-transfer-backend fake: a prefill worker cannot use it; choose mooncake")
	case c.DecodeRadix && c.Mode == ModeDecode && c.TransferBackend == "fake":
		return errors.New("--disaggregation-decode-enable-radix-cache: not with the fake transfer backend")
	}
	return nil
}

func backends() []string {
	return []string{"mooncake", "nixl", "ascend", "fake", "mori", "mooncake_tcp"}
}

// real converts emulated time to real time.
func (c *Config) real(emulated time.Duration) time.Duration {
	return time.Duration(float64(emulated) / c.TimeScale)
}

// core is the scheduler's share of the configuration. Decode workers keep no
// prefix unless told so (contract §1.2).
func (c *Config) core() coreConfig {
	preset, _ := sim.PresetOf(c.GPU)
	capacity := c.MaxTotalTokens
	or(&capacity, preset.CapacityTokens)
	link := sim.LinkOf(c.TransferBackend)
	link.BytesPerSecond /= c.TransferSlowdown
	return coreConfig{
		mode:       c.Mode,
		cost:       preset.Cost,
		link:       link,
		capacity:   capacity,
		pageSize:   c.PageSize,
		host:       c.HostCache.tokens(capacity, c.TPSize, preset.Cost),
		noRadix:    c.DisableRadix || c.Mode == ModeDecode && !c.DecodeRadix,
		chunk:      c.ChunkedPrefillSize,
		maxRunning: c.MaxRunning,
		reserved:   c.ReservedDecode,
		contextLen: c.ContextLength,
		localOK:    c.Mode == ModeDecode && c.ConditionalAgg,
		seed:       c.Seed,
	}
}
