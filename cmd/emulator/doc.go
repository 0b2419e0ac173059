// Command emulator stands in for an SGLang engine where there is no GPU. It
// decides which launch flags it takes, and refuses those that SGLang does not
// have; what the engine does is router/emulator's.
package main
