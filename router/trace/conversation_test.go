package trace

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

type chatMessage struct{ Role, Content string }

// spoken parses what a Turn returned.
func spoken(t interface{ Fatalf(string, ...any) }, raw []byte) []chatMessage {
	var ms []chatMessage
	if err := json.Unmarshal([]byte("["+string(raw)+"]"), &ms); err != nil {
		t.Fatalf("messages are no JSON: %v\n%s", err, raw)
	}
	return ms
}

func roles(ms []chatMessage) string {
	var rs []string
	for _, m := range ms {
		rs = append(rs, m.Role)
	}
	return strings.Join(rs, " ")
}

// prompt is the text a model sees, without a template.
func prompt(ms []chatMessage) string {
	var b strings.Builder
	for _, m := range ms {
		b.WriteString(m.Content)
	}
	return b.String()
}

// answerOf is a deterministic answer of n tokens, quotes and all.
func answerOf(seed string, n int) string {
	return strings.Repeat("\"a\n ", max(0, n-1)) + fmt.Sprintf("%-4.4s", seed)
}

func TestConversationGrowsByAnswerAndNews(t *testing.T) {
	c := NewConversation("s")
	first := c.Turn(Record{SharedTokens: 10, SharedSpace: 5, AppendTokens: 30})
	before := string(first)
	ms := spoken(t, first)
	if got := roles(ms); got != "system user" || len(ms[0].Content) != 40 || len(ms[1].Content) != 80 {
		t.Fatalf("first turn = %s with %d and %d bytes", got, len(ms[0].Content), len(ms[1].Content))
	}

	c.Answer("say \"hi\"\n<&> é")
	second := c.Turn(Record{Turn: 1, AppendTokens: 7})
	if !strings.HasPrefix(string(second), before+",") {
		t.Fatal("the second turn does not begin with the bytes of the first")
	}
	ms = spoken(t, second)
	if got := roles(ms); got != "system user assistant user" {
		t.Fatalf("second turn = %s", got)
	}
	if ms[2].Content != "say \"hi\"\n<&> é" || len(ms[3].Content) != 28 {
		t.Errorf("answer %q, news of %d bytes", ms[2].Content, len(ms[3].Content))
	}
	if strings.Contains(string(second), `\u003c`) {
		t.Error("the answer is escaped more than JSON needs")
	}
	if c.Assistants() != 1 || c.Tokens() != 30+textTokens("say \"hi\"\n<&> é")+7 {
		t.Errorf("Assistants %d, Tokens %d", c.Assistants(), c.Tokens())
	}
	if string(first) != before {
		t.Error("growing changed the bytes of an earlier turn")
	}
}

func TestConversationOfAFailedTurnHasNoAnswer(t *testing.T) {
	c := NewConversation("s")
	c.Turn(Record{AppendTokens: 3})
	if got := roles(spoken(t, c.Turn(Record{AppendTokens: 3}))); got != "user user" {
		t.Errorf("roles = %s", got)
	}
}

func TestConversationResetKeepsTheOpeningOnly(t *testing.T) {
	c := NewConversation("s")
	c.Turn(Record{SharedTokens: 10, SharedSpace: 5, AppendTokens: 30})
	c.Answer("x")
	old := spoken(t, c.Turn(Record{AppendTokens: 30}))
	c.Answer("y")
	ms := spoken(t, c.Turn(Record{AppendTokens: 4, Reset: true}))
	if got := roles(ms); got != "system user" || ms[0] != old[0] {
		t.Fatalf("after a reset: %s", got)
	}
	if len(ms[1].Content) != 16 || strings.HasPrefix(old[1].Content, ms[1].Content) {
		t.Error("a reset repeats the old task")
	}
	c.Answer("z")
	if got := roles(spoken(t, c.Turn(Record{AppendTokens: 4}))); got != "system user assistant user" {
		t.Errorf("after the reset turn: %s", got)
	}
}

