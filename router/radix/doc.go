// Package radix is the block-level KV cache of one worker: a prefix tree over
// token ids in whole pages, with locks, least-recently-used eviction of leaves
// and exact token accounting.
//
// It decides what is resident and what is evicted. It refuses to know requests,
// sessions, time (recency is the order of calls) and how long anything takes.
// It is not safe for concurrent use: its owner is one engine loop.
package radix
