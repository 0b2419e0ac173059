package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// Every required field of every schema: without it, with a value of another
// type, and with one out of range, the error names it.
func TestEveryFieldIsChecked(t *testing.T) {
	good := map[Format]map[string]string{
		Weka:             {"s": `"a"`, "t": "1.5", "in": "640", "out": "2", "append": "9", "think": "3", "h": "[[1,10]]"},
		LMCache:          {"s": `"a"`, "t": "1.5", "abs_t": "1", "in": "48", "out": "2", "append": "9", "h": "[[1,2]]"},
		LMCacheText:      {"timestamp": "5", "input": `"x"`, "output": `"y"`, "session_id": `"s"`},
		Mooncake:         {"timestamp": "5", "input_length": "600", "output_length": "3", "hash_ids": "[1,2]"},
		MooncakeSessions: {"s": "1", "t": "0", "in": "600", "out": "3", "h": "[1,2]"},
		Bailian: {"chat_id": "1", "parent_chat_id": "-1", "timestamp": "0", "input_length": "32", "output_length": "3",
			"hash_ids": "[1,2]"},
	}
	required := map[Format][]string{
		Weka: {"s", "in", "out"}, LMCache: {"s", "in", "out"}, LMCacheText: {"timestamp", "input", "session_id"},
		Mooncake:         {"timestamp", "input_length", "output_length"},
		MooncakeSessions: {"s", "in", "out"}, Bailian: {"chat_id", "input_length", "output_length"},
	}
	wrong := map[string]string{
		"in": "-5", "out": "-1", "append": "-1", "input_length": "0", "output_length": "-1",
		"h": `"runs"`, "hash_ids": `{"a":1}`, "t": "1e99", "think": "-1e99", "timestamp": "-9e99",
	}
	for format, fields := range good {
		if _, err := Decode(strings.NewReader(object(fields)), Options{Format: format}); err != nil {
			t.Fatalf("%s: the good line: %v", format, err)
		}
		for _, field := range required[format] {
			t.Run(fmt.Sprintf("%s without %s", format, field), func(t *testing.T) {
				refused(t, format, with(fields, field, ""), field)
			})
		}
		for field := range fields {
			if value, ok := wrong[field]; ok {
				t.Run(fmt.Sprintf("%s with %s %s", format, field, value), func(t *testing.T) {
					refused(t, format, with(fields, field, value), field)
				})
			}
			if field != "abs_t" {
				t.Run(fmt.Sprintf("%s with %s of another type", format, field), func(t *testing.T) {
					refused(t, format, with(fields, field, "true"), field)
				})
			}
		}
	}
}

// object writes fields as a JSON object, in a fixed order.
func object(fields map[string]string) string {
	var parts []string
	for k, v := range fields {
		parts = append(parts, fmt.Sprintf("%q:%s", k, v))
	}
	slices.Sort(parts)
	return "{" + strings.Join(parts, ",") + "}"
}

// with changes one field; "" removes it.
func with(fields map[string]string, field, value string) map[string]string {
	out := make(map[string]string)
	for k, v := range fields {
		if k != field {
			out[k] = v
		} else if value != "" {
			out[k] = value
		}
	}
	return out
}

func refused(t *testing.T, format Format, fields map[string]string, field string) {
	t.Helper()
	_, err := Decode(strings.NewReader(object(fields)), Options{Name: "f", Format: format})
	if err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("f:1: field %q: ", field)) {
		t.Errorf("error = %v, want one that names %q", err, field)
	}
	if err != nil && !strings.Contains(err.Error(), "; ") {
		t.Errorf("error = %v, want a remedy", err)
	}
}

func TestLinesAreReadAsTheyCome(t *testing.T) {
	const a = `{"s":"a","in":64,"out":1,"think":0}`
	const b = `{"s":"b","in":64,"out":1,"think":0}`
	cases := map[string]string{
		"a newline ends every line":            a + "\n" + b + "\n",
		"the last line may lack its newline":   a + "\n" + b,
		"carriage returns are white space":     a + "\r\n" + b + "\r\n",
		"blank lines are skipped":              "\n\n" + a + "\n  \n" + b + "\n\n",
		"unknown members are ignored":          strings.Replace(a, "{", `{"new":[1,{"x":2}],`, 1) + "\n" + b,
		"of two equal members the last counts": strings.Replace(a, "{", `{"in":1,`, 1) + "\n" + b,
		"members of any order are one schema":  `{"think":0,"out":1,"in":64,"s":"a"}` + "\n" + b,
	}
	want := decode(t, Options{}, a+"\n"+b).Records
	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(want, decode(t, Options{}, in).Records); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestBrokenGzip(t *testing.T) {
	for name, in := range map[string]string{
		"a header only": "\x1f\x8b", "rubbish behind the magic": "\x1f\x8bxxxxxxxxxxxxxxxx",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode(strings.NewReader(in), Options{Name: "f.gz"})
			if err == nil || !strings.HasPrefix(err.Error(), "f.gz: broken gzip: ") {
				t.Errorf("error = %v", err)
			}
		})
	}
}

