package local

import (
	"os/exec"
	"runtime"
)

// spawner starts processes from one OS thread that lives as long as the run.
// The kernel ties a child's parent-death signal to the thread that forked it,
// not to the process: a child forked from a thread that the runtime lets go
// would be killed with it.
type spawner struct {
	requests chan spawnRequest
}

type spawnRequest struct {
	cmd *exec.Cmd
	err chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest)}
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for r := range s.requests {
			r.err <- r.cmd.Start()
		}
	}()
	return s
}

func (s *spawner) start(cmd *exec.Cmd) error {
	r := spawnRequest{cmd: cmd, err: make(chan error, 1)}
	s.requests <- r
	return <-r.err
}

// close ends the thread's goroutine. No process may be started afterwards.
func (s *spawner) close() { close(s.requests) }
