package local

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

func TestPortsAreHandedOutOnce(t *testing.T) {
	pool := newPortPool()
	seen := map[int32]bool{}
	for range 20 {
		ports, err := pool.take(t.Context(), 5)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range ports {
			if seen[p] || p < firstPort || p > lastPort {
				t.Fatalf("port %d: taken twice or out of range", p)
			}
			seen[p] = true
		}
	}
}

func TestPortsInUseArePassedOver(t *testing.T) {
	pool := newPortPool()
	l, err := net.Listen("tcp", net.JoinHostPort(loopback, itoa(pool.next)))
	if err != nil {
		t.Skip("somebody else has the port: ", err)
	}
	defer l.Close()
	taken := pool.next
	ports, err := pool.take(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	if ports[0] == taken {
		t.Errorf("port %d is in use and was handed out", taken)
	}
}

func TestPortsComeBackAfterTheLastOne(t *testing.T) {
	pool := newPortPool()
	pool.next = lastPort
	ports, err := pool.take(t.Context(), 2)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Max(ports) > lastPort {
		t.Errorf("ports %v, want them to wrap to %d", ports, firstPort)
	}
	pool.give(ports)
	if len(pool.used) != 0 {
		t.Errorf("still in use: %v", pool.used)
	}
}

func TestDialable(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1:1": "127.0.0.1:1", "0.0.0.0:1": "127.0.0.1:1", ":1": "127.0.0.1:1", "[::]:1": "127.0.0.1:1",
		"[::1]:1": "[::1]:1", "localhost:1": "localhost:1", "odd": "odd",
	} {
		if got := dialable(in); got != want {
			t.Errorf("dialable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseGPUs(t *testing.T) {
	const table = "0, GPU-aaaa\n1, GPU-bbbb\n\n2, GPU-cccc\n"
	cases := map[string]struct {
		visible string
		limited bool
		want    string
	}{
		"all of them":         {"", false, "0 1 2"},
		"those allowed":       {"0,2", true, "0 2"},
		"those allowed by id": {"GPU-bbbb", true, "1"},
		"none allowed":        {"", true, ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := strings.Join(parseGPUs([]byte(table), tc.visible, tc.limited), " "); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
	if got := parseGPUs([]byte("No devices were found\n"), "", false); len(got) != 0 {
		t.Errorf("GPUs out of nothing: %q", got)
	}
}

func TestEveryReplicaGetsItsOwnGPUs(t *testing.T) {
	p := pool(t, 1, 2)
	p.Spec.Engine.Type = v1alpha1.EngineSGLang
	*p.Spec.Prefill.TensorParallelSize = 2
	plan, err := planGPUs(t.Context(), p, fixedGPUs("0", "1", "5", "6", "7"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range newReplicas(plan.pool, plan) {
		got = append(got, r.name+"="+strings.Join(r.gpus, ","))
	}
	if want := "prefill-0=0,1 decode-0=5 decode-1=6"; strings.Join(got, " ") != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if plan.notice != "" {
		t.Errorf("notice = %q", plan.notice)
	}
}

func TestEmulatorAsksForNoGPU(t *testing.T) {
	plan, err := planGPUs(t.Context(), pool(t, 1, 1), nil) // would panic when asked
	if err != nil || len(plan.gpus) != 0 || plan.notice != "" {
		t.Errorf("plan = %+v, %v", plan, err)
	}
}

func TestBackoffDoublesAndStartsOver(t *testing.T) {
	b := backoff{base: time.Second}
	for i, step := range []struct{ ran, want time.Duration }{
		{0, time.Second}, {0, 2 * time.Second}, {0, 4 * time.Second}, {0, 8 * time.Second}, {0, maxBackoff}, {0, maxBackoff},
		{healthyAfter, time.Second}, {0, 2 * time.Second},
	} {
		if got := b.next(step.ran); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}

func TestTailPrefersThePanic(t *testing.T) {
	long := strings.Repeat("x", 100) + "\n"
	cases := map[string]struct{ log, want string }{
		"the last lines":                {"a\nb\nc\nd\n", "b | c | d"},
		"fewer lines than wanted":       {"only\n", "only"},
		"nothing":                       {"", ""},
		"a panic before its goroutines": {"start\npanic: boom\n\ngoroutine 1 [running]:\nmain.main()\n\t/x.go:1\nexit", "panic: boom"},
		"a fatal error likewise":        {"fatal error: all goroutines are asleep\n" + strings.Repeat(long, 40), "fatal error: all goroutines are asleep"},
		"a long log":                    {strings.Repeat(long, 1000) + "end\n", strings.Repeat(strings.TrimSpace(long)+" | ", 2) + "end"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "log")
			if err := os.WriteFile(path, []byte(tc.log), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := tail(path, 0); got != tc.want {
				t.Errorf("tail = %q, want %q", got, tc.want)
			}
		})
	}
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("earlier run\nthis run\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := tail(path, int64(len("earlier run\n"))); got != "this run" {
		t.Errorf("tail of the second run = %q", got)
	}
	if got := tail(filepath.Join(t.TempDir(), "absent"), 0); got != "" {
		t.Errorf("tail of no file = %q", got)
	}
}

func TestTokenOfAnEarlierRunIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	first, err := ensureToken(path)
	if err != nil {
		t.Fatal(err)
	}
	second, err := ensureToken(path)
	if err != nil || second != first {
		t.Errorf("second = %v, same = %v", err, second == first)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ensureToken(path); err == nil || !strings.Contains(err.Error(), "is empty; remove it") {
		t.Errorf("empty token file: %v", err)
	}
}

func TestKilledParentLeavesNothingBehind(t *testing.T) {
	dir, bin := t.TempDir(), fakeBin(t)
	parent, pids := startParent(t, bin, dir)
	kill(t, parent.Process.Pid)
	_ = parent.Wait()
	deadline := time.Now().Add(patience)
	for _, pid := range pids {
		for alive(pid) {
			if time.Now().After(deadline) {
				t.Fatalf("process %d outlives its killed parent", pid)
			}
			time.Sleep(5 * time.Millisecond) // orphans are nobody's to wait for
		}
	}
	// The lock went with the parent: the directory can be used again.
	f, err := lockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
}

func TestWorkersTellWhereTheirLogsAre(t *testing.T) {
	c := start(t, nil)
	for _, w := range c.Workers() {
		for _, path := range []string{w.EngineLog, w.SidecarLog} {
			if _, err := os.Stat(path); err != nil {
				t.Error(err)
			}
		}
		if _, err := strconv.Atoi(w.SidecarURL[strings.LastIndex(w.SidecarURL, ":")+1:]); err != nil {
			t.Errorf("%s: %s has no port", w.Name, w.SidecarURL)
		}
	}
}

func TestComplaint(t *testing.T) {
	for body, want := range map[string]string{
		`{"error":{"message":"the engine is warming up","code":503}}`: "the engine is warming up",
		"not ready\nbecause\n": "not ready",
		`{"error":{}}`:         `{"error":{}}`,
		`{"error":"x"}`:        `{"error":"x"}`,
		"":                     "",
	} {
		if got := complaint([]byte(body)); got != want {
			t.Errorf("complaint(%q) = %q, want %q", body, got, want)
		}
	}
}

func TestWaitReadySaysWhatItWaitedFor(t *testing.T) {
	t.Setenv("FAKE_COLD", "1")
	c, err := Start(t.Context(), Options{Pool: pool(t, 1, 1), BinDir: fakeBin(t), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	eventually(t, c, "a sidecar says why", func() bool { return worker(t, c, "prefill-0").Waiting != "" })
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err = c.WaitReady(ctx)
	if err == nil || !strings.Contains(err.Error(), "wait for prefill-0 (the engine is cold): ") || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error = %v", err)
	}
}
