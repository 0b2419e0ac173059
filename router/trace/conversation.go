package trace

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// Conversation is one session's chat as the client sees it: a list of messages
// that grows by the answer received and by what the next turn adds. Records
// with block ids are followed through edits of the history as well: a turn
// continues the earlier turn with which it shares most blocks, up to the shared
// part, so that equal block ids are equal bytes.
//
// Messages are kept as the raw JSON that is sent; growing by a turn appends to
// it and leaves all earlier bytes alone, even those a slow transport still reads.
type Conversation struct {
	space   Space // of the text this session alone has
	turns   []moment
	current moment
	adds    int // texts synthesised, so that each differs
}

// maxMoments bounds how many earlier turns a conversation can return to.
const maxMoments = 256

// moment is the history as one turn sent it.
type moment struct {
	blocks []Run
	whole  int       // blocks that are full: the id of a partial last one changes as it grows
	raw    []byte    // messages in JSON, comma separated; append-only
	msgs   []message // append-only
	tokens int
	answer string // received, "" = none
}

type message struct {
	role       string
	start, end int // of the content in raw, inside the quotes
	tokens     int
	text       string // "" when the raw content needs no unescaping
}

// NewConversation starts the chat of a session. Sessions with the same name
// (and the same records and answers) are equal byte for byte.
func NewConversation(session string) *Conversation {
	return &Conversation{space: spaceOf("session", session)}
}

// Turn advances to the turn of r and returns its messages: the elements of a
// JSON array, comma separated, valid for ever.
func (c *Conversation) Turn(r Record) []byte {
	switch {
	case len(r.Blocks) > 0:
		c.current = c.byBlocks(r)
	case len(c.turns) == 0:
		c.current = c.first(r)
	case r.Reset:
		c.current = c.afresh(r)
	default:
		c.current = c.grown(c.last())
		c.add(&c.current, "user", c.news(r))
	}
	if len(c.turns) == maxMoments {
		c.turns = c.turns[1:]
	}
	c.turns = append(c.turns, c.current)
	return c.current.raw
}

// Answer records what the client received for the last turn. It becomes the
// assistant message of the turns that continue it. A turn that failed gets none.
func (c *Conversation) Answer(text string) {
	if n := len(c.turns); n > 0 {
		c.turns[n-1].answer = text
	}
}

// Tokens is the length of the last turn's messages at BytesPerToken, without
// what a chat template adds.
func (c *Conversation) Tokens() int { return c.current.tokens }

// Assistants is the number of assistant messages in the last turn.
func (c *Conversation) Assistants() int {
	n := 0
	for _, m := range c.current.msgs {
		if m.role == "assistant" {
			n++
		}
	}
	return n
}

func (c *Conversation) last() *moment { return &c.turns[len(c.turns)-1] }

// first opens the chat: the shared opening as system message, then the task.
func (c *Conversation) first(r Record) moment {
	var m moment
	if r.SharedTokens > 0 {
		c.add(&m, "system", plain(appendTokens(nil, r.SharedSpace, 0, 0, r.SharedTokens)))
	}
	c.add(&m, "user", c.news(r))
	return m
}

// afresh drops the history but the system message.
func (c *Conversation) afresh(r Record) moment {
	var m moment
	if prev := c.last(); len(prev.msgs) > 0 && prev.msgs[0].role == "system" {
		m = c.cut(prev, prev.msgs[0].tokens)
	}
	c.add(&m, "user", c.news(r))
	return m
}

// grown is a past turn with its answer appended.
func (c *Conversation) grown(t *moment) moment {
	m := *t
	m.answer = ""
	if t != c.last() { // someone else may have appended behind it
		m.raw, m.msgs = bytes.Clone(t.raw), append([]message(nil), t.msgs...)
	}
	if t.answer != "" {
		c.add(&m, "assistant", content{text: t.answer})
	}
	return m
}

// news is what a turn without blocks adds: its recorded text or a synthetic one.
func (c *Conversation) news(r Record) content {
	if r.Text != "" {
		return content{text: r.Text}
	}
	c.adds++
	n := r.AppendTokens
	if len(c.turns) == 0 {
		n -= r.SharedTokens
	}
	return plain(appendTokens(nil, c.space, int64(c.adds), 0, max(1, n)))
}

