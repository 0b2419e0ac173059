// Package proxy is the router's HTTP front: it reads a turn, drives
// kvc.Dispatch over HTTP, runs the prefill and decode legs and streams the
// answer through.
//
// It decides how a turn meets the network: what of a request travels on, when
// a failed leg may be tried again, what a client is told. It refuses to know
// which worker a turn should go to (router/kvc decides), whether a worker has
// room (the worker decides), and what an answer says: bytes pass unchanged, and
// reading them is for accounting only.
//
// One turn in order, a file each: read (body.go), understand (parse.go), place
// (turn.go), ask (ask.go), run the legs (legs.go), relay (relay.go). Refusals
// and in-band errors are errors.go's, header rules are header.go's, and all
// connections to workers are outbound.go's.
package proxy
