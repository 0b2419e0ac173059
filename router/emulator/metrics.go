package emulator

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// collector reads the engine's state on every scrape, under SGLang's names
// (contract §4.4).
type collector struct {
	s       *Server
	metrics []metric
}

type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	get  func(*stats) float64
}

func newMetrics(s *Server) http.Handler {
	kind := map[Mode]string{ModeNull: "unified", ModePrefill: "prefill", ModeDecode: "decode"}[s.cfg.Mode]
	labels := prometheus.Labels{
		"model_name": s.cfg.ServedModelName, "engine_type": kind, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0",
	}
	c := &collector{s: s}
	add := func(name string, kind prometheus.ValueType, get func(*stats) float64) {
		c.metrics = append(c.metrics, metric{prometheus.NewDesc("sglang:"+name, name, nil, labels), kind, get})
	}
	gauge := func(name string, get func(*stats) float64) { add(name, prometheus.GaugeValue, get) }
	counter := func(name string, get func(*stats) float64) { add(name, prometheus.CounterValue, get) }
	addGauges(s, gauge)
	counter("prompt_tokens_total", func(st *stats) float64 { return float64(st.promptTokens) })
	counter("generation_tokens_total", func(st *stats) float64 { return float64(st.generatedTokens) })
	counter("cached_tokens_total", func(st *stats) float64 { return float64(st.cachedTokens) })
	counter("num_requests_total", func(st *stats) float64 { return float64(st.requests) })
	counter("num_aborted_requests_total", func(st *stats) float64 { return float64(st.aborted) })
	counter("num_bootstrap_failed_reqs_total", func(st *stats) float64 { return float64(st.bootstrapFailed) })
	counter("num_transfer_failed_reqs_total", func(st *stats) float64 { return float64(st.transferFailed) })
	counter("load_back_tokens_total", func(st *stats) float64 { return float64(st.loadedBack) })
	counter("evicted_tokens_total", func(st *stats) float64 { return float64(st.evicted) })

	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(c)
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
}

func addGauges(s *Server, gauge func(string, func(*stats) float64)) {
	of := func(get func(*stats) int) func(*stats) float64 {
		return func(st *stats) float64 { return float64(get(st)) }
	}
	usage := func(st *stats) float64 { return ratio(float64(st.used), float64(st.capacity)) }
	gauge("num_running_reqs", of(func(st *stats) int { return st.running }))
	gauge("num_queue_reqs", of(func(st *stats) int { return st.waiting }))
	gauge("gen_throughput", func(st *stats) float64 { return st.throughput })
	gauge("cache_hit_rate", (*stats).hitRate)
	gauge("token_usage", usage)
	gauge("full_token_usage", usage)
	gauge("utilization", usage)
	gauge("num_used_tokens", of(func(st *stats) int { return st.used }))
	gauge("kv_used_tokens", of(func(st *stats) int { return st.used }))
	gauge("kv_available_tokens", of(func(st *stats) int { return st.free }))
	gauge("kv_evictable_tokens", of(func(st *stats) int { return st.evictable }))
	gauge("num_retracted_reqs", of(func(st *stats) int { return st.retracted }))
	gauge("num_paused_reqs", func(*stats) float64 { return 0 })
	gauge("num_prefill_bootstrap_queue_reqs", of(func(st *stats) int { return st.bootstrap }))
	gauge("num_prefill_inflight_queue_reqs", of(func(st *stats) int { return st.inflight }))
	gauge("num_decode_prealloc_queue_reqs", of(func(st *stats) int { return st.prealloc }))
	gauge("num_decode_transfer_queue_reqs", of(func(st *stats) int { return st.transfer }))
	gauge("max_total_num_tokens", of(func(st *stats) int { return st.capacity }))
	gauge("page_size", func(*stats) float64 { return float64(s.cfg.PageSize) })
	gauge("num_pages", of(func(st *stats) int { return st.capacity / s.cfg.PageSize }))
	gauge("hicache_host_used_tokens", of(func(st *stats) int { return st.hostUsed }))
	gauge("hicache_host_total_tokens", of(func(st *stats) int { return st.hostTotal }))
	gauge("context_len", func(*stats) float64 { return float64(s.cfg.ContextLength) })
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	st := c.s.stats()
	for _, m := range c.metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.get(&st))
	}
}
