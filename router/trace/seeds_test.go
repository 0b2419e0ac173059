package trace

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// The measured quantiles hold for any seed, not for a lucky one.
func TestQuantilesHoldAtSeveralSeeds(t *testing.T) {
	for _, seed := range []uint64{0, 3, 11, 1 << 40, ^uint64(0)} {
		g := generator(seed)
		var outputs []int
		var idles []time.Duration
		for range 500 {
			for _, r := range g.Session().Turns {
				outputs = append(outputs, r.OutputTokens)
				if r.Turn > 0 {
					idles = append(idles, r.Think)
				}
			}
		}
		slices.Sort(outputs)
		slices.Sort(idles)
		for claim, c := range map[string][2]float64{
			"output p50 is 898 tokens":   {quantile(outputs, .50), 898},
			"output p90 is 3,685 tokens": {quantile(outputs, .90), 3685},
			"idle p50 is 9 s":            {quantile(idles, .50) / 1e9, 9},
			"idle p90 is 122 s":          {quantile(idles, .90) / 1e9, 122},
		} {
			if !within(c[0], c[1], .1) {
				t.Errorf("seed %d: %s: got %.0f", seed, claim, c[0])
			}
		}
	}
}

// Session n does not depend on how many sessions are drawn after it: a longer
// run replays a shorter one.
func TestALongerRunBeginsAsAShorterOne(t *testing.T) {
	short, long := generator(5), generator(5)
	var first []Session
	for range 5 {
		first = append(first, short.Session())
	}
	var all []Session
	for range 25 {
		all = append(all, long.Session())
	}
	if diff := cmp.Diff(first, all[:5]); diff != "" {
		t.Errorf("(-short +long):\n%s", diff)
	}
	names := map[string]bool{}
	for _, s := range all {
		name := s.Turns[0].Session
		if name == "" || names[name] {
			t.Errorf("session %q is not the only one of its name", name)
		}
		names[name] = true
	}
}

func TestANameKeepsGeneratorsApart(t *testing.T) {
	a := NewGenerator(Agent(), rand.NewPCG(1, 0), "a").Session()
	b := NewGenerator(Agent(), rand.NewPCG(1, 0), "b").Session()
	if a.Turns[0].Session == b.Turns[0].Session {
		t.Errorf("two generators both have a session %q", a.Turns[0].Session)
	}
}

// Any split of a block gives the same bytes: text [0,n) is text [0,k) + [k,n).
func TestTextIsItsParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		space, id := Space(rapid.Uint64().Draw(t, "space")), rapid.Int64().Draw(t, "id")
		n := rapid.IntRange(0, 600).Draw(t, "n")
		k := rapid.IntRange(0, n).Draw(t, "k")
		whole := appendTokens(nil, space, id, 0, n)
		parts := appendTokens(appendTokens(nil, space, id, 0, k), space, id, k, n)
		if !bytes.Equal(whole, parts) || len(whole) != n*BytesPerToken {
			t.Fatalf("%d bytes of %d tokens, cut at %d:\n%s\n%s", len(whole), n, k, whole, parts)
		}
		if strings.ContainsFunc(string(whole), func(r rune) bool { return r != ' ' && (r < 'a' || r > 'z') }) {
			t.Fatalf("text that JSON may escape or a tokenizer may merge: %q", whole)
		}
	})
}

// Prompts of runs have the prefix property: equal blocks at the front give equal
// bytes, and the first other block gives other bytes.
func TestPromptsShareTextExactlyAsFarAsTheyShareBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{16, 24, 64, 512}).Draw(t, "block")
		shared := rapid.IntRange(0, 12).Draw(t, "shared")
		rest := rapid.IntRange(1, 4).Draw(t, "rest")
		space := Space(rapid.Uint64Range(2, 1<<60).Draw(t, "space"))
		cut := rapid.IntRange(0, shared).Draw(t, "cut") // the same blocks in other runs
		a := layout{blocks: []Run{{Space: space, First: 0, Len: shared + rest}}, blockTokens: size, tail: 1}
		b := layout{blocks: []Run{
			{Space: space, First: 0, Len: cut}, {Space: space, First: int64(cut), Len: shared - cut},
			{Space: space, First: 1 << 40, Len: rest},
		}, blockTokens: size, tail: 1}
		x := a.appendRange(nil, 0, (shared+rest)*size)
		y := b.appendRange(nil, 0, (shared+rest)*size)
		if len(x) != len(y) || len(x) != (shared+rest)*size*BytesPerToken {
			t.Fatalf("%d and %d bytes", len(x), len(y))
		}
		edge := shared * size * BytesPerToken
		if !bytes.Equal(x[:edge], y[:edge]) {
			t.Fatalf("%d shared blocks of %d tokens do not share their text", shared, size)
		}
		if end := edge + size*BytesPerToken; bytes.Equal(x[edge:end], y[edge:end]) {
			t.Fatalf("block %d differs and its text does not", shared)
		}
	})
}

// A prompt read in ranges is the prompt read at once, across run and block
// borders and into the tail.
func TestRangesOfAPromptJoin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := layout{blocks: []Run{{Space: 2, First: 5, Len: 3}, {Space: 3, First: 0, Len: 2}}, blockTokens: 16, tail: 9}
		n := rapid.IntRange(0, 5*16).Draw(t, "tokens")
		k := rapid.IntRange(0, n).Draw(t, "k")
		if !bytes.Equal(l.appendRange(nil, 0, n), l.appendRange(l.appendRange(nil, 0, k), k, n)) {
			t.Fatalf("[0,%d) is not [0,%d) and [%d,%d)", n, k, k, n)
		}
		if got := len(l.appendRange(nil, k, n+40)); got != (n+40-k)*BytesPerToken {
			t.Fatalf("%d bytes of %d tokens", got, n+40-k)
		}
	})
}
