// Command router is the front of a pool: OpenAI-compatible HTTP in, the right
// worker out. It wires flags, files, ports and signals; router/proxy does the
// work.
package main
