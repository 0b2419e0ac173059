package independent

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/emulator"
)

// python returns an interpreter that has the clients, or skips.
func python(t *testing.T) string {
	t.Helper()
	if os.Getenv("KVC_INDEPENDENT") != "1" {
		t.Skip("independent clients are not run: set KVC_INDEPENDENT=1 or run hack/independent.sh (needs Python and PyPI)")
	}
	out, err := exec.Command("../../hack/independent.sh", "--setup").Output()
	if err != nil {
		t.Skipf("independent clients are not run, they cannot be installed here: %v", stderrOf(err))
	}
	return strings.TrimSpace(string(out))
}

func stderrOf(err error) string {
	if exit, ok := err.(*exec.ExitError); ok { //nolint:errorlint // straight from exec
		return string(exit.Stderr)
	}
	return err.Error()
}

// engine starts an emulator at 20 times real speed.
func engine(t *testing.T, cfg emulator.Config) *emulator.Server {
	t.Helper()
	cfg.ModelPath, cfg.ServedModelName = "emulated/model", "m"
	cfg.TimeScale, cfg.Seed, cfg.PageSize, cfg.EnableCacheReport = 20, 1, 16, true
	s, err := emulator.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the %s engine ended with %v", cfg.Mode, err)
		}
	})
	return s
}

func pair(t *testing.T) (p, d *emulator.Server) {
	t.Helper()
	p = engine(t, emulator.Config{Mode: emulator.ModePrefill, BootstrapPort: -1})
	d = engine(t, emulator.Config{Mode: emulator.ModeDecode, DecodeRadix: true})
	return p, d
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
}

// router starts one of SGLang's own in front of a pair and returns its URL.
func router(t *testing.T, py string, p, d *emulator.Server, extra ...string) string {
	t.Helper()
	port := freePort(t)
	args := []string{
		"-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1", "--port", port,
		"--log-level", "warn", "--prefill", "http://" + p.Addr(), strconv.Itoa(p.BootstrapPort()), "--decode", "http://" + d.Addr(),
	}
	cmd := exec.Command(py, append(args, extra...)...)
	log := filepath.Join(t.TempDir(), "router.log")
	f, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its own process group
		_ = cmd.Wait()
		f.Close()
		if t.Failed() {
			b, _ := os.ReadFile(log)
			t.Logf("the router's last words:\n%s", b[max(0, len(b)-4000):])
		}
	})
	url := "http://127.0.0.1:" + port
	deadline := time.Now().Add(60 * time.Second)
	for {
		resp, err := http.Get(url + "/health")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return url
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the router is not healthy after 60 s: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

type answer struct {
	status int
	kind   string
	body   []byte
}

func post(t *testing.T, url, body string) answer {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("read the answer: %v", err)
	}
	return answer{resp.StatusCode, resp.Header.Get("Content-Type"), b}
}

// events returns the data of a stream, which must end with [DONE].
func (a answer) events(t *testing.T) []map[string]any {
	t.Helper()
	var out []map[string]any
	lines := bytes.Split(bytes.TrimSpace(a.body), []byte("\n\n"))
	if string(lines[len(lines)-1]) != "data: [DONE]" {
		t.Fatalf("the stream does not end with [DONE]:\n%s", a.body)
	}
	for _, l := range lines[:len(lines)-1] {
		var v map[string]any
		if err := json.Unmarshal(bytes.TrimPrefix(l, []byte("data: ")), &v); err != nil {
			t.Fatalf("event %q: %v", l, err)
		}
		out = append(out, v)
	}
	return out
}

const chatBody = `{"model":"m","messages":[{"role":"user","content":"tell me a long story about the sea and all that lives in it, from the start to the end"}],"max_tokens":12,"ignore_eos":true%s}`

