package trace

import (
	"os"
	"path/filepath"
	"testing"
)

// traceFile opens a published trace. They are not in the repository: KVC_TRACES
// names their folder, else a folder "shared/traces" beside the repository.
func traceFile(t *testing.T, parts ...string) *os.File {
	t.Helper()
	dir := os.Getenv("KVC_TRACES")
	if dir == "" {
		dir = filepath.Join("..", "..", "..", "shared", "traces")
	}
	f, err := os.Open(filepath.Join(append([]string{dir}, parts...)...))
	if err != nil {
		t.Skipf("no trace files here (set KVC_TRACES to their folder): %v", err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestPublishedTraces(t *testing.T) {
	cases := []struct {
		path     []string
		format   Format
		records  int
		sessions int
	}{
		{[]string{"weka", "slice_seedlike_52sess.jsonl.gz"}, Weka, 4340, 52},
		{[]string{"weka", "slice_fitK92k_80sess.jsonl.gz"}, Weka, 2374, 80},
		{[]string{"lmcache", "miniswe_b24.jsonl.gz"}, LMCache, 402, 20},
		{[]string{"mooncake", "conversation_trace.sessions.jsonl.gz"}, MooncakeSessions, 12031, 8056},
		{[]string{"lmcache", "text", "063925220f0d2954505eb37612b11ab3.jsonl.gz"}, LMCacheText, 30, 1},
	}
	for _, tc := range cases {
		t.Run(filepath.Join(tc.path...), func(t *testing.T) {
			tr, err := Decode(traceFile(t, tc.path...), Options{Name: tc.path[len(tc.path)-1]})
			if err != nil {
				t.Fatal(err)
			}
			if tr.Format != tc.format || len(tr.Records) != tc.records || len(tr.Sessions()) != tc.sessions {
				t.Errorf("%s: %d records in %d sessions, want %s: %d in %d", tr.Format, len(tr.Records), len(tr.Sessions()),
					tc.format, tc.records, tc.sessions)
			}
			for _, r := range tr.Records {
				checkRecord(t, r)
			}
		})
	}
}

// Sessions found by the deepest block agree with the published reconstruction.
func TestMooncakeReconstruction(t *testing.T) {
	original, err := Decode(traceFile(t, "mooncake", "conversation_trace.first2000.jsonl.gz"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	published, err := Decode(traceFile(t, "mooncake", "conversation_trace.sessions.jsonl.gz"), Options{Limit: 2000})
	if err != nil {
		t.Fatal(err)
	}
	same := 0
	for i := range original.Records {
		if original.Records[i].Turn == published.Records[i].Turn {
			same++
		}
	}
	if same < 1980 {
		t.Errorf("%d of 2000 turns have the published index", same)
	}
}

// The recorded prompts of a session come back whole: what the turns add, put
// together, is the recorded prompt.
func TestTextSessionsComeBackWhole(t *testing.T) {
	tr, err := Decode(traceFile(t, "lmcache", "text", "063925220f0d2954505eb37612b11ab3.jsonl.gz"), Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := NewConversation("s")
	for _, r := range tr.Records {
		ms := spoken(t, c.Turn(r))
		length := 0
		for _, m := range ms {
			if m.Role == "user" {
				length += len(m.Content) + len("\n\n")
			}
		}
		if got := (length - len("\n\n") + 3) / 4; got != r.InputTokens {
			t.Fatalf("turn %d speaks %d tokens, recorded %d", r.Turn, got, r.InputTokens)
		}
		if c.Assistants() != r.Turn {
			t.Fatalf("turn %d has %d assistant messages", r.Turn, c.Assistants())
		}
		c.Answer(r.Answer)
	}
}

// Weka turns are as long as recorded, and the share of prompt tokens that
// repeats the turn before is the published 97.3 % of the whole set.
func TestWekaConversations(t *testing.T) {
	index, err := ReadBoilerplate(traceFile(t, "weka", "sessions_index.csv.gz"), "sessions_index.csv.gz")
	if err != nil {
		t.Fatal(err)
	}
	tr, err := Decode(traceFile(t, "weka", "slice_seedlike_52sess.jsonl.gz"), Options{Limit: 600, Boilerplate: index})
	if err != nil {
		t.Fatal(err)
	}
	same, all, over := 0, 0, 0
	for _, s := range tr.Sessions() {
		c := NewConversation(s.ID)
		var before []byte
		for _, r := range s.Turns {
			if r.SharedTokens == 0 && r.Turn == 0 {
				t.Errorf("%s opens with nothing shared", s.ID)
			}
			raw := c.Turn(r)
			n := 0
			for n < min(len(raw), len(before)) && raw[n] == before[n] {
				n++
			}
			if r.Turn > 0 {
				same, all = same+n, all+len(raw)
			}
			if c.Tokens() != r.InputTokens {
				over++
			}
			before = raw
			c.Answer(answerOf("x", r.OutputTokens))
		}
	}
	if share := float64(same) / float64(all); share < .95 || share > .99 {
		t.Errorf("%.4f of the bytes repeat the turn before", share)
	}
	if over > 60 {
		t.Errorf("%d of 600 turns are longer than recorded: answers were longer than what the next turn adds", over)
	}
}
