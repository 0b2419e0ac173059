package trace

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// BytesPerToken is the length of the text of one synthetic token: the emulator
// reads four ASCII bytes as a token, and for a real tokenizer four is the usual
// English average (synthetic words cost it two to three times as many).
const BytesPerToken = 4

// spaceOf derives a space of block ids from names. It is never Global.
func spaceOf(kind, s string) Space {
	h := xxh3.HashString(kind + "\x00" + s)
	if h == uint64(Global) {
		h = 1
	}
	return Space(h)
}

// textTokens counts the tokens of a text at BytesPerToken.
func textTokens(s string) int { return (len(s) + BytesPerToken - 1) / BytesPerToken }

const (
	consonants = "bdfghklmnprstvwz" // 16
	vowels     = "aeio"             // 4
	endings    = "      nrstaeio"   // 14: six in fourteen end a word
)

// appendTokens writes the text of tokens [from, to) of a block: four lower-case
// ASCII bytes each, no character that JSON escapes. The same arguments give the
// same bytes everywhere and for ever.
func appendTokens(dst []byte, s Space, id int64, from, to int) []byte {
	var key [16]byte
	binary.LittleEndian.PutUint64(key[:8], uint64(s))
	binary.LittleEndian.PutUint64(key[8:], uint64(id))
	base := xxh3.Hash(key[:])
	for i := from; i < to; i++ {
		x := mix(base + uint64(i)*0x9e3779b97f4a7c15)
		dst = append(dst,
			consonants[x&15], vowels[x>>4&3], consonants[x>>6&15], endings[(x>>10)%14])
	}
	return dst
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// layout is the text of a prompt made of blocks. Tokens beyond the last block
// belong to a tail of the session's own.
type layout struct {
	blocks      []Run
	blockTokens int
	tail        Space
}

// appendRange writes the text of tokens [from, to).
func (l layout) appendRange(dst []byte, from, to int) []byte {
	at := 0 // first token of the run
	for _, r := range l.blocks {
		end := at + r.Len*l.blockTokens
		for from < min(to, end) {
			k := (from - at) / l.blockTokens
			start := at + k*l.blockTokens
			upTo := min(to, start+l.blockTokens)
			dst = appendTokens(dst, r.Space, r.First+int64(k), from-start, upTo-start)
			from = upTo
		}
		at = end
	}
	if from < to {
		dst = appendTokens(dst, l.tail, int64(from), 0, to-from)
	}
	return dst
}
