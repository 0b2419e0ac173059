package replay

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/trace"
)

func mustRun(t *testing.T, o Options, src Source) *Result {
	t.Helper()
	res, err := Run(t.Context(), o, src)
	if err != nil {
		t.Fatalf("Run: %v", err)
	}
	return res
}

func TestEveryTurnOfEverySessionIsSentInOrderWithTheAnswersReceived(t *testing.T) {
	f := newFake(t)
	res := mustRun(t, f.options(), NewRecorded(sessions(3, 4)))

	if len(res.Turns) != 12 || res.Sessions != 3 {
		t.Fatalf("%d turns of %d sessions, want 12 of 3", len(res.Turns), res.Sessions)
	}
	perSession := make(map[string]int)
	for _, r := range f.requests() {
		i := perSession[r.Session]
		perSession[r.Session]++
		want := strings.TrimSpace("user" + strings.Repeat(" assistant user", i))
		if got := contents(r); got != want {
			t.Errorf("turn %d of %s: %s, want %s", i, r.Session, got, want)
		}
		for _, m := range r.Messages {
			if m.Role == "assistant" && !strings.Contains(m.Content, "answer ") {
				t.Errorf("turn %d of %s re-sends %q, not the answer received", i, r.Session, m.Content)
			}
		}
		if r.Model != "m1" || r.Tokens != 2 {
			t.Errorf("model %q and %d tokens, want m1 and 2", r.Model, r.Tokens)
		}
	}
}

func TestEachTurnExtendsThePreviousBytes(t *testing.T) {
	f := newFake(t)
	mustRun(t, f.options(), NewRecorded(sessions(1, 3)))
	seen := f.requests()
	for i := 1; i < len(seen); i++ {
		if !strings.HasPrefix(seen[i].Raw, strings.TrimSuffix(seen[i-1].Raw, "]}")) {
			t.Errorf("turn %d does not begin with the bytes of turn %d", i, i-1)
		}
	}
}

func TestATurnIsSentAfterTheAnswerAndTheScaledThinkTime(t *testing.T) {
	f := newFake(t)
	f.pace = 5 * time.Millisecond
	o := f.options()
	o.TimeScale = 100 // 1 s of thought is 10 ms
	res := mustRun(t, o, NewRecorded(sessions(1, 3)))
	for i := 1; i < len(res.Turns); i++ {
		gap := res.Turns[i].At - res.Turns[i-1].At - res.Turns[i-1].E2E
		if gap < 10*time.Millisecond {
			t.Errorf("turn %d was sent %v after the answer, want at least 10 ms", i, gap)
		}
	}
}

// Stopping at [DONE] would look like a hang-up to the server, and cost a
// connection a turn.
func TestAnswersAreReadToTheEndAndConnectionsServeTheNextTurn(t *testing.T) {
	f := newFake(t)
	var hungUp atomic.Int64
	f.answer = func(w http.ResponseWriter, r *http.Request, _ int) {
		f.stream(w, 1, "ok;")
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			hungUp.Add(1)
		case <-time.After(20 * time.Millisecond): // after [DONE], before the end of the body
		}
	}
	o := f.options()
	o.Concurrency = 1
	res := mustRun(t, o, NewRecorded(sessions(1, 4)))
	if hungUp.Load() > 0 || f.conns.Load() > 1 {
		t.Errorf("%d hang-ups, %d connections for 4 turns, want none and one", hungUp.Load(), f.conns.Load())
	}
	least := res.Turns[0].E2E // on a busy machine some are slow
	for _, turn := range res.Turns {
		least = min(least, turn.E2E)
	}
	if least > 15*time.Millisecond {
		t.Errorf("E2E %v: measured to the end of the body, not to [DONE]", least)
	}
}

func TestConcurrencyIsTheNumberOfSessionsInFlight(t *testing.T) {
	f := newFake(t)
	f.pace = 2 * time.Millisecond
	o := f.options()
	o.Concurrency = 3
	res := mustRun(t, o, NewRecorded(sessions(9, 2)))
	if n := atOnce(res); n > 3 || n < 2 {
		t.Errorf("%d turns at once, want at most 3, and some side by side", n)
	}
}

