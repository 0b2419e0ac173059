// Package scan finds and splices top-level JSON members without decoding the
// body.
//
// It decides one thing: whether bytes are one JSON object, and where the
// members of that object stand. Edits copy the client's bytes around the
// changed spans, so everything else arrives at the engine as it was sent (R19,
// R20): member order, number spelling, white space and escapes.
//
// It refuses to know what any member means. It also does not judge text:
// invalid UTF-8 inside a string is accepted and relayed, because the engine's
// own answer to it is the one the client should see, and a lone surrogate
// escape reads as U+FFFD.
package scan
