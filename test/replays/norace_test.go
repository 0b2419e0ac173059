//go:build !race

package replays

const raced = false
