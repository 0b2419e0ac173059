package trace

import (
	"encoding/csv"
	"errors"
	"io"
	"math"
	"slices"
	"strconv"
	"time"
)

const wekaBlock = 64

// Opening is the shared start of a session's prompts.
type Opening struct{ ToolTokens, SystemTokens int }

// Boilerplate maps a session to its opening. Sessions with equal openings share
// the blocks of it: ids in the file are comparable only inside one session, so
// the file itself cannot say so.
type Boilerplate map[string]Opening

// wekaParser reads Claude Code sessions with runs of 64-token blocks.
type wekaParser struct{ boilerplate Boilerplate }

func (p *wekaParser) line(data []byte) (Record, error) {
	var v struct {
		S      string    `json:"s"`
		Parent *string   `json:"parent"`
		T      *float64  `json:"t"`
		In     *int64    `json:"in"`
		Out    *int64    `json:"out"`
		Append *int64    `json:"append"`
		Think  *float64  `json:"think"`
		H      [][]int64 `json:"h"`
	}
	if err := unmarshal(data, &v); err != nil {
		return Record{}, err
	}
	r, err := common(Record{BlockTokens: wekaBlock}, v.S, v.T, v.In, v.Out)
	if err != nil {
		return Record{}, err
	}
	if v.Parent != nil {
		r.Parent = *v.Parent
	}
	if v.Append != nil {
		if r.AppendTokens, err = tokens("append", v.Append, 0); err != nil {
			return Record{}, err
		}
	}
	if r.Think, err = seconds("think", v.Think); err != nil {
		return Record{}, err
	}
	r.Think = max(0, r.Think)
	local := spaceOf("weka-session", v.S)
	if r.Blocks, err = runs(v.H, local, r.InputTokens, wekaBlock); err != nil {
		return Record{}, err
	}
	p.share(&r)
	return r, nil
}

// share gives the opening blocks ids keyed by (tool_tokens, system_tokens). A
// prompt whose first run is not the session's own opening is left alone: its
// boilerplate was edited.
func (p *wekaParser) share(r *Record) {
	o, ok := p.boilerplate[r.Session]
	n := (o.ToolTokens + o.SystemTokens) / wekaBlock
	if !ok || n <= 0 || len(r.Blocks) == 0 || r.Blocks[0].First != 1 {
		return
	}
	first := r.Blocks[0]
	n = min(n, first.Len)
	r.SharedSpace = spaceOf("weka-opening", strconv.Itoa(o.ToolTokens)+"/"+strconv.Itoa(o.SystemTokens))
	r.SharedTokens = n * wekaBlock
	mapped := []Run{{Space: r.SharedSpace, First: first.First, Len: n}}
	if n < first.Len {
		mapped = append(mapped, Run{Space: first.Space, First: first.First + int64(n), Len: first.Len - n})
	}
	r.Blocks = append(mapped, r.Blocks[1:]...)
}

// finish keeps the recorded idle times; a session does not start with one.
func (p *wekaParser) finish(rs []Record) []Record {
	rs = complete(inTime(rs), false)
	for i := range rs {
		if rs[i].Turn == 0 {
			rs[i].Think = 0
		}
	}
	return rs
}

// ReadBoilerplate reads the statistics file beside the weka sessions: a CSV
// with the columns session, tool_tokens and system_tokens.
func ReadBoilerplate(r io.Reader, fileName string) (Boilerplate, error) {
	l, err := newLines(r, fileName)
	if err != nil {
		return nil, err
	}
	c := csv.NewReader(io.LimitReader(l.r, maxLineBytes))
	head, err := c.Read()
	if err != nil {
		return nil, notCSV(fileName, err)
	}
	var cols [3]int
	for i, h := range []string{"session", "tool_tokens", "system_tokens"} {
		if cols[i] = slices.Index(head, h); cols[i] < 0 {
			return nil, &Error{Name: fileName, Line: 1, Field: h, Msg: "the column is missing",
				Remedy: "give the sessions index of the weka traces"}
		}
	}
	out := make(Boilerplate)
	for {
		row, err := c.Read()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, notCSV(fileName, err)
		}
		tool, err1 := strconv.ParseUint(row[cols[1]], 10, 24)
		system, err2 := strconv.ParseUint(row[cols[2]], 10, 24)
		if errors.Join(err1, err2) != nil {
			line, _ := c.FieldPos(0)
			return nil, &Error{Name: fileName, Line: line, Field: "tool_tokens", Msg: "not a token count",
				Remedy: "correct the value"}
		}
		out[row[cols[0]]] = Opening{ToolTokens: int(tool), SystemTokens: int(system)}
	}
}

func notCSV(fileName string, err error) error {
	return &Error{Name: fileName, Msg: "not CSV: " + err.Error(), Remedy: "fetch the file again"}
}

// LongestThink limits idle times to most, so that a lunch break does not stop a
// replay, and says how many were cut. most ≤ 0 limits nothing.
func LongestThink(rs []Record, most time.Duration) (cut int) {
	if most <= 0 {
		most = math.MaxInt64
	}
	for i := range rs {
		if rs[i].Think > most {
			rs[i].Think, cut = most, cut+1
		}
	}
	return cut
}
