// Package replays sends recorded sessions through the real router, real
// sidecars and real emulators over loopback sockets, and checks that nothing is
// lost on the way: no turn fails, and every decode engine reads exactly the
// bytes the client sent, apart from the members that sidecars splice. The
// traces are not part of the repository; without them the tests are skipped.
package replays
