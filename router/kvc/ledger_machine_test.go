package kvc

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
)

// machine drives a ledger through arbitrary interleavings of everything a
// sidecar does, with an engine that answers like a radix cache would, or not.
type machine struct {
	l       *Ledger
	follow  *replica
	cfg     LedgerConfig
	now     time.Time
	n       int // attempts so far
	leases  []Lease
	attempt map[string]string // lease id → attempt
	running []string
	ended   []string
	asked   map[string]askedBefore
	chains  map[SessionKey][]block.Hash // last prompt of each session
	next    block.Hash
	// The LRU oracle: every block's last use, touched one by one along the whole
	// path, and the latest use among what the last action evicted.
	use     map[block.Hash]int
	tick    int
	evicted int
}

type askedBefore struct {
	q Question
	v Verdict
}

func newMachine(t *rapid.T, p Params) *machine {
	cfg := LedgerConfig{
		CapacityTokens: rapid.IntRange(200, 12000).Draw(t, "K"),
		PageSize:       rapid.SampledFrom([]int{1, 16, 64}).Draw(t, "page"),
		Prefill:        rapid.IntRange(0, 19).Draw(t, "prefill") == 7,
		DirectPath: rapid.SampledFrom([]DirectPath{
			ConditionalAggregation, NativeAdmission, Unified, DeltaTransfer,
		}).Draw(t, "path"),
		Params:         p,
		TokensPerBlock: 24,
	}
	cfg.Params.MaxAppendTokens = rapid.IntRange(50, 400).Draw(t, "τ")
	cfg.Params.ReserveGuess = rapid.IntRange(0, 200).Draw(t, "guess")
	return &machine{
		l: NewLedger(cfg), cfg: cfg, follow: newReplica(), now: time.Unix(1000, 0),
		attempt: map[string]string{}, asked: map[string]askedBefore{},
		chains: map[SessionKey][]block.Hash{}, next: 1, use: map[block.Hash]int{},
	}
}

func (m *machine) fresh(n int) []block.Hash {
	hs := make([]block.Hash, n)
	for i := range hs {
		m.next++
		hs[i] = m.next
	}
	return hs
}

// question draws the next turn of some session: usually its last prompt plus a
// few blocks, sometimes a fork, a reset to the boilerplate, or another's prompt.
func (m *machine) question(t *rapid.T) Question {
	s := SessionKey(rapid.SampledFrom([]string{"", "a", "b", "c", "d", "a1", "a2"}).Draw(t, "session"))
	base := m.chains[s]
	switch rapid.SampledFrom([]string{"grow", "grow", "grow", "fork", "reset", "copy", "again"}).Draw(t, "how") {
	case "fork":
		base = base[:rapid.IntRange(0, len(base)).Draw(t, "lcp")]
	case "reset":
		base = base[:min(len(base), 2)]
	case "copy":
		base = m.chains[SessionKey(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "other"))]
	}
	chain := append(slices.Clip(base), m.fresh(rapid.IntRange(0, 25).Draw(t, "more"))...)
	m.chains[s] = chain
	m.n++
	q := Question{
		Attempt: fmt.Sprintf("%032x", m.n),
		Request: Request{
			Session: s, Lineage: s,
			Turn:         rapid.IntRange(0, 2).Draw(t, "turn"),
			InputTokens:  rapid.IntRange(0, 900).Draw(t, "input"),
			AppendTokens: rapid.IntRange(0, 500).Draw(t, "append"),
			OutputTokens: rapid.IntRange(0, 300).Draw(t, "output"),
		},
		Blocks:                chain,
		PrefillUncachedTokens: rapid.IntRange(0, 500).Draw(t, "uncached"),
	}
	if s == "a1" || s == "a2" {
		q.Lineage = "a"
	}
	return q
}

// touch notes a use of the resident part of a chain.
func (m *machine) touch(chain []block.Hash) {
	m.tick++
	for _, h := range chain {
		if m.l.blocks[h] != nil {
			m.use[h] = m.tick
		}
	}
}

