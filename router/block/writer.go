package block

import (
	"bytes"
	"encoding/binary"
	"math/bits"

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
	for len(inner) > 0 {
		w.room(Bytes)
		n, used := unescape(w.buf[len(w.buf):cap(w.buf)], inner)
		w.buf = w.buf[:len(w.buf)+n]
		inner = inner[used:]
	}
}

// unescape decodes as much of src as fits into dst (at least 16 bytes long) and
// returns how many bytes it wrote and read. Copying and looking for the next
// escape are one loop: source code has an escape every few bytes.
func unescape(dst, src []byte) (n, used int) {
	for n+8 <= len(dst) && used+8 <= len(src) {
		x := binary.LittleEndian.Uint64(src[used:])
		binary.LittleEndian.PutUint64(dst[n:], x)
		m := special(x)
		if m == 0 {
			n, used = n+8, used+8
			continue
		}
		skip := bits.TrailingZeros64(m) / 8
		n, used = n+skip, used+skip
		if n+4 > len(dst) {
			return n, used
		}
		n, used = unescapeOne(dst, n, src, used)
	}
	for used < len(src) && n+4 <= len(dst) {
		if c := src[used]; c != '\\' && c != frame {
			dst[n] = c
			n, used = n+1, used+1
			continue
		}
		n, used = unescapeOne(dst, n, src, used)
	}
	return n, used
}

// special marks, in the high bit of a byte, the first byte of x that is a
// backslash or the frame byte; marks above the first may be false.
func special(x uint64) uint64 {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	slash, framed := x^('\\'*ones), ^x
	return ((slash-ones)&^slash | (framed-ones)&^framed) & highs
}

// unescapeOne decodes the escape or the frame byte at src[used] to dst[n].
func unescapeOne(dst []byte, n int, src []byte, used int) (int, int) {
	if src[used] == frame {
		return n + copy(dst[n:], "\uFFFD"), used + 1
	}
	switch c := src[used+1]; c {
	case '"', '\\', '/':
		dst[n] = c
	case 'n':
		dst[n] = '\n'
	case 't':
		dst[n] = '\t'
	default:
		out, rest := scan.AppendEscape(dst[:n], src[used:])
		return len(out), len(src) - len(rest)
	}
	return n + 1, used + 2
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
	const maxID, maxDigits = 1<<32 - 1, 10
	for i := 1; ; {
		for raw[i] <= ' ' || raw[i] == ',' {
			i++
		}
		if raw[i] == ']' {
			return n, true
		}
		start, id := i, uint64(0)
		for c := raw[i] - '0'; c <= 9; c = raw[i] - '0' {
			id = id*10 + uint64(c)
			i++
		}
		if c := raw[i]; i == start || i > start+maxDigits || id > maxID || c == '.' || c|0x20 == 'e' {
			return n, false
		}
		w.room(4)
		w.buf = binary.LittleEndian.AppendUint32(w.buf, uint32(id))
		n++
	}
}