func TestConversationSpeaksRecordedText(t *testing.T) {
	c := NewConversation("s")
	var got [][]chatMessage
	for _, r := range []Record{{Text: "fix \"it\""}, {Text: "rc 0\n"}, {Text: "again", Reset: true}} {
		got = append(got, spoken(t, c.Turn(r)))
		c.Answer("ok")
	}
	want := [][]chatMessage{
		{{"user", "fix \"it\""}},
		{{"user", "fix \"it\""}, {"assistant", "ok"}, {"user", "rc 0\n"}},
		{{"user", "again"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestSharedOpeningsAreEqualAcrossSessions(t *testing.T) {
	r := Record{SharedTokens: 100, SharedSpace: 9, AppendTokens: 200}
	a := spoken(t, NewConversation("a").Turn(r))
	b := spoken(t, NewConversation("b").Turn(r))
	if a[0] != b[0] {
		t.Error("the system messages differ")
	}
	if a[1].Content == b[1].Content {
		t.Error("the tasks of two sessions are the same text")
	}
}

// blockTurn is a record of the block schemas with a block of 8 tokens.
func blockTurn(in int, runs ...Run) Record {
	return Record{InputTokens: in, BlockTokens: 8, Blocks: runs, SharedTokens: 8}
}

func TestConversationFollowsBlocks(t *testing.T) {
	r := func(first int64, n int) Run { return Run{Space: 3, First: first, Len: n} }
	steps := []struct {
		claim  string
		rec    Record
		want   string // roles
		shared int    // tokens equal to the turn it continues
	}{
		{"a first turn opens with the shared block", blockTurn(35, r(1, 4)), "system user", 0},
		{"a turn that extends the last appends to it", blockTurn(70, r(1, 8)), "system user assistant user", 35},
		{"a second child of the first turn repeats its answer", blockTurn(70, r(1, 4), r(90, 4)),
			"system user assistant user", 35},
		{"a return to the older branch finds its text", blockTurn(100, r(1, 8), r(200, 4)),
			"system user assistant user assistant user", 70},
		{"an edit inside a message goes on in it", blockTurn(64, r(1, 3), r(95, 5)), "system user", 24},
		{"an edit inside an answer cuts it", blockTurn(72, r(1, 5), r(98, 4)), "system user assistant user", 40},
		{"a reset to the opening keeps the opening", blockTurn(24, r(1, 1), r(300, 2)), "system user", 8},
		{"a turn that shares nothing starts anew", blockTurn(24, r(400, 3)), "system user", 0},
	}
	c := NewConversation("s")
	var texts []string
	for i, s := range steps {
		ms := spoken(t, c.Turn(s.rec))
		text := prompt(ms)
		if got := roles(ms); got != s.want {
			t.Errorf("%s: roles %s, want %s", s.claim, got, s.want)
		}
		if len(text) != s.rec.InputTokens*BytesPerToken {
			t.Errorf("%s: %d bytes for %d tokens", s.claim, len(text), s.rec.InputTokens)
		}
		before := map[int]int{2: 0, 3: 1, 5: 1}[i] // the turn that it continues; others: the first
		if i > 0 && text[:s.shared*4] != texts[before][:s.shared*4] {
			t.Errorf("%s: the first %d tokens differ", s.claim, s.shared)
		}
		texts = append(texts, text)
		c.Answer(answerOf("ans", 6))
	}
}

// Equal block ids are equal text, whatever the order in which the branches of a
// history are visited. Premise: answers are no longer than what the next turn
// adds, as in every recorded session.
func TestBlockIDEqualityIsTextEquality(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const bt = 4
		c := NewConversation("s")
		var recs []Record
		var texts []string
		next := int64(100)
		for i := range rapid.IntRange(1, 12).Draw(t, "turns") {
			runs := []Run{{Space: 1, First: 1, Len: 2}}
			if i > 0 {
				base := recs[rapid.IntRange(0, i-1).Draw(t, "base")].Blocks
				runs = firstBlocks(base, rapid.IntRange(1, blockCount(base)).Draw(t, "keep"))
			}
			n := rapid.IntRange(2, 5).Draw(t, "new")
			runs = append(runs, Run{Space: 1, First: next, Len: n})
			next += int64(n) + 1
			tail := rapid.IntRange(0, bt-1).Draw(t, "tail")
			rec := Record{InputTokens: blockCount(runs)*bt + tail, BlockTokens: bt, Blocks: runs, SharedTokens: bt}

			ms := spoken(t, c.Turn(rec))
			recs, texts = append(recs, rec), append(texts, prompt(ms))
			for j := range recs {
				k := commonBlocks(recs[j].Blocks, runs) * bt * BytesPerToken
				if k > len(texts[j]) || k > len(texts[i]) || texts[j][:k] != texts[i][:k] {
					t.Fatalf("turns %d and %d share %d bytes of blocks, yet not the text", j, i, k)
				}
			}
			c.Answer(answerOf(fmt.Sprint(i), rapid.IntRange(0, 4).Draw(t, "answer")))
		}
	})
}

func firstBlocks(runs []Run, n int) []Run {
	var out []Run
	for _, r := range runs {
		if n <= 0 {
			break
		}
		r.Len = min(r.Len, n)
		n -= r.Len
		out = append(out, r)
	}
	return out
}

func TestEarlierBytesNeverChange(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewConversation("s")
		var raws [][]byte
		var copies []string
		for i := range rapid.IntRange(2, 10).Draw(t, "turns") {
			r := Record{AppendTokens: rapid.IntRange(0, 9).Draw(t, "append"), Reset: rapid.Bool().Draw(t, "reset"),
				SharedTokens: 2, SharedSpace: 7}
			if rapid.Bool().Draw(t, "blocks") {
				n := rapid.IntRange(1, 9).Draw(t, "blocks")
				r = Record{InputTokens: 8 * n, BlockTokens: 8, Blocks: []Run{{1, int64(rapid.IntRange(1, 2).Draw(t, "id")), n}}}
			}
			raw := c.Turn(r)
			raws, copies = append(raws, raw), append(copies, string(raw))
			spoken(t, raw)
			c.Answer(answerOf(fmt.Sprint(i), rapid.IntRange(0, 4).Draw(t, "answer")))
		}
		for i := range raws {
			if string(raws[i]) != copies[i] {
				t.Fatalf("the bytes of turn %d changed later", i)
			}
		}
	})
}

