package build

import (
	"fmt"
	"maps"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// Volumes of a worker pod.
const (
	volumeToken   = "kvc-token"
	volumeRouting = "kvc-routing"
	volumeJournal = "kvc-journal"
	volumeRun     = "kvc-run"
	volumeShm     = "shm"
	volumeModel   = "model"
	volumeCache   = "model-cache"
)

// dirModelCache is where HuggingFace downloads go.
const dirModelCache = "/var/cache/huggingface"

// gracePeriodSeconds is the pod's own grace; draining happens before the delete
// call and has its own, longer deadlines.
const gracePeriodSeconds = 60

// Pods renders one role of a defaulted, valid pool to the pod templates of one
// replica, the leader first. A role without replicas under Unified has none. An
// error says which field cannot be rendered.
func Pods(pool *v1alpha1.KVCPool, role v1alpha1.Role, o Options) ([]corev1.PodTemplateSpec, error) {
	s := &pool.Spec
	if role == v1alpha1.Prefill && v1alpha1.ResolveDirectPath(s) == v1alpha1.DirectPathUnified {
		return nil, nil
	}
	if n := *s.Role(role).NodesPerReplica; n > 1 {
		return nil, fmt.Errorf("spec.%s.nodesPerReplica: replicas of %d pods are not rendered yet; use 1", role.Label(), n)
	}
	o = o.withDefaults()
	leader := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: labels(pool, role), Annotations: annotations(role, o)},
		Spec: corev1.PodSpec{
			RestartPolicy:                 restartPolicy(s),
			TerminationGracePeriodSeconds: new(int64(gracePeriodSeconds)),
			AutomountServiceAccountToken:  new(false),
			EnableServiceLinks:            new(false),
			ImagePullSecrets:              s.Engine.ImagePullSecrets,
			// A native sidecar: it starts before the engine and outlives it.
			InitContainers: []corev1.Container{sidecarContainer(pool, role, o)},
			Containers:     []corev1.Container{engineContainer(pool, role, o)},
			Volumes:        volumes(pool),
		},
	}
	if s.Engine.RuntimeClassName != "" {
		leader.Spec.RuntimeClassName = &s.Engine.RuntimeClassName
	}
	merged, err := mergeTemplate(&leader, s.Role(role).Template)
	if err != nil {
		return nil, fmt.Errorf("spec.%s.template: %w", role.Label(), err)
	}
	return []corev1.PodTemplateSpec{*merged}, nil
}

// restartPolicy: a failed PD engine is a new pod and so a new incarnation, since
// its peers hold connections to the old one (wire.md §9). The native sidecar
// still restarts in place.
func restartPolicy(s *v1alpha1.KVCPoolSpec) corev1.RestartPolicy {
	if v1alpha1.ResolveDirectPath(s) == v1alpha1.DirectPathUnified {
		return corev1.RestartPolicyAlways
	}
	return corev1.RestartPolicyNever
}

func labels(pool *v1alpha1.KVCPool, role v1alpha1.Role) map[string]string {
	return map[string]string{
		v1alpha1.LabelPool: pool.Name,
		v1alpha1.LabelSet:  v1alpha1.SetName(pool.Name, role),
		v1alpha1.LabelRole: role.Label(),
	}
}

func annotations(role v1alpha1.Role, o Options) map[string]string {
	out := map[string]string{}
	if ports := o.Ports.annotation(); ports != "" {
		out[v1alpha1.AnnotationPorts] = ports
	}
	if role == v1alpha1.Prefill {
		out[v1alpha1.AnnotationBootstrapPort] = itoa(o.Ports.Bootstrap)
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

func engineContainer(pool *v1alpha1.KVCPool, role v1alpha1.Role, o Options) corev1.Container {
	s := &pool.Spec
	c := corev1.Container{
		Name:         v1alpha1.ContainerEngine,
		Image:        s.Engine.Image,
		Command:      EngineCommand(s.Engine.Type),
		Args:         EngineArgs(pool, role, o),
		Env:          engineEnv(pool),
		Ports:        []corev1.ContainerPort{{Name: "engine", ContainerPort: o.Ports.Engine}},
		Resources:    *s.Engine.Resources.DeepCopy(),
		VolumeMounts: engineMounts(&s.Model),
		// The port opens once the weights are loaded. /health is no liveness
		// check: it is a real generation and fails under load.
		StartupProbe: &corev1.Probe{
			ProbeHandler: corev1.ProbeHandler{
				TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromString("engine")},
			},
			PeriodSeconds:    10,
			FailureThreshold: (*s.Model.LoadTimeoutSeconds + 9) / 10, // never less than the timeout
		},
		SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: new(false)},
	}
	if role == v1alpha1.Prefill {
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: "bootstrap", ContainerPort: o.Ports.Bootstrap})
	}
	if s.Engine.Type == v1alpha1.EngineEmulator {
		if c.Image == "" {
			c.Image = o.Image
		}
		c.SecurityContext = restricted()
		return c
	}
	if c.Resources.Limits == nil {
		c.Resources.Limits = corev1.ResourceList{}
	}
	gpus := int64(gpusPerPod(s, role))
	c.Resources.Limits[corev1.ResourceName(s.Engine.GPUResource)] = *resource.NewQuantity(gpus, resource.DecimalSI)
	return c
}

