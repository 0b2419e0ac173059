// Package kit starts an API server and etcd for a suite, with the project's CRDs
// installed. The programs are those that hack/envtest.sh builds. There are no
// controllers and no nodes: nothing but the suite moves an object.
package kit
