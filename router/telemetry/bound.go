package telemetry

import (
	"strings"
	"sync"
)

const (
	maxLabel  = 64 // bytes of a label value that comes off the wire
	maxValues = 64 // distinct values of one such label; our own sets are half as large
)

// labelBound keeps what comes off a wire usable as the values of one label: a
// peer must not be able to make series without end (R114). The zero value is
// ready.
type labelBound struct {
	mu   sync.Mutex
	seen map[string]struct{}
}

// of is s, or "other" when it is not shaped like a value of our own sets or is
// one too many of them.
func (b *labelBound) of(s string) string {
	if !shaped(s) {
		return "other"
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, known := b.seen[s]; known {
		return s
	}
	if len(b.seen) >= maxValues {
		return "other"
	}
	if b.seen == nil {
		b.seen = map[string]struct{}{}
	}
	b.seen[s] = struct{}{}
	return s
}

func shaped(s string) bool {
	return len(s) <= maxLabel && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("-_:./", r)
	})
}
