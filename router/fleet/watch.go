package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Source tells which workers are alive. Run calls apply with the whole fleet,
// first as soon as it is known and then after each change, from one goroutine;
// apply must not keep the file's slices beyond changing them. Run returns when
// ctx ends (nil) or when the source can never work (an error).
type Source interface {
	Run(ctx context.Context, apply func(*File)) error
}

// FileSource reads a fleet file and follows it. A change that does not parse
// keeps the last good fleet (R113).
type FileSource struct {
	Path string
	Log  *slog.Logger
	// Rejected is called for each change that was refused; nil is fine.
	Rejected func(error)
}

// Run implements Source. A file that is unreadable or invalid at the start is
// an error; later it is a logged, counted event.
func (s *FileSource) Run(ctx context.Context, apply func(*File)) error {
	first := true
	return Follow(ctx, s.Path, func(data []byte, err error) error {
		var f *File
		if err == nil {
			f, err = Parse(s.Path, data)
		}
		switch {
		case err == nil:
			first = false
			apply(f)
			return nil
		case first:
			return err
		}
		s.Log.Error("fleet file refused; the last good one stays", "file", s.Path, "error", err)
		if s.Rejected != nil {
			s.Rejected(err)
		}
		return nil
	})
}

const (
	settle    = 20 * time.Millisecond  // several events of one change become one read
	settleMax = 200 * time.Millisecond // others may write in the directory without end
	pollEvery = 500 * time.Millisecond // where the kernel gives us no watch
)

// Follow calls f with the file's bytes at once and after each change of its
// content, until ctx ends or f returns an error. It watches the directory, so
// renames over the file and Kubernetes' symlink swaps are seen (R113). A read
// error other than the first is passed on once per change.
func Follow(ctx context.Context, path string, f func(data []byte, err error) error) error {
	events, stop := watchDir(filepath.Dir(path))
	defer stop()

	// The watch stands before the first read, so that no change is lost.
	last, lastErr := os.ReadFile(path)
	if err := f(last, readError(lastErr)); err != nil {
		return err
	}
	timer := time.NewTimer(pollEvery)
	defer timer.Stop()
	var since time.Time // the first event that no read has followed; zero = none
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-events:
			if since.IsZero() {
				since = time.Now()
			}
			if time.Since(since) < settleMax {
				timer.Reset(settle)
			}
			continue
		case <-timer.C:
			since = time.Time{}
			timer.Reset(pollEvery)
		}
		data, err := os.ReadFile(path)
		if bytes.Equal(data, last) && sameKind(err, lastErr) {
			continue
		}
		last, lastErr = data, err
		if err := f(data, readError(err)); err != nil {
			return err
		}
	}
}

func sameKind(a, b error) bool {
	return (a == nil) == (b == nil) && errors.Is(a, fs.ErrNotExist) == errors.Is(b, fs.ErrNotExist)
}

func readError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("read file: %w", err)
}

// watchDir reports changes below dir. Without a kernel watch (out of inotify
// instances) the channel stays silent and Follow's poll does the work.
func watchDir(dir string) (changed <-chan struct{}, stop func()) {
	out := make(chan struct{}, 1)
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return out, func() {}
	}
	if err := w.Add(dir); err != nil {
		return out, func() { _ = w.Close() }
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case _, ok := <-w.Events:
				if !ok {
					return
				}
			case _, ok := <-w.Errors:
				if !ok {
					return
				}
			}
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out, func() { _ = w.Close(); <-done }
}
