// Package emulator is an SGLang look-alike that needs no accelerator: the same
// routes, bodies, errors and rendezvous between prefill and decode workers, with
// a real prefix cache and a cost model in place of the model. Its authority is
// docs/sglang-contract.md; comments cite its sections as "contract §2.3".
//
// It decides when a token appears, what is cached and what an engine would
// answer. It refuses to know routers, sidecars and sessions of KVC: it must stay
// a stand-in for the engine and nothing more.
//
// # Inside
//
// core is the scheduler as a machine without clocks or I/O: it is told the
// emulated time and says when it wants to be called next. Engine runs it on the
// wall clock, divided by the time scale. peers.go and bootstrap.go carry the
// rendezvous between workers over HTTP; the rest turns bodies into sequences and
// tokens into answers.
package emulator
