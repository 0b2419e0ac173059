package emulator

import "time"

// counters are an engine's totals since its start.
type counters struct {
	requests, aborted               int64
	promptTokens, cachedTokens      int64
	uncachedTokens, generatedTokens int64
	retractions, loadedBack         int64
	bootstrapFailed, transferFailed int64
	busyTime                        time.Duration

	transferTokens int64
	lastTransfer   time.Duration
	lastTokens     int

	window      time.Duration // start of the current throughput window
	windowCount int
	throughput  float64 // tokens per emulated second, last full window
}

func (k *counters) busy(d time.Duration) { k.busyTime += d }
func (k *counters) prefilled(n int)      { k.uncachedTokens += int64(n) }

func (k *counters) prompt(s *sequence) {
	k.promptTokens += int64(s.prompt)
	k.cachedTokens += int64(s.cached)
}

func (k *counters) transfer(tokens int, took time.Duration) {
	k.transferTokens += int64(tokens)
	k.lastTokens, k.lastTransfer = tokens, took
}

// generated counts one token and closes the window once a second has passed.
func (k *counters) generated(now time.Duration) {
	k.generatedTokens++
	k.windowCount++
	if passed := now - k.window; passed >= time.Second {
		k.throughput = float64(k.windowCount) / passed.Seconds()
		k.window, k.windowCount = now, 0
	}
}
