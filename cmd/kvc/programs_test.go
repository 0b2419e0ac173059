package main

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"testing"
)

// built is the directory of kvc and its siblings, built for the first test that
// runs them.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kvc-programs-")
	if err != nil {
		return "", err
	}
	args := []string{"build", "-o", dir + "/"}
	for _, p := range []string{"kvc", "router", "sidecar", "emulator"} {
		args = append(args, "github.com/kvc-dev/kvc/cmd/"+p)
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return dir, fmt.Errorf("build: %w\n%s", err, out)
	}
	return dir, nil
})

// programs returns the directory of the real programs.
func programs(t *testing.T) string {
	t.Helper()
	usesPrograms = true
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// usesPrograms tells TestMain that there is a directory to remove.
var usesPrograms bool

func TestMain(m *testing.M) {
	code := m.Run()
	if usesPrograms {
		if dir, _ := built(); dir != "" {
			_ = os.RemoveAll(dir)
		}
	}
	os.Exit(code)
}
