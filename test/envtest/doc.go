// Package envtest runs the API against a real API server: what is refused at
// apply and with which words, what is defaulted, what kubectl shows. The specs
// are in the test files; kit starts the server for them and for other suites.
//
// It does not know what the controllers do with an accepted object.
package envtest
