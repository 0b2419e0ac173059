package block

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"
)

// Seed starts a chain: model, format version and cache salt.
func Seed(model, salt string) uint64 {
	b := make([]byte, 0, 64+len(model)+len(salt))
	b = append(b, Format...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(model)))
	b = append(b, model...)
	b = append(b, salt...)
	return xxh3.Hash(b)
}

const hashBytes = 8

// Encode is base64 (std, padded) of little-endian u64 in chain order (wire.md §0).
func Encode(hs []Hash) string {
	raw := make([]byte, 0, len(hs)*hashBytes)
	for _, h := range hs {
		raw = binary.LittleEndian.AppendUint64(raw, uint64(h))
	}
	return base64.StdEncoding.EncodeToString(raw)
}

// Decode reads Encode's form.
func Decode(s string) ([]Hash, error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(s)
	if err == nil && strings.ContainsAny(s, "\r\n") {
		err = errors.New("line break inside base64") // the decoder skips them
	}
	if err != nil {
		return nil, fmt.Errorf("decode block list: %w", err)
	}
	if len(raw)%hashBytes != 0 {
		return nil, fmt.Errorf("decode block list: %d bytes are no whole number of 8-byte hashes", len(raw))
	}
	if len(raw) == 0 {
		return nil, nil
	}
	hs := make([]Hash, len(raw)/hashBytes)
	for i := range hs {
		hs[i] = Hash(binary.LittleEndian.Uint64(raw[i*hashBytes:]))
	}
	return hs, nil
}

const hexDigits = "0123456789abcdef"

// String is 16 lower-case hex digits.
func (h Hash) String() string {
	var b [16]byte
	return string(h.appendHex(b[:0]))
}

func (h Hash) appendHex(dst []byte) []byte {
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, hexDigits[h>>shift&15])
	}
	return dst
}

var errHash = errors.New("a block hash is 16 lower-case hex digits")

// ParseHash reads String's form.
func ParseHash(s string) (Hash, error) {
	if len(s) != 16 {
		return 0, errHash
	}
	var h Hash
	for i := range len(s) {
		c := s[i]
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		default:
			return 0, errHash
		}
		h = h<<4 | Hash(c)
	}
	return h, nil
}
