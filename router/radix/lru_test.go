package radix

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// pages is the slow cache's view: every page that should be resident, by the
// tokens from the root to its end, and when a turn last walked through it.
type pages struct {
	size int
	used map[string]int
	held map[string]int
	tick int
}

func (p *pages) chains(ids []int32) (out []string) {
	for n := p.size; n <= len(ids); n += p.size {
		out = append(out, fmt.Sprint(ids[:n]))
	}
	return out
}

// touch marks what is resident of ids as used now.
func (p *pages) touch(ids []int32) {
	p.tick++
	for _, c := range p.chains(ids) {
		if _, ok := p.used[c]; !ok {
			return
		}
		p.used[c] = p.tick
	}
}

func (p *pages) hold(ids []int32, n, by int) {
	for _, c := range p.chains(ids[:n]) {
		p.held[c] += by
	}
}

// Eviction takes nothing that is held, leaves no page without its parent, and
// takes the least recently used first: whatever could have gone and stayed was
// used no earlier than all that went.
func TestEvictionIsLRU(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{1, 2, 4}).Draw(t, "page")
		c := New(Config{Capacity: rapid.IntRange(2, 15).Draw(t, "pages") * size, PageSize: size})
		m := &pages{size: size, used: map[string]int{}, held: map[string]int{}}
		known := map[string][]int32{}
		type open struct {
			turn *Turn
			ids  []int32
			n    int
		}
		var turns []open
		for range rapid.IntRange(1, 50).Draw(t, "steps") {
			if len(turns) > 0 && rapid.IntRange(0, 2).Draw(t, "end") == 0 {
				k := rapid.IntRange(0, len(turns)-1).Draw(t, "which")
				turns[k].turn.End()
				m.hold(turns[k].ids, turns[k].n, -1)
				turns = append(turns[:k], turns[k+1:]...)
				continue
			}
			ids := rapid.SliceOfN(rapid.Int32Range(0, 1), size, 5*size).Draw(t, "ids")
			o := open{turn: c.Begin(ids), ids: ids}
			m.touch(ids)
			m.hold(ids, o.turn.Cached(), 1)
			o.n = o.turn.Cached()
			if o.turn.Commit(ids) {
				m.hold(ids, o.n, -1)
				o.n = o.turn.Cached()
				m.hold(ids, o.n, 1)
			}
			verifyLRU(t, c, m, known)
			if o.n == o.turn.Cached() && o.turn.Size() >= len(ids)/size*size {
				for _, ch := range m.chains(ids) {
					m.used[ch] = 0 // stored now; the walk of Commit stamps it
				}
				m.touch(ids)
				for n := size; n <= len(ids); n += size {
					known[fmt.Sprint(ids[:n])] = ids[:n]
				}
			}
			turns = append(turns, o)
		}
	})
}

// verifyLRU compares the model from before an operation with the cache after
// it, and forgets what was evicted.
func verifyLRU(t *rapid.T, c *Cache, m *pages, known map[string][]int32) {
	newest := 0
	for ch, ids := range known {
		if c.Peek(ids) == len(ids) {
			continue
		}
		if m.held[ch] > 0 {
			t.Fatalf("%s was evicted while held", ch)
		}
		newest = max(newest, m.used[ch])
		delete(m.used, ch)
		delete(known, ch)
	}
	for ch, ids := range known {
		leaf := true
		for other, longer := range known {
			if other != ch && len(longer) > len(ids) && fmt.Sprint(longer[:len(ids)]) == ch {
				leaf = false
			}
		}
		if leaf && m.held[ch] == 0 && m.used[ch] < newest {
			t.Fatalf("%s, used at %d, stayed although something used at %d went", ch, m.used[ch], newest)
		}
	}
}
