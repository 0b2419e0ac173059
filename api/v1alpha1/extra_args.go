package v1alpha1

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ownedFlags are the SGLang flags that KVC renders itself, and what to write
// instead (sglang-contract.md §1.2, §1.3; spellings of one flag side by side).
func ownedFlags() map[string]string {
	const (
		role    = "it follows from the role and engine.directPath"
		network = "the operator chooses addresses and ports"
		always  = "it is always on"
		oneRank = "one engine is one worker: use replicas"
	)
	return map[string]string{
		"--model-path": "use model.name and model.path", "--model": "use model.name and model.path",
		"--served-model-name": "use model.servedName",
		"--host":              network, "--port": network,
		"--tp-size": "use tensorParallelSize", "--tensor-parallel-size": "use tensorParallelSize",
		"--tp": "use tensorParallelSize", "--nnodes": "use nodesPerReplica", "--node-rank": network,
		"--dist-init-addr": network, "--nccl-init-addr": network,
		"--page-size": "use engine.pageSize", "--kv-cache-dtype": "use engine.kvCacheDtype",
		"--mem-fraction-static":                          "use engine.memFractionStaticPercent",
		"--disaggregation-mode":                          role,
		"--disaggregation-transfer-backend":              "use engine.transferBackend",
		"--disaggregation-bootstrap-port":                network,
		"--disaggregation-ib-device":                     "use rdma.ibDevices",
		"--disaggregation-decode-enable-radix-cache":     role,
		"--disaggregation-decode-enable-conditional-agg": role,
		"--enable-hierarchical-cache":                    "use engine.kvTier",
		"--hicache-size":                                 "use engine.kvTier.host",
		"--hicache-ratio":                                "use engine.kvTier.host",
		"--hicache-storage-backend":                      "use engine.kvTier.store",
		"--enable-metrics":                               always, "--enable-cache-report": always,
		"--kv-events-config":    "the sidecar reads events over a local socket",
		"--api-key":             "the operator makes a key per pool",
		"--disable-radix-cache": "without the radix cache no turn is ever resident",
		"--smg-grpc-mode":       "KVC speaks HTTP to its engines",
		"--enable-dp-attention": oneRank,
	}
}

// removedFlags existed in older releases; an engine that meets them exits.
func removedFlags() []string {
	return []string{"--disaggregation-decode-tp", "--disaggregation-decode-dp", "--disaggregation-prefill-pp"}
}

// rankFlags may only be 1.
func rankFlags() []string {
	return []string{"--dp-size", "--data-parallel-size", "--dp", "--pp-size", "--pipeline-parallel-size", "--pp"}
}

// validateExtraArgs refuses flags that would contradict what is rendered.
func validateExtraArgs(s *KVCPoolSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	args := s.Engine.ExtraArgs
	for i, arg := range args {
		flag, value, hasValue := strings.Cut(arg, "=")
		if arg == "" {
			errs = append(errs, field.Invalid(at.Index(i), arg, "is empty; remove it"))
			continue
		}
		if !strings.HasPrefix(flag, "-") {
			if i == 0 || !strings.HasPrefix(args[i-1], "-") || strings.Contains(args[i-1], "=") {
				errs = append(errs, field.Invalid(at.Index(i), arg, "a flag starts with --; write --flag=value"))
			}
			continue
		}
		if !hasValue && i+1 < len(args) {
			value = args[i+1]
		}
		if msg := refuseFlag(s, flag, value); msg != "" {
			errs = append(errs, field.Invalid(at.Index(i), arg, msg))
		}
	}
	return errs
}

// refuseFlag says why a flag may not be passed; "" lets it through.
func refuseFlag(s *KVCPoolSpec, flag, value string) string {
	if slices.Contains(removedFlags(), flag) {
		return "SGLang removed this flag and exits on it; remove it"
	}
	if slices.Contains(rankFlags(), flag) {
		if value == "1" {
			return ""
		}
		return "more than one rank per engine is not supported; use replicas and tensorParallelSize"
	}
	if flag == "--speculative-algorithm" && ResolveDirectPath(s) != DirectPathUnified {
		return "SGLang refuses speculative decoding beside the decode radix cache; remove it, or use directPath Unified"
	}
	owned := ownedFlags()
	if why, ok := owned[flag]; ok {
		return "this flag is the operator's: " + why
	}
	for name := range owned { // argparse takes an unambiguous beginning for the whole flag
		if len(flag) > len("--") && strings.HasPrefix(name, flag) {
			return fmt.Sprintf("SGLang may read it as %s, which is the operator's; write the flag in full", longest(owned, flag))
		}
	}
	return ""
}

// longest is the first owned flag, in order, that begins with prefix.
func longest(owned map[string]string, prefix string) string {
	var names []string
	for name := range owned {
		if strings.HasPrefix(name, prefix) {
			names = append(names, name)
		}
	}
	return slices.Min(names)
}
