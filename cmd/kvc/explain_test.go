package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/proxy"
	"github.com/kvc-dev/kvc/router/state"
)

// fakeAdmin answers explain as the router's admin port does.
func fakeAdmin(t *testing.T) *httptest.Server {
	t.Helper()
	answer := func(w http.ResponseWriter, v any) {
		if err := json.NewEncoder(w).Encode(v); err != nil {
			t.Error(err)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+admission.PathExplain, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("request_id") != "req-1" {
			admission.WriteError(w, http.StatusNotFound, "No turn with this x-request-id is remembered.")
			return
		}
		answer(w, proxy.Decision{RequestID: "req-1", Route: "chat", Session: "0123456789abcdef", Turn: 3, Blocks: 40,
			Input: 98304, Append: 713, Mode: "direct", Worker: "decode-1", Attempts: 2, Outcome: "ok", TookMS: 812.5,
			Usage: &proxy.DecisionUsage{Prompt: 98300, Cached: 97591, Completion: 5},
			Events: []proxy.DecisionEvent{
				{AtMS: 0.2, What: "ask", Worker: "decode-0", Way: "rpc", Result: "refused", Detail: "no-d-capacity"},
				{AtMS: 1.5, What: "run", Worker: "decode-1", Detail: "direct"},
				{AtMS: 3, What: "retry", Detail: "transport"},
			}})
	})
	mux.HandleFunc("POST "+admission.PathExplain, func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil || string(b) != `{"model":"m"}` || r.URL.Query().Get("route") != "chat" || r.Header.Get("X-Session-Id") != "s" {
			admission.WriteError(w, http.StatusBadRequest, "unexpected question "+string(b))
			return
		}
		answer(w, proxy.Explanation{Route: "chat", Source: "header:x-session-id", HomeName: "decode-1",
			Names: map[string]string{"a": "decode-0", "b": "decode-1", "p": "prefill-0"},
			Explanation: state.Explanation{Preset: "Corrected", Session: "0123456789abcdef", Home: "b", Blocks: 40, Shared: 8,
				Input: 1000, Append: 40,
				Decode: []state.DecodeChoice{
					{Worker: "a", Why: "less to reuse: 0 < 33", Trusted: true},
					{Worker: "b", Chosen: true, Why: "chosen: the session's home, 32 blocks to reuse", Reuse: 33, Sticky: 1},
				},
				Prefill: []state.PrefillChoice{{Worker: kvc.WorkerID("p"), Chosen: true, Uncached: 40}}}})
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s
}

func explainOut(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := run(context.Background(), append([]string{"explain"}, args...), &out, io.Discard)
	return out.String(), err
}

func TestExplainTellsATurnsStory(t *testing.T) {
	s := fakeAdmin(t)
	out, err := explainOut(t, "req-1", "--admin", s.URL+"/")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"turn 3 of session 0123456789abcdef on chat", "asked decode-0 (rpc): refused, no-d-capacity",
		"ran direct on decode-1", "failed before the first byte: transport", "ended: ok, direct on decode-1, attempts 2", "97.6K of them cached"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
}

func TestExplainScoresARequest(t *testing.T) {
	s := fakeAdmin(t)
	file := filepath.Join(t.TempDir(), "turn.json")
	if err := os.WriteFile(file, []byte(`{"model":"m"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := explainOut(t, "--file", file, "--session", "s", "--admin", s.URL)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"home decode-1", "8 of them shared", "less to reuse: 0 < 33", "the session's home, 32 blocks", "prefill-0"} {
		if !strings.Contains(out, want) {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "less to reuse") && strings.Contains(line, "*") || strings.Contains(line, "session's home,") && !strings.Contains(line, "*") {
			t.Errorf("the star is on the wrong line: %s", line)
		}
	}
	out, err = explainOut(t, "--file", file, "--session", "s", "--admin", s.URL, "--json")
	if err != nil || !json.Valid([]byte(out)) || !strings.Contains(out, `"home_name":"decode-1"`) {
		t.Errorf("--json printed %q, %v", out, err)
	}
}

// Each bad command line is one sentence.
func TestExplainRefusals(t *testing.T) {
	s := fakeAdmin(t)
	cases := map[string]struct {
		args []string
		want string
	}{
		"nothing to explain":    {nil, "give a request id, or --file"},
		"both":                  {[]string{"req-1", "--file", "x"}, "give a request id, or --file"},
		"two ids":               {[]string{"a", "b"}, "2 arguments: give one"},
		"an unknown id":         {[]string{"req-2", "--admin", s.URL}, "No turn with this x-request-id"},
		"a missing file":        {[]string{"--file", "/no/such"}, "--file: open /no/such"},
		"no router there":       {[]string{"req-1", "--admin", "http://127.0.0.1:1"}, "no router answers at --admin http://127.0.0.1:1"},
		"not an admin address":  {[]string{"req-1", "--admin", s.URL + "/elsewhere"}, "is --admin its admin address?"},
		"an address that is no": {[]string{"req-1", "--admin", "://"}, "--admin"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			out, err := explainOut(t, tc.args...)
			if err == nil || !strings.Contains(err.Error(), tc.want) || out != "" {
				t.Errorf("explain %v = %v, printed %q; want an error with %q", tc.args, err, out, tc.want)
			}
		})
	}
}
