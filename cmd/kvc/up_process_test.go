package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// upRun is one kvc up with real programs.
type upRun struct {
	t     *testing.T
	cmd   *exec.Cmd
	url   string // with /v1
	lines chan string
}

const upManifest = `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: up-test}
spec:
  model: {name: Qwen/Qwen3-32B, servedName: qwen3}
  engine: {type: Emulator}
  prefill: {replicas: 1}
  decode: {replicas: 2}
`

// startUp runs kvc up until it says that the pool is ready.
func startUp(t *testing.T, bin string) *upRun {
	t.Helper()
	manifest := filepath.Join(t.TempDir(), "pool.yaml")
	if err := os.WriteFile(manifest, []byte(upManifest), 0o600); err != nil {
		t.Fatal(err)
	}
	u := &upRun{t: t, lines: make(chan string, 1000)}
	u.cmd = exec.Command(filepath.Join(bin, "kvc"), "up", "-f", manifest, "--listen", "127.0.0.1:0",
		"--dir", t.TempDir(), "--time-scale", "100")
	u.cmd.Stderr = os.Stderr
	out, err := u.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := u.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.cmd.Process.Kill() })
	go func() {
		defer close(u.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			u.lines <- s.Text()
		}
	}()
	m := regexp.MustCompile(`OpenAI URL +(http://\S+)`).FindStringSubmatch(u.until("OpenAI URL"))
	if m == nil {
		t.Fatal("the URL is not said")
	}
	u.url = m[1]
	return u
}

// until waits for a line of output with some text.
func (u *upRun) until(text string) string {
	u.t.Helper()
	deadline := time.After(time.Minute)
	for {
		select {
		case line, ok := <-u.lines:
			if !ok {
				u.t.Fatalf("kvc up ended before it said %q", text)
			}
			if strings.Contains(line, text) {
				return line
			}
		case <-deadline:
			u.t.Fatalf("kvc up never said %q", text)
		}
	}
}

// mode serves one turn of a session and says what it ran as; "" when it failed.
func (u *upRun) mode(session string) string {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.t.Context(), 20*time.Second)
	defer cancel()
	body := fmt.Sprintf(`{"model":"Qwen/Qwen3-32B","max_tokens":8,"messages":[{"role":"user","content":%q}]}`,
		strings.Repeat("read the file and say what it does. ", 40))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.url+"/chat/completions", strings.NewReader(body))
	if err != nil {
		u.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Kvc-Session", session)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer res.Body.Close()
	if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
		return ""
	}
	return res.Header.Get("X-Kvc-Mode")
}

// eventuallyMode serves turns until one is answered, and says what it ran as.
func (u *upRun) eventuallyMode(session string) string {
	u.t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if m := u.mode(session); m != "" {
			return m
		}
	}
	u.t.Fatal("no turn is answered any more")
	return ""
}

// children lists the processes of kvc up that run a program.
func (u *upRun) children(program string) []int {
	u.t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		u.t.Fatal(err)
	}
	var pids []int
	for _, path := range stats {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has just ended
		}
		head, tail, _ := bytes.Cut(data, []byte(") "))
		pid, name, _ := strings.Cut(string(head), " (")
		fields := strings.Fields(string(tail))
		if len(fields) < 2 || fields[0] == "Z" || fields[1] != strconv.Itoa(u.cmd.Process.Pid) {
			continue
		}
		if n, err := strconv.Atoi(pid); err == nil && (program == "" || name == program) {
			pids = append(pids, n)
		}
	}
	return pids
}

// killAll ends a program by kill -9 and waits until others run in its place.
func (u *upRun) killAll(program string) {
	u.t.Helper()
	before := u.children(program)
	if len(before) == 0 {
		u.t.Fatalf("no %s to kill", program)
	}
	for _, pid := range before {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			u.t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		now := u.children(program)
		if len(now) == len(before) && !slices.ContainsFunc(now, func(pid int) bool { return slices.Contains(before, pid) }) {
			return
		}
		if time.Now().After(deadline) {
			u.t.Fatalf("%s: %v were killed, %v run", program, before, now)
		}
	}
}

// kvc up with real programs: it serves, a killed router or sidecar forgets no
// session, a killed engine is replaced, and Ctrl-C leaves nothing behind.
func TestUp(t *testing.T) {
	if testing.Short() || runtime.GOOS != "linux" {
		t.Skip("starts processes and finds them in /proc")
	}
	t.Setenv("KVC_TIME_SCALE", "")
	bin := programs(t)
	u := startUp(t, bin)

	if got := u.mode("s"); got != "seed" {
		t.Errorf("first turn ran as %q, want seed", got)
	}
	for _, program := range []string{"router", "sidecar"} {
		if got := u.eventuallyMode("s"); got != "direct" {
			t.Errorf("before %s is killed: %q, want direct", program, got)
		}
		u.killAll(program)
		if got := u.eventuallyMode("s"); got != "direct" {
			t.Errorf("after %s was killed: %q, want direct", program, got)
		}
	}
	u.killAll("emulator")
	if got := u.eventuallyMode("s"); got == "direct" {
		t.Error("after its engine was killed the session is still resident")
	}

	var out bytes.Buffer
	second := exec.Command(filepath.Join(bin, "kvc"), "up", "-f", "../../config/samples/pool_demo.yaml",
		"--listen", strings.TrimSuffix(strings.TrimPrefix(u.url, "http://"), "/v1"))
	second.Stdout, second.Stderr = &out, &out
	if err := second.Run(); err == nil || !strings.Contains(out.String(), "is in use by another program; stop") {
		t.Errorf("a second pool at the same address: %v, %s", err, out.String())
	}

	pids := u.children("")
	if err := u.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	u.until("stopping")
	for range u.lines { // to the end of its output, which Wait would cut off
	}
	if err := u.cmd.Wait(); err != nil {
		t.Errorf("Ctrl-C is the way to end it, yet: %v", err)
	}
	if len(pids) < 7 {
		t.Errorf("only %d processes ran", len(pids))
	}
	for _, pid := range pids {
		if syscall.Kill(pid, 0) == nil {
			t.Errorf("process %d is still there", pid)
		}
	}
}