func engineEnv(pool *v1alpha1.KVCPool) []corev1.EnvVar {
	env := []corev1.EnvVar{engineKey(pool)}
	m := &pool.Spec.Model
	if m.TokenSecretName != "" {
		env = append(env, secretEnv("HF_TOKEN", m.TokenSecretName, "token"))
	}
	if m.Cache != nil {
		env = append(env, corev1.EnvVar{Name: "HF_HOME", Value: dirModelCache})
	}
	return env
}

func engineKey(pool *v1alpha1.KVCPool) corev1.EnvVar {
	return secretEnv(v1alpha1.EnvEngineKey, v1alpha1.InternalSecretName(pool.Name), v1alpha1.KeyEngine)
}

func secretEnv(name, secret, key string) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
		LocalObjectReference: corev1.LocalObjectReference{Name: secret}, Key: key,
	}}}
}

func engineMounts(m *v1alpha1.ModelSpec) []corev1.VolumeMount {
	mounts := []corev1.VolumeMount{
		{Name: volumeRun, MountPath: v1alpha1.DirRun},
		{Name: volumeShm, MountPath: "/dev/shm"},
	}
	if m.Source == v1alpha1.SourcePVC || m.Source == v1alpha1.SourceHostPath {
		mounts = append(mounts, corev1.VolumeMount{Name: volumeModel, MountPath: m.Path, ReadOnly: true})
	}
	if m.Cache != nil {
		mounts = append(mounts, corev1.VolumeMount{Name: volumeCache, MountPath: dirModelCache})
	}
	return mounts
}

func volumes(pool *v1alpha1.KVCPool) []corev1.Volume {
	m := &pool.Spec.Model
	vs := []corev1.Volume{
		secretVolume(volumeToken, v1alpha1.InternalSecretName(pool.Name), v1alpha1.FileToken),
		{Name: volumeRouting, VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: v1alpha1.RoutingConfigMapName(pool.Name)},
		}}},
		{Name: volumeJournal, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: volumeRun, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: volumeShm, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{
			Medium: corev1.StorageMediumMemory, SizeLimit: pool.Spec.Engine.ShmSize,
		}}},
	}
	switch m.Source {
	case v1alpha1.SourcePVC:
		vs = append(vs, claimVolume(volumeModel, m.ClaimName, true))
	case v1alpha1.SourceHostPath:
		vs = append(vs, hostVolume(volumeModel, m.Path))
	case v1alpha1.SourceHuggingFace, v1alpha1.SourceImage:
	}
	switch c := m.Cache; {
	case c == nil:
	case c.ClaimName != "":
		vs = append(vs, claimVolume(volumeCache, c.ClaimName, false))
	default:
		vs = append(vs, hostVolume(volumeCache, c.HostPath))
	}
	return vs
}

func secretVolume(name, secret, key string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{
		SecretName: secret, Items: []corev1.KeyToPath{{Key: key, Path: key}},
	}}}
}

func claimVolume(name, claim string, readOnly bool) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim, ReadOnly: readOnly},
	}}
}

func hostVolume(name, path string) corev1.Volume {
	return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: path},
	}}
}

// restricted is Pod Security's restricted level, for programs of our own.
func restricted() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		AllowPrivilegeEscalation: new(false),
		ReadOnlyRootFilesystem:   new(true),
		RunAsNonRoot:             new(true),
		RunAsUser:                new(int64(65532)),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// Identity is what one pod has for itself, outside of its revision.
type Identity struct {
	Name      string // of the pod
	Namespace string
	Replica   int    // ordinal of the instance
	Index     int    // node of the instance; 0 = leader
	Revision  string // of the template; "" = none
	Nonce     string // lets the kubelet, and nobody else, start the pod's drain
}

// Pod makes one pod of a template: its names, its place in the set, and the
// preStop hook that waits for its own sidecar (wire.md §6).
func Pod(t *corev1.PodTemplateSpec, id Identity) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: *t.ObjectMeta.DeepCopy(), Spec: *t.Spec.DeepCopy()}
	pod.Name, pod.Namespace = id.Name, id.Namespace
	place := map[string]string{
		v1alpha1.LabelReplica:     strconv.Itoa(id.Replica),
		v1alpha1.LabelWorkerIndex: strconv.Itoa(id.Index),
	}
	if id.Revision != "" {
		place[v1alpha1.LabelRevision] = id.Revision
	}
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	maps.Copy(pod.Labels, place)

	sidecar := container(pod.Spec.InitContainers, v1alpha1.ContainerSidecar)
	engine := container(pod.Spec.Containers, v1alpha1.ContainerEngine)
	if sidecar == nil || engine == nil || id.Nonce == "" {
		return pod // a hand-made template need not have them
	}
	sidecar.Env = append(sidecar.Env, corev1.EnvVar{Name: v1alpha1.EnvPreStopNonce, Value: id.Nonce})
	if engine.Lifecycle == nil {
		engine.Lifecycle = &corev1.Lifecycle{}
	}
	if engine.Lifecycle.PreStop == nil {
		engine.Lifecycle.PreStop = &corev1.LifecycleHandler{HTTPGet: &corev1.HTTPGetAction{
			Path: "/kvc/v1/prestop/" + id.Nonce, Port: intstr.FromInt32(sidecarPort(sidecar)),
		}}
	}
	return pod
}

func container(list []corev1.Container, name string) *corev1.Container {
	for i := range list {
		if list[i].Name == name {
			return &list[i]
		}
	}
	return nil
}

func sidecarPort(c *corev1.Container) int32 {
	for _, p := range c.Ports {
		if p.Name == portNameSidecar {
			return p.ContainerPort
		}
	}
	return v1alpha1.PortSidecar
}
