// Package kvc holds Algorithms 1–3 (Route, Admit, Dispatch) and the worker's
// ledger. It decides; it does no I/O and knows no clock.
package kvc
