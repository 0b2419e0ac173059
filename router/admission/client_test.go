package admission

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if flag.Lookup("test.fuzz").Value.String() != "" {
		os.Exit(m.Run()) // the fuzzer's own workers are still ending
	}
	goleak.VerifyTestMain(m)
}

func question() kvc.Question {
	return kvc.Question{
		Attempt: attempt,
		Request: kvc.Request{
			Session: "00000000000000aa", Lineage: "00000000000000ab", Turn: 7, Class: "interactive",
			InputTokens: 98304, AppendTokens: 713, OutputTokens: 900,
		},
		Blocks: []block.Hash{1, 2, 1 << 63}, PrefillUncachedTokens: 1611,
	}
}

// serve runs a sidecar look-alike for one test and returns its base URL.
func serve(t *testing.T, h http.Handler) (string, *Client) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL, &Client{HTTP: srv.Client(), Tokens: StaticTokens("secret")}
}

func TestAskCarriesTheQuestionAndTheVerdict(t *testing.T) {
	want := kvc.Verdict{
		CanAdmit: true, Mode: kvc.Reseed, Reason: kvc.ReasonLargeAppend, ResidentTokens: 97591, AppendTokens: 713,
		FreeTokens: 210000, Lease: kvc.Lease{ID: attempt, Tokens: 1613, TTL: 5 * time.Second},
	}
	var asked kvc.Question
	base, c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != PathAdmit || r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get(HeaderWire) != "1" {
			t.Errorf("asked with %s, headers %v", r.URL.Path, r.Header)
		}
		Handler(func(_ context.Context, q Question) (v Verdict, err error) {
			asked, err = q.Core()
			return NewVerdict(want), err
		}).ServeHTTP(w, r)
	}))
	wire, err := c.Ask(t.Context(), base, NewQuestion(question(), "uid/1", block.Chat))
	if err != nil {
		t.Fatalf("Ask: %v", err)
	}
	got, err := wire.Core()
	if err != nil {
		t.Fatalf("Core: %v", err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("the wire changed the verdict (-want +got):\n%s", d)
	}
	if d := cmp.Diff(question(), asked); d != "" {
		t.Errorf("the wire changed the question (-want +got):\n%s", d)
	}
}

// Q8: what is no answer must not look like a refusal.
func TestAskTellsRefusalFromNoAnswer(t *testing.T) {
	cases := map[string]struct {
		handler http.HandlerFunc
		status  int // of the StatusError; 0 = another error
	}{
		"500 is no answer": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, 500},
		"401 is no answer": {func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) }, 401},
		"garbage is no answer": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>")
		}, 0},
		"a connection that breaks is no answer": {func(http.ResponseWriter, *http.Request) {
			panic(http.ErrAbortHandler)
		}, 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			base, c := serve(t, tc.handler)
			_, err := c.Ask(t.Context(), base, NewQuestion(question(), "", block.Chat))
			var status *StatusError
			if err == nil || errors.As(err, &status) != (tc.status != 0) || status != nil && status.Code != tc.status {
				t.Errorf("Ask = %v, want status %d", err, tc.status)
			}
		})
	}
	t.Run("a refusal is an answer", func(t *testing.T) {
		base, c := serve(t, Handler(func(context.Context, Question) (Verdict, error) {
			return NewVerdict(kvc.Verdict{Reason: kvc.ReasonNoCapacity}), nil
		}))
		v, err := c.Ask(t.Context(), base, NewQuestion(question(), "", block.Chat))
		if err != nil || v.CanAdmit || v.Reason != "no-d-capacity" || v.Lease != nil {
			t.Errorf("Ask = %+v, %v; want a refusal with its reason and no lease", v, err)
		}
	})
}

func TestHandlerStatus(t *testing.T) {
	good, err := json.Marshal(NewQuestion(question(), "", block.Chat))
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string]struct {
		body   string
		decide error
		status int
	}{
		"a refusal or admission is 200":            {string(good), nil, 200},
		"broken JSON is 400":                       {"{", nil, 400},
		"a question that makes no sense is 400":    {string(good), &BadQuestionError{Err: errors.New("format")}, 400},
		"a worker that cannot answer yet is a 503": {string(good), errors.New("engine"), 503},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			h := Handler(func(context.Context, Question) (Verdict, error) { return Verdict{}, tc.decide })
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, PathAdmit, strings.NewReader(tc.body)))
			if w.Code != tc.status {
				t.Errorf("status = %d, want %d; body %s", w.Code, tc.status, w.Body)
			}
		})
	}
}

func TestQuestionCoreNamesTheMember(t *testing.T) {
	cases := map[string]struct {
		change func(*Question)
		member string
	}{
		"attempt":                     {func(q *Question) { q.Attempt = "x" }, "attempt"},
		"session":                     {func(q *Question) { q.Session = "raw" }, "session"},
		"lineage":                     {func(q *Question) { q.Lineage = "raw" }, "lineage"},
		"other format":                {func(q *Question) { q.Format = "kvc-b128-v2" }, "format"},
		"broken base64":               {func(q *Question) { q.Blocks = "AAA" }, "blocks"},
		"unknown route":               {func(q *Question) { q.Route = "embeddings" }, "route"},
		"negative count":              {func(q *Question) { q.AppendTokens = -1 }, "token counts"},
		"a count whose sums overflow": {func(q *Question) { q.InputTokens = 1 << 62 }, "token counts"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			q := NewQuestion(question(), "", block.Chat)
			tc.change(&q)
			if _, err := q.Core(); err == nil || !strings.Contains(err.Error(), tc.member) {
				t.Errorf("Core = %v, want an error naming %s", err, tc.member)
			}
		})
	}
}