// A stream that is cut or damaged behind its header is the file's fault, and
// the sentence says so; a reader that fails keeps its own error.
func TestGzipThatBreaksLater(t *testing.T) {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := io.WriteString(w, sample(t, Weka)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	whole := z.String()
	damaged := []byte(whole)
	damaged[len(damaged)-6] ^= 0xff // the checksum
	for name, in := range map[string]string{
		"cut in the middle":    whole[:len(whole)/2],
		"cut in the checksum":  whole[:len(whole)-3],
		"a wrong checksum":     string(damaged),
		"rubbish as its data":  whole[:10] + strings.Repeat("\xff", 40),
		"a second broken part": whole + "\x1f\x8bAxxxxxxx",
		"a header alone":       "\x1f\x8b\bA000000",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Decode(strings.NewReader(in), Options{Name: "f.gz"})
			e, ok := errors.AsType[*Error](err)
			if !ok || e.Line < 1 || !strings.HasPrefix(e.Msg, "broken gzip: ") || e.Remedy == "" {
				t.Errorf("error = %v, want one that names the file, the line and the remedy", err)
			}
		})
	}
	own := errors.New("the disk is gone")
	_, err := Decode(io.MultiReader(strings.NewReader(sample(t, Weka)), iotest.ErrReader(own)), Options{Name: "f"})
	if _, ok := errors.AsType[*Error](err); ok || !errors.Is(err, own) {
		t.Errorf("error = %v, want the reader's own", err)
	}
}

// What a schema leaves out follows from the order of a session's turns.
func TestCompletion(t *testing.T) {
	second := time.Second
	in := []Record{
		{Session: "a", Time: 0, InputTokens: 100, OutputTokens: 30, BlockTokens: 10, Blocks: []Run{{1, 1, 10}}},
		{Session: "b", Time: second, InputTokens: 7, OutputTokens: 1},
		{Session: "a", Time: 11 * second, InputTokens: 140, OutputTokens: 5, BlockTokens: 10, Blocks: []Run{{1, 1, 9}, {1, 50, 5}}},
		{Session: "a", Time: 11*second + time.Millisecond, InputTokens: 20, OutputTokens: 5, BlockTokens: 10, Blocks: []Run{{2, 1, 2}}},
		{Session: "b", Time: -5 * second, InputTokens: 9, AppendTokens: 4, OutputTokens: 1},
	}
	type row struct {
		Turn, Append int
		Think        time.Duration
	}
	want := []row{
		{0, 100, 0},
		{0, 7, 0},
		{1, 50, 11*second - nominalTTFT - 30*nominalITL}, // nine blocks are shared
		{2, 20, 0}, // before the answer could have ended: no idle time
		{1, 4, 0},  // a recorded append stays; times do not run backwards
	}
	var got []row
	for _, r := range complete(slices.Clone(in), true) {
		got = append(got, row{r.Turn, r.AppendTokens, r.Think})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, r := range complete(slices.Clone(in), false) {
		if r.Think != 0 {
			t.Errorf("turn %d of %s thinks %v, though the schema has idle times", r.Turn, r.Session, r.Think)
		}
	}
}

func TestInTimeSortsEachSessionAndLosesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rs []Record
		for i := range rapid.IntRange(0, 20).Draw(t, "n") {
			rs = append(rs, Record{Session: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "session"), InputTokens: i,
				Time: time.Duration(rapid.IntRange(-50, 50).Draw(t, "time")) * time.Second})
		}
		first := make(map[string]int)
		for i, r := range rs {
			if _, ok := first[r.Session]; !ok {
				first[r.Session] = i
			}
		}
		got := inTime(slices.Clone(rs))
		seen := make(map[int]bool)
		for i, r := range got {
			seen[r.InputTokens] = true
			if r.Time < 0 {
				t.Fatalf("a turn at %v", r.Time)
			}
			if i == 0 {
				continue
			}
			if p := got[i-1]; p.Session == r.Session && p.Time > r.Time ||
				p.Session != r.Session && first[p.Session] > first[r.Session] {
				t.Fatalf("%s at %v after %s at %v", r.Session, r.Time, p.Session, p.Time)
			}
		}
		if len(seen) != len(rs) {
			t.Fatalf("%d of %d records left", len(seen), len(rs))
		}
	})
}

