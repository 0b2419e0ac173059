package build

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// parse reads a pool; spec is what follows the model.
func parse(t testing.TB, spec string) *v1alpha1.KVCPool {
	t.Helper()
	p, err := v1alpha1.ParsePool("pool.yaml", []byte(`
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: qwen3-32b, namespace: llm}
spec:
  model: {name: Qwen/Qwen3-32B, servedName: qwen3-32b}
`+spec))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// profile is a pool of one engine type and profile.
func profile(t testing.TB, engine v1alpha1.EngineType, path v1alpha1.DirectPath) *v1alpha1.KVCPool {
	t.Helper()
	prefill := 1
	if path == v1alpha1.DirectPathUnified {
		prefill = 0
	}
	return parse(t, fmt.Sprintf(`
  engine: {type: %s, directPath: %s, image: example.com/engine:1}
  prefill: {replicas: %d, tensorParallelSize: 2}
  decode: {replicas: 3, tensorParallelSize: 4}
`, engine, path, prefill))
}

func paths() []v1alpha1.DirectPath {
	return []v1alpha1.DirectPath{
		v1alpha1.DirectPathConditionalAggregation, v1alpha1.DirectPathNativeAdmission,
		v1alpha1.DirectPathUnified, v1alpha1.DirectPathDeltaTransfer,
	}
}

func engines() []v1alpha1.EngineType {
	return []v1alpha1.EngineType{v1alpha1.EngineSGLang, v1alpha1.EngineEmulator}
}

func leader(t testing.TB, p *v1alpha1.KVCPool, role v1alpha1.Role, o Options) corev1.PodTemplateSpec {
	t.Helper()
	pods, err := Pods(p, role, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(pods) != 1 {
		t.Fatalf("%d templates, want one", len(pods))
	}
	return pods[0]
}

func engineOf(t testing.TB, pod corev1.PodTemplateSpec) corev1.Container {
	t.Helper()
	c := container(pod.Spec.Containers, v1alpha1.ContainerEngine)
	if c == nil {
		t.Fatal("no engine container")
	}
	return *c
}

// golden compares a value, as YAML, with a file.
func golden(t *testing.T, name string, got any) {
	t.Helper()
	data, err := yaml.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", name+".golden.yaml")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; run go test ./controllers/build -update", err)
	}
	if diff := cmp.Diff(string(want), string(data)); diff != "" {
		t.Errorf("%s differs (-golden +rendered); if that is right, run go test ./controllers/build -update:\n%s", path, diff)
	}
}

func TestPodsPerProfileRoleAndEngine(t *testing.T) {
	for _, engine := range engines() {
		for _, path := range paths() {
			for _, role := range v1alpha1.Roles() {
				name := strings.ToLower(fmt.Sprintf("%s-%s-%s", engine, path, role))
				t.Run(name, func(t *testing.T) {
					pods, err := Pods(profile(t, engine, path), role, Options{})
					if err != nil {
						t.Fatal(err)
					}
					if role == v1alpha1.Prefill && path == v1alpha1.DirectPathUnified {
						if len(pods) != 0 {
							t.Errorf("a Unified pool has no prefill pod; got %d", len(pods))
						}
						return
					}
					golden(t, name, pods[0])
				})
			}
		}
	}
}