// byBlocks continues the past turn that shares most blocks with r.
func (c *Conversation) byBlocks(r Record) moment {
	base, shared := c.nearest(r.Blocks)
	var m moment
	reopened := false
	switch {
	case base == nil: // nothing to continue
	case shared >= base.whole:
		m = c.grown(base)
	default:
		m = c.cut(base, shared*r.BlockTokens)
		reopened = m.endsInUser()
	}
	m.blocks, m.whole = r.Blocks, min(blockCount(r.Blocks), r.InputTokens/r.BlockTokens)
	if m.tokens == 0 && r.SharedTokens > 0 && r.SharedTokens < r.InputTokens {
		c.add(&m, "system", c.piece(r, 0, r.SharedTokens))
	}
	news := c.piece(r, m.tokens, max(m.tokens+1, r.InputTokens))
	if reopened {
		m.extend(news)
	} else {
		c.add(&m, "user", news)
	}
	return m
}

// endsInUser reports whether the last message is a synthetic one of the user.
func (m *moment) endsInUser() bool {
	n := len(m.msgs)
	return n > 0 && m.msgs[n-1].role == "user" && m.msgs[n-1].text == ""
}

// extend lengthens the last message, whose bytes nobody else has seen. Blocks
// know no messages: a history cut inside one goes on in the same message.
func (m *moment) extend(t content) {
	last := &m.msgs[len(m.msgs)-1]
	m.raw = append(append(m.raw[:last.end], t.raw...), `"}`...)
	last.end += len(t.raw)
	last.tokens += len(t.raw) / BytesPerToken
	m.tokens += len(t.raw) / BytesPerToken
}

func (c *Conversation) piece(r Record, from, to int) content {
	return plain(layout{r.Blocks, r.BlockTokens, c.space}.appendRange(nil, from, to))
}

// nearest is the past turn that shares most blocks; among equals one that is
// shared whole, then the latest.
func (c *Conversation) nearest(blocks []Run) (base *moment, shared int) {
	for i := range c.turns {
		t := &c.turns[i]
		n := commonBlocks(t.blocks, blocks)
		if n == 0 || n < shared || n == shared && base != nil && n >= base.whole && n < t.whole {
			continue
		}
		base, shared = t, n
	}
	return base, shared
}

// content is the text of a message, or its raw form when both are the same.
type content struct {
	text string
	raw  []byte
}

func plain(raw []byte) content { return content{raw: raw} }

// add appends a message.
func (c *Conversation) add(m *moment, role string, t content) {
	msg := message{role: role, text: t.text, tokens: len(t.raw) / BytesPerToken}
	body := t.raw
	if t.raw == nil {
		body, msg.tokens = quoted(t.text), textTokens(t.text)
	}
	if len(m.raw) > 0 {
		m.raw = append(m.raw, ',')
	}
	m.raw = append(m.raw, `{"role":"`...)
	m.raw = append(m.raw, role...)
	m.raw = append(m.raw, `","content":"`...)
	msg.start = len(m.raw)
	m.raw = append(m.raw, body...)
	msg.end = len(m.raw)
	m.raw = append(m.raw, `"}`...)
	m.msgs = append(m.msgs, msg)
	m.tokens += msg.tokens
}

// cut copies the first tokens of a moment: whole messages, then the start of
// the one that the cut goes through.
func (c *Conversation) cut(m *moment, tokens int) moment {
	var out moment
	whole := 0
	for _, msg := range m.msgs {
		if out.tokens+msg.tokens > tokens {
			break
		}
		out.tokens += msg.tokens
		whole++
	}
	if whole > 0 {
		out.raw = bytes.Clone(m.raw[:m.msgs[whole-1].end+len(`"}`)])
		out.msgs = append(out.msgs, m.msgs[:whole]...)
	}
	if left := tokens - out.tokens; left > 0 && whole < len(m.msgs) {
		msg := m.msgs[whole]
		c.add(&out, msg.role, m.head(msg, left))
	}
	return out
}

// head is the first tokens of one message.
func (m *moment) head(msg message, tokens int) content {
	n := tokens * BytesPerToken
	if msg.text == "" {
		return plain(m.raw[msg.start : msg.start+n])
	}
	n = min(n, len(msg.text))
	for n > 0 && n < len(msg.text) && !utf8.RuneStart(msg.text[n]) {
		n--
	}
	return content{text: msg.text[:n]}
}

// quoted is s as the inside of a JSON string.
func quoted(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if e.Encode(s) != nil { // strings always encode
		return nil
	}
	q := bytes.TrimSpace(b.Bytes())
	return q[1 : len(q)-1]
}
