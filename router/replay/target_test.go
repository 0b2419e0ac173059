package replay

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestRequestBodies(t *testing.T) {
	messages := []byte(`{"role":"user","content":"a \"b\""}`)
	cases := map[string]struct {
		target Target
		tokens int
		want   string
	}{
		"an answer of the recorded length": {Target{URL: "http://h", Model: "m"}, 7,
			`{"model":"m","stream":true,"stream_options":{"include_usage":true},"temperature":0,"max_tokens":7,` +
				`"ignore_eos":true,"messages":[{"role":"user","content":"a \"b\""}]}`},
		"an answer of at least one token, and no more than the server knows": {
			Target{URL: "http://h", Model: `x/"y"`, KeepEOS: true}, 0,
			`{"model":"x/\"y\"","stream":true,"stream_options":{"include_usage":true},"temperature":0,"max_tokens":1,` +
				`"messages":[{"role":"user","content":"a \"b\""}]}`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			req, err := tc.target.request(t.Context(), ask{session: "s", messages: messages, tokens: tc.tokens})
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(req.Body)
			if err != nil {
				t.Fatal(err)
			}
			if string(body) != tc.want || !json.Valid(body) {
				t.Errorf("body\n%s\nwant\n%s", body, tc.want)
			}
			if req.ContentLength != int64(len(body)) {
				t.Errorf("Content-Length %d of %d bytes", req.ContentLength, len(body))
			}
			again, err := req.GetBody()
			if err != nil {
				t.Fatal(err)
			}
			if second, err := io.ReadAll(again); err != nil || string(second) != tc.want {
				t.Errorf("a repeated body is %q (%v)", second, err)
			}
		})
	}
}

// models is a server whose model list is what the test says.
func models(t *testing.T, status int, list string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, list)
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestTheModelIsAskedFor(t *testing.T) {
	cases := map[string]struct {
		status      int
		list, named string
		want, err   string
	}{
		"the first of the list":                    {200, `{"data":[{"id":"a"},{"id":"b"}]}`, "", "a", ""},
		"the one that is named":                    {200, `{"data":[{"id":"a"}]}`, "mine", "mine", ""},
		"a named one needs no list":                {404, `not found`, "mine", "mine", ""},
		"an empty list":                            {200, `{"data":[]}`, "", "", "names no model (status 200): name one with --model"},
		"a server without a list":                  {404, `not found`, "", "", "names no model (status 404): name one with --model"},
		"a list that is no JSON":                   {200, `<html>`, "", "", "names no model (status 200)"},
		"a server that wants a key that is absent": {401, `{}`, "", "", "names no model (status 401)"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			target := Target{URL: models(t, tc.status, tc.list), Model: tc.named, Client: client}
			err := target.open(t.Context())
			if target.Model != tc.want && tc.err == "" {
				t.Errorf("model %q, want %q", target.Model, tc.want)
			}
			if got := err != nil; got != (tc.err != "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error = %v, want %q", err, tc.err)
			}
		})
	}
}

func TestRetryAfterIsHeededWithinBounds(t *testing.T) {
	cases := map[string]struct {
		header string
		want   time.Duration
	}{
		"seconds":                   {"2", 2 * time.Second},
		"none":                      {"", 0},
		"a date is not understood":  {"Wed, 21 Oct 2015 07:28:00 GMT", 0},
		"a negative one is nothing": {"-3", 0},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			rec := httptest.NewRecorder()
			if tc.header != "" {
				rec.Header().Set("Retry-After", tc.header)
			}
			rec.WriteHeader(http.StatusTooManyRequests)
			f := refused(rec.Result())
			if f.retryAfter != tc.want || f.Kind != "status 429" {
				t.Errorf("%s, again after %v, want %v", f.Kind, f.retryAfter, tc.want)
			}
		})
	}
}

// After a refusal the session waits as told before its next turn.
func TestASessionWaitsAsTold(t *testing.T) {
	f := newFake(t)
	f.answer = func(w http.ResponseWriter, _ *http.Request, n int) {
		if n == 0 {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "later", http.StatusTooManyRequests)
			return
		}
		f.stream(w, 1, "ok;")
	}
	o := f.options()
	o.Concurrency = 1
	res := mustRun(t, o, NewRecorded(sessions(1, 2)))
	if gap := res.Turns[1].At - res.Turns[0].At; gap < time.Second {
		t.Errorf("the next turn came after %v, want 1 s", gap)
	}
}

func TestModesOfHeaders(t *testing.T) {
	got := make(map[string]string)
	for _, h := range []string{"direct", "delta", "seed", "reseed", "fallback", "", "Direct", "x"} {
		var turn Turn
		turn.fromHeader(http.Header{"X-Kvc-Mode": {h}, "X-Kvc-Reason": {"large-append"}, "X-Kvc-Attempts": {"x"}})
		got[h] = turn.Mode
		if turn.Reason != "large-append" || turn.Attempts != 0 {
			t.Errorf("reason %q, attempts %d", turn.Reason, turn.Attempts)
		}
	}
	want := map[string]string{"direct": "direct", "delta": "delta", "seed": "seed", "reseed": "reseed",
		"fallback": "fallback", "": ModeUnknown, "Direct": ModeUnknown, "x": ModeUnknown}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
