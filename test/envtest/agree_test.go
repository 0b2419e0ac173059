package envtest

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// choices are values of fields, in YAML, that are right or wrong depending on
// each other. A random pool takes some of them.
func choices() map[string][]string {
	numbers := []string{"0", "1", "2", "3", "4", "8"}
	bounds := []string{"{min: 0, max: 1}", "{min: 1, max: 2}", "{min: 3, max: 2}", "{min: 10, max: 20}"}
	share := []string{"0", "1", `"0%"`, `"00%"`, `"25%"`, `"100%"`, `"101%"`, `"5"`, "-1", "some"}
	modes := []string{"Static", "External", "Auto"}
	seconds := []string{"0", "10", "299", "300", "301", "1800", "1801"}
	levels := []string{"[]", "[{name: rail, nodeLabelKey: a/b}]",
		"[{name: zone, nodeLabelKey: z}, {name: rail, nodeLabelKey: a/b}]", "[{name: rail, nodeLabelKey: a b}]"}
	pack := []string{"{}", "{required: rail}", "{preferred: rail}", "{preferred: row}", `{required: "", preferred: zone}`,
		"{required: rail, preferred: rail}"}
	templates := []string{"{}", "{spec: {}}", "{spec: {containers: [{name: engine}]}}",
		"{spec: {containers: [{name: mine, args: [x]}]}}", "{spec: {containers: [{name: engine, args: [x]}]}}",
		"{spec: {initContainers: [{name: kvc-sidecar, command: [x]}]}}", "{metadata: {labels: {a: b}}}",
		"{metadata: {labels: {kvc.dev/pool: b}}}"}
	out := map[string][]string{
		"model.name":            {"Qwen/Qwen3-32B", `" "`},
		"model.source":          {"HuggingFace", "PVC", "HostPath", "Image"},
		"model.claimName":       {`""`, "c"},
		"model.path":            {`""`, "/m", "m"},
		"model.tokenSecretName": {`""`, "t"},
		"model.cache": {"{claimName: c}", "{hostPath: /c}", "{hostPath: c}", "{claimName: c, hostPath: /c}",
			`{claimName: "", hostPath: /c}`},
		"engine.type":         {"SGLang", "Emulator"},
		"engine.directPath":   {"Auto", "ConditionalAggregation", "NativeAdmission", "Unified", "DeltaTransfer"},
		"engine.image":        {`""`, "mine", v1alpha1.DefaultSGLangImage},
		"engine.gpuResource":  {"amd.com/gpu", "a b", "nvidia.com/mig-1g.5gb"},
		"engine.shmSize":      {"1Gi", `"0"`, "0", "-1", "500M"},
		"engine.kvTier":       {"{host: 64Gi}", `{host: "0"}`, "{host: 1}"},
		"engine.kvCacheDtype": {"auto", "fp8_e4m3", "fp3"},
		"engine.extraArgs": {"[]", "[--log-level, info]", "[--page-size=1]", "[--page]", "[--dp, '1']", "[--dp, '12']",
			"[--dp=1]", "[--dp=1, --pp-size]", "[x]", "[--a=b, c]", "[--a, b, c]", "[--a, b, --c=d]", "['', --a]", "[--a, '']",
			"[--speculative-algorithm, EAGLE]", "[--speculative-algorithm=EAGLE]", "[--enable-metrics-for-all-schedulers]",
			"[--disaggregation-decode-tp, '4']", "[--, x]", "[-x, z]", "[--model-loader-extra-config, '{\"a\": \"--dp 2\"}']"},
		"decode.replicas":           numbers,
		"prefill.replicas":          numbers,
		"decode.scaling.mode":       modes,
		"prefill.scaling.mode":      modes,
		"autoscaling.prefill":       bounds,
		"autoscaling.decode":        bounds,
		"autoscaling.ratio":         {"{}", "{minPrefillPerDecodePercent: 100}", "{maxPrefillPerDecodePercent: 5}"},
		"topology.levels":           levels,
		"topology.pairing":          {"{domain: rail}", "{domain: zone}"},
		"rdma.mode":                 {"Disabled", "DevicePlugin", "HostNetwork"},
		"rdma.resourceName":         {`""`, "rdma/hca", "rdma hca", "/hca"},
		"router.template":           templates,
		"router.session.headers":    {"[]", "[x-a]", "[x a]", "[X_A]"},
		"routing.preset":            {"Corrected", "Paper"},
		"routing.blockBytes":        {"96", "64"},
		"routing.admission":         {"{timeoutMilliseconds: 5}", "{hedgeAfterMilliseconds: 50}", "{hedgeAfterMilliseconds: 51}"},
		"gang.provider":             {"None", "Volcano"},
		"sloClasses":                {"[{name: a}, {name: b}]", "[{name: a}, {name: a}]", "[{name: A}]"},
		"router.session.bodyFields": {"[]", "[a]", "['']"},
	}
	for _, role := range []string{"prefill", "decode"} {
		out[role+".tensorParallelSize"], out[role+".nodesPerReplica"] = numbers, numbers
		out[role+".rollout.maxSurge"], out[role+".rollout.maxUnavailable"] = share, share
		out[role+".drain.softTimeoutSeconds"], out[role+".drain.hardTimeoutSeconds"] = seconds, seconds
		out[role+".recovery.baseDelaySeconds"], out[role+".recovery.maxDelaySeconds"] = seconds, seconds
		out[role+".pack"], out[role+".template"] = pack, templates
	}
	return out
}

