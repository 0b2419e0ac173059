package build

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// everyPool calls f with a pool of each combination of the enums that reach a
// pod: engine, profile, backend, RDMA, number format and KV tier.
func everyPool(t *testing.T, f func(t *testing.T, name string, p *v1alpha1.KVCPool)) {
	t.Helper()
	n := 0
	for _, engine := range engines() {
		for _, path := range append(paths(), v1alpha1.DirectPathAuto) {
			for _, backend := range []v1alpha1.TransferBackend{
				v1alpha1.TransferMooncake, v1alpha1.TransferNIXL, v1alpha1.TransferMooncakeTCP,
			} {
				for _, dtype := range []string{"auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1"} {
					for _, store := range []v1alpha1.KVStore{"", v1alpha1.KVStoreNone, v1alpha1.KVStoreFile, v1alpha1.KVStoreMooncake} {
						p := &v1alpha1.KVCPool{}
						p.Name, p.Namespace = "p", "n"
						p.Spec.Model.Name = "Qwen/Qwen3-32B"
						p.Spec.Engine.Type, p.Spec.Engine.DirectPath, p.Spec.Engine.TransferBackend = engine, path, backend
						p.Spec.Engine.KVCacheDtype, p.Spec.Engine.Image = dtype, "mine"
						p.Spec.RDMA.Mode, p.Spec.RDMA.IBDevices = v1alpha1.RDMAHostNetwork, "mlx5_0"
						if store != "" {
							p.Spec.Engine.KVTier = &v1alpha1.KVTierSpec{Host: resource.MustParse("64Gi"), Store: store}
						}
						if path == v1alpha1.DirectPathUnified {
							p.Spec.Prefill.Replicas = new(int32(0))
						}
						v1alpha1.Default(p)
						if errs := v1alpha1.Validate(p); len(errs) > 0 {
							t.Fatal(errs)
						}
						n++
						f(t, fmt.Sprint(engine, "/", path, "/", backend, "/", dtype, "/", store), p)
					}
				}
			}
		}
	}
	if n < 700 {
		t.Fatalf("only %d combinations", n)
	}
}

// value of a flag that must be there once, with a value.
func value(t *testing.T, name string, args []string, flag string) string {
	t.Helper()
	v, ok := flagValue(args, flag)
	if !ok || v == "" || strings.HasPrefix(v, "--") {
		t.Errorf("%s: %s is %q, %v", name, flag, v, ok)
	}
	return v
}

// What P computes D must be able to take over: one page size, one number format,
// one transfer backend, one served name (the block hashes are seeded with it).
func TestPrefillAndDecodeAgreeInEveryCombination(t *testing.T) {
	everyPool(t, func(t *testing.T, name string, p *v1alpha1.KVCPool) {
		prefill, decode := EngineArgs(p, v1alpha1.Prefill, Options{}), EngineArgs(p, v1alpha1.Decode, Options{})
		for _, flag := range []string{"--page-size", "--kv-cache-dtype", "--served-model-name", "--model-path"} {
			if a, b := value(t, name, prefill, flag), value(t, name, decode, flag); a != b {
				t.Errorf("%s: %s is %s on prefill and %s on decode", name, flag, a, b)
			}
		}
		if got := value(t, name, decode, "--kv-cache-dtype"); got != p.Spec.Engine.KVCacheDtype {
			t.Errorf("%s: kv-cache-dtype %s", name, got)
		}
		if v1alpha1.ResolveDirectPath(&p.Spec) == v1alpha1.DirectPathUnified {
			if slices.Contains(decode, "--disaggregation-transfer-backend") {
				t.Errorf("%s: an engine in null mode has no transfer backend", name)
			}
			return
		}
		want := map[v1alpha1.TransferBackend]string{
			v1alpha1.TransferMooncake: "mooncake", v1alpha1.TransferNIXL: "nixl", v1alpha1.TransferMooncakeTCP: "mooncake_tcp",
		}[p.Spec.Engine.TransferBackend]
		for _, args := range [][]string{prefill, decode} {
			if got := value(t, name, args, "--disaggregation-transfer-backend"); got != want {
				t.Errorf("%s: backend %s, want %s", name, got, want)
			}
		}
	})
}

