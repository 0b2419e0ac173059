package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PrefillSet owns the pods of a pool's prefill role. A hand-made one is legal;
// its template is then complete.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=pfs
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`
// +kubebuilder:printcolumn:name="Updated",type=integer,JSONPath=`.status.updatedReplicas`
// +kubebuilder:printcolumn:name="Draining",type=integer,JSONPath=`.status.drainingReplicas`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Revision",type=string,JSONPath=`.status.currentRevision`,priority=1
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 50",message="metadata.name is longer than 50 characters: shorten it, since pod names and labels add to it"
// +kubebuilder:validation:XValidation:rule="!self.metadata.name.contains('.')",message="metadata.name has a dot, which names of Services may not have: write - instead"
type PrefillSet struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says what is wanted.
	// +required
	Spec SetSpec `json:"spec"`
	// status says what was last seen.
	// +optional
	Status SetStatus `json:"status,omitzero"`
}

// PrefillSetList is a list of prefill sets.
//
// +kubebuilder:object:root=true
type PrefillSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []PrefillSet `json:"items"`
}

// DecodeSet owns the pods of a pool's decode role. A hand-made one is legal; its
// template is then complete.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.replicas,statuspath=.status.replicas,selectorpath=.status.selector
// +kubebuilder:resource:shortName=dcs
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.replicas`
// +kubebuilder:printcolumn:name="Ready",type=integer,JSONPath=`.status.readyReplicas`
// +kubebuilder:printcolumn:name="Updated",type=integer,JSONPath=`.status.updatedReplicas`
// +kubebuilder:printcolumn:name="Draining",type=integer,JSONPath=`.status.drainingReplicas`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Revision",type=string,JSONPath=`.status.currentRevision`,priority=1
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 50",message="metadata.name is longer than 50 characters: shorten it, since pod names and labels add to it"
// +kubebuilder:validation:XValidation:rule="!self.metadata.name.contains('.')",message="metadata.name has a dot, which names of Services may not have: write - instead"
type DecodeSet struct {
	metav1.TypeMeta `json:",inline"`
	// metadata is the standard object metadata.
	// +optional
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec says what is wanted.
	// +required
	Spec SetSpec `json:"spec"`
	// status says what was last seen.
	// +optional
	Status SetStatus `json:"status,omitzero"`
}

// DecodeSetList is a list of decode sets.
//
// +kubebuilder:object:root=true
type DecodeSetList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []DecodeSet `json:"items"`
}

// SetSpec is what a set of workers should be. The pool controller writes all of
// it but replicas, which belongs to whoever scales the role.
//
// +kubebuilder:validation:XValidation:rule="has(self.template.spec) && has(self.template.spec.containers) && size(self.template.spec.containers) > 0",message="template.spec.containers is empty: a set needs a complete pod template, with the engine container at least",fieldPath=".template"
type SetSpec struct {
	// replicas are engine instances, not pods.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +kubebuilder:default=1
	// +optional
	Replicas *int32 `json:"replicas,omitempty"`
	// nodesPerReplica is pods per instance.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	// +kubebuilder:default=1
	// +optional
	NodesPerReplica *int32 `json:"nodesPerReplica,omitempty"`
	// revision names the template. The pool controller computes it from the
	// user's inputs; a hand-made set leaves it empty and gets its own.
	// +optional
	Revision string `json:"revision,omitempty"`
	// victimPolicy picks the replica that leaves.
	// +kubebuilder:default=EvictionCost
	// +optional
	VictimPolicy VictimPolicy `json:"victimPolicy,omitempty"`
	// drain is how a replica leaves.
	// +optional
	Drain DrainSpec `json:"drain,omitzero"`
	// rollout bounds a change of revision.
	// +optional
	Rollout RoleRolloutSpec `json:"rollout,omitzero"`
	// recovery is how a failed replica comes back.
	// +optional
	Recovery RecoverySpec `json:"recovery,omitzero"`
	// minReadySeconds is how long a replica must be ready to count as available.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:default=0
	// +optional
	MinReadySeconds *int32 `json:"minReadySeconds,omitempty"`
	// template is the complete pod template.
	// +required
	Template corev1.PodTemplateSpec `json:"template"`
}

// SetStatus is what was last seen of a set.
type SetStatus struct {
	// conditions are listed in conditions.go.
	// +listType=map
	// +listMapKey=type
	// +optional
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// observedGeneration is the generation this status speaks of.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// replicas are instances, surge not counted. An HPA reads this.
	// +optional
	Replicas int32 `json:"replicas,omitempty"`
	// readyReplicas answered their sidecar's readiness check.
	// +optional
	ReadyReplicas int32 `json:"readyReplicas,omitempty"`
	// availableReplicas were ready for minReadySeconds.
	// +optional
	AvailableReplicas int32 `json:"availableReplicas,omitempty"`
	// updatedReplicas run updateRevision.
	// +optional
	UpdatedReplicas int32 `json:"updatedReplicas,omitempty"`
	// drainingReplicas are leaving.
	// +optional
	DrainingReplicas int32 `json:"drainingReplicas,omitempty"`
	// selector finds the leaders, for /scale.
	// +optional
	Selector string `json:"selector,omitempty"`
	// currentRevision is the revision that a rollout leaves.
	// +optional
	CurrentRevision string `json:"currentRevision,omitempty"`
	// updateRevision is the revision that a rollout goes to.
	// +optional
	UpdateRevision string `json:"updateRevision,omitempty"`
	// draining lists replicas that leave, at most 32.
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=32
	// +optional
	Draining []DrainingReplica `json:"draining,omitempty"`
}

// DrainingReplica is one replica that leaves, and what it waits for.
type DrainingReplica struct {
	// name is the leader pod's name.
	// +required
	Name string `json:"name"`
	// since is when it was marked.
	// +required
	Since metav1.Time `json:"since"`
	// deadline is when it is deleted whatever it still serves.
	// +optional
	Deadline *metav1.Time `json:"deadline,omitempty"`
	// residentSessions still have KV here. Absent is unknown.
	// +optional
	ResidentSessions *int32 `json:"residentSessions,omitempty"`
	// inFlightRequests still run here. Absent is unknown.
	// +optional
	InFlightRequests *int32 `json:"inFlightRequests,omitempty"`
	// evictionCostTokens is what recomputing its sessions would cost. Absent is
	// unknown, which counts as much.
	// +optional
	EvictionCostTokens *int64 `json:"evictionCostTokens,omitempty"`
}
