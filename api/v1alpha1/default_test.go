package v1alpha1

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
)

// short is the smallest useful manifest of the README.
const short = `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: qwen3-32b}
spec:
  model: {name: Qwen/Qwen3-32B}
  prefill: {replicas: 1, tensorParallelSize: 1}
  decode:  {replicas: 3, tensorParallelSize: 1}
`

func mustPool(t *testing.T, manifest string) *KVCPool {
	t.Helper()
	p, err := ParsePool("pool.yaml", []byte(manifest))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestDefaultIsIdempotent(t *testing.T) {
	p := mustPool(t, short)
	once := p.DeepCopy()
	Default(p)
	if diff := cmp.Diff(once, p); diff != "" {
		t.Errorf("second Default changes (-once +twice):\n%s", diff)
	}
}

func TestDefaultKeepsWhatWasSet(t *testing.T) {
	p := mustPool(t, `
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: p}
spec:
  model: {name: m, servedName: other, source: Image, path: /weights}
  engine: {image: mine, pageSize: 1, memFractionStaticPercent: 50, kvTier: {host: 1Gi, store: File}}
  routing: {stickyBonus: 0, protectIdleSeconds: 0, admission: {timeoutMilliseconds: 5}}
  decode: {rollout: {maxUnavailable: 1, maxSurge: 0}, drain: {policy: None, softTimeoutSeconds: 0}}
  router: {replicas: 0, session: {headers: [], bodyFields: [user]}}
`)
	s := p.Spec
	got := map[string]any{
		"servedName": s.Model.ServedName, "image": s.Engine.Image, "pageSize": *s.Engine.PageSize,
		"memory": *s.Engine.MemFractionStaticPercent, "store": s.Engine.KVTier.Store,
		"stickyBonus": *s.Routing.StickyBonus, "protectIdle": *s.Routing.ProtectIdleSeconds,
		"surge": s.Decode.Rollout.MaxSurge.String(), "policy": s.Decode.Drain.Policy,
		"soft": *s.Decode.Drain.SoftTimeoutSeconds, "routers": *s.Router.Replicas,
		"headers": len(s.Router.Session.Headers), "fields": s.Router.Session.BodyFields[0],
	}
	want := map[string]any{
		"servedName": "other", "image": "mine", "pageSize": int32(1), "memory": int32(50), "store": KVStoreFile,
		"stickyBonus": int32(0), "protectIdle": int32(0), "surge": "0", "policy": DrainNone, "soft": int32(0),
		"routers": int32(0), "headers": 0, "fields": "user",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if hedge := *s.Routing.Admission.HedgeAfterMilliseconds; hedge != 5 {
		t.Errorf("hedgeAfter = %d, want no more than the timeout of 5", hedge)
	}
}

func TestDefaultsThatDependOnOtherFields(t *testing.T) {
	cases := map[string]struct {
		change func(*KVCPoolSpec)
		got    func(*KVCPoolSpec) any
		want   any
	}{
		"Unified alone means no prefill worker": {
			func(s *KVCPoolSpec) { s.Engine.DirectPath = DirectPathUnified },
			func(s *KVCPoolSpec) any { return *s.Prefill.Replicas }, int32(0)},
		"every other profile means one": {
			func(s *KVCPoolSpec) { s.Engine.DirectPath = DirectPathDeltaTransfer },
			func(s *KVCPoolSpec) any { return *s.Prefill.Replicas }, int32(1)},
		"prefill drains by its requests": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return s.Prefill.Drain.Policy }, DrainInFlight},
		"decode drains by its sessions": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return s.Decode.Drain.Policy }, DrainSessionResidency},
		"Corrected protects idle KV": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return *s.Routing.ProtectIdleSeconds }, int32(120)},
		"Paper knows no protection": {
			func(s *KVCPoolSpec) { s.Routing.Preset = PresetPaper },
			func(s *KVCPoolSpec) any { return *s.Routing.ProtectIdleSeconds }, int32(0)},
		"SGLang has a pinned image": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return s.Engine.Image }, DefaultSGLangImage},
		"the Emulator is in KVC's own image": {
			func(s *KVCPoolSpec) { s.Engine.Type = EngineEmulator },
			func(s *KVCPoolSpec) any { return s.Engine.Image }, ""},
		"the served name is the model's": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return s.Model.ServedName }, "m"},
		"a model under its own name has no alias": {
			func(*KVCPoolSpec) {}, func(s *KVCPoolSpec) any { return len(s.Model.Aliases()) }, 0},
		"a renamed model answers to both names": {
			func(s *KVCPoolSpec) { s.Model.ServedName = "x" },
			func(s *KVCPoolSpec) any { return s.Model.Aliases()[0] }, "m"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := &KVCPool{Spec: KVCPoolSpec{Model: ModelSpec{Name: "m"}}}
			tc.change(&p.Spec)
			Default(p)
			if got := tc.got(&p.Spec); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

// wire.md §9: Auto chooses only what a stock engine can do.
func TestResolveDirectPath(t *testing.T) {
	cases := map[string]struct {
		engine  EngineType
		path    DirectPath
		prefill int32
		mode    ScalingMode
		want    DirectPath
	}{
		"Auto on the Emulator": {
			EngineEmulator,
			DirectPathAuto,
			1,
			ScalingStatic,
			DirectPathConditionalAggregation,
		},
		"Auto on the Emulator without prefill": {
			EngineEmulator,
			DirectPathAuto,
			0,
			ScalingStatic,
			DirectPathConditionalAggregation,
		},
		"Auto on SGLang with prefill": {
			EngineSGLang,
			DirectPathAuto,
			2,
			ScalingStatic,
			DirectPathDeltaTransfer,
		},
		"Auto on SGLang without prefill": {EngineSGLang, DirectPathAuto, 0, ScalingStatic, DirectPathUnified},
		"Auto with a prefill role that may scale": {
			EngineSGLang,
			DirectPathAuto,
			0,
			ScalingExternal,
			DirectPathDeltaTransfer,
		},
		"an explicit choice stands": {
			EngineSGLang,
			DirectPathNativeAdmission,
			1,
			ScalingStatic,
			DirectPathNativeAdmission,
		},
		"an explicit choice stands on the Emulator": {
			EngineEmulator,
			DirectPathUnified,
			0,
			ScalingStatic,
			DirectPathUnified,
		},
		"an absent choice is Auto": {EngineSGLang, "", 1, ScalingStatic, DirectPathDeltaTransfer},
		"absent prefill counts as one: not yet Unified": {
			EngineSGLang,
			DirectPathAuto,
			-1,
			ScalingStatic,
			DirectPathDeltaTransfer,
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := &KVCPoolSpec{Engine: EngineSpec{Type: tc.engine, DirectPath: tc.path}}
			if tc.prefill >= 0 {
				s.Prefill.Replicas = &tc.prefill
			}
			s.Prefill.Scaling.Mode = tc.mode
			if got := ResolveDirectPath(s); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

func TestHostTier(t *testing.T) {
	tier := &KVTierSpec{Host: resource.MustParse("8Gi")}
	cases := map[string]struct {
		path DirectPath
		tier *KVTierSpec
		role Role
		want string
	}{
		"DeltaTransfer gives prefill a tier":           {DirectPathDeltaTransfer, nil, Prefill, "64Gi"},
		"DeltaTransfer gives decode none":              {DirectPathDeltaTransfer, nil, Decode, "0"},
		"other profiles give none":                     {DirectPathConditionalAggregation, nil, Prefill, "0"},
		"a tier in the manifest is for prefill":        {DirectPathDeltaTransfer, tier, Prefill, "8Gi"},
		"a tier in the manifest is for decode as well": {DirectPathUnified, tier, Decode, "8Gi"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			s := &KVCPoolSpec{Engine: EngineSpec{DirectPath: tc.path, KVTier: tc.tier}}
			if got := s.HostTier(tc.role); got.String() != tc.want {
				t.Errorf("got %s, want %s", got.String(), tc.want)
			}
		})
	}
}
