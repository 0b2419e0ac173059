package v1alpha1

// AutoscalingSpec changes the number of replicas of roles in mode Auto.
//
// +kubebuilder:validation:XValidation:rule="!has(self.prefill) || !has(self.decode) || (100 * self.prefill.max >= (has(self.ratio) && has(self.ratio.minPrefillPerDecodePercent) ? self.ratio.minPrefillPerDecodePercent : 10) * self.decode.min && 100 * self.prefill.min <= (has(self.ratio) && has(self.ratio.maxPrefillPerDecodePercent) ? self.ratio.maxPrefillPerDecodePercent : 400) * self.decode.max)",message="autoscaling.ratio is out of reach: no number of replicas inside the bounds has such a ratio; widen prefill, decode or ratio",fieldPath=".ratio"
type AutoscalingSpec struct {
	// prefill bounds the prefill replicas. Required when prefill is Auto.
	// +optional
	Prefill *ReplicaBounds `json:"prefill,omitempty"`
	// decode bounds the decode replicas. Required when decode is Auto.
	// +optional
	Decode *ReplicaBounds `json:"decode,omitempty"`
	// ratio bounds prefill replicas per decode replica.
	// +optional
	Ratio RatioBounds `json:"ratio,omitzero"`
	// signals are what is measured and what is wanted.
	// +optional
	Signals ScalingSignals `json:"signals,omitzero"`
	// maxGPUs bounds the GPUs of both roles, pending ones included. Unset: no bound.
	// +kubebuilder:validation:Minimum=1
	// +optional
	MaxGPUs *int32 `json:"maxGPUs,omitempty"`
	// intervalSeconds is the time between decisions.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=15
	// +optional
	IntervalSeconds *int32 `json:"intervalSeconds,omitempty"`
	// scaleUpStabilizationSeconds is how long a need must last to add replicas.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=60
	// +optional
	ScaleUpStabilizationSeconds *int32 `json:"scaleUpStabilizationSeconds,omitempty"`
	// scaleDownStabilizationSeconds is how long an excess must last to drain one.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=600
	// +optional
	ScaleDownStabilizationSeconds *int32 `json:"scaleDownStabilizationSeconds,omitempty"`
	// metricsMaxAgeSeconds is when a measurement is stale. Stale is missing, and
	// missing holds: nothing is scaled on it.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=60
	// +optional
	MetricsMaxAgeSeconds *int32 `json:"metricsMaxAgeSeconds,omitempty"`
}

// ReplicaBounds are the fewest and most replicas of a role.
//
// +kubebuilder:validation:XValidation:rule="self.min <= self.max",message="min is larger than max: lower it or raise max",fieldPath=".min"
type ReplicaBounds struct {
	// min is the fewest replicas.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +required
	Min int32 `json:"min"`
	// max is the most replicas.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	// +required
	Max int32 `json:"max"`
}

// RatioBounds bound prefill replicas per 100 decode replicas.
//
// +kubebuilder:validation:XValidation:rule="(has(self.minPrefillPerDecodePercent) ? self.minPrefillPerDecodePercent : 10) <= (has(self.maxPrefillPerDecodePercent) ? self.maxPrefillPerDecodePercent : 400)",message="minPrefillPerDecodePercent (default 10) is larger than maxPrefillPerDecodePercent (default 400): lower it or raise the other",fieldPath=".minPrefillPerDecodePercent"
type RatioBounds struct {
	// minPrefillPerDecodePercent is the fewest prefill replicas per 100 decode ones.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=10
	// +optional
	MinPrefillPerDecodePercent *int32 `json:"minPrefillPerDecodePercent,omitempty"`
	// maxPrefillPerDecodePercent is the most prefill replicas per 100 decode ones.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=400
	// +optional
	MaxPrefillPerDecodePercent *int32 `json:"maxPrefillPerDecodePercent,omitempty"`
}

// ScalingSignals are the targets of the autoscaler. A signal without fresh data
// holds the role where it is.
type ScalingSignals struct {
	// prefillQueueDepth is waiting requests per prefill replica.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=4
	// +optional
	PrefillQueueDepth *int32 `json:"prefillQueueDepth,omitempty"`
	// decodeTransferQueueDepth is waiting transfers per decode replica.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=8
	// +optional
	DecodeTransferQueueDepth *int32 `json:"decodeTransferQueueDepth,omitempty"`
	// decodeKVUsagePercent is the use of a decode replica's KV.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=80
	// +optional
	DecodeKVUsagePercent *int32 `json:"decodeKVUsagePercent,omitempty"`
	// sloAttainmentPercent is the share of requests that kept their class's promise.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=90
	// +optional
	SLOAttainmentPercent *int32 `json:"sloAttainmentPercent,omitempty"`
}
