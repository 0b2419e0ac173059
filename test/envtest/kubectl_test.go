package envtest

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"sigs.k8s.io/yaml"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/test/envtest/kit"
)

// lastApplied is what the annotation of a client-side apply may hold.
const lastApplied = 262_144

// kubectl runs the server's own kubectl and returns both of its outputs.
func kubectl(ctx SpecContext, args ...string) (string, error) {
	GinkgoHelper()
	config, err := env.Kubeconfig(GinkgoT().TempDir())
	Expect(err).NotTo(HaveOccurred())
	cmd := exec.CommandContext(ctx, kit.Kubectl(), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+config, "HOME="+GinkgoT().TempDir())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// run is a kubectl that must succeed.
func run(ctx SpecContext, args ...string) string {
	GinkgoHelper()
	out, err := kubectl(ctx, args...)
	Expect(err).NotTo(HaveOccurred(), out)
	return out
}

var _ = Describe("A CRD", func() {
	crds, err := filepath.Glob(filepath.Join(kit.Root(), "config", "crd", "bases", "*.yaml"))
	if err != nil || len(crds) != 3 {
		panic("config/crd/bases does not hold three CRDs; run make manifests")
	}
	for _, name := range crds {
		It("O57: fits into the annotation of kubectl apply: "+filepath.Base(name), func(ctx SpecContext) {
			small, err := yaml.YAMLToJSON(read(name))
			Expect(err).NotTo(HaveOccurred())
			Expect(len(small)).To(BeNumerically("<", lastApplied))
			// The envtest installed it without the annotation; this adds it.
			run(ctx, "apply", "-f", name)
		})
	}
})

var _ = Describe("kubectl", func() {
	It("explains every field outside of templates", func(ctx SpecContext) {
		out := run(ctx, "explain", "kvcpool.spec.routing")
		Expect(out).To(ContainSubstring("maxAppendTokens (τ_append) is the largest append a worker prefills by"))
		Expect(out).To(ContainSubstring("rejectThreshold"))
		Expect(run(ctx, "explain", "dcs.status.draining")).To(ContainSubstring("evictionCostTokens"))
		Expect(run(ctx, "explain", "kvcp.spec.decode.template")).To(ContainSubstring("partial pod template"))
		for _, kind := range []string{"kvcpools", "prefillsets", "decodesets"} {
			missing(kind+".yaml", schema(kind), "")
		}
	})

	It("shows the columns of a pool under its short name", func(ctx SpecContext) {
		u := create(ctx, manifest("p", "  model: {name: m}\n"))
		ready := condition(v1alpha1.ConditionReady)
		ready["reason"] = v1alpha1.ReasonNoDecode
		status(ctx, u, map[string]any{
			"conditions": []any{condition(v1alpha1.ConditionAvailable), ready},
			"ratio":      "2:4", "url": "http://p-router",
			"prefill": map[string]any{"readyReplicas": int64(2)},
			"decode": map[string]any{
				"readyReplicas": int64(4), "drainingReplicas": int64(1), "residentSessions": int64(981),
				"updatedReplicas": int64(3),
			},
		})
		Expect(table(run(ctx, "get", "kvcp", "-n", u.GetNamespace()))).To(Equal([][]string{
			{"NAME", "AVAILABLE", "PREFILL", "DECODE", "DRAINING", "P:D", "SESSIONS", "REASON", "AGE"},
			{"p", "True", "2", "4", "1", "2:4", "981", "NoDecode", "<age>"},
		}))
		Expect(table(run(ctx, "get", "kvcp", "-o", "wide", "-n", u.GetNamespace()))[0]).
			To(ContainElements("UPDATED", "URL"))
		Expect(run(ctx, "wait", "--for=condition=Ready", "kvcp/p", "-n", u.GetNamespace(), "--timeout=5s")).
			To(ContainSubstring("condition met"))
	})

	DescribeTable("shows the columns of a set under its short name",
		func(ctx SpecContext, kind, short string) {
			u := create(ctx, set(kind, "  replicas: 4\n"))
			status(ctx, u, map[string]any{
				"readyReplicas": int64(3), "updatedReplicas": int64(2), "drainingReplicas": int64(1),
				"currentRevision": "5d88c7f9b",
			})
			Expect(table(run(ctx, "get", short, "-n", u.GetNamespace()))).To(Equal([][]string{
				{"NAME", "DESIRED", "READY", "UPDATED", "DRAINING", "AGE"},
				{"by-hand", "4", "3", "2", "1", "<age>"},
			}))
			Expect(table(run(ctx, "get", short, "-o", "wide", "-n", u.GetNamespace()))[1]).
				To(ContainElement("5d88c7f9b"))
			Expect(run(ctx, "scale", short+"/by-hand", "--replicas=6", "-n", u.GetNamespace())).
				To(ContainSubstring("scaled"))
		},
		Entry("PrefillSet", v1alpha1.KindPrefillSet, "pfs"),
		Entry("DecodeSet", v1alpha1.KindDecodeSet, "dcs"),
	)

	It("applies a sample from the client's side, and says why it refuses one", func(ctx SpecContext) {
		ns := namespace(ctx)
		samples := filepath.Join(kit.Root(), "config", "samples")
		run(ctx, "apply", "-n", ns, "-f", filepath.Join(samples, "pool_short.yaml"))
		run(ctx, "apply", "--server-side", "-n", ns, "-f", filepath.Join(samples, "pool_rdma.yaml"))
		out, err := kubectl(ctx, "apply", "-n", ns, "-f", filepath.Join(samples, "invalid", "drain-soft-after-hard.yaml"))
		Expect(err).To(HaveOccurred())
		Expect(out).To(ContainSubstring("spec.decode.drain.softTimeoutSeconds"))
		Expect(out).To(ContainSubstring("shorten it or raise the hard one"))
	})
})

// table splits what kubectl prints; ages vary.
func table(out string) [][]string {
	var rows [][]string
	for line := range strings.Lines(out) {
		row := strings.Fields(line)
		if len(rows) > 0 {
			for i, column := range rows[0] {
				if column == "AGE" && i < len(row) {
					row[i] = "<age>"
				}
			}
		}
		rows = append(rows, row)
	}
	return rows
}

// schema reads the generated schema of one kind.
func schema(plural string) map[string]any {
	GinkgoHelper()
	data := read(filepath.Join(kit.Root(), "config", "crd", "bases", "kvc.dev_"+plural+".yaml"))
	var crd struct {
		Spec struct {
			Versions []struct {
				Schema struct {
					OpenAPIV3Schema json.RawMessage `json:"openAPIV3Schema"`
				} `json:"schema"`
			} `json:"versions"`
		} `json:"spec"`
	}
	Expect(yaml.Unmarshal(data, &crd)).To(Succeed())
	var out map[string]any
	Expect(json.Unmarshal(crd.Spec.Versions[0].Schema.OpenAPIV3Schema, &out)).To(Succeed())
	return out
}

// missing fails for every field without a description, templates left out.
func missing(kind string, s map[string]any, path string) {
	GinkgoHelper()
	props, _ := s["properties"].(map[string]any)
	for name, v := range props {
		member, _ := v.(map[string]any)
		if _, ok := member["description"]; !ok && path+"."+name != ".metadata" {
			Fail(kind + ": " + path + "." + name + " has no description")
		}
		if name == "template" {
			continue
		}
		missing(kind, member, path+"."+name)
		if items, ok := member["items"].(map[string]any); ok {
			missing(kind, items, path+"."+name+"[]")
		}
	}
}
