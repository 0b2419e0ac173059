package trace

import "time"

// Record is one request of a session. Counts are tokens; a count of zero means
// that the schema does not say.
type Record struct {
	Session string
	Parent  string // the session this one was forked from, "" = none
	Turn    int    // 0 = first turn of the session

	Time  time.Duration // arrival, since the start of the trace
	Think time.Duration // idle time of the client before it sends this turn

	InputTokens  int
	AppendTokens int // prompt tokens beyond what the previous turn left
	OutputTokens int

	// Blocks is the prompt as runs of equal-content blocks of BlockTokens each;
	// nil when the schema has no block ids.
	Blocks      []Run
	BlockTokens int

	// SharedTokens of SharedSpace open the prompt and are the same text in every
	// session with that space: the tools and the system prompt. They become the
	// system message.
	SharedTokens int
	SharedSpace  Space

	// Reset starts a new short history in the same session: nothing but the
	// shared opening is kept.
	Reset bool

	// Text is the recorded prompt text beyond the previous turn's, "" when the
	// schema has none. Answer is the recorded answer.
	Text   string
	Answer string
}

// Space names a set of block ids. The same id in the same space is the same
// text; ids of different spaces have nothing to do with each other.
type Space uint64

// Global is the space of ids that are comparable across all sessions of a trace.
const Global Space = 0

// Run is Len consecutive block ids that start at First.
type Run struct {
	Space Space
	First int64
	Len   int
}

// Trace is a decoded file.
type Trace struct {
	Format  Format
	Records []Record // in file order
}

// Session is the turns of one session in order.
type Session struct {
	ID    string
	Turns []Record
}

// Sessions groups records by session, in the order of their first record. The
// turns of a session keep the order they have in the trace.
func (t *Trace) Sessions() []Session {
	at := make(map[string]int)
	var out []Session
	for _, r := range t.Records {
		i, ok := at[r.Session]
		if !ok {
			i = len(out)
			at[r.Session] = i
			out = append(out, Session{ID: r.Session})
		}
		out[i].Turns = append(out[i].Turns, r)
	}
	return out
}

// blockCount is the number of blocks in runs.
func blockCount(runs []Run) int {
	n := 0
	for _, r := range runs {
		n += r.Len
	}
	return n
}

// commonBlocks is the number of equal leading blocks. Runs may be cut at
// different places and still say the same.
func commonBlocks(a, b []Run) int {
	n := 0
	var x, y Run
	for {
		if x.Len == 0 {
			if len(a) == 0 {
				return n
			}
			x, a = a[0], a[1:]
			continue
		}
		if y.Len == 0 {
			if len(b) == 0 {
				return n
			}
			y, b = b[0], b[1:]
			continue
		}
		if x.Space != y.Space || x.First != y.First {
			return n
		}
		k := min(x.Len, y.Len)
		n += k
		x.First, x.Len = x.First+int64(k), x.Len-k
		y.First, y.Len = y.First+int64(k), y.Len-k
	}
}

// appendID adds one block id to runs, extending the last run where it can.
func appendID(runs []Run, s Space, id int64) []Run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if last.Space == s && last.First+int64(last.Len) == id {
			last.Len++
			return runs
		}
	}
	return append(runs, Run{Space: s, First: id, Len: 1})
}
