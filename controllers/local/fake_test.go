package local

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/fleet"
)

// TestMain lets this test binary stand in for the three programs: a link named
// "router" to it is a router. They only listen, answer probes and watch their
// files, which is all that a runner of processes can tell.
func TestMain(m *testing.M) {
	// A race-enabled program otherwise sleeps a second when it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE")); err != nil {
		panic(err)
	}
	switch filepath.Base(os.Args[0]) {
	case "parent":
		if err := fakeParent(os.Args[1], os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
	case "router", "sidecar", "emulator":
		if err := fakeProgram(filepath.Base(os.Args[0]), os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// flagOf returns the value that follows a flag.
func flagOf(args []string, name string) string {
	for i, a := range args {
		if a == name && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}

func fakeProgram(name string, args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Println(name, "starts", strings.Join(args, " "))
	if os.Getenv("FAKE_BROKEN") == name {
		return fmt.Errorf("error: unrecognized arguments: --no-such-flag")
	}
	mux := http.NewServeMux()
	addr := flagOf(args, "--listen")
	switch name {
	case "emulator":
		addr = net.JoinHostPort(flagOf(args, "--host"), flagOf(args, "--port"))
	case "sidecar":
		mux.HandleFunc("/readyz", fakeSidecarReady)
		mux.HandleFunc("/env", func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, os.Getenv(r.URL.Query().Get("name")))
		})
		mux.HandleFunc("/args", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, strings.Join(args, "\n")) })
	case "router":
		admin := &http.Server{Addr: flagOf(args, "--admin-listen"), Handler: fakeRouter(args), ReadHeaderTimeout: time.Second}
		defer admin.Close()
		go func() { _ = admin.ListenAndServe() }()
	}
	mux.HandleFunc("/", func(http.ResponseWriter, *http.Request) {})
	s := &http.Server{Addr: addr, Handler: mux, ReadHeaderTimeout: time.Second}
	failed := make(chan error, 1)
	go func() { failed <- s.ListenAndServe() }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	if os.Getenv("FAKE_STUBBORN") == name {
		select {} // ignores SIGTERM
	}
	return s.Close()
}

// fakeSidecarReady is ready once its engine answers.
func fakeSidecarReady(w http.ResponseWriter, r *http.Request) {
	if os.Getenv("FAKE_COLD") != "" {
		http.Error(w, `{"error":{"message":"the engine is cold"}}`, http.StatusServiceUnavailable)
		return
	}
	req, err := http.NewRequestWithContext(r.Context(), http.MethodGet, os.Getenv("KVC_ENGINE_URL"), nil)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	_ = res.Body.Close()
}

// fakeRouter refuses to be ready without a readable fleet file.
func fakeRouter(args []string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		path := flagOf(args, "--fleet")
		data, err := os.ReadFile(path)
		if err == nil {
			_, err = fleet.Parse(path, data)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	return mux
}

// fakeParent runs a pool until it is killed, after it has named its processes.
func fakeParent(bin, dir string) error {
	p, err := v1alpha1.ParsePool("pool.yaml", []byte("apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\n"+
		"metadata: {name: p}\nspec: {model: {name: m}, engine: {type: Emulator}}\n"))
	if err != nil {
		return err
	}
	c, err := Start(context.Background(), Options{Pool: p, BinDir: bin, Dir: dir})
	if err != nil {
		return err
	}
	if err := c.WaitReady(context.Background()); err != nil {
		return err
	}
	pids := []string{strconv.Itoa(c.RouterPID())}
	for _, w := range c.Workers() {
		pids = append(pids, strconv.Itoa(w.EnginePID), strconv.Itoa(w.SidecarPID))
	}
	fmt.Println(strings.Join(pids, " "))
	<-c.Done()
	return nil
}

// startParent runs fakeParent as a process of its own.
func startParent(t *testing.T, bin, dir string) (parent *exec.Cmd, pids []int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "parent")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	parent = exec.Command(link, bin, dir)
	parent.Stderr = os.Stderr
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the parent says nothing: %v", err)
	}
	for f := range strings.FieldsSeq(line) {
		pid, err := strconv.Atoi(f)
		if err != nil || pid == 0 || !alive(pid) {
			t.Fatalf("the parent says %q", line)
		}
		pids = append(pids, pid)
	}
	return parent, pids
}

func fixedGPUs(gpus ...string) func(context.Context) ([]string, error) {
	return func(context.Context) ([]string, error) { return gpus, nil }
}

// fakeBin makes a directory of programs.
func fakeBin(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, name := range []string{"router", "sidecar", "emulator"} {
		if err := os.Symlink(self, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
