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

func TestQuantilesAreMonotonicAndInside(t *testing.T) {
	m := Agent()
	rapid.Check(t, func(t *rapid.T) {
		q := rapid.SampledFrom([]Quantiles{m.Append, m.Output, m.Idle, m.Opening, m.Task, m.Fresh, m.Turns}).Draw(t, "q")
		a, b := rapid.Float64Range(-.1, 1.1).Draw(t, "a"), rapid.Float64Range(-.1, 1.1).Draw(t, "b")
		if a > b {
			a, b = b, a
		}
		x, y := q.At(a), q.At(b)
		if x > y*(1+1e-12) || x < q.V[0]*(1-1e-12) || y > q.V[len(q.V)-1]*(1+1e-12) {
			t.Fatalf("At(%g) = %g, At(%g) = %g of %v", a, x, b, y, q.V)
		}
	})
}

// The model's points are what the sources say, in order and complete.
func TestAgentsPointsAreInOrder(t *testing.T) {
	m := Agent()
	for name, q := range map[string]Quantiles{"append": m.Append, "output": m.Output, "idle": m.Idle,
		"opening": m.Opening, "task": m.Task, "fresh": m.Fresh, "turns": m.Turns} {
		whole := len(q.P) == len(q.V) && q.P[0] == 0 && q.P[len(q.P)-1] == 1
		if !whole || !slices.IsSorted(q.P) || !slices.IsSorted(q.V) || q.V[0] <= 0 {
			t.Errorf("%s: %+v", name, q)
		}
	}
	for _, c := range []struct {
		name string
		got  float64
		want float64
	}{
		{"append p50", m.Append.At(.5), 713}, {"append p90", m.Append.At(.9), 4206}, {"append p95", m.Append.At(.95), 8238},
		{"output p50", m.Output.At(.5), 898}, {"output p90", m.Output.At(.9), 3685},
		{"idle p50", m.Idle.At(.5), 9}, {"idle p90", m.Idle.At(.9), 122}, {"resets", m.ResetShare, .017},
	} {
		if !within(c.got, c.want, 1e-9) {
			t.Errorf("%s is %g, want %g", c.name, c.got, c.want)
		}
	}
}

func TestShapeOfGeneratedSessions(t *testing.T) {
	g := generator(5)
	var turns, firsts, starts []int
	var totals int
	for range 500 {
		s := g.Session()
		turns = append(turns, len(s.Turns))
		firsts = append(firsts, s.Turns[0].InputTokens)
		starts = append(starts, int(s.Turns[0].Think/time.Second))
		totals += len(s.Turns)
	}
	slices.Sort(turns)
	slices.Sort(firsts)
	slices.Sort(starts)
	for _, c := range []struct {
		claim              string
		got, least, atMost float64
	}{
		{"half of the sessions have 45 turns or more", quantile(turns, .5), 38, 52},
		{"a tenth has no more than 7", quantile(turns, .1), 5, 10},
		{"the longest tenth has 156 or more", quantile(turns, .9), 130, 190},
		{"a first prompt is the opening and a task", quantile(firsts, .5), 17000, 26000},
		{"no first prompt is longer than both can be", quantile(firsts, 1), 20000, 49000},
		{"sessions start within two minutes, spread evenly", quantile(starts, .5), 50, 70},
		{"… to the end", quantile(starts, 1), 110, 120},
	} {
		if c.got < c.least || c.got > c.atMost {
			t.Errorf("%s: got %.0f, want %.0f…%.0f", c.claim, c.got, c.least, c.atMost)
		}
	}
	// First turns are few, so that most turns can be Direct.
	if share := 500 / float64(totals); share > .03 {
		t.Errorf("%.3f of the turns are first ones", share)
	}
}

// What a session says does not depend on how many sessions were asked for
// before or after, only on its number.
func TestSessionsFollowFromSeedAndNumber(t *testing.T) {
	all := generator(9)
	var first []Session
	for range 10 {
		first = append(first, all.Session())
	}
	again := generator(9)
	for i := range 10 {
		if diff := cmp.Diff(first[i], again.Session()); diff != "" {
			t.Fatalf("session %d:\n%s", i, diff)
		}
	}
	names := make(map[string]bool)
	for _, s := range first {
		names[s.ID] = true
	}
	if len(names) != 10 {
		t.Errorf("%d names for 10 sessions", len(names))
	}
}

