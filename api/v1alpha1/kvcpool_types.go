package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// KVCPool is one model served by prefill and decode workers behind one router.
// The name is at most 40 characters: child names and label values add to it.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=kvcp
// +kubebuilder:printcolumn:name="Available",type=string,JSONPath=`.status.conditions[?(@.type=="Available")].status`
// +kubebuilder:printcolumn:name="Prefill",type=integer,JSONPath=`.status.prefill.readyReplicas`
// +kubebuilder:printcolumn:name="Decode",type=integer,JSONPath=`.status.decode.readyReplicas`
// +kubebuilder:printcolumn:name="Draining",type=integer,JSONPath=`.status.decode.drainingReplicas`
// +kubebuilder:printcolumn:name="P:D",type=string,JSONPath=`.status.ratio`
// +kubebuilder:printcolumn:name="Sessions",type=integer,JSONPath=`.status.decode.residentSessions`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Updated",type=integer,JSONPath=`.status.decode.updatedReplicas`,priority=1
// +kubebuilder:printcolumn:name="URL",type=string,JSONPath=`.status.url`,priority=1
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 40",message="metadata.name is longer than 40 characters: shorten it, since child names add to it"
// +kubebuilder:validation:XValidation:rule="!self.metadata.name.contains('.')",message="metadata.name has a dot, which names of Services may not have: write - instead"
type KVCPool struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says what is wanted.
	// +required
	Spec KVCPoolSpec `json:"spec"`
	// status says what was last seen.
	// +optional
	Status KVCPoolStatus `json:"status,omitzero"`
}

// KVCPoolList is a list of pools.
//
// +kubebuilder:object:root=true
type KVCPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []KVCPool `json:"items"`
}