func (m *machine) admit(t *rapid.T) {
	q := m.question(t)
	o, want := ask(m.l, q, m.now)
	v := m.l.Admit(q, m.now)
	if err := o.disagrees(v, want); err != nil {
		t.Fatal(err)
	}
	m.asked[q.Attempt] = askedBefore{q, v}
	if !v.CanAdmit {
		if v.Mode != ModeNone || v.Lease != (Lease{}) {
			t.Fatalf("a refusal carries a mode or a lease: %+v", v)
		}
		return
	}
	m.leases = append(m.leases, v.Lease)
	m.attempt[v.Lease.ID] = q.Attempt
	m.afterAdmission(t)
}

// afterAdmission is the second half of Inv1.
func (m *machine) afterAdmission(t *rapid.T) {
	g := m.l.Gauges(m.now)
	rho := m.cfg.CapacityTokens * m.cfg.Params.HighWaterPercent / 100
	if m.cfg.Params.Used == UsedBusy && g.Locked+g.Protected+g.Reserved > rho {
		t.Fatalf("Inv1: locked %d + protected %d + reserved %d > ρK %d", g.Locked, g.Protected, g.Reserved, rho)
	}
	if m.cfg.Params.Used == UsedEverything && g.Used+g.Reserved > rho {
		t.Fatalf("Inv1 (Paper): used %d + reserved %d > ρK %d", g.Used, g.Reserved, rho)
	}
}

// whole plays a turn from question to end, as most turns go: the generated text
// is mostly kept by the template, and the next prompt extends this one.
func (m *machine) whole(t *rapid.T) {
	was := len(m.leases)
	m.admit(t)
	if len(m.leases) == was {
		return
	}
	lease := m.leases[was]
	m.leases = m.leases[:was]
	attempt := m.attempt[lease.ID]
	if _, ok := m.l.Begin(lease.ID, attempt, m.now); !ok {
		t.Fatal("a fresh lease was refused")
	}
	m.check(t)
	blocks := m.l.turns[attempt].q.Blocks
	m.touch(blocks)
	e, _ := m.l.Expected(attempt)
	m.l.End(attempt, Usage{
		PromptTokens:     e.Input,
		CachedTokens:     e.Resident + rapid.SampledFrom([]int{0, 30, 300}).Draw(t, "more cached"),
		CompletionTokens: rapid.IntRange(0, 300).Draw(t, "answer"),
	}, OutcomeOK, m.now)
	m.drain(t)
	m.touch(blocks)
}

func (m *machine) askAgain(t *rapid.T) {
	if len(m.asked) == 0 {
		t.Skip("nothing asked yet")
	}
	attempt := fmt.Sprintf("%032x", rapid.IntRange(1, m.n).Draw(t, "attempt"))
	before, ok := m.asked[attempt]
	if !ok || m.l.turns[attempt] == nil {
		t.Skip("forgotten by now")
	}
	g := m.l.Gauges(m.now)
	if v := m.l.Admit(before.q, m.now); v != before.v {
		t.Fatalf("the same attempt got %+v, then %+v", before.v, v)
	}
	if again := m.l.Gauges(m.now); again != g {
		t.Fatalf("asking again changed %+v into %+v", g, again)
	}
}

func (m *machine) begin(t *rapid.T) {
	if len(m.leases) == 0 {
		t.Skip("no lease")
	}
	i := rapid.IntRange(0, len(m.leases)-1).Draw(t, "lease")
	lease := m.leases[i]
	m.leases = append(m.leases[:i], m.leases[i+1:]...)
	attempt := m.attempt[lease.ID]
	if _, ok := m.l.Begin(lease.ID, "another", m.now); ok {
		t.Fatal("a lease was taken by an attempt that it does not name")
	}
	alive := m.l.leases[lease.ID] != nil
	reason, ok := m.l.Begin(lease.ID, attempt, m.now)
	if ok != alive || (!ok && reason != ReasonLeaseExpired) {
		t.Fatalf("Begin = %q, %v for a lease that is alive: %v", reason, ok, alive)
	}
	if ok {
		m.running = append(m.running, attempt)
		m.drain(t)
		m.touch(m.l.turns[attempt].q.Blocks)
	}
	if _, again := m.l.Begin(lease.ID, attempt, m.now); again {
		t.Fatal("a lease was presented twice")
	}
}

