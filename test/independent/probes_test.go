package independent

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/emulator"
)

// The probes that people run against a real engine hold for the emulator too:
// what it assumes and what they expect is one thing.
func TestTheEmulatorPassesTheProbes(t *testing.T) {
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("hack/real-sglang.sh cannot run here: %v", err)
		}
	}
	quick := emulator.Config{WaitingTimeout: time.Second, BootstrapTimeout: 30 * time.Second, RouteRetry: time.Millisecond}
	cfg := func(mode emulator.Mode) emulator.Config {
		c := quick
		c.Mode, c.BootstrapPort, c.DecodeRadix, c.HeaderOverrides = mode, -1, mode == emulator.ModeDecode, true
		return c
	}
	u, p, d := engine(t, quick), engine(t, cfg(emulator.ModePrefill)), engine(t, cfg(emulator.ModeDecode))
	cmd := exec.Command("../../hack/real-sglang.sh", "--destructive",
		"--unified", "http://"+u.Addr(), "--prefill", "http://"+p.Addr(), "--decode", "http://"+d.Addr(),
		"--bootstrap", fmt.Sprintf("127.0.0.1:%d", p.BootstrapPort()))
	cmd.Env = append(os.Environ(), "http_proxy=", "HTTP_PROXY=", "no_proxy=127.0.0.1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