func TestPodWithEverything(t *testing.T) {
	p, err := v1alpha1.ParsePool("pool.yaml", []byte(`
apiVersion: kvc.dev/v1alpha1
kind: KVCPool
metadata: {name: qwen3-32b, namespace: llm}
spec:
  model:
    name: Qwen/Qwen3-32B
    tokenSecretName: hf
    cache: {claimName: hf-cache}
    loadTimeoutSeconds: 7205
  engine:
    transferBackend: NIXL
    pageSize: 1
    kvCacheDtype: fp8_e4m3
    memFractionStaticPercent: 5
    kvTier: {host: 100Gi, store: Mooncake}
    gpuResource: amd.com/gpu
    runtimeClassName: nvidia
    shmSize: 1Gi
    imagePullSecrets: [{name: pull}]
    resources: {requests: {cpu: "8"}, limits: {memory: 96Gi}}
    extraArgs: [--max-running-requests=64]
  rdma: {mode: DevicePlugin, resourceName: rdma/hca, ibDevices: mlx5_0}
  prefill: {replicas: 1}
  decode:
    tensorParallelSize: 4
    template:
      metadata: {annotations: {team: llm}}
      spec:
        priorityClassName: high
        tolerations: [{key: nvidia.com/gpu, operator: Exists}]
        terminationGracePeriodSeconds: 90
        containers:
        - name: engine
          env: [{name: NCCL_DEBUG, value: INFO}]
          volumeMounts: [{name: extra, mountPath: /extra}]
        - {name: exporter, image: "example.com/exporter:1"}
        volumes: [{name: extra, emptyDir: {}}]
`))
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "everything-decode", leader(t, p, v1alpha1.Decode, Options{Image: "example.com/kvc:1"}))
}

func TestModelSources(t *testing.T) {
	cases := map[string]struct {
		model     string
		path      string // of --model-path
		volume    string // kind of the model's volume
		mountPath string
	}{
		"HuggingFace downloads by name":      {"{name: a/b}", "a/b", "", ""},
		"a claim is mounted at the path":     {"{name: a/b, source: PVC, claimName: c, path: /m}", "/m", "claim", "/m"},
		"a directory of the node likewise":   {"{name: a/b, source: HostPath, path: /m}", "/m", "host", "/m"},
		"the image brings its own directory": {"{name: a/b, source: Image, path: /m}", "/m", "", ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, err := v1alpha1.ParsePool("p", []byte(
				"apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nmetadata: {name: p}\nspec: {model: "+tc.model+"}\n"))
			if err != nil {
				t.Fatal(err)
			}
			pod := leader(t, p, v1alpha1.Decode, Options{})
			engine := engineOf(t, pod)
			if got, _ := flagValue(engine.Args, "--model-path"); got != tc.path {
				t.Errorf("--model-path %s, want %s", got, tc.path)
			}
			mount, kind := "", ""
			for _, m := range engine.VolumeMounts {
				if m.Name == volumeModel {
					mount = m.MountPath
					if !m.ReadOnly {
						t.Error("the weights are mounted writable")
					}
				}
			}
			for _, v := range pod.Spec.Volumes {
				if v.Name == volumeModel && v.HostPath != nil {
					kind = "host"
				}
				if v.Name == volumeModel && v.PersistentVolumeClaim != nil {
					kind = "claim"
				}
			}
			if mount != tc.mountPath || kind != tc.volume {
				t.Errorf("mounted at %q from a %q volume, want %q from %q", mount, kind, tc.mountPath, tc.volume)
			}
		})
	}
}

func TestTransferBackend(t *testing.T) {
	cases := map[string]struct{ backend, rdma, want string }{
		"Mooncake without RDMA asks for TCP": {"Mooncake", "Disabled", "mooncake_tcp"},
		"Mooncake with RDMA":                 {"Mooncake", "HostNetwork", "mooncake"},
		"MooncakeTCP stays TCP":              {"MooncakeTCP", "HostNetwork", "mooncake_tcp"},
		"NIXL chooses its own transport":     {"NIXL", "Disabled", "nixl"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := parse(t, fmt.Sprintf(
				"  engine: {transferBackend: %s}\n  rdma: {mode: %s, ibDevices: mlx5_0}\n", tc.backend, tc.rdma))
			for _, role := range v1alpha1.Roles() {
				args := EngineArgs(p, role, Options{})
				if got, _ := flagValue(args, "--disaggregation-transfer-backend"); got != tc.want {
					t.Errorf("%s: backend %s, want %s", role, got, tc.want)
				}
				if _, ok := flagValue(args, "--disaggregation-ib-device"); ok != (tc.rdma != "Disabled") {
					t.Errorf("%s: ib-device rendered = %v with rdma %s", role, ok, tc.rdma)
				}
			}
		})
	}
}

