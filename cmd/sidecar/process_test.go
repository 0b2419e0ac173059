package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/emulator"
)

// asSidecar makes the test binary run as the sidecar itself.
const asSidecar = "KVC_TEST_AS_SIDECAR"

// process is one run of the sidecar as its own process.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	log  *lines
	base string
	ctl  *admission.Client
}

func start(t *testing.T, addr, engine, journal string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, log: &lines{}, base: "http://" + addr, ctl: &admission.Client{HTTP: &http.Client{}}}
	p.cmd = exec.CommandContext(t.Context(), exe, "--listen", addr, "--journal-dir", journal, "--drain-timeout", "2s")
	p.cmd.Env = append(os.Environ(), asSidecar+"=1", "KVC_WORKER=uid-1", "KVC_POD=decode-0", "KVC_ROLE=decode",
		"KVC_DIRECT_PATH=Unified", "KVC_ENGINE_URL="+engine, "KVC_TIME_SCALE=100")
	p.cmd.Stderr = p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait(); p.ctl.HTTP.CloseIdleConnections() })
	return p
}

func (p *process) until(what string, ok func(admission.SidecarStatus) bool) admission.SidecarStatus {
	p.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		s, err := p.ctl.Status(p.t.Context(), p.base)
		if err == nil && ok(s) {
			return s
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("not %s: %+v, %v\n%s", what, s, err, p.log)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// turn sends one fused turn and returns the mode it was admitted with.
func (p *process) turn(n int) string {
	p.t.Helper()
	var verdict admission.Verdict
	ctx := httptrace.WithClientTrace(p.t.Context(), &httptrace.ClientTrace{
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			return json.Unmarshal([]byte(h.Get(admission.HeaderVerdict)), &verdict)
		},
	})
	body := `{"model":"m","max_tokens":4,"ignore_eos":true,"messages":[{"role":"user","content":"` +
		strings.Repeat("tell me more ", 60*(n+1)) + `"}]}`
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.base+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	admission.Turn{
		Leg: admission.LegDecode, Admit: admission.AdmitAsk, Attempt: fmt.Sprintf("%032x", n+1),
		Session: "00000000000000aa", Lineage: "00000000000000aa", Turn: n, OutputTokens: 4,
	}.Write(req.Header)
	resp, err := p.ctl.HTTP.Do(req)
	if err != nil {
		p.t.Fatalf("turn %d: %v\n%s", n, err, p.log)
	}
	defer func() { _ = resp.Body.Close() }()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK {
		p.t.Fatalf("turn %d: %d %s, %v", n, resp.StatusCode, b, err)
	}
	return verdict.Mode
}

// The issue's own words: kill -9 and restart of a sidecar, and the next turn of
// a resident session is Direct.
func TestKillAndRestartKeepsResidency(t *testing.T) {
	engine, err := emulator.New(emulator.Config{ModelPath: "m", TimeScale: 100, Seed: 1, EnableCacheReport: true},
		slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- engine.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("emulator: %v", err)
		}
	}()
	addr, journal := freeAddr(t), t.TempDir()
	ready := func(s admission.SidecarStatus) bool { return s.Ready }

	p := start(t, addr, "http://"+engine.Addr(), journal)
	p.until("ready", ready)
	if got := p.turn(0); got != "seed" {
		t.Errorf("first turn %q, want seed", got)
	}
	before := p.until("quiet", func(s admission.SidecarStatus) bool { return s.InFlight == 0 && s.Sessions == 1 })
	time.Sleep(500 * time.Millisecond) // the journal follows within 250 ms
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()

	p = start(t, addr, "http://"+engine.Addr(), journal)
	after := p.until("ready again", ready)
	if after.Epoch != before.Epoch || after.Used != before.Used {
		t.Errorf("after %+v, before %+v; want the same epoch and residency", after, before)
	}
	if got := p.turn(1); got != "direct" {
		t.Errorf("next turn %q, want direct", got)
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, p.log)
	}
}
