package session

import (
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/scan"
)

// requestScoped reports names whose value is new in every request. As a session
// id they would make every turn a first turn (R84).
func requestScoped(name string) bool {
	var buf [64]byte
	switch string(fold(buf[:0], name)) {
	case "x-request-id", "request-id", "x-client-request-id", "client-request-id", "x-correlation-id",
		"correlation-id", "x-amzn-trace-id", "x-amzn-requestid", "x-cloud-trace-context", "traceparent",
		"tracestate", "x-b3-traceid", "x-b3-spanid", "b3", "x-trace-id", "trace-id", "uber-trace-id",
		"idempotency-key", "x-idempotency-key", "x-stainless-retry-count", "rid", "user-request-id":
		return true
	}
	return false
}

// Validate refuses sources that can never work, with a sentence that names the
// entry.
func (c Config) Validate() error {
	for _, name := range append(append([]string(nil), c.Headers...), c.BodyFields...) {
		if strings.TrimSpace(name) == "" {
			return fmt.Errorf("session source %q is empty; remove it", name)
		}
		if requestScoped(name) {
			return fmt.Errorf("session source %q is new in every request, so no turn would find its session; remove it", name)
		}
	}
	return nil
}

// fold appends the comparable form of a header name: lower case, - for _.
func fold(dst []byte, name string) []byte {
	for i := range len(name) {
		dst = append(dst, foldByte(name[i]))
	}
	return dst
}

func foldByte(c byte) byte {
	switch {
	case c == '_':
		return '-'
	case 'A' <= c && c <= 'Z':
		return c + 'a' - 'A'
	}
	return c
}

func sameName(a, b string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		if a[i] != b[i] && foldByte(a[i]) != foldByte(b[i]) {
			return false
		}
	}
	return true
}

// headerValue is the first usable value under any spelling of name. Of several
// spellings in one request the smallest in byte order wins ("X-…" with hyphens),
// so that the answer does not depend on map order.
func headerValue(header map[string][]string, name string) (string, bool) {
	best, value := "", ""
	for key, values := range header {
		if !sameName(key, name) || best != "" && key > best {
			continue
		}
		for _, v := range values {
			if v, ok := usable(v); ok {
				best, value = key, v
				break
			}
		}
	}
	return value, best != ""
}

// bodyValue is the usable string at a dotted path.
func bodyValue(b *scan.Body, path string) (string, bool) {
	name, rest, nested := strings.Cut(path, ".")
	v, ok := b.Get(name)
	for ok && nested {
		name, rest, nested = strings.Cut(rest, ".")
		v, ok = scan.Find(v.Raw, name)
	}
	if !ok || v.Raw[0] != '"' {
		return "", false
	}
	return usable(string(scan.AppendUnescaped(nil, v.Raw)))
}

// usable trims a value and refuses what no client means as an id.
func usable(v string) (string, bool) {
	v = strings.Trim(v, " \t")
	if v == "" {
		return "", false
	}
	for i := range len(v) {
		if v[i] < ' ' || v[i] == 0x7f {
			return "", false
		}
	}
	return bounded(v), true
}

// bounded keeps ids short, so that tables and logs of them are flat (R85).
func bounded(v string) string {
	if len(v) <= MaxID {
		return v
	}
	sum := xxh3.HashString128(v).Bytes()
	return "long:" + hex.EncodeToString(sum[:])
}