func TestConversationReturnsToABoundedPast(t *testing.T) {
	c := NewConversation("s")
	for range maxMoments + 10 {
		c.Turn(Record{AppendTokens: 1})
		c.Answer("ok")
	}
	if len(c.turns) != maxMoments {
		t.Errorf("%d moments kept, want %d", len(c.turns), maxMoments)
	}
}

func TestSynthesisIsTheSameForEver(t *testing.T) {
	got := string(appendTokens(nil, 1, 2, 0, 6))
	if want := "tiv lipepagolakawit horn"; got != want {
		t.Errorf("text = %q, want %q: replays of old runs would differ", got, want)
	}
}

func TestTextNeedsNoEscaping(t *testing.T) {
	text := appendTokens(nil, 3, 4, 0, 4096)
	q, err := json.Marshal(string(text))
	if err != nil || len(q) != len(text)+2 {
		t.Errorf("marshalled to %d bytes from %d (%v)", len(q), len(text), err)
	}
}

func TestRangesOfBlocksFitTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		runs := []Run{{1, 5, rapid.IntRange(1, 4).Draw(t, "a")}, {2, 9, rapid.IntRange(1, 4).Draw(t, "b")}}
		const bt = 3
		end := rapid.IntRange(1, bt*blockCount(runs)+5).Draw(t, "end")
		cut := rapid.IntRange(0, end).Draw(t, "cut")
		l := layout{runs, bt, 77}
		whole := l.appendRange(nil, 0, end)
		parts := l.appendRange(l.appendRange(nil, 0, cut), cut, end)
		inside := min(end, bt*blockCount(runs)) * BytesPerToken
		if len(whole) != end*BytesPerToken || len(parts) != len(whole) {
			t.Fatalf("%d and %d bytes for %d tokens", len(whole), len(parts), end)
		}
		if string(whole[:inside]) != string(parts[:inside]) {
			t.Fatal("a cut changes the text of blocks")
		}
	})
}

func TestCommonBlocksIgnoresWhereRunsAreCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ids := rapid.SliceOfN(rapid.Int64Range(1, 6), 1, 12)
		a, b := ids.Draw(t, "a"), ids.Draw(t, "b")
		want := 0
		for want < min(len(a), len(b)) && a[want] == b[want] {
			want++
		}
		var merged, single []Run
		for _, id := range a {
			merged = appendID(merged, 1, id)
		}
		for _, id := range b {
			single = append(single, Run{1, id, 1})
		}
		if got := commonBlocks(merged, single); got != want {
			t.Fatalf("commonBlocks = %d, want %d", got, want)
		}
		if blockCount(merged) != len(a) {
			t.Fatalf("blockCount = %d, want %d", blockCount(merged), len(a))
		}
	})
}

