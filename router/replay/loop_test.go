package replay

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/trace"
)

// The closed loop, whatever the workload and whatever the server does: every
// claimed turn is reported once, a session's turns are sent one after the other
// and in order, no more sessions run than allowed, the budget is kept to the
// turn, and each prompt begins with the bytes of the one before.
func TestClosedLoop(outer *testing.T) {
	f := newFake(outer)
	rapid.Check(outer, func(t *rapid.T) {
		ss := drawSessions(t)
		fails := rapid.IntRange(0, 3).Draw(t, "fails of ten")
		f.mu.Lock()
		f.seen = nil
		f.mu.Unlock()
		f.answer = func(w http.ResponseWriter, _ *http.Request, n int) {
			if n%10 < fails {
				chunk(w, `{"error":{"message":"no"}}`)
				return
			}
			f.stream(w, 1+n%2, "w;")
		}
		o := f.options()
		o.TimeScale = 1e7
		o.Concurrency = rapid.IntRange(1, 4).Draw(t, "concurrency")
		total := 0
		for _, s := range ss {
			total += len(s.Turns)
		}
		o.Turns = rapid.IntRange(0, total+2).Draw(t, "turns")
		res, err := Run(outer.Context(), o, NewRecorded(ss))
		if err != nil {
			if strings.Contains(err.Error(), "all failed") {
				return
			}
			t.Fatal(err)
		}
		want := total
		if o.Turns > 0 {
			want = min(total, o.Turns)
		}
		if len(res.Turns) != want || len(f.requests()) != want {
			t.Fatalf("%d turns reported, %d sent, want %d", len(res.Turns), len(f.requests()), want)
		}
		if n := atOnce(res); n > o.Concurrency {
			t.Fatalf("%d turns at once, allowed %d", n, o.Concurrency)
		}
		checkOrder(t, res, f.requests())
	})
}

// atOnce is the largest number of turns under way at one time, as the client
// sees it: a server may learn of an end later.
func atOnce(res *Result) int {
	most := 0
	for _, a := range res.Turns {
		n := 0
		for _, b := range res.Turns {
			if b.At <= a.At && a.At < b.At+b.E2E {
				n++
			}
		}
		most = max(most, n)
	}
	return most
}

func drawSessions(t *rapid.T) []trace.Session {
	var ss []trace.Session
	for i := range rapid.IntRange(1, 5).Draw(t, "sessions") {
		s := trace.Session{ID: fmt.Sprintf("s%d", i)}
		for j := range rapid.IntRange(1, 4).Draw(t, "length") {
			s.Turns = append(s.Turns, trace.Record{Session: s.ID, Turn: j, OutputTokens: 1,
				AppendTokens: rapid.IntRange(1, 20).Draw(t, "append"),
				Think:        time.Duration(rapid.IntRange(0, 3).Draw(t, "think")) * time.Second})
		}
		ss = append(ss, s)
	}
	return ss
}

func checkOrder(t *rapid.T, res *Result, sent []request) {
	index := make(map[string]int)
	last := make(map[string]request)
	for _, r := range sent {
		if before, ok := last[r.Session]; ok && !strings.HasPrefix(r.Raw, strings.TrimSuffix(before.Raw, "]}")) {
			t.Fatalf("a turn of %s does not extend the one before", r.Session)
		}
		last[r.Session] = r
	}
	end := make(map[string]time.Duration)
	turns := slices.Clone(res.Turns)
	slices.SortStableFunc(turns, func(a, b Turn) int { return int(a.At - b.At) })
	for _, turn := range turns {
		if turn.Index != index[turn.Session] {
			t.Fatalf("turn %d of %s was sent as its %dth", turn.Index, turn.Session, index[turn.Session])
		}
		if turn.At < end[turn.Session] {
			t.Fatalf("turn %d of %s was sent before the answer before it was whole", turn.Index, turn.Session)
		}
		index[turn.Session]++
		end[turn.Session] = turn.At + turn.E2E
	}
	if res.Sessions != len(index) {
		t.Fatalf("%d sessions, want %d", res.Sessions, len(index))
	}
}

// A history whose turn failed goes on without an answer, and a context that was
// reset does not come back.
func TestHistoriesOfRealTurns(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, _ *http.Request, n int) {
		if n == 1 {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		f.stream(w, 1, fmt.Sprintf("answer %d;", n))
	}
	s := sessions(1, 5)
	s[0].Turns[3].Reset = true
	for i := range s[0].Turns {
		s[0].Turns[i].SharedTokens, s[0].Turns[i].SharedSpace = 3, 9
	}
	o := f.options()
	o.Concurrency = 1
	mustRun(t, o, NewRecorded(s))
	want := []string{
		"system user",
		"system user assistant user",
		"system user assistant user user",
		"system user",
		"system user assistant user",
	}
	for i, r := range f.requests() {
		if got := contents(r); got != want[i] {
			t.Errorf("turn %d sends %s, want %s", i, got, want[i])
		}
	}
	last := f.requests()[4].Messages
	if last[2].Content != "answer 3;" {
		t.Errorf("after the reset the answer re-sent is %q", last[2].Content)
	}
}

func TestRecordedHandsOutEachSessionOnce(t *testing.T) {
	r := NewRecorded(sessions(3, 1))
	var got []string
	for s, ok := r.Next(); ok; s, ok = r.Next() {
		got = append(got, s.ID)
	}
	if !slices.Equal(got, []string{"s0", "s1", "s2"}) {
		t.Errorf("sessions %v", got)
	}
	if _, ok := r.Next(); ok {
		t.Error("a session after the last")
	}
}

func TestGeneratedNeverEnds(t *testing.T) {
	g := NewGenerated(smallGenerator())
	seen := make(map[string]bool)
	for range 50 {
		s, ok := g.Next()
		if !ok || seen[s.ID] || len(s.Turns) == 0 {
			t.Fatalf("session %q with %d turns (%v)", s.ID, len(s.Turns), ok)
		}
		seen[s.ID] = true
	}
}

// Turns that are claimed while the budget runs out are still finished and
// counted: the last turn may start while others are under way.
func TestTurnsUnderWayAtTheEndAreCounted(t *testing.T) {
	f := newFake(t)
	var once sync.Once
	release := make(chan struct{})
	f.answer = func(w http.ResponseWriter, _ *http.Request, n int) {
		switch n {
		case 0:
			<-release
		case 2:
			once.Do(func() { close(release) })
		}
		f.stream(w, 1, "ok;")
	}
	o := f.options()
	o.Turns = 3
	res := mustRun(t, o, NewRecorded(sessions(2, 5)))
	if len(res.Turns) != 3 {
		t.Errorf("%d turns, want the 3 that were sent", len(res.Turns))
	}
	for _, turn := range res.Turns {
		if !turn.OK() {
			t.Errorf("%+v", turn.Failure)
		}
	}
}

// The error of a run stops the other sessions at once, also sleeping ones.
func TestAHopelessRunDoesNotWaitForSleepers(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, _ *http.Request, _ int) { http.Error(w, "no", http.StatusBadGateway) }
	ss := sessions(9, 40)
	ss[8].Turns[0].Think = 10000 * time.Hour
	o := f.options()
	o.Concurrency = 9
	start := time.Now()
	if _, err := Run(t.Context(), o, NewRecorded(ss)); err == nil {
		t.Fatal("no error")
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
}
