// Package build renders a pool's roles to pods: the engine's command line for
// each engine profile, the sidecar beside it, their environment, ports, probes
// and volumes. It is a pure function of the pool, so a plan can be printed and
// compared, and a machine without Kubernetes runs the very same pods.
//
// It decides which SGLang flags a profile needs and never writes one that SGLang
// removed. It refuses to know how many pods exist, where they run and who
// starts them: those are the set controllers and controllers/local.
package build
