package scan

import (
	"bytes"
	"unicode/utf16"
	"unicode/utf8"
)

// plain reports that a string's inner bytes hold no escape.
func plain(inner []byte) bool { return bytes.IndexByte(inner, '\\') < 0 }

// AppendUnescaped appends the text of a raw JSON string (quotes included) to
// dst. The string must have been validated by Parse.
func AppendUnescaped(dst, raw []byte) []byte {
	return appendUnescaped(dst, raw[1:len(raw)-1])
}

func appendUnescaped(dst, inner []byte) []byte {
	for {
		n := bytes.IndexByte(inner, '\\')
		if n < 0 {
			return append(dst, inner...)
		}
		dst = append(dst, inner[:n]...)
		dst, inner = AppendEscape(dst, inner[n:])
	}
}

// AppendEscape decodes the escape sequence at the start of inner, the validated
// inside of a string, and returns what follows it. It adds at most 4 bytes.
func AppendEscape(dst, inner []byte) (out, rest []byte) {
	switch c := inner[1]; c {
	case 'b':
		dst = append(dst, '\b')
	case 'f':
		dst = append(dst, '\f')
	case 'n':
		dst = append(dst, '\n')
	case 'r':
		dst = append(dst, '\r')
	case 't':
		dst = append(dst, '\t')
	case 'u':
		return appendUnicode(dst, inner)
	default: // quote, backslash, slash
		dst = append(dst, c)
	}
	return dst, inner[2:]
}

// appendUnicode decodes \uXXXX, or two of them when they form a surrogate pair.
func appendUnicode(dst, inner []byte) (out, rest []byte) {
	r, _ := hex4(inner[2:])
	rest = inner[6:]
	if utf16.IsSurrogate(r) {
		low, ok := rune(0), false
		if len(rest) >= 6 && rest[0] == '\\' && rest[1] == 'u' {
			low, ok = hex4(rest[2:])
		}
		r = utf16.DecodeRune(r, low)
		if ok && r != utf8.RuneError {
			rest = rest[6:]
		}
	}
	return utf8.AppendRune(dst, r), rest
}

// hex4 reads four hex digits.
func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, c := range b[:4] {
		switch {
		case isDigit(c):
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// AppendQuoted appends s as a JSON string, for Member values. Bytes that need
// no escape are copied as they are.
func AppendQuoted(dst []byte, s string) []byte {
	const hexDigits = "0123456789abcdef"
	dst = append(dst, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < 0x20:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, '"')
}

// Quoted is s as a raw JSON string.
func Quoted(s string) []byte { return AppendQuoted(make([]byte, 0, len(s)+2), s) }
