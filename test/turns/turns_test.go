package turns

import (
	"fmt"
	"testing"

	"github.com/kvc-dev/kvc/router/kvc"
)

// A session seeds once, then runs on its worker: direct where the engine can,
// delta where it still needs the prefill leg. Streams and whole answers alike.
func TestAgentSessionByProfile(t *testing.T) {
	cases := map[kvc.DirectPath]struct {
		prefill, decode int
		resident        string
	}{
		kvc.ConditionalAggregation: {1, 3, "direct"},
		kvc.Unified:                {0, 3, "direct"},
		kvc.DeltaTransfer:          {1, 2, "delta"},
	}
	for path, tc := range cases {
		t.Run(string(path), func(t *testing.T) {
			w := newWorld(t, path, tc.prefill, tc.decode)
			for s := range 3 {
				c := &talk{w: w, session: fmt.Sprint("agent-", s), model: model}
				home := ""
				for i := range 5 {
					got := c.say(long(fmt.Sprint("task ", s, i), 40), i%2 == 0)
					if got.code != 200 || got.err != nil || got.text == "" {
						t.Fatalf("session %d turn %d: %d %v %.300s", s, i, got.code, got.err, got.raw)
					}
					want := tc.resident
					if i == 0 {
						want, home = "seed", got.worker
					}
					if got.mode != want || got.worker != home {
						t.Errorf("session %d turn %d: %s on %s, want %s on %s", s, i, got.mode, got.worker, want, home)
					}
					w.synced()
				}
			}
			if n := w.proxy.Status().PinChanges; n != 0 {
				t.Errorf("%d pin changes, want none", n)
			}
		})
	}
}
