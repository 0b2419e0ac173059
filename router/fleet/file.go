package fleet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/kvc-dev/kvc/router/kvc"
)

// Version is the fleet file version this package reads and writes.
const Version = 1

// Role of a worker. Unified workers are Decode.
type Role string

// The two roles of a worker (wire.md §7).
const (
	Decode  Role = "decode"
	Prefill Role = "prefill"
)

// State of a worker.
type State string

// The states a fleet file can ask for; Gone is an absent worker.
const (
	Active   State = "Active"
	Draining State = "Draining"
)

// Pool is the fleet file's pool section.
type Pool struct {
	Namespace string   `json:"namespace" yaml:"namespace"`
	Name      string   `json:"name" yaml:"name"`
	Model     string   `json:"model" yaml:"model"`                         // the engines' served name
	Aliases   []string `json:"aliases,omitempty" yaml:"aliases,omitempty"` // other names clients may send
}

// Bootstrap is where a P worker's bootstrap server listens.
type Bootstrap struct {
	Host string `json:"host" yaml:"host"` // no brackets around IPv6
	Port int    `json:"port" yaml:"port"`
}

// Worker is one routable incarnation.
type Worker struct {
	Name      string            `json:"name" yaml:"name"` // the pod's name; shown to clients
	ID        kvc.WorkerID      `json:"id" yaml:"id"`     // the incarnation (wire.md §0)
	Role      Role              `json:"role" yaml:"role"`
	URL       string            `json:"url" yaml:"url"` // the sidecar: http(s)://host:port
	Bootstrap *Bootstrap        `json:"bootstrap,omitempty" yaml:"bootstrap,omitempty"`
	Revision  string            `json:"revision,omitempty" yaml:"revision,omitempty"`
	State     State             `json:"state,omitempty" yaml:"state,omitempty"` // "" = Active
	Topology  map[string]string `json:"topology,omitempty" yaml:"topology,omitempty"`
}

// File is the fleet file (wire.md §7).
type File struct {
	Version int      `json:"version" yaml:"version"`
	Pool    Pool     `json:"pool" yaml:"pool"`
	Workers []Worker `json:"workers" yaml:"workers"`
}

// Parse reads and validates a fleet file. The workers come back sorted by name
// and with their state filled in. An error is one sentence per fault: name,
// line, field, what is wrong and what to write instead.
func Parse(name string, data []byte) (*File, error) {
	if strings.TrimSpace(string(data)) == "" {
		return nil, &FieldError{File: name, Line: 1, What: "the file is empty", Remedy: "start with `version: 1`"}
	}
	var f File
	if err := yaml.UnmarshalWithOptions(data, &f, yaml.Strict()); err != nil {
		return nil, decodeError(name, err)
	}
	c := newChecker(name, data)
	c.file(&f)
	if len(c.faults) > 0 {
		return nil, errors.Join(c.faults...)
	}
	for i := range f.Workers {
		if f.Workers[i].State == "" {
			f.Workers[i].State = Active
		}
	}
	slices.SortFunc(f.Workers, func(a, b Worker) int { return strings.Compare(a.Name, b.Name) })
	return &f, nil
}

// Write stores f atomically: a reader sees the old file or the new one, also
// after a crash (write, fsync, rename, fsync of the directory).
func Write(path string, f *File) error {
	data := encode(f)
	if _, err := Parse(path, data); err != nil {
		return fmt.Errorf("refuse to write an invalid fleet file: %w", err)
	}
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write fleet file: %w", err)
	}
	defer func() { _ = os.Remove(tmp.Name()) }() // after the rename there is nothing to remove
	if err := fill(tmp, data); err != nil {
		return fmt.Errorf("write fleet file: %w", err)
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return fmt.Errorf("write fleet file: %w", err)
	}
	return syncDir(dir)
}

// fill writes data to f, makes it durable and closes it.
func fill(f *os.File, data []byte) error {
	_, err := f.Write(data)
	if err == nil {
		err = f.Chmod(0o644) // CreateTemp's 0600 would hide the file from a router under another user
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync fleet directory: %w", err)
	}
	err = d.Sync()
	if err = errors.Join(err, d.Close()); err != nil {
		return fmt.Errorf("sync fleet directory: %w", err)
	}
	return nil
}
