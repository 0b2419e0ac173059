package block

import (
	"bytes"

	"github.com/kvc-dev/kvc/router/scan"
)

// billing starts the text that coding agents put first in the system prompt and
// change in every request:
//
//	x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch=01234;
const billing = "x-anthropic-billing-header:"

// maxBilling bounds what is taken for that text when it has another form.
const maxBilling = 512

// BillingHeader returns the span (for scan.Splice.Cut) of a leading system text
// block that starts with "x-anthropic-billing-header:" (R125); ok is false when
// there is none.
//
// It looks at the top-level system member, else at the first message when its
// role is system or developer; content may be a string or parts. A part that
// holds nothing else goes with its comma; the only part, and a string, keep
// their quotes. When the prompt itself follows in the same text, only the
// header and the line breaks after it are cut.
func BillingHeader(r Route, b *scan.Body) (cut [2]int, ok bool) {
	if r == Completions || r == Generate || !bytes.Contains(b.Bytes(), []byte(billing)) {
		return cut, false
	}
	v, ok := b.Get("system")
	if !ok || isNull(v.Raw) {
		if v, ok = firstSystemMessage(b); !ok {
			return cut, false
		}
	}
	cut, ok = billingSpan(v.Raw)
	return [2]int{v.Start + cut[0], v.Start + cut[1]}, ok
}

// firstSystemMessage is the content of messages[0] when that is a system prompt.
func firstSystemMessage(b *scan.Body) (v scan.Value, ok bool) {
	messages, _ := b.Get("messages")
	it := scan.Iterate(messages.Raw)
	if !it.Next() {
		return v, false
	}
	role, _ := scan.Find(it.Value(), "role")
	if string(role.Raw) != `"system"` && string(role.Raw) != `"developer"` {
		return v, false
	}
	if v, ok = scan.Find(it.Value(), "content"); !ok {
		return v, false
	}
	at, _ := it.Span()
	v.Start += messages.Start + at
	return v, true
}

// billingSpan finds the cut in raw content, relative to it.
func billingSpan(raw []byte) (cut [2]int, ok bool) {
	if n := billingLen(raw); n > 0 {
		return [2]int{1, 1 + n}, true
	}
	if raw[0] != '[' {
		return cut, false
	}
	it := scan.Iterate(raw)
	if !it.Next() {
		return cut, false
	}
	from, _ := it.Span()
	text, _ := scan.Find(it.Value(), "text")
	n := billingLen(text.Raw)
	if n == 0 {
		return cut, false
	}
	if n == len(text.Raw)-2 && it.Next() {
		next, _ := it.Span()
		return [2]int{from, next}, true
	}
	from += text.Start + 1
	return [2]int{from, from + n}, true
}

// billingLen is how many bytes of the inside of a raw string are the header
// with the line breaks after it, 0 = it does not start so.
func billingLen(raw []byte) int {
	if len(raw) < 2 || raw[0] != '"' {
		return 0
	}
	inner := raw[1 : len(raw)-1]
	if !bytes.HasPrefix(inner, []byte(billing)) {
		return 0
	}
	n := len(billing)
	fields := billingFields(inner[n:])
	line := bytes.IndexByte(inner[n:], '\\')
	switch {
	case fields > 0:
		n += fields
	case line >= 0 && line <= maxBilling:
		n += line
	case line < 0 && len(inner) <= maxBilling:
		n = len(inner)
	default:
		return 0
	}
	return n + lineBreaks(inner[n:])
}

// billingFields is the length of the "name=value;" fields at the start of b.
func billingFields(b []byte) int {
	end := 0
	for {
		rest := bytes.TrimLeft(b[end:], " ")
		name := bytes.IndexByte(rest, '=')
		if name <= 0 || bytes.ContainsFunc(rest[:name], notInName) {
			return end
		}
		stop := bytes.IndexAny(rest, ";\\\"")
		if stop < name || rest[stop] != ';' || stop > maxBilling {
			return end
		}
		end = len(b) - len(rest) + stop + 1
	}
}

func notInName(r rune) bool {
	return r != '_' && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
}

// lineBreaks is the length of the escaped line breaks at the start of b.
func lineBreaks(b []byte) int {
	n := 0
	for len(b) >= n+2 && b[n] == '\\' && (b[n+1] == 'n' || b[n+1] == 'r') {
		n += 2
	}
	return n
}
