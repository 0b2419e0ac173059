// Package kvc holds the paper's three algorithms as values and plain functions.
//
// It decides which decode worker a turn is offered to (Route, Algorithm 1),
// whether a worker takes it and how it runs there (Ledger.Admit, Algorithm 2),
// and what is tried next, counted, reset and remembered (Dispatch, Algorithm 3).
// Every ruling on the paper's text is one named field of Params.
//
// It does no I/O and knows no clock, no network and no lock: time and beliefs
// come in as arguments, changes go out as Effects and Changes. Route refuses to
// know capacity; the Ledger refuses to know other workers.
package kvc