func (m *machine) unadmitted(t *rapid.T) {
	q := m.question(t)
	fits := m.l.Fits(q, m.now)
	m.l.BeginUnadmitted(q, Fallback, m.now)
	tn := m.l.turns[q.Attempt]
	want := tn.plan.missing + tn.plan.reserve
	if fits && tn.tokens != want && tn.plan.input+tn.plan.reserve <= m.cfg.CapacityTokens {
		t.Fatalf("Fits said yes, yet only %d of %d tokens were allocated", tn.tokens, want)
	}
	m.running = append(m.running, q.Attempt)
	m.drain(t)
	m.touch(q.Blocks)
}

func (m *machine) end(t *rapid.T) {
	if len(m.running) == 0 {
		t.Skip("nothing runs")
	}
	i := rapid.IntRange(0, len(m.running)-1).Draw(t, "turn")
	attempt := m.running[i]
	m.running = append(m.running[:i], m.running[i+1:]...)
	e, ok := m.l.Expected(attempt)
	if !ok {
		t.Fatalf("running turn %s is unknown", attempt)
	}
	u := Usage{
		PromptTokens:     max(0, e.Input+rapid.IntRange(-40, 40).Draw(t, "error")),
		CachedTokens:     rapid.SampledFrom([]int{0, e.Resident / 2, e.Resident, e.Resident + 100}).Draw(t, "cached"),
		CompletionTokens: rapid.IntRange(0, 300).Draw(t, "answer"),
	}
	o := rapid.SampledFrom([]Outcome{OutcomeOK, OutcomeOK, OutcomeOK, OutcomeError, OutcomeCancelled}).Draw(t, "outcome")
	blocks := m.l.turns[attempt].q.Blocks
	m.l.End(attempt, u, o, m.now)
	if turns := countTurns(m.drain(t)); turns != 1 {
		t.Fatalf("End made %d turn changes, want 1", turns)
	}
	if o == OutcomeOK {
		m.touch(blocks)
	}
	g := m.l.Gauges(m.now)
	m.l.End(attempt, u, OutcomeOK, m.now)
	if again := m.l.Gauges(m.now); again != g || countTurns(m.drain(t)) != 0 {
		t.Fatalf("the second End changed %+v into %+v", g, again)
	}
	m.ended = append(m.ended, attempt)
}

func countTurns(cs []Change) (n int) {
	for _, c := range cs {
		if c.Kind == ChangeTurn {
			n++
		}
	}
	return n
}

// drain gives the follower what changed.
func (m *machine) drain(t *rapid.T) []Change {
	cs := m.l.Changes()
	if err := m.follow.apply(cs); err != nil {
		t.Fatal(err)
	}
	for _, c := range cs {
		if c.Kind == ChangeEvict {
			for _, h := range c.Blocks {
				m.evicted = max(m.evicted, m.use[h])
				delete(m.use, h)
			}
		}
	}
	return cs
}

func (m *machine) check(t *rapid.T) {
	if err := check(m.l); err != nil {
		t.Fatal(err)
	}
	m.drain(t)
	if err := m.follow.agrees(m.l); err != nil {
		t.Fatal(err)
	}
	for _, n := range m.l.leaves {
		if !n.tail && m.use[n.hash] < m.evicted {
			t.Fatalf("block %x, last used at %d, survived one used at %d: not LRU", n.hash, m.use[n.hash], m.evicted)
		}
	}
	m.evicted = 0
}

