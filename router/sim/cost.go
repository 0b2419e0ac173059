package sim

import "time"

// Cost is the cost model of one worker: one engine instance on one kind of
// accelerator serving one model. Durations are emulated time, unscaled.
type Cost struct {
	// PrefillBase (a) is paid once per forward pass that contains prefill.
	PrefillBase time.Duration
	// PrefillPerToken (b) is nanoseconds per uncached token: the linear layers.
	PrefillPerToken float64
	// PrefillPerPair (c) is nanoseconds per uncached token and token of context
	// that it attends to.
	PrefillPerPair float64

	// DecodeBase is one decode step: reading the weights.
	DecodeBase time.Duration
	// DecodePerSeq is what each running sequence adds to a step.
	DecodePerSeq time.Duration

	// KVBytesPerToken sizes transfers.
	KVBytesPerToken float64
}

// Prefill returns the time of one forward pass over n uncached tokens behind
// ctx cached ones: a + b·n + c·n·(ctx + n/2). The n/2 is the mean context that
// the new tokens are to each other, so that cutting a prompt into chunks costs
// only one more PrefillBase per chunk. No tokens take no time.
func (c Cost) Prefill(n, ctx int) time.Duration {
	if n <= 0 {
		return 0
	}
	return c.PrefillBase + c.PrefillWork(n, ctx)
}

// PrefillWork is Prefill without the fixed part: what one sequence adds to a
// pass that already runs.
func (c Cost) PrefillWork(n, ctx int) time.Duration {
	if n <= 0 {
		return 0
	}
	tokens, context := float64(n), float64(ctx)+float64(n)/2
	return time.Duration(c.PrefillPerToken*tokens + c.PrefillPerPair*tokens*context)
}

// DecodeStep returns the time of one decode step of batch sequences; an empty
// batch takes no time.
func (c Cost) DecodeStep(batch int) time.Duration {
	if batch <= 0 {
		return 0
	}
	return c.DecodeBase + time.Duration(batch)*c.DecodePerSeq
}

// Link is the fabric between a prefill and a decode worker.
type Link struct {
	Name           string
	Latency        time.Duration // per transfer, whatever its size
	BytesPerSecond float64
}

// Transfer returns the time to move the KV of tokens over l.
func (c Cost) Transfer(tokens int, l Link) time.Duration {
	if tokens <= 0 || l.BytesPerSecond <= 0 {
		return l.Latency
	}
	seconds := float64(tokens) * c.KVBytesPerToken / l.BytesPerSecond
	return l.Latency + time.Duration(seconds*float64(time.Second))
}
