package local

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestExpandIsKubernetes(t *testing.T) {
	env := map[string]string{"KEY": "secret", "EMPTY": "", "A.B": "dotted"}
	cases := map[string]struct{ in, want string }{
		"a reference":                   {"--api-key=$(KEY)", "--api-key=secret"},
		"two references":                {"$(KEY)$(A.B)", "secretdotted"},
		"an empty value":                {"<$(EMPTY)>", "<>"},
		"an unknown name stays":         {"$(NOPE)", "$(NOPE)"},
		"a doubled dollar escapes":      {"$$(KEY)", "$(KEY)"},
		"a lone dollar stays":           {"a$b$", "a$b$"},
		"an unclosed reference stays":   {"$(KEY", "$(KEY"},
		"the shell's spelling is text":  {"${KEY} $KEY", "${KEY} $KEY"},
		"nothing to do":                 {"plain", "plain"},
		"three dollars: one and a name": {"$$$(KEY)", "$secret"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := expand(tc.in, env); got != tc.want {
				t.Errorf("expand(%q) = %q, want %q", tc.in, got, tc.want)
			}
		})
	}
}

func TestReplaceMountsMovesWholePathsOnly(t *testing.T) {
	mounts := []mount{{"/etc/kvc/token", "/tmp/t"}, {"/run/kvc", "/tmp/r"}, {"/same", "/same"}}
	cases := map[string]struct{ in, want string }{
		"a path below the mount":   {"/etc/kvc/token/token", "/tmp/t/token"},
		"the mount itself":         {"/run/kvc", "/tmp/r"},
		"inside a flag":            {"--token-file=/etc/kvc/token/token", "--token-file=/tmp/t/token"},
		"inside a URL in JSON":     {`{"endpoint":"ipc:///run/kvc/kv-events"}`, `{"endpoint":"ipc:///tmp/r/kv-events"}`},
		"twice":                    {"/run/kvc:/run/kvc/a", "/tmp/r:/tmp/r/a"},
		"a longer name stays":      {"/run/kvcache/x", "/run/kvcache/x"},
		"a deeper directory stays": {"/var/run/kvc/x", "/var/run/kvc/x"},
		"a mount in its own place": {"/same/x", "/same/x"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := replaceMounts(tc.in, mounts); got != tc.want {
				t.Errorf("replaceMounts(%q) = %q, want %q", tc.in, got, tc.want)
			}
		})
	}
}

func testMachine(t *testing.T) machine {
	t.Helper()
	return machine{
		binDir: "/bin-dir", dir: "/run-dir", environ: []string{"HOME=/root"},
		secrets: map[string]string{"demo-internal/engine-key": "k"},
	}
}

func testPod() *corev1.Pod {
	p := &corev1.Pod{}
	p.Name, p.Namespace, p.UID = "decode-0", "local", "uid"
	return p
}

func field(name, path string) corev1.EnvVar {
	ref := &corev1.ObjectFieldSelector{FieldPath: path}
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: ref}}
}

func secretRef(name, secret, key string, optional *bool) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
		LocalObjectReference: corev1.LocalObjectReference{Name: secret}, Key: key, Optional: optional,
	}}}
}

func TestContainerBecomesACommand(t *testing.T) {
	pod := testPod()
	dir := t.TempDir()
	pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	c := &corev1.Container{
		Name: "engine", Command: []string{"/usr/local/bin/emulator"},
		Args: []string{"--api-key", "$(KEY)", "--dir", "/scratch/x", "--name", "$(ME)"},
		Env: []corev1.EnvVar{
			secretRef("KEY", "demo-internal", "engine-key", nil), field("ME", "metadata.name"), field("UID", "metadata.uid"),
			field("NS", "metadata.namespace"), field("IP", "status.podIP"), {Name: "BOTH", Value: "$(ME)/$(NS)"},
			{Name: "DIR", Value: "/scratch"},
		},
		VolumeMounts: []corev1.VolumeMount{{Name: "scratch", MountPath: "/scratch"}},
	}
	cmd, err := testMachine(t).containerCommand(pod, c, dir)
	if err != nil {
		t.Fatal(err)
	}
	scratch := filepath.Join(dir, "scratch")
	if cmd.path != "/bin-dir/emulator" || cmd.name != "decode-0/engine" {
		t.Errorf("path %s, name %s", cmd.path, cmd.name)
	}
	if want := []string{"--api-key", "k", "--dir", scratch + "/x", "--name", "decode-0"}; !slices.Equal(cmd.args, want) {
		t.Errorf("args = %q, want %q", cmd.args, want)
	}
	want := []string{
		"HOME=/root", "KEY=k", "ME=decode-0", "UID=uid", "NS=local", "IP=127.0.0.1", "BOTH=decode-0/local", "DIR=" + scratch,
	}
	if !slices.Equal(cmd.env, want) {
		t.Errorf("env = %q\nwant  %q", cmd.env, want)
	}
	if info, err := os.Stat(scratch); err != nil || !info.IsDir() {
		t.Errorf("the volume has no directory: %v", err)
	}
}

