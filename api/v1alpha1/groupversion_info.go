package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Group is the API group of every kind in this package.
const Group = "kvc.dev"

// Kinds of this package, as manifests spell them.
const (
	KindPool       = "KVCPool"
	KindPrefillSet = "PrefillSet"
	KindDecodeSet  = "DecodeSet"
)

// GroupVersion is the group and version of every kind in this package.
var GroupVersion = schema.GroupVersion{Group: Group, Version: "v1alpha1"}

// AddToScheme registers the kinds of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion,
		&KVCPool{}, &KVCPoolList{},
		&PrefillSet{}, &PrefillSetList{},
		&DecodeSet{}, &DecodeSetList{},
	)
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
