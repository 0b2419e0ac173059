package build

import (
	"fmt"
	"strconv"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// kvEvents is how an engine publishes its KV events: token ids, so prompts.
// They stay on a socket of the pod and never reach the network.
const kvEvents = `{"publisher":"zmq","endpoint":"ipc://` + v1alpha1.DirRun + `/kv-events","topic":"kv-events"}`

// EngineCommand is the program of an engine container, without its arguments.
func EngineCommand(t v1alpha1.EngineType) []string {
	if t == v1alpha1.EngineEmulator {
		return []string{ProgramDir + "/emulator"}
	}
	return []string{"python3", "-m", "sglang.launch_server"}
}

// EngineArgs is the engine's command line for a role (sglang-contract.md §1): no
// removed flag, the same page size and KV type on both roles, and the user's
// extraArgs last. The Emulator takes the same flags. The key is a reference to
// the container's environment, resolved by whoever starts it.
func EngineArgs(pool *v1alpha1.KVCPool, role v1alpha1.Role, o Options) []string {
	o = o.withDefaults()
	s := &pool.Spec
	e := &s.Engine
	args := []string{
		"--model-path", modelPath(&s.Model),
		"--served-model-name", s.Model.ServedName,
		"--host", o.Host,
		"--port", itoa(o.Ports.Engine),
		"--tp-size", itoa(*s.Role(role).TensorParallelSize),
		"--page-size", itoa(*e.PageSize),
		"--kv-cache-dtype", e.KVCacheDtype,
		"--mem-fraction-static", fmt.Sprintf("0.%02d", *e.MemFractionStaticPercent),
	}
	args = append(args, profileArgs(s, role, o)...)
	args = append(args, tierArgs(s, role)...)
	args = append(args,
		"--enable-metrics",
		"--enable-cache-report", // usage carries cached_tokens, which the ledger lives on
		"--kv-events-config", kvEvents,
		"--api-key", "$("+v1alpha1.EnvEngineKey+")",
	)
	return append(args, e.ExtraArgs...)
}

// modelPath is a directory, or the name that the engine downloads by.
func modelPath(m *v1alpha1.ModelSpec) string {
	if m.Source == v1alpha1.SourceHuggingFace {
		return m.Name
	}
	return m.Path
}

// profileArgs are the disaggregation flags of architecture.md's engine profiles.
// NativeAdmission is a patched engine: it is told its role and asked to keep its
// radix cache; its admission is always on.
func profileArgs(s *v1alpha1.KVCPoolSpec, role v1alpha1.Role, o Options) []string {
	path := v1alpha1.ResolveDirectPath(s)
	if path == v1alpha1.DirectPathUnified {
		return []string{"--disaggregation-mode", "null"}
	}
	args := []string{
		"--disaggregation-mode", role.Label(),
		"--disaggregation-transfer-backend", transferBackend(s),
	}
	if s.RDMA.Mode != v1alpha1.RDMADisabled && s.RDMA.IBDevices != "" {
		args = append(args, "--disaggregation-ib-device", s.RDMA.IBDevices)
	}
	if role == v1alpha1.Prefill {
		return append(args, "--disaggregation-bootstrap-port", itoa(o.Ports.Bootstrap))
	}
	// Without it a decode engine forgets a prompt as soon as its request ends.
	args = append(args, "--disaggregation-decode-enable-radix-cache")
	if path == v1alpha1.DirectPathConditionalAggregation {
		args = append(args, "--disaggregation-decode-enable-conditional-agg")
	}
	return args
}

// transferBackend spells the backend as SGLang does. Without RDMA, Mooncake is
// told to use TCP: TCP is then what was asked for and no fallback.
func transferBackend(s *v1alpha1.KVCPoolSpec) string {
	switch {
	case s.Engine.TransferBackend == v1alpha1.TransferNIXL:
		return "nixl"
	case s.Engine.TransferBackend == v1alpha1.TransferMooncakeTCP, s.RDMA.Mode == v1alpha1.RDMADisabled:
		return "mooncake_tcp"
	}
	return "mooncake"
}

// tierArgs gives the engine a tier below GPU memory, so that evicting demotes.
// SGLang counts the size in GB (10^9) per rank.
func tierArgs(s *v1alpha1.KVCPoolSpec, role v1alpha1.Role) []string {
	host := s.HostTier(role)
	if host.IsZero() {
		return nil
	}
	const gb = 1_000_000_000
	perRank := max(1, host.Value()/gb/int64(gpusPerPod(s, role)))
	args := []string{"--enable-hierarchical-cache", "--hicache-size", strconv.FormatInt(perRank, 10)}
	if s.Engine.KVTier == nil {
		return args
	}
	switch s.Engine.KVTier.Store {
	case v1alpha1.KVStoreFile:
		args = append(args, "--hicache-storage-backend", "file")
	case v1alpha1.KVStoreMooncake:
		args = append(args, "--hicache-storage-backend", "mooncake")
	case v1alpha1.KVStoreNone:
	}
	return args
}

// gpusPerPod is the ranks, and so the GPUs, of one pod of a role.
func gpusPerPod(s *v1alpha1.KVCPoolSpec, role v1alpha1.Role) int32 {
	r := s.Role(role)
	return *r.TensorParallelSize / *r.NodesPerReplica
}

func itoa(n int32) string { return strconv.FormatInt(int64(n), 10) }
