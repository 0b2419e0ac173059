package trace

import (
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Quantiles is a distribution given by measured points: P[i] of the values are
// at most V[i]. Between the points the logarithm of the value grows linearly
// with p, which follows the long tails of token counts and idle times.
type Quantiles struct {
	P []float64 // ascending, from 0 to 1
	V []float64 // ascending, positive
}

// At is the inverse of the distribution function; p outside 0…1 is clamped.
func (q Quantiles) At(p float64) float64 {
	n := len(q.P)
	if n == 0 || p <= q.P[0] {
		return q.first()
	}
	for i := 1; i < n; i++ {
		if p <= q.P[i] {
			f := (p - q.P[i-1]) / (q.P[i] - q.P[i-1])
			return math.Exp(math.Log(q.V[i-1])*(1-f) + math.Log(q.V[i])*f)
		}
	}
	return q.V[n-1]
}

func (q Quantiles) first() float64 {
	if len(q.V) == 0 {
		return 0
	}
	return q.V[0]
}

// AgentModel is the built-in workload: coding-agent sessions. Agent returns the
// measured one.
type AgentModel struct {
	Append  Quantiles // tokens a turn adds after the answer
	Output  Quantiles // tokens of an answer
	Idle    Quantiles // seconds between an answer and the next turn
	Opening Quantiles // tokens of a group's tools and system prompt
	Task    Quantiles // tokens of the first user message
	Fresh   Quantiles // tokens of the user message after a context reset
	Turns   Quantiles // turns of a session

	Groups     int     // agents (tools and system prompt) that sessions share
	ResetShare float64 // of the turns after the first
	MaxContext int     // tokens; a session resets rather than exceed it
	Stagger    float64 // seconds over which sessions start
}

// Agent is fitted to recorded Claude Code sessions (710 sessions of the WEKA
// set). Measured there: append p50/p90/p95 713/4,206/8,238 tokens, idle p50/p90/p95
// 9/122/305 s, 1.7 % context resets, openings p50 14,949 tokens, turns p50 45;
// answers p50/p90 898/3,685 tokens. The other points are read off the slices
// that fit 160 K tokens; the ends are cut so that one draw cannot outlast a run
// (idle at 10 minutes, appends at 48 K tokens).
func Agent() AgentModel {
	return AgentModel{
		Append: Quantiles{
			P: []float64{0, .10, .25, .50, .75, .90, .95, .99, 1},
			V: []float64{24, 221, 364, 713, 1617, 4206, 8238, 32000, 48000},
		},
		Output: Quantiles{
			P: []float64{0, .10, .25, .50, .75, .90, .95, .99, 1},
			V: []float64{16, 219, 427, 898, 1888, 3685, 5497, 10500, 12000},
		},
		Idle: Quantiles{
			P: []float64{0, .10, .50, .90, .95, 1},
			V: []float64{1, 3, 9, 122, 305, 600},
		},
		Opening: Quantiles{
			P: []float64{0, .10, .25, .50, .75, .90, 1},
			V: []float64{4210, 11899, 12891, 14949, 15458, 15930, 17000},
		},
		Task: Quantiles{
			P: []float64{0, .10, .25, .50, .75, 1},
			V: []float64{111, 1462, 3653, 7271, 16000, 32000},
		},
		Fresh: Quantiles{
			P: []float64{0, .5, 1},
			V: []float64{1000, 4000, 8000},
		},
		Turns: Quantiles{
			P: []float64{0, .10, .25, .50, .75, .90, 1},
			V: []float64{4, 7, 18, 45, 94, 156, 330},
		},
		Groups: 5, ResetShare: 0.017, MaxContext: 110_000, Stagger: 120,
	}
}

// Generator draws sessions of a model. It is not safe for concurrent use.
type Generator struct {
	model  AgentModel
	rng    *rand.Rand
	name   string
	drawn  int
	groups []group
}

type group struct {
	space  Space
	tokens int
}

// NewGenerator returns the sessions that src draws of m; equal sources and
// names give equal sessions. The name enters the session names and so all texts.
func NewGenerator(m AgentModel, src rand.Source, name string) *Generator {
	g := &Generator{model: m, rng: rand.New(src), name: name}
	for i := range max(1, m.Groups) {
		g.groups = append(g.groups, group{
			space:  spaceOf("agent-opening", fmt.Sprintf("%s/%d", name, i)),
			tokens: g.count(m.Opening),
		})
	}
	return g
}

// Session draws the next session with all its turns.
func (g *Generator) Session() Session {
	g.drawn++
	s := Session{ID: fmt.Sprintf("%s-%04d", g.name, g.drawn)}
	team := g.group()
	input, answer := 0, 0
	for t := range max(1, g.count(g.model.Turns)) {
		r := Record{
			Session: s.ID, Turn: t,
			Think:        g.seconds(g.model.Idle),
			AppendTokens: g.count(g.model.Append),
			OutputTokens: g.count(g.model.Output),
			SharedTokens: team.tokens, SharedSpace: team.space,
		}
		reset := g.rng.Float64() < g.model.ResetShare
		fresh := g.count(g.model.Fresh)
		switch {
		case t == 0:
			r.Think = time.Duration(g.rng.Float64() * g.model.Stagger * float64(time.Second))
			r.AppendTokens = team.tokens + g.count(g.model.Task)
			input = r.AppendTokens
		case reset || input+answer+r.AppendTokens > g.model.MaxContext:
			r.Reset, r.AppendTokens = true, fresh
			input = team.tokens + fresh
		default:
			input += answer + r.AppendTokens
		}
		r.InputTokens, answer = input, r.OutputTokens
		s.Turns = append(s.Turns, r)
	}
	return s
}

// group draws an opening: the first is the most common (shares 1, 1/2, 1/3 …),
// as a few agents send most of the traffic.
func (g *Generator) group() group {
	total := 0.0
	for i := range g.groups {
		total += 1 / float64(i+1)
	}
	u := g.rng.Float64() * total
	for i := range g.groups {
		if u -= 1 / float64(i+1); u < 0 {
			return g.groups[i]
		}
	}
	return g.groups[0]
}

func (g *Generator) count(q Quantiles) int {
	return int(math.Round(q.At(g.rng.Float64())))
}

func (g *Generator) seconds(q Quantiles) time.Duration {
	return time.Duration(q.At(g.rng.Float64()) * float64(time.Second))
}