// groups are fields that only mean something together; a random pool takes one
// group whole and a few fields beside it.
func groups() [][]string {
	return [][]string{
		{"model."}, {"engine.type", "engine.directPath", "engine.image", "prefill.replicas", "prefill.scaling"},
		{"engine.extraArgs", "engine.directPath", "prefill.replicas"}, {"autoscaling.", "decode.scaling", "prefill.scaling"},
		{"topology.", "decode.pack", "prefill.pack"}, {"decode.rollout"}, {"prefill.drain"}, {"decode.recovery"}, {"rdma."},
		{"decode.tensor", "decode.nodes"}, {"routing."}, {"decode.template", "router.template"}, {"engine."}, {"router."},
	}
}

// draw makes a random pool.
func draw(r *rand.Rand, all map[string][]string) *unstructured.Unstructured {
	GinkgoHelper()
	u := manifest("p", "  model: {name: m}\n")
	names := slices.Sorted(maps.Keys(all))
	group := groups()[r.IntN(len(groups()))]
	for _, name := range names {
		in := slices.ContainsFunc(group, func(p string) bool { return strings.HasPrefix(name, p) })
		if in && r.IntN(4) == 0 || !in && r.IntN(60) > 0 {
			continue
		}
		var value any
		Expect(yaml.Unmarshal([]byte(all[name][r.IntN(len(all[name]))]), &value)).To(Succeed())
		if n, ok := value.(float64); ok {
			value = int64(n)
		}
		Expect(unstructured.SetNestedField(u.Object, value, append([]string{"spec"}, strings.Split(name, ".")...)...)).
			To(Succeed())
	}
	return u
}

var _ = Describe("The rules of the API server and of kvc up", func() {
	It("agree on a thousand random pools", func(ctx SpecContext) {
		ns, all := namespace(ctx), choices()
		r := rand.New(rand.NewPCG(uint64(GinkgoRandomSeed()), 0))
		valid, disputes := 0, []string(nil)
		for range 1000 {
			u := draw(r, all)
			pool := decode[v1alpha1.KVCPool](u)
			v1alpha1.Default(pool)
			ours := v1alpha1.Validate(pool)

			sent := u.DeepCopy()
			sent.SetNamespace(ns)
			theirs := env.Client.Create(ctx, sent, strict(), client.DryRunAll)
			if theirs == nil {
				valid++
			}
			if (theirs == nil) != (len(ours) == 0) {
				disputes = append(disputes,
					fmt.Sprintf("kvc up says: %v\nthe API server says: %v\nof:\n%s", ours, theirs, text(u.Object["spec"])))
			}
		}
		Expect(disputes).To(HaveLen(0), "%d disputes:\n%s", len(disputes), strings.Join(disputes[:min(9, len(disputes))], "\n"))
		Expect(valid).To(BeNumerically("~", 500, 350), "the pools are too often of one kind to tell much")
		GinkgoWriter.Printf("%d of 1000 pools valid\n", valid)
	})
})
