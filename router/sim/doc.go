// Package sim owns the one cost model: how long a worker takes to prefill, to
// decode a step and to move KV. The emulator spends these durations on the
// wall clock.
//
// It decides durations from token counts. It refuses to know requests, caches,
// clocks and sockets.
package sim
