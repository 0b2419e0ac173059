// Package conformance holds the router cases (R01 to R125: real reports against
// LLM routers, each standing for its kind) as tests of the real router and the
// real sidecars over real sockets. It decides what a client and a worker must
// see; it refuses to know how the programs do it.
package conformance