// surfaces sends what both of SGLang's routers carry.
func surfaces(t *testing.T, url string) {
	t.Helper()
	a := post(t, url+"/v1/chat/completions", fmt.Sprintf(chatBody, ""))
	if a.status != http.StatusOK || !bytes.Contains(a.body, []byte(`"completion_tokens":12`)) {
		t.Errorf("chat: %d %s", a.status, a.body)
	}
	a = post(t, url+"/v1/chat/completions", fmt.Sprintf(chatBody, `,"stream":true,"stream_options":{"include_usage":true}`))
	e := a.events(t)
	usage, _ := e[len(e)-1]["usage"].(map[string]any)
	if usage["completion_tokens"] != 12.0 {
		t.Errorf("chat stream: usage %v", usage)
	}
	if details, _ := usage["prompt_tokens_details"].(map[string]any); details["cached_tokens"] == nil {
		t.Errorf("the second turn with the same prompt reports no cached tokens: %v", usage)
	}

	a = post(t, url+"/generate", `{"text":"hello there","sampling_params":{"max_new_tokens":5,"ignore_eos":true}}`)
	if a.status != http.StatusOK || !bytes.Contains(a.body, []byte(`"completion_tokens":5`)) {
		t.Errorf("generate: %d %s", a.status, a.body)
	}
	a = post(t, url+"/generate", `{"text":"hello there","stream":true,"sampling_params":{"max_new_tokens":5,"ignore_eos":true}}`)
	e = a.events(t)
	meta, _ := e[len(e)-1]["meta_info"].(map[string]any)
	if meta["completion_tokens"] != 5.0 {
		t.Errorf("generate stream: %v", meta)
	}
}

func TestSGLangRouterDrivesAPair(t *testing.T) {
	py := python(t)
	p, d := pair(t)
	url := router(t, py, p, d, "--prometheus-port", freePort(t))
	surfaces(t, url)

	a := post(t, url+"/v1/completions", `{"model":"m","prompt":"hello there","max_tokens":5,"ignore_eos":true}`)
	if a.status != http.StatusOK || !bytes.Contains(a.body, []byte(`"completion_tokens":5`)) {
		t.Errorf("completions: %d %s", a.status, a.body)
	}
	a = post(t, url+"/generate", `{"text":"hello there","return_logprob":true,"logprob_start_len":0,"sampling_params":{"max_new_tokens":2,"ignore_eos":true}}`)
	// The router merges the prefill side's array into the decode side's.
	if a.status != http.StatusOK || !bytes.Contains(a.body, []byte(`"input_token_logprobs":[[null,`)) {
		t.Errorf("generate with logprobs: %d %s", a.status, a.body)
	}
	if a = post(t, url+"/generate", `{"text":"","sampling_params":{}}`); a.status != http.StatusBadRequest {
		t.Errorf("an empty prompt: %d %s", a.status, a.body)
	}
	ids := strings.TrimSuffix(strings.Repeat("7,", 100_000), ",")
	if a = post(t, url+"/generate", `{"input_ids":[`+ids+`]}`); a.status != http.StatusBadRequest ||
		!bytes.Contains(a.body, []byte("exceeds the maximum number of tokens")) {
		t.Errorf("a prompt above the pool: %d %s", a.status, a.body)
	}
}

func TestSGLangMiniLBDrivesAPair(t *testing.T) {
	py := python(t)
	p, d := pair(t)
	surfaces(t, router(t, py, p, d, "--mini-lb"))
}

// The openai client reads a unified engine, and a pair through SGLang's router.
func TestOpenAIClient(t *testing.T) {
	py := python(t)
	cases := map[string]func(t *testing.T) string{
		"a unified engine": func(t *testing.T) string {
			return "http://" + engine(t, emulator.Config{}).Addr()
		},
		"a decode engine with conditional aggregation": func(t *testing.T) string {
			return "http://" + engine(t, emulator.Config{
				Mode: emulator.ModeDecode, DecodeRadix: true, ConditionalAgg: true,
			}).Addr()
		},
		"a pair behind SGLang's router": func(t *testing.T) string {
			p, d := pair(t)
			return router(t, py, p, d, "--prometheus-port", freePort(t))
		},
	}
	for name, start := range cases {
		t.Run(name, func(t *testing.T) {
			url := start(t)
			cmd := exec.Command(py, "openai_client.py", url+"/v1")
			if strings.Contains(name, "conditional") {
				cmd.Args = append(cmd.Args, "--local-prefill")
			}
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("openai client: %v\n%s", err, out)
			}
		})
	}
}
