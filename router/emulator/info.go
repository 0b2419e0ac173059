package emulator

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
	"github.com/kvc-dev/kvc/router/sim"
)

// starting reports whether the engine still loads its model.
func (s *Server) starting() bool { return s.engine.clock() < s.cfg.StartupDelay }

// health is a real generation of one token, polled once a second, so that a
// healthy answer takes at least a second and a stuck scheduler fails it
// (contract §4.1).
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	if s.stopping.Load() || s.starting() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	if s.cfg.HealthNoGeneration && r.URL.Path == "/health" {
		w.WriteHeader(http.StatusOK)
		return
	}
	q := &sequence{
		rid: "HEALTH_CHECK_" + newRID(), tokens: []int32{0}, prompt: 1,
		sampling: sampling{maxNew: 1, ignoreEOS: true}, out: newOutbox(),
	}
	if s.cfg.Mode != ModeNull {
		q.boot = bootstrap{set: true, host: fakeHost}
	}
	before := s.output()
	s.engine.submit(q)
	defer s.engine.abort(q, abortFinish(0, "Aborted by AbortReq."))
	poll := s.cfg.real(s.cfg.HealthDelay)
	for waited := time.Duration(0); waited < s.cfg.real(s.cfg.HealthTimeout); waited += poll {
		if !sleep(r.Context(), poll) {
			return
		}
		if s.output() != before {
			w.WriteHeader(http.StatusOK)
			return
		}
	}
	w.WriteHeader(http.StatusServiceUnavailable)
}

// output is the count of everything the scheduler has put out.
func (s *Server) output() (n int64) {
	s.engine.read(func(c *core) { n = c.count.generatedTokens })
	return n
}

func (s *Server) modelCard() map[string]any {
	return map[string]any{
		"id": s.cfg.ServedModelName, "object": "model", "created": s.start.Unix(), "owned_by": "sglang",
		"root": s.cfg.ServedModelName, "parent": nil, "max_model_len": s.cfg.ContextLength,
	}
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"object": "list", "data": []any{s.modelCard()}})
}

func (s *Server) model(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if id == s.cfg.ServedModelName {
		writeJSON(w, http.StatusOK, s.modelCard())
		return
	}
	type body struct {
		Message string `json:"message"`
		Type    string `json:"type"`
		Param   string `json:"param"`
		Code    string `json:"code"`
	}
	msg := fmt.Sprintf("The model '%s' does not exist", id)
	writeJSON(w, http.StatusNotFound, map[string]body{
		"error": {msg, "invalid_request_error", "model", "model_not_found"},
	})
}

func (s *Server) modelInfo(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{
		"model_path": s.cfg.ModelPath, "served_model_name": s.cfg.ServedModelName, "tokenizer_path": s.cfg.ModelPath,
		"is_generation": true, "preferred_sampling_params": nil, "weight_version": "default", "load_format": "auto",
		"reasoning_parser": nil, "tool_call_parser": nil, "has_image_understanding": false,
		"has_audio_understanding": false, "model_type": "emulated", "architectures": []string{"KVCEmulatorForCausalLM"},
	})
}

// args is the launch record of /server_info: server arguments in snake case.
func (s *Server) args() map[string]any {
	c := &s.cfg
	args := map[string]any{}
	maps.Copy(args, c.Extra)
	maps.Copy(args, map[string]any{
		"model_path": c.ModelPath, "tokenizer_path": c.ModelPath, "served_model_name": c.ServedModelName,
		"host": c.Host, "port": c.Port, "tp_size": c.TPSize, "dp_size": 1, "pp_size": 1, "page_size": c.PageSize,
		"disaggregation_mode": c.Mode, "disaggregation_transfer_backend": c.TransferBackend,
		"disaggregation_bootstrap_port":                max(c.BootstrapPort, 0),
		"disaggregation_decode_enable_radix_cache":     c.DecodeRadix,
		"disaggregation_decode_enable_conditional_agg": c.ConditionalAgg,
		"num_reserved_decode_tokens":                   c.ReservedDecode,
		"kv_cache_dtype":                               c.KVCacheDtype,
		"context_length":                               c.ContextLength,
		"chunked_prefill_size":                         c.ChunkedPrefillSize,
		"max_running_requests":                         c.MaxRunning,
		"disable_radix_cache":                          s.engine.core.cfg.noRadix,
		"enable_metrics":                               c.EnableMetrics,
		"enable_cache_report":                          c.EnableCacheReport,
		"stream_interval":                              c.StreamInterval,
		"incremental_streaming_output":                 c.IncrementalStream,
		"load_balance_method":                          s.loadBalance(),
		"random_seed":                                  c.Seed,
		"enable_hierarchical_cache":                    c.HostCache != HostCache{},
		"hicache_size":                                 c.HostCache.GB,
		"emulator_gpu":                                 c.GPU,
		"emulator_time_scale":                          c.TimeScale,
	})
	if c.MaxTotalTokens > 0 {
		args["max_total_tokens"] = c.MaxTotalTokens
	}
	return args
}

