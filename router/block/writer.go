package block

import (
	"bytes"
	"encoding/binary"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/scan"
)

// Scratch holds reusable buffers. A Scratch serves one call at a time, and the
// Blocks of a Chain made with it are valid until its next use.
type Scratch struct {
	buf    []byte
	blocks []Hash
	media  []byte
}

// bufBytes is how many canonical bytes are gathered before they are hashed: the
// prompt itself is never copied whole.
const bufBytes = 64 * Bytes

// frame starts every field; see the package comment.
const frame = 0xFF

// writer hashes canonical bytes as they are written.
type writer struct {
	*Scratch
	seed  uint64
	total int // bytes already hashed or dropped from buf
}

func newWriter(s *Scratch, seed uint64) *writer {
	if s == nil {
		s = new(Scratch)
	}
	if s.buf == nil {
		s.buf = make([]byte, 0, bufBytes)
	}
	s.buf, s.blocks = s.buf[:0], s.blocks[:0]
	return &writer{Scratch: s, seed: seed}
}

// flush hashes the full blocks gathered so far.
func (w *writer) flush() {
	n := 0
	for ; n+Bytes <= len(w.buf); n += Bytes {
		w.seed = xxh3.HashSeed(w.buf[n:n+Bytes], w.seed)
		w.blocks = append(w.blocks, Hash(w.seed))
	}
	w.buf = w.buf[:copy(w.buf, w.buf[n:])]
	w.total += n
}

// room makes sure that n ≤ Bytes more bytes fit.
func (w *writer) room(n int) {
	if cap(w.buf)-len(w.buf) < n {
		w.flush()
	}
}

// size is the number of canonical bytes written.
func (w *writer) size() int { return w.total + len(w.buf) }

func (w *writer) write(p []byte) {
	for len(p) > 0 {
		n := copy(w.buf[len(w.buf):cap(w.buf)], p)
		w.buf = w.buf[:len(w.buf)+n]
		p = p[n:]
		if len(w.buf) == cap(w.buf) {
			w.flush()
		}
	}
}

// field starts a field of the given kind.
func (w *writer) field(kind byte) {
	w.room(2)
	w.buf = append(w.buf, frame, kind)
}

// text writes the inside of a JSON string, unescaped.
func (w *writer) text(inner []byte) {
	for {
		n := bytes.IndexByte(inner, '\\')
		if n < 0 {
			w.clean(inner)
			return
		}
		w.clean(inner[:n])
		w.room(4)
		w.buf, inner = scan.AppendEscape(w.buf, inner[n:])
	}
}

// clean writes bytes without escapes; the frame byte reads as U+FFFD.
func (w *writer) clean(p []byte) {
	for {
		n := bytes.IndexByte(p, frame)
		if n < 0 {
			w.write(p)
			return
		}
		w.write(p[:n])
		w.room(3)
		w.buf = append(w.buf, "\uFFFD"...)
		p = p[n+1:]
	}
}

// str writes a field whose payload is a raw JSON string. Anything else than a
// non-empty string writes nothing and returns false.
func (w *writer) str(kind byte, raw []byte) bool {
	if len(raw) <= 2 || raw[0] != '"' {
		return false
	}
	w.field(kind)
	w.text(raw[1 : len(raw)-1])
	return true
}

// media writes the hash of a url or of inline data.
func (w *writer) media(raw []byte) bool {
	if len(raw) == 0 || raw[0] != '"' {
		return false
	}
	data := raw[1 : len(raw)-1]
	if bytes.IndexByte(data, '\\') >= 0 {
		w.Scratch.media = scan.AppendUnescaped(w.Scratch.media[:0], raw)
		data = w.Scratch.media
	}
	w.field('I')
	w.room(16)
	w.buf = Hash(xxh3.Hash(data)).appendHex(w.buf)
	return true
}

// value writes any JSON value in the client's own member order. cache_control
// is left out of the outermost skip levels of objects: deeper it may be the
// name of a parameter.
func (w *writer) value(raw []byte, skip int) {
	switch raw[0] {
	case '"':
		w.field('S')
		w.text(raw[1 : len(raw)-1])
	case '{':
		w.field('{')
		for it := scan.Iterate(raw); it.Next(); {
			if skip > 0 && it.KeyIs("cache_control") {
				continue
			}
			w.field('K')
			w.text(it.Key())
			w.value(it.Value(), skip-1)
		}
		w.field('}')
	case '[':
		w.field('[')
		for it := scan.Iterate(raw); it.Next(); {
			w.value(it.Value(), skip)
		}
		w.field(']')
	default:
		w.field('V')
		w.write(raw)
	}
}

// ids writes an array of token ids as little-endian u32; ok is false when
// it holds anything else.
func (w *writer) ids(raw []byte) (n int, ok bool) {
	const maxID = 1<<32 - 1
	for i := 1; ; {
		for raw[i] == ' ' || raw[i] == ',' || raw[i] == '\n' || raw[i] == '\t' || raw[i] == '\r' {
			i++
		}
		if raw[i] == ']' {
			return n, true
		}
		start, id := i, uint64(0)
		for raw[i]-'0' <= 9 && id <= maxID {
			id = id*10 + uint64(raw[i]-'0')
			i++
		}
		if i == start || id > maxID || raw[i] == '.' || raw[i]|0x20 == 'e' {
			return n, false
		}
		w.room(4)
		w.buf = binary.LittleEndian.AppendUint32(w.buf, uint32(id))
		n++
	}
}
