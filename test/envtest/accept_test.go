package envtest

import (
	"path/filepath"

	"github.com/google/go-cmp/cmp"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

var _ = Describe("A valid sample", func() {
	for _, name := range files("*.yaml") {
		if filepath.Base(name) == "kustomization.yaml" {
			continue
		}
		It("is accepted, and means to the operator what it means to kvc up: "+filepath.Base(name), func(ctx SpecContext) {
			data := read(name)
			stored := create(ctx, parse(data))
			if stored.GetKind() != v1alpha1.KindPool {
				return
			}
			want, err := v1alpha1.ParsePool(filepath.Base(name), data)
			Expect(err).NotTo(HaveOccurred())
			got := decode[v1alpha1.KVCPool](stored)
			v1alpha1.Default(got)
			Expect(cmp.Diff(want.Spec, got.Spec)).To(BeEmpty())
		})
	}
})

// every holds each part of a pool that has defaults below it, and no value.
const every = `  model: {name: m}
  engine: {kvTier: {host: 1Gi}}
  routing: {admission: {}}
  rdma: {}
  topology: {levels: [{name: rail, nodeLabelKey: kvc.dev/rail}], pairing: {domain: rail}}
  gang: {}
  rollout: {}
  prefill: {scaling: {mode: Auto}, rollout: {}, drain: {}, recovery: {}}
  decode: {scaling: {}, rollout: {}, drain: {}, recovery: {}}
  router: {session: {}, service: {}}
  autoscaling: {prefill: {min: 1, max: 2}, decode: {min: 1, max: 2}, ratio: {}, signals: {}}
  sloClasses: [{name: interactive}]
`

// Defaults that depend on another field, or on the operator's version, or are
// lists whose absence and emptiness differ, are Default's alone.
func withoutOurs(p *v1alpha1.KVCPool) {
	p.Spec.Model.ServedName, p.Spec.Engine.Image = "", ""
	p.Spec.Routing.ProtectIdleSeconds, p.Spec.Routing.Admission.HedgeAfterMilliseconds = nil, nil
	p.Spec.Router.Session.Headers, p.Spec.Router.Session.BodyFields = nil, nil
	for _, role := range v1alpha1.Roles() {
		r := p.Spec.Role(role)
		r.Replicas, r.Drain.Policy = nil, ""
	}
}

var _ = Describe("Defaults", func() {
	It("of the API server are those of v1alpha1.Default", func(ctx SpecContext) {
		u := manifest("p", every)
		want := decode[v1alpha1.KVCPool](u)
		v1alpha1.Default(want)
		withoutOurs(want)

		got := decode[v1alpha1.KVCPool](create(ctx, u))
		Expect(cmp.Diff(want.Spec, got.Spec)).To(BeEmpty())
	})

	It("of a set are those of a pool's role", func(ctx SpecContext) {
		set := decode[v1alpha1.DecodeSet](create(ctx, parse([]byte(`apiVersion: kvc.dev/v1alpha1
kind: DecodeSet
metadata: {name: s}
spec: {drain: {}, rollout: {}, recovery: {}, template: {spec: {containers: [{name: engine, image: i}]}}}
`))))
		pool := &v1alpha1.KVCPool{}
		v1alpha1.Default(pool)
		role := pool.Spec.Decode
		role.Drain.Policy = ""
		Expect(cmp.Diff(role.Drain, set.Spec.Drain)).To(BeEmpty())
		Expect(cmp.Diff(role.Rollout, set.Spec.Rollout)).To(BeEmpty())
		Expect(cmp.Diff(role.Recovery, set.Spec.Recovery)).To(BeEmpty())
		Expect(*set.Spec.Replicas).To(Equal(*role.Replicas))
		Expect(*set.Spec.NodesPerReplica).To(Equal(*role.NodesPerReplica))
		Expect(set.Spec.VictimPolicy).To(Equal(role.Scaling.VictimPolicy))
	})

	It("do not make a short hedge impossible", func(ctx SpecContext) {
		create(ctx, manifest("p", "  model: {name: m}\n  routing: {admission: {timeoutMilliseconds: 5}}\n"))
	})
})

var _ = Describe("A template", func() {
	It("may hold tolerations alone", func(ctx SpecContext) {
		stored := create(ctx, manifest("p", `  model: {name: m}
  decode: {template: {spec: {tolerations: [{key: nvidia.com/gpu, operator: Exists}]}}}
  router: {template: {spec: {nodeSelector: {a: b}}}}
`))
		pool := decode[v1alpha1.KVCPool](stored)
		Expect(pool.Spec.Decode.Template.Spec.Tolerations).To(HaveLen(1))
		Expect(pool.Spec.Router.Template.Spec.NodeSelector).To(HaveKeyWithValue("a", "b"))
	})

	It("keeps labels, annotations, and whatever a pod may have", func(ctx SpecContext) {
		u := manifest("p", `  model: {name: m}
  decode:
    template:
      metadata: {labels: {team: llm}, annotations: {a/b: c}}
      spec:
        priorityClassName: high
        hostAliases: [{ip: 10.0.0.1, hostnames: [h]}]
        containers:
        - {name: engine, env: [{name: A, value: b}], volumeMounts: [{name: v, mountPath: /v}]}
        volumes: [{name: v, emptyDir: {}}]
        topologySpreadConstraints: [{maxSkew: 1, topologyKey: k, whenUnsatisfiable: DoNotSchedule}]
`)
		want, _, err := unstructured.NestedMap(u.Object, "spec", "decode", "template")
		Expect(err).NotTo(HaveOccurred())
		got, _, err := unstructured.NestedMap(create(ctx, u).Object, "spec", "decode", "template")
		Expect(err).NotTo(HaveOccurred())
		Expect(cmp.Diff(text(want), text(got))).To(BeEmpty())
	})
})

// text makes JSON numbers of both sides comparable.
func text(v any) string {
	GinkgoHelper()
	data, err := yaml.Marshal(v)
	Expect(err).NotTo(HaveOccurred())
	return string(data)
}
