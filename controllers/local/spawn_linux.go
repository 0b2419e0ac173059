package local

import "syscall"

// childAttr puts a child in a process group of its own, so that a Ctrl-C on the
// terminal reaches us alone and its whole family can be signalled, and has the
// kernel kill it when we die by whatever cause.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
