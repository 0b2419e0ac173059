package v1alpha1

import (
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/kvc-dev/kvc/router/kvc"
)

// RoutingFile is routing.json (wire.md §8): what routers and sidecars read of a
// pool, hot-reloaded and never part of an engine's revision. The bodies are
// spelled as in the CRD.
type RoutingFile struct {
	// routing holds the constants of the algorithms.
	Routing RoutingSpec `json:"routing"`
	// slo_classes are the latency promises.
	SLOClasses []SLOClass `json:"slo_classes"`
	// session says where a request names its session.
	Session RouterSession `json:"session"`
}

// NewRoutingFile takes from a defaulted pool what its routers and sidecars read.
func NewRoutingFile(p *KVCPool) *RoutingFile {
	s := p.Spec.DeepCopy()
	return &RoutingFile{Routing: s.Routing, SLOClasses: s.SLOClasses, Session: s.Router.Session}
}

// Marshal writes the file, stable for equal contents.
func (f *RoutingFile) Marshal() ([]byte, error) {
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write routing file: %w", err)
	}
	return append(data, '\n'), nil
}

// ParseRoutingFile reads routing.json, fills defaults and validates. Unknown
// members are refused: a misspelt constant would silently be its default.
func ParseRoutingFile(data []byte) (*RoutingFile, error) {
	d, err := readDocument("routing.json", "routing file", data)
	if err != nil {
		return nil, err
	}
	f := &RoutingFile{}
	if err := d.decode(f); err != nil {
		return nil, err
	}
	defaultRouting(&f.Routing)
	defaultSession(&f.Session)
	for i := range f.SLOClasses {
		defaultSLOClass(&f.SLOClasses[i])
	}
	errs := validateRouting(&f.Routing, field.NewPath("routing"))
	errs = append(errs, validateSLOClasses(f.SLOClasses, field.NewPath("slo_classes"))...)
	errs = append(errs, validateSession(&f.Session, field.NewPath("session"))...)
	if err := d.explain(errs); err != nil {
		return nil, err
	}
	return f, nil
}

// Params turns the constants into the algorithms' own, from the preset up.
// Durations are in real seconds: with a KVC_TIME_SCALE the caller scales them. A
// field that is nil keeps the preset's value.
func (r *RoutingSpec) Params() kvc.Params {
	p := kvc.Corrected()
	if r.Preset == PresetPaper {
		p = kvc.Paper()
	}
	override(&p.StickyBonus, r.StickyBonus)
	override(&p.RejectThreshold, r.RejectThreshold)
	override(&p.MaxAppendTokens, r.MaxAppendTokens)
	override(&p.HighWaterPercent, r.HighWaterPercent)
	override(&p.MaxProbes, r.MaxProbes)
	if r.ProtectIdleSeconds != nil {
		p.ProtectIdle = time.Duration(*r.ProtectIdleSeconds) * time.Second
	}
	return p
}

func override(p *int, v *int32) {
	if v != nil {
		*p = int(*v)
	}
}