func TestTheTurnBudgetEndsTheRunAtOnce(t *testing.T) {
	f := newFake(t)
	o := f.options()
	o.Turns = 5
	ss := sessions(4, 3)
	for i := range ss {
		for j := range ss[i].Turns {
			ss[i].Turns[j].Think = time.Duration(j) * time.Millisecond
		}
	}
	ss[1].Turns[1].Think = 100 * time.Hour // asleep when the budget is used up
	start := time.Now()
	res := mustRun(t, o, NewRecorded(ss))
	if len(res.Turns) != 5 || len(f.requests()) != 5 {
		t.Errorf("%d turns, %d requests, want 5", len(res.Turns), len(f.requests()))
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("the run took %v: a sleeping session was waited for", took)
	}
}

func TestMeasures(t *testing.T) {
	f := newFake(t)
	f.pace = 4 * time.Millisecond
	f.mode = func(n int) string { return []string{"seed", "direct", "bogus"}[n] }
	o := f.options()
	o.Target.APIKey, o.Concurrency = "k", 1
	ss := sessions(1, 3)
	for i := range ss[0].Turns {
		ss[0].Turns[i].OutputTokens = 4
	}
	res := mustRun(t, o, NewRecorded(ss))
	var modes []string
	for _, turn := range res.Turns {
		modes = append(modes, turn.Mode)
		switch {
		case turn.TTFT < 4*time.Millisecond || turn.E2E < turn.TTFT || turn.E2E < 16*time.Millisecond:
			t.Errorf("TTFT %v, E2E %v for four chunks 4 ms apart", turn.TTFT, turn.E2E)
		case turn.ITL() != (turn.E2E-turn.TTFT)/3 || turn.Chunks != 4:
			t.Errorf("ITL %v over %d chunks", turn.ITL(), turn.Chunks)
		case turn.PromptTokens != 100 || turn.CachedTokens != 60 || turn.CompletionTokens != 4 || turn.Finish != "length":
			t.Errorf("usage %+v", turn)
		case turn.Worker != "decode-0" || turn.Attempts != 1:
			t.Errorf("worker %q, attempts %d", turn.Worker, turn.Attempts)
		}
	}
	if diff := cmp.Diff([]string{"seed", "direct", ModeUnknown}, modes); diff != "" {
		t.Error(diff)
	}
	if got := f.requests()[0].Auth; got != "Bearer k" {
		t.Errorf("Authorization %q", got)
	}
}

// Whatever is not a whole answer is a failure, is counted, and does not stop
// the session.
func TestFailures(t *testing.T) {
	hijack := func(w http.ResponseWriter) {
		c, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			c.Close()
		}
	}
	cases := map[string]struct {
		answer  func(w http.ResponseWriter)
		kind    string
		message string
	}{
		"a refusal in OpenAI's shape": {func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusServiceUnavailable)
			w.Write([]byte(`{"error":{"message":"no worker","code":503}}`))
		}, "status 503", "no worker"},
		"a refusal in words": {func(w http.ResponseWriter) {
			http.Error(w, "too many", http.StatusTooManyRequests)
		}, "status 429", "too many"},
		"an error inside the stream": {func(w http.ResponseWriter) {
			chunk(w, `{"choices":[{"index":0,"delta":{"content":"x"}}]}`)
			chunk(w, `{"error":{"message":"worker died","code":502}}`)
			chunk(w, `[DONE]`)
		}, "in-band", "worker died"},
		"a stream without an end": {func(w http.ResponseWriter) {
			chunk(w, `{"choices":[{"index":0,"delta":{"content":"x"}}]}`)
		}, "stream", "the stream ended before [DONE]"},
		"a chunk that is no JSON": {func(w http.ResponseWriter) { chunk(w, `{"choi`) },
			"stream", "a chunk is not JSON"},
		"a connection that breaks before the answer": {hijack, "connection", "EOF"},
		"a connection that breaks inside the answer": {func(w http.ResponseWriter) {
			chunk(w, `{"choices":[{"index":0,"delta":{"content":"x"}}]}`)
			hijack(w)
		}, "stream", "EOF"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.answer = func(w http.ResponseWriter, _ *http.Request, n int) {
				if n == 1 {
					tc.answer(w)
					return
				}
				f.stream(w, 1, "ok;")
			}
			o := f.options()
			o.Concurrency = 1
			res := mustRun(t, o, NewRecorded(sessions(1, 3)))
			if len(res.Turns) != 3 {
				t.Fatalf("%d turns, want 3: a failure is not the end of a session", len(res.Turns))
			}
			got := res.Turns[1].Failure
			if got.Kind != tc.kind || !strings.Contains(got.Message, tc.message) {
				t.Errorf("failure %q: %q, want %q: %q", got.Kind, got.Message, tc.kind, tc.message)
			}
			if s := Summarize(res, Labels{TimeScale: 1}); s.Errors != 1 || s.Requests != 3 {
				t.Errorf("%d errors of %d requests, want 1 of 3", s.Errors, s.Requests)
			}
			// The turn that failed has no answer to re-send.
			if got := contents(f.requests()[2]); got != "user assistant user user" {
				t.Errorf("the turn after it sends %s", got)
			}
		})
	}
}