func TestNoCombinationRendersARemovedOrDoubleFlag(t *testing.T) {
	everyPool(t, func(t *testing.T, name string, p *v1alpha1.KVCPool) {
		for _, role := range v1alpha1.Roles() {
			args := EngineArgs(p, role, Options{})
			seen := map[string]bool{}
			for _, a := range args {
				if a == "" {
					t.Errorf("%s: an empty argument", name)
				}
				if !strings.HasPrefix(a, "--") {
					continue
				}
				if seen[a] || slices.Contains(removed(), a) || strings.Contains(a, "=") {
					t.Errorf("%s: %s on %s is double, removed or joined", name, a, role)
				}
				seen[a] = true
			}
			if role == v1alpha1.Prefill && seen["--disaggregation-decode-enable-radix-cache"] {
				t.Errorf("%s: prefill has a flag of decode's", name)
			}
			if role == v1alpha1.Decode && seen["--disaggregation-bootstrap-port"] {
				t.Errorf("%s: decode has a bootstrap server", name)
			}
		}
	})
}

// Nothing that is secret is written into a pod: keys come by reference only.
func TestNoPodHoldsASecret(t *testing.T) {
	everyPool(t, func(t *testing.T, name string, p *v1alpha1.KVCPool) {
		p.Spec.Model.TokenSecretName = "hf"
		for _, role := range v1alpha1.Roles() {
			pods, err := Pods(p, role, Options{})
			if err != nil {
				t.Fatal(err)
			}
			for _, pod := range pods {
				engine := engineOf(t, pod)
				if got := value(t, name, engine.Args, "--api-key"); got != "$(KVC_ENGINE_KEY)" {
					t.Errorf("%s: --api-key %s", name, got)
				}
				for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
					for _, e := range c.Env {
						secret := strings.Contains(e.Name, "KEY") || strings.Contains(e.Name, "TOKEN")
						if secret && (e.Value != "" || e.ValueFrom == nil || e.ValueFrom.SecretKeyRef == nil) {
							t.Errorf("%s: %s of %s is no reference", name, e.Name, c.Name)
						}
					}
				}
			}
		}
	})
}

// Every pod can start: names unique, every mount has its volume, every probe
// its port, requests of GPUs only where there is an engine that needs them.
func TestEveryPodIsConsistent(t *testing.T) {
	everyPool(t, func(t *testing.T, name string, p *v1alpha1.KVCPool) {
		for _, role := range v1alpha1.Roles() {
			pods, err := Pods(p, role, Options{})
			if err != nil {
				t.Fatal(err)
			}
			unified := v1alpha1.ResolveDirectPath(&p.Spec) == v1alpha1.DirectPathUnified
			if none := role == v1alpha1.Prefill && unified; none != (len(pods) == 0) {
				t.Errorf("%s: %d templates of %s", name, len(pods), role)
			}
			for _, pod := range pods {
				checkPod(t, name, pod)
				_, gpu := engineOf(t, pod).Resources.Limits[corev1.ResourceName(p.Spec.Engine.GPUResource)]
				if gpu != (p.Spec.Engine.Type == v1alpha1.EngineSGLang) {
					t.Errorf("%s: asks for a GPU = %v", name, gpu)
				}
				pd := v1alpha1.ResolveDirectPath(&p.Spec) != v1alpha1.DirectPathUnified
				if never := pod.Spec.RestartPolicy == corev1.RestartPolicyNever; never != pd {
					t.Errorf("%s: restart policy %s", name, pod.Spec.RestartPolicy)
				}
			}
		}
	})
}

func checkPod(t *testing.T, name string, pod corev1.PodTemplateSpec) {
	t.Helper()
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if volumes[v.Name] {
			t.Errorf("%s: volume %s twice", name, v.Name)
		}
		volumes[v.Name] = true
	}
	ports := map[int32]bool{}
	for _, c := range append(slices.Clone(pod.Spec.InitContainers), pod.Spec.Containers...) {
		paths, named, env := map[string]bool{}, map[string]bool{}, map[string]bool{}
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] || paths[m.MountPath] {
				t.Errorf("%s: %s mounts %s at %s: no volume, or twice", name, c.Name, m.Name, m.MountPath)
			}
			paths[m.MountPath] = true
		}
		for _, p := range c.Ports {
			if ports[p.ContainerPort] || p.ContainerPort < 1 {
				t.Errorf("%s: port %d of %s is taken", name, p.ContainerPort, c.Name)
			}
			ports[p.ContainerPort], named[p.Name] = true, true
		}
		for _, e := range c.Env {
			if env[e.Name] {
				t.Errorf("%s: %s sets %s twice", name, c.Name, e.Name)
			}
			env[e.Name] = true
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.LivenessProbe, c.ReadinessProbe} {
			if probe == nil {
				continue
			}
			at := ""
			if probe.HTTPGet != nil {
				at = probe.HTTPGet.Port.StrVal
			} else if probe.TCPSocket != nil {
				at = probe.TCPSocket.Port.StrVal
			}
			if !named[at] {
				t.Errorf("%s: a probe of %s asks port %q, which it has not", name, c.Name, at)
			}
		}
	}
}

