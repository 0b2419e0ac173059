package local

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// command is one resolved container: what to execute.
type command struct {
	name string // for logs, "decode-0/engine"
	path string
	args []string
	env  []string
	log  string // file that receives both output streams, appended
}

// process is one started command.
type process struct {
	name string
	pid  int
	log  string
	from int64         // where in the log its own words begin
	done chan struct{} // closed when it has ended
	err  error         // how it ended; valid after done
}

func (s *spawner) run(c command) (*process, error) {
	if err := os.MkdirAll(filepath.Dir(c.log), 0o755); err != nil {
		return nil, fmt.Errorf("make log directory: %w", err)
	}
	log, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open log: %w", err)
	}
	from, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		_ = log.Close()
		return nil, fmt.Errorf("open log: %w", err)
	}
	cmd := exec.Command(c.path, c.args...) //nolint:noctx // a process outlives the call that starts it; terminate ends it
	cmd.Env = c.env
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = childAttr()
	err = s.start(cmd)
	if closeErr := log.Close(); err == nil && closeErr != nil {
		err = closeErr
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.name, err)
	}
	p := &process{name: c.name, pid: cmd.Process.Pid, log: c.log, from: from, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		// A leader that dies may leave a family behind (SGLang forks its scheduler).
		_ = syscall.Kill(-p.pid, syscall.SIGKILL)
		close(p.done)
	}()
	return p, nil
}

// terminate asks the process's group to end and kills it when it has not within
// the grace. It returns once the process is gone.
func (p *process) terminate(grace time.Duration) {
	p.signal(syscall.SIGTERM)
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.signal(syscall.SIGKILL)
		<-p.done
	}
}

func (p *process) signal(sig syscall.Signal) {
	select {
	case <-p.done: // the number may belong to somebody else by now
	default:
		_ = syscall.Kill(-p.pid, sig)
	}
}

// exitReason says how a process ended, in words.
func (p *process) exitReason() string {
	if p.err == nil {
		return "exit status 0"
	}
	return p.err.Error()
}

// killed reports whether the process ended by SIGKILL; valid after done.
func (p *process) killed() bool {
	exit, ok := errors.AsType[*exec.ExitError](p.err)
	if !ok {
		return false
	}
	status, ok := exit.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// tail returns the last words of a log, from an offset on, in one line: the panic
// that ended a Go program, which stands above its goroutines, or else the last
// lines.
func tail(path string, from int64) string {
	const most, lines = 64 << 10, 3
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil {
		from = max(from, info.Size()-most)
	}
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return ""
	}
	data, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	all := strings.Split(string(bytes.TrimSpace(data)), "\n")
	for _, line := range slices.Backward(all) {
		if strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") {
			return line
		}
	}
	return strings.Join(all[max(0, len(all)-lines):], " | ")
}
