package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// RolloutOrder is which role's old replicas go first.
//
// +kubebuilder:validation:Enum=DecodeFirst;PrefillFirst;Together
type RolloutOrder string

// The orders of a rollout. One replica of each role is surged before any of them.
const (
	OrderDecodeFirst  RolloutOrder = "DecodeFirst"
	OrderPrefillFirst RolloutOrder = "PrefillFirst"
	OrderTogether     RolloutOrder = "Together"
)

// RevisionPairing says whether workers of different revisions may serve one turn.
//
// +kubebuilder:validation:Enum=Same;Any
type RevisionPairing string

// The pairings of revisions.
const (
	PairSameRevision RevisionPairing = "Same"
	PairAnyRevision  RevisionPairing = "Any"
)

// PoolRolloutSpec orders a change of revision over both roles.
type PoolRolloutSpec struct {
	// order is which role's old replicas are replaced first.
	// +kubebuilder:default=DecodeFirst
	// +optional
	Order RolloutOrder `json:"order,omitempty"`
	// maxSkewPercent is how far one role may be ahead of the other. At least one
	// replica may always move.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=25
	// +optional
	MaxSkewPercent *int32 `json:"maxSkewPercent,omitempty"`
	// revisionPairing prefers a prefill worker of the decode worker's revision.
	// +kubebuilder:default=Same
	// +optional
	RevisionPairing RevisionPairing `json:"revisionPairing,omitempty"`
	// progressDeadlineSeconds is how long a rollout may stand still, counted
	// from its last progress.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=3600
	// +optional
	ProgressDeadlineSeconds *int32 `json:"progressDeadlineSeconds,omitempty"`
}

// RoleSpec is one half of a pool.
//
// +kubebuilder:validation:XValidation:rule="(has(self.tensorParallelSize) ? self.tensorParallelSize : 1) % (has(self.nodesPerReplica) ? self.nodesPerReplica : 1) == 0",message="nodesPerReplica does not divide tensorParallelSize, so pods would have unequal numbers of GPUs: choose a divisor",fieldPath=".nodesPerReplica"
// +kubebuilder:validation:XValidation:rule="!has(self.template) || !has(self.template.spec) || ((!has(self.template.spec.containers) || self.template.spec.containers.all(c, !(c.name in ['engine', 'kvc-sidecar']) || (!has(c.command) && !has(c.args)))) && (!has(self.template.spec.initContainers) || self.template.spec.initContainers.all(c, !(c.name in ['engine', 'kvc-sidecar']) || (!has(c.command) && !has(c.args)))))",message="template gives the engine or kvc-sidecar container a command or args, which the operator renders: remove them; use engine.extraArgs",fieldPath=".template"
// +kubebuilder:validation:XValidation:rule="!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.labels) || self.template.metadata.labels.all(k, !k.startsWith('kvc.dev/'))",message="template.metadata.labels has a label of kvc.dev, which belongs to the operator: remove it",fieldPath=".template"
type RoleSpec struct {
	// replicas are engine instances, not pods. Used with scaling.mode Static;
	// otherwise it seeds the first value. 0 on prefill means Unified. Defaults to
	// 1, and to 0 on prefill when directPath is Unified.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`
	// nodesPerReplica is pods per instance. It divides tensorParallelSize.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +kubebuilder:default=1
	// +optional
	NodesPerReplica *int32 `json:"nodesPerReplica,omitempty"`
	// tensorParallelSize is GPUs per instance; a pod gets tensorParallelSize /
	// nodesPerReplica of them.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	// +kubebuilder:default=1
	// +optional
	TensorParallelSize *int32 `json:"tensorParallelSize,omitempty"`
	// scaling says who changes the number of replicas.
	// +optional
	Scaling ScalingSpec `json:"scaling,omitzero"`
	// rollout bounds a change of revision inside the role.
	// +optional
	Rollout RoleRolloutSpec `json:"rollout,omitzero"`
	// drain is how a replica leaves.
	// +optional
	Drain DrainSpec `json:"drain,omitzero"`
	// recovery is how a failed replica comes back.
	// +optional
	Recovery RecoverySpec `json:"recovery,omitzero"`
	// pack places the pods of one replica in one domain of a topology level.
	// +optional
	Pack *PackSpec `json:"pack,omitempty"`
	// minReadySeconds is how long a replica must be ready to count as available.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=0
	// +optional
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`
	// template is a partial pod template, merged (strategically) over what is
	// rendered. The engine container is named "engine".
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`
}

