package v1alpha1

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// maxPoolName leaves room in child names and label values.
const maxPoolName = 40

// Validate says what in a defaulted pool cannot work. Each error names the field
// and the remedy. The same rules are CEL in the CRD where CEL can express them.
func Validate(p *KVCPool) field.ErrorList {
	spec := field.NewPath("spec")
	s := &p.Spec
	return concat(
		validateName(p.Name, field.NewPath("metadata", "name")),
		validateModel(&s.Model, spec.Child("model")),
		validateEngine(s, spec.Child("engine")),
		validateRouting(&s.Routing, spec.Child("routing")),
		validateRDMA(&s.RDMA, spec.Child("rdma")),
		validateTopology(&s.Topology, spec.Child("topology")),
		oneOf(spec.Child("gang", "provider"), s.Gang.Provider, GangNone, GangVolcano),
		validatePoolRollout(&s.Rollout, spec.Child("rollout")),
		validateRole(s, Prefill, spec.Child("prefill")),
		validateRole(s, Decode, spec.Child("decode")),
		validateProfile(s, spec),
		validateRouter(&s.Router, spec.Child("router")),
		validateAutoscaling(s, spec.Child("autoscaling")),
		validateSLOClasses(s.SLOClasses, spec.Child("sloClasses")),
	)
}

func validateName(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "give the pool a name, such as qwen3-32b")}
	}
	var errs field.ErrorList
	if len(name) > maxPoolName {
		errs = append(errs, field.Invalid(at, name,
			fmt.Sprintf("is longer than %d characters; shorten it, since child names add to it", maxPoolName)))
	}
	errs = append(errs, named(at, name, validation.IsDNS1123Label(name))...)
	return errs
}

// validateProfile checks the roles against the engine profile (wire.md §9).
func validateProfile(s *KVCPoolSpec, spec *field.Path) field.ErrorList {
	path := ResolveDirectPath(s)
	replicas := spec.Child("prefill", "replicas")
	switch {
	case path == DirectPathUnified && s.hasPrefill():
		return field.ErrorList{field.Invalid(replicas, *s.Prefill.Replicas,
			"engine.directPath Unified needs prefill.replicas 0 (and Static scaling): an engine in null mode cannot"+
				" receive KV; set it to 0, or choose DeltaTransfer")}
	case path != DirectPathUnified && !s.hasPrefill():
		return field.ErrorList{field.Invalid(replicas, *s.Prefill.Replicas, fmt.Sprintf(
			"engine.directPath %s needs a prefill worker; set prefill.replicas to 1 or more, or engine.directPath to Unified",
			path))}
	case (path == DirectPathConditionalAggregation || path == DirectPathNativeAdmission) &&
		s.Engine.Type == EngineSGLang && s.Engine.Image == DefaultSGLangImage:
		return field.ErrorList{field.Invalid(spec.Child("engine", "directPath"), path,
			"no released SGLang has it; set engine.image to a patched build, or choose Unified or DeltaTransfer")}
	}
	return nil
}

func validateRole(s *KVCPoolSpec, role Role, at *field.Path) field.ErrorList {
	r := s.Role(role)
	errs := concat(
		between(at.Child("replicas"), r.Replicas, 0, 10000),
		between(at.Child("nodesPerReplica"), r.NodesPerReplica, 1, 64),
		between(at.Child("tensorParallelSize"), r.TensorParallelSize, 1, 1024),
		between(at.Child("minReadySeconds"), r.MinReadySeconds, 0, math.MaxInt32),
		oneOf(at.Child("scaling", "mode"), r.Scaling.Mode, ScalingStatic, ScalingExternal, ScalingAuto),
		oneOf(at.Child("scaling", "victimPolicy"), r.Scaling.VictimPolicy,
			VictimEvictionCost, VictimPodDeletionCost, VictimNewest),
		validateRoleRollout(&r.Rollout, at.Child("rollout")),
		validateDrain(&r.Drain, at.Child("drain")),
		validateRecovery(&r.Recovery, at.Child("recovery")),
		validatePack(r.Pack, &s.Topology, at.Child("pack")),
		validateTemplate(r.Template, at.Child("template")),
	)
	if role == Decode && *r.Replicas == 0 && r.Scaling.Mode == ScalingStatic {
		errs = append(errs, field.Invalid(at.Child("replicas"), 0, "sessions need a decode worker; set it to 1 or more"))
	}
	tp, nodes := *r.TensorParallelSize, *r.NodesPerReplica
	if tp > 0 && nodes > 0 && tp%nodes != 0 {
		errs = append(errs, field.Invalid(at.Child("nodesPerReplica"), nodes, fmt.Sprintf(
			"does not divide tensorParallelSize %d, so pods would have unequal numbers of GPUs; choose a divisor of %d",
			tp, tp)))
	}
	return errs
}

