package v1alpha1

// BlockBytes is the only block length of block format kvc-b96-v1.
const BlockBytes = 96

// RoutingPreset chooses between the paper's pseudocode and its rulings.
//
// +kubebuilder:validation:Enum=Corrected;Paper
type RoutingPreset string

// The presets.
const (
	PresetCorrected RoutingPreset = "Corrected" // the paper with every ruling Q1–Q18
	PresetPaper     RoutingPreset = "Paper"     // the pseudocode to the letter
)

// RoutingSpec holds the constants of Algorithms 1–3.
//
// +kubebuilder:validation:XValidation:rule="!has(self.blockBytes) || self.blockBytes == 96",message="routing.blockBytes can only be 96, which is what block format kvc-b96-v1 knows: remove it",fieldPath=".blockBytes"
type RoutingSpec struct {
	// preset is Corrected, or Paper to measure the published pseudocode.
	// +kubebuilder:default=Corrected
	// +optional
	Preset RoutingPreset `json:"preset,omitempty"`
	// blockBytes is the length of a prompt block, about 24 tokens. Immutable;
	// block format kvc-b96-v1 knows only 96.
	// +kubebuilder:default=96
	// +optional
	BlockBytes *int32 `json:"blockBytes,omitempty"`
	// stickyBonus (α) is how many blocks of overlap being the session's own
	// worker is worth. 0 makes residency alone decide.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	// +kubebuilder:default=1
	// +optional
	StickyBonus *int32 `json:"stickyBonus,omitempty"`
	// rejectThreshold (τ_reject) is how many refusals make the router pass a
	// worker over for a session.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	// +kubebuilder:default=3
	// +optional
	RejectThreshold *int32 `json:"rejectThreshold,omitempty"`
	// maxAppendTokens (τ_append) is the largest append a worker prefills by
	// itself. A longer one goes through a prefill worker, to the same decode
	// worker.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:default=8192
	// +optional
	MaxAppendTokens *int32 `json:"maxAppendTokens,omitempty"`
	// highWaterPercent (ρ) is the share of a worker's KV that admission may fill.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=95
	// +optional
	HighWaterPercent *int32 `json:"highWaterPercent,omitempty"`
	// maxProbes (ε) is how many workers a turn may ask before it falls back.
	// Unset is the preset's rule: the smaller of 4 and the number of decode
	// workers under Corrected.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	// +optional
	MaxProbes *int32 `json:"maxProbes,omitempty"`
	// admission bounds one question to one worker.
	// +optional
	Admission AdmissionSpec `json:"admission,omitzero"`
	// protectIdleSeconds is how long after its last turn a session's KV is not
	// reclaimable by admission. Defaults to 120, or to 0 under Paper, which
	// knows no protection.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	// +optional
	ProtectIdleSeconds *int32 `json:"protectIdleSeconds,omitempty"`
}

// AdmissionSpec bounds one admission question. These are network deadlines:
// KVC_TIME_SCALE does not touch them.
//
// +kubebuilder:validation:XValidation:rule="!has(self.hedgeAfterMilliseconds) || self.hedgeAfterMilliseconds <= (has(self.timeoutMilliseconds) ? self.timeoutMilliseconds : 50)",message="hedgeAfterMilliseconds is longer than timeoutMilliseconds (default 50): shorten it, or set both equal to never hedge",fieldPath=".hedgeAfterMilliseconds"
type AdmissionSpec struct {
	// timeoutMilliseconds is when an unanswered question counts as unknown.
	// Unknown is never a reject.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=60000
	// +kubebuilder:default=50
	// +optional
	TimeoutMilliseconds *int32 `json:"timeoutMilliseconds,omitempty"`
	// hedgeAfterMilliseconds is when a second worker is asked as well. Never
	// longer than the timeout; equal to it means never. Defaults to 10, or to the
	// timeout when that is shorter.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=60000
	// +optional
	HedgeAfterMilliseconds *int32 `json:"hedgeAfterMilliseconds,omitempty"`
}