// ScalingMode says who writes the number of replicas.
//
// +kubebuilder:validation:Enum=Static;External;Auto
type ScalingMode string

// The writers of the number of replicas.
const (
	ScalingStatic   ScalingMode = "Static"   // the manifest
	ScalingExternal ScalingMode = "External" // an HPA or KEDA
	ScalingAuto     ScalingMode = "Auto"     // spec.autoscaling
)

// VictimPolicy says which replica leaves first.
//
// +kubebuilder:validation:Enum=EvictionCost;PodDeletionCost;Newest
type VictimPolicy string

// The orders of leaving.
const (
	VictimEvictionCost    VictimPolicy = "EvictionCost"
	VictimPodDeletionCost VictimPolicy = "PodDeletionCost"
	VictimNewest          VictimPolicy = "Newest"
)

// ScalingSpec says who changes the number of replicas and which one leaves.
type ScalingSpec struct {
	// mode is Static, External or Auto.
	// +kubebuilder:default=Static
	// +optional
	Mode ScalingMode `json:"mode,omitempty"`
	// victimPolicy picks the replica that leaves. EvictionCost is the one whose
	// sessions are cheapest to recompute.
	// +kubebuilder:default=EvictionCost
	// +optional
	VictimPolicy VictimPolicy `json:"victimPolicy,omitempty"`
}

// RoleRolloutSpec bounds a rollout inside a role.
//
// +kubebuilder:validation:XValidation:rule="!has(self.maxUnavailable) || (type(self.maxUnavailable) == int ? int(self.maxUnavailable) >= 0 : string(self.maxUnavailable).matches('^0*(100|[0-9]{1,2})%$'))",message="maxUnavailable is neither a number of 0 or more nor a percentage of at most 100%: write one such as 1 or 25%",fieldPath=".maxUnavailable"
// +kubebuilder:validation:XValidation:rule="!has(self.maxSurge) || (type(self.maxSurge) == int ? int(self.maxSurge) >= 0 : string(self.maxSurge).matches('^0*(100|[0-9]{1,2})%$'))",message="maxSurge is neither a number of 0 or more nor a percentage of at most 100%: write one such as 1 or 25%",fieldPath=".maxSurge"
// +kubebuilder:validation:XValidation:rule="!((has(self.maxUnavailable) ? string(self.maxUnavailable) : '0').matches('^0+%?$') && has(self.maxSurge) && string(self.maxSurge).matches('^0+%?$'))",message="maxSurge is 0 and so is maxUnavailable, so nothing could ever move: set one of them to 1 or more",fieldPath=".maxSurge"
type RoleRolloutSpec struct {
	// maxUnavailable is how many replicas may be missing, a number or a percentage.
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:default=0
	// +optional
	MaxUnavailable *intstr.IntOrString `json:"maxUnavailable,omitempty"`
	// maxSurge is how many replicas may be extra, a number or a percentage.
	// +kubebuilder:validation:XIntOrString
	// +kubebuilder:default=1
	// +optional
	MaxSurge *intstr.IntOrString `json:"maxSurge,omitempty"`
	// partition keeps that many replicas at the old revision.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=0
	// +optional
	Partition *int32 `json:"partition,omitempty"`
}

// DrainPolicy is what a leaving replica waits for.
//
// +kubebuilder:validation:Enum=SessionResidency;InFlight;None
type DrainPolicy string