func TestHostTierIsPerRankInGB(t *testing.T) {
	cases := map[string]struct {
		host string
		tp   int
		want string
	}{
		"64Gi are 68 GB":        {"64Gi", 1, "68"},
		"shared by four ranks":  {"64Gi", 4, "17"},
		"never 0, which is off": {"1Gi", 4, "1"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := parse(t, fmt.Sprintf("  engine: {kvTier: {host: %s}}\n  decode: {tensorParallelSize: %d}\n", tc.host, tc.tp))
			args := EngineArgs(p, v1alpha1.Decode, Options{})
			if got, _ := flagValue(args, "--hicache-size"); got != tc.want {
				t.Errorf("--hicache-size %s, want %s", got, tc.want)
			}
			if !slices.Contains(args, "--enable-hierarchical-cache") {
				t.Error("the tier is sized and not enabled")
			}
		})
	}
}

func TestPortsAndHostMoveTogether(t *testing.T) {
	p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
	pod := leader(t, p, v1alpha1.Prefill, Options{Host: "10.0.0.7", Ports: Ports{Engine: 1, Bootstrap: 2, Sidecar: 3}})
	engine, sidecar := engineOf(t, pod), *container(pod.Spec.InitContainers, v1alpha1.ContainerSidecar)
	for name, want := range map[string]string{
		"--host": "10.0.0.7", "--port": "1", "--disaggregation-bootstrap-port": "2",
	} {
		if got, _ := flagValue(engine.Args, name); got != want {
			t.Errorf("%s %s, want %s", name, got, want)
		}
	}
	if got, _ := flagValue(sidecar.Args, "--listen"); got != "10.0.0.7:3" {
		t.Errorf("--listen %s", got)
	}
	if got := sidecar.Ports[0].ContainerPort; got != 3 {
		t.Errorf("sidecar's port = %d", got)
	}
	if got := pod.Annotations[v1alpha1.AnnotationPorts]; got != `{"engine":1,"bootstrap":2,"sidecar":3}` {
		t.Errorf("annotation = %s", got)
	}
	if got := pod.Annotations[v1alpha1.AnnotationBootstrapPort]; got != "2" {
		t.Errorf("bootstrap annotation = %s", got)
	}
	for _, e := range sidecar.Env {
		if e.Name == v1alpha1.EnvEngineURL && e.Value != "http://127.0.0.1:1" && e.Value != "http://10.0.0.7:1" {
			t.Errorf("engine URL = %s", e.Value)
		}
	}
}

func TestDefaultPortsNeedNoAnnotation(t *testing.T) {
	pod := leader(t, profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathUnified), v1alpha1.Decode, Options{})
	if got, ok := pod.Annotations[v1alpha1.AnnotationPorts]; ok {
		t.Errorf("annotation = %s, want none", got)
	}
}

func TestNodesPerReplicaIsRefusedUntilItIsRendered(t *testing.T) {
	p := parse(t, "  decode: {tensorParallelSize: 4, nodesPerReplica: 2}\n")
	_, err := Pods(p, v1alpha1.Decode, Options{})
	if err == nil || !strings.Contains(err.Error(), "spec.decode.nodesPerReplica") {
		t.Errorf("error = %v, want one that names the field", err)
	}
}

func TestPodKnowsItsPlaceAndItsNonce(t *testing.T) {
	tmpl := leader(t, profile(t, v1alpha1.EngineEmulator, v1alpha1.DirectPathConditionalAggregation), v1alpha1.Decode,
		Options{Ports: Ports{Sidecar: 9}})
	before := tmpl.DeepCopy()
	pod := Pod(&tmpl, Identity{Name: "d-0", Namespace: "llm", Replica: 7, Revision: "r1", Nonce: "abc"})
	if diff := cmp.Diff(before, &tmpl); diff != "" {
		t.Errorf("the template was changed (-before +after):\n%s", diff)
	}
	for key, want := range map[string]string{
		v1alpha1.LabelReplica: "7", v1alpha1.LabelWorkerIndex: "0",
		v1alpha1.LabelRevision: "r1", v1alpha1.LabelPool: "qwen3-32b",
	} {
		if got := pod.Labels[key]; got != want {
			t.Errorf("label %s = %q, want %q", key, got, want)
		}
	}
	hook := pod.Spec.Containers[0].Lifecycle.PreStop.HTTPGet
	if hook.Path != "/kvc/v1/prestop/abc" || hook.Port.IntValue() != 9 {
		t.Errorf("preStop = %+v", hook)
	}
	env := pod.Spec.InitContainers[0].Env
	if last := env[len(env)-1]; last.Name != v1alpha1.EnvPreStopNonce || last.Value != "abc" {
		t.Errorf("last variable = %+v, want the nonce", last)
	}
}

