package sglang

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net/http"
	"strconv"
)

// Load is one rank of GET /v1/loads (sglang-contract §4.3): counts of requests
// and tokens at one moment. It is served from shared memory, safe at 1 Hz.
type Load struct {
	DPRank                int     `json:"dp_rank"`
	Running               int     `json:"num_running_reqs"`
	Waiting               int     `json:"num_waiting_reqs"`
	WaitingUncachedTokens int     `json:"num_waiting_uncached_tokens"`
	UsedTokens            int     `json:"num_used_tokens"`
	TotalTokens           int     `json:"num_total_tokens"`
	MaxTotalTokens        int     `json:"max_total_num_tokens"`
	GenThroughput         float64 `json:"gen_throughput"` // tokens per second

	// Monotonic; 0 on engines that do not count them.
	PrefillUncachedTokens int64 `json:"total_prefill_uncached_tokens"`
	PrefillBusyUS         int64 `json:"total_prefill_busy_us"`

	Disaggregation struct {
		PrefillBootstrap int `json:"prefill_bootstrap_queue_reqs"`
		PrefillInflight  int `json:"prefill_inflight_queue_reqs"`
		DecodePrealloc   int `json:"decode_prealloc_queue_reqs"`
		DecodeTransfer   int `json:"decode_transfer_queue_reqs"`
	} `json:"disaggregation"`
}

// Idle reports that the engine holds no request in any queue.
func (l *Load) Idle() bool {
	return l.Running == 0 && l.Waiting == 0 && l.Transferring() == 0
}

// Transferring counts the requests between admission and the end of their KV transfer.
func (l *Load) Transferring() int {
	d := l.Disaggregation
	return d.PrefillBootstrap + d.PrefillInflight + d.DecodePrealloc + d.DecodeTransfer
}

// PrefillRate is uncached prompt tokens per busy second over the engine's life;
// 0 = not counted.
func (l *Load) PrefillRate() float64 {
	if l.PrefillBusyUS <= 0 {
		return 0
	}
	return float64(l.PrefillUncachedTokens) / (float64(l.PrefillBusyUS) / 1e6)
}

// Loads asks for the load of rank 0; version 1 refuses data-parallel attention.
func (c *Client) Loads(ctx context.Context) (*Load, error) {
	var body struct {
		Loads []Load `json:"loads"`
	}
	if err := c.call(ctx, http.MethodGet, "/v1/loads", nil, &body); err != nil {
		return nil, err
	}
	if len(body.Loads) == 0 {
		return nil, errors.New("engine /v1/loads: no rank in the answer")
	}
	return &body.Loads[0], nil
}

// CacheTokens is how many tokens the engine's KV cache holds, evictable ones
// included, which /v1/loads does not count. It needs --enable-metrics.
func (c *Client) CacheTokens(ctx context.Context) (int, error) {
	var text []byte
	if err := c.call(ctx, http.MethodGet, "/metrics", nil, &text); err != nil {
		return 0, err
	}
	used, ok := gauge(text, "sglang:kv_used_tokens")
	evictable, ok2 := gauge(text, "sglang:kv_evictable_tokens")
	if !ok || !ok2 {
		return 0, errors.New("engine /metrics: no sglang:kv_used_tokens or sglang:kv_evictable_tokens")
	}
	return int(used + evictable), nil
}

// gauge reads the largest value of one metric: ranks of one engine repeat it.
func gauge(text []byte, name string) (top float64, ok bool) {
	for line := range bytes.Lines(text) {
		rest, found := bytes.CutPrefix(line, []byte(name))
		if !found || len(rest) == 0 || rest[0] != '{' && rest[0] != ' ' {
			continue
		}
		fields := bytes.Fields(rest[bytes.LastIndexByte(rest, '}')+1:])
		if len(fields) == 0 {
			continue
		}
		v, err := strconv.ParseFloat(string(fields[0]), 64)
		if err == nil && !math.IsNaN(v) && !math.IsInf(v, 0) { // those are no counts
			top, ok = max(top, v), true
		}
	}
	return top, ok
}
