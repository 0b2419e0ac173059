package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// sample is a file of one schema, as its publisher writes it.
func sample(t testing.TB, f Format) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "samples", string(f)+".jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func decode(t *testing.T, o Options, data string) *Trace {
	t.Helper()
	got, err := Decode(strings.NewReader(data), o)
	if err != nil {
		t.Fatalf("Decode: %v", err)
	}
	return got
}

func TestDecodeRecognisesEverySchemaByItsKeys(t *testing.T) {
	for _, f := range Formats() {
		t.Run(string(f), func(t *testing.T) {
			auto := decode(t, Options{}, sample(t, f))
			if auto.Format != f {
				t.Fatalf("recognised %q", auto.Format)
			}
			named := decode(t, Options{Format: f}, sample(t, f))
			if diff := cmp.Diff(named, auto); diff != "" {
				t.Errorf("naming the format changes the records:\n%s", diff)
			}
		})
	}
}

func TestDecodeReadsGzipAsPlain(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := io.WriteString(w, sample(t, Weka)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(decode(t, Options{}, sample(t, Weka)), decode(t, Options{}, z.String())); diff != "" {
		t.Error(diff)
	}
}

func TestWekaRecords(t *testing.T) {
	got := decode(t, Options{Boilerplate: Boilerplate{"a": {ToolTokens: 100, SystemTokens: 160}}}, sample(t, Weka))
	local := spaceOf("weka-session", "a")
	shared := spaceOf("weka-opening", "100/160")
	want := []Record{
		{Session: "a", InputTokens: 640, AppendTokens: 640, OutputTokens: 90, BlockTokens: 64,
			SharedTokens: 256, SharedSpace: shared,
			Blocks: []Run{{shared, 1, 4}, {local, 5, 6}}},
		{Session: "a", Turn: 1, Time: 10 * time.Second, Think: 8500 * time.Millisecond,
			InputTokens: 900, AppendTokens: 260, OutputTokens: 5, BlockTokens: 64,
			SharedTokens: 256, SharedSpace: shared,
			Blocks: []Run{{shared, 1, 4}, {local, 5, 6}, {local, 30, 4}}},
	}
	if diff := cmp.Diff(want, got.Records); diff != "" {
		t.Error(diff)
	}
}

func TestWekaOpenings(t *testing.T) {
	cases := map[string]struct {
		boilerplate Boilerplate
		want        int
	}{
		"a session that is not in the index shares nothing": {Boilerplate{"z": {640, 0}}, 0},
		"an opening shorter than a block shares nothing":    {Boilerplate{"a": {30, 30}}, 0},
		"an opening longer than the first run is cut to it": {Boilerplate{"a": {9000, 0}}, 640},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := decode(t, Options{Boilerplate: tc.boilerplate}, sample(t, Weka)).Records[0]
			if got.SharedTokens != tc.want || blockCount(got.Blocks) != 10 {
				t.Errorf("SharedTokens = %d of %d blocks, want %d of 10", got.SharedTokens, blockCount(got.Blocks), tc.want)
			}
		})
	}
}

