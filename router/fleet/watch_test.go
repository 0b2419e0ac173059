package fleet

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// follow runs a FileSource and hands out what it applies and refuses.
type follow struct {
	applied  chan *File
	rejected chan error
	ended    chan error
	stop     context.CancelFunc
}

func startFollow(t *testing.T, path string) *follow {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &follow{applied: make(chan *File, 16), rejected: make(chan error, 16), ended: make(chan error, 1), stop: cancel}
	s := &FileSource{Path: path, Log: slog.New(slog.DiscardHandler),
		Rejected: func(err error) { f.rejected <- err }}
	go func() { f.ended <- s.Run(ctx, func(file *File) { f.applied <- file }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-f.ended; err != nil {
			t.Errorf("Run = %v after its context ended, want nil", err)
		}
	})
	return f
}

func wait[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("no %s within 10 s", what)
		panic("unreachable")
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestFileSourceFollowsRenames(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	one := &File{Version: 1, Pool: Pool{Namespace: "n", Name: "p", Model: "m"},
		Workers: []Worker{{Name: "a", ID: "1", Role: Decode, URL: "http://h:1"}}}
	if err := Write(path, one); err != nil {
		t.Fatal(err)
	}
	f := startFollow(t, path)
	if got := wait(t, f.applied, "first fleet"); len(got.Workers) != 1 {
		t.Fatalf("first fleet has %d workers, want 1", len(got.Workers))
	}
	one.Workers = append(one.Workers, Worker{Name: "b", ID: "2", Role: Decode, URL: "http://h:2"})
	if err := Write(path, one); err != nil {
		t.Fatal(err)
	}
	if got := wait(t, f.applied, "second fleet"); len(got.Workers) != 2 {
		t.Fatalf("second fleet has %d workers, want 2", len(got.Workers))
	}
}

// R113: an invalid or vanished file keeps the last good fleet, and a later
// valid one is taken.
func TestFileSourceKeepsTheLastGood(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, good)
	f := startFollow(t, path)
	wait(t, f.applied, "first fleet")

	write(t, path, "version: 1\nworkerz: []\n")
	if err := wait(t, f.rejected, "refusal"); !strings.Contains(err.Error(), "workerz: unknown key") {
		t.Errorf("refusal %q does not name the key", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, f.rejected, "refusal of the vanished file"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("refusal = %v, want not-exist", err)
	}
	select {
	case got := <-f.applied:
		t.Fatalf("a bad change was applied: %+v", got)
	default:
	}
	write(t, path, strings.Replace(good, "Draining", "Active", 1))
	if got := wait(t, f.applied, "repaired fleet"); got.Workers[0].State != Active {
		t.Errorf("state = %q, want Active", got.Workers[0].State)
	}
}

// R113: a ConfigMap is a symlink to a symlinked directory that is swapped.
func TestFollowSeesASymlinkSwap(t *testing.T) {
	dir := t.TempDir()
	for _, v := range []string{"v1", "v2"} {
		if err := os.Mkdir(filepath.Join(dir, v), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, v, "f"), v)
	}
	link := func(to string) {
		tmp := filepath.Join(dir, "tmp")
		if err := errors.Join(os.Symlink(to, tmp), os.Rename(tmp, filepath.Join(dir, "..data"))); err != nil {
			t.Fatal(err)
		}
	}
	link("v1")
	if err := os.Symlink("..data/f", filepath.Join(dir, "f")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	got, ended := make(chan string, 4), make(chan error, 1)
	go func() {
		ended <- Follow(ctx, filepath.Join(dir, "f"), func(data []byte, err error) error {
			got <- string(data)
			return err
		})
	}()
	if v := wait(t, got, "first content"); v != "v1" {
		t.Fatalf("content = %q, want v1", v)
	}
	link("v2")
	if v := wait(t, got, "swapped content"); v != "v2" {
		t.Fatalf("content = %q, want v2", v)
	}
	cancel()
	if err := wait(t, ended, "end"); err != nil {
		t.Fatal(err)
	}
}

func TestFileSourceRefusesABadStart(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.yaml")
	write(t, bad, "version: 3\n")
	for name, path := range map[string]string{
		"an invalid file":     bad,
		"a missing file":      filepath.Join(dir, "none.yaml"),
		"a missing directory": filepath.Join(dir, "x", "y"),
	} {
		t.Run(name, func(t *testing.T) {
			s := &FileSource{Path: path, Log: slog.New(slog.DiscardHandler)}
			err := s.Run(context.Background(), func(*File) { t.Error("applied") })
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("Run = %v, want an error that names %s", err, path)
			}
		})
	}
}