func TestPodOfAHandMadeTemplate(t *testing.T) {
	tmpl := corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}}
	pod := Pod(&tmpl, Identity{Name: "x", Nonce: "abc"})
	if pod.Name != "x" || pod.Labels[v1alpha1.LabelReplica] != "0" || pod.Spec.Containers[0].Lifecycle != nil {
		t.Errorf("pod = %+v", pod)
	}
}

func TestOwnPreStopHookOfATemplateStays(t *testing.T) {
	own := &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}
	p := profile(t, v1alpha1.EngineEmulator, v1alpha1.DirectPathConditionalAggregation)
	p.Spec.Decode.Template = &corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "engine", Lifecycle: &corev1.Lifecycle{PreStop: own}},
	}}}
	tmpl := leader(t, p, v1alpha1.Decode, Options{})
	if got := Pod(&tmpl, Identity{Nonce: "abc"}).Spec.Containers[0].Lifecycle.PreStop; got.Exec == nil {
		t.Errorf("preStop = %+v, want the template's", got)
	}
}

// removed flags make SGLang exit (sglang-contract.md §1.2).
func removed() []string {
	return []string{"--disaggregation-decode-tp", "--disaggregation-decode-dp", "--disaggregation-prefill-pp"}
}

// drawPool draws a valid pool over the fields that reach a command line.
func drawPool(t *rapid.T) *v1alpha1.KVCPool {
	p := &v1alpha1.KVCPool{}
	p.Name = "p"
	e := &p.Spec.Engine
	p.Spec.Model.Name = "m"
	e.Type = rapid.SampledFrom(engines()).Draw(t, "engine")
	e.Image = "mine"
	e.DirectPath = rapid.SampledFrom(append(paths(), v1alpha1.DirectPathAuto)).Draw(t, "path")
	e.TransferBackend = rapid.SampledFrom([]v1alpha1.TransferBackend{
		v1alpha1.TransferMooncake, v1alpha1.TransferNIXL, v1alpha1.TransferMooncakeTCP,
	}).Draw(t, "backend")
	e.PageSize = new(rapid.SampledFrom([]int32{1, 16, 64}).Draw(t, "page"))
	e.MemFractionStaticPercent = new(rapid.Int32Range(1, 99).Draw(t, "memory"))
	modes := []v1alpha1.RDMAMode{v1alpha1.RDMADisabled, v1alpha1.RDMAHostNetwork}
	p.Spec.RDMA.Mode = rapid.SampledFrom(modes).Draw(t, "rdma")
	p.Spec.Prefill.TensorParallelSize = new(rapid.Int32Range(1, 8).Draw(t, "prefill tp"))
	p.Spec.Decode.TensorParallelSize = new(rapid.Int32Range(1, 8).Draw(t, "decode tp"))
	v1alpha1.Default(p)
	if errs := v1alpha1.Validate(p); len(errs) > 0 {
		t.Fatalf("drawn pool is not valid: %v", errs)
	}
	return p
}

