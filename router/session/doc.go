// Package session says whose turn a request is: headers, body fields,
// continuation.
//
// It decides which of the ids that agents send is the session's, in a
// configured order, and turns it into the key of wire.md §0. It refuses to know
// workers, pins and time, and it keeps no table: what a hostile client sends
// costs at most one hash.
package session
