// Package replay sends a workload to an OpenAI-compatible server the way its
// clients would, and reports what they saw.
//
// The loop is closed: a session sends its next turn after the previous answer
// and its think time. The package decides when a turn is sent and what counts
// as a failure (everything that is not a whole answer; nothing is dropped). It
// refuses to know how the server works: modes, workers and reasons are read
// from response headers and are "unknown" where there are none.
package replay
