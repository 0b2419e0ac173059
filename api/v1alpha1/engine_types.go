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
// +kubebuilder:validation:XValidation:rule="size(self.name.trim()) > 0",message="model.name is blank: name the model, such as Qwen/Qwen3-32B",fieldPath=".name"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') != 'PVC' || (has(self.claimName) && size(self.claimName) > 0)",message="model.claimName is missing: name the claim that holds the weights of source PVC",fieldPath=".claimName"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') == 'PVC' || !(has(self.claimName) && size(self.claimName) > 0)",message="model.claimName belongs to source PVC: set source to PVC, or use cache.claimName to keep downloads",fieldPath=".claimName"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') == 'HuggingFace' || (has(self.path) && self.path.startsWith('/'))",message="model.path is missing or relative: this source needs the absolute directory of the weights",fieldPath=".path"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') != 'HuggingFace' || !(has(self.path) && size(self.path) > 0)",message="model.path is of no use to HuggingFace, which downloads by name: remove it, or set source to PVC, HostPath or Image",fieldPath=".path"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') == 'HuggingFace' || !(has(self.tokenSecretName) && size(self.tokenSecretName) > 0)",message="model.tokenSecretName is only for source HuggingFace: remove it",fieldPath=".tokenSecretName"
// +kubebuilder:validation:XValidation:rule="(has(self.source) ? self.source : 'HuggingFace') == 'HuggingFace' || !has(self.cache)",message="model.cache keeps what HuggingFace downloads: remove it for other sources",fieldPath=".cache"
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
	// +kubebuilder:validation:MaxLength=4096
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
// +kubebuilder:validation:XValidation:rule="(has(self.claimName) && size(self.claimName) > 0) != (has(self.hostPath) && size(self.hostPath) > 0)",message="model.cache takes either claimName or hostPath: keep one"
// +kubebuilder:validation:XValidation:rule="!(has(self.hostPath) && size(self.hostPath) > 0) || self.hostPath.startsWith('/')",message="model.cache.hostPath is relative: write an absolute directory",fieldPath=".hostPath"
type ModelCacheSpec struct {
	// claimName is a PersistentVolumeClaim.
	// +optional
	ClaimName string `json:"claimName,omitempty"`
	// hostPath is a directory of the node.
	// +kubebuilder:validation:MaxLength=4096
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
//
// +kubebuilder:validation:XValidation:rule="!has(self.directPath) || !(self.directPath in ['ConditionalAggregation', 'NativeAdmission']) || (has(self.type) && self.type == 'Emulator') || (has(self.image) && size(self.image) > 0 && self.image != 'lmsysorg/sglang:v0.5.23-runtime')",message="no released SGLang has this engine.directPath: set engine.image to a patched build, or choose Unified or DeltaTransfer",fieldPath=".directPath"
// +kubebuilder:validation:XValidation:rule="!has(self.gpuResource) || size(self.gpuResource) == 0 || self.gpuResource.matches('^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",message="engine.gpuResource is no resource name: write one such as nvidia.com/gpu",fieldPath=".gpuResource"
// +kubebuilder:validation:XValidation:rule="!has(self.shmSize) || quantity(string(self.shmSize)).isGreaterThan(quantity('0'))",message="engine.shmSize must be more than 0, such as 16Gi",fieldPath=".shmSize"
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !self.extraArgs.exists(a, size(a.split('=')[0]) > 2 && a.startsWith('-') && ['--model-path', '--model', '--served-model-name', '--host', '--port', '--tp-size', '--tensor-parallel-size', '--tp', '--nnodes', '--node-rank', '--dist-init-addr', '--nccl-init-addr', '--page-size', '--kv-cache-dtype', '--mem-fraction-static', '--disaggregation-mode', '--disaggregation-transfer-backend', '--disaggregation-bootstrap-port', '--disaggregation-ib-device', '--disaggregation-decode-enable-radix-cache', '--disaggregation-decode-enable-conditional-agg', '--enable-hierarchical-cache', '--hicache-size', '--hicache-ratio', '--hicache-storage-backend', '--enable-metrics', '--enable-cache-report', '--kv-events-config', '--api-key', '--disable-radix-cache', '--smg-grpc-mode', '--enable-dp-attention'].exists(f, f.startsWith(a.split('=')[0])))",message="engine.extraArgs has a flag that the operator owns, or the beginning of one: use the typed field",messageExpression="'engine.extraArgs: ' + self.extraArgs.filter(a, size(a.split('=')[0]) > 2 && a.startsWith('-') && ['--model-path', '--model', '--served-model-name', '--host', '--port', '--tp-size', '--tensor-parallel-size', '--tp', '--nnodes', '--node-rank', '--dist-init-addr', '--nccl-init-addr', '--page-size', '--kv-cache-dtype', '--mem-fraction-static', '--disaggregation-mode', '--disaggregation-transfer-backend', '--disaggregation-bootstrap-port', '--disaggregation-ib-device', '--disaggregation-decode-enable-radix-cache', '--disaggregation-decode-enable-conditional-agg', '--enable-hierarchical-cache', '--hicache-size', '--hicache-ratio', '--hicache-storage-backend', '--enable-metrics', '--enable-cache-report', '--kv-events-config', '--api-key', '--disable-radix-cache', '--smg-grpc-mode', '--enable-dp-attention'].exists(f, f.startsWith(a.split('=')[0])))[0] + ' is, or may be read as, a flag of the operator: use the typed field (model, tensorParallelSize, nodesPerReplica, engine.pageSize, engine.kvCacheDtype, engine.memFractionStaticPercent, engine.kvTier, engine.transferBackend, engine.directPath, rdma), or remove it'",fieldPath=".extraArgs"
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !self.extraArgs.exists(a, a.split('=')[0] in ['--disaggregation-decode-tp', '--disaggregation-decode-dp', '--disaggregation-prefill-pp'])",message="engine.extraArgs has a flag that SGLang removed and exits on: remove it",fieldPath=".extraArgs"
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !self.extraArgs.join('\\n').matches('(^|\\n)--(dp-size|data-parallel-size|dp|pp-size|pipeline-parallel-size|pp)([\\n=]([^1]|1[^\\n])|[\\n=]?$)')",message="engine.extraArgs asks for more than one rank per engine, which is not supported: use replicas and tensorParallelSize",fieldPath=".extraArgs"
// +kubebuilder:validation:XValidation:rule="!has(self.extraArgs) || !self.extraArgs.join('\\n').matches('^[^-]|(^|\\n)([^-\\n][^\\n]*|-[^\\n]*=[^\\n]*)\\n[^-\\n]')",message="engine.extraArgs has a value without a flag before it: a flag starts with --; write --flag=value",fieldPath=".extraArgs"
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
	// +kubebuilder:validation:Enum=auto;bf16;bfloat16;fp8_e5m2;fp8_e4m3;fp4_e2m1
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
	// +kubebuilder:validation:MaxLength=317
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
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=2048
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
//
// +kubebuilder:validation:XValidation:rule="quantity(string(self.host)).isGreaterThan(quantity('0'))",message="engine.kvTier.host must be more than 0, such as 64Gi: remove kvTier to have none",fieldPath=".host"
type KVTierSpec struct {
	// host is host memory per pod.
	// +required
	Host resource.Quantity `json:"host"`
	// store is the tier below host memory.
	// +kubebuilder:default=None
	// +optional
	Store KVStore `json:"store,omitempty"`
}