func BenchmarkConversationTurn(b *testing.B) {
	c := NewConversation("s")
	c.Turn(Record{SharedTokens: 15000, SharedSpace: 3, AppendTokens: 90000})
	b.ReportAllocs()
	for b.Loop() {
		c.Answer("a short answer")
		c.Turn(Record{AppendTokens: 700})
		c.turns, c.adds = c.turns[:1], 0
	}
}

// The samples, spoken: what a client would send for every schema, as text.
func TestSpokenSamples(t *testing.T) {
	for _, f := range Formats() {
		t.Run(string(f), func(t *testing.T) {
			var b strings.Builder
			for _, s := range decode(t, Options{Boilerplate: Boilerplate{"a": {64, 64}}}, sample(t, f)).Sessions() {
				c := NewConversation(s.ID)
				for _, r := range s.Turns {
					fmt.Fprintf(&b, "--- session %s turn %d, %d tokens in, %d out, think %v\n", s.ID, r.Turn, r.InputTokens,
						r.OutputTokens, r.Think)
					for _, m := range spoken(t, c.Turn(r)) {
						fmt.Fprintf(&b, "%s (%d bytes): %.40q\n", m.Role, len(m.Content), m.Content)
					}
					c.Answer(answerOf(fmt.Sprint(r.Turn), min(r.OutputTokens, 3)))
				}
			}
			path := filepath.Join("testdata", "spoken", string(f)+".txt")
			if os.Getenv("KVC_UPDATE") != "" {
				if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), b.String()); diff != "" {
				t.Errorf("(KVC_UPDATE=1 rewrites %s)\n%s", path, diff)
			}
		})
	}
}

// Mooncake's last block is partial: its id belongs to that one length, and the
// next turn names the same tokens by another id.
func TestAPartialLastBlockIsContinued(t *testing.T) {
	const bt = 10
	rec := func(in int, runs ...Run) Record {
		return Record{InputTokens: in, BlockTokens: bt, Blocks: runs, SharedTokens: bt}
	}
	c := NewConversation("s")
	first := spoken(t, c.Turn(rec(25, Run{0, 1, 2}, Run{0, 77, 1}))) // blocks 1 2, and five tokens of 77
	c.Answer("okay")
	second := spoken(t, c.Turn(rec(40, Run{0, 1, 2}, Run{0, 88, 2})))
	if got := roles(second); got != "system user assistant user" {
		t.Fatalf("roles %s", got)
	}
	if second[1] != first[1] || second[2].Content != "okay" {
		t.Error("the turn before is not repeated as it was")
	}
	if len(prompt(second)) != 40*BytesPerToken {
		t.Errorf("%d bytes for 40 tokens", len(prompt(second)))
	}
	// A whole last block is no tail: another id there is another text.
	d := NewConversation("s")
	d.Turn(rec(30, Run{0, 1, 2}, Run{0, 77, 1}))
	d.Answer("okay")
	if got := roles(spoken(t, d.Turn(rec(40, Run{0, 1, 2}, Run{0, 88, 2})))); got != "system user" {
		t.Errorf("after an edit of a whole block: %s", got)
	}
}

// Two different blocks never begin alike, or prefix caches would find them equal.
func TestTextsOfBlocksDiffer(t *testing.T) {
	seen := make(map[string]string)
	for space := range Space(20) {
		for id := range int64(2000) {
			text := string(appendTokens(nil, space, id, 0, 6))
			if other, ok := seen[text]; ok {
				t.Fatalf("block %d/%d begins like %s: %q", space, id, other, text)
			}
			seen[text] = fmt.Sprintf("%d/%d", space, id)
		}
	}
}

func TestTextLooksLikeWords(t *testing.T) {
	text := string(appendTokens(nil, 3, 4, 0, 4000))
	spaces := strings.Count(text, " ")
	if share := float64(spaces) / float64(len(text)); share < .08 || share > .14 {
		t.Errorf("%.3f of the bytes end words", share)
	}
	for i, c := range []byte(text) {
		if c != ' ' && (c < 'a' || c > 'z') {
			t.Fatalf("byte %d is %q", i, c)
		}
	}
}

func TestSpacesOfNames(t *testing.T) {
	a, b := spaceOf("session", "x"), spaceOf("agent-opening", "x")
	if a == b || a == Global || spaceOf("session", "x") != a || spaceOf("session", "y") == a {
		t.Errorf("spaces %d, %d", a, b)
	}
}
