package local

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/fleet"
)

const patience = 20 * time.Second

// pool returns a pool on the emulator with so many workers.
func pool(t *testing.T, prefill, decode int) *v1alpha1.KVCPool {
	t.Helper()
	p, err := v1alpha1.ParsePool("pool.yaml", fmt.Appendf(nil, `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: demo}
spec:
  model: {name: Qwen/Qwen3-32B, servedName: qwen3}
  engine: {type: Emulator}
  prefill: {replicas: %d}
  decode: {replicas: %d}
`, prefill, decode))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// start runs a pool and waits until it is ready.
func start(t *testing.T, change func(*Options)) *Cluster {
	t.Helper()
	o := Options{
		Pool: pool(t, 1, 2), BinDir: fakeBin(t), Dir: t.TempDir(),
		Grace: 2 * time.Second, backoff: 10 * time.Millisecond,
	}
	if change != nil {
		change(&o)
	}
	c, err := Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// eventually waits for a change of the cluster after which ok holds.
func eventually(t *testing.T, c *Cluster, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for {
		changed := c.Changed()
		if ok() {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("never happened: %s; workers %+v", what, c.Workers())
		}
	}
}

func worker(t *testing.T, c *Cluster, name string) Worker {
	t.Helper()
	for _, w := range c.Workers() {
		if w.Name == name {
			return w
		}
	}
	t.Fatalf("no worker %s", name)
	return Worker{}
}

func readFleet(t *testing.T, c *Cluster) *fleet.File {
	t.Helper()
	data, err := os.ReadFile(c.FleetPath())
	if err != nil {
		t.Fatal(err)
	}
	f, err := fleet.Parse("fleet.yaml", data)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func fleetID(t *testing.T, c *Cluster, name string) string {
	t.Helper()
	for _, w := range readFleet(t, c).Workers {
		if w.Name == name {
			return string(w.ID)
		}
	}
	return ""
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if pid == 0 {
		t.Fatal("nothing to kill")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// alive is false for a process that is gone, or dead and only not yet reaped.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) || runtime.GOOS != "linux"
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(rest, "Z")
}

func get(t *testing.T, url string) string {
	t.Helper()
	res, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestFleetFileListsEveryReadyWorker(t *testing.T) {
	c := start(t, nil)
	f := readFleet(t, c)
	want := fleet.Pool{Namespace: "local", Name: "demo", Model: "qwen3", Aliases: []string{"Qwen/Qwen3-32B"}}
	if diff := cmp.Diff(want, f.Pool); diff != "" {
		t.Errorf("pool (-want +got):\n%s", diff)
	}
	var names []string
	for _, w := range f.Workers {
		names = append(names, w.Name)
		if (w.Role == fleet.Prefill) != (w.Bootstrap != nil) {
			t.Errorf("%s: bootstrap = %v for role %s", w.Name, w.Bootstrap, w.Role)
		}
		if res := get(t, w.URL+"/env?name=KVC_WORKER"); res != string(w.ID) {
			t.Errorf("%s: sidecar's KVC_WORKER = %q, want the fleet's id %q", w.Name, res, w.ID)
		}
	}
	if got := strings.Join(names, " "); got != "decode-0 decode-1 prefill-0" {
		t.Errorf("workers = %s", got)
	}
}

func TestSidecarFindsItsFilesAndEngine(t *testing.T) {
	c := start(t, func(o *Options) { o.TimeScale = 4 })
	w := worker(t, c, "decode-0")
	for name, want := range map[string]string{
		"KVC_ROLE": "decode", "KVC_POD": "decode-0", "KVC_POOL": "demo", "KVC_NAMESPACE": "local",
		"KVC_DIRECT_PATH": "ConditionalAggregation", "KVC_TIME_SCALE": "4",
	} {
		if got := get(t, w.SidecarURL+"/env?name="+name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
	if got := get(t, w.SidecarURL+"/env?name=KVC_PRESTOP_NONCE"); len(got) != 32 {
		t.Errorf("nonce = %q, want 32 digits", got)
	}
	args := strings.Split(get(t, w.SidecarURL+"/args"), "\n")
	if got := flagOf(args, "--token-file"); got != c.TokenPath() {
		t.Errorf("--token-file %s, want %s", got, c.TokenPath())
	}
	if got := flagOf(args, "--routing-file"); got != c.RoutingPath() {
		t.Errorf("--routing-file %s, want %s", got, c.RoutingPath())
	}
	if info, err := os.Stat(flagOf(args, "--journal-dir")); err != nil || !info.IsDir() {
		t.Errorf("--journal-dir %s: %v", flagOf(args, "--journal-dir"), err)
	}
}

func TestTokenIsSecretAndRandom(t *testing.T) {
	c := start(t, nil)
	info, err := os.Stat(c.TokenPath())
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode = %v, want 0600", info.Mode().Perm())
	}
	data, err := os.ReadFile(c.TokenPath())
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(data)); got != c.Token() || len(got) != 64 {
		t.Errorf("token file holds %d characters, want the 64 of Token", len(got))
	}
	routing, err := os.ReadFile(c.RoutingPath())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v1alpha1.ParseRoutingFile(routing); err != nil {
		t.Errorf("routing file: %v", err)
	}
}

func TestKilledEngineIsANewIncarnation(t *testing.T) {
	c := start(t, nil)
	before := worker(t, c, "decode-1")
	kill(t, before.EnginePID)
	eventually(t, c, "decode-1 leaves the fleet or comes back new", func() bool {
		w := worker(t, c, "decode-1")
		return w.Ready && w.ID != before.ID && fleetID(t, c, "decode-1") == w.ID
	})
	after := worker(t, c, "decode-1")
	if after.Pods != 2 || after.EnginePID == before.EnginePID {
		t.Errorf("after = %+v, want the second pod with another engine", after)
	}
	if got := fleetID(t, c, "decode-0"); got != worker(t, c, "decode-0").ID {
		t.Errorf("decode-0 changed too: %s", got)
	}
}

func TestKilledSidecarKeepsItsIncarnation(t *testing.T) {
	c := start(t, nil)
	before := worker(t, c, "decode-0")
	kill(t, before.SidecarPID)
	eventually(t, c, "the sidecar restarts", func() bool {
		w := worker(t, c, "decode-0")
		return w.Restarts == 1 && w.SidecarPID != 0 && w.SidecarPID != before.SidecarPID
	})
	after := worker(t, c, "decode-0")
	if after.ID != before.ID || after.SidecarURL != before.SidecarURL || after.EnginePID != before.EnginePID {
		t.Errorf("after = %+v, want the same id, url and engine as %+v", after, before)
	}
	if got := fleetID(t, c, "decode-0"); got != before.ID {
		t.Errorf("fleet id = %s, want %s", got, before.ID)
	}
}

func TestKilledRouterComesBackAtItsAddress(t *testing.T) {
	c := start(t, nil)
	before := c.RouterPID()
	kill(t, before)
	eventually(t, c, "the router restarts", func() bool { pid := c.RouterPID(); return pid != 0 && pid != before })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	get(t, c.URL()+"/")
}

func TestStopLeavesNoProcess(t *testing.T) {
	cases := map[string]string{
		"obedient programs":                          "",
		"a program that ignores SIGTERM is killed":   "emulator",
		"a stubborn router does not stop the others": "router",
	}
	for name, stubborn := range cases {
		t.Run(name, func(t *testing.T) {
			t.Setenv("FAKE_STUBBORN", stubborn)
			c := start(t, func(o *Options) {
				if stubborn != "" {
					o.Grace = 50 * time.Millisecond
				}
			})
			pids := []int{c.RouterPID()}
			for _, w := range c.Workers() {
				pids = append(pids, w.EnginePID, w.SidecarPID)
			}
			c.Stop()
			for _, pid := range pids {
				if pid == 0 || alive(pid) {
					t.Errorf("process %d is still there", pid)
				}
			}
			c.Stop() // twice is once
		})
	}
}

func TestEndOfContextStopsThePool(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	c, err := Start(ctx, Options{Pool: pool(t, 1, 1), BinDir: fakeBin(t), Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-c.Done():
	case <-time.After(patience):
		t.Fatal("the pool outlives its context")
	}
}

func TestWaitReadyGivesUpOnAProgramThatKeepsEnding(t *testing.T) {
	for _, name := range []string{"emulator", "sidecar", "router"} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("FAKE_BROKEN", name)
			c, err := Start(t.Context(), Options{
				Pool: pool(t, 1, 1), BinDir: fakeBin(t), Dir: t.TempDir(), backoff: time.Millisecond,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Stop()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err = c.WaitReady(ctx)
			if err == nil {
				t.Fatal("ready")
			}
			for _, want := range []string{"does not start", "unrecognized arguments: --no-such-flag", "exit status 3", ".log"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error lacks %q: %v", want, err)
				}
			}
		})
	}
}

func TestStartRefusesWithOneSentence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cases := map[string]struct {
		change func(*testing.T, *Options)
		want   string
	}{
		"a port in use": {
			func(_ *testing.T, o *Options) { o.Listen = l.Addr().String() }, "--listen: " + l.Addr().String() + " is in use"},
		"an address without a port": {
			func(_ *testing.T, o *Options) { o.Listen = "localhost" },
			`--listen "localhost" is not an address; write host:port`},
		"a port that is no number": {
			func(_ *testing.T, o *Options) { o.AdminListen = "127.0.0.1:http" },
			"--admin-listen \"127.0.0.1:http\" has no valid port"},
		"a missing program": {
			func(t *testing.T, o *Options) { o.BinDir = t.TempDir() },
			"has no program \"router\"; build them all with `make build`"},
		"a time scale of nothing": {
			func(_ *testing.T, o *Options) { o.TimeScale = -1 }, "time scale -1 is not a number of 0.01 or more"},
		"too few GPUs": {
			func(_ *testing.T, o *Options) {
				o.Pool = o.Pool.DeepCopy()
				o.Pool.Spec.Engine.Type = v1alpha1.EngineSGLang
				o.gpus = func(context.Context) ([]string, error) { return []string{"0"}, nil }
			}, "the pool needs 2 GPUs (replicas × tensorParallelSize of both roles) and this machine offers 1; lower"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			o := Options{Pool: pool(t, 1, 1), BinDir: fakeBin(t), Dir: t.TempDir()}
			tc.change(t, &o)
			c, err := Start(t.Context(), o)
			if err == nil {
				c.Stop()
				t.Fatal("started")
			}
			if !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error = %q, want one sentence with %q", err, tc.want)
			}
		})
	}
}

func TestOneRunPerDirectory(t *testing.T) {
	c := start(t, nil)
	_, err := Start(t.Context(), Options{Pool: pool(t, 1, 1), BinDir: fakeBin(t), Dir: c.Dir()})
	if err == nil || !strings.Contains(err.Error(), "is in use by another run of kvc") {
		t.Errorf("second run in %s: %v", c.Dir(), err)
	}
}

func TestNoGPUMeansTheEmulatorAndANotice(t *testing.T) {
	c := start(t, func(o *Options) {
		o.Pool = o.Pool.DeepCopy()
		o.Pool.Spec.Engine.Type = v1alpha1.EngineSGLang
		o.gpus = func(context.Context) ([]string, error) { return nil, nil }
	})
	if n := c.Notices(); len(n) != 1 || !strings.Contains(n[0], "running the emulator instead of SGLang") {
		t.Errorf("notices = %q", n)
	}
	if got := c.Pool().Spec.Engine.Type; got != v1alpha1.EngineEmulator {
		t.Errorf("engine.type = %s", got)
	}
}

func TestAStateWrittenByHandSurvivesAChangeOfTheFleet(t *testing.T) {
	c := start(t, nil)
	f := readFleet(t, c)
	for i := range f.Workers {
		if f.Workers[i].Name == "decode-0" {
			f.Workers[i].State = fleet.Draining
		}
	}
	if err := fleet.Write(c.FleetPath(), f); err != nil {
		t.Fatal(err)
	}
	before := worker(t, c, "decode-1")
	kill(t, before.EnginePID)
	eventually(t, c, "decode-1 is replaced", func() bool {
		id := fleetID(t, c, "decode-1")
		return id != "" && id != before.ID
	})
	for _, w := range readFleet(t, c).Workers {
		if want := map[bool]fleet.State{true: fleet.Draining, false: fleet.Active}[w.Name == "decode-0"]; w.State != want {
			t.Errorf("%s is %s, want %s", w.Name, w.State, want)
		}
	}
}

func TestEveryProcessHasItsLog(t *testing.T) {
	c := start(t, nil)
	for _, name := range []string{"router", "decode-0.engine", "decode-0.sidecar", "prefill-0.engine"} {
		data, err := os.ReadFile(filepath.Join(c.Dir(), "logs", name+".log"))
		if err != nil || !strings.Contains(string(data), "starts") {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}
