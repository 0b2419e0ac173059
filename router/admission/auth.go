package admission

import (
	"crypto/sha256"
	"crypto/subtle"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

// Tokens is the pool's bearer token file: one token a line, the first is sent,
// all are accepted (wire.md §0), so that a rotation needs no moment at which
// both sides change. The file is looked at again at most once a second, when a
// token is wanted; a file that became empty or unreadable keeps the last good
// tokens. A nil *Tokens, and one without a path, neither sends nor asks.
type Tokens struct {
	path string
	cur  atomic.Pointer[tokenSet]
}

type tokenSet struct {
	first   string
	sums    [][sha256.Size]byte
	stat    fs.FileInfo
	checked time.Time
}

const tokenRecheck = time.Second

// LoadTokens reads the file; an empty path means an open pool.
func LoadTokens(path string) (*Tokens, error) {
	t := &Tokens{path: path}
	if path == "" {
		return t, nil
	}
	s, err := readTokens(path)
	if err != nil {
		return nil, err
	}
	t.cur.Store(s)
	return t, nil
}

// StaticTokens serves fixed tokens, for tests and for the in-process demo.
func StaticTokens(tokens ...string) *Tokens {
	t := &Tokens{}
	if len(tokens) > 0 {
		t.cur.Store(newTokenSet(tokens))
	}
	return t
}

func newTokenSet(tokens []string) *tokenSet {
	s := &tokenSet{first: tokens[0], checked: time.Now()}
	for _, tok := range tokens {
		s.sums = append(s.sums, sha256.Sum256([]byte(tok)))
	}
	return s
}

func readTokens(path string) (*tokenSet, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w", err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read tokens: %w", err)
	}
	var tokens []string
	for line := range strings.Lines(string(data)) {
		if line = strings.TrimSpace(line); line != "" {
			tokens = append(tokens, line)
		}
	}
	if len(tokens) == 0 {
		return nil, fmt.Errorf("read tokens: %s holds no token; write one token a line", path)
	}
	s := newTokenSet(tokens)
	s.stat = fi
	return s, nil
}

// Reload looks at the file now.
func (t *Tokens) Reload() error {
	if t == nil || t.path == "" {
		return nil
	}
	s, err := readTokens(t.path)
	if err != nil {
		return err
	}
	t.cur.Store(s)
	return nil
}

// current returns the tokens in force, after a look at the file when the last
// one is a second old. Only the goroutine that wins the swap looks.
func (t *Tokens) current() *tokenSet {
	if t == nil {
		return nil
	}
	s := t.cur.Load()
	if s == nil || t.path == "" || time.Since(s.checked) < tokenRecheck {
		return s
	}
	seen := *s
	seen.checked = time.Now()
	if !t.cur.CompareAndSwap(s, &seen) {
		return t.cur.Load()
	}
	fi, err := os.Stat(t.path)
	if err != nil || s.stat != nil && os.SameFile(fi, s.stat) &&
		fi.ModTime().Equal(s.stat.ModTime()) && fi.Size() == s.stat.Size() {
		return &seen
	}
	if err := t.Reload(); err != nil {
		return &seen
	}
	return t.cur.Load()
}

// First is the token to send, "" for an open pool.
func (t *Tokens) First() string {
	if s := t.current(); s != nil {
		return s.first
	}
	return ""
}

// Accepts reports whether a request carries one of the tokens. Comparison is
// constant-time over hashes (R119).
func (t *Tokens) Accepts(h http.Header) bool {
	s := t.current()
	if s == nil {
		return true
	}
	scheme, given, ok := strings.Cut(h.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return false
	}
	sum := sha256.Sum256([]byte(strings.TrimSpace(given)))
	found := 0
	for i := range s.sums {
		found |= subtle.ConstantTimeCompare(sum[:], s.sums[i][:])
	}
	return found == 1
}

// Authorize sets the Authorization header of an outgoing request, or removes
// it when the pool is open: a client's key never travels on (R38).
func (t *Tokens) Authorize(h http.Header) { SetBearer(h, t.First()) }

// SetBearer replaces Authorization by a key, or strips it when there is none (R38).
func SetBearer(h http.Header, key string) {
	if key == "" {
		h.Del("Authorization")
		return
	}
	h.Set("Authorization", "Bearer "+key)
}
