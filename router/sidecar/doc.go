// Package sidecar stands beside one engine and owns the truth about it: what is
// resident, who is admitted, which leases are out, whether it serves or drains
// (wire.md §1–6). It reads every turn of its engine, puts the question to the
// ledger of router/kvc, splices into the body what the mode needs, streams the
// answer through and tells followers what changed.
//
// It decides nothing of Algorithm 2 itself and refuses to know other workers,
// routing, clients and prompts: a body is bytes, read once for its hashes.
//
// Locks: one mutex (book.mu) serialises the ledger, the fallback queue, the
// state and the order of feed frames. Nothing that can block is called under it.
package sidecar
