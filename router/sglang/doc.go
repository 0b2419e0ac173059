// Package sglang speaks SGLang's external contract (docs/sglang-contract.md):
// splitting and observing an engine's event stream, and a client for what a
// sidecar asks of its engine: who it is, how loaded, what it can do, to abort.
//
// It knows how SGLang spells things and nothing of what is done with them: no
// ledger, no routing, no wire of ours.
package sglang
