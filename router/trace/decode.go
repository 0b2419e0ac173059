package trace

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Format is a schema of trace files.
type Format string

// The schemas we read. All are JSON lines, gzipped or not.
const (
	Auto             Format = ""                  // by the keys of the first line
	Weka             Format = "weka"              // runs of 64-token blocks, ids local to a session
	LMCache          Format = "lmcache-b24"       // runs of 24-token blocks, global ids
	LMCacheText      Format = "lmcache-text"      // full prompts and answers
	Mooncake         Format = "mooncake"          // 512-token global ids, no sessions
	MooncakeSessions Format = "mooncake-sessions" // the same with sessions reconstructed
	Bailian          Format = "bailian"           // 16-token global ids, parent pointers
)

// Formats lists the schemas that can be asked for by name.
func Formats() []Format {
	return []Format{Weka, LMCache, LMCacheText, Mooncake, MooncakeSessions, Bailian}
}

// Bounds of what a file may claim. A line that exceeds one is an error with the
// line's number, never an allocation of that size.
const (
	maxLineBytes   = 32 << 20
	maxTokens      = 1 << 24 // of one prompt or answer
	maxRecords     = 4 << 20
	maxTextBytes   = 1 << 30 // of all texts kept
	maxNameBytes   = 256     // of a session name
	maxSecondsSpan = 1 << 31
)

// Options steer Decode. The zero value reads everything and recognises the schema.
type Options struct {
	Name        string // of the file, for errors
	Format      Format
	Limit       int         // stop after so many records; 0 = all
	Boilerplate Boilerplate // weka: the shared opening of each session
}

// Error says where a trace is wrong and what to do about it.
type Error struct {
	Name   string
	Line   int    // 1-based; 0 = the whole file
	Field  string // "" = the whole line
	Msg    string
	Remedy string
}

// Error is one sentence: file, line, field, what is wrong, the remedy.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Name)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Field != "" {
		fmt.Fprintf(&b, "field %q: ", e.Field)
	}
	b.WriteString(e.Msg)
	if e.Remedy != "" {
		b.WriteString("; " + e.Remedy)
	}
	return b.String()
}

// parser turns the lines of one schema into records. finish sees all records
// after the last line and may reorder and complete them.
type parser interface {
	line(data []byte) (Record, error)
	finish(rs []Record) []Record
}

// Decode reads a trace, gzipped or not. Errors are *Error for what is wrong
// with the content and the reader's own error otherwise.
func Decode(r io.Reader, o Options) (*Trace, error) {
	if o.Name == "" {
		o.Name = "trace"
	}
	lines, err := newLines(r, o.Name)
	if err != nil {
		return nil, err
	}
	t := &Trace{Format: o.Format}
	p, err := t.read(lines, o)
	if err != nil {
		return nil, err
	}
	if p == nil {
		return nil, &Error{Name: o.Name, Msg: "no records", Remedy: "give a file with one JSON object per line"}
	}
	t.Records = p.finish(t.Records)
	return t, nil
}

// read collects the records; the parser is nil when there is not one line.
func (t *Trace) read(lines *lines, o Options) (p parser, err error) {
	text := 0
	for o.Limit <= 0 || len(t.Records) < o.Limit {
		data, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if p == nil {
			if p, t.Format, err = pick(o, data); err != nil {
				return nil, lines.at(err)
			}
		}
		rec, err := p.line(data)
		if err != nil {
			return nil, lines.at(err)
		}
		if text += len(rec.Text) + len(rec.Answer); text > maxTextBytes || len(t.Records) >= maxRecords {
			return nil, lines.at(&Error{Msg: "the trace is too large", Remedy: "read part of it with a limit"})
		}
		t.Records = append(t.Records, rec)
	}
	return p, nil
}

// pick chooses the parser: by name, else by the keys of the first line.
func pick(o Options, first []byte) (parser, Format, error) {
	f := o.Format
	if f == Auto {
		var err error
		if f, err = detect(first); err != nil {
			return nil, f, err
		}
	}
	switch f {
	case Weka:
		return &wekaParser{boilerplate: o.Boilerplate}, f, nil
	case LMCache:
		return &b24Parser{}, f, nil
	case LMCacheText:
		return &textParser{}, f, nil
	case Mooncake:
		return newMooncakeParser(), f, nil
	case MooncakeSessions:
		return &mooncakeSessionsParser{}, f, nil
	case Bailian:
		return newBailianParser(), f, nil
	}
	return nil, f, &Error{Msg: fmt.Sprintf("unknown format %q", f), Remedy: "use one of " + formatNames()}
}

