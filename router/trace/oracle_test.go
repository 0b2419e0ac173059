package trace

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// slowTalk is the conversation written for clarity: a turn is a list of tokens,
// each with the text it must have, and the turn to continue is found by
// comparing block by block.
type slowTalk struct {
	space Space
	turns []slowTurn
}

type slowTurn struct {
	ids    []blockID
	whole  int // blocks that are full
	tokens []string
	answer string
}

type blockID struct {
	space Space
	id    int64
}

func expand(runs []Run) []blockID {
	var out []blockID
	for _, r := range runs {
		for i := range r.Len {
			out = append(out, blockID{r.Space, r.First + int64(i)})
		}
	}
	return out
}

func sameStart(a, b []blockID) int {
	n := 0
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// say returns the prompt's tokens.
func (s *slowTalk) say(r Record) []string {
	t := slowTurn{ids: expand(r.Blocks)}
	t.whole = min(len(t.ids), r.InputTokens/r.BlockTokens)
	best := -1
	shared := 0
	for i, old := range s.turns {
		n := sameStart(old.ids, t.ids)
		switch {
		case n == 0 || n < shared:
		case n > shared, best < 0:
			best, shared = i, n
		case n >= s.turns[best].whole && n < old.whole: // the best is shared whole, this one is not
		default:
			best = i
		}
	}
	if best >= 0 {
		old := s.turns[best]
		if shared >= old.whole {
			t.tokens = append(slices.Clone(old.tokens), cutTokens(old.answer)...)
		} else {
			t.tokens = slices.Clone(old.tokens[:min(len(old.tokens), shared*r.BlockTokens)])
		}
	}
	want := max(r.InputTokens, len(t.tokens)+1)
	tailFrom := max(len(t.ids)*r.BlockTokens, len(t.tokens))
	for len(t.tokens) < want {
		at := len(t.tokens)
		if k := at / r.BlockTokens; k < len(t.ids) {
			id := t.ids[k]
			t.tokens = append(t.tokens, tokenText(id.space, id.id, at%r.BlockTokens))
			continue
		}
		t.tokens = append(t.tokens, tokenText(s.space, int64(tailFrom), at-tailFrom))
	}
	s.turns = append(s.turns, t)
	return t.tokens
}

func tokenText(s Space, id int64, i int) string { return string(appendTokens(nil, s, id, i, i+1)) }

// cutTokens splits a text into pieces of four bytes.
func cutTokens(s string) []string {
	var out []string
	for len(s) > 0 {
		n := min(BytesPerToken, len(s))
		out, s = append(out, s[:n]), s[n:]
	}
	return out
}

// drawHistory draws a turn that appends to, edits or forgets an earlier one.
func drawHistory(t *rapid.T, earlier []Record, next *int64) Record {
	const bt = 4
	runs := []Run{{Space: 1, First: 1, Len: rapid.IntRange(1, 3).Draw(t, "opening")}}
	if len(earlier) > 0 && rapid.IntRange(0, 9).Draw(t, "anew") > 0 {
		base := rapid.SampledFrom(earlier).Draw(t, "base").Blocks
		runs = firstBlocks(base, rapid.IntRange(1, blockCount(base)).Draw(t, "keep"))
	}
	if n := rapid.IntRange(0, 5).Draw(t, "new"); n > 0 {
		runs = append(slices.Clone(runs), Run{Space: 1, First: *next, Len: n})
		*next += int64(n) + 1
	}
	// The last block may be partial (its id then changes as it grows), or
	// tokens may follow it that no block names.
	in := blockCount(runs)*bt + rapid.IntRange(1-bt, bt-1).Draw(t, "rest")
	return Record{InputTokens: max(1, in), BlockTokens: bt, Blocks: runs, SharedTokens: min(bt, max(1, in))}
}

func TestConversationOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewConversation("s")
		slow := &slowTalk{space: spaceOf("session", "s")}
		var recs []Record
		next := int64(100)
		for i := range rapid.IntRange(1, 10).Draw(t, "turns") {
			r := drawHistory(t, recs, &next)
			recs = append(recs, r)
			want := strings.Join(slow.say(r), "")
			if got := prompt(spoken(t, c.Turn(r))); got != want {
				t.Fatalf("turn %d says\n%q\nwant\n%q", i, got, want)
			}
			if rapid.IntRange(0, 4).Draw(t, "fails") > 0 {
				answer := answerOf(fmt.Sprint(i), rapid.IntRange(1, 6).Draw(t, "answer"))
				c.Answer(answer)
				slow.turns[i].answer = answer
			}
		}
	})
}

// The messages of a conversation are well-formed whatever is said: the system
// message is first and alone, no message is empty, the last is the user's.
func TestConversationsAreWellFormed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := NewConversation("s")
		var recs []Record
		next := int64(100)
		byBlocks := rapid.Bool().Draw(t, "blocks")
		for range rapid.IntRange(1, 10).Draw(t, "turns") {
			r := Record{
				AppendTokens: rapid.IntRange(0, 9).Draw(t, "append"), Reset: rapid.Bool().Draw(t, "reset"),
				SharedTokens: rapid.IntRange(0, 3).Draw(t, "shared"), SharedSpace: 9,
				Text: rapid.SampledFrom([]string{"", "a", "\"q\"\\", "é\u2028"}).Draw(t, "text"),
			}
			if byBlocks {
				r = drawHistory(t, recs, &next)
				recs = append(recs, r)
			}
			checkMessages(t, spoken(t, c.Turn(r)))
			if rapid.Bool().Draw(t, "answered") {
				c.Answer(rapid.SampledFrom([]string{"ok", "é\n", "\"", "{}"}).Draw(t, "answer"))
			}
		}
	})
}

func checkMessages(t *rapid.T, ms []chatMessage) {
	if len(ms) == 0 || ms[len(ms)-1].Role != "user" {
		t.Fatalf("the last of %d messages is not the user's", len(ms))
	}
	for i, m := range ms {
		switch {
		case m.Content == "":
			t.Fatalf("message %d is empty", i)
		case m.Role == "system" && i > 0:
			t.Fatalf("message %d is a system message", i)
		case m.Role == "assistant" && i == 0:
			t.Fatal("the assistant speaks first")
		}
	}
}

// A cut through an answer never splits a character.
func TestCutsKeepCharactersWhole(t *testing.T) {
	for keep := 1; keep <= 6; keep++ {
		c := NewConversation("s")
		c.Turn(Record{InputTokens: 8, BlockTokens: 1, Blocks: []Run{{1, 1, 8}}})
		c.Answer("aéb→c𝄞d\"é")
		c.Turn(Record{InputTokens: 20, BlockTokens: 1, Blocks: []Run{{1, 1, 20}}})
		// Shares the first turn whole and `keep` tokens of what followed.
		ms := spoken(t, c.Turn(Record{InputTokens: 30, BlockTokens: 1, Blocks: []Run{{1, 1, 8 + keep}, {2, 1, 22 - keep}}}))
		for _, m := range ms {
			if strings.ContainsRune(m.Content, '\uFFFD') {
				t.Errorf("after a cut at %d tokens: %q", keep, m.Content)
			}
		}
		if !strings.HasPrefix("aéb→c𝄞d\"é", ms[1].Content) {
			t.Errorf("after a cut at %d tokens the answer is %q", keep, ms[1].Content)
		}
	}
}