// restart replaces the ledger by one restored from its snapshot, as a sidecar
// that was killed does: what ran or was leased is gone, residency is not.
func (m *machine) restart(t *rapid.T) {
	if rapid.IntRange(0, 4).Draw(t, "rarely") != 0 {
		return
	}
	snap := m.l.Snapshot()
	l := NewLedger(m.l.cfg)
	if err := l.Restore(snap); err != nil {
		t.Fatal(err)
	}
	if len(l.Changes()) != 0 {
		t.Fatal("Restore made changes: followers would apply them twice")
	}
	if len(l.blocks) != len(m.l.blocks) {
		t.Fatalf("restored %d blocks of %d", len(l.blocks), len(m.l.blocks))
	}
	for h, n := range m.l.blocks {
		if got := l.blocks[h]; got == nil || got.owner != n.owner || got.cum != n.cum || got.depth != n.depth {
			t.Fatalf("block %x came back as %+v, was %+v", h, got, n)
		}
	}
	quiet := len(m.l.turns) == 0 || (len(m.l.leases) == 0 && m.l.active == 0)
	if quiet && len(l.sessions) == len(m.l.sessions) {
		if diff := cmp.Diff(snap, l.Snapshot()); diff != "" {
			t.Fatalf("snapshot of the restored ledger (-was +is):\n%s", diff)
		}
	}
	m.l, m.running, m.leases = l, nil, nil
	m.asked = map[string]askedBefore{}
	m.follow = newReplica()
	for _, s := range l.Snapshot().Sessions {
		m.follow.sessions[s.Key] = s
	}
	for _, o := range l.Snapshot().Blocks {
		for _, h := range o.Blocks {
			m.follow.blocks[h] = o.Owner
		}
	}
}

func (m *machine) actions() map[string]func(*rapid.T) {
	return map[string]func(*rapid.T){
		"admit":      m.admit,
		"whole":      m.whole,
		"whole2":     m.whole,
		"whole3":     m.whole,
		"ask again":  m.askAgain,
		"begin":      m.begin,
		"begin2":     m.begin,
		"unadmitted": m.unadmitted,
		"end":        m.end,
		"end2":       m.end,
		"release": func(t *rapid.T) {
			if len(m.leases) > 0 {
				m.l.Release(rapid.SampledFrom(m.leases).Draw(t, "lease").ID, m.now)
			}
			m.l.Release("unknown", m.now)
		},
		"forget": func(t *rapid.T) {
			m.l.Forget(SessionKey(rapid.SampledFrom([]string{"", "a", "b", "a1"}).Draw(t, "who")), m.now)
		},
		"clear": func(t *rapid.T) {
			if rapid.IntRange(0, 9).Draw(t, "rarely") == 0 {
				m.l.Clear(m.now)
			}
		},
		"restart": m.restart,
		"wait": func(t *rapid.T) {
			m.now = m.now.Add(time.Duration(rapid.IntRange(0, 100).Draw(t, "seconds")) * time.Second)
			if next := m.l.Tick(m.now); next <= 0 {
				t.Fatalf("Tick says to come back in %v", next)
			}
		},
		"": m.check,
	}
}

// Inv1: used ≤ K_d at every instant, and after every admission Corrected
// locked + protected + reserved ≤ ρK, Paper used ≤ ρK; in every interleaving.
// Premise: the capacity check itself (a mutant without it fails at once).
func TestInv1Corrected(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { t.Repeat(newMachine(t, Corrected()).actions()) })
}

func TestInv1Paper(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) { t.Repeat(newMachine(t, Paper()).actions()) })
}

// Each ruling the ledger reads, switched alone, keeps the books.
func TestInv1Ablations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Corrected()
		p.Need = rapid.SampledFrom([]NeedRule{NeedWholeInput, NeedMissing}).Draw(t, "Need")
		p.Used = rapid.SampledFrom([]UsedRule{UsedEverything, UsedBusy}).Draw(t, "Used")
		p.Reserve = rapid.SampledFrom([]ReserveRule{ReserveNothing, ReserveLearnt}).Draw(t, "Reserve")
		p.LargeAppend = rapid.SampledFrom([]LargeAppendRule{LargeAppendReject, LargeAppendInPlace}).Draw(t, "Large")
		p.IdleLock = rapid.SampledFrom([]IdleLockRule{IdleLockUntilReleased, IdleLockRunning}).Draw(t, "IdleLock")
		p.AppendBy = rapid.SampledFrom([]AppendByRule{AppendByRouter, AppendByWorker}).Draw(t, "AppendBy")
		p.Lease = rapid.SampledFrom([]LeaseRule{LeasePromise, LeaseReserves}).Draw(t, "Lease")
		p.ProtectIdle = time.Duration(rapid.IntRange(0, 100).Draw(t, "protect")) * time.Second
		t.Repeat(newMachine(t, p).actions())
	})
}
