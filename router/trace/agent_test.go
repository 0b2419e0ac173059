package trace

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func generator(seed uint64) *Generator { return NewGenerator(Agent(), rand.NewPCG(seed, 0), "agent") }

// within says whether got is at most share away from want.
func within(got, want, share float64) bool { return math.Abs(got-want) <= share*want }

// quantile is the p-quantile of sorted values.
func quantile[T ~int | ~int64](vs []T, p float64) float64 {
	return float64(vs[int(p*float64(len(vs)-1))])
}

// The built-in workload has the quantiles measured on the recorded sessions.
func TestAgentHasTheMeasuredQuantiles(t *testing.T) {
	g := generator(1)
	var appends, outputs []int
	var idles []time.Duration
	turns, resets := 0, 0
	for range 600 {
		for _, r := range g.Session().Turns {
			outputs = append(outputs, r.OutputTokens)
			if r.Turn == 0 {
				continue
			}
			turns++
			idles = append(idles, r.Think)
			if r.Reset {
				resets++
			} else {
				appends = append(appends, r.AppendTokens)
			}
		}
	}
	slices.Sort(appends)
	slices.Sort(outputs)
	slices.Sort(idles)
	for _, c := range []struct {
		claim     string
		got, want float64
		share     float64
	}{
		// Appends that would burst the context become resets, which thins the tail a little.
		{"append p50 is 713 tokens", quantile(appends, .50), 713, .05},
		{"append p90 is 4,206 tokens", quantile(appends, .90), 4206, .08},
		{"append p95 is 8,238 tokens", quantile(appends, .95), 8238, .12},
		{"output p50 is 898 tokens", quantile(outputs, .50), 898, .05},
		{"output p90 is 3,685 tokens", quantile(outputs, .90), 3685, .05},
		{"idle p50 is 9 s", quantile(idles, .50) / 1e9, 9, .05},
		{"idle p90 is 122 s", quantile(idles, .90) / 1e9, 122, .05},
	} {
		if !within(c.got, c.want, c.share) {
			t.Errorf("%s: got %.0f", c.claim, c.got)
		}
	}
	// 1.7 % by nature; the rest are contexts that are full.
	if share := float64(resets) / float64(turns); share < 0.015 || share > 0.06 {
		t.Errorf("%.3f of the turns reset the context", share)
	}
}

func TestResetsAre17PerMilleWhereContextsDoNotFill(t *testing.T) {
	m := Agent()
	m.MaxContext = math.MaxInt
	g := NewGenerator(m, rand.NewPCG(2, 0), "a")
	turns, resets := 0, 0
	for range 600 {
		for _, r := range g.Session().Turns[1:] {
			turns++
			if r.Reset {
				resets++
			}
		}
	}
	if share := float64(resets) / float64(turns); !within(share, 0.017, .12) {
		t.Errorf("%.4f of %d turns reset the context, want 0.017", share, turns)
	}
}

func TestEqualSeedsGiveEqualSessions(t *testing.T) {
	a, b, other := generator(7), generator(7), generator(8)
	for i := range 20 {
		x, y, z := a.Session(), b.Session(), other.Session()
		if diff := cmp.Diff(x, y); diff != "" {
			t.Fatalf("session %d:\n%s", i, diff)
		}
		if cmp.Equal(x, z) {
			t.Fatalf("session %d is the same with another seed", i)
		}
	}
}

func TestAgentSessionsKeepTheirPromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := generator(rapid.Uint64().Draw(t, "seed"))
		s := g.Session()
		opening := s.Turns[0].SharedTokens
		input := 0
		for i, r := range s.Turns {
			switch {
			case r.Turn != i || r.Session != s.ID:
				t.Fatalf("turn %d is %d of %q", i, r.Turn, r.Session)
			case r.SharedTokens != opening || opening < 4210 || r.SharedSpace == Global:
				t.Fatalf("turn %d opens with %d tokens, the first with %d", i, r.SharedTokens, opening)
			case r.OutputTokens < 1 || r.AppendTokens < 1 || r.Think < 0 || r.Think > 10*time.Minute+time.Second:
				t.Fatalf("turn %d: %+v", i, r)
			case i > 0 && r.Reset && r.InputTokens != opening+r.AppendTokens:
				t.Fatalf("turn %d: a reset leaves %d tokens", i, r.InputTokens)
			case i > 0 && !r.Reset && r.InputTokens != input+s.Turns[i-1].OutputTokens+r.AppendTokens:
				t.Fatalf("turn %d: %d tokens do not follow from %d", i, r.InputTokens, input)
			case r.InputTokens > Agent().MaxContext:
				t.Fatalf("turn %d: %d tokens", i, r.InputTokens)
			}
			input = r.InputTokens
		}
	})
}

// A conversation of generated turns is as long as the records say when the
// answers are as long as asked for.
func TestAgentConversationsHaveTheLengthOfTheirRecords(t *testing.T) {
	s := generator(3).Session()
	c := NewConversation(s.ID)
	for _, r := range s.Turns[:min(12, len(s.Turns))] {
		c.Turn(r)
		if c.Tokens() != r.InputTokens {
			t.Fatalf("turn %d has %d tokens, its record %d", r.Turn, c.Tokens(), r.InputTokens)
		}
		c.Answer(answerOf("x", r.OutputTokens))
	}
}

func TestSessionsShareFewOpenings(t *testing.T) {
	g := generator(4)
	count := make(map[Space]int)
	for range 200 {
		count[g.Session().Turns[0].SharedSpace]++
	}
	if len(count) != Agent().Groups {
		t.Fatalf("%d openings, want %d", len(count), Agent().Groups)
	}
	most := 0
	for _, n := range count {
		most = max(most, n)
	}
	if most < 60 || most > 120 {
		t.Errorf("the most common opening has %d of 200 sessions, want about 88", most)
	}
}

func TestQuantiles(t *testing.T) {
	q := Quantiles{P: []float64{0, .5, 1}, V: []float64{1, 100, 10000}}
	for name, tc := range map[string]struct{ p, want float64 }{
		"below the first point is the first value":    {-1, 1},
		"a point is its value":                        {.5, 100},
		"between points the logarithm grows linearly": {.25, 10},
		"above the last point is the last value":      {2, 10000},
	} {
		t.Run(name, func(t *testing.T) {
			if got := q.At(tc.p); math.Abs(got-tc.want) > 1e-9*tc.want {
				t.Errorf("At(%g) = %g, want %g", tc.p, got, tc.want)
			}
		})
	}
	if got := (Quantiles{}).At(.5); got != 0 {
		t.Errorf("no points: %g", got)
	}
}
