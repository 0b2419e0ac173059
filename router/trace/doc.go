// Package trace holds recorded and generated workloads of language-model
// sessions: loaders for every published schema we read, a seeded generator of
// coding-agent sessions, and the conversation that turns a record of token
// counts and block ids into the messages of a chat request.
//
// It decides what a client says and how long it thinks. It refuses to know who
// answers, over which protocol, and what time it is: records come from an
// io.Reader, randomness from a source handed in, answers from the caller.
package trace
