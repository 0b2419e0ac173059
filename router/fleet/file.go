// Package fleet says which workers are alive, from a watch or a file, as a sorted list.
package fleet

import "github.com/kvc-dev/kvc/router/kvc"

// Role of a worker. Unified workers are Decode.
type Role string

const (
	Decode  Role = "decode"
	Prefill Role = "prefill"
)

// State of a worker.
type State string

const (
	Active   State = "Active"
	Draining State = "Draining"
)

// Pool is the fleet file's pool section.
type Pool struct {
	Namespace string   `json:"namespace" yaml:"namespace"`
	Name      string   `json:"name" yaml:"name"`
	Model     string   `json:"model" yaml:"model"`
	Aliases   []string `json:"aliases,omitempty" yaml:"aliases,omitempty"`
}

// Bootstrap is where a P worker's bootstrap server listens.
type Bootstrap struct {
	Host string `json:"host" yaml:"host"`
	Port int    `json:"port" yaml:"port"`
}

// Worker is one routable incarnation.
type Worker struct {
	Name      string            `json:"name" yaml:"name"`
	ID        kvc.WorkerID      `json:"id" yaml:"id"`
	Role      Role              `json:"role" yaml:"role"`
	URL       string            `json:"url" yaml:"url"` // the sidecar: http(s)://host:port
	Bootstrap *Bootstrap        `json:"bootstrap,omitempty" yaml:"bootstrap,omitempty"`
	Revision  string            `json:"revision,omitempty" yaml:"revision,omitempty"`
	State     State             `json:"state,omitempty" yaml:"state,omitempty"`
	Topology  map[string]string `json:"topology,omitempty" yaml:"topology,omitempty"`
}

// File is the fleet file (wire.md §7).
type File struct {
	Version int      `json:"version" yaml:"version"`
	Pool    Pool     `json:"pool" yaml:"pool"`
	Workers []Worker `json:"workers" yaml:"workers"`
}

// Parse reads and validates a fleet file; errors name file, line, field and remedy.
func Parse(name string, data []byte) (*File, error) { panic("contract") }

// Write stores f atomically (write + rename).
func Write(path string, f *File) error { panic("contract") }
