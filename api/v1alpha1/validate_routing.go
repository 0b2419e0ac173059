package v1alpha1

import (
	"fmt"
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func validateRouting(r *RoutingSpec, at *field.Path) field.ErrorList {
	admission := at.Child("admission")
	errs := concat(
		oneOf(at.Child("preset"), r.Preset, PresetCorrected, PresetPaper),
		between(at.Child("stickyBonus"), r.StickyBonus, 0, 1_000_000),
		between(at.Child("rejectThreshold"), r.RejectThreshold, 1, 1000),
		between(at.Child("maxAppendTokens"), r.MaxAppendTokens, 1, math.MaxInt32),
		between(at.Child("highWaterPercent"), r.HighWaterPercent, 1, 100),
		between(at.Child("maxProbes"), r.MaxProbes, 1, 256),
		between(at.Child("protectIdleSeconds"), r.ProtectIdleSeconds, 0, 86400),
		between(admission.Child("timeoutMilliseconds"), r.Admission.TimeoutMilliseconds, 1, 60000),
		between(admission.Child("hedgeAfterMilliseconds"), r.Admission.HedgeAfterMilliseconds, 1, 60000),
	)
	if *r.BlockBytes != BlockBytes {
		errs = append(errs, field.Invalid(at.Child("blockBytes"), *r.BlockBytes,
			fmt.Sprintf("block format kvc-b96-v1 knows only %d; remove it", BlockBytes)))
	}
	if hedge, timeout := *r.Admission.HedgeAfterMilliseconds, *r.Admission.TimeoutMilliseconds; hedge > timeout {
		errs = append(errs, field.Invalid(admission.Child("hedgeAfterMilliseconds"), hedge,
			fmt.Sprintf("is longer than timeoutMilliseconds %d; shorten it, or set both equal to never hedge", timeout)))
	}
	return errs
}

func validateSLOClasses(classes []SLOClass, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(classes) > 16 {
		errs = append(errs, field.TooMany(at, len(classes), 16))
	}
	seen := map[string]bool{}
	for i, c := range classes {
		item := at.Index(i)
		if seen[c.Name] {
			errs = append(errs, field.Duplicate(item.Child("name"), c.Name))
		}
		seen[c.Name] = true
		errs = append(errs, named(item.Child("name"), c.Name, validation.IsDNS1123Label(c.Name))...)
		errs = append(errs, concat(
			between(item.Child("ttftMilliseconds"), c.TTFTMilliseconds, 1, math.MaxInt32),
			between(item.Child("itlMilliseconds"), c.ITLMilliseconds, 1, math.MaxInt32),
			between(item.Child("priority"), c.Priority, 0, 1000),
			between(item.Child("maxResidentPercent"), c.MaxResidentPercent, 1, 100),
		)...)
	}
	return errs
}

func validateSession(s *RouterSession, at *field.Path) field.ErrorList {
	errs := between(at.Child("ttlSeconds"), s.TTLSeconds, 1, 604800)
	for i, h := range s.Headers {
		errs = append(errs, named(at.Child("headers").Index(i), h, validation.IsHTTPHeaderName(h))...)
	}
	for i, f := range s.BodyFields {
		if f == "" {
			errs = append(errs, field.Required(at.Child("bodyFields").Index(i), "name a top-level member of the body"))
		}
	}
	return errs
}

func validateRouter(r *RouterSpec, at *field.Path) field.ErrorList {
	service := at.Child("service")
	errs := concat(
		between(at.Child("replicas"), r.Replicas, 0, 100),
		between(at.Child("maxQueuedRequests"), r.MaxQueuedRequests, 0, math.MaxInt32),
		between(service.Child("port"), r.Service.Port, 1, 65535),
		oneOf(service.Child("type"), r.Service.Type,
			corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer),
		validateSession(&r.Session, at.Child("session")),
		validateTemplate(r.Template, at.Child("template")),
	)
	if r.Auth != nil && r.Auth.SecretName == "" {
		errs = append(errs, field.Required(at.Child("auth", "secretName"), "name the Secret that holds the API keys"))
	}
	return errs
}

func validateAutoscaling(s *KVCPoolSpec, at *field.Path) field.ErrorList {
	auto := s.Prefill.Scaling.Mode == ScalingAuto || s.Decode.Scaling.Mode == ScalingAuto
	a := s.Autoscaling
	switch {
	case a == nil && !auto:
		return nil
	case a == nil:
		return field.ErrorList{field.Required(at, "a role has scaling.mode Auto; give its bounds, or set the mode to Static")}
	case !auto:
		return field.ErrorList{field.Forbidden(at, "no role has scaling.mode Auto; set one, or remove autoscaling")}
	}
	return concat(
		validateBounds(a.Prefill, s.Prefill.Scaling.Mode, at.Child("prefill")),
		validateBounds(a.Decode, s.Decode.Scaling.Mode, at.Child("decode")),
		validateRatio(a, at),
		validateSignals(&a.Signals, at.Child("signals")),
		between(at.Child("maxGPUs"), a.MaxGPUs, 1, math.MaxInt32),
		between(at.Child("intervalSeconds"), a.IntervalSeconds, 1, math.MaxInt32),
		between(at.Child("scaleUpStabilizationSeconds"), a.ScaleUpStabilizationSeconds, 0, math.MaxInt32),
		between(at.Child("scaleDownStabilizationSeconds"), a.ScaleDownStabilizationSeconds, 0, math.MaxInt32),
		between(at.Child("metricsMaxAgeSeconds"), a.MetricsMaxAgeSeconds, 1, math.MaxInt32),
	)
}

func validateBounds(b *ReplicaBounds, mode ScalingMode, at *field.Path) field.ErrorList {
	switch {
	case b == nil && mode == ScalingAuto:
		return field.ErrorList{field.Required(at, "the role has scaling.mode Auto; write {min: 1, max: 8}")}
	case b == nil:
		return nil
	}
	errs := concat(between(at.Child("min"), &b.Min, 0, 10000), between(at.Child("max"), &b.Max, 1, 10000))
	if b.Min > b.Max {
		errs = append(errs, field.Invalid(at.Child("min"), b.Min,
			fmt.Sprintf("is larger than max %d; lower it or raise max", b.Max)))
	}
	return errs
}

func validateSignals(s *ScalingSignals, at *field.Path) field.ErrorList {
	return concat(
		between(at.Child("prefillQueueDepth"), s.PrefillQueueDepth, 1, math.MaxInt32),
		between(at.Child("decodeTransferQueueDepth"), s.DecodeTransferQueueDepth, 1, math.MaxInt32),
		between(at.Child("decodeKVUsagePercent"), s.DecodeKVUsagePercent, 1, 100),
		between(at.Child("sloAttainmentPercent"), s.SLOAttainmentPercent, 1, 100),
	)
}

// validateRatio wants some number of replicas inside the bounds to have a ratio
// inside its own bounds; otherwise the autoscaler could never come to rest.
func validateRatio(a *AutoscalingSpec, at *field.Path) field.ErrorList {
	lo, hi := int64(*a.Ratio.MinPrefillPerDecodePercent), int64(*a.Ratio.MaxPrefillPerDecodePercent)
	ratio := at.Child("ratio")
	errs := concat(
		between(ratio.Child("minPrefillPerDecodePercent"), a.Ratio.MinPrefillPerDecodePercent, 0, math.MaxInt32),
		between(ratio.Child("maxPrefillPerDecodePercent"), a.Ratio.MaxPrefillPerDecodePercent, 1, math.MaxInt32),
	)
	if lo > hi {
		return append(errs, field.Invalid(ratio.Child("minPrefillPerDecodePercent"), lo,
			fmt.Sprintf("is larger than maxPrefillPerDecodePercent %d; lower it", hi)))
	}
	if a.Prefill == nil || a.Decode == nil {
		return errs
	}
	if 100*int64(a.Prefill.Max) < lo*int64(a.Decode.Min) || 100*int64(a.Prefill.Min) > hi*int64(a.Decode.Max) {
		errs = append(errs, field.Invalid(ratio, fmt.Sprintf("%d..%d", lo, hi), fmt.Sprintf(
			"no %d..%d prefill and %d..%d decode replicas have such a ratio; widen one of the three",
			a.Prefill.Min, a.Prefill.Max, a.Decode.Min, a.Decode.Max)))
	}
	return errs
}
