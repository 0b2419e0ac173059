// Package turns runs whole turns through the real router, real sidecars and
// real emulators in one process, over loopback sockets. It has no code of its
// own to decide anything: its tests are the proof that the parts fit.
package turns