func TestEveryCommandLineKeepsTheContract(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPool(t)
		path := v1alpha1.ResolveDirectPath(&p.Spec)
		pd := path != v1alpha1.DirectPathUnified
		args := map[v1alpha1.Role][]string{}
		for _, role := range v1alpha1.Roles() {
			args[role] = EngineArgs(p, role, Options{})
		}
		for role, a := range args {
			for _, flag := range []string{"--enable-metrics", "--enable-cache-report", "--kv-events-config", "--api-key"} {
				if !slices.Contains(a, flag) {
					t.Errorf("%s lacks %s", role, flag)
				}
			}
			if host, _ := flagValue(a, "--host"); host != "0.0.0.0" {
				t.Errorf("%s binds %s: peers could not reach it", role, host)
			}
			for _, flag := range removed() {
				if slices.Contains(a, flag) {
					t.Errorf("%s renders the removed %s", role, flag)
				}
			}
			for i, x := range a {
				if strings.HasPrefix(x, "--") && slices.Contains(a[i+1:], x) {
					t.Errorf("%s renders %s twice", role, x)
				}
			}
		}
		for _, flag := range []string{
			"--page-size", "--kv-cache-dtype", "--disaggregation-transfer-backend", "--served-model-name",
		} {
			prefill, _ := flagValue(args[v1alpha1.Prefill], flag)
			decode, _ := flagValue(args[v1alpha1.Decode], flag)
			if prefill != decode {
				t.Errorf("%s is %q on prefill and %q on decode", flag, prefill, decode)
			}
		}
		decode := args[v1alpha1.Decode]
		if got := slices.Contains(decode, "--disaggregation-decode-enable-radix-cache"); got != pd {
			t.Errorf("decode radix cache = %v under %s", got, path)
		}
		aggregation := path == v1alpha1.DirectPathConditionalAggregation
		if got := slices.Contains(decode, "--disaggregation-decode-enable-conditional-agg"); got != aggregation {
			t.Errorf("conditional aggregation = %v under %s", got, path)
		}
		if mode, _ := flagValue(decode, "--disaggregation-mode"); pd && mode != "decode" || !pd && mode != "null" {
			t.Errorf("decode mode = %s under %s", mode, path)
		}
	})
}

// The Emulator stands in for SGLang: the two differ in nothing but the program.
func TestEmulatorTakesTheSameCommandLine(t *testing.T) {
	for _, path := range paths() {
		for _, role := range v1alpha1.Roles() {
			sglang := EngineArgs(profile(t, v1alpha1.EngineSGLang, path), role, Options{})
			emulator := EngineArgs(profile(t, v1alpha1.EngineEmulator, path), role, Options{})
			if diff := cmp.Diff(sglang, emulator); diff != "" {
				t.Errorf("%s %s (-sglang +emulator):\n%s", path, role, diff)
			}
		}
	}
}

func TestMergeKeepsWhatThePartialTemplateDoesNotName(t *testing.T) {
	p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
	plain := leader(t, p, v1alpha1.Decode, Options{})
	for name, partial := range map[string]*corev1.PodTemplateSpec{
		"an empty template":         {},
		"a template with one field": {Spec: corev1.PodSpec{PriorityClassName: "high"}},
	} {
		t.Run(name, func(t *testing.T) {
			p.Spec.Decode.Template = partial
			merged := leader(t, p, v1alpha1.Decode, Options{})
			want := plain.DeepCopy()
			want.Spec.PriorityClassName = partial.Spec.PriorityClassName
			if diff := cmp.Diff(*want, merged); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRenderingLeavesThePoolAlone(t *testing.T) {
	p := profile(t, v1alpha1.EngineSGLang, v1alpha1.DirectPathDeltaTransfer)
	before := p.DeepCopy()
	for _, role := range v1alpha1.Roles() {
		tmpl := leader(t, p, role, Options{})
		tmpl.Spec.Containers[0].Resources.Limits["x"] = *p.Spec.Engine.ShmSize
		Pod(&tmpl, Identity{Nonce: "n"})
	}
	if diff := cmp.Diff(before, p); diff != "" {
		t.Errorf("(-before +after):\n%s", diff)
	}
}

// flagValue is the argument after a flag; ok tells whether the flag is there.
func flagValue(args []string, name string) (value string, ok bool) {
	i := slices.Index(args, name)
	if i < 0 {
		return "", false
	}
	if i+1 < len(args) {
		value = args[i+1]
	}
	return value, true
}