func TestHintNeedsThe103(t *testing.T) {
	cases := map[string]struct {
		handler http.HandlerFunc
		want    bool
	}{
		"103 then 204 is a hint": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(HeaderHint, "1")
			w.WriteHeader(http.StatusEarlyHints)
			w.Header().Del(HeaderHint)
			w.WriteHeader(http.StatusNoContent)
		}, true},
		"204 alone is none: something on the way swallows 103s": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set(HeaderHint, "1")
			w.WriteHeader(http.StatusNoContent)
		}, false},
		"a foreign 103 is none": {func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusNoContent)
		}, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			base, c := serve(t, tc.handler)
			got, err := c.Hint(t.Context(), base)
			if got != tc.want || err != nil {
				t.Errorf("Hint = %t, %v; want %t", got, err, tc.want)
			}
		})
	}
}

func TestControlCalls(t *testing.T) {
	var seen []string
	base, c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		seen = append(seen, r.Method+" "+r.URL.Path+" "+string(body))
		if r.Method == http.MethodGet {
			WriteJSON(w, 200, "application/json", SidecarStatus{Worker: "w", Seq: 9})
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	ctx := t.Context()
	if err := errors.Join(
		c.Release(ctx, base, attempt), c.Forget(ctx, base, "00000000000000aa"),
		c.SetState(ctx, base, State{State: "Draining", SoftDeadlineMS: 5}),
	); err != nil {
		t.Fatal(err)
	}
	if s, err := c.Status(ctx, base); err != nil || s.Worker != "w" || s.Seq != 9 {
		t.Errorf("Status = %+v, %v", s, err)
	}
	want := []string{
		"DELETE /kvc/v1/leases/" + attempt + " ", "DELETE /kvc/v1/sessions/00000000000000aa ",
		`PUT /kvc/v1/state {"state":"Draining","soft_deadline_ms":5,"hard_deadline_ms":0}`, "GET /kvc/v1/status ",
	}
	if d := cmp.Diff(want, seen); d != "" {
		t.Errorf("requests (-want +got):\n%s", d)
	}
}

func TestTokensAcceptAllAndSendTheFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("new\n\n old \n")
	tokens, err := LoadTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	bearer := func(s string) http.Header { return http.Header{"Authorization": {s}} }
	for header, want := range map[string]bool{
		"Bearer new": true, "bearer old": true, "Bearer  old": true, "Bearer newer": false, "Bearer ": false,
		"Basic new": false, "new": false, "": false,
	} {
		if got := tokens.Accepts(bearer(header)); got != want {
			t.Errorf("Accepts(%q) = %t, want %t", header, got, want)
		}
	}
	if got := tokens.First(); got != "new" {
		t.Errorf("First = %q, want the first line", got)
	}
	write("newest\n")
	if err := tokens.Reload(); err != nil || !tokens.Accepts(bearer("Bearer newest")) || tokens.Accepts(bearer("Bearer old")) {
		t.Errorf("after a change: %v, want only the new token accepted", err)
	}
	write("\n")
	if err := tokens.Reload(); err == nil || tokens.First() != "newest" {
		t.Errorf("an emptied file: %v, First %q; want an error and the last good token", err, tokens.First())
	}
}

func TestTokensReReadOnUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := LoadTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("other"), 0o600); err != nil {
		t.Fatal(err)
	}
	stale := *tokens.cur.Load()
	stale.checked = time.Now().Add(-2 * tokenRecheck)
	tokens.cur.Store(&stale)
	if got := tokens.First(); got != "other" {
		t.Errorf("First = %q a second after the change, want the new token", got)
	}
}

func TestOpenPool(t *testing.T) {
	for name, tokens := range map[string]*Tokens{"nil": nil, "no path": StaticTokens()} {
		h := http.Header{"Authorization": {"Bearer client-key"}}
		if !tokens.Accepts(http.Header{}) {
			t.Errorf("%s: an open pool asks for a token", name)
		}
		if tokens.Authorize(h); len(h) != 0 {
			t.Errorf("%s: the client's key leaked: %v (R38)", name, h)
		}
	}
}

func TestErrorShape(t *testing.T) {
	w := httptest.NewRecorder()
	WriteError(w, http.StatusRequestEntityTooLarge, "too large")
	want := `{"error":{"message":"too large","type":"invalid_request_error","param":null,"code":413}}`
	if w.Body.String() != want || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("error = %s, want %s", w.Body, want)
	}
}

func BenchmarkVerdict(b *testing.B) {
	v := NewVerdict(kvc.Verdict{CanAdmit: true, Mode: kvc.Direct, Lease: kvc.Lease{ID: attempt, Tokens: 5}})
	b.ReportAllocs()
	for b.Loop() {
		if _, err := json.Marshal(v); err != nil {
			b.Fatal(err)
		}
	}
}
