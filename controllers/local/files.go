package local

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// The run directory.
const (
	dirToken   = "token"
	dirRouting = "routing"
	dirLogs    = "logs"
	dirPods    = "pods"
	fileFleet  = "fleet.yaml"
	fileLock   = "lock"
)

// makeDir makes the run directory; "" makes a new one.
func makeDir(dir string) (string, error) {
	var err error
	if dir == "" {
		// Short, because the KV event socket lies below it and a socket's path
		// has at most 107 bytes.
		if dir, err = os.MkdirTemp("", "kvc-"); err != nil {
			return "", fmt.Errorf("make run directory: %w", err)
		}
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", fmt.Errorf("resolve run directory: %w", err)
	}
	for _, sub := range []string{dirToken, dirRouting, dirLogs, dirPods} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return "", fmt.Errorf("make run directory: %w", err)
		}
	}
	return dir, nil
}

// writeFiles writes what the programs read: routing.json and the bearer token of
// the pool. A token that is already there is kept, so that a second run with the
// same directory can be talked to alike.
func writeFiles(dir string, pool *v1alpha1.KVCPool) (token string, err error) {
	if token, err = ensureToken(filepath.Join(dir, dirToken, v1alpha1.FileToken)); err != nil {
		return "", err
	}
	data, err := v1alpha1.NewRoutingFile(pool).Marshal()
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, dirRouting, v1alpha1.FileRouting), data, 0o600); err != nil {
		return "", fmt.Errorf("write routing file: %w", err)
	}
	return token, nil
}

// lockDir keeps a second run out of a directory for as long as f is open; the
// kernel lets go of it when we die by whatever cause.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, fileLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock run directory: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("%s is in use by another run of kvc; stop it, or choose another directory with --dir", dir)
	}
	return f, nil
}

// ensureToken returns the token of a file and makes one when there is none.
func ensureToken(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if os.IsExist(err) {
		data, err := os.ReadFile(path)
		if err != nil {
			return "", fmt.Errorf("read token: %w", err)
		}
		if token := firstLine(data); token != "" {
			return token, nil
		}
		return "", fmt.Errorf("token file %s is empty; remove it", path)
	}
	if err != nil {
		return "", fmt.Errorf("write token: %w", err)
	}
	token := randomHex(32)
	_, err = f.WriteString(token + "\n")
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return "", fmt.Errorf("write token: %w", err)
	}
	return token, nil
}

func firstLine(data []byte) string {
	for i, c := range data {
		if c == '\n' || c == '\r' {
			return string(data[:i])
		}
	}
	return string(data)
}

// randomHex returns n random bytes in hex digits.
func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return hex.EncodeToString(b)
}
