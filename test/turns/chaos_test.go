package turns

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
)

// statuses asks every sidecar that still answers.
func (w *world) statuses() map[string]admission.SidecarStatus {
	c := admission.Client{HTTP: w.client, Tokens: w.tokens}
	out := map[string]admission.SidecarStatus{}
	for _, p := range w.pods {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		if st, err := c.Status(ctx, "http://"+p.addr); err == nil {
			out[p.name] = st
		}
		cancel()
	}
	return out
}

// quiet waits until nothing is in flight and nothing reserved anywhere.
func (w *world) quiet() {
	w.t.Helper()
	defer func() {
		if w.t.Failed() {
			w.t.Logf("router %+v\nsidecars %+v", w.proxy.Status().Workers, w.statuses())
		}
	}()
	w.eventually("all gauges at 0", func() bool {
		for _, s := range w.proxy.Status().Workers {
			if s.InFlight != 0 {
				return false
			}
		}
		for _, st := range w.statuses() {
			if st.InFlight != 0 || st.Reserved != 0 || st.Locked != 0 {
				return false
			}
		}
		return true
	})
}

// A worker killed in the middle of a busy run: what had not begun is served
// elsewhere, what had begun ends with one in-band error, and nothing is left.
func TestKillInTheMiddleOfARun(t *testing.T) {
	w := newWorld(t, kvc.ConditionalAggregation, 1, 3)
	var mu sync.Mutex
	served, inBand := 0, 0
	var wg sync.WaitGroup
	victim := w.pod("decode-1")
	half := make(chan struct{})
	var once sync.Once
	for s := range 12 {
		wg.Go(func() {
			c := &talk{w: w, session: fmt.Sprint("s", s), model: model}
			for i := range 4 {
				got := c.say(long(fmt.Sprint(s, " does ", i), 30), true)
				if i == 1 {
					once.Do(func() { close(half) })
				}
				mu.Lock()
				switch {
				case got.code == 200 && got.err == nil && strings.HasSuffix(got.raw, "data: [DONE]\n\n"):
					if strings.Contains(got.raw, `{"error":`) {
						inBand++
						if n := strings.Count(got.raw, `{"error":`); n != 1 {
							t.Errorf("%d in-band errors in one answer", n)
						}
					} else {
						served++
					}
				default:
					t.Errorf("session %d turn %d: %d %v %.300s", s, i, got.code, got.err, got.raw)
				}
				mu.Unlock()
			}
		})
	}
	<-half
	victim.stopSide(true)
	victim.stopEngine()
	wg.Wait()
	if served < 36 {
		t.Errorf("%d turns served, %d ended in-band; want most of 48 served", served, inBand)
	}
	w.quiet()
}

// Clients that leave at any moment leave nothing behind: not at the router, not
// at the sidecars, not in the engines.
func TestRandomHangUps(t *testing.T) {
	for _, path := range []kvc.DirectPath{kvc.ConditionalAggregation, kvc.Unified, kvc.DeltaTransfer} {
		t.Run(string(path), func(t *testing.T) {
			prefill := 1
			if path == kvc.Unified {
				prefill = 0
			}
			w := newWorld(t, path, prefill, 2)
			var wg sync.WaitGroup
			for s := range 8 {
				wg.Go(func() {
					for i := range 6 {
						body, err := json.Marshal(map[string]any{"model": model, "stream": i%3 != 0, "max_tokens": 64,
							"messages": []message{{"user", long(fmt.Sprint("s", s), 40+10*i)}}})
						if err != nil {
							t.Error(err)
							return
						}
						ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rand.IntN(60))*time.Millisecond)
						req, err := http.NewRequestWithContext(ctx, http.MethodPost, w.srv.URL+"/v1/chat/completions", bytes.NewReader(body))
						if err != nil {
							t.Error(err)
						} else if resp, err := w.client.Do(req); err == nil {
							_, _ = io.Copy(io.Discard, resp.Body)
							resp.Body.Close()
						}
						cancel()
					}
				})
			}
			wg.Wait()
			w.quiet()
			// The pool still serves, and a session is resident again after one turn.
			c := &talk{w: w, session: "after", model: model}
			if got := c.say(long("still", 40), true); got.code != 200 || got.text == "" {
				t.Errorf("after the hang-ups: %d %.200s", got.code, got.raw)
			}
			w.synced()
			if got := c.say(long("here", 10), true); got.mode != "direct" && got.mode != "delta" {
				t.Errorf("second turn after the hang-ups: %s", got.mode)
			}
		})
	}
}