// Runs decode to the very blocks that were encoded.
func TestRunsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Int64Range(0, 30), 1, 40).Draw(t, "ids")
		var pairs [][]int64
		for _, id := range ids {
			if n := len(pairs); n > 0 && pairs[n-1][0]+pairs[n-1][1] == id && rapid.Bool().Draw(t, "join") {
				pairs[n-1][1]++
				continue
			}
			pairs = append(pairs, []int64{id, 1})
		}
		got, err := runs(pairs, 5, 16*len(ids), 16)
		if err != nil {
			t.Fatal(err)
		}
		for i, b := range expand(got) {
			if b != (blockID{5, ids[i]}) {
				t.Fatalf("block %d is %v, want %d", i, b, ids[i])
			}
		}
		if _, err := runs(pairs, 5, 16*(len(ids)-1), 16); err == nil {
			t.Fatal("more blocks than the prompt has tokens for are accepted")
		}
	})
}

func TestGlobalIDsRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SliceOfN(rapid.Int64Range(0, 20), 1, 40).Draw(t, "ids")
		got, err := ids("h", list, 16*len(list), 16)
		if err != nil {
			t.Fatal(err)
		}
		for i, b := range expand(got) {
			if b != (blockID{Global, list[i]}) {
				t.Fatalf("block %d is %v, want %d", i, b, list[i])
			}
		}
		for i := 1; i < len(got); i++ {
			if got[i-1].First+int64(got[i-1].Len) == got[i].First {
				t.Fatalf("runs %v and %v could be one", got[i-1], got[i])
			}
		}
	})
}

// Interleaved sessions of the original Mooncake schema are told apart. Premise,
// as in the published trace: an id stands for the whole prefix before it, so no
// two sessions share more than the system prompt's.
func TestMooncakeTellsInterleavedSessionsApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type chat struct {
			ids  []int64
			name string
		}
		var open []*chat
		next := int64(1)
		p := newMooncakeParser()
		for range rapid.IntRange(1, 25).Draw(t, "requests") {
			var c *chat
			if len(open) > 0 && rapid.Bool().Draw(t, "continue") {
				c = rapid.SampledFrom(open).Draw(t, "chat")
			} else {
				c = &chat{ids: []int64{0}}
				open = append(open, c)
			}
			for range rapid.IntRange(1, 4).Draw(t, "blocks") {
				c.ids = append(c.ids, next)
				next++
			}
			rest := rapid.IntRange(0, 511).Draw(t, "rest")
			prompt := c.ids
			if rest > 0 {
				prompt = append(slices.Clone(c.ids), next) // a partial block: its id does not come back
				next++
			}
			r, err := p.line([]byte(fmt.Sprintf(`{"timestamp":0,"input_length":%d,"output_length":1,"hash_ids":%s}`,
				512*len(c.ids)+rest, jsonInts(prompt))))
			if err != nil {
				t.Fatal(err)
			}
			if c.name == "" {
				c.name = r.Session
			}
			if r.Session != c.name {
				t.Fatalf("a request of session %s was taken for one of %s", c.name, r.Session)
			}
		}
		names := make(map[string]bool)
		for _, c := range open {
			names[c.name] = true
		}
		if len(names) != len(open) {
			t.Fatalf("%d sessions under %d names", len(open), len(names))
		}
	})
}

func jsonInts(list []int64) string {
	var parts []string
	for _, n := range list {
		parts = append(parts, strconv.FormatInt(n, 10))
	}
	return "[" + strings.Join(parts, ",") + "]"
}

// A tree of chats becomes one session per path of first children; every other
// child is a session with its parent's name beside it.
func TestBailianTrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := newBailianParser()
		n := rapid.IntRange(1, 20).Draw(t, "chats")
		session := make([]string, n)
		children := make([]int, n)
		for i := range n {
			parent := rapid.IntRange(-1, i-1).Draw(t, "parent")
			r, err := p.line([]byte(fmt.Sprintf(
				`{"chat_id":%d,"parent_chat_id":%d,"timestamp":%d,"input_length":32,"output_length":1,"hash_ids":[1]}`, i, parent, i)))
			if err != nil {
				t.Fatal(err)
			}
			wantSession, wantParent := strconv.Itoa(i), ""
			if parent >= 0 {
				if children[parent] == 0 {
					wantSession = session[parent]
				} else {
					wantParent = session[parent]
				}
				children[parent]++
			}
			session[i] = r.Session
			if r.Session != wantSession || r.Parent != wantParent {
				t.Fatalf("chat %d: session %q of parent %q, want %q of %q", i, r.Session, r.Parent, wantSession, wantParent)
			}
		}
	})
}

