package v1alpha1

// Conditions of a KVCPool. Available, Progressing, GangScheduled and
// TransferReady are also conditions of the sets. True is what the comment says.
const (
	ConditionReady          = "Ready"          // available, rolled out, router ready: the summary that tools wait for
	ConditionAvailable      = "Available"      // at least one pair of workers serves
	ConditionProgressing    = "Progressing"    // a rollout or a scaling is moving
	ConditionPrefillReady   = "PrefillReady"   // the prefill set is
	ConditionDecodeReady    = "DecodeReady"    // the decode set is
	ConditionRouterReady    = "RouterReady"    // the router is
	ConditionModelReady     = "ModelReady"     // the weights are loaded
	ConditionGangScheduled  = "GangScheduled"  // every replica has all of its pods placed
	ConditionTransferReady  = "TransferReady"  // the last probe moved KV over the wanted fabric
	ConditionScalingActive  = "ScalingActive"  // the autoscaler has fresh data and writes
	ConditionRatioSatisfied = "RatioSatisfied" // ready P:D is inside its bounds
	ConditionDraining       = "Draining"       // a replica is leaving (information)
	ConditionOpen           = "Open"           // no API key is set (information)
	ConditionReplicaFailure = "ReplicaFailure" // sets only: a pod could not be created
)

// Reasons, by the condition that carries them when it is not what one hopes for.
const (
	// Available.
	ReasonNoPrefill            = "NoPrefill"
	ReasonNoDecode             = "NoDecode"
	ReasonNotPaired            = "NotPaired"
	ReasonInsufficientCapacity = "InsufficientCapacity"
	ReasonPodsNotReady         = "PodsNotReady"
	ReasonScaledToZero         = "ScaledToZero"

	// Progressing.
	ReasonRolloutComplete          = "RolloutComplete"
	ReasonPaused                   = "Paused"
	ReasonProgressDeadlineExceeded = "ProgressDeadlineExceeded"

	// PrefillReady, DecodeReady, RouterReady, ModelReady.
	ReasonImagePull          = "ImagePull"
	ReasonCrashLoop          = "CrashLoop"
	ReasonDiscoveryForbidden = "DiscoveryForbidden"
	ReasonClaimNotFound      = "ClaimNotFound"

	// GangScheduled.
	ReasonUnschedulable   = "Unschedulable"
	ReasonGateHeld        = "GateHeld"
	ReasonProviderMissing = "ProviderMissing"

	// TransferReady.
	ReasonDeviceMissing = "DeviceMissing"
	ReasonPortDown      = "PortDown"
	ReasonMemlockTooLow = "MemlockTooLow"
	ReasonTCPFallback   = "TCPFallback"
	ReasonNoTransfer    = "NoTransfer"

	// ScalingActive.
	ReasonMetricsMissing      = "MetricsMissing"
	ReasonMetricsStale        = "MetricsStale"
	ReasonMultipleAutoscalers = "MultipleAutoscalers"
	ReasonExternal            = "External"
	ReasonStatic              = "Static"

	// RatioSatisfied.
	ReasonBoundsConflict  = "BoundsConflict"
	ReasonBudgetExhausted = "BudgetExhausted"
	ReasonRolling         = "Rolling"
)