func (s *Server) loadBalance() string {
	if s.cfg.Mode == ModePrefill {
		return "follow_bootstrap_room"
	}
	return "round_robin"
}

// serverInfo is the flat union of contract §4.2.
func (s *Server) serverInfo(w http.ResponseWriter, _ *http.Request) {
	st := s.stats()
	info := s.args()
	internal := s.args()
	maps.Copy(internal, map[string]any{
		"last_gen_throughput": st.throughput,
		"memory_usage": map[string]any{
			"weight": 0, "kvcache": st.kvGB, "startup_available": 0, "token_capacity": st.capacity,
			"token_capacity_swa": nil, "graph": map[string]any{},
		},
		"effective_max_running_requests_per_dp": s.cfg.MaxRunning,
	})
	maps.Copy(info, map[string]any{
		"status": "ready", "max_total_num_tokens": st.capacity, "max_req_input_len": s.maxInput(),
		"startup_time": s.cfg.StartupDelay.Seconds(), "internal_states": []any{internal}, "version": Version,
		"kv_events": nil,
	})
	writeJSON(w, http.StatusOK, info)
}

func (s *Server) maxInput() int {
	return min(s.cfg.ContextLength, s.engine.core.kv.Capacity()) - 1
}

// stats is a snapshot of the engine for its info routes.
type stats struct {
	counters
	running, waiting, uncached               int
	used, total, active, capacity, evictable int
	free                                     int
	bootstrap, inflight, prealloc            int
	transfer, retracted                      int
	kvGB                                     float64
	evicted                                  int64
	hostUsed, hostTotal                      int
}

