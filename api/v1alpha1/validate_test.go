package v1alpha1

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Each case changes one thing of a pool that is valid; want is part of the one
// error, "" = none.
func TestValidate(t *testing.T) {
	cases := map[string]struct {
		change func(*KVCPool)
		want   string
	}{
		"the full pool is valid": {func(*KVCPool) {}, ""},

		"a name too long for its children": {func(p *KVCPool) { p.Name = strings.Repeat("a", 41) },
			"metadata.name: Invalid value: \"" + strings.Repeat("a", 41) + "\": is longer than 40 characters; shorten it"},
		"a name of 40 characters": {func(p *KVCPool) { p.Name = strings.Repeat("a", 40) }, ""},
		"a name that is no label": {func(p *KVCPool) { p.Name = "Qwen_3" }, "metadata.name: Invalid value"},

		"no model": {
			func(p *KVCPool) { p.Spec.Model.Name = " " },
			"spec.model.name: Required value: name the model",
		},
		"a claim without a claim": {
			func(p *KVCPool) { p.Spec.Model = model(SourcePVC, "", "/m") },
			"spec.model.claimName: Required value",
		},
		"a claim without a path": {
			func(p *KVCPool) { p.Spec.Model = model(SourcePVC, "c", "") },
			"spec.model.path: Invalid value",
		},
		"a claim with both": {func(p *KVCPool) { p.Spec.Model = model(SourcePVC, "c", "/m") }, ""},
		"a relative path": {
			func(p *KVCPool) { p.Spec.Model = model(SourceHostPath, "", "m") },
			"needs the absolute directory",
		},
		"a claim for downloads": {
			func(p *KVCPool) { p.Spec.Model.ClaimName = "c" },
			"use cache.claimName to keep downloads",
		},
		"a path for downloads": {
			func(p *KVCPool) { p.Spec.Model.Path = "/m" },
			"HuggingFace downloads by name; remove it",
		},
		"a token without HF": {
			func(p *KVCPool) { p.Spec.Model = model(SourceImage, "", "/m"); p.Spec.Model.TokenSecretName = "s" },
			"is only for source HuggingFace",
		},
		"a cache without HF": {func(p *KVCPool) {
			c := p.Spec.Model.Cache
			p.Spec.Model = model(SourceImage, "", "/m")
			p.Spec.Model.Cache = c
		}, "spec.model.cache: Forbidden"},
		"a cache in two places": {
			func(p *KVCPool) { p.Spec.Model.Cache.ClaimName = "c" },
			"takes either claimName or hostPath; keep one",
		},
		"a relative cache": {func(p *KVCPool) { p.Spec.Model.Cache.HostPath = "c" }, "write an absolute directory"},
		"an unknown number format": {
			func(p *KVCPool) { p.Spec.Engine.KVCacheDtype = "fp3" },
			"spec.engine.kvCacheDtype: Unsupported value",
		},
		"a host tier of nothing": {
			func(p *KVCPool) { p.Spec.Engine.KVTier.Host = resource.MustParse("0") },
			"remove kvTier to have none",
		},
		"no shared memory": {
			func(p *KVCPool) { q := resource.MustParse("0"); p.Spec.Engine.ShmSize = &q },
			"spec.engine.shmSize: Invalid value",
		},
		"a GPU resource of blanks": {
			func(p *KVCPool) { p.Spec.Engine.GPUResource = "a b" },
			"spec.engine.gpuResource: Invalid value",
		},

		"Unified with a prefill worker": {func(p *KVCPool) { p.Spec.Engine.DirectPath = DirectPathUnified },
			"spec.prefill.replicas: Invalid value: 1: engine.directPath Unified needs prefill.replicas 0"},
		"Unified with a prefill role that scales": {func(p *KVCPool) {
			p.Spec.Engine.DirectPath = DirectPathUnified
			*p.Spec.Prefill.Replicas = 0
			p.Spec.Prefill.Scaling.Mode = ScalingExternal
		}, "needs prefill.replicas 0 (and Static scaling)"},
		"Unified without one": {
			func(p *KVCPool) { p.Spec.Engine.DirectPath = DirectPathUnified; *p.Spec.Prefill.Replicas = 0 },
			"",
		},
		"Auto without one on SGLang is Unified": {func(p *KVCPool) { *p.Spec.Prefill.Replicas = 0 }, ""},
		"DeltaTransfer without a prefill worker": {
			func(p *KVCPool) { p.Spec.Engine.DirectPath = DirectPathDeltaTransfer; *p.Spec.Prefill.Replicas = 0 },
			"engine.directPath DeltaTransfer needs a prefill worker; set prefill.replicas to 1 or more"},
		"Auto without one on the Emulator": {
			func(p *KVCPool) { p.Spec.Engine.Type = EngineEmulator; *p.Spec.Prefill.Replicas = 0 },
			"engine.directPath ConditionalAggregation needs a prefill worker"},
		"ConditionalAggregation on the stock image": {
			func(p *KVCPool) { p.Spec.Engine.DirectPath = DirectPathConditionalAggregation },
			"no released SGLang has it; set engine.image to a patched build"},
		"ConditionalAggregation on a patched image": {func(p *KVCPool) {
			p.Spec.Engine.DirectPath, p.Spec.Engine.Image = DirectPathConditionalAggregation, "mine"
		}, ""},
		"NativeAdmission on the stock image": {func(p *KVCPool) { p.Spec.Engine.DirectPath = DirectPathNativeAdmission },
			"no released SGLang has it"},
		"ConditionalAggregation on the Emulator": {func(p *KVCPool) {
			p.Spec.Engine.DirectPath, p.Spec.Engine.Type = DirectPathConditionalAggregation, EngineEmulator
		}, ""},

		"unequal GPUs per pod": {
			func(p *KVCPool) { *p.Spec.Decode.TensorParallelSize = 4; *p.Spec.Decode.NodesPerReplica = 3 },
			"spec.decode.nodesPerReplica: Invalid value: 3: does not divide tensorParallelSize 4"},
		"equal GPUs per pod": {
			func(p *KVCPool) { *p.Spec.Decode.TensorParallelSize = 4; *p.Spec.Decode.NodesPerReplica = 2 },
			"",
		},
		"no decode worker": {func(p *KVCPool) {
			*p.Spec.Decode.Replicas = 0
			p.Spec.Decode.Scaling.Mode = ScalingStatic
			p.Spec.Autoscaling = nil
		},
			"spec.decode.replicas: Invalid value: 0: sessions need a decode worker"},

		"nothing may move": {func(p *KVCPool) { rollout(p, intstr.FromInt32(0), intstr.FromInt32(0)) },
			"spec.decode.rollout.maxSurge: Invalid value: \"0\": is 0 and so is maxUnavailable"},
		"nothing may move, in percent": {func(p *KVCPool) { rollout(p, intstr.FromString("0%"), intstr.FromInt32(0)) },
			"so nothing could ever move"},
		"a percentage": {func(p *KVCPool) { rollout(p, intstr.FromString("25%"), intstr.FromInt32(0)) }, ""},
		"a percentage of too many": {
			func(p *KVCPool) { rollout(p, intstr.FromString("101%"), intstr.FromInt32(1)) },
			"is more than 100%",
		},
		"text for a percentage": {
			func(p *KVCPool) { rollout(p, intstr.FromString("some"), intstr.FromInt32(1)) },
			"write a number or a percentage such as 25%",
		},
		"a negative number": {
			func(p *KVCPool) { rollout(p, intstr.FromInt32(-1), intstr.FromInt32(1)) },
			"must be 0 or more",
		},

		"a soft deadline after the hard one": {func(p *KVCPool) { *p.Spec.Prefill.Drain.SoftTimeoutSeconds = 1801 },
			"spec.prefill.drain.softTimeoutSeconds: Invalid value: 1801: is longer than hardTimeoutSeconds 1800"},
		"a soft deadline with the hard one": {func(p *KVCPool) { *p.Spec.Prefill.Drain.SoftTimeoutSeconds = 1800 }, ""},
		"a base delay over the maximum": {func(p *KVCPool) { *p.Spec.Decode.Recovery.BaseDelaySeconds = 601 },
			"spec.decode.recovery.baseDelaySeconds: Invalid value: 601: is longer than maxDelaySeconds 600"},

		"packed both ways": {
			func(p *KVCPool) { p.Spec.Decode.Pack.Required = "rail" },
			"takes either required or preferred; keep one",
		},
		"packed in no way": {
			func(p *KVCPool) { p.Spec.Decode.Pack.Preferred = "" },
			"takes either required or preferred; keep one",
		},
		"packed by an unknown level": {
			func(p *KVCPool) { p.Spec.Decode.Pack.Preferred = "row" },
			`spec.decode.pack.preferred: Unsupported value: "row": supported values: "rail"`,
		},
		"paired by an unknown level": {
			func(p *KVCPool) { p.Spec.Topology.Pairing.Domain = "row" },
			"spec.topology.pairing.domain: Unsupported value",
		},
		"two levels of one name": {
			func(p *KVCPool) { p.Spec.Topology.Levels = append(p.Spec.Topology.Levels, p.Spec.Topology.Levels[0]) },
			"spec.topology.levels[1].name: Duplicate value"},
		"a level without a label": {
			func(p *KVCPool) { p.Spec.Topology.Levels[0].NodeLabelKey = "" },
			"spec.topology.levels[0].nodeLabelKey: Invalid value",
		},

		"a device plugin without its resource": {
			func(p *KVCPool) { p.Spec.RDMA.Mode = RDMADevicePlugin },
			"spec.rdma.resourceName: Required value",
		},
		"a device plugin with its resource": {
			func(p *KVCPool) { p.Spec.RDMA.Mode, p.Spec.RDMA.ResourceName = RDMADevicePlugin, "rdma/hca" },
			"",
		},

		"a hedge after the timeout": {func(p *KVCPool) { *p.Spec.Routing.Admission.HedgeAfterMilliseconds = 51 },
			"spec.routing.admission.hedgeAfterMilliseconds: Invalid value: 51: is longer than timeoutMilliseconds 50"},
		"another block length": {
			func(p *KVCPool) { *p.Spec.Routing.BlockBytes = 64 },
			"block format kvc-b96-v1 knows only 96",
		},
		"a header with a blank": {
			func(p *KVCPool) { p.Spec.Router.Session.Headers = []string{"a b"} },
			"spec.router.session.headers[0]: Invalid value",
		},
		"a member without a name": {
			func(p *KVCPool) { p.Spec.Router.Session.BodyFields = []string{""} },
			"spec.router.session.bodyFields[0]: Required value",
		},
		"keys from nowhere": {
			func(p *KVCPool) { p.Spec.Router.Auth.SecretName = "" },
			"spec.router.auth.secretName: Required value",
		},

		"two classes of one name": {func(p *KVCPool) { p.Spec.SLOClasses = append(p.Spec.SLOClasses, p.Spec.SLOClasses[0]) },
			`spec.sloClasses[1].name: Duplicate value: "interactive"`},
		"a class without a name": {
			func(p *KVCPool) { p.Spec.SLOClasses[0].Name = "" },
			"spec.sloClasses[0].name: Invalid value",
		},

		"Auto without bounds": {
			func(p *KVCPool) { p.Spec.Autoscaling = nil },
			"spec.autoscaling: Required value: a role has scaling.mode Auto",
		},
		"bounds without Auto": {
			func(p *KVCPool) { p.Spec.Decode.Scaling.Mode = ScalingStatic },
			"spec.autoscaling: Forbidden: no role has scaling.mode Auto",
		},
		"Auto without the role's bounds": {
			func(p *KVCPool) { p.Spec.Autoscaling.Decode = nil },
			"spec.autoscaling.decode: Required value",
		},
		"bounds the wrong way round": {
			func(p *KVCPool) { p.Spec.Autoscaling.Decode.Min = 3 },
			"spec.autoscaling.decode.min: Invalid value: 3: is larger than max 2",
		},
		"a ratio the wrong way round": {func(p *KVCPool) { *p.Spec.Autoscaling.Ratio.MinPrefillPerDecodePercent = 401 },
			"ratio.minPrefillPerDecodePercent: Invalid value: 401: is larger than maxPrefillPerDecodePercent 400"},
		"a ratio out of reach from above": {func(p *KVCPool) { *p.Spec.Autoscaling.Ratio.MinPrefillPerDecodePercent = 201 },
			"no 1..2 prefill and 1..2 decode replicas have such a ratio"},
		"a ratio just in reach": {func(p *KVCPool) { *p.Spec.Autoscaling.Ratio.MinPrefillPerDecodePercent = 200 }, ""},
		"a ratio out of reach from below": {func(p *KVCPool) {
			*p.Spec.Autoscaling.Ratio.MaxPrefillPerDecodePercent = 49
		}, "no 1..2 prefill and 1..2 decode replicas have such a ratio"},

		"a template that merges": {func(p *KVCPool) {
			p.Spec.Decode.Template = containers(corev1.Container{Name: "engine"})
		}, ""},
		"a template's nameless container": {func(p *KVCPool) {
			p.Spec.Decode.Template = containers(corev1.Container{})
		}, "spec.decode.template.spec.containers[0].name: Required value: name the container to merge into"},
		"a template with the engine's arguments": {func(p *KVCPool) {
			p.Spec.Decode.Template = containers(corev1.Container{Name: "engine", Args: []string{"--x"}})
		}, "spec.decode.template.spec.containers[0].args: Forbidden: is rendered by the operator; use engine.extraArgs"},
		"a template with the sidecar's program": {func(p *KVCPool) {
			p.Spec.Prefill.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
				InitContainers: []corev1.Container{{Name: "kvc-sidecar", Command: []string{"sh"}}},
			}}
		}, "spec.prefill.template.spec.initContainers[0].command: Forbidden"},
		"a template with our labels": {func(p *KVCPool) {
			p.Spec.Decode.Template = &corev1.PodTemplateSpec{}
			p.Spec.Decode.Template.Labels = map[string]string{LabelRole: "prefill"}
		}, "spec.decode.template.metadata.labels[kvc.dev/role]: Forbidden: labels of kvc.dev belong to the operator"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := fullPool()
			Default(p)
			tc.change(p)
			errs := Validate(p)
			switch {
			case tc.want == "" && len(errs) > 0:
				t.Errorf("refused: %v", errs)
			case tc.want == "":
			case len(errs) != 1:
				t.Errorf("%d errors, want one with %q: %v", len(errs), tc.want, errs)
			case !strings.Contains(errs[0].Error(), tc.want):
				t.Errorf("error = %q\nwant %q", errs[0], tc.want)
			}
		})
	}
}

