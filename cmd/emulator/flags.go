package main

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvc-dev/kvc/router/emulator"
)

// aliases are SGLang's other spellings of its flags (contract §1.3).
func aliases() map[string]string {
	return map[string]string{
		"model": "model-path", "tp": "tp-size", "tensor-parallel-size": "tp-size",
		"dp": "dp-size", "data-parallel-size": "dp-size", "pp": "pp-size", "pipeline-parallel-size": "pp-size",
		"nccl-init-addr": "dist-init-addr",
	}
}

// removed are flags that older SGLang releases had; a command line that still
// has them does not start a current engine.
func removed() []string {
	return []string{
		"disaggregation-decode-tp", "disaggregation-decode-dp", "disaggregation-prefill-pp",
	}
}

// parse reads an SGLang command line. getenv supplies the settings that SGLang
// takes from the environment.
func parse(args []string, getenv func(string) string, stderr io.Writer) (emulator.Config, error) {
	var c emulator.Config
	fs := pflag.NewFlagSet("emulator", pflag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.SortFlags = false
	fs.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if to, ok := aliases()[name]; ok {
			name = to
		}
		return pflag.NormalizedName(name)
	})
	var tier hostTier
	engineFlags(fs, &c, &tier)
	recorded := recordedFlags(fs)
	if err := ownFlags(fs, &c, getenv); err != nil {
		return c, err
	}
	if err := refuseRemoved(args); err != nil {
		return c, err
	}
	if err := fs.Parse(args); err != nil {
		return c, err
	}
	if fs.NArg() > 0 {
		return c, fmt.Errorf("%q is not a flag: every option starts with --", fs.Arg(0))
	}
	c.Extra = recorded(fs)
	tier.apply(&c)
	return c, environment(&c, getenv)
}

func refuseRemoved(args []string) error {
	for _, a := range args {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		if strings.HasPrefix(a, "--") && slices.Contains(removed(), name) {
			return fmt.Errorf("--%s no longer exists in SGLang: drop it, decode learns it from the prefill worker", name)
		}
	}
	return nil
}

// humanInt accepts SGLang's human-readable integers: 600k is 600,000, 600K is
// 614,400, 1.5m is 1,500,000.
type humanInt int

func (h *humanInt) String() string { return strconv.Itoa(int(*h)) }
func (h *humanInt) Type() string   { return "int" }

