//go:build !linux

package local

import "syscall"

// childAttr puts a child in a process group of its own. Only Linux can promise
// that children die with a parent that was killed.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true}
}
