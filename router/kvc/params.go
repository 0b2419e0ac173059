package kvc

import "time"

// Params are the constants of the algorithms and one named field per ruling
// (algorithms.md §5). Use Paper or Corrected and change fields.
type Params struct {
	Preset string // "Paper" or "Corrected", for reports

	StickyBonus      int // α
	RejectThreshold  int // τ_reject
	MaxAppendTokens  int // τ_append
	HighWaterPercent int // ρ
	MaxProbes        int // ε; 0 = the preset's rule (Q3)

	ProtectIdle      time.Duration // Q1, Q16: how long idle KV is not reclaimable
	RejectHalfLife   time.Duration // Q8
	AssignedHalfLife time.Duration // Q9
	LeaseTTL         time.Duration // Q11

	// … one field per ruling Q1–Q18 …
}

// Paper is the pseudocode to the letter.
func Paper() Params { return Params{Preset: "Paper"} }

// Corrected is the default: the paper with every ruling.
func Corrected() Params { return Params{Preset: "Corrected"} }
