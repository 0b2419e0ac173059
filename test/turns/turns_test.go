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

// A restarted router is warm within one snapshot: the next turn is direct.
func TestRouterRestartKeepsSessionsDirect(t *testing.T) {
	w := newWorld(t, kvc.ConditionalAggregation, 1, 2)
	c := &talk{w: w, session: "s", model: model}
	anonymous := &talk{w: w, model: model}
	first, second := c.say(long("one", 60), true), anonymous.say(long("other", 60), true)
	w.synced()
	w.stopRouter()
	w.startRouter()
	for _, tc := range []struct {
		c    *talk
		home string
	}{{c, first.worker}, {anonymous, second.worker}} {
		if got := tc.c.say(long("two", 20), true); got.mode != "direct" || got.worker != tc.home {
			t.Errorf("session %q after the restart: %s on %s, want direct on %s", tc.c.session, got.mode, got.worker, tc.home)
		}
	}
}

// A restarted sidecar reads its journal: same epoch, same truth.
func TestSidecarRestartKeepsSessionsDirect(t *testing.T) {
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprint("kill ", kill), func(t *testing.T) {
			w := newWorld(t, kvc.ConditionalAggregation, 1, 2)
			c := &talk{w: w, session: "s", model: model}
			first := c.say(long("one", 60), true)
			w.synced()
			p := w.pod(first.worker)
			addr := p.addr
			p.stopSide(kill)
			p.startSidecar(addr)
			w.synced()
			if got := c.say(long("two", 20), true); got.code != 200 || got.mode != "direct" || got.worker != first.worker {
				t.Errorf("after the restart: %d %s on %s, want direct on %s", got.code, got.mode, got.worker, first.worker)
			}
		})
	}
}

// A killed decode worker's sessions go on elsewhere, and its fleet entry's
// successor is another worker.
func TestKilledDecodeWorkerIsReplaced(t *testing.T) {
	w := newWorld(t, kvc.ConditionalAggregation, 1, 2)
	c := &talk{w: w, session: "s", model: model}
	first := c.say(long("one", 60), true)
	w.synced()
	p := w.pod(first.worker)
	p.stopSide(true)
	p.stopEngine()
	got := c.say(long("two", 20), true)
	if got.code != 200 || got.worker == first.worker || got.text == "" {
		t.Fatalf("after the kill: %d on %s: %.200s", got.code, got.worker, got.raw)
	}
	second := got.worker
	// The pod comes back as another incarnation under its old name.
	for i := range w.pods {
		if w.pods[i] == p {
			w.pods[i] = w.newPod(p.name, p.role, p.path)
		}
	}
	w.apply()
	w.synced()
	if got = c.say(long("three", 20), true); got.worker != second || got.mode != "direct" {
		t.Errorf("third turn: %s on %s, want direct on %s: the old home does not steal it back", got.mode, got.worker, second)
	}
}

// The other surfaces run on the same path.
func TestCompletionsAndGenerate(t *testing.T) {
	w := newWorld(t, kvc.ConditionalAggregation, 1, 2)
	for _, tc := range []struct{ path, body string }{
		{"/v1/completions", `{"model":"qwen","prompt":%q,"max_tokens":16,"stream":%t}`},
		{"/generate", `{"text":%q,"sampling_params":{"max_new_tokens":16},"stream":%t}`},
	} {
		for _, stream := range []bool{true, false} {
			session := fmt.Sprint(tc.path, stream)
			prompt := long(session, 50)
			for i, want := range []string{"seed", "direct"} {
				got := w.post(tc.path, fmt.Appendf(nil, tc.body, prompt, stream), session)
				if got.code != 200 || got.err != nil || got.mode != want {
					t.Errorf("%s stream %t turn %d: %d %s (%v) %.200s", tc.path, stream, i, got.code, got.mode, got.err, got.raw)
				}
				prompt += long("more", 10)
				w.synced()
			}
		}
	}
}
