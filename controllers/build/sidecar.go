package build

import (
	"net"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

const portNameSidecar = "sidecar"

// sidecarContainer is the native sidecar: an init container that restarts. Its
// start-up probe asks only whether it lives; waiting for the engine there would
// deadlock, because the engine starts after it. Its readiness is the worker's.
func sidecarContainer(pool *v1alpha1.KVCPool, role v1alpha1.Role, o Options) corev1.Container {
	return corev1.Container{
		Name:          v1alpha1.ContainerSidecar,
		Image:         o.Image,
		Command:       []string{ProgramDir + "/sidecar"},
		Args:          sidecarArgs(o),
		Env:           sidecarEnv(pool, role, o),
		RestartPolicy: new(corev1.ContainerRestartPolicyAlways),
		Ports:         []corev1.ContainerPort{{Name: portNameSidecar, ContainerPort: o.Ports.Sidecar}},
		VolumeMounts: []corev1.VolumeMount{
			{Name: volumeToken, MountPath: v1alpha1.DirToken, ReadOnly: true},
			{Name: volumeRouting, MountPath: v1alpha1.DirRouting, ReadOnly: true},
			{Name: volumeJournal, MountPath: v1alpha1.DirJournal},
			{Name: volumeRun, MountPath: v1alpha1.DirRun},
		},
		StartupProbe:    httpProbe("/healthz", 1, 30),
		LivenessProbe:   httpProbe("/healthz", 10, 6),
		ReadinessProbe:  httpProbe("/readyz", 2, 3),
		SecurityContext: restricted(),
	}
}

func sidecarArgs(o Options) []string {
	host := o.Host
	if host == "0.0.0.0" {
		host = "" // all addresses of both families
	}
	return []string{
		"--listen", net.JoinHostPort(host, itoa(o.Ports.Sidecar)), // brackets an IPv6 host
		"--token-file", v1alpha1.DirToken + "/" + v1alpha1.FileToken,
		"--routing-file", v1alpha1.DirRouting + "/" + v1alpha1.FileRouting,
		"--journal-dir", v1alpha1.DirJournal,
	}
}

// sidecarEnv is wire.md §8; the nonce is per pod and comes with Pod.
func sidecarEnv(pool *v1alpha1.KVCPool, role v1alpha1.Role, o Options) []corev1.EnvVar {
	return []corev1.EnvVar{
		fieldEnv(v1alpha1.EnvWorker, "metadata.uid"),
		fieldEnv(v1alpha1.EnvPod, "metadata.name"),
		fieldEnv(v1alpha1.EnvNamespace, "metadata.namespace"),
		{Name: v1alpha1.EnvPool, Value: pool.Name},
		{Name: v1alpha1.EnvRole, Value: role.Label()},
		{Name: v1alpha1.EnvDirectPath, Value: string(v1alpha1.ResolveDirectPath(&pool.Spec))},
		{Name: v1alpha1.EnvEngineURL, Value: "http://127.0.0.1:" + itoa(o.Ports.Engine)},
		engineKey(pool),
	}
}

func fieldEnv(name, path string) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{FieldPath: path},
	}}
}

// httpProbe asks the sidecar; its token is not needed for these paths.
func httpProbe(path string, periodSeconds, failures int32) *corev1.Probe {
	return &corev1.Probe{
		ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{Path: path, Port: intstr.FromString(portNameSidecar)},
		},
		PeriodSeconds:    periodSeconds,
		TimeoutSeconds:   2,
		FailureThreshold: failures,
	}
}
