package proxy

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// holdSnapshots makes a worker's feeds wait for their snapshot until the
// returned function is called.
func holdSnapshots(d *mockWorker) (release func()) {
	gate := make(chan struct{})
	inner := d.srv.Config.Handler
	d.srv.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == admission.PathFeed {
			select {
			case <-gate:
			case <-r.Context().Done():
				return
			}
		}
		inner.ServeHTTP(w, r)
	})
	return func() { close(gate) }
}

// A restarted router sends no turn anywhere before it knows who holds its
// session: the turn of a resident session that came first is Direct, and the
// router is not ready before.
func TestFirstTurnsWaitForTheFeeds(t *testing.T) {
	o := testOptions()
	o.SettleTimeout = time.Hour
	workers := []*mockWorker{newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode),
		newMockWorker(t, "prefill-0", fleet.Prefill)}
	release := holdSnapshots(workers[1])
	workers[1].hold(key("s"))
	p := newStartingPool(t, o, workers...)
	got := make(chan answer, 1)
	go func() { got <- p.chat("s", true) }()
	p.eventually("the other feed", func() bool { return p.proxy.worker(kvc.WorkerID(workers[0].id)).trusted.Load() })
	p.eventually("the turn", func() bool { return p.sum("kvc_router_requests_inflight") == 1 })
	if why := strings.Join(p.proxy.unready(), "; "); !strings.Contains(why, "feeds") {
		t.Errorf("unready %q while a feed is missing", why)
	}
	select {
	case a := <-got:
		t.Fatalf("the turn was sent on with %s before the feeds were read", a.mode())
	default:
	}
	release()
	if a := <-got; a.code != 200 || a.mode() != "direct" || a.header.Get(admission.HeaderWorker) != "decode-1" {
		t.Errorf("%d %s on %s, want direct on decode-1", a.code, a.mode(), a.header.Get(admission.HeaderWorker))
	}
	if why := p.proxy.unready(); len(why) != 0 {
		t.Errorf("unready %q with every feed read", why)
	}
}

// A worker that never answers delays the first turns by a bounded time only.
func TestSilentWorkerDelaysTheFirstTurnsOnce(t *testing.T) {
	o := testOptions()
	o.SettleTimeout = 20 * time.Millisecond
	d, silent := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "decode-1", fleet.Decode)
	d.path = "Unified"
	d.feed.Restart(d.hello(), 0)
	defer holdSnapshots(silent)()
	p := newStartingPool(t, o, d, silent)
	if a := p.chat("s", true); a.code != 200 || !p.proxy.settling.over() {
		t.Errorf("%d, settled %t", a.code, p.proxy.settling.over())
	}
}

// A client that leaves while its turn waits is not waited for, and without
// decode workers there is nothing to wait for.
func TestSettlingEnds(t *testing.T) {
	p := New(testOptions())
	defer p.Close()
	p.Apply(&fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "n", Name: "p", Model: "m"}})
	rec := httptest.NewRecorder()
	p.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/v1/chat/completions",
		strings.NewReader(chatBody("hello", false))))
	if rec.Code != http.StatusServiceUnavailable {
		t.Errorf("%d without workers, want 503", rec.Code)
	}
	s := newSettling()
	s.begin(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s.wait(ctx) // returns
	if s.over() {
		t.Error("a client that left ended the wait for all")
	}
}
