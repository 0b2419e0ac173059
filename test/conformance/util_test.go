package conformance

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"testing"
)

// readUntil reads until the bytes end with want.
func readUntil(t testing.TB, r io.Reader, want string) string {
	t.Helper()
	var got strings.Builder
	buf := make([]byte, 4096)
	for !strings.HasSuffix(got.String(), want) {
		n, err := r.Read(buf)
		got.Write(buf[:n])
		if err != nil {
			t.Fatalf("after %q: %v", got.String(), err)
		}
	}
	return got.String()
}

// readAll reads to the end, which has to be a proper one.
func readAll(t testing.TB, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("after %q: %v", b, err)
	}
	return string(b)
}

// syncBuffer is a buffer that logs are written to from many goroutines.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