func containers(c ...corev1.Container) *corev1.PodTemplateSpec {
	return &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: c}}
}

func model(source ModelSource, claim, path string) ModelSpec {
	m := ModelSpec{Name: "m", Source: source, ClaimName: claim, Path: path}
	defaultModel(&m)
	return m
}

func rollout(p *KVCPool, unavailable, surge intstr.IntOrString) {
	p.Spec.Decode.Rollout.MaxUnavailable, p.Spec.Decode.Rollout.MaxSurge = &unavailable, &surge
}

func TestValidateExtraArgs(t *testing.T) {
	cases := map[string]struct {
		args []string
		want string // "" = accepted
	}{
		"none":                             {nil, ""},
		"a flag of the user's":             {[]string{"--max-total-tokens", "600000"}, ""},
		"a flag with =":                    {[]string{"--max-running-requests=64"}, ""},
		"a switch":                         {[]string{"--enable-session-radix-cache", "--log-level", "info"}, ""},
		"a flag that extends an owned one": {[]string{"--enable-metrics-for-all-schedulers"}, ""},
		"one rank said aloud":              {[]string{"--dp-size", "1", "--pp-size=1"}, ""},
		"a typed field's flag": {
			[]string{"--page-size", "1"},
			"this flag is the operator's: use engine.pageSize",
		},
		"a typed field's flag with =":  {[]string{"--tp=4"}, "use tensorParallelSize"},
		"the short spelling of a flag": {[]string{"--model", "x"}, "use model.name and model.path"},
		"the beginning of an owned flag": {
			[]string{"--disaggregation-mod", "null"},
			"SGLang may read it as --disaggregation-mode",
		},
		"a removed flag": {
			[]string{"--disaggregation-decode-tp", "4"},
			"SGLang removed this flag and exits on it; remove it",
		},
		"two ranks": {[]string{"--dp-size", "2"}, "more than one rank per engine is not supported"},
		"two ranks with =": {
			[]string{"--data-parallel-size=2"},
			"more than one rank per engine is not supported",
		},
		"ranks without a number": {[]string{"--dp-size"}, "more than one rank per engine is not supported"},
		"no radix cache":         {[]string{"--disable-radix-cache"}, "no turn is ever resident"},
		"speculation under PD": {
			[]string{"--speculative-algorithm", "EAGLE"},
			"SGLang refuses speculative decoding",
		},
		"nothing":                {[]string{"--log-level", ""}, "engine.extraArgs[1]: Invalid value: \"\": is empty; remove it"},
		"a value without a flag": {[]string{"600000"}, "a flag starts with --; write --flag=value"},
		"a value too many":       {[]string{"--max-total-tokens=5", "5"}, "a flag starts with --"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := fullPool()
			p.Spec.Engine.ExtraArgs = tc.args
			Default(p)
			errs := Validate(p)
			ok := len(errs) == 0
			if tc.want != "" {
				ok = len(errs) == 1 && strings.Contains(errs[0].Error(), tc.want)
			}
			if !ok {
				t.Errorf("errors = %v, want %q", errs, tc.want)
			}
		})
	}
	t.Run("speculation under Unified", func(t *testing.T) {
		p := fullPool()
		p.Spec.Engine.DirectPath, p.Spec.Engine.ExtraArgs = DirectPathUnified, []string{"--speculative-algorithm", "EAGLE"}
		Default(p)
		if errs := Validate(p); len(errs) > 0 {
			t.Error(errs)
		}
	})
}

func TestSchemeKnowsEveryKind(t *testing.T) {
	s := runtime.NewScheme()
	if err := AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{
		KindPool, KindPrefillSet, KindDecodeSet, "KVCPoolList", "PrefillSetList", "DecodeSetList",
	} {
		if _, err := s.New(GroupVersion.WithKind(kind)); err != nil {
			t.Error(err)
		}
	}
}
