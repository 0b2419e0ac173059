package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/controllers/build"
	"github.com/kvc-dev/kvc/router/emulator"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func env(pairs map[string]string) func(string) string {
	return func(name string) string { return pairs[name] }
}

func TestParse(t *testing.T) {
	cases := map[string]struct {
		args string
		env  map[string]string
		want func(*emulator.Config) any
		is   any
	}{
		"SGLang's spelling of the model":  {"--model-path a/b", nil, func(c *emulator.Config) any { return c.ModelPath }, "a/b"},
		"its short spelling":              {"--model a/b", nil, func(c *emulator.Config) any { return c.ModelPath }, "a/b"},
		"tensor parallelism, three ways":  {"--tp 4", nil, func(c *emulator.Config) any { return c.TPSize }, 4},
		"the long way":                    {"--tensor-parallel-size=8", nil, func(c *emulator.Config) any { return c.TPSize }, 8},
		"human numbers, decimal":          {"--max-total-tokens 600k", nil, func(c *emulator.Config) any { return c.MaxTotalTokens }, 600_000},
		"human numbers, binary":           {"--max-total-tokens 600K", nil, func(c *emulator.Config) any { return c.MaxTotalTokens }, 614_400},
		"human numbers, fractions":        {"--context-length 1.5m", nil, func(c *emulator.Config) any { return c.ContextLength }, 1_500_000},
		"plain numbers":                   {"--max-total-tokens 92104", nil, func(c *emulator.Config) any { return c.MaxTotalTokens }, 92_104},
		"the mode":                        {"--disaggregation-mode decode", nil, func(c *emulator.Config) any { return c.Mode }, emulator.ModeDecode},
		"conditional aggregation":         {"--disaggregation-decode-enable-conditional-agg", nil, func(c *emulator.Config) any { return c.ConditionalAgg }, true},
		"the time scale from the flag":    {"--time-scale 50", map[string]string{"KVC_TIME_SCALE": "5"}, func(c *emulator.Config) any { return c.TimeScale }, 50.0},
		"the time scale from outside":     {"", map[string]string{"KVC_TIME_SCALE": "5"}, func(c *emulator.Config) any { return c.TimeScale }, 5.0},
		"timeouts from SGLang's variable": {"", map[string]string{"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "1.5"}, func(c *emulator.Config) any { return c.WaitingTimeout }, 1500 * time.Millisecond},
		"heartbeat failures":              {"", map[string]string{"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "4"}, func(c *emulator.Config) any { return c.HeartbeatMaxFailure }, 4},
		"health without generation":       {"", map[string]string{"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}, func(c *emulator.Config) any { return c.HealthNoGeneration }, true},
		"flags without effect are kept": {"--mem-fraction-static 0.835 --hicache-io-backend kernel --decode-log-interval 64 --trust-remote-code", nil,
			func(c *emulator.Config) any { return c.Extra },
			map[string]any{"mem_fraction_static": 0.835, "hicache_io_backend": "kernel", "decode_log_interval": int64(64), "trust_remote_code": true}},
		"the host tier by size":           {"--enable-hierarchical-cache --hicache-size 64", nil, func(c *emulator.Config) any { return c.HostCache }, emulator.HostCache{GB: 64, Ratio: 2}},
		"its size alone turns nothing on": {"--hicache-size 64", nil, func(c *emulator.Config) any { return c.HostCache }, emulator.HostCache{}},
		"secrets are not":                 {"--admin-api-key hush", nil, func(c *emulator.Config) any { return c.Extra }, map[string]any{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c, err := parse(strings.Fields(tc.args), env(tc.env), io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.is, tc.want(&c)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseRefuses(t *testing.T) {
	cases := map[string]struct {
		args string
		env  map[string]string
		want string
	}{
		"a removed flag, by name":          {"--disaggregation-decode-tp 2", nil, "--disaggregation-decode-tp no longer exists"},
		"a removed flag with =":            {"--disaggregation-prefill-pp=2", nil, "--disaggregation-prefill-pp no longer exists"},
		"an unknown flag":                  {"--model m --warp-speed 9", nil, "warp-speed"},
		"a word that is no flag":           {"--model m decode", nil, `"decode"`},
		"a number that is none":            {"--max-total-tokens many", nil, "many"},
		"a time scale that is none":        {"", map[string]string{"KVC_TIME_SCALE": "fast"}, "KVC_TIME_SCALE"},
		"a timeout that is none":           {"", map[string]string{"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "-1"}, "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"},
		"a count of failures that is none": {"", map[string]string{"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "0"}, "MAX_FAILURE"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := parse(strings.Fields(tc.args), env(tc.env), io.Discard)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one that says %s", err, tc.want)
			}
		})
	}
}

func TestRunServesUntilItIsTold(t *testing.T) {
	r, w := io.Pipe()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, strings.Fields("--model m --port 0 --time-scale 100"), w)
		w.Close()
	}()
	buf := make([]byte, 4096)
	n, err := r.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, r)
	_, rest, ok := strings.Cut(string(buf[:n]), "address=")
	if !ok {
		t.Fatalf("no address in %q", buf[:n])
	}
	addr, _, _ := strings.Cut(rest, " ")
	resp, err := http.Get("http://" + addr + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()
	stop()
	if err := <-done; err != nil {
		t.Errorf("run = %v after a stop", err)
	}
}

func TestRunNamesWhatIsWrong(t *testing.T) {
	err := run(context.Background(), nil, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "--model-path") {
		t.Errorf("run without a model: %v", err)
	}
}

const manifest = `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: demo, namespace: local}
spec:
  model: {name: Qwen/Qwen3-32B, servedName: qwen3-32b}
  engine: {type: Emulator, directPath: %s}
  prefill: {replicas: %d}
  decode: {replicas: 3}
`

// What the operator renders for an emulator pod is a command line it accepts.
func TestTheRenderedCommandLineIsAccepted(t *testing.T) {
	for _, path := range []v1alpha1.DirectPath{
		v1alpha1.DirectPathConditionalAggregation, v1alpha1.DirectPathUnified, v1alpha1.DirectPathDeltaTransfer,
	} {
		prefill := 1
		if path == v1alpha1.DirectPathUnified {
			prefill = 0
		}
		pool, err := v1alpha1.ParsePool("pool.yaml", fmt.Appendf(nil, manifest, path, prefill))
		if err != nil {
			t.Fatal(err)
		}
		for _, role := range []v1alpha1.Role{v1alpha1.Prefill, v1alpha1.Decode} {
			args := build.EngineArgs(pool, role, build.Options{})
			if _, err := parse(args, env(nil), io.Discard); err != nil {
				t.Errorf("%s %s: %v\n%v", path, role, err, args)
			}
		}
	}
}
