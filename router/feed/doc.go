// Package feed is one worker's residency, load and drain state as a stream
// (wire.md §4): the frames, the server beside a worker, and the follower in a
// router.
//
// It decides whether a follower's picture can be trusted: no gap, no rollback,
// one epoch, one block format, a frame at least every three seconds. What the
// picture is good for is not its business: it knows no ledger, no score and no
// fleet.
package feed
