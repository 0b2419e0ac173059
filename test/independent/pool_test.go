package independent

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
)

const poolManifest = `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: independent}
spec:
  model: {name: Qwen/Qwen3-32B, servedName: qwen3}
  engine: {type: Emulator, directPath: ConditionalAggregation}
  prefill: {replicas: 1}
  decode: {replicas: 2}
`

// programs builds kvc and its siblings and returns their directory.
func programs(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"build", "-o", dir + "/"}
	for _, p := range []string{"kvc", "router", "sidecar", "emulator"} {
		args = append(args, "github.com/kvc-dev/kvc/cmd/"+p)
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return dir
}

// up starts a pool with kvc up; data and admin are the router's base URLs.
func up(t *testing.T, bin string) (data, admin string) {
	t.Helper()
	manifest := filepath.Join(t.TempDir(), "pool.yaml")
	if err := os.WriteFile(manifest, []byte(poolManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	dataAddr, adminAddr := "127.0.0.1:"+freePort(t), "127.0.0.1:"+freePort(t)
	cmd := exec.Command(filepath.Join(bin, "kvc"), "up", "-f", manifest, "--listen", dataAddr,
		"--admin-listen", adminAddr, "--dir", t.TempDir(), "--time-scale", "20")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for s := bufio.NewScanner(out); s.Scan(); {
			if strings.Contains(s.Text(), "OpenAI URL") {
				close(ready)
			}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGINT)
		<-ended
		if err := cmd.Wait(); err != nil {
			t.Errorf("kvc up ended with %v after Ctrl-C", err)
		}
	})
	select {
	case <-ready:
	case <-ended:
		t.Fatal("kvc up ended before the pool was ready")
	case <-time.After(time.Minute):
		t.Fatal("the pool is not ready after a minute")
	}
	return "http://" + dataAddr, "http://" + adminAddr
}

// idle waits until the router has no turn in flight, for a client's last abort
// travels for a moment.
func idle(t *testing.T, admin string) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		busy, err := inflight(admin)
		if err == nil && busy == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d turns are in flight after every client left (%v)", busy, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func inflight(admin string) (int, error) {
	resp, err := http.Get(admin + "/kvc/v1/status")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d: %w", resp.StatusCode, err)
	}
	var s admission.RouterStatus
	if err := json.Unmarshal(body, &s); err != nil {
		return 0, err
	}
	n := 0
	for _, w := range s.Workers {
		n += w.InFlight
	}
	return n, nil
}

// The openai client is an application of a whole pool: every process is real,
// only the engines are emulated.
func TestOpenAIClientUsesAPool(t *testing.T) {
	py := python(t)
	data, admin := up(t, programs(t))
	out, err := exec.Command(py, "pool_client.py", data+"/v1", "qwen3").CombinedOutput()
	if err != nil {
		t.Errorf("openai client: %v\n%s", err, out)
	}
	idle(t, admin)
}
