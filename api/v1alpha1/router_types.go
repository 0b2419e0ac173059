package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
)

// RouterSpec is the HTTP front of a pool.
//
// +kubebuilder:validation:XValidation:rule="!has(self.template) || !has(self.template.spec) || ((!has(self.template.spec.containers) || self.template.spec.containers.all(c, !(c.name in ['engine', 'kvc-sidecar']) || (!has(c.command) && !has(c.args)))) && (!has(self.template.spec.initContainers) || self.template.spec.initContainers.all(c, !(c.name in ['engine', 'kvc-sidecar']) || (!has(c.command) && !has(c.args)))))",message="template gives the engine or kvc-sidecar container a command or args, which the operator renders: remove them; use engine.extraArgs",fieldPath=".template"
// +kubebuilder:validation:XValidation:rule="!has(self.template) || !has(self.template.metadata) || !has(self.template.metadata.labels) || self.template.metadata.labels.all(k, !k.startsWith('kvc.dev/'))",message="template.metadata.labels has a label of kvc.dev, which belongs to the operator: remove it",fieldPath=".template"
type RouterSpec struct {
	// replicas are routers. They share nothing, so any of them serves any turn.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=2
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`
	// image is the router's image. Defaults to the operator's own.
	// +optional
	Image string `json:"image,omitempty"`
	// session says where a request names its session.
	// +optional
	Session RouterSession `json:"session,omitzero"`
	// auth asks clients for a key. Without it the pool is open, and says so.
	// +optional
	Auth *RouterAuth `json:"auth,omitempty"`
	// service is what clients reach.
	// +optional
	Service RouterService `json:"service,omitzero"`
	// maxQueuedRequests bounds the waiting requests of one SLO class; more are
	// shed with 429 or 503. 0 lets none wait.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=256
	// +optional
	MaxQueuedRequests *int32 `json:"maxQueuedRequests,omitempty"`
	// resources of the router container.
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitzero"`
	// template is a partial pod template, merged over what is rendered.
	// +optional
	Template *corev1.PodTemplateSpec `json:"template,omitempty"`
}

// RouterSession says where a request names its session.
//
// +kubebuilder:validation:XValidation:rule="!has(self.headers) || self.headers.all(h, h.matches('^[-A-Za-z0-9]+$'))",message="router.session.headers: a header name has letters, digits and - only; write one such as x-session-id",fieldPath=".headers"
type RouterSession struct {
	// headers are tried in order. Case does not matter, nor - against _.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=256
	// +optional
	Headers []string `json:"headers,omitempty"`
	// bodyFields are top-level JSON members, tried in order after the headers.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MinLength=1
	// +optional
	BodyFields []string `json:"bodyFields,omitempty"`
	// ttlSeconds is how long after its last turn a session counts as one that
	// may return.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=604800
	// +kubebuilder:default=900
	// +optional
	TTLSeconds *int32 `json:"ttlSeconds,omitempty"`
}

// RouterAuth names the keys that clients may use.
type RouterAuth struct {
	// secretName is a Secret whose values are API keys.
	// +kubebuilder:validation:MinLength=1
	// +required
	SecretName string `json:"secretName"`
}

// RouterService is what clients reach.
type RouterService struct {
	// type is the Service's type.
	// +kubebuilder:validation:Enum=ClusterIP;NodePort;LoadBalancer
	// +kubebuilder:default=ClusterIP
	// +optional
	Type corev1.ServiceType `json:"type,omitempty"`
	// port is the Service's port.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +kubebuilder:default=8000
	// +optional
	Port *int32 `json:"port,omitempty"`
}
