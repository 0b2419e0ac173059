package v1alpha1

// ResolveDirectPath replaces Auto by the profile that it stands for (wire.md §9):
// ConditionalAggregation for the Emulator, Unified for SGLang without prefill
// workers, DeltaTransfer for SGLang with them. It chooses nothing that a stock
// SGLang cannot do; the other profiles are explicit choices. The spec is
// defaulted.
func ResolveDirectPath(s *KVCPoolSpec) DirectPath {
	switch {
	case s.Engine.DirectPath != DirectPathAuto && s.Engine.DirectPath != "":
		return s.Engine.DirectPath
	case s.Engine.Type == EngineEmulator:
		return DirectPathConditionalAggregation
	case s.hasPrefill():
		return DirectPathDeltaTransfer
	}
	return DirectPathUnified
}

// hasPrefill reports whether the pool may ever have a prefill worker.
func (s *KVCPoolSpec) hasPrefill() bool {
	if s.Prefill.Replicas == nil || *s.Prefill.Replicas > 0 {
		return true
	}
	return s.Prefill.Scaling.Mode == ScalingExternal || s.Prefill.Scaling.Mode == ScalingAuto
}
