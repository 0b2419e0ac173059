// Package independent lets programs that this project did not write read its
// side of SGLang's contract: SGLang's own router and its mini load balancer
// drive pairs of emulators, and the openai client talks to them and to a whole
// pool behind the router. What they cannot read, we have wrong.
//
// The tests need Python and packages from PyPI, so they are skipped unless
// KVC_INDEPENDENT=1; hack/independent.sh sets everything up.
package independent
