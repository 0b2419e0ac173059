// Package arch holds the test of the dependency rule: an arrow between two
// packages points down, or it does not exist.
package arch
