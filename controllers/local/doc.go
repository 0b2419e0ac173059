// Package local runs a pool on this machine: the pods of controllers/build as
// processes, one router in front of them, and the files they share.
//
// It decides what a kubelet decides: addresses, ports and GPUs of a pod, when a
// container restarts in place and when a new pod replaces a failed one, and that
// nothing outlives the run. It refuses to know what a program is told on its
// command line (controllers/build) and where a turn goes (the router).
package local
