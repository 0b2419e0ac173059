// Package fleet says which workers are alive, from a watch or a file, as a
// sorted list.
//
// It decides whether a fleet description is usable and in which order its
// workers stand (by name, so that equal fleets give equal ties in Route). It
// refuses to know how healthy, loaded or warm a worker is: that is the feed's
// and the breakers' business.
package fleet