func TestATurnThatTakesTooLongIsAFailure(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, r *http.Request, n int) {
		if n == 0 {
			<-r.Context().Done()
			return
		}
		f.stream(w, 1, "ok;")
	}
	o := f.options()
	o.Timeout = 50 * time.Millisecond
	res := mustRun(t, o, NewRecorded(sessions(1, 2)))
	if got := res.Turns[0].Failure.Kind; got != "timeout" {
		t.Errorf("failure %q, want timeout", got)
	}
	if !res.Turns[1].OK() {
		t.Errorf("the next turn: %+v", res.Turns[1].Failure)
	}
}

func TestAnInterruptedRunReportsWhatItSaw(t *testing.T) {
	f := newFake(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.answer = func(w http.ResponseWriter, r *http.Request, n int) {
		if n == 2 {
			cancel()
			<-r.Context().Done() // the hang-up reaches the server
			return
		}
		f.stream(w, 1, "ok;")
	}
	o := f.options()
	o.Concurrency = 1
	res, err := Run(ctx, o, NewRecorded(sessions(1, 5)))
	if err != nil {
		t.Fatal(err)
	}
	if !res.Interrupted || len(res.Turns) != 2 {
		t.Errorf("interrupted %v with %d turns, want the 2 that finished", res.Interrupted, len(res.Turns))
	}
	if s := Summarize(res, Labels{TimeScale: 1}); s.Errors != 0 || !s.Interrupted {
		t.Errorf("%d errors: our own hang-up is no failure of the server", s.Errors)
	}
}

func TestARunInWhichNothingWorksEnds(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, _ *http.Request, _ int) {
		http.Error(w, "broken", http.StatusInternalServerError)
	}
	o := f.options()
	o.Concurrency = 8
	_, err := Run(t.Context(), o, NewRecorded(sessions(8, 50)))
	if err == nil || !strings.Contains(err.Error(), "turns all failed, the last with status 500: broken") {
		t.Errorf("error = %v", err)
	}
}

func TestProgressCountsEveryTurn(t *testing.T) {
	f := newFake(t)
	var last atomic.Int64
	o := f.options()
	o.Progress = func(done, _ int) {
		for {
			old := last.Load()
			if int64(done) <= old || last.CompareAndSwap(old, int64(done)) {
				return
			}
		}
	}
	mustRun(t, o, NewRecorded(sessions(3, 3)))
	if last.Load() != 9 {
		t.Errorf("progress ended at %d, want 9", last.Load())
	}
}

