package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// DefaultSGLangImage is the release that this version of KVC was written
// against. It does Unified and DeltaTransfer; no released SGLang does
// ConditionalAggregation or NativeAdmission.
const DefaultSGLangImage = "lmsysorg/sglang:v0.5.23-runtime"

// ModelSource says where weights come from.
//
// +kubebuilder:validation:Enum=HuggingFace;PVC;HostPath;Image
type ModelSource string

// The sources of weights.
const (
	SourceHuggingFace ModelSource = "HuggingFace" // downloaded by the engine
	SourcePVC         ModelSource = "PVC"         // a volume, mounted read-only
	SourceHostPath    ModelSource = "HostPath"    // a directory of the node
	SourceImage       ModelSource = "Image"       // part of the engine's image
)

// ModelSpec is what is served.
//
// +kubebuilder:validation:XValidation:rule="!has(self.source) || self.source != 'PVC' || (has(self.claimName) && has(self.path))",message="source PVC needs claimName and path"
// +kubebuilder:validation:XValidation:rule="!has(self.source) || !(self.source in ['HostPath', 'Image']) || has(self.path)",message="this source needs path, the directory of the weights"
type ModelSpec struct {
	// name is the model as its publisher names it. Clients may always use it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +required
	Name string `json:"name"`
	// servedName is the name the engine answers to. Defaults to name.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	ServedName string `json:"servedName,omitempty"`
	// source says where the weights come from.
	// +kubebuilder:default=HuggingFace
	// +optional
	Source ModelSource `json:"source,omitempty"`
	// claimName is the PersistentVolumeClaim of source PVC.
	// +optional
	ClaimName string `json:"claimName,omitempty"`
	// path is the directory of the weights inside the engine container: the
	// mount point of PVC, the node's own directory of HostPath (mounted at the
	// same place), a directory of the image for Image. Unused by HuggingFace.
	// +optional
	Path string `json:"path,omitempty"`
	// tokenSecretName is a Secret with key "token" for gated HuggingFace models.
	// +optional
	TokenSecretName string `json:"tokenSecretName,omitempty"`
	// cache keeps what HuggingFace downloads, so that a restart fetches nothing.
	// +optional
	Cache *ModelCacheSpec `json:"cache,omitempty"`
	// loadTimeoutSeconds is how long an engine may load before its pod counts as
	// failed.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=86400
	// +kubebuilder:default=3600
	// +optional
	LoadTimeoutSeconds *int32 `json:"loadTimeoutSeconds,omitempty"`
}

// ModelCacheSpec is a place that outlives a pod.
//
// +kubebuilder:validation:XValidation:rule="has(self.claimName) != has(self.hostPath)",message="cache takes either claimName or hostPath"
type ModelCacheSpec struct {
	// claimName is a PersistentVolumeClaim.
	// +optional
	ClaimName string `json:"claimName,omitempty"`
	// hostPath is a directory of the node.
	// +optional
	HostPath string `json:"hostPath,omitempty"`
}

// EngineType is the program that a worker runs.
//
// +kubebuilder:validation:Enum=SGLang;Emulator
type EngineType string

// The programs a worker can run.
const (
	EngineSGLang   EngineType = "SGLang"
	EngineEmulator EngineType = "Emulator" // needs no GPU: demo, CI
)

// DirectPath says how an engine executes a turn whose session is resident.
//
// +kubebuilder:validation:Enum=Auto;ConditionalAggregation;NativeAdmission;Unified;DeltaTransfer
type DirectPath string

// The engine profiles; ResolveDirectPath replaces Auto.
const (
	DirectPathAuto                   DirectPath = "Auto"
	DirectPathConditionalAggregation DirectPath = "ConditionalAggregation"
	DirectPathNativeAdmission        DirectPath = "NativeAdmission"
	DirectPathUnified                DirectPath = "Unified"
	DirectPathDeltaTransfer          DirectPath = "DeltaTransfer"
)