func TestSmallModels(t *testing.T) {
	one := Quantiles{P: []float64{0, 1}, V: []float64{1, 1}}
	cases := map[string]struct {
		change func(*AgentModel)
		check  func(t *testing.T, s Session)
	}{
		"no groups is one group": {func(m *AgentModel) { m.Groups = 0 }, func(t *testing.T, s Session) {
			if s.Turns[0].SharedSpace == Global {
				t.Error("the opening is global")
			}
		}},
		"sessions of one turn": {func(m *AgentModel) { m.Turns = one }, func(t *testing.T, s Session) {
			if len(s.Turns) != 1 {
				t.Errorf("%d turns", len(s.Turns))
			}
		}},
		"every turn resets": {func(m *AgentModel) { m.ResetShare = 1 }, func(t *testing.T, s Session) {
			for _, r := range s.Turns[1:] {
				if !r.Reset {
					t.Errorf("turn %d does not", r.Turn)
				}
			}
		}},
		"a context of nothing resets every turn": {func(m *AgentModel) { m.MaxContext = 1 }, func(t *testing.T, s Session) {
			for _, r := range s.Turns[1:] {
				if !r.Reset || r.AppendTokens < 1000 || r.AppendTokens > 8000 {
					t.Errorf("turn %d: reset %v to %d tokens", r.Turn, r.Reset, r.AppendTokens)
				}
			}
		}},
		"no stagger starts at once": {func(m *AgentModel) { m.Stagger = 0 }, func(t *testing.T, s Session) {
			if s.Turns[0].Think != 0 {
				t.Errorf("starts after %v", s.Turns[0].Think)
			}
		}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			m := Agent()
			tc.change(&m)
			tc.check(t, NewGenerator(m, rand.NewPCG(1, 2), "x").Session())
		})
	}
}

// interleave picks the turns that n turns in flight of c sessions would be: at
// each step the session that is ready first sends its next turn.
func interleave(g *Generator, n, c int) []Record {
	type slot struct {
		s     Session
		next  int
		ready time.Duration
	}
	slots := make([]slot, c)
	for i := range slots {
		slots[i].s = g.Session()
		slots[i].ready = slots[i].s.Turns[0].Think
	}
	var out []Record
	for len(out) < n {
		first := 0
		for i := range slots {
			if slots[i].ready < slots[first].ready {
				first = i
			}
		}
		x := &slots[first]
		r := x.s.Turns[x.next]
		out = append(out, r)
		x.next++
		x.ready += nominalTTFT + time.Duration(r.OutputTokens)*nominalITL
		if x.next == len(x.s.Turns) {
			x.s, x.next = g.Session(), 0
		}
		x.ready += x.s.Turns[x.next].Think
	}
	return out
}

// The demo promises that at least 85 % of the turns after the first are Direct.
// The workload must leave room for that with any seed: a turn can be Direct when
// it keeps its history and adds at most τ_append = 8,192 tokens.
func TestTheWorkloadLeavesRoomForDirectTurns(t *testing.T) {
	const direct = 8192
	worst, sum := 1.0, 0.0
	const seeds = 200
	for seed := range uint64(seeds) {
		later, eligible := 0, 0
		for _, r := range interleave(generator(seed), 300, 24) {
			if r.Turn == 0 {
				continue
			}
			later++
			if !r.Reset && r.AppendTokens <= direct {
				eligible++
			}
		}
		share := float64(eligible) / float64(later)
		worst, sum = min(worst, share), sum+share
	}
	if worst < .86 || sum/seeds < .91 {
		t.Errorf("worst of %d seeds %.3f, mean %.3f; want at least 0.86 and 0.91", seeds, worst, sum/seeds)
	}
	t.Logf("worst of %d seeds %.3f, mean %.3f", seeds, worst, sum/seeds)
}

// Prompts fit the context that engines have by default, with their answers.
func TestPromptsFitAContextOf128K(t *testing.T) {
	g := generator(6)
	longest := 0
	for range 300 {
		for _, r := range g.Session().Turns {
			longest = max(longest, r.InputTokens+r.OutputTokens)
		}
	}
	if longest > 128<<10 {
		t.Errorf("a turn takes %d tokens", longest)
	}
	if longest < 100_000 {
		t.Errorf("no turn takes more than %d tokens: the workload has no long contexts", longest)
	}
}

// The run is short enough that its mean turn fits what the demo assumes.
func TestTheMeanTurnTakesAboutEightySeconds(t *testing.T) {
	var total time.Duration
	n := 0
	for seed := range uint64(20) {
		for _, r := range interleave(generator(seed), 300, 24) {
			total += r.Think + nominalTTFT + time.Duration(r.OutputTokens)*nominalITL
			n++
		}
	}
	if mean := total / time.Duration(n); mean < 65*time.Second || mean > 95*time.Second {
		t.Errorf("a turn takes %v", mean)
	}
}
