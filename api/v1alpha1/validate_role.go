package v1alpha1

import (
	"fmt"
	"math"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validatePoolRollout(r *PoolRolloutSpec, at *field.Path) field.ErrorList {
	return concat(
		oneOf(at.Child("order"), r.Order, OrderDecodeFirst, OrderPrefillFirst, OrderTogether),
		oneOf(at.Child("revisionPairing"), r.RevisionPairing, PairSameRevision, PairAnyRevision),
		between(at.Child("maxSkewPercent"), r.MaxSkewPercent, 0, 100),
		between(at.Child("progressDeadlineSeconds"), r.ProgressDeadlineSeconds, 1, math.MaxInt32),
	)
}

func validateRoleRollout(r *RoleRolloutSpec, at *field.Path) field.ErrorList {
	errs := concat(
		between(at.Child("partition"), r.Partition, 0, math.MaxInt32),
		validateIntOrPercent(at.Child("maxUnavailable"), r.MaxUnavailable),
		validateIntOrPercent(at.Child("maxSurge"), r.MaxSurge),
	)
	if len(errs) == 0 && isZero(r.MaxUnavailable) && isZero(r.MaxSurge) {
		errs = append(errs, field.Invalid(at.Child("maxSurge"), r.MaxSurge.String(),
			"is 0 and so is maxUnavailable, so nothing could ever move; set one of them to 1 or more"))
	}
	return errs
}

func validateIntOrPercent(at *field.Path, v *intstr.IntOrString) field.ErrorList {
	if v.Type == intstr.Int {
		return between(at, &v.IntVal, 0, math.MaxInt32)
	}
	for _, msg := range validation.IsValidPercent(v.StrVal) {
		return field.ErrorList{field.Invalid(at, v.StrVal, msg+"; write a number or a percentage such as 25%")}
	}
	if n, err := intstr.GetScaledValueFromIntOrPercent(v, 100, true); err != nil || n > 100 {
		return field.ErrorList{field.Invalid(at, v.StrVal, "is more than 100%; write at most 100%")}
	}
	return nil
}

func isZero(v *intstr.IntOrString) bool {
	n, err := intstr.GetScaledValueFromIntOrPercent(v, 100, true)
	return err == nil && n == 0
}

func validateDrain(d *DrainSpec, at *field.Path) field.ErrorList {
	errs := concat(
		oneOf(at.Child("policy"), d.Policy, DrainSessionResidency, DrainInFlight, DrainNone),
		oneOf(at.Child("kvHandoff"), d.KVHandoff, HandoffDemote, HandoffDiscard),
		between(at.Child("softTimeoutSeconds"), d.SoftTimeoutSeconds, 0, math.MaxInt32),
		between(at.Child("hardTimeoutSeconds"), d.HardTimeoutSeconds, 0, math.MaxInt32),
		between(at.Child("maxConcurrent"), d.MaxConcurrent, 1, math.MaxInt32),
	)
	if *d.SoftTimeoutSeconds > *d.HardTimeoutSeconds {
		errs = append(errs, field.Invalid(at.Child("softTimeoutSeconds"), *d.SoftTimeoutSeconds,
			fmt.Sprintf("is longer than hardTimeoutSeconds %d; shorten it or raise the hard one", *d.HardTimeoutSeconds)))
	}
	return errs
}

func validateRecovery(r *RecoverySpec, at *field.Path) field.ErrorList {
	errs := concat(
		oneOf(at.Child("scope"), r.Scope, RecoverReplica, RecoverPod),
		between(at.Child("baseDelaySeconds"), r.BaseDelaySeconds, 0, math.MaxInt32),
		between(at.Child("maxDelaySeconds"), r.MaxDelaySeconds, 0, math.MaxInt32),
	)
	if *r.BaseDelaySeconds > *r.MaxDelaySeconds {
		errs = append(errs, field.Invalid(at.Child("baseDelaySeconds"), *r.BaseDelaySeconds,
			fmt.Sprintf("is longer than maxDelaySeconds %d; shorten it or raise the other", *r.MaxDelaySeconds)))
	}
	return errs
}

func validatePack(p *PackSpec, t *TopologySpec, at *field.Path) field.ErrorList {
	switch {
	case p == nil:
		return nil
	case (p.Required == "") == (p.Preferred == ""):
		return field.ErrorList{field.Invalid(at, p, "takes either required or preferred; keep one")}
	case p.Required != "":
		return knownLevel(at.Child("required"), p.Required, t)
	}
	return knownLevel(at.Child("preferred"), p.Preferred, t)
}

func knownLevel(at *field.Path, name string, t *TopologySpec) field.ErrorList {
	names := make([]string, 0, len(t.Levels))
	for _, l := range t.Levels {
		names = append(names, l.Name)
	}
	if len(names) == 0 {
		return field.ErrorList{field.Invalid(at, name, "names a topology level; add it to topology.levels")}
	}
	return oneOf(at, name, names...)
}

func validateTopology(t *TopologySpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, l := range t.Levels {
		level := at.Child("levels").Index(i)
		if l.Name == "" {
			errs = append(errs, field.Required(level.Child("name"), "name the level, such as zone"))
		}
		if seen[l.Name] {
			errs = append(errs, field.Duplicate(level.Child("name"), l.Name))
		}
		seen[l.Name] = true
		errs = append(errs, named(level.Child("nodeLabelKey"), l.NodeLabelKey, validation.IsQualifiedName(l.NodeLabelKey))...)
	}
	if t.Pairing != nil {
		pairing := at.Child("pairing")
		errs = append(errs, knownLevel(pairing.Child("domain"), t.Pairing.Domain, t)...)
		errs = append(errs, oneOf(pairing.Child("enforcement"), t.Pairing.Enforcement, Preferred, Required)...)
	}
	return errs
}

func validateRDMA(r *RDMASpec, at *field.Path) field.ErrorList {
	errs := concat(
		oneOf(at.Child("mode"), r.Mode, RDMADisabled, RDMADevicePlugin, RDMAHostNetwork),
		oneOf(at.Child("preflight"), r.Preflight, PreflightEnforced, PreflightAdvisory),
		between(at.Child("count"), r.Count, 1, 64),
	)
	if r.Mode == RDMADevicePlugin && r.ResourceName == "" {
		errs = append(errs, field.Required(at.Child("resourceName"),
			"mode DevicePlugin needs the extended resource of a device, such as rdma/hca"))
	}
	if r.ResourceName != "" {
		errs = append(errs, named(at.Child("resourceName"), r.ResourceName, validation.IsQualifiedName(r.ResourceName))...)
	}
	return errs
}

// validateTemplate checks what a merge needs: every entry that is merged by name
// has one, and the two containers that the operator renders keep their program.
func validateTemplate(t *corev1.PodTemplateSpec, at *field.Path) field.ErrorList {
	if t == nil {
		return nil
	}
	var errs field.ErrorList
	containers := at.Child("spec", "containers")
	for i, c := range t.Spec.Containers {
		errs = append(errs, validateContainer(&c, containers.Index(i))...)
	}
	inits := at.Child("spec", "initContainers")
	for i, c := range t.Spec.InitContainers {
		errs = append(errs, validateContainer(&c, inits.Index(i))...)
	}
	for key := range t.Labels {
		if strings.HasPrefix(key, Group+"/") {
			errs = append(errs, field.Forbidden(at.Child("metadata", "labels").Key(key),
				"labels of kvc.dev belong to the operator; remove it"))
		}
	}
	return errs
}

func validateContainer(c *corev1.Container, at *field.Path) field.ErrorList {
	if c.Name == "" {
		return field.ErrorList{field.Required(at.Child("name"),
			"name the container to merge into; the engine's is "+ContainerEngine)}
	}
	if c.Name != ContainerEngine && c.Name != ContainerSidecar {
		return nil
	}
	var errs field.ErrorList
	if len(c.Command) > 0 {
		errs = append(errs, field.Forbidden(at.Child("command"), "is rendered by the operator; use engine.extraArgs"))
	}
	if len(c.Args) > 0 {
		errs = append(errs, field.Forbidden(at.Child("args"), "is rendered by the operator; use engine.extraArgs"))
	}
	return errs
}
