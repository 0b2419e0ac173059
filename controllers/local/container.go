package local

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/controllers/build"
)

// machine is what a container finds around itself here instead of a node.
type machine struct {
	binDir  string
	dir     string            // of the run: token, routing
	secrets map[string]string // "<secret>/<key>" to value
	environ []string          // what every process inherits
}

// containerCommand turns a container of a pod into a command: programs of KVC's
// image are the ones in binDir, mounted volumes are directories whose paths
// replace the mount points in arguments and environment, references are
// resolved as a kubelet would.
func (m machine) containerCommand(pod *corev1.Pod, c *corev1.Container, podDir string) (command, error) {
	env, err := m.env(pod, c)
	if err != nil {
		return command{}, fmt.Errorf("%s/%s: %w", pod.Name, c.Name, err)
	}
	mounts, err := m.mounts(pod, c, podDir)
	if err != nil {
		return command{}, fmt.Errorf("%s/%s: %w", pod.Name, c.Name, err)
	}
	lookup := map[string]string{}
	full := slices.Clone(m.environ)
	for _, e := range env {
		e.Value = replaceMounts(e.Value, mounts)
		lookup[e.Name] = e.Value
		full = append(full, e.Name+"="+e.Value)
	}
	var argv []string
	for _, a := range append(slices.Clone(c.Command), c.Args...) {
		argv = append(argv, replaceMounts(expand(a, lookup), mounts))
	}
	if len(argv) == 0 {
		return command{}, fmt.Errorf("%s/%s has no command; an image cannot be started here", pod.Name, c.Name)
	}
	path, err := m.program(argv[0])
	if err != nil {
		return command{}, fmt.Errorf("%s/%s: %w", pod.Name, c.Name, err)
	}
	return command{name: pod.Name + "/" + c.Name, path: path, args: argv[1:], env: full}, nil
}

func (m machine) program(name string) (string, error) {
	if own, ok := strings.CutPrefix(name, build.ProgramDir+"/"); ok {
		return filepath.Join(m.binDir, own), nil
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("find program %s: %w", name, err)
	}
	return path, nil
}

// env resolves the container's environment.
func (m machine) env(pod *corev1.Pod, c *corev1.Container) ([]corev1.EnvVar, error) {
	var out []corev1.EnvVar
	known := map[string]string{}
	for _, e := range c.Env {
		value, err := m.envValue(pod, e)
		if errors.Is(err, errOptional) {
			continue
		}
		if err != nil {
			return nil, err
		}
		value = expand(value, known)
		known[e.Name] = value
		out = append(out, corev1.EnvVar{Name: e.Name, Value: value})
	}
	return out, nil
}

// errOptional says that a missing reference leaves the variable unset.
var errOptional = errors.New("optional and absent")

func (m machine) envValue(pod *corev1.Pod, e corev1.EnvVar) (string, error) {
	switch from := e.ValueFrom; {
	case from == nil:
		return e.Value, nil
	case from.FieldRef != nil:
		return fieldValue(pod, from.FieldRef.FieldPath)
	case from.SecretKeyRef != nil:
		return m.secret(e.Name, from.SecretKeyRef)
	}
	return "", fmt.Errorf("environment variable %s comes from a source that only Kubernetes has; write its value", e.Name)
}

func fieldValue(pod *corev1.Pod, path string) (string, error) {
	switch path {
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "status.podIP", "status.hostIP":
		return loopback, nil
	}
	return "", fmt.Errorf("field %s of a pod has no value here", path)
}

// secret reads a key of the pool's own secret, or else takes the variable of the
// same name from our environment: there are no other Secrets here.
func (m machine) secret(variable string, ref *corev1.SecretKeySelector) (string, error) {
	if v, ok := m.secrets[ref.Name+"/"+ref.Key]; ok {
		return v, nil
	}
	if v, ok := os.LookupEnv(variable); ok {
		return v, nil
	}
	if ref.Optional != nil && *ref.Optional {
		return "", errOptional
	}
	return "", fmt.Errorf("secret %s cannot be read on this machine; export %s instead", ref.Name, variable)
}

