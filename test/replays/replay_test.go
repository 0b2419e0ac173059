package replays

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/replay"
	"github.com/kvc-dev/kvc/router/trace"
)

// run replays sessions through a pool and checks what holds for every replay.
func (p *pool) run(path kvc.DirectPath, sessions []trace.Session, concurrency int) replay.Summary {
	p.t.Helper()
	turns := 0
	for _, s := range sessions {
		turns += len(s.Turns)
	}
	res, err := replay.Run(p.t.Context(), replay.Options{
		Target:      replay.Target{URL: p.router.URL, Client: p.client()},
		Concurrency: concurrency, TimeScale: p.scale,
	}, replay.NewRecorded(sessions))
	if err != nil {
		p.t.Fatal(err)
	}
	s := replay.Summarize(res, replay.Labels{DirectPath: string(path), TimeScale: p.scale, Concurrency: concurrency})
	p.t.Logf("%s: %d turns, modes %+v, TTFT p50/p99 %.0f/%.0f emulated ms, %.1f s", path, s.Requests, s.Modes,
		s.TTFT[replay.All].P50, s.TTFT[replay.All].P99, s.WallS)
	if s.Requests != turns || s.Errors != 0 {
		p.t.Errorf("%d of %d turns, %d errors: %+v", s.Requests, turns, s.Errors, s.Failures)
	}
	if s.Modes.Unknown != 0 {
		p.t.Errorf("%d turns without a mode", s.Modes.Unknown)
	}
	if m := p.sent.missing(p.received); m != nil {
		p.t.Errorf("%d bodies reached no decode engine as they were sent: %q", len(m), m)
	}
	if m := p.received.missing(p.sent); m != nil {
		p.t.Errorf("decode engines read %d bodies that no client sent: %q", len(m), m)
	}
	return s
}

// A few turns of the built-in workload on every profile; this needs no files.
func TestGeneratedSessions(t *testing.T) {
	for _, path := range []kvc.DirectPath{kvc.ConditionalAggregation, kvc.Unified, kvc.DeltaTransfer} {
		t.Run(string(path), func(t *testing.T) {
			g := trace.NewGenerator(trace.Agent(), rand.NewPCG(1, 0), "e2e")
			var sessions []trace.Session
			for range 5 {
				s := g.Session()
				s.Turns = s.Turns[:min(4, len(s.Turns))]
				trace.LongestThink(s.Turns, 20*time.Second)
				for i := range s.Turns {
					s.Turns[i].OutputTokens = min(s.Turns[i].OutputTokens, 500)
				}
				sessions = append(sessions, s)
			}
			s := newPool(t, path, 50).run(path, sessions, 5)
			if got := *s.ResidentShareAfterFirst; got < .6 {
				t.Errorf("%.2f of the later turns found their session", got)
			}
		})
	}
}

// The recorded text of five agent sessions, as chat turns.
func TestTextSessions(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(traces(t), "lmcache", "text", "*.jsonl.gz"))
	if err != nil || len(files) == 0 {
		t.Skipf("no text sessions here: %v", err)
	}
	for _, path := range []kvc.DirectPath{kvc.ConditionalAggregation, kvc.DeltaTransfer} {
		t.Run(string(path), func(t *testing.T) {
			var sessions []trace.Session
			for _, f := range files {
				sessions = append(sessions, decode(t, f, trace.Options{Format: trace.LMCacheText})...)
			}
			s := newPool(t, path, 50).run(path, sessions, 5)
			if got := *s.ResidentShareAfterFirst; got < .8 {
				t.Errorf("%.2f of the later turns found their session", got)
			}
		})
	}
}

// The first requests of the Claude Code slice that resembles the paper's run,
// with K = 600,000 tokens per decode worker. All 600 take minutes: set
// KVC_LONG=1 for them.
func TestWekaSlice(t *testing.T) {
	long := os.Getenv("KVC_LONG") != ""
	dir := filepath.Join(traces(t), "weka")
	f, err := os.Open(filepath.Join(dir, "sessions_index.csv.gz"))
	if err != nil {
		t.Skipf("no sessions index here: %v", err)
	}
	defer f.Close()
	index, err := trace.ReadBoilerplate(f, f.Name())
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "slice_seedlike_52sess.jsonl.gz")
	sessions, concurrency := decode(t, file, trace.Options{Limit: 600, Boilerplate: index}), 8
	if !long {
		// The file has one session after the other; a few turns of several say more.
		n := 6
		if raced {
			n, concurrency = 3, 2
		}
		sessions = sessions[:n]
		for i := range sessions {
			sessions[i].Turns = sessions[i].Turns[:10]
		}
	}
	// Leases are scaled too: 5 s / 25 leaves time to upload 500 KB on a busy machine.
	newPool(t, kvc.ConditionalAggregation, 25).run(kvc.ConditionalAggregation, sessions, concurrency)
}

func TestWithoutRemovesMembersAndNothingElse(t *testing.T) {
	cases := map[string]struct{ in, want string }{
		"the first member":                  {`{"rid":"x","a":1}`, `{"a":1}`},
		"the last member":                   {`{ "a" : 1,"rid":"x"}`, `{ "a" : 1}`},
		"members between others":            {`{"a":1,"bootstrap_room":7,"rid":"q","b":[1, 2]}`, `{"a":1,"b":[1, 2]}`},
		"the only member":                   {`{"rid":null}`, `{}`},
		"no such member at the top":         {`{"a":{"rid":1}}`, `{"a":{"rid":1}}`},
		"white space of the client is kept": {"{\"a\":1,\n \"rid\":2 , \"b\" :3 }\n", "{\"a\":1 , \"b\" :3 }\n"},
		"what is no object is left alone":   {`[1]`, `[1]`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := string(without([]byte(tc.in), spliced()...)); got != tc.want {
				t.Errorf("%s\nwant %s", got, tc.want)
			}
		})
	}
}