func (s *Server) stats() (st stats) {
	s.engine.read(func(c *core) {
		st.counters = c.count
		st.running, st.waiting = len(c.running), len(c.waiting)
		if c.partial != nil {
			st.running++
		}
		st.used, st.capacity, st.evictable = c.kv.Held(), c.kv.Capacity(), c.kv.Evictable()
		st.free, st.evicted = c.kv.Free(), c.kv.Evicted()
		st.bootstrap, st.prealloc, st.retracted = len(c.bootstrapping), len(c.prealloc), len(c.retracted)
		st.kvGB = float64(c.kv.Capacity()) * c.cfg.cost.KVBytesPerToken / 1e9
		if c.host != nil {
			st.hostUsed, st.hostTotal = c.host.Used(), c.host.Capacity()
		}
		awaiting := 0
		st.total = st.used
		for q := range c.seqs {
			switch q.state {
			case stateTransfer:
				st.transfer++
				awaiting += len(q.tokens)
			case stateInflight:
				st.inflight++
			case stateWaiting, stateBootstrap:
				n := len(q.tokens) - c.kv.Peek(q.tokens)
				st.uncached += n
				st.total += len(q.tokens)
			case statePrealloc, stateRetracted:
				st.total += len(q.tokens)
			}
		}
		st.active = st.total - awaiting
	})
	return st
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

func (st *stats) hitRate() float64 {
	return ratio(float64(st.cachedTokens), float64(st.promptTokens))
}

// sections of /v1/loads.
func sections() []string {
	return []string{"core", "memory", "spec", "lora", "disagg", "queues", "all"}
}

// loads is the sidecar's source (contract §4.3).
func (s *Server) loads(w http.ResponseWriter, r *http.Request) {
	include := strings.Split(r.URL.Query().Get("include"), ",")
	if include[0] == "" {
		include = []string{"all"}
	}
	for _, name := range include {
		if !slices.Contains(sections(), name) {
			writeFlat(w, http.StatusBadRequest, "BadRequest", fmt.Sprintf(
				"Invalid include section: '%s'. Valid options: %s", name, strings.Join(sections(), ", ")))
			return
		}
	}
	if rank := r.URL.Query().Get("dp_rank"); rank != "" && rank != "0" {
		writeFlat(w, http.StatusBadRequest, "BadRequest", fmt.Sprintf("dp_rank %s is out of range [0, 1)", rank))
		return
	}
	want := func(name string) bool { return slices.Contains(include, name) || slices.Contains(include, "all") }
	st := s.stats()
	load := s.coreLoad(&st)
	if want("memory") {
		load["memory"] = map[string]any{"weight_gb": 0, "kv_cache_gb": st.kvGB, "graph_gb": 0, "token_capacity": st.capacity}
	}
	if want("disagg") {
		load["disaggregation"] = s.disaggLoad(&st)
	}
	if want("queues") {
		load["queues"] = map[string]any{
			"waiting": st.waiting, "grammar": 0, "paused": 0, "retracted": st.retracted, "prealloc_ready": 0,
		}
	}
	preset, _ := sim.PresetOf(s.cfg.GPU)
	writeJSON(w, http.StatusOK, map[string]any{
		"timestamp": time.Now().UTC().Format("2006-01-02T15:04:05.000000+00:00"), "version": Version,
		"accelerator": preset.Accelerator, "num_accelerators": s.cfg.TPSize, "loads": []any{load},
	})
}

func (s *Server) coreLoad(st *stats) map[string]any {
	usage := ratio(float64(st.used), float64(st.capacity))
	return map[string]any{
		"timestamp": float64(time.Now().UnixMicro()) / 1e6, "dp_rank": 0,
		"num_running_reqs": st.running, "num_waiting_reqs": st.waiting + st.bootstrap + st.prealloc + st.retracted,
		"num_waiting_uncached_tokens": st.uncached,
		"num_used_tokens":             st.used, "num_total_tokens": st.total, "num_active_tokens": st.active,
		"max_total_num_tokens": st.capacity, "max_running_requests": s.cfg.MaxRunning,
		"token_usage": usage, "gen_throughput": st.throughput, "cache_hit_rate": st.hitRate(), "utilization": usage,
		"total_prefill_uncached_tokens": st.uncachedTokens, "total_prefill_busy_us": st.busyTime.Microseconds(),
		"decode_moments": nil,
	}
}

func (s *Server) disaggLoad(st *stats) map[string]any {
	preset, _ := sim.PresetOf(s.cfg.GPU)
	seconds := st.lastTransfer.Seconds()
	return map[string]any{
		"mode": s.cfg.Mode, "prefill_bootstrap_queue_reqs": st.bootstrap, "prefill_inflight_queue_reqs": st.inflight,
		"decode_prealloc_queue_reqs": st.prealloc, "decode_transfer_queue_reqs": st.transfer,
		"decode_retracted_queue_reqs": st.retracted,
		"kv_transfer_speed_gb_s":      ratio(float64(st.lastTokens)*preset.Cost.KVBytesPerToken/1e9, seconds),
		"kv_transfer_latency_ms":      seconds * 1e3,
	}
}

// getLoad is the deprecated form.
func (s *Server) getLoad(w http.ResponseWriter, _ *http.Request) {
	st := s.stats()
	waiting := st.waiting + st.bootstrap + st.prealloc + st.retracted
	writeJSON(w, http.StatusOK, []any{map[string]any{
		"dp_rank": 0, "num_reqs": st.running + waiting, "num_waiting_reqs": waiting, "num_tokens": st.total,
		"num_pending_tokens": st.total - st.used, "ts_tic": time.Since(s.start).Seconds(),
	}})
}

// tokenize serves a prompt, a list of them, or messages (contract §4.5).
func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) {
	body, err := readAll(http.MaxBytesReader(w, r.Body, maxBody), r.ContentLength)
	if err != nil {
		writeFlat(w, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	b, err := scan.Parse(body, scan.Limits{})
	if err != nil {
		writeFlat(w, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	prompt, hasPrompt := b.Get("prompt")
	_, hasMessages := b.Get("messages")
	if hasPrompt == hasMessages {
		writeFlat(w, http.StatusBadRequest, "BadRequest", "Exactly one of 'prompt' or 'messages' must be provided.")
		return
	}
	var lists [][]int32
	many := false
	if hasMessages {
		lists, err = chatPrompt(b)
	} else {
		lists, many, err = tokenizePrompt(prompt.Raw)
	}
	if err != nil {
		writeFlat(w, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	if !many {
		writeJSON(w, http.StatusOK, map[string]any{
			"tokens": lists[0], "count": len(lists[0]), "max_model_len": s.cfg.ContextLength,
		})
		return
	}
	counts := make([]int, len(lists))
	for i, l := range lists {
		counts[i] = len(l)
	}
	writeJSON(w, http.StatusOK, map[string]any{"tokens": lists, "count": counts, "max_model_len": s.cfg.ContextLength})
}

func tokenizePrompt(raw []byte) (lists [][]int32, many bool, err error) {
	if raw[0] == '"' {
		return [][]int32{textIDs(raw)}, false, nil
	}
	if raw[0] != '[' {
		return nil, false, badf("prompt: Input should be a string or a list of strings")
	}
	for it := scan.Iterate(raw); it.Next(); {
		if it.Value()[0] != '"' {
			return nil, false, badf("prompt: Input should be a string or a list of strings")
		}
		lists = append(lists, textIDs(it.Value()))
	}
	return lists, true, nil
}

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Tokens json.RawMessage `json:"tokens"`
		Skip   *bool           `json:"skip_special_tokens"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(&body); err != nil {
		writeFlat(w, http.StatusBadRequest, "BadRequest", err.Error())
		return
	}
	skip := body.Skip == nil || *body.Skip
	var one []int32
	if json.Unmarshal(body.Tokens, &one) == nil {
		writeJSON(w, http.StatusOK, map[string]any{"text": detokenized(one, skip)})
		return
	}
	var many [][]int32
	if err := json.Unmarshal(body.Tokens, &many); err != nil {
		writeFlat(w, http.StatusBadRequest, "BadRequest", "tokens: Input should be a list of integers or of such lists")
		return
	}
	texts := make([]string, len(many))
	for i, ids := range many {
		texts[i] = detokenized(ids, skip)
	}
	writeJSON(w, http.StatusOK, map[string]any{"text": texts})
}

func detokenized(ids []int32, skip bool) string {
	if skip {
		return tokensText(ids)
	}
	var b []byte
	for _, id := range ids {
		if isSpecial(id) {
			b = append(b, specialText(id)...)
		} else {
			b = appendText(b, id)
		}
	}
	return string(b)
}

// flushCache empties the cache of an idle engine (contract §4.5).
func (s *Server) flushCache(w http.ResponseWriter, r *http.Request) {
	patience, err := strconv.ParseFloat(r.URL.Query().Get("timeout"), 64)
	if err != nil {
		patience = 0
	}
	deadline := time.Now().Add(time.Duration(patience * float64(time.Second)))
	for {
		ok := false
		s.engine.do(func(c *core) { ok = c.flush() })
		if ok {
			plain(w, http.StatusOK, "Cache flushed.\nPlease check backend logs for more details. "+
				"(When there are running or waiting requests, the operation will not be performed.)\n")
			return
		}
		if !time.Now().Before(deadline) || !sleep(r.Context(), 10*time.Millisecond) {
			plain(w, http.StatusBadRequest, "Flush cache failed.\nPlease check backend logs for more details.\n")
			return
		}
	}
}

// abortRequest aborts by rid prefix; an empty rid is ignored (contract §4.5).
func (s *Server) abortRequest(w http.ResponseWriter, r *http.Request) {
	var body struct {
		RID      string `json:"rid"`
		AbortAll bool   `json:"abort_all"`
	}
	if !decodeSmall(w, r, &body) {
		return
	}
	s.engine.abortPrefix(body.RID, body.AbortAll)
	w.WriteHeader(http.StatusOK)
}
