// Package kit is the test kit of the router cases: mock workers with exact
// scripts, mock sidecars that speak docs/wire.md, a raw-socket client, and the
// real router and sidecars wired to them over real sockets as cmd/router and
// cmd/sidecar wire them.
//
// It decides what a worker does wrong and when; it refuses to know what is
// right: that is the test's. Every Pool checks at its end that no gauge is left
// up, no lease is out and no goroutine runs on.
package kit
