//go:build race

package replays

// raced: the race detector makes everything ten times slower, prompts of 500 KB
// too; time scales do not know that.
const raced = true