// The engine gets the whole of model.loadTimeoutSeconds to load.
func TestTheStartupProbeWaitsTheLoadTimeout(t *testing.T) {
	for _, seconds := range []int32{1, 9, 10, 11, 15, 60, 599, 1800, 86400} {
		p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
		p.Spec.Model.LoadTimeoutSeconds = new(seconds)
		probe := engineOf(t, leader(t, p, v1alpha1.Decode, Options{})).StartupProbe
		if waits := probe.PeriodSeconds * probe.FailureThreshold; waits < seconds || waits >= seconds+10 {
			t.Errorf("loadTimeoutSeconds %d: the probe waits %d s", seconds, waits)
		}
	}
}

// The sidecar's --listen is an address that net.Listen takes, IPv6 included.
func TestTheSidecarListensWhereTheOptionsSay(t *testing.T) {
	for host, want := range map[string]string{
		"": ":9300", "0.0.0.0": ":9300", "127.0.0.1": "127.0.0.1:9300", "::1": "[::1]:9300", "::": "[::]:9300",
	} {
		p := profile(t, v1alpha1.EngineEmulator, v1alpha1.DirectPathDeltaTransfer)
		sidecar := leader(t, p, v1alpha1.Decode, Options{Host: host}).Spec.InitContainers[0]
		got, _ := flagValue(sidecar.Args, "--listen")
		if _, _, err := net.SplitHostPort(got); err != nil || got != want {
			t.Errorf("host %q: --listen %q, %v, want %q", host, got, err, want)
		}
	}
}

