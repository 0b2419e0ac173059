package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// defaultHostTier is the host tier of prefill workers under DeltaTransfer, where
// a turn that finds its prompt evicted on P costs a whole prefill.
const defaultHostTier = "64Gi"

// Default fills what the manifest left out, in place. It is idempotent, never
// changes a value that was set, and afterwards every optional number of the spec
// is non-nil, except those whose absence means something: maxProbes, maxGPUs,
// the SLO targets and status.
func Default(p *KVCPool) {
	s := &p.Spec
	defaultModel(&s.Model)
	defaultEngine(&s.Engine)
	defaultRouting(&s.Routing)
	defaultFabric(s)
	fill(&s.Gang.Provider, GangNone)
	fill(&s.Rollout.Order, OrderDecodeFirst)
	fillPtr(&s.Rollout.MaxSkewPercent, 25)
	fill(&s.Rollout.RevisionPairing, PairSameRevision)
	fillPtr(&s.Rollout.ProgressDeadlineSeconds, 3600)

	prefillReplicas := int32(1)
	if s.Engine.DirectPath == DirectPathUnified {
		prefillReplicas = 0
	}
	defaultRole(&s.Prefill, prefillReplicas, DrainInFlight)
	defaultRole(&s.Decode, 1, DrainSessionResidency)
	defaultRouter(&s.Router)
	if s.Autoscaling != nil {
		defaultAutoscaling(s.Autoscaling)
	}
	for i := range s.SLOClasses {
		defaultSLOClass(&s.SLOClasses[i])
	}
}

func defaultModel(m *ModelSpec) {
	fill(&m.ServedName, m.Name)
	fill(&m.Source, SourceHuggingFace)
	fillPtr(&m.LoadTimeoutSeconds, 3600)
}

func defaultEngine(e *EngineSpec) {
	fill(&e.Type, EngineSGLang)
	if e.Type == EngineSGLang {
		fill(&e.Image, DefaultSGLangImage)
	}
	fill(&e.DirectPath, DirectPathAuto)
	fill(&e.TransferBackend, TransferMooncake)
	fillPtr(&e.PageSize, 64)
	fill(&e.KVCacheDtype, "auto")
	fillPtr(&e.MemFractionStaticPercent, 82)
	if e.KVTier != nil {
		fill(&e.KVTier.Store, KVStoreNone)
	}
	fill(&e.GPUResource, "nvidia.com/gpu")
	fillPtr(&e.ShmSize, resource.MustParse("16Gi"))
}

func defaultRouting(r *RoutingSpec) {
	fill(&r.Preset, PresetCorrected)
	fillPtr(&r.BlockBytes, BlockBytes)
	fillPtr(&r.StickyBonus, 1)
	fillPtr(&r.RejectThreshold, 3)
	fillPtr(&r.MaxAppendTokens, 8192)
	fillPtr(&r.HighWaterPercent, 95)
	fillPtr(&r.Admission.TimeoutMilliseconds, 50)
	fillPtr(&r.Admission.HedgeAfterMilliseconds, min(10, *r.Admission.TimeoutMilliseconds))
	protect := int32(120)
	if r.Preset == PresetPaper {
		protect = 0
	}
	fillPtr(&r.ProtectIdleSeconds, protect)
}

func defaultFabric(s *KVCPoolSpec) {
	fill(&s.RDMA.Mode, RDMADisabled)
	fillPtr(&s.RDMA.Count, 1)
	fill(&s.RDMA.Preflight, PreflightEnforced)
	if s.Topology.Pairing != nil {
		fill(&s.Topology.Pairing.Enforcement, Preferred)
	}
}

func defaultRole(r *RoleSpec, replicas int32, drain DrainPolicy) {
	fillPtr(&r.Replicas, replicas)
	fillPtr(&r.NodesPerReplica, 1)
	fillPtr(&r.TensorParallelSize, 1)
	fill(&r.Scaling.Mode, ScalingStatic)
	fill(&r.Scaling.VictimPolicy, VictimEvictionCost)
	fillPtr(&r.Rollout.MaxUnavailable, intstr.FromInt32(0))
	fillPtr(&r.Rollout.MaxSurge, intstr.FromInt32(1))
	fillPtr(&r.Rollout.Partition, 0)
	fill(&r.Drain.Policy, drain)
	fillPtr(&r.Drain.SoftTimeoutSeconds, 300)
	fillPtr(&r.Drain.HardTimeoutSeconds, 1800)
	fill(&r.Drain.KVHandoff, HandoffDemote)
	fillPtr(&r.Drain.MaxConcurrent, 1)
	fill(&r.Recovery.Scope, RecoverReplica)
	fillPtr(&r.Recovery.BaseDelaySeconds, 30)
	fillPtr(&r.Recovery.MaxDelaySeconds, 600)
	fillPtr(&r.MinReadySeconds, 0)
}

func defaultRouter(r *RouterSpec) {
	fillPtr(&r.Replicas, 2)
	defaultSession(&r.Session)
	fill(&r.Service.Type, "ClusterIP")
	fillPtr(&r.Service.Port, PortRouter)
	fillPtr(&r.MaxQueuedRequests, 256)
}

func defaultSession(s *RouterSession) {
	if s.Headers == nil {
		s.Headers = defaultSessionHeaders()
	}
	if s.BodyFields == nil {
		s.BodyFields = defaultSessionFields()
	}
	fillPtr(&s.TTLSeconds, 900)
}

func defaultSessionHeaders() []string {
	return []string{"x-claude-code-session-id", "session-id", "x-session-id", "x-kvc-session"}
}

func defaultSessionFields() []string { return []string{"prompt_cache_key", "session_id"} }

func defaultSLOClass(c *SLOClass) {
	fillPtr(&c.Priority, 0)
	fillPtr(&c.MaxResidentPercent, 100)
}

func defaultAutoscaling(a *AutoscalingSpec) {
	fillPtr(&a.Ratio.MinPrefillPerDecodePercent, 10)
	fillPtr(&a.Ratio.MaxPrefillPerDecodePercent, 400)
	fillPtr(&a.Signals.PrefillQueueDepth, 4)
	fillPtr(&a.Signals.DecodeTransferQueueDepth, 8)
	fillPtr(&a.Signals.DecodeKVUsagePercent, 80)
	fillPtr(&a.Signals.SLOAttainmentPercent, 90)
	fillPtr(&a.IntervalSeconds, 15)
	fillPtr(&a.ScaleUpStabilizationSeconds, 60)
	fillPtr(&a.ScaleDownStabilizationSeconds, 600)
	fillPtr(&a.MetricsMaxAgeSeconds, 60)
}

// HostTier is the host memory that a pod of this role demotes evicted KV to;
// zero is none. A tier in the manifest is for both roles; DeltaTransfer alone
// gives one to prefill workers that the manifest does not mention.
func (s *KVCPoolSpec) HostTier(r Role) resource.Quantity {
	switch {
	case s.Engine.KVTier != nil:
		return s.Engine.KVTier.Host
	case r == Prefill && ResolveDirectPath(s) == DirectPathDeltaTransfer:
		return resource.MustParse(defaultHostTier)
	}
	return resource.Quantity{}
}

// Aliases are names other than servedName by which clients may ask for the
// model.
func (m *ModelSpec) Aliases() []string {
	if m.ServedName == "" || m.ServedName == m.Name {
		return nil
	}
	return []string{m.Name}
}

// fill sets *p when it is the zero value.
func fill[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// fillPtr sets *p when it is nil.
func fillPtr[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}