func (h *humanInt) Set(s string) error {
	units := map[byte]float64{'k': 1e3, 'm': 1e6, 'g': 1e9, 'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30}
	factor := 1.0
	digits := s
	if s != "" {
		if f, ok := units[s[len(s)-1]]; ok {
			factor, digits = f, s[:len(s)-1]
		}
	}
	v, err := strconv.ParseFloat(digits, 64)
	if err != nil {
		return fmt.Errorf("%q is not a number such as 4096, 600k or 1.5m", s)
	}
	*h = humanInt(v * factor)
	return nil
}

// hostTier is the hierarchical cache's flags.
type hostTier struct {
	on    bool
	size  int
	ratio float64
}

func (h *hostTier) apply(c *emulator.Config) {
	if h.on {
		c.HostCache = emulator.HostCache{GB: h.size, Ratio: h.ratio}
	}
}

// engineFlags are the flags that change what the emulator does.
func engineFlags(fs *pflag.FlagSet, c *emulator.Config, tier *hostTier) {
	fs.StringVar(&c.ModelPath, "model-path", "", "model to pretend to serve (required)")
	fs.StringVar(&c.ServedModelName, "served-model-name", "", "name in answers (default: the model path)")
	fs.StringVar(&c.Host, "host", "127.0.0.1", "address to listen on, the bootstrap server's too")
	fs.IntVar(&c.Port, "port", 30000, "port of the API, 0 = any free one")
	fs.IntVar(&c.TPSize, "tp-size", 1, "tensor parallel size, reported only")
	fs.StringVar((*string)(&c.Mode), "disaggregation-mode", "null", "null, prefill or decode")
	fs.StringVar(&c.TransferBackend, "disaggregation-transfer-backend", "mooncake",
		"mooncake, nixl, ascend, fake, mori or mooncake_tcp")
	fs.IntVar(&c.BootstrapPort, "disaggregation-bootstrap-port", 8998,
		"port of the rendezvous server (prefill), or of peers that name none (decode); negative = any free one")
	fs.BoolVar(&c.DecodeRadix, "disaggregation-decode-enable-radix-cache", false, "decode workers keep prefixes")
	fs.BoolVar(&c.ConditionalAgg, "disaggregation-decode-enable-conditional-agg", false,
		"decode workers accept do_local_prefill")
	fs.IntVar(&c.ReservedDecode, "num-reserved-decode-tokens", 512, "tokens kept free per sequence at preallocation")
	fs.IntVar(&c.PageSize, "page-size", 1, "tokens per KV page")
	fs.StringVar(&c.KVCacheDtype, "kv-cache-dtype", "auto", "must agree between prefill and decode")
	fs.Var((*humanInt)(&c.MaxTotalTokens), "max-total-tokens", "KV pool in tokens (default: the preset's)")
	fs.IntVar(&c.MaxRunning, "max-running-requests", 256, "largest batch")
	fs.Var((*humanInt)(&c.ContextLength), "context-length", "longest sequence (default 131072)")
	fs.IntVar(&c.ChunkedPrefillSize, "chunked-prefill-size", 8192, "tokens of prefill in one pass, -1 = all")
	fs.BoolVar(&c.DisableRadix, "disable-radix-cache", false, "keep no prefixes")
	fs.BoolVar(&tier.on, "enable-hierarchical-cache", false, "keep evicted KV in host memory")
	fs.IntVar(&tier.size, "hicache-size", 0, "GB (10^9) of it per rank, 0 = by the ratio")
	fs.Float64Var(&tier.ratio, "hicache-ratio", 2, "size of it in KV pools")
	fs.BoolVar(&c.EnableMetrics, "enable-metrics", false, "serve /metrics")
	fs.BoolVar(&c.EnableCacheReport, "enable-cache-report", false, "report cached tokens in usage")
	fs.StringVar(&c.APIKey, "api-key", "", "bearer token that clients must send")
	fs.IntVar(&c.StreamInterval, "stream-interval", 1, "tokens per streamed chunk")
	fs.BoolVar(&c.IncrementalStream, "incremental-streaming-output", false, "/generate streams deltas")
}

// ownFlags are the emulator's, not SGLang's.
func ownFlags(fs *pflag.FlagSet, c *emulator.Config, getenv func(string) string) error {
	scale := 1.0
	if v := getenv("KVC_TIME_SCALE"); v != "" {
		var err error
		if scale, err = strconv.ParseFloat(v, 64); err != nil {
			return fmt.Errorf("KVC_TIME_SCALE %q: it must be a number, 1 = real time", v)
		}
	}
	fs.StringVar(&c.GPU, "gpu", "h100", "cost preset: h100, h200, a100, b200, …")
	fs.Uint64Var(&c.Seed, "seed", 0, "of the generated text")
	fs.Float64Var(&c.TimeScale, "time-scale", scale, "emulated time per real time (default KVC_TIME_SCALE)")
	fs.Float64Var(&c.TransferSlowdown, "transfer-slowdown", 1, "divides the bandwidth of KV transfers: a sick link")
	fs.BoolVar(&c.Crash, "crash-like-sglang", false, "faults that kill a real scheduler kill this one (duplicate rooms)")
	fs.DurationVar(&c.StartupDelay, "startup-delay", 0, "emulated time before the engine is healthy")
	fs.DurationVar(&c.HealthDelay, "health-delay", time.Second, "least emulated time of a healthy /health")
	return nil
}

// recordedFlags are accepted because a real command line may have them; they
// only show in /server_info.
func recordedFlags(fs *pflag.FlagSet) func(*pflag.FlagSet) map[string]any {
	texts := []string{
		"tokenizer-path", "dtype", "quantization", "load-format", "revision", "device", "log-level",
		"mem-fraction-static", "dist-init-addr", "kv-events-config", "admin-api-key", "warmups",
		"disaggregation-ib-device", "disaggregation-retraction-backup", "disaggregation-decode-retraction-backup",
		"load-balance-method", "schedule-policy", "radix-eviction-policy", "attention-backend", "sampling-backend",
		"hicache-write-policy", "hicache-storage-backend", "hicache-mem-layout",
		"hicache-io-backend", "hicache-storage-prefetch-policy", "hicache-storage-backend-extra-config",
		"reasoning-parser", "tool-call-parser", "chat-template", "random-seed", "cuda-graph-max-bs", "cuda-graph-bs",
		"schedule-conservativeness", "watchdog-timeout", "download-dir",
		"max-queued-requests", "max-prefill-tokens", "optimistic-prefill-attempts",
		"dp-size", "pp-size", "nnodes", "node-rank",
		"disaggregation-decode-extra-slots", "disaggregation-decode-polling-interval",
		"decode-log-interval", "log-requests-level",
	}
	switches := []string{
		"trust-remote-code", "enable-dp-attention", "enable-pdmux", "skip-server-warmup",
		"enable-streaming-session", "enable-session-radix-cache", "enable-priority-scheduling",
		"disaggregation-decode-enable-offload-kvcache", "disable-cuda-graph", "disable-overlap-schedule",
		"enable-mixed-chunk", "enable-torch-compile", "enable-pd-role-switch", "log-requests", "skip-tokenizer-init",
		"enable-request-time-stats-logging", "enable-kv-cache-events", "enable-memory-saver", "enable-p2p-check",
		"trust-request-chat-template",
	}
	for _, name := range texts {
		fs.String(name, "", "accepted and reported, without effect")
	}
	for _, name := range switches {
		fs.Bool(name, false, "accepted and reported, without effect")
	}
	for _, name := range slices.Concat(texts, switches) {
		fs.Lookup(name).Hidden = true
	}
	return func(fs *pflag.FlagSet) map[string]any {
		extra := map[string]any{}
		for _, name := range slices.Concat(texts, switches) {
			if f := fs.Lookup(name); f.Changed && name != "admin-api-key" {
				extra[strings.ReplaceAll(name, "-", "_")] = typed(f.Value.String())
			}
		}
		return extra
	}
}

// typed gives numbers and switches their JSON type.
func typed(s string) any {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil {
		return n
	}
	if f, err := strconv.ParseFloat(s, 64); err == nil {
		return f
	}
	if s == "true" {
		return true
	}
	return s
}

// environment reads what SGLang takes from the environment (contract §1.4).
func environment(c *emulator.Config, getenv func(string) string) error {
	seconds := map[string]*time.Duration{
		"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT":  &c.BootstrapTimeout,
		"SGLANG_DISAGGREGATION_WAITING_TIMEOUT":    &c.WaitingTimeout,
		"SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": &c.HeartbeatInterval,
		"SGLANG_HEALTH_CHECK_TIMEOUT":              &c.HealthTimeout,
	}
	for name, to := range seconds {
		v := getenv(name)
		if v == "" {
			continue
		}
		f, err := strconv.ParseFloat(v, 64)
		if err != nil || f <= 0 {
			return fmt.Errorf("%s %q: it must be a positive number of seconds", name, v)
		}
		*to = time.Duration(f * float64(time.Second))
	}
	if v := getenv("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 {
			return fmt.Errorf("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE %q: it must be a positive integer", v)
		}
		c.HeartbeatMaxFailure = n
	}
	c.HeaderOverrides = getenv("SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES") == "1"
	c.HealthNoGeneration = getenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") == "0"
	return nil
}
