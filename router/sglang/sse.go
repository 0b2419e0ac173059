package sglang

import "bytes"

// MaxEvent is the longest event, in bytes, that Events holds back to observe it
// whole. A longer one is handed on in pieces without data.
const MaxEvent = 4 << 20

// keepBuffer is the largest buffer an idle Events keeps.
const keepBuffer = 64 << 10

// Events splits a byte stream into server-sent events incrementally. It never
// decodes text: a rune cut between reads stays cut in the relayed bytes.
//
// The raw bytes of all calls, in order, are the stream: nothing is dropped or
// added. Lines end with LF, CRLF or CR. Where the stream is cut makes no
// difference to what is reported, except for events beyond MaxEvent.
type Events struct {
	buf  []byte // of the event begun in earlier calls
	data []byte // joined data lines, reused

	inLine    bool // the current line has bytes
	afterCR   bool // a line just ended with CR; an LF would belong to it
	blankCR   bool // that line was blank, so it ends the event
	cr        bool // the last whole line of this event ended with a lone CR
	oversized bool // pieces of this event have been handed on
}

// Feed consumes the next bytes and calls f for each complete event with its raw
// bytes (including the blank line; valid until f returns) and its data payload.
// data is nil for an event without data (a comment, a blank line) and for one
// beyond MaxEvent.
func (e *Events) Feed(p []byte, f func(raw, data []byte)) {
	view, from := p, 0
	if len(e.buf) > 0 {
		from = len(e.buf)
		e.buf = append(e.buf, p...)
		view = e.buf
	}
	start := 0
	for {
		end := e.next(view, from)
		if end < 0 {
			break
		}
		e.emit(view[start:end], f)
		start, from = end, end
	}
	e.keep(view[start:], f)
}

// End hands on what is left when the stream has ended: an event whose last line
// break could have been longer, whole, or the start of an event that was cut
// off, without data.
func (e *Events) End(f func(raw, data []byte)) {
	if e.closing() {
		e.emit(e.buf, f)
	} else if len(e.buf) > 0 {
		f(e.buf, nil)
	}
	*e = Events{}
}

// Mid reports whether the stream stands inside an event (bytes fed after the
// last complete event).
func (e *Events) Mid() bool {
	return (len(e.buf) > 0 || e.oversized) && !e.closing()
}

// closing reports a whole event whose last CR an LF may still follow.
func (e *Events) closing() bool { return e.afterCR && e.blankCR }

// Whole reports that p, fed next, would complete every event it touches, and so
// need not be fed: the stream stands between events, and p ends with a blank
// line.
func (e *Events) Whole(p []byte) bool {
	return len(e.buf) == 0 && !e.oversized && !e.inLine && !e.afterCR && bytes.HasSuffix(p, []byte("\n\n"))
}

// next returns the offset after the event that ends in view[from:], or -1.
func (e *Events) next(view []byte, from int) int {
	i := from
	for i < len(view) {
		if e.afterCR {
			lf := view[i] == '\n'
			if lf {
				i++
			}
			e.afterCR, e.cr = false, !lf
			if e.blankCR {
				return i
			}
			continue
		}
		n := lineEnd(view[i:])
		if n < 0 {
			e.inLine = true
			return -1
		}
		blank := n == 0 && !e.inLine
		c := view[i+n]
		i += n + 1
		e.inLine = false
		switch {
		case c == '\r' && (!blank || !e.cr):
			e.afterCR, e.blankCR = true, blank
		case blank:
			return i
		default:
			e.cr = false
		}
	}
	return -1
}

// lineEnd is the offset of the first LF or CR, or -1.
func lineEnd(b []byte) int {
	n := bytes.IndexByte(b, '\n')
	if n >= 0 {
		b = b[:n]
	}
	if cr := bytes.IndexByte(b, '\r'); cr >= 0 {
		return cr
	}
	return n
}

func (e *Events) emit(raw []byte, f func(raw, data []byte)) {
	var data []byte
	if !e.oversized {
		data = e.payload(raw)
	}
	e.inLine, e.afterCR, e.blankCR, e.cr, e.oversized = false, false, false, false, false
	f(raw, data)
}

// keep holds back the bytes of an unfinished event.
func (e *Events) keep(rest []byte, f func(raw, data []byte)) {
	if len(rest) > 0 && (e.oversized || len(rest) > MaxEvent) {
		e.oversized = true
		f(rest, nil)
		rest = nil
	}
	if len(rest) == 0 && cap(e.buf) > keepBuffer {
		e.buf = nil
	}
	e.buf = append(e.buf[:0], rest...)
}

// payload is the data of a raw event: nil when it has none. Several data lines
// are joined by LF, as the standard says.
func (e *Events) payload(raw []byte) []byte {
	if n := lineEnd(raw); n >= 0 && isData(raw[:n]) && string(raw[n:]) == "\n\n" {
		return dataValue(raw[:n])
	}
	e.data = e.data[:0]
	found := false
	for len(raw) > 0 {
		n := lineEnd(raw)
		if n < 0 {
			n = len(raw)
		}
		line := raw[:n]
		raw = raw[min(n+1, len(raw)):]
		if !isData(line) {
			continue
		}
		if found {
			e.data = append(e.data, '\n')
		}
		found = true
		e.data = append(e.data, dataValue(line)...)
	}
	if !found {
		return nil
	}
	return e.data
}

const dataField = "data"

// isData reports a line of the field "data", with or without a value.
func isData(line []byte) bool {
	return len(line) >= len(dataField) && string(line[:len(dataField)]) == dataField &&
		(len(line) == len(dataField) || line[len(dataField)] == ':')
}

// dataValue is what follows the colon of a data line, less one space. It is
// never nil.
func dataValue(line []byte) []byte {
	value := line[len(dataField):]
	if len(value) > 0 {
		value = value[1:]
	}
	if len(value) > 0 && value[0] == ' ' {
		value = value[1:]
	}
	return value
}