// TransferBackend moves KV from a prefill to a decode worker.
//
// +kubebuilder:validation:Enum=Mooncake;NIXL;MooncakeTCP
type TransferBackend string

// The transfer backends. With rdma.mode Disabled, Mooncake is MooncakeTCP.
const (
	TransferMooncake    TransferBackend = "Mooncake"
	TransferNIXL        TransferBackend = "NIXL"
	TransferMooncakeTCP TransferBackend = "MooncakeTCP"
)

// EngineSpec is how one worker runs the model.
type EngineSpec struct {
	// type is the program: SGLang, or the Emulator, which needs no GPU.
	// +kubebuilder:default=SGLang
	// +optional
	Type EngineType `json:"type,omitempty"`
	// image is the engine's container image. Defaults to a pinned SGLang release,
	// or to the operator's own image for the Emulator.
	// +optional
	Image string `json:"image,omitempty"`
	// directPath is how a resident turn runs. Auto is ConditionalAggregation for
	// the Emulator, Unified for SGLang without prefill workers and DeltaTransfer
	// for SGLang with them. Unified needs prefill.replicas 0.
	// +kubebuilder:default=Auto
	// +optional
	DirectPath DirectPath `json:"directPath,omitempty"`
	// transferBackend moves KV between workers.
	// +kubebuilder:default=Mooncake
	// +optional
	TransferBackend TransferBackend `json:"transferBackend,omitempty"`
	// pageSize is the KV page in tokens, the same on both roles: a decode engine
	// dies on a mismatch.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	// +kubebuilder:default=64
	// +optional
	PageSize *int32 `json:"pageSize,omitempty"`
	// kvCacheDtype is the number format of KV, the same on both roles.
	// +kubebuilder:default=auto
	// +optional
	KVCacheDtype string `json:"kvCacheDtype,omitempty"`
	// memFractionStaticPercent is the share of GPU memory for weights and KV.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=99
	// +kubebuilder:default=82
	// +optional
	MemFractionStaticPercent *int32 `json:"memFractionStaticPercent,omitempty"`
	// kvTier is where evicted KV goes, on both roles. Without it evicted KV is
	// gone, except that DeltaTransfer gives prefill workers a host tier.
	// +optional
	KVTier *KVTierSpec `json:"kvTier,omitempty"`
	// gpuResource is the extended resource that one GPU is.
	// +kubebuilder:default=nvidia.com/gpu
	// +optional
	GPUResource string `json:"gpuResource,omitempty"`
	// runtimeClassName is the pods' runtime class. Defaults to none.
	// +optional
	RuntimeClassName string `json:"runtimeClassName,omitempty"`
	// resources are what the engine container needs beside its GPUs.
	// +optional
	Resources corev1.ResourceRequirements `json:"resources,omitzero"`
	// shmSize bounds /dev/shm, which tensor parallelism needs.
	// +kubebuilder:default="16Gi"
	// +optional
	ShmSize *resource.Quantity `json:"shmSize,omitempty"`
	// imagePullSecrets are for the engine's image.
	// +listType=atomic
	// +optional
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets,omitempty"`
	// extraArgs are appended to the engine's command line. Flags that a typed
	// field stands for, flags that SGLang removed and dp-size above 1 are refused.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=128
	// +optional
	ExtraArgs []string `json:"extraArgs,omitempty"`
}

// KVStore is a tier below host memory.
//
// +kubebuilder:validation:Enum=None;File;Mooncake
type KVStore string

// The tiers below host memory.
const (
	KVStoreNone     KVStore = "None"
	KVStoreFile     KVStore = "File"
	KVStoreMooncake KVStore = "Mooncake"
)

// KVTierSpec is where evicted KV goes (SGLang's HiCache).
type KVTierSpec struct {
	// host is host memory per pod.
	// +required
	Host resource.Quantity `json:"host"`
	// store is the tier below host memory.
	// +kubebuilder:default=None
	// +optional
	Store KVStore `json:"store,omitempty"`
}
