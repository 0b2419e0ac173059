// Command crdtrim makes generated CRDs small enough for a client-side apply.
//
// A pod template costs 300 kB of descriptions, three times in a pool, and the
// annotation that kubectl apply writes may hold 262,144 bytes. Below every field
// named template this strips the descriptions and, because a pool's template is
// merged over what the operator renders and need not be complete, the required
// lists, except for the keys by which lists are merged. It also bounds the two
// lists and the map of a template that CEL rules walk: the API server refuses
// rules whose cost has no bound.
//
//	crdtrim config/crd/bases
package main