// What only Kubernetes has is refused with the remedy.
func TestContainerThatNeedsKubernetes(t *testing.T) {
	volume := func(s corev1.VolumeSource) func(*corev1.Pod, *corev1.Container) {
		return func(p *corev1.Pod, c *corev1.Container) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: s}}
			c.VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/v"}}
		}
	}
	cases := map[string]struct {
		change func(*corev1.Pod, *corev1.Container)
		want   string
	}{
		"a claim": {volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "w"}}),
			"claim w cannot be mounted on this machine; use spec.model.source HostPath"},
		"a volume of another kind": {volume(corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{}}),
			`volume "v" is of a kind that only Kubernetes has; remove it`},
		"a mount without a volume": {func(_ *corev1.Pod, c *corev1.Container) {
			c.VolumeMounts = []corev1.VolumeMount{{Name: "v"}}
		}, `volume "v" is mounted and not declared`},
		"a secret of the cluster": {func(_ *corev1.Pod, c *corev1.Container) {
			c.Env = []corev1.EnvVar{secretRef("KVC_TEST_TOKEN", "hf", "token", nil)}
		}, "secret hf cannot be read on this machine; export KVC_TEST_TOKEN instead"},
		"a config map": {func(_ *corev1.Pod, c *corev1.Container) {
			c.Env = []corev1.EnvVar{{Name: "A", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{}}}}
		}, "environment variable A comes from a source that only Kubernetes has; write its value"},
		"a field without a value": {func(_ *corev1.Pod, c *corev1.Container) {
			c.Env = []corev1.EnvVar{field("A", "spec.nodeName")}
		}, "field spec.nodeName of a pod has no value here"},
		"an image's own program": {func(_ *corev1.Pod, c *corev1.Container) { c.Command = nil },
			"has no command; an image cannot be started here"},
		"a program that is not installed": {func(_ *corev1.Pod, c *corev1.Container) { c.Command = []string{"kvc-no-such"} },
			"find program kvc-no-such"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			pod, c := testPod(), &corev1.Container{Name: "engine", Command: []string{"/usr/local/bin/emulator"}}
			tc.change(pod, c)
			_, err := testMachine(t).containerCommand(pod, c, t.TempDir())
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "decode-0/engine") {
				t.Errorf("error = %v, want %q with pod and container", err, tc.want)
			}
		})
	}
}

func TestSecretFromTheEnvironment(t *testing.T) {
	m := testMachine(t)
	t.Setenv("KVC_TEST_TOKEN", "from here")
	c := &corev1.Container{Env: []corev1.EnvVar{
		secretRef("KVC_TEST_TOKEN", "hf", "token", nil), secretRef("KVC_TEST_ABSENT", "hf", "token", new(true)),
	}}
	env, err := m.env(testPod(), c)
	if err != nil {
		t.Fatal(err)
	}
	if len(env) != 1 || env[0].Value != "from here" {
		t.Errorf("env = %+v, want the exported value and no absent optional one", env)
	}
}

func TestHostPathStaysWhereItIs(t *testing.T) {
	pod, c := testPod(), &corev1.Container{Name: "engine", Command: []string{"/usr/local/bin/emulator"}}
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "cache", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data/hf"}}},
		{Name: "shm", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}},
	}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "cache", MountPath: "/var/cache/hf"}, {Name: "shm", MountPath: "/dev/shm"}}
	c.Args = []string{"/var/cache/hf/m", "/dev/shm/x"}
	cmd, err := testMachine(t).containerCommand(pod, c, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"/data/hf/m", "/dev/shm/x"}; !slices.Equal(cmd.args, want) {
		t.Errorf("args = %q, want %q", cmd.args, want)
	}
}
