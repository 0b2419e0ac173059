package sim

import (
	"slices"
	"time"
)

// Preset is one kind of worker: its cost and how many tokens its KV pool holds.
type Preset struct {
	Name string
	// Accelerator is the name the engine reports in /v1/loads.
	Accelerator string
	Cost        Cost
	// CapacityTokens is the pool when --max-total-tokens says nothing.
	CapacityTokens int
	// Source says where the constants come from.
	Source string
}

// KV of the 32B model the paper's pool serves (64 layers, 8 KV heads of 128,
// two bytes, keys and values).
const kvBytes32B = 64 * 8 * 128 * 2 * 2

// KV of llama2-70b (80 layers, 8 KV heads of 128, two bytes, keys and values).
const kvBytes70B = 80 * 8 * 128 * 2 * 2

// The fabrics of a transfer. TCP reproduces the paper's 1.5–4 s for a reseed of
// 50–90 K tokens of the 32B model, RDMA its expected ~200 ms (paper §9.3).
var (
	rdma = Link{Name: "rdma", Latency: 2 * time.Millisecond, BytesPerSecond: 90e9}
	tcp  = Link{Name: "tcp", Latency: 5 * time.Millisecond, BytesPerSecond: 7e9}
	none = Link{Name: "none"}
)

// HostLink is the path between an accelerator and its host's memory, over which
// a hierarchical cache loads evicted KV back (PCIe 5 x16, what of it is usable).
func HostLink() Link {
	return Link{Name: "host", Latency: time.Millisecond, BytesPerSecond: 50e9}
}

// LinkOf returns the fabric behind SGLang's --disaggregation-transfer-backend.
func LinkOf(backend string) Link {
	switch backend {
	case "mooncake_tcp":
		return tcp
	case "fake":
		return none
	default:
		return rdma
	}
}

// presets in display order. The prefill constants of the 32B family follow the
// paper's H100 (reseed of 50–90 K tokens: 1.5–3 s of prefill), the ratio of
// A100 to H100 and the slope of a decode step follow the Splitwise
// measurements; h200 and b200 are scaled from h100 by published bandwidth and
// dense bf16 throughput, not measured. The llama2-70b family is fitted to
// Splitwise by least squares on relative errors.
func presets() []Preset {
	return []Preset{
		{
			Name: "h100", Accelerator: "NVIDIA H100 80GB HBM3", CapacityTokens: 92_104,
			Cost:   cost32B(25*time.Millisecond, 25_500, 0.165, 20*time.Millisecond, 300*time.Microsecond),
			Source: "paper: K_d, prefill and transfer of a reseed; Splitwise: decode slope",
		},
		{
			Name: "h200", Accelerator: "NVIDIA H200", CapacityTokens: 301_056,
			Cost:   cost32B(25*time.Millisecond, 25_500, 0.165, 14*time.Millisecond, 210*time.Microsecond),
			Source: "h100 with 4.8/3.35 of its memory bandwidth and 141 GB",
		},
		{
			Name: "a100", Accelerator: "NVIDIA A100-SXM4-80GB", CapacityTokens: 92_104,
			Cost:   cost32B(35*time.Millisecond, 53_500, 0.347, 30*time.Millisecond, 360*time.Microsecond),
			Source: "h100 by the A100/H100 ratios of Splitwise: prefill 2.1, decode 1.5",
		},
		{
			Name: "b200", Accelerator: "NVIDIA B200", CapacityTokens: 475_136,
			Cost:   cost32B(15*time.Millisecond, 11_200, 0.073, 8400*time.Microsecond, 130*time.Microsecond),
			Source: "h100 with 2.27 of its dense bf16 throughput, 8/3.35 of its bandwidth and 192 GB",
		},
		{
			Name: "llama2-70b-h100x4", Accelerator: "NVIDIA H100 80GB HBM3", CapacityTokens: 430_080,
			Cost:   cost70B(19*time.Millisecond, 88_500, 6.08, 29*time.Millisecond, 315*time.Microsecond),
			Source: "Splitwise, llama2-70b, 4 × H100",
		},
		{
			Name: "llama2-70b-a100x4", Accelerator: "NVIDIA A100-SXM4-80GB", CapacityTokens: 430_080,
			Cost:   cost70B(14200*time.Microsecond, 236_900, 2.896, 43900*time.Microsecond, 381*time.Microsecond),
			Source: "Splitwise, llama2-70b, 4 × A100",
		},
	}
}

// cost32B and cost70B take a (base), b and c in nanoseconds, and the two decode
// constants.
func cost32B(a time.Duration, b, c float64, base, perSeq time.Duration) Cost {
	return Cost{
		PrefillBase: a, PrefillPerToken: b, PrefillPerPair: c,
		DecodeBase: base, DecodePerSeq: perSeq, KVBytesPerToken: kvBytes32B,
	}
}

func cost70B(a time.Duration, b, c float64, base, perSeq time.Duration) Cost {
	k := cost32B(a, b, c, base, perSeq)
	k.KVBytesPerToken = kvBytes70B
	return k
}

// PresetOf returns the preset of that name; ok is false when there is none.
func PresetOf(name string) (p Preset, ok bool) {
	all := presets()
	i := slices.IndexFunc(all, func(p Preset) bool { return p.Name == name })
	if i < 0 {
		return Preset{}, false
	}
	return all[i], true
}

// PresetNames lists the presets, the default first.
func PresetNames() []string {
	var names []string
	for _, p := range presets() {
		names = append(names, p.Name)
	}
	return names
}
