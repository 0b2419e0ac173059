package state

import (
	"fmt"
	"testing"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// million is a State with 64 decode workers and an index of 1 Mi blocks, of
// which one chain of 4,096 blocks is held to a different length by every
// worker: the worst case for finding all overlaps at once.
func million(b *testing.B) (*State, []block.Hash) {
	s := New(Options{Clock: newClock().now})
	var ws []Worker
	for i := range 64 {
		ws = append(ws, Worker{ID: kvc.WorkerID(fmt.Sprintf("decode-%02d", i)), Role: fleet.Decode})
	}
	if err := s.SetWorkers(ws); err != nil {
		b.Fatal(err)
	}
	prompt := scattered(0, 4096)
	for i, w := range ws {
		s.SetTrusted(w.ID, true)
		s.Add(w.ID, "00000000000000aa", prompt[:64*(i+1)-i])
		s.Add(w.ID, "00000000000000bb", scattered(i+1, 16<<10-64))
	}
	s.Own(ws[0].ID, kvc.Shared, prompt[:64])
	return s, prompt
}

// scattered is a chain of hashes that look like hashes.
func scattered(id, n int) []block.Hash {
	bs := make([]block.Hash, n)
	x := uint64(id)*0x9e3779b97f4a7c15 + 1
	for i := range bs {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		bs[i] = block.Hash(x)
	}
	return bs
}

// BenchmarkDecision is overlaps + Route over 64 decode workers for a prefix of
// 4,096 blocks against an index of a million.
func BenchmarkDecision(b *testing.B) {
	s, prompt := million(b)
	if n := s.Stats().Blocks; n < 1_000_000 {
		b.Fatalf("index holds %d blocks", n)
	}
	r := kvc.Request{Session: "s", Lineage: "00000000000000aa"}
	for name, n := range map[string]int{"spread": 4096, "short": 40} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				t := s.Begin(r, prompt[:n], "")
				t.Next()
				t.Done(kvc.OutcomeCancelled)
			}
		})
	}
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				t := s.Begin(r, prompt, "")
				t.Next()
				t.Done(kvc.OutcomeCancelled)
			}
		})
	})
}

// BenchmarkFeed is one add and one evict of 1,000 blocks, as a worker's feed
// brings them, against an index of a million.
func BenchmarkFeed(b *testing.B) {
	s, _ := million(b)
	bs := scattered(1<<20, 1000)
	b.ReportAllocs()
	for b.Loop() {
		s.Add("decode-07", "00000000000000cc", bs)
		s.Evict("decode-07", bs)
	}
}