func TestAChildWhoseParentIsNotInTheFileStartsASession(t *testing.T) {
	got := decode(t, Options{}, `{"chat_id":5,"parent_chat_id":3,"timestamp":0,"input_length":32,"output_length":1,"hash_ids":[1]}`)
	if r := got.Records[0]; r.Session != "5" || r.Parent != "" || r.Turn != 0 {
		t.Errorf("record = %+v", r)
	}
}

// Text sessions of any order and any interleaving come back as they were said.
func TestTextSessionsAreUnfolded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		words := rapid.SampledFrom([]string{"a", "b\nc", "\"d\"", "é", "long words here"})
		type line struct{ text string }
		var lines []line
		said := make(map[string][]string)
		for s := range rapid.IntRange(1, 3).Draw(t, "sessions") {
			name, whole := fmt.Sprint("s", s), ""
			for i := range rapid.IntRange(1, 5).Draw(t, "turns") {
				news := words.Draw(t, "news")
				if i > 0 {
					whole += "\n\n"
				}
				whole += news
				said[name] = append(said[name], news)
				lines = append(lines, line{fmt.Sprintf(`{"timestamp":%d,"input":%q,"output":"ok","session_id":%q}`,
					1000*i+s, whole, name)})
			}
		}
		order := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "order"), 0)).Perm(len(lines))
		var file strings.Builder
		for _, i := range order {
			file.WriteString(lines[i].text + "\n")
		}
		tr, err := Decode(strings.NewReader(file.String()), Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range tr.Sessions() {
			for i, r := range s.Turns {
				if r.Turn != i || r.Text != said[s.ID][i] || r.Reset {
					t.Fatalf("turn %d of %s says %q (reset %v), want %q", i, s.ID, r.Text, r.Reset, said[s.ID][i])
				}
			}
			if len(s.Turns) != len(said[s.ID]) {
				t.Fatalf("%d turns of %s, want %d", len(s.Turns), s.ID, len(said[s.ID]))
			}
		}
	})
}

func TestTextThatRepeatsThePromptStartsAnew(t *testing.T) {
	const line = `{"timestamp":%d,"input":%q,"output":"ok","session_id":"s"}` + "\n"
	got := decode(t, Options{}, fmt.Sprintf(line, 1, "same")+fmt.Sprintf(line, 2, "same")+fmt.Sprintf(line, 3, "same\n\nmore"))
	var texts []string
	for _, r := range got.Records {
		texts = append(texts, fmt.Sprint(r.Text, " ", r.Reset))
	}
	if diff := cmp.Diff([]string{"same false", "same true", "more false"}, texts); diff != "" {
		t.Error(diff)
	}
}

// Sessions of equal openings share exactly the opening's blocks, others none.
func TestWekaOpeningsAreSharedByEqualPairsOnly(t *testing.T) {
	index := Boilerplate{"a": {640, 64}, "b": {640, 64}, "c": {640, 128}, "d": {64, 640}}
	var file strings.Builder
	for _, s := range []string{"a", "b", "c", "d", "e"} {
		fmt.Fprintf(&file, `{"s":%q,"in":2000,"out":1,"think":0,"h":[[1,31]]}`+"\n", s)
	}
	tr := decode(t, Options{Boilerplate: index}, file.String())
	blocks := make(map[string][]Run)
	for _, r := range tr.Records {
		blocks[r.Session] = r.Blocks
	}
	for pair, want := range map[string]int{"ab": 11, "ac": 0, "ad": 0, "ae": 0, "ce": 0, "aa": 31} {
		if got := commonBlocks(blocks[pair[:1]], blocks[pair[1:]]); got != want {
			t.Errorf("%s and %s share %d blocks, want %d", pair[:1], pair[1:], got, want)
		}
	}
	edited := decode(t, Options{Boilerplate: index}, `{"s":"a","in":2000,"out":1,"think":0,"h":[[500,31]]}`)
	if r := edited.Records[0]; r.SharedTokens != 0 || commonBlocks(r.Blocks, blocks["a"]) != 0 {
		t.Errorf("a prompt that does not start with the opening shares %d tokens of it", r.SharedTokens)
	}
}

func TestReadBoilerplateReadsGzipAndRefusesRubbish(t *testing.T) {
	cases := map[string]string{
		"nothing":             "",
		"an unclosed quote":   "session,tool_tokens,system_tokens\n\"a",
		"a row too short":     "session,tool_tokens,system_tokens\na,1\n",
		"a negative count":    "session,tool_tokens,system_tokens\na,-1,2\n",
		"a count beyond sane": "session,tool_tokens,system_tokens\na,99999999999,2\n",
	}
	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			if b, err := ReadBoilerplate(strings.NewReader(in), "i.csv"); err == nil || !strings.HasPrefix(err.Error(), "i.csv") {
				t.Errorf("%v, error %v", b, err)
			}
		})
	}
}
