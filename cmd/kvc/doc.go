// Command kvc is the person's tool: it runs a pool on this machine (up), sends
// it a workload (bench), shows both at once (demo) and asks why (explain). It
// wires and prints; it refuses to know how pods run (controllers/local), how
// turns are sent (router/replay) and how workers are chosen (router/kvc).
package main