// What a leaving replica waits for.
const (
	DrainSessionResidency DrainPolicy = "SessionResidency" // its sessions have gone idle past their TTL
	DrainInFlight         DrainPolicy = "InFlight"         // its requests have ended
	DrainNone             DrainPolicy = "None"             // nothing
)

// KVHandoff is what happens to the KV of a leaving replica.
//
// +kubebuilder:validation:Enum=Demote;Discard
type KVHandoff string

// What happens to the KV of a leaving replica.
const (
	HandoffDemote  KVHandoff = "Demote" // to a host or remote tier, where one exists
	HandoffDiscard KVHandoff = "Discard"
)

// DrainSpec is how a replica leaves.
//
// +kubebuilder:validation:XValidation:rule="(has(self.softTimeoutSeconds) ? self.softTimeoutSeconds : 300) <= (has(self.hardTimeoutSeconds) ? self.hardTimeoutSeconds : 1800)",message="softTimeoutSeconds (default 300) is longer than hardTimeoutSeconds (default 1800): shorten it or raise the hard one",fieldPath=".softTimeoutSeconds"
type DrainSpec struct {
	// policy is what to wait for. Defaults to InFlight on prefill and to
	// SessionResidency on decode.
	// +optional
	Policy DrainPolicy `json:"policy,omitempty"`
	// softTimeoutSeconds is when idle sessions are handed off. Not longer than
	// the hard one.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=300
	// +optional
	SoftTimeoutSeconds *int32 `json:"softTimeoutSeconds,omitempty"`
	// hardTimeoutSeconds is when the replica is deleted whatever it still serves.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=1800
	// +optional
	HardTimeoutSeconds *int32 `json:"hardTimeoutSeconds,omitempty"`
	// kvHandoff is what happens to its KV.
	// +kubebuilder:default=Demote
	// +optional
	KVHandoff KVHandoff `json:"kvHandoff,omitempty"`
	// maxConcurrent bounds the replicas that drain at once, rollouts and scaling
	// together.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=1
	// +optional
	MaxConcurrent *int32 `json:"maxConcurrent,omitempty"`
}

// RecoveryScope is what is recreated when a pod fails.
//
// +kubebuilder:validation:Enum=Replica;Pod
type RecoveryScope string

// What is recreated when a pod fails.
const (
	RecoverReplica RecoveryScope = "Replica"
	RecoverPod     RecoveryScope = "Pod"
)

// RecoverySpec is how a failed replica comes back: as a new incarnation, after
// a delay that doubles from base to max.
//
// +kubebuilder:validation:XValidation:rule="(has(self.baseDelaySeconds) ? self.baseDelaySeconds : 30) <= (has(self.maxDelaySeconds) ? self.maxDelaySeconds : 600)",message="baseDelaySeconds (default 30) is longer than maxDelaySeconds (default 600): shorten it or raise the other",fieldPath=".baseDelaySeconds"
type RecoverySpec struct {
	// scope is what is recreated.
	// +kubebuilder:default=Replica
	// +optional
	Scope RecoveryScope `json:"scope,omitempty"`
	// baseDelaySeconds is the first delay between failures.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=30
	// +optional
	BaseDelaySeconds *int32 `json:"baseDelaySeconds,omitempty"`
	// maxDelaySeconds is the longest delay. Not shorter than the base.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=600
	// +optional
	MaxDelaySeconds *int32 `json:"maxDelaySeconds,omitempty"`
}

// PackSpec names the level whose domain holds all pods of a replica.
//
// +kubebuilder:validation:XValidation:rule="(has(self.required) && size(self.required) > 0) != (has(self.preferred) && size(self.preferred) > 0)",message="pack takes either required or preferred: keep one"
type PackSpec struct {
	// required is a level that must not be left.
	// +kubebuilder:validation:MaxLength=63
	// +optional
	Required string `json:"required,omitempty"`
	// preferred is a level that may be left when there is no room.
	// +optional
	Preferred string `json:"preferred,omitempty"`
}