// A partial template is laid over what is rendered: by name where lists have
// names, and it never takes away what it does not mention.
func TestMergeCases(t *testing.T) {
	engine := func(c corev1.Container) *corev1.PodTemplateSpec {
		c.Name = v1alpha1.ContainerEngine
		return &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{c}}}
	}
	pod := func(s corev1.PodSpec) *corev1.PodTemplateSpec { return &corev1.PodTemplateSpec{Spec: s} }
	for claim, c := range map[string]struct {
		partial *corev1.PodTemplateSpec
		want    func(*corev1.PodTemplateSpec) // what the plain pod becomes
	}{
		"a label is added": {
			&corev1.PodTemplateSpec{ObjectMeta: metaOf(map[string]string{"team": "a"})},
			func(p *corev1.PodTemplateSpec) { p.Labels["team"] = "a" },
		},
		"the image of the engine is replaced": {
			engine(corev1.Container{Image: "other:2"}),
			func(p *corev1.PodTemplateSpec) { p.Spec.Containers[0].Image = "other:2" },
		},
		"a memory limit joins the GPUs": {
			engine(corev1.Container{Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Gi")},
			}}),
			func(p *corev1.PodTemplateSpec) {
				p.Spec.Containers[0].Resources.Limits[corev1.ResourceMemory] = resource.MustParse("64Gi")
			},
		},
		"the node is chosen": {
			pod(corev1.PodSpec{NodeSelector: map[string]string{"gpu": "h100"}}),
			func(p *corev1.PodTemplateSpec) { p.Spec.NodeSelector = map[string]string{"gpu": "h100"} },
		},
		"a toleration is added": {
			pod(corev1.PodSpec{Tolerations: []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}}),
			func(p *corev1.PodTemplateSpec) {
				p.Spec.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
			},
		},
		"the grace period is longer": {
			pod(corev1.PodSpec{TerminationGracePeriodSeconds: new(int64(600))}),
			func(p *corev1.PodTemplateSpec) { p.Spec.TerminationGracePeriodSeconds = new(int64(600)) },
		},
	} {
		t.Run(claim, func(t *testing.T) {
			p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
			want := leader(t, p, v1alpha1.Decode, Options{})
			c.want(&want)
			p.Spec.Decode.Template = c.partial
			if diff := cmp.Diff(want, leader(t, p, v1alpha1.Decode, Options{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			plain := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
			if diff := cmp.Diff(leader(t, plain, v1alpha1.Prefill, Options{}),
				leader(t, p, v1alpha1.Prefill, Options{})); diff != "" {
				t.Errorf("decode's template reaches prefill (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMergeAddsByName(t *testing.T) {
	p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
	plain := leader(t, p, v1alpha1.Decode, Options{})
	p.Spec.Decode.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{
		Volumes:        []corev1.Volume{{Name: "logs"}},
		InitContainers: []corev1.Container{{Name: "warm", Image: "warm"}},
		Containers: []corev1.Container{{Name: "logger", Image: "l"}, {Name: v1alpha1.ContainerEngine,
			Env:          []corev1.EnvVar{{Name: "NCCL_DEBUG", Value: "INFO"}},
			VolumeMounts: []corev1.VolumeMount{{Name: "logs", MountPath: "/logs"}}}},
	}}
	got := leader(t, p, v1alpha1.Decode, Options{})
	engine, was := engineOf(t, got), engineOf(t, plain)
	if diff := cmp.Diff(was.Args, engine.Args); diff != "" || len(engine.Env) != len(was.Env)+1 ||
		len(engine.VolumeMounts) != len(was.VolumeMounts)+1 || len(got.Spec.Volumes) != len(plain.Spec.Volumes)+1 {
		t.Errorf("the merge lost something of the engine: %+v\n%s", engine, diff)
	}
	if container(got.Spec.Containers, "logger") == nil || container(got.Spec.InitContainers, "warm") == nil {
		t.Error("a container of the template is missing")
	}
	if diff := cmp.Diff(plain.Spec.InitContainers[0], *container(got.Spec.InitContainers, v1alpha1.ContainerSidecar)); diff != "" {
		t.Errorf("the sidecar changed (-plain +merged):\n%s", diff)
	}
}

func metaOf(labels map[string]string) metav1.ObjectMeta { return metav1.ObjectMeta{Labels: labels} }

// A revision is made of what Pods renders: equal inputs render equal bytes.
func TestRenderingIsStable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPool(t)
		for _, role := range v1alpha1.Roles() {
			var first []byte
			for range 3 {
				pods, err := Pods(p.DeepCopy(), role, Options{})
				if err != nil {
					t.Fatal(err)
				}
				data, err := json.Marshal(pods)
				if err != nil {
					t.Fatal(err)
				}
				if first == nil {
					first = data
				} else if string(first) != string(data) {
					t.Fatalf("two renderings of one pool differ:\n%s\n%s", first, data)
				}
			}
		}
	})
}

// Percent to fraction: 5 is 0.05, not 0.5.
func TestMemoryFraction(t *testing.T) {
	for percent, want := range map[int32]string{1: "0.01", 5: "0.05", 9: "0.09", 10: "0.10", 88: "0.88", 99: "0.99"} {
		p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathUnified)
		p.Spec.Engine.MemFractionStaticPercent = new(percent)
		if got, _ := flagValue(EngineArgs(p, v1alpha1.Decode, Options{}), "--mem-fraction-static"); got != want {
			t.Errorf("%d %% is %s, want %s", percent, got, want)
		}
	}
}

// What the user adds comes last and in order, so that it can be found.
func TestExtraArgsComeLast(t *testing.T) {
	p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
	extra := []string{"--log-level", "info", "--max-total-tokens=600000"}
	p.Spec.Engine.ExtraArgs = slices.Clone(extra)
	for _, role := range v1alpha1.Roles() {
		args := EngineArgs(p, role, Options{})
		if diff := cmp.Diff(extra, args[len(args)-len(extra):]); diff != "" {
			t.Errorf("%s (-want +got):\n%s", role, diff)
		}
		args[len(args)-1] = "changed"
		if p.Spec.Engine.ExtraArgs[2] != extra[2] {
			t.Error("the arguments alias the pool's")
		}
	}
}