func TestLMCacheRecords(t *testing.T) {
	got := decode(t, Options{}, sample(t, LMCache)).Records[1]
	want := Record{Session: "b", Turn: 1, Time: 5 * time.Second, Think: 5*time.Second - nominalTTFT - 10*nominalITL,
		InputTokens: 80, AppendTokens: 32, OutputTokens: 10, BlockTokens: 24, SharedTokens: 24,
		Blocks: []Run{{Global, 7, 3}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTextRecordsAreWhatEachTurnAdds(t *testing.T) {
	got := decode(t, Options{}, sample(t, LMCacheText)).Records
	want := []Record{
		{Session: "c", Text: "one", Answer: "A", InputTokens: 1, AppendTokens: 1, OutputTokens: 1},
		{Session: "c", Turn: 1, Time: time.Second, Think: time.Second - nominalTTFT - nominalITL,
			Text: "two", Answer: "B", InputTokens: 2, AppendTokens: 1, OutputTokens: 1},
		{Session: "c", Turn: 2, Time: 8 * time.Second, Think: 7*time.Second - nominalTTFT - nominalITL,
			Text: "other", Answer: "C", Reset: true, InputTokens: 2, AppendTokens: 2, OutputTokens: 1},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestMooncakeSessionsAreFoundByTheirDeepestBlock(t *testing.T) {
	got := decode(t, Options{}, sample(t, Mooncake))
	var sessions []string
	for _, r := range got.Records {
		sessions = append(sessions, r.Session)
	}
	if diff := cmp.Diff([]string{"0", "1", "0"}, sessions); diff != "" {
		t.Errorf("sessions (the second shares the system prompt only):\n%s", diff)
	}
	if r := got.Records[2]; r.Turn != 1 || r.AppendTokens != 2000-2*512 || r.Time != 3*time.Second {
		t.Errorf("third request = %+v, want turn 1 with all but two blocks appended, at 3 s", r)
	}
}

func TestBailianForksAreSessionsOfTheirOwn(t *testing.T) {
	var got [][3]string
	for _, r := range decode(t, Options{}, sample(t, Bailian)).Records {
		got = append(got, [3]string{r.Session, r.Parent, string(rune('0' + r.Turn))})
	}
	want := [][3]string{{"10", "", "0"}, {"10", "", "1"}, {"12", "10", "0"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTurnsLoggedOutOfOrderAreSorted(t *testing.T) {
	const line = `{"s":"b","t":%s,"abs_t":1,"in":%d,"out":1,"h":[]}` + "\n"
	in := fmt.Sprintf(line, "3.0", 30) + fmt.Sprintf(line, "-4.0", 10) + fmt.Sprintf(line, "-1", 20)
	got := decode(t, Options{}, in).Records
	for i, r := range got {
		if r.Turn != i || r.InputTokens != 10*(i+1) {
			t.Errorf("record %d is turn %d of %d tokens", i, r.Turn, r.InputTokens)
		}
	}
	if got[0].Time != 0 || got[2].Time != 7*time.Second {
		t.Errorf("times %v … %v, want 0 … 7 s", got[0].Time, got[2].Time)
	}
}

func TestSessionsGroupInOrderOfTheirFirstRecord(t *testing.T) {
	tr := Trace{Records: []Record{{Session: "x"}, {Session: "y"}, {Session: "x", Turn: 1}}}
	want := []Session{
		{ID: "x", Turns: []Record{{Session: "x"}, {Session: "x", Turn: 1}}},
		{ID: "y", Turns: []Record{{Session: "y"}}},
	}
	if diff := cmp.Diff(want, tr.Sessions()); diff != "" {
		t.Error(diff)
	}
}

func TestDecodeStopsAtTheLimit(t *testing.T) {
	broken := sample(t, Weka) + "{"
	if got := decode(t, Options{Limit: 2}, broken); len(got.Records) != 2 {
		t.Errorf("%d records, want the 2 before the broken line", len(got.Records))
	}
}

func TestDecodeErrorsNameFileLineFieldAndRemedy(t *testing.T) {
	const ok = `{"s":"a","t":0,"in":640,"out":1,"think":0,"h":[[1,10]]}` + "\n"
	cases := map[string]struct {
		o    Options
		in   string
		want string
	}{
		"an empty file": {Options{}, "\n\n",
			`f: no records; give a file with one JSON object per line`},
		"no JSON": {Options{}, "hello\n",
			`f:1: not a JSON object: invalid character 'h' looking for beginning of value; give one JSON object per line`},
		"a line of unknown keys": {Options{}, `{"x":1}`,
			"f:1: the keys of this line belong to no known trace format; name the format, one of " +
				"weka, lmcache-b24, lmcache-text, mooncake, mooncake-sessions, bailian"},
		"an unknown format": {Options{Format: "csv"}, ok,
			`f:1: unknown format "csv"; use one of weka, lmcache-b24, lmcache-text, mooncake, mooncake-sessions, bailian`},
		"a wrong type, with its line": {Options{}, ok + "\n" + `{"s":"a","in":"many","think":0}`,
			`f:3: field "in": got string, want int64; correct the value or name another format`},
		"a missing count": {Options{}, `{"s":"a","think":0,"in":5}`,
			`f:1: field "out": is missing; add it or name another format`},
		"a missing session": {Options{Format: Weka}, `{"in":5,"out":1}`,
			`f:1: field "s": is missing; add it or name another format`},
		"a prompt of no tokens": {Options{Format: Weka}, `{"s":"a","in":0,"out":1}`,
			`f:1: field "in": 0 is outside 1…16777216; correct the value`},
		"a huge prompt": {Options{Format: Weka}, `{"s":"a","in":99999999,"out":1}`,
			`f:1: field "in": 99999999 is outside 1…16777216; correct the value`},
		"a huge run": {Options{Format: Weka}, `{"s":"a","in":640,"out":1,"h":[[1,9000000000]]}`,
			`f:1: field "h": the runs hold more blocks than a prompt of 640 tokens; correct the value`},
		"a run that is no pair": {Options{Format: Weka}, `{"s":"a","in":640,"out":1,"h":[[1]]}`,
			`f:1: field "h": entry 0 is not a pair [first, length]; correct the value`},
		"a time beyond all ages": {Options{Format: Weka}, `{"s":"a","in":640,"out":1,"t":-1e300}`,
			`f:1: field "t": -1e+300 is not a number of seconds; correct the value`},
		"more ids than blocks": {Options{}, `{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1,2]}`,
			`f:1: field "hash_ids": 2 blocks are more than a prompt of 5 tokens has; correct the value`},
		"a negative id": {Options{}, `{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[-2]}`,
			`f:1: field "hash_ids": entry 0 is -2, want an id ≥ 0; correct the value`},
		"a text turn without a prompt": {Options{Format: LMCacheText}, `{"timestamp":0,"session_id":"x"}`,
			`f:1: field "input": is missing; add it or name another format`},
		"a chat without an id": {Options{Format: Bailian}, `{"hash_ids":[]}`,
			`f:1: field "chat_id": is missing; add it or name another format`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			tc.o.Name = "f"
			_, err := Decode(strings.NewReader(tc.in), tc.o)
			if err == nil || err.Error() != tc.want {
				t.Errorf("error\n got %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestDecodePassesTheReadersError(t *testing.T) {
	broken := errors.New("disk on fire")
	_, err := Decode(io.MultiReader(strings.NewReader(sample(t, Weka)), iotest.ErrReader(broken)), Options{})
	if !errors.Is(err, broken) {
		t.Errorf("error = %v, want the reader's", err)
	}
}

func TestDecodeBoundsALine(t *testing.T) {
	endless := io.MultiReader(strings.NewReader(`{"s":"`), &repeat{'x', maxLineBytes + 1})
	_, err := Decode(endless, Options{Name: "f"})
	var e *Error
	if !errors.As(err, &e) || !strings.Contains(e.Msg, "longer than 32 MiB") {
		t.Errorf("error = %v, want the line's bound", err)
	}
}

type repeat struct {
	b byte
	n int
}

func (r *repeat) Read(p []byte) (int, error) {
	if r.n == 0 {
		return 0, io.EOF
	}
	n := min(len(p), r.n)
	for i := range p[:n] {
		p[i] = r.b
	}
	r.n -= n
	return n, nil
}

func TestReadBoilerplate(t *testing.T) {
	const head = "session,requests,tool_tokens,system_tokens\n"
	got, err := ReadBoilerplate(strings.NewReader(head+"a,5,100,20\nb,6,7,8\n"), "index.csv")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Boilerplate{"a": {100, 20}, "b": {7, 8}}, got); diff != "" {
		t.Error(diff)
	}
	for name, tc := range map[string]struct{ in, want string }{
		"a column is missing": {"session,tool_tokens\n",
			`index.csv:1: field "system_tokens": the column is missing; give the sessions index of the weka traces`},
		"a count is no number": {head + "a,5,many,20\n",
			`index.csv:2: field "tool_tokens": not a token count; correct the value`},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := ReadBoilerplate(strings.NewReader(tc.in), "index.csv"); err == nil || err.Error() != tc.want {
				t.Errorf("error\n got %v\nwant %s", err, tc.want)
			}
		})
	}
}

func TestLongestThinkCutsAndCounts(t *testing.T) {
	rs := []Record{{Think: time.Hour}, {Think: time.Second}}
	if cut := LongestThink(rs, time.Minute); cut != 1 || rs[0].Think != time.Minute || rs[1].Think != time.Second {
		t.Errorf("cut %d, think %v, %v", cut, rs[0].Think, rs[1].Think)
	}
	if cut := LongestThink(rs, 0); cut != 0 || rs[0].Think != time.Minute {
		t.Errorf("no limit cut %d", cut)
	}
}