func formatNames() string {
	var names []string
	for _, f := range Formats() {
		names = append(names, string(f))
	}
	return strings.Join(names, ", ")
}

// detect recognises a schema by the keys that only it has.
func detect(first []byte) (Format, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(first, &keys); err != nil {
		return Auto, jsonError(err)
	}
	for _, m := range marks() {
		if hasAll(keys, m.keys) {
			return m.format, nil
		}
	}
	return Auto, &Error{Msg: "the keys of this line belong to no known trace format",
		Remedy: "name the format, one of " + formatNames()}
}

type mark struct {
	format Format
	keys   []string
}

// marks are the keys that tell the schemas apart, the most particular first.
func marks() []mark {
	return []mark{
		{Bailian, []string{"chat_id", "hash_ids"}},
		{Mooncake, []string{"hash_ids"}},
		{LMCacheText, []string{"input", "session_id"}},
		{LMCache, []string{"s", "abs_t"}},
		{Weka, []string{"s", "think"}},
		{MooncakeSessions, []string{"s", "h"}},
	}
}

func hasAll(keys map[string]json.RawMessage, want []string) bool {
	for _, k := range want {
		if _, ok := keys[k]; !ok {
			return false
		}
	}
	return true
}

// lines reads bounded lines and knows where it stands.
type lines struct {
	name string
	n    int
	r    *bufio.Reader
	buf  []byte
}

func newLines(r io.Reader, name string) (*lines, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	if magic, err := br.Peek(2); err == nil && magic[0] == 0x1f && magic[1] == 0x8b {
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, &Error{Name: name, Msg: "broken gzip: " + err.Error(), Remedy: "fetch the file again"}
		}
		br = bufio.NewReaderSize(z, 64<<10)
	}
	return &lines{name: name, r: br}, nil
}

// next returns the next line that is not blank, valid until the next call, and
// io.EOF after the last.
func (l *lines) next() ([]byte, error) {
	for {
		l.n++
		l.buf = l.buf[:0]
		for {
			part, err := l.r.ReadSlice('\n')
			if len(l.buf)+len(part) > maxLineBytes {
				return nil, l.at(&Error{Msg: fmt.Sprintf("the line is longer than %d MiB", maxLineBytes>>20),
					Remedy: "give one JSON object per line"})
			}
			l.buf = append(l.buf, part...)
			if errors.Is(err, bufio.ErrBufferFull) {
				continue
			}
			if err != nil && !errors.Is(err, io.EOF) {
				return nil, l.readError(err)
			}
			data := bytes.TrimSpace(l.buf)
			if len(data) > 0 {
				return data, nil
			}
			if err != nil {
				return nil, io.EOF
			}
			break
		}
	}
}

// readError tells content that is broken, a gzip stream that was cut or damaged,
// from a reader that failed.
func (l *lines) readError(err error) error {
	_, corrupt := errors.AsType[flate.CorruptInputError](err)
	if corrupt || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, gzip.ErrChecksum) ||
		errors.Is(err, gzip.ErrHeader) {
		return l.at(&Error{Msg: "broken gzip: " + err.Error(), Remedy: "fetch the file again"})
	}
	return fmt.Errorf("read %s line %d: %w", l.name, l.n, err)
}

// at completes an *Error with the file and the line.
func (l *lines) at(err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return err
	}
	e.Name, e.Line = l.name, l.n
	return e
}

// unmarshal decodes one line into v; errors name the field.
func unmarshal(data []byte, v any) error {
	if err := json.Unmarshal(data, v); err != nil {
		return jsonError(err)
	}
	return nil
}

func jsonError(err error) error {
	if typ, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return &Error{Field: typ.Field, Msg: fmt.Sprintf("got %s, want %s", typ.Value, typ.Type),
			Remedy: "correct the value or name another format"}
	}
	return &Error{Msg: "not a JSON object: " + err.Error(), Remedy: "give one JSON object per line"}
}