// mount is a directory here that stands for a path in the container.
type mount struct{ path, dir string }

func (m machine) mounts(pod *corev1.Pod, c *corev1.Container, podDir string) ([]mount, error) {
	var out []mount
	for _, vm := range c.VolumeMounts {
		i := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == vm.Name })
		if i < 0 {
			return nil, fmt.Errorf("volume %q is mounted and not declared", vm.Name)
		}
		dir, err := m.volumeDir(&pod.Spec.Volumes[i], podDir)
		if err != nil {
			return nil, err
		}
		if dir != "" {
			out = append(out, mount{path: vm.MountPath, dir: filepath.Join(dir, vm.SubPath)})
		}
	}
	// The longest mount point first, so that a mount inside a mount wins.
	slices.SortStableFunc(out, func(a, b mount) int { return cmp.Compare(len(b.path), len(a.path)) })
	return out, nil
}

// volumeDir is the directory of a volume; "" for one that needs none here, such
// as shared memory.
func (m machine) volumeDir(v *corev1.Volume, podDir string) (string, error) {
	switch {
	case v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory:
		return "", nil
	case v.EmptyDir != nil:
		dir := filepath.Join(podDir, v.Name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("make volume %s: %w", v.Name, err)
		}
		return dir, nil
	case v.HostPath != nil:
		return v.HostPath.Path, nil
	case v.Secret != nil && v.Name == "kvc-token":
		return filepath.Join(m.dir, dirToken), nil
	case v.ConfigMap != nil && v.Name == "kvc-routing":
		return filepath.Join(m.dir, dirRouting), nil
	case v.PersistentVolumeClaim != nil:
		return "", fmt.Errorf("claim %s cannot be mounted on this machine; use spec.model.source HostPath or "+
			"spec.model.cache.hostPath", v.PersistentVolumeClaim.ClaimName)
	}
	return "", fmt.Errorf("volume %q is of a kind that only Kubernetes has; remove it from the template", v.Name)
}

// replaceMounts rewrites a path at the start of a value, after "=" or inside a
// URL or JSON text; a mount point counts only where a path component ends.
func replaceMounts(s string, mounts []mount) string {
	for _, m := range mounts {
		if m.path != m.dir {
			s = replacePath(s, m.path, m.dir)
		}
	}
	return s
}

func replacePath(s, path, dir string) string {
	var b strings.Builder
	for {
		i := strings.Index(s, path)
		if i < 0 {
			b.WriteString(s)
			return b.String()
		}
		rest := s[i+len(path):]
		b.WriteString(s[:i])
		if startsInName(b.String()) || rest != "" && isNameByte(rest[0]) {
			b.WriteString(path)
		} else {
			b.WriteString(dir)
		}
		s = rest
	}
}

func startsInName(before string) bool {
	return before != "" && isNameByte(before[len(before)-1])
}

func isNameByte(c byte) bool {
	return c == '-' || c == '_' || c == '.' || c >= '0' && c <= '9' || c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z'
}

// expand replaces $(NAME) as Kubernetes does: an unknown name stays as it is,
// $$ is a dollar.
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(s, '$')
		if i < 0 || i+1 == len(s) {
			b.WriteString(s)
			return b.String()
		}
		b.WriteString(s[:i])
		s = s[i:]
		end := strings.IndexByte(s, ')')
		switch {
		case s[1] == '$':
			b.WriteByte('$')
			s = s[2:]
		case s[1] == '(' && end > 0:
			name := s[2:end]
			if v, ok := env[name]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[:end+1])
			}
			s = s[end+1:]
		default:
			b.WriteByte('$')
			s = s[1:]
		}
	}
}

// roleName is a worker's name here: "decode-0".
func roleName(role v1alpha1.Role, ordinal int) string {
	return fmt.Sprintf("%s-%d", role.Label(), ordinal)
}