// KVCPoolSpec is what a person wants. Only model.name is required.
//
// +kubebuilder:validation:XValidation:rule="(has(self.engine) && has(self.engine.directPath) ? self.engine.directPath : 'Auto') != 'Unified' || ((!has(self.prefill) || !has(self.prefill.replicas) || self.prefill.replicas == 0) && (has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') == 'Static')",message="engine.directPath Unified needs prefill.replicas 0 (and Static scaling), since an engine in null mode cannot receive KV: set it to 0, or choose DeltaTransfer",fieldPath=".prefill.replicas"
// +kubebuilder:validation:XValidation:rule="!(has(self.prefill) && has(self.prefill.replicas) && self.prefill.replicas == 0) || (has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') != 'Static' || (has(self.engine) && has(self.engine.directPath) ? self.engine.directPath : 'Auto') == 'Unified' || ((has(self.engine) && has(self.engine.directPath) ? self.engine.directPath : 'Auto') == 'Auto' && !(has(self.engine) && has(self.engine.type) && self.engine.type == 'Emulator'))",message="this engine.directPath needs a prefill worker: set prefill.replicas to 1 or more, or engine.directPath to Unified",fieldPath=".prefill.replicas"
// +kubebuilder:validation:XValidation:rule="!has(self.decode) || !has(self.decode.replicas) || self.decode.replicas > 0 || (has(self.decode) && has(self.decode.scaling) && has(self.decode.scaling.mode) ? self.decode.scaling.mode : 'Static') != 'Static'",message="decode.replicas is 0 and sessions need a decode worker: set it to 1 or more",fieldPath=".decode.replicas"
// +kubebuilder:validation:XValidation:rule="has(self.autoscaling) || ((has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') != 'Auto' && (has(self.decode) && has(self.decode.scaling) && has(self.decode.scaling.mode) ? self.decode.scaling.mode : 'Static') != 'Auto')",message="autoscaling is missing and a role has scaling.mode Auto: give its bounds, or set the mode to Static",fieldPath=".autoscaling"
// +kubebuilder:validation:XValidation:rule="!has(self.autoscaling) || (has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') == 'Auto' || (has(self.decode) && has(self.decode.scaling) && has(self.decode.scaling.mode) ? self.decode.scaling.mode : 'Static') == 'Auto'",message="autoscaling is given and no role has scaling.mode Auto: set one, or remove autoscaling",fieldPath=".autoscaling"
// +kubebuilder:validation:XValidation:rule="!has(self.autoscaling) || has(self.autoscaling.prefill) || (has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') != 'Auto'",message="autoscaling.prefill is missing and prefill.scaling.mode is Auto: write {min: 1, max: 8}",fieldPath=".autoscaling"
// +kubebuilder:validation:XValidation:rule="!has(self.autoscaling) || has(self.autoscaling.decode) || (has(self.decode) && has(self.decode.scaling) && has(self.decode.scaling.mode) ? self.decode.scaling.mode : 'Static') != 'Auto'",message="autoscaling.decode is missing and decode.scaling.mode is Auto: write {min: 1, max: 8}",fieldPath=".autoscaling"
// +kubebuilder:validation:XValidation:rule="!has(self.prefill) || !has(self.prefill.pack) || (has(self.topology) && has(self.topology.levels) && self.topology.levels.exists(l, (!(has(self.prefill.pack.required) && size(self.prefill.pack.required) > 0) || self.prefill.pack.required == l.name) && (!(has(self.prefill.pack.preferred) && size(self.prefill.pack.preferred) > 0) || self.prefill.pack.preferred == l.name)))",message="prefill.pack names a topology level that does not exist: add it to topology.levels",fieldPath=".prefill.pack"
// +kubebuilder:validation:XValidation:rule="!has(self.decode) || !has(self.decode.pack) || (has(self.topology) && has(self.topology.levels) && self.topology.levels.exists(l, (!(has(self.decode.pack.required) && size(self.decode.pack.required) > 0) || self.decode.pack.required == l.name) && (!(has(self.decode.pack.preferred) && size(self.decode.pack.preferred) > 0) || self.decode.pack.preferred == l.name)))",message="decode.pack names a topology level that does not exist: add it to topology.levels",fieldPath=".decode.pack"
// +kubebuilder:validation:XValidation:rule="!has(self.engine) || !has(self.engine.extraArgs) || !self.engine.extraArgs.exists(a, a.split('=')[0] == '--speculative-algorithm') || (has(self.engine) && has(self.engine.directPath) ? self.engine.directPath : 'Auto') == 'Unified' || ((has(self.engine) && has(self.engine.directPath) ? self.engine.directPath : 'Auto') == 'Auto' && !(has(self.engine) && has(self.engine.type) && self.engine.type == 'Emulator') && (has(self.prefill) && has(self.prefill.replicas) && self.prefill.replicas == 0) && (has(self.prefill) && has(self.prefill.scaling) && has(self.prefill.scaling.mode) ? self.prefill.scaling.mode : 'Static') == 'Static')",message="engine.extraArgs has --speculative-algorithm, which SGLang refuses beside the decode radix cache: remove it, or use engine.directPath Unified",fieldPath=".engine.extraArgs"
// +kubebuilder:validation:XValidation:rule="(has(self.routing) && has(self.routing.blockBytes) ? self.routing.blockBytes : 96) == (has(oldSelf.routing) && has(oldSelf.routing.blockBytes) ? oldSelf.routing.blockBytes : 96)",message="routing.blockBytes is immutable, since every block hash in the pool depends on it: make a new pool",fieldPath=".routing.blockBytes"
// +kubebuilder:validation:XValidation:rule="(has(self.gang) && has(self.gang.provider) ? self.gang.provider : 'None') == (has(oldSelf.gang) && has(oldSelf.gang.provider) ? oldSelf.gang.provider : 'None')",message="gang.provider is immutable: make a new pool",fieldPath=".gang.provider"
type KVCPoolSpec struct {
	// model is what is served and where its weights come from.
	// +required
	Model ModelSpec `json:"model"`
	// engine is how one worker runs the model.
	// +optional
	Engine EngineSpec `json:"engine,omitzero"`
	// routing holds the constants of the three algorithms. A change reaches
	// routers and sidecars without restarting an engine.
	// +optional
	Routing RoutingSpec `json:"routing,omitzero"`
	// rdma is the fabric between prefill and decode workers.
	// +optional
	RDMA RDMASpec `json:"rdma,omitzero"`
	// topology names the levels of the cluster that matter to a transfer.
	// +optional
	Topology TopologySpec `json:"topology,omitzero"`
	// gang places all pods of one replica together or not at all.
	// +optional
	Gang GangSpec `json:"gang,omitzero"`
	// rollout orders a change of revision over both roles.
	// +optional
	Rollout PoolRolloutSpec `json:"rollout,omitzero"`
	// prefill are the workers that compute prompts for decode workers. Defaults
	// to one replica, or to none when directPath is Unified.
	// +optional
	Prefill RoleSpec `json:"prefill,omitzero"`
	// decode are the workers that keep sessions and generate tokens. Under
	// Unified they prefill as well.
	// +optional
	Decode RoleSpec `json:"decode,omitzero"`
	// router is the HTTP front of the pool.
	// +optional
	Router RouterSpec `json:"router,omitzero"`
	// autoscaling changes the number of prefill and decode workers with the
	// load. Present exactly when a role's scaling.mode is Auto.
	// +optional
	Autoscaling *AutoscalingSpec `json:"autoscaling,omitempty"`
	// sloClasses are the latency promises that requests may name. Names are
	// unique. Without any, every request is of one class without a target.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=16
	// +optional
	SLOClasses []SLOClass `json:"sloClasses,omitempty"`
}

