package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/replay"
)

// answerer is an OpenAI-compatible server that answers everything with "ok".
func answerer(t *testing.T) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("x-kvc-mode", "direct")
		fmt.Fprint(w, `data: {"choices":[{"delta":{"content":"ok"}}]}`+"\n\n"+
			`data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}`+"\n\ndata: [DONE]\n\n")
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return s.URL
}

func runKVC(t *testing.T, args ...string) (stdout string, err error) {
	t.Helper()
	var out, errs bytes.Buffer
	err = run(t.Context(), args, &out, &errs)
	return out.String(), err
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}

func TestBenchEndsWithOneJSONObjectAndWritesTheReport(t *testing.T) {
	report := filepath.Join(t.TempDir(), "r.html")
	out, err := runKVC(t, "bench", "--url", answerer(t), "--turns", "20", "--concurrency", "4", "--time-scale", "100000",
		"--json", "--report", report, "--preset", "Paper", "--direct-path", "Unified", "--seed", "9")
	if err != nil {
		t.Fatal(err)
	}
	var s replay.Summary
	if err := json.Unmarshal([]byte(lastLine(out)), &s); err != nil {
		t.Fatalf("last line %q: %v", lastLine(out), err)
	}
	if s.Requests != 20 || s.Errors != 0 || s.Modes.Direct != 20 || s.Preset != "Paper" || s.DirectPath != "Unified" ||
		s.Seed != 9 || s.TimeScale != 100000 || s.Workload != "built-in agent sessions" {
		t.Errorf("summary %+v", s)
	}
	if !strings.Contains(out, "report: "+report) || !strings.Contains(out, "KVC_TIME_SCALE") {
		t.Errorf("output names neither the report nor the scale:\n%s", out)
	}
	if data, err := os.ReadFile(report); err != nil || !bytes.Contains(data, []byte("<svg")) {
		t.Errorf("report: %v", err)
	}
}

func TestBenchReplaysFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(name, data string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	text := write("one.jsonl", `{"timestamp":1,"input":"a","output":"b","session_id":"s"}`+"\n"+
		`{"timestamp":2,"input":"a\n\nc","output":"d","session_id":"s"}`+"\n")
	weka := write("w.jsonl", `{"s":"x","in":128,"out":2,"think":0,"h":[[1,2]]}`+"\n"+
		`{"s":"x","in":256,"out":2,"think":9000,"h":[[1,4]]}`+"\n"+`{"s":"y","in":64,"out":2,"think":0,"h":[[1,1]]}`+"\n")
	cases := map[string]struct {
		args []string
		want int
	}{
		"a text session":                    {[]string{"--text", text}, 2},
		"a folder of text sessions":         {[]string{"--text", filepath.Join(dir, "none"), "--trace", weka}, -1},
		"a trace, to its end":               {[]string{"--trace", weka}, 3},
		"the first records of a trace":      {[]string{"--trace", weka, "--limit", "2"}, 2},
		"a trace in a schema that is named": {[]string{"--trace", text, "--format", "lmcache-text"}, 2},
	}
	url := answerer(t)
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"bench", "--url", url, "--turns", "0", "--json", "--time-scale", "100000"}, tc.args...)
			out, err := runKVC(t, args...)
			if tc.want < 0 {
				if err == nil || exitCode(err) != 2 {
					t.Errorf("error = %v, want a usage error", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var s replay.Summary
			if err := json.Unmarshal([]byte(lastLine(out)), &s); err != nil || s.Requests != tc.want || s.Errors != 0 {
				t.Errorf("%d requests, %d errors (%v), want %d", s.Requests, s.Errors, err, tc.want)
			}
		})
	}
}

func TestBenchRefusesInOneSentence(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken.jsonl")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	url := answerer(t)
	cases := map[string]struct {
		args []string
		want string
		code int
	}{
		"no server": {nil, "--url is missing: name the server, http(s)://host:port", 2},
		"an unknown workload": {[]string{"--url", url, "--workload", "x"},
			`unknown workload "x": the built-in one is agent`, 2},
		"an endless workload": {[]string{"--url", url, "--turns", "0"},
			"--turns 0 never ends with the built-in workload: give a number", 2},
		"no such trace": {[]string{"--url", url, "--trace", filepath.Join(dir, "no")}, "open the trace: open ", 1},
		"a broken trace": {[]string{"--url", url, "--trace", broken},
			broken + ":1: not a JSON object: unexpected end of JSON input; give one JSON object per line", 1},
		"an empty folder": {[]string{"--url", url, "--text", filepath.Join(dir, "x*")},
			"open the trace: open ", 1},
		"no such fleet": {[]string{"--url", url, "--fleet", filepath.Join(dir, "no")}, "read the fleet file: open ", 1},
		"no such index": {[]string{"--url", url, "--trace", broken, "--trace-index", filepath.Join(dir, "no")},
			"open the sessions index: open ", 1},
		"a flag that is no number": {[]string{"--turns", "many"}, `invalid argument "many"`, 2},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := runKVC(t, append([]string{"bench"}, tc.args...)...)
			if err == nil || !strings.HasPrefix(err.Error(), tc.want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("error = %v, want %s", err, tc.want)
			}
			if got := exitCode(err); got != tc.code {
				t.Errorf("exit code %d, want %d", got, tc.code)
			}
		})
	}
}
