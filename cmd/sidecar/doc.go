// Command sidecar stands beside one engine: it admits, splices, streams and
// keeps the ledger (router/sidecar). Its identity comes from the environment
// (docs/wire.md §8), which is what a pod template can fill in.
package main
