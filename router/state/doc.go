// Package state is the router's beliefs under concurrency: which worker holds
// which blocks and sessions, what is in flight, who refused whom. It implements
// kvc.View for one request at a time and applies what kvc.Dispatch decides.
//
// It decides nothing itself, does no I/O, and stores nothing that the workers'
// feeds cannot rebuild. It refuses to know capacity: that is the worker's to
// say. A belief that is missing, capped or untrusted makes a worse choice,
// never an error.
//
// Two locks: the block index has its own, sharded, so that a snapshot of a
// million blocks never stops a decision; everything else is under one mutex,
// held for microseconds, in which a worker is selected and reserved at once.
package state
