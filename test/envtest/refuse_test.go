package envtest

import (
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/test/envtest/kit"
)

// Every file of config/samples/invalid breaks one rule and says in its first
// line at which field and with which words it is refused. What cannot work is
// rejected at apply, and not accepted and silently ignored (O63); and the CRD
// alone does it, so that a missing webhook or its certificate opens no door (O56).
var _ = Describe("O56, O63: without a webhook, an invalid manifest", func() {
	for _, name := range files("invalid/*.yaml") {
		It("is refused by the API server: "+strings.TrimSuffix(filepath.Base(name), ".yaml"), func(ctx SpecContext) {
			data := read(name)
			field, fragment := wanted(data)
			u := parse(data)
			u.SetNamespace(namespace(ctx))

			got := causes(env.Client.Create(ctx, u, strict()))
			Expect(got).To(ContainElement(And(HavePrefix(field+": "), ContainSubstring(fragment))))
			for _, c := range got { // one mistake, one complaint
				Expect(c).To(HavePrefix(field+": "), "all of %q", got)
			}
		})

		It("is refused by kvc up at the same field: "+strings.TrimSuffix(filepath.Base(name), ".yaml"), func() {
			data := read(name)
			if u := parse(data); u.GetKind() != v1alpha1.KindPool {
				Skip("a set; kvc up reads pools")
			}
			field, _ := wanted(data)
			_, err := v1alpha1.ParsePool(filepath.Base(name), data)
			Expect(err).To(MatchError(ContainSubstring(field)))
		})
	}
})

var _ = Describe("A stored pool", func() {
	DescribeTable("refuses a change of what is immutable",
		func(ctx SpecContext, from, to, field, fragment string) {
			u := create(ctx, manifest("p", "  model: {name: m}\n"+from))
			u.Object["spec"] = manifest("p", "  model: {name: m}\n"+to).Object["spec"]
			got := causes(env.Client.Update(ctx, u))
			Expect(got).To(ContainElement(And(HavePrefix(field+": "), ContainSubstring(fragment))))
		},
		Entry("routing.blockBytes", "  routing: {blockBytes: 96}\n", "  routing: {blockBytes: 128}\n",
			"spec.routing.blockBytes", "routing.blockBytes is immutable"),
		Entry("routing.blockBytes that was left out", "", "  routing: {blockBytes: 64}\n",
			"spec.routing.blockBytes", "routing.blockBytes is immutable"),
		Entry("gang.provider (O31)", "", "  gang: {provider: Volcano}\n",
			"spec.gang.provider", "gang.provider is immutable: make a new pool"),
	)

	DescribeTable("takes a change that says the same",
		func(ctx SpecContext, from, to string) {
			u := create(ctx, manifest("p", "  model: {name: m}\n"+from))
			u.Object["spec"] = manifest("p", "  model: {name: m}\n"+to).Object["spec"]
			Expect(env.Client.Update(ctx, u)).To(Succeed())
		},
		Entry("the default of routing.blockBytes, written out", "", "  routing: {blockBytes: 96}\n"),
		Entry("and removed again", "  routing: {blockBytes: 96}\n", ""),
		Entry("the default of gang.provider, written out", "", "  gang: {provider: None}\n"),
	)

	It("warns of an unknown field, and refuses it when asked to be strict", func(ctx SpecContext) {
		c, heard := warned()
		u := manifest("p", "  model: {name: m}\n  prefil: {replicas: 1}\n")
		u.SetNamespace(namespace(ctx))
		err := c.Create(ctx, u.DeepCopy(), strict())
		Expect(err).To(MatchError(ContainSubstring(`unknown field "spec.prefil"`)))
		Expect(heard.all()).To(BeEmpty())

		Expect(c.Create(ctx, u)).To(Succeed())
		Expect(heard.all()).To(ContainElement(`unknown field "spec.prefil"`))
	})
})

// The rules that walk a template are bounded by what crdtrim adds; without it
// the API server would refuse the CRD for their cost, and the suite not start.
var _ = Describe("Rules that walk a list", func() {
	It("still work on the longest one", func(ctx SpecContext) {
		args := strings.Repeat("--log-level, ", 127)
		u := manifest("p", "  model: {name: m}\n  engine: {extraArgs: ["+args+"--page-size=1]}\n")
		u.SetNamespace(namespace(ctx))
		Expect(causes(env.Client.Create(ctx, u, strict()))).To(ContainElement(ContainSubstring("--page-size=1 is")))
	})

	It("let through what only looks like a refusal", func(ctx SpecContext) {
		create(ctx, manifest("p", `  model: {name: m}
  engine:
    extraArgs: [--max-total-tokens, "600000", --max-running-requests=64, --enable-session-radix-cache,
      --enable-metrics-for-all-schedulers, --dp-size, "1", --pp-size=1]
`))
	})
})

var _ = It("Samples of refusals lie beside the others", func() {
	Expect(len(files("invalid/*.yaml"))).To(BeNumerically(">=", 70))
	Expect(kit.Root()).To(BeADirectory())
})
