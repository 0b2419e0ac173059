package v1alpha1

// RDMAMode says how pods reach the RDMA devices.
//
// +kubebuilder:validation:Enum=Disabled;DevicePlugin;HostNetwork
type RDMAMode string

// The ways to RDMA devices. Disabled moves KV over TCP.
const (
	RDMADisabled     RDMAMode = "Disabled"
	RDMADevicePlugin RDMAMode = "DevicePlugin"
	RDMAHostNetwork  RDMAMode = "HostNetwork"
)

// Enforcement says whether a wish may be left unmet.
//
// +kubebuilder:validation:Enum=Preferred;Required
type Enforcement string

// The two strengths of a wish.
const (
	Preferred Enforcement = "Preferred"
	Required  Enforcement = "Required"
)

// PreflightMode says what a failed check of the fabric does.
//
// +kubebuilder:validation:Enum=Enforced;Advisory
type PreflightMode string

// The two consequences of a failed check: the pod waits, or an event tells.
const (
	PreflightEnforced PreflightMode = "Enforced"
	PreflightAdvisory PreflightMode = "Advisory"
)

// RDMASpec is the fabric between prefill and decode workers.
//
// +kubebuilder:validation:XValidation:rule="!has(self.mode) || self.mode != 'DevicePlugin' || (has(self.resourceName) && size(self.resourceName) > 0)",message="rdma.mode DevicePlugin needs rdma.resourceName, the extended resource of a device, such as rdma/hca",fieldPath=".resourceName"
// +kubebuilder:validation:XValidation:rule="!(has(self.resourceName) && size(self.resourceName) > 0) || self.resourceName.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",message="rdma.resourceName is no resource name: write one such as rdma/hca",fieldPath=".resourceName"
type RDMASpec struct {
	// mode is how pods reach the devices. Disabled renders TCP transfers.
	// +kubebuilder:default=Disabled
	// +optional
	Mode RDMAMode `json:"mode,omitempty"`
	// resourceName is the extended resource of one device.
	// +kubebuilder:validation:MaxLength=317
	// +optional
	ResourceName string `json:"resourceName,omitempty"`
	// count is devices per pod.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +kubebuilder:default=1
	// +optional
	Count *int32 `json:"count,omitempty"`
	// networks are Multus networks to attach, namespace/name.
	// +listType=atomic
	// +optional
	Networks []string `json:"networks,omitempty"`
	// ibDevices are the devices the engine uses. Empty lets it choose.
	// +optional
	IBDevices string `json:"ibDevices,omitempty"`
	// preflight says whether a pod with a broken fabric may serve.
	// +kubebuilder:default=Enforced
	// +optional
	Preflight PreflightMode `json:"preflight,omitempty"`
}

// TopologySpec names the levels of the cluster.
//
// +kubebuilder:validation:XValidation:rule="!has(self.pairing) || (has(self.levels) && self.levels.exists(l, l.name == self.pairing.domain))",message="topology.pairing.domain names a level that does not exist: add it to topology.levels",fieldPath=".pairing.domain"
type TopologySpec struct {
	// levels are listed widest first. Names are unique.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	// +optional
	Levels []TopologyLevel `json:"levels,omitempty"`
	// pairing keeps a prefill and a decode worker of one turn in one domain.
	// +optional
	Pairing *PairingSpec `json:"pairing,omitempty"`
}

// TopologyLevel is one level of the cluster.
//
// +kubebuilder:validation:XValidation:rule="self.nodeLabelKey.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",message="nodeLabelKey is no label key: write one such as topology.kubernetes.io/zone",fieldPath=".nodeLabelKey"
type TopologyLevel struct {
	// name is what pairing and pack refer to.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +required
	Name string `json:"name"`
	// nodeLabelKey is the node label whose value names a domain of this level.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=317
	// +required
	NodeLabelKey string `json:"nodeLabelKey"`
}

// PairingSpec keeps transfers inside one domain.
type PairingSpec struct {
	// domain is the name of a level.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +required
	Domain string `json:"domain"`
	// enforcement says whether a transfer may leave the domain.
	// +kubebuilder:default=Preferred
	// +optional
	Enforcement Enforcement `json:"enforcement,omitempty"`
}

// GangProvider places pods together.
//
// +kubebuilder:validation:Enum=None;Volcano
type GangProvider string

// The gang providers.
const (
	GangNone    GangProvider = "None"
	GangVolcano GangProvider = "Volcano"
)

// GangSpec places all pods of a replica together.
type GangSpec struct {
	// provider makes one PodGroup per replica.
	// +kubebuilder:default=None
	// +optional
	Provider GangProvider `json:"provider,omitempty"`
}
