package kvc

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// The element that fills a hole may belong above it.
func TestHeapFillsAHoleUpwards(t *testing.T) {
	var h heap[*node]
	var in []*node
	for _, stamp := range []uint64{0, 10, 1, 11, 12, 2, 3} {
		in = append(in, &node{stamp: stamp})
		h.push(in[len(in)-1])
	}
	h.remove(in[3])
	for _, want := range []uint64{0, 1, 2, 3, 10, 12} {
		if h[0].stamp != want {
			t.Fatalf("least is %d, want %d", h[0].stamp, want)
		}
		h.remove(h[0])
	}
}

func TestHeapKeepsOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h heap[*node]
		var in []*node
		for i, stamp := range rapid.SliceOfN(rapid.Uint64Range(0, 50), 0, 60).Draw(t, "stamps") {
			n := &node{stamp: stamp*100 + uint64(i)}
			h.push(n)
			in = append(in, n)
			if rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
				j := rapid.IntRange(0, len(in)-1).Draw(t, "which")
				h.remove(in[j])
				h.remove(in[j]) // twice is once
				in = slices.Delete(in, j, j+1)
			}
		}
		slices.SortFunc(in, func(a, b *node) int { return int(a.stamp) - int(b.stamp) })
		for _, want := range in {
			if h[0] != want {
				t.Fatalf("least is %d, want %d", h[0].stamp, want.stamp)
			}
			h.remove(h[0])
		}
		if len(h) != 0 {
			t.Fatalf("%d left", len(h))
		}
	})
}
