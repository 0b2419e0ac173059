package trace

import (
	"math"
	"strconv"
	"strings"
	"time"
)

// b24Parser reads the text-free lmcache sessions: runs of 24-token blocks with
// ids that are comparable across sessions.
type b24Parser struct{}

func (*b24Parser) line(data []byte) (Record, error) {
	var v struct {
		S      string    `json:"s"`
		T      *float64  `json:"t"`
		In     *int64    `json:"in"`
		Out    *int64    `json:"out"`
		Append *int64    `json:"append"`
		H      [][]int64 `json:"h"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	r := Record{BlockTokens: 24, SharedSpace: Global}
	var err error
	if r, err = common(r, v.S, v.T, v.In, v.Out); err != nil {
		return Record{}, err
	}
	if v.Append != nil {
		if r.AppendTokens, err = tokens("append", v.Append, 0); err != nil {
			return Record{}, err
		}
	}
	r.Blocks, err = runs(v.H, Global, r.InputTokens, r.BlockTokens)
	return openWith(r), err
}

func (*b24Parser) finish(rs []Record) []Record { return complete(inTime(rs), true) }

// common reads what the short schemas share: s, t, in, out.
func common(r Record, s string, t *float64, in, out *int64) (Record, error) {
	var err error
	if r.Session, err = name("s", s); err != nil {
		return r, err
	}
	if r.Time, err = seconds("t", t); err != nil {
		return r, err
	}
	if r.InputTokens, err = tokens("in", in, 1); err != nil {
		return r, err
	}
	r.OutputTokens, err = tokens("out", out, 0)
	return r, err
}

// textParser reads sessions with full text. A prompt holds the whole history
// without the answers, so each turn's new text is what lies beyond the previous
// prompt; a prompt that does not extend the previous one starts the history anew.
type textParser struct{}

func (*textParser) line(data []byte) (Record, error) {
	var v struct {
		Timestamp *int64  `json:"timestamp"` // microseconds
		Input     *string `json:"input"`
		Output    string  `json:"output"`
		SessionID string  `json:"session_id"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	s, err := name("session_id", v.SessionID)
	if err != nil {
		return Record{}, err
	}
	switch {
	case v.Input == nil || *v.Input == "":
		return Record{}, missing("input")
	case v.Timestamp == nil:
		return Record{}, missing("timestamp")
	case *v.Timestamp < 0 || *v.Timestamp > math.MaxInt64/1000:
		return Record{}, bad("timestamp", "%d is not a time in microseconds", *v.Timestamp)
	}
	return Record{
		Session: s, Time: time.Duration(*v.Timestamp) * time.Microsecond,
		InputTokens: textTokens(*v.Input), OutputTokens: max(1, textTokens(v.Output)),
		Text: *v.Input, Answer: v.Output,
	}, nil
}

func (*textParser) finish(rs []Record) []Record {
	rs = inTime(rs) // the files are not in the order of time
	whole := make(map[string]string)
	start := make(map[string]time.Duration)
	for i := range rs {
		r := &rs[i]
		if _, ok := start[r.Session]; !ok {
			start[r.Session] = r.Time
		}
		r.Time -= start[r.Session]
		prev, known := whole[r.Session]
		whole[r.Session] = r.Text
		if !known {
			continue
		}
		if rest, ok := strings.CutPrefix(r.Text, prev); ok && strings.TrimSpace(rest) != "" {
			r.Text = strings.TrimPrefix(rest, "\n\n")
		} else {
			r.Reset = true
		}
		r.AppendTokens = textTokens(r.Text)
	}
	return complete(rs, true)
}

// mooncakeSessionsParser reads the Mooncake trace with sessions reconstructed.
type mooncakeSessionsParser struct{}

const (
	mooncakeBlock = 512
	bailianBlock  = 16
)

func (*mooncakeSessionsParser) line(data []byte) (Record, error) {
	var v struct {
		S   *int64   `json:"s"`
		T   *float64 `json:"t"`
		In  *int64   `json:"in"`
		Out *int64   `json:"out"`
		H   []int64  `json:"h"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	if v.S == nil {
		return Record{}, missing("s")
	}
	r := Record{BlockTokens: mooncakeBlock}
	var err error
	if r, err = common(r, strconv.FormatInt(*v.S, 10), v.T, v.In, v.Out); err != nil {
		return Record{}, err
	}
	r.Blocks, err = ids("h", v.H, r.InputTokens, r.BlockTokens)
	return openWith(r), err
}

func (*mooncakeSessionsParser) finish(rs []Record) []Record { return complete(rs, true) }

// mooncakeParser reads the original schema, which has no sessions. A request
// that contains all full blocks of an earlier one beyond the first continues
// it: ids stand for whole prefixes, so the deepest known id decides.
type mooncakeParser struct {
	tail map[int64]string // last full block of a session's last prompt
	next int
}

func newMooncakeParser() *mooncakeParser { return &mooncakeParser{tail: make(map[int64]string)} }

func (p *mooncakeParser) line(data []byte) (Record, error) {
	var v struct {
		Timestamp *float64 `json:"timestamp"` // milliseconds
		In        *int64   `json:"input_length"`
		Out       *int64   `json:"output_length"`
		Hash      []int64  `json:"hash_ids"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	r := Record{BlockTokens: mooncakeBlock}
	var err error
	if r.InputTokens, err = tokens("input_length", v.In, 1); err != nil {
		return Record{}, err
	}
	if r.OutputTokens, err = tokens("output_length", v.Out, 0); err != nil {
		return Record{}, err
	}
	if v.Timestamp == nil {
		return Record{}, missing("timestamp")
	}
	s := *v.Timestamp / 1000
	if r.Time, err = seconds("timestamp", &s); err != nil {
		return Record{}, err
	}
	if r.Blocks, err = ids("hash_ids", v.Hash, r.InputTokens, r.BlockTokens); err != nil {
		return Record{}, err
	}
	r.Session = p.session(v.Hash, r.InputTokens/mooncakeBlock)
	return openWith(r), nil
}

// session finds the session whose last prompt this one extends, or opens one.
func (p *mooncakeParser) session(hash []int64, full int) string {
	full = min(full, len(hash))
	s := ""
	for i := full - 1; i > 0 && s == ""; i-- {
		if known, ok := p.tail[hash[i]]; ok {
			s = known
			delete(p.tail, hash[i])
		}
	}
	if s == "" {
		s = strconv.Itoa(p.next)
		p.next++
	}
	if full > 1 {
		p.tail[hash[full-1]] = s
	}
	return s
}

func (p *mooncakeParser) finish(rs []Record) []Record { return complete(rs, true) }

// bailianParser reads the Qwen-Bailian schema, where a turn names the request
// it follows. The first child continues its parent's session; any other child
// is a fork, so a session of its own.
type bailianParser struct {
	session  map[int64]string // by chat_id
	answered map[int64]bool   // chat_ids that already have a child
}

func newBailianParser() *bailianParser {
	return &bailianParser{session: make(map[int64]string), answered: make(map[int64]bool)}
}

func (p *bailianParser) line(data []byte) (Record, error) {
	var v struct {
		Chat   *int64   `json:"chat_id"`
		Parent *int64   `json:"parent_chat_id"` // -1 = none
		T      *float64 `json:"timestamp"`      // seconds
		In     *int64   `json:"input_length"`
		Out    *int64   `json:"output_length"`
		Hash   []int64  `json:"hash_ids"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	if v.Chat == nil {
		return Record{}, missing("chat_id")
	}
	r := Record{BlockTokens: bailianBlock}
	var err error
	if r.InputTokens, err = tokens("input_length", v.In, 1); err != nil {
		return Record{}, err
	}
	if r.OutputTokens, err = tokens("output_length", v.Out, 0); err != nil {
		return Record{}, err
	}
	if r.Time, err = seconds("timestamp", v.T); err != nil {
		return Record{}, err
	}
	if r.Blocks, err = ids("hash_ids", v.Hash, r.InputTokens, r.BlockTokens); err != nil {
		return Record{}, err
	}
	r.Session, r.Parent = p.place(*v.Chat, v.Parent)
	return openWith(r), nil
}

func (p *bailianParser) place(chat int64, parent *int64) (session, fork string) {
	session = strconv.FormatInt(chat, 10)
	if parent != nil {
		if s, ok := p.session[*parent]; ok {
			if p.answered[*parent] {
				fork = s
			} else {
				session = s
			}
			p.answered[*parent] = true
		}
	}
	p.session[chat] = session
	return session, fork
}

func (p *bailianParser) finish(rs []Record) []Record { return complete(rs, true) }
