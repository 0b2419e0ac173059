// Package independent lets programs that this project did not write read its
// side of SGLang's contract: SGLang's own router and its mini load balancer
// drive pairs of emulators, and the openai client talks to them. What they
// cannot read, the emulator has wrong.
//
// The tests need Python and packages from PyPI, so they are skipped unless
// KVC_INDEPENDENT=1; hack/independent.sh sets everything up.
package independent