func TestBadOptionsAreOneSentence(t *testing.T) {
	f := newFake(t)
	cases := map[string]struct {
		change func(*Options)
		want   string
	}{
		"no sessions in flight": {func(o *Options) { o.Concurrency = 0 },
			"concurrency 0: want at least 1 session in flight"},
		"a negative budget":      {func(o *Options) { o.Turns = -1 }, "turns -1: want a number of turns, or 0 for all"},
		"time that stands still": {func(o *Options) { o.TimeScale = 0 }, "time scale 0: want at least 0.01"},
		"no host": {func(o *Options) { o.Target.URL = "localhost" },
			`url "localhost": want http(s)://host:port`},
		"nobody listens": {func(o *Options) { o.Target.URL = "http://127.0.0.1:1" },
			"no answer from http://127.0.0.1:1/v1"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			o := f.options()
			tc.change(&o)
			_, err := Run(t.Context(), o, NewRecorded(sessions(1, 1)))
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) {
				t.Errorf("error = %v, want %s", err, tc.want)
			}
		})
	}
}

func TestTargetURLs(t *testing.T) {
	cases := map[string]string{
		"http://h:1":                        "http://h:1/v1",
		"http://h:1/":                       "http://h:1/v1",
		"http://h:1/v1":                     "http://h:1/v1",
		"http://h:1/v1/chat/completions":    "http://h:1/v1",
		"https://h/pool/v1/?x=1#f":          "https://h/pool/v1",
		"https://h/pool/a/chat/completions": "https://h/pool/a/v1",
	}
	for in, want := range cases {
		t.Run(in, func(t *testing.T) {
			if got, err := (&Target{URL: in}).base(); err != nil || got != want {
				t.Errorf("base = %q, %v, want %q", got, err, want)
			}
		})
	}
}

func TestSessionHeader(t *testing.T) {
	cases := map[string]struct {
		header string
		want   http.Header
	}{
		"the default":           {"", http.Header{"X-Session-Id": {"s"}}},
		"one of the user's own": {"x-conversation", http.Header{"X-Conversation": {"s"}}},
		"none":                  {"-", http.Header{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			target := Target{URL: "http://h", SessionHeader: tc.header}
			req, err := target.request(t.Context(), ask{session: "s"})
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range []string{"Content-Type", "Accept"} {
				req.Header.Del(k)
			}
			if diff := cmp.Diff(tc.want, req.Header); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestGeneratedSessionsAreTheSameAtAnyConcurrency(t *testing.T) {
	first := func(concurrency int) map[string]string {
		f := newFake(t)
		o := f.options()
		o.Concurrency, o.Turns, o.TimeScale = concurrency, 12, 1e6
		mustRun(t, o, NewGenerated(smallGenerator()))
		out := make(map[string]string)
		for _, r := range f.requests() {
			if _, known := out[r.Session]; !known {
				out[r.Session] = r.Raw
			}
		}
		return out
	}
	one, four := first(1), first(4)
	if len(one) == 0 || len(four) < 4 {
		t.Fatalf("%d and %d sessions", len(one), len(four))
	}
	for session, raw := range one {
		if other, ok := four[session]; ok && other != raw {
			t.Errorf("%s begins otherwise with four in flight", session)
		}
	}
	if four["t-0001"] == "" || four["t-0001"] != one["t-0001"] {
		t.Error("the first session is not the same")
	}
}

func smallGenerator() *trace.Generator {
	m := trace.Agent()
	flat := trace.Quantiles{P: []float64{0, 1}, V: []float64{3, 9}}
	m.Append, m.Output, m.Opening, m.Task, m.Turns, m.Idle = flat, flat, flat, flat, flat, flat
	return trace.NewGenerator(m, &counter{}, "t")
}

// counter is a source of randomness that only counts.
type counter struct{ n uint64 }

func (c *counter) Uint64() uint64 { c.n += 0x9e3779b97f4a7c15; return c.n }

func TestReadLineIsBounded(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, _ *http.Request, _ int) {
		w.Write([]byte("data: " + strings.Repeat("x", maxEventBytes)))
	}
	o := f.options()
	o.Concurrency = 1
	res := mustRun(t, o, NewRecorded(sessions(1, 1)))
	if got := res.Turns[0].Failure; got.Kind != "stream" || !strings.Contains(got.Message, "longer than 8 MiB") {
		t.Errorf("failure = %+v", got)
	}
}

func TestFailureNamesOurOwnTimeLimit(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errTooSlow)
	if got := failure(ctx, errors.New("x")).Kind; got != "timeout" {
		t.Errorf("kind %q", got)
	}
}
