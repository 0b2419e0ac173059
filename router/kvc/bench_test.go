package kvc

import (
	"fmt"
	"testing"
)

// BenchmarkRoute is Algorithm 1 over 64 workers, with a session that has
// rejects, on a View of slices: it must not allocate.
func BenchmarkRoute(b *testing.B) {
	v := newBeliefs()
	ws := make([]WorkerID, 64)
	for i := range ws {
		ws[i] = WorkerID(fmt.Sprintf("decode-%d", i))
		v.overlap[ws[i]], v.inflight[ws[i]], v.assigned[ws[i]] = i%7, i%5, float64(i)
	}
	v.rejects[pair{"s", ws[63]}] = 3
	v.pin["s"] = ws[40]
	r, p := Request{Session: "s"}, Corrected()
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := Route(r, ws, v, p); !ok {
			b.Fatal("no worker")
		}
	}
}

func TestRouteDoesNotAllocate(t *testing.T) {
	v, ws := newBeliefs(), ids("d", 9)
	r, p := Request{Session: "s"}, Corrected()
	if n := testing.AllocsPerRun(100, func() { Route(r, ws, v, p) }); n != 0 {
		t.Errorf("Route allocates %v times", n)
	}
}
