package build

import (
	"cmp"
	"encoding/json"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// ProgramDir is where KVC's own image keeps its programs.
const ProgramDir = "/usr/local/bin"

// DefaultImage is KVC's own image: sidecar, router and emulator.
const DefaultImage = "ghcr.io/kvc-dev/kvc:latest"

// Options are what a rendering depends on beside the pool. The zero value is a
// pod with its own network namespace, on Kubernetes.
type Options struct {
	// Image is KVC's own image; "" = DefaultImage.
	Image string
	// Host is the address that programs bind; "" = 0.0.0.0. Engines must not
	// keep SGLang's default 127.0.0.1: peers in other pods could not reach the
	// bootstrap server, which binds the same address.
	Host string
	// Ports replace the defaults where pods share a network namespace.
	Ports Ports
}

// Ports of one pod; 0 = the default of wire.md §0. Its JSON is the value of the
// annotation kvc.dev/ports.
type Ports struct {
	Engine    int32 `json:"engine"`
	Bootstrap int32 `json:"bootstrap"`
	Sidecar   int32 `json:"sidecar"`
	DistInit  int32 `json:"dist_init,omitempty"`
}

func (o Options) withDefaults() Options {
	o.Image = cmp.Or(o.Image, DefaultImage)
	o.Host = cmp.Or(o.Host, "0.0.0.0")
	o.Ports.Engine = cmp.Or(o.Ports.Engine, v1alpha1.PortEngine)
	o.Ports.Bootstrap = cmp.Or(o.Ports.Bootstrap, v1alpha1.PortBootstrap)
	o.Ports.Sidecar = cmp.Or(o.Ports.Sidecar, v1alpha1.PortSidecar)
	return o
}

// annotation is the value of kvc.dev/ports; "" when all are defaults.
func (p Ports) annotation() string {
	if p == (Options{}).withDefaults().Ports {
		return ""
	}
	data, err := json.Marshal(p)
	if err != nil {
		return "" // four integers always marshal
	}
	return string(data)
}
