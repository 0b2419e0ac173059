package envtest

import (
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// set is a hand-made set of either role, its template complete.
func set(kind, spec string) *unstructured.Unstructured {
	GinkgoHelper()
	return parse([]byte("apiVersion: kvc.dev/v1alpha1\nkind: " + kind + "\nmetadata: {name: by-hand}\nspec:\n" +
		"  template: {spec: {containers: [{name: engine, image: sglang}]}}\n" + spec))
}

// scale reads /scale as an HPA does.
func scale(ctx SpecContext, u *unstructured.Unstructured) *autoscalingv1.Scale {
	GinkgoHelper()
	s := &autoscalingv1.Scale{}
	Expect(env.Client.SubResource("scale").Get(ctx, typed(u), s)).To(Succeed())
	return s
}

// rescale writes /scale as an HPA does.
func rescale(ctx SpecContext, u *unstructured.Unstructured, n int32) {
	GinkgoHelper()
	s := scale(ctx, u)
	s.Spec.Replicas = n
	Expect(env.Client.SubResource("scale").Update(ctx, typed(u), client.WithSubResourceBody(s),
		client.FieldOwner("hpa"))).To(Succeed())
}

// typed names the object to a client that has to know its type.
func typed(u *unstructured.Unstructured) client.Object {
	meta := metav1.ObjectMeta{Namespace: u.GetNamespace(), Name: u.GetName()}
	if u.GetKind() == v1alpha1.KindPrefillSet {
		return &v1alpha1.PrefillSet{ObjectMeta: meta}
	}
	return &v1alpha1.DecodeSet{ObjectMeta: meta}
}

// number reads an integer of the stored object.
func number(u *unstructured.Unstructured, path ...string) int64 {
	GinkgoHelper()
	n, found, err := unstructured.NestedInt64(u.Object, path...)
	Expect(err).NotTo(HaveOccurred())
	Expect(found).To(BeTrue(), "%v is missing", path)
	return n
}

var _ = Describe("A set made by hand", func() {
	for _, kind := range []string{v1alpha1.KindPrefillSet, v1alpha1.KindDecodeSet} {
		Context(kind, func() {
			It("has one replica unless it says otherwise", func(ctx SpecContext) {
				u := create(ctx, set(kind, ""))
				Expect(number(u, "spec", "replicas")).To(BeEquivalentTo(1))
			})

			It("O5: shows spec.replicas and its selector through /scale", func(ctx SpecContext) {
				u := create(ctx, set(kind, "  replicas: 3\n"))
				Expect(scale(ctx, u).Spec.Replicas).To(BeEquivalentTo(3))

				// The controller writes the selector of the leaders with its first status.
				selector := "kvc.dev/set=by-hand,kvc.dev/worker-index=0"
				status(ctx, u, map[string]any{"replicas": int64(2), "selector": selector})
				s := scale(ctx, u)
				Expect(s.Status.Selector).To(Equal(selector))
				Expect(s.Status.Replicas).To(BeEquivalentTo(2))
			})

			It("O3, O64: takes a number of engine instances through /scale, 0 too, whatever pods each has", func(ctx SpecContext) {
				u := create(ctx, set(kind, "  replicas: 1\n  nodesPerReplica: 4\n"))
				for _, n := range []int32{0, 7} {
					rescale(ctx, u, n)
					got := get(ctx, u)
					Expect(number(got, "spec", "replicas")).To(BeEquivalentTo(n))
					Expect(number(got, "spec", "nodesPerReplica")).To(BeEquivalentTo(4))
				}
			})

			It("O1: leaves spec.replicas to whoever scales, when it is applied without", func(ctx SpecContext) {
				u := create(ctx, set(kind, "  replicas: 1\n"))
				rescale(ctx, u, 7)
				apply := set(kind, "  minReadySeconds: 5\n")
				apply.SetNamespace(u.GetNamespace())
				Expect(env.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(apply),
					client.FieldOwner("kvcpool-controller"), client.ForceOwnership)).To(Succeed())
				Expect(scale(ctx, u).Spec.Replicas).To(BeEquivalentTo(7))
			})

			It("keeps one condition of each type, whoever writes", func(ctx SpecContext) {
				u := create(ctx, set(kind, ""))
				u.Object["status"] = map[string]any{"conditions": []any{condition("Available"), condition("Available")}}
				Expect(causes(env.Client.Status().Update(ctx, u))).
					To(ContainElement(HavePrefix("status.conditions[1]: Duplicate value")))
			})

			It("is not changed by a write to its status, nor its status by a write to it", func(ctx SpecContext) {
				u := create(ctx, set(kind, "  replicas: 2\n"))
				status(ctx, u, map[string]any{"readyReplicas": int64(1)})
				got := get(ctx, u)
				Expect(got.GetGeneration()).To(BeEquivalentTo(1))

				Expect(unstructured.SetNestedField(got.Object, int64(3), "spec", "replicas")).To(Succeed())
				Expect(unstructured.SetNestedField(got.Object, int64(9), "status", "readyReplicas")).To(Succeed())
				Expect(env.Client.Update(ctx, got)).To(Succeed())
				got = get(ctx, got)
				Expect(got.GetGeneration()).To(BeEquivalentTo(2))
				Expect(number(got, "status", "readyReplicas")).To(BeEquivalentTo(1))
			})
		})
	}
})

// status writes through the subresource.
func status(ctx SpecContext, u *unstructured.Unstructured, to map[string]any) {
	GinkgoHelper()
	patch := &unstructured.Unstructured{Object: map[string]any{"status": to}}
	patch.SetGroupVersionKind(u.GroupVersionKind())
	data, err := patch.MarshalJSON()
	Expect(err).NotTo(HaveOccurred())
	Expect(env.Client.Status().Patch(ctx, u.DeepCopy(), client.RawPatch(types.MergePatchType, data))).To(Succeed())
}

func condition(kind string) map[string]any {
	return map[string]any{
		"type": kind, "status": string(metav1.ConditionTrue), "reason": "Spec", "message": "",
		"lastTransitionTime": "2026-01-01T00:00:00Z",
	}
}
