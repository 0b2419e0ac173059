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
	"sync/atomic"
	"testing"
	"time"

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

// fleetOf serves a router's and one sidecar's status and returns the admin
// address, the fleet file and the token file.
func fleetOf(t *testing.T) (admin, fleetFile, tokenFile string) {
	t.Helper()
	mux := http.NewServeMux()
	var n atomic.Int64
	mux.HandleFunc("GET /admin/kvc/v1/status", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"pin_changes":%d,"workers":[{"worker":"id-1","pod":"decode-0","seq":4,"used":5,"capacity_tokens":10}]}`,
			n.Add(1))
	})
	mux.HandleFunc("GET /kvc/v1/status", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer first" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprintf(w, `{"worker":"id-1","role":"decode","epoch":"e","seq":4,"totals":{"transferred_tokens":%d}}`, 10*n.Add(1))
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	dir := t.TempDir()
	fleetFile, tokenFile = filepath.Join(dir, "fleet.yaml"), filepath.Join(dir, "token")
	fleet := "version: 1\npool: {namespace: local, name: p, model: m}\nworkers:\n" +
		"- {name: decode-0, id: id-1, role: decode, url: \"" + s.URL + "\"}\n"
	for path, data := range map[string]string{fleetFile: fleet, tokenFile: "first\nsecond\n"} {
		if err := os.WriteFile(path, []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s.URL + "/admin/", fleetFile, tokenFile
}

func TestBenchReadsTheRouterAndTheWorkers(t *testing.T) {
	admin, fleetFile, tokenFile := fleetOf(t)
	for concurrency, name := range map[string]string{"1": "settling between turns", "3": "side by side"} {
		t.Run(name, func(t *testing.T) {
			out, err := runKVC(t, "bench", "--url", answerer(t), "--turns", "4", "--concurrency", concurrency,
				"--time-scale", "100000", "--json", "--metrics-url", admin, "--fleet", fleetFile, "--pool-token-file", tokenFile)
			if err != nil {
				t.Fatal(err)
			}
			var s replay.Summary
			if err := json.Unmarshal([]byte(lastLine(out)), &s); err != nil {
				t.Fatal(err)
			}
			if s.PinChanges == nil || *s.PinChanges < 1 || s.TransferredTokens == nil || *s.TransferredTokens < 10 ||
				*s.PrefillTokens != 0 {
				t.Errorf("counters: %s", lastLine(out))
			}
		})
	}
}

func TestBenchSaysWhenTheWorkersCannotBeRead(t *testing.T) {
	admin, fleetFile, _ := fleetOf(t)
	_, err := runKVC(t, "bench", "--url", answerer(t), "--turns", "2", "--metrics-url", admin, "--fleet", fleetFile)
	if err == nil || !strings.Contains(err.Error(), "read the status of worker id-1") {
		t.Errorf("error = %v, want the worker that refuses the missing token", err)
	}
}

func TestBenchWritesEveryTurn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "turns.jsonl")
	if _, err := runKVC(t, "bench", "--url", answerer(t), "--turns", "7", "--time-scale", "100000", "--turn-log", path); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil || bytes.Count(data, []byte("\n")) != 7 {
		t.Errorf("%d lines (%v), want 7", bytes.Count(data, []byte("\n")), err)
	}
	_, err = runKVC(t, "bench", "--url", answerer(t), "--turns", "1", "--time-scale", "100000", "--turn-log", "/no/such/file")
	if err == nil || !strings.HasPrefix(err.Error(), "--turn-log /no/such/file: the folder ") {
		t.Errorf("error = %v", err)
	}
}

func TestBenchReadsFoldersOfTextSessions(t *testing.T) {
	dir := t.TempDir()
	for i := range 3 {
		line := fmt.Sprintf(`{"timestamp":1,"input":"hello %d","output":"b","session_id":"s%d"}`+"\n", i, i)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.jsonl", i)), []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	out, err := runKVC(t, "bench", "--url", answerer(t), "--turns", "0", "--text", dir, "--time-scale", "100000", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var s replay.Summary
	if err := json.Unmarshal([]byte(lastLine(out)), &s); err != nil || s.Sessions != 3 || s.Workload != "3 text sessions" {
		t.Errorf("%s (%v)", lastLine(out), err)
	}
	if _, err = runKVC(t, "bench", "--url", answerer(t), "--text", t.TempDir()); err == nil ||
		!strings.HasPrefix(err.Error(), "no text sessions (*.jsonl, *.jsonl.gz) in ") {
		t.Errorf("an empty folder: %v", err)
	}
}

// Idle times of a trace are cut, and the sessions index beside it is found.
func TestTracesAreReadWithTheirIndex(t *testing.T) {
	dir := t.TempDir()
	write := func(name, data string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("w.jsonl", `{"s":"x","in":6400,"out":2,"think":0,"h":[[1,100]]}`+"\n"+
		`{"s":"x","in":6500,"out":2,"think":9000,"h":[[1,101]]}`+"\n")
	write("sessions_index.csv.gz", "session,tool_tokens,system_tokens\nx,640,64\n") // plain is fine too
	w := workload{traceFile: filepath.Join(dir, "w.jsonl"), maxThink: time.Minute}
	tr, err := w.readTrace(w.traceFile, "")
	if err != nil {
		t.Fatal(err)
	}
	if got := tr.Records[0].SharedTokens; got != 704 {
		t.Errorf("%d tokens are shared, want 704", got)
	}
	if got := tr.Records[1].Think; got != time.Minute {
		t.Errorf("idle for %v, want the limit", got)
	}
}

func TestTimeScaleFromTheEnvironment(t *testing.T) {
	for env, want := range map[string]float64{"": 1, "25": 25, "0.5": .5, "fast": 1, "0": 1, "-3": 1} {
		t.Run(env, func(t *testing.T) {
			t.Setenv("KVC_TIME_SCALE", env)
			if got := envTimeScale(); got != want {
				t.Errorf("scale %g, want %g", got, want)
			}
		})
	}
}

func TestSeveralRunsAreOneJSONObject(t *testing.T) {
	a, b := replay.Summary{DirectPath: "Unified", Requests: 1}, replay.Summary{DirectPath: "DeltaTransfer", Requests: 2}
	data, err := json.Marshal(jsonOf([]replay.Summary{a, b}))
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		replay.Summary
		Compare []replay.Summary `json:"compare"`
	}
	if err := json.Unmarshal(data, &got); err != nil || got.DirectPath != "Unified" || len(got.Compare) != 2 {
		t.Errorf("%s (%v)", data, err)
	}
	if one, err := json.Marshal(jsonOf([]replay.Summary{b})); err != nil || strings.Contains(string(one), "compare") {
		t.Errorf("one run: %s (%v)", one, err)
	}
}

// A pipe or a file is no place for a bar.
func TestNoBarWhereNobodyLooks(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for name, w := range map[string]io.Writer{"a buffer": &bytes.Buffer{}, "a file": f} {
		b := benchRun{stderr: w, w: workload{turns: 5}}
		stop := b.progress()
		stop()
		if b.o.Progress != nil {
			t.Errorf("%s gets a progress bar", name)
		}
	}
	if info, err := f.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("the file has %d bytes (%v)", info.Size(), err)
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
		"a report in no folder": {[]string{"--url", url, "--report", filepath.Join(dir, "no", "r.html")},
			"--report " + filepath.Join(dir, "no", "r.html") + ": the folder " + filepath.Join(dir, "no") + " does not exist", 1},
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
