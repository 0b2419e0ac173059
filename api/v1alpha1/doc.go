// Package v1alpha1 is the API vocabulary of KVC: the KVCPool that a person
// writes, the PrefillSet and DecodeSet that the pool controller derives from it,
// and the names that Kubernetes objects carry (labels.go, conditions.go).
//
// It decides what a manifest means: Default fills what was left out, Validate
// refuses what cannot work, ParsePool reads a manifest from a file. It refuses to
// know how a pool is rendered to pods (controllers/build) and how it is run.
//
// +kubebuilder:object:generate=true
// +groupName=kvc.dev
package v1alpha1