// SLOClass is one latency promise.
type SLOClass struct {
	// name is what a request says to choose the class.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`
	// +required
	Name string `json:"name"`
	// ttftMilliseconds is the target for the first token. Without it the class
	// has none.
	// +kubebuilder:validation:Minimum=1
	// +optional
	TTFTMilliseconds *int32 `json:"ttftMilliseconds,omitempty"`
	// itlMilliseconds is the target between tokens. Without it the class has none.
	// +kubebuilder:validation:Minimum=1
	// +optional
	ITLMilliseconds *int32 `json:"itlMilliseconds,omitempty"`
	// priority orders the queues: more goes first. 0 gives way to everyone.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000
	// +kubebuilder:default=0
	// +optional
	Priority *int32 `json:"priority,omitempty"`
	// maxResidentPercent is the share of a decode worker's KV that sessions of
	// this class may hold.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	// +kubebuilder:default=100
	// +optional
	MaxResidentPercent *int32 `json:"maxResidentPercent,omitempty"`
}

// KVCPoolStatus is what the operator last saw.
type KVCPoolStatus struct {
	// conditions are listed in conditions.go.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the generation this status speaks of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// ratio is ready prefill replicas to ready decode replicas, "2:4".
	// +optional
	Ratio string `json:"ratio,omitempty"`
	// prefill counts the prefill replicas.
	// +optional
	Prefill RoleStatus `json:"prefill,omitzero"`
	// decode counts the decode replicas.
	// +optional
	Decode RoleStatus `json:"decode,omitzero"`
	// directPath is what the sidecars found their engines able to do.
	// +optional
	DirectPath DirectPathStatus `json:"directPath,omitzero"`
	// routerReadyReplicas counts routers that answer.
	// +optional
	RouterReadyReplicas int32 `json:"routerReadyReplicas,omitempty"`
	// url is where clients send requests.
	// +optional
	URL string `json:"url,omitempty"`
	// scaleHistory holds the last five decisions of the autoscaler, oldest first.
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=5
	// +optional
	ScaleHistory []ScaleEvent `json:"scaleHistory,omitempty"`
}

// RoleStatus counts the replicas of one role, surge not included.
type RoleStatus struct {
	// replicas are the replicas that exist.
	// +optional
	Replicas int32 `json:"replicas,omitempty"`
	// readyReplicas answered their sidecar's readiness check.
	// +optional
	ReadyReplicas int32 `json:"readyReplicas,omitempty"`
	// availableReplicas were ready for minReadySeconds.
	// +optional
	AvailableReplicas int32 `json:"availableReplicas,omitempty"`
	// updatedReplicas run the newest revision.
	// +optional
	UpdatedReplicas int32 `json:"updatedReplicas,omitempty"`
	// drainingReplicas are leaving.
	// +optional
	DrainingReplicas int32 `json:"drainingReplicas,omitempty"`
	// residentSessions are sessions with KV on a worker of this role. Absent is
	// unknown.
	// +optional
	ResidentSessions *int32 `json:"residentSessions,omitempty"`
	// kvUsagePercent is the mean use of the workers' KV. Absent is unknown.
	// +optional
	KVUsagePercent *int32 `json:"kvUsagePercent,omitempty"`
}

// DirectPathStatus is the profile in force per request surface.
type DirectPathStatus struct {
	// chat is the profile of /v1/chat/completions.
	// +optional
	Chat DirectPath `json:"chat,omitempty"`
	// completions is the profile of /v1/completions.
	// +optional
	Completions DirectPath `json:"completions,omitempty"`
	// generate is the profile of /generate.
	// +optional
	Generate DirectPath `json:"generate,omitempty"`
}

// ScaleEvent is one decision of the autoscaler.
type ScaleEvent struct {
	// time is when it was taken.
	// +required
	Time metav1.Time `json:"time"`
	// role is the role that was changed.
	// +required
	Role Role `json:"role"`
	// from is the number of replicas before.
	// +required
	From int32 `json:"from"`
	// to is the number of replicas after.
	// +required
	To int32 `json:"to"`
	// reason is the sentence that explains it, figures included.
	// +optional
	Reason string `json:"reason,omitempty"`
}

// Role is which half of the pool something belongs to.
//
// +kubebuilder:validation:Enum=Prefill;Decode
type Role string

// The two halves of a pool. Workers of a Unified pool are Decode.
const (
	Prefill Role = "Prefill"
	Decode  Role = "Decode"
)

// Roles lists both, in the order in which they are rendered and started.
func Roles() []Role { return []Role{Prefill, Decode} }

// Role returns the spec of one half of the pool.
func (s *KVCPoolSpec) Role(r Role) *RoleSpec {
	if r == Prefill {
		return &s.Prefill
	}
	return &s.Decode
}