func validateModel(m *ModelSpec, at *field.Path) field.ErrorList {
	errs := oneOf(at.Child("source"), m.Source, SourceHuggingFace, SourcePVC, SourceHostPath, SourceImage)
	errs = append(errs, between(at.Child("loadTimeoutSeconds"), m.LoadTimeoutSeconds, 1, 86400)...)
	if strings.TrimSpace(m.Name) == "" {
		errs = append(errs, field.Required(at.Child("name"), "name the model, such as Qwen/Qwen3-32B"))
	}
	if m.Source == SourcePVC && m.ClaimName == "" {
		errs = append(errs, field.Required(at.Child("claimName"), "source PVC needs the claim that holds the weights"))
	}
	if m.Source != SourcePVC && m.ClaimName != "" {
		errs = append(errs, field.Invalid(at.Child("claimName"), m.ClaimName,
			"belongs to source PVC; set source to PVC, or use cache.claimName to keep downloads"))
	}
	if m.Source != SourceHuggingFace && !strings.HasPrefix(m.Path, "/") {
		errs = append(errs, field.Invalid(at.Child("path"), m.Path,
			fmt.Sprintf("source %s needs the absolute directory of the weights", m.Source)))
	}
	if m.Source == SourceHuggingFace && m.Path != "" {
		errs = append(errs, field.Invalid(at.Child("path"), m.Path,
			"HuggingFace downloads by name; remove it, or set source to PVC, HostPath or Image"))
	}
	if m.Source != SourceHuggingFace && m.TokenSecretName != "" {
		errs = append(errs, field.Invalid(at.Child("tokenSecretName"), m.TokenSecretName,
			"is only for source HuggingFace; remove it"))
	}
	return append(errs, validateCache(m, at.Child("cache"))...)
}

func validateCache(m *ModelSpec, at *field.Path) field.ErrorList {
	switch c := m.Cache; {
	case c == nil:
	case m.Source != SourceHuggingFace:
		return field.ErrorList{field.Forbidden(at, "keeps what HuggingFace downloads; remove it for other sources")}
	case (c.ClaimName == "") == (c.HostPath == ""):
		return field.ErrorList{field.Invalid(at, c, "takes either claimName or hostPath; keep one")}
	case c.HostPath != "" && !strings.HasPrefix(c.HostPath, "/"):
		return field.ErrorList{field.Invalid(at.Child("hostPath"), c.HostPath, "write an absolute directory")}
	}
	return nil
}

func concat(lists ...field.ErrorList) field.ErrorList {
	var out field.ErrorList
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// named turns what a validator of names says into at most one error.
func named(at *field.Path, name string, complaints []string) field.ErrorList {
	if len(complaints) == 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(at, name, strings.Join(complaints, "; "))}
}

// oneOf refuses a value outside a closed set.
func oneOf[T ~string](at *field.Path, got T, known ...T) field.ErrorList {
	if slices.Contains(known, got) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, got, known)}
}

// between refuses a number outside its bounds; nil is left to Default.
func between(at *field.Path, v *int32, lo, hi int32) field.ErrorList {
	switch {
	case v == nil || *v >= lo && *v <= hi:
		return nil
	case hi == math.MaxInt32:
		return field.ErrorList{field.Invalid(at, *v, fmt.Sprintf("must be %d or more", lo))}
	}
	return field.ErrorList{field.Invalid(at, *v, fmt.Sprintf("must be between %d and %d", lo, hi))}
}
