package emulator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const turnBody = `{"rid":"t","text":"tell me a story that is long enough","sampling_params":{"max_new_tokens":5,"ignore_eos":true}}`

// longPrompt is a prompt of n tokens as a JSON list.
func longPrompt(n int) string {
	return strings.TrimSuffix(strings.Repeat("7,", n), ",")
}

// slow is a pair whose transfers and steps take long in real time.
func slowPair(t *testing.T) pd {
	return bootPair(t, Config{TimeScale: 1}, Config{TimeScale: 1})
}

// transferring waits until the decode side waits for KV.
func (x pd) transferring(t *testing.T) {
	t.Helper()
	eventually(t, "the decode side waits for KV", func() bool { st := x.d.stats(); return st.transfer == 1 })
	eventually(t, "the prefill side has been joined", func() bool {
		st := x.p.stats()
		return st.running+st.waiting+st.inflight == 1
	})
}

func TestManyPairsAtOnce(t *testing.T) {
	x := bootPair(t, Config{MaxTotalTokens: 3000}, Config{MaxTotalTokens: 1500, DecodeRadix: true})
	answers := make(chan error)
	for i := range 40 {
		go func() {
			body := x.room(fmt.Sprintf(`{"text":"session %d says %s","sampling_params":{"max_new_tokens":20,"ignore_eos":true}}`,
				i%8, strings.Repeat("more words ", i*5)), uint64(i+1))
			p, d := x.both("/generate", body)
			if p.status != http.StatusOK || d.status != http.StatusOK || !strings.Contains(d.body, `"completion_tokens":20`) {
				answers <- fmt.Errorf("turn %d: prefill %v, decode %v", i, p, d)
				return
			}
			answers <- nil
		}()
	}
	for range 40 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	x.p.idle()
	x.d.idle()
}

func TestADeadPrefillWorkerIsNoticedByHeartbeat(t *testing.T) {
	x := slowPair(t)
	body := x.room(`{"rid":"t","input_ids":[`+longPrompt(50_000)+`]}`, 1)
	go x.p.post("/generate", body)
	answer := make(chan reply, 1)
	go func() { answer <- x.d.post("/generate", body) }()
	x.transferring(t)
	x.p.kill()
	(<-answer).want(t, http.StatusInternalServerError, "Decode transfer failed for request rank=0 decode_req.req.rid='t'",
		"KVTransferError(bootstrap_room=1): Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:")
	x.d.idle()
}

func TestARestartedPrefillWorkerIsFoundAgain(t *testing.T) {
	x := bootPair(t, Config{}, Config{})
	port := x.p.BootstrapPort()
	if _, d := x.both("/generate", x.room(turnBody, 1)); d.status != http.StatusOK {
		t.Fatalf("before: %+v", d)
	}
	x.p.kill()
	eventually(t, "the dead worker is forgotten", func() bool {
		x.d.peers.mu.Lock()
		defer x.d.peers.mu.Unlock()
		return len(x.d.peers.known) == 0
	})
	x.p = boot(t, Config{Mode: ModePrefill, BootstrapPort: port, TimeScale: 100})
	if _, d := x.both("/generate", x.room(turnBody, 2)); d.status != http.StatusOK {
		t.Errorf("after the restart: %+v", d)
	}
}

func TestADeadDecodeWorkerFailsThePrefillAtTransfer(t *testing.T) {
	x := slowPair(t)
	body := x.room(`{"rid":"t","input_ids":[`+longPrompt(30_000)+`]}`, 1)
	answer := make(chan reply, 1)
	go func() { answer <- x.p.post("/generate", body) }()
	go x.d.post("/generate", body)
	x.transferring(t)
	x.d.kill()
	(<-answer).want(t, http.StatusInternalServerError, "Prefill transfer failed for request rank=0 req.rid='t'",
		"KVTransferError(bootstrap_room=1)")
	x.p.idle()
}

func TestADecodeClientThatHangsUpAbortsTheRoom(t *testing.T) {
	x := slowPair(t)
	body := x.room(`{"rid":"t","input_ids":[`+longPrompt(50_000)+`]}`, 1)
	answer := make(chan reply, 1)
	go func() { answer <- x.p.post("/generate", body) }()
	ctx, hangUp := context.WithCancel(t.Context())
	gone := make(chan reply, 1)
	go func() { gone <- x.d.do(ctx, http.MethodPost, "/generate", body) }()
	x.transferring(t)
	hangUp()
	if r := <-gone; !errors.Is(r.err, context.Canceled) {
		t.Fatalf("the hung-up request ended with %+v", r)
	}
	(<-answer).want(t, http.StatusInternalServerError, "Prefill transfer failed")
	x.d.idle()
	x.p.idle()
}

func TestAPrefillClientThatHangsUpLeavesTheDecodeSideWaiting(t *testing.T) {
	x := bootPair(t, Config{TimeScale: 1}, Config{TimeScale: 1, WaitingTimeout: 300 * time.Millisecond})
	body := x.room(`{"rid":"t","input_ids":[`+longPrompt(50_000)+`]}`, 1)
	ctx, hangUp := context.WithCancel(t.Context())
	go x.p.do(ctx, http.MethodPost, "/generate", body)
	answer := make(chan reply, 1)
	go func() { answer <- x.d.post("/generate", body) }()
	x.transferring(t)
	hangUp()
	x.p.idle()
	if st := x.d.stats(); st.transfer != 1 {
		t.Errorf("the decode side heard of the abort")
	}
	(<-answer).want(t, http.StatusInternalServerError, "timed out after 0.3s in KVPoll.WaitingForInput")
	x.d.idle()
}

func TestADuplicateRoomFailsOnlyTheSecond(t *testing.T) {
	x := slowPair(t)
	body := x.room(`{"rid":"first","input_ids":[`+longPrompt(30_000)+`],"sampling_params":{"max_new_tokens":2}}`, 7)
	first := make(chan [2]reply, 1)
	go func() { p, d := x.both("/generate", body); first <- [2]reply{p, d} }()
	x.transferring(t)
	p, d := x.both("/generate", x.room(turnBody, 7))
	p.want(t, http.StatusInternalServerError, "bootstrap_room 7 is already in use")
	d.want(t, http.StatusInternalServerError, "bootstrap_room 7 is already in use")
	for _, r := range <-first {
		r.want(t, http.StatusOK, `"id":"first"`)
	}
	x.p.idle()
	x.d.idle()
}

func TestADuplicateRoomCrashesWhenToldTo(t *testing.T) {
	x := bootPair(t, Config{TimeScale: 1, Crash: true}, Config{TimeScale: 1, Crash: true})
	body := x.room(`{"input_ids":[`+longPrompt(50_000)+`]}`, 7)
	answer := make(chan reply, 1)
	go func() { answer <- x.d.post("/generate", body) }()
	go x.p.post("/generate", body)
	x.transferring(t)
	go x.d.post("/generate", body)
	err := <-x.d.done
	x.d.ended.Store(true)
	x.d.client.CloseIdleConnections()
	if crash, ok := errors.AsType[*errCrash](err); !ok || !strings.Contains(crash.why, "bootstrap_room 7") {
		t.Errorf("Run returned %v, want the scheduler's death over room 7", err)
	}
	if r := <-answer; r.err == nil {
		t.Errorf("the first turn was answered by a dead engine: %+v", r)
	}
	x.p.kill()
}

func TestAMismatchedPairNeverTalks(t *testing.T) {
	cases := map[string]struct {
		d    Config
		want string
	}{
		"page sizes must agree": {Config{PageSize: 32}, "Page size mismatch"},
		"dtypes must agree":     {Config{PageSize: 64, KVCacheDtype: "fp8_e4m3"}, "KV cache dtype mismatch"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			x := bootPair(t, Config{PageSize: 64, BootstrapTimeout: 100 * time.Millisecond}, tc.d)
			p, d := x.both("/generate", x.room(turnBody, 1))
			d.want(t, http.StatusInternalServerError, "Decode handshake failed", tc.want)
			p.want(t, http.StatusInternalServerError, "Prefill bootstrap failed")
			x.d.idle()
			x.p.idle()
		})
	}
}

func TestEitherSideMayComeFirst(t *testing.T) {
	x := bootPair(t, Config{}, Config{})
	body := x.room(turnBody, 1)
	answer := make(chan reply, 1)
	go func() { answer <- x.d.post("/generate", body) }()
	eventually(t, "the decode side waits for KV", func() bool { st := x.d.stats(); return st.transfer == 1 })
	x.p.post("/generate", body).want(t, http.StatusOK)
	(<-answer).want(t, http.StatusOK)

	body = x.room(turnBody, 2)
	go func() { answer <- x.p.post("/generate", body) }()
	eventually(t, "the prefill side waits for its room", func() bool { st := x.p.stats(); return st.bootstrap == 1 })
	x.d.post("/generate", body).want(t, http.StatusOK)
	(<-answer).want(t, http.StatusOK)
}

func TestAHungUpStreamFreesItsKV(t *testing.T) {
	n := boot(t, Config{})
	first, rest, hangUp := n.stream("/v1/chat/completions",
		`{"messages":[{"role":"user","content":"go on for long"}],"max_tokens":10000,"ignore_eos":true,"stream":true}`)
	if !strings.HasPrefix(first, "data: ") {
		t.Fatalf("first bytes %q", first)
	}
	if st := n.stats(); st.running != 1 || st.used == 0 {
		t.Errorf("running %d, used %d in mid-stream", st.running, st.used)
	}
	hangUp()
	n.idle()
	_, _ = io.Copy(io.Discard, rest) // ends with the cancelled request
}

func TestAbortRequestEndsAStream(t *testing.T) {
	n := boot(t, Config{})
	_, rest, hangUp := n.stream("/generate",
		`{"rid":"kvc-1","text":"go on","sampling_params":{"max_new_tokens":10000,"ignore_eos":true},"stream":true}`)
	defer hangUp()
	n.post("/abort_request", `{"rid":"kvc-"}`).want(t, http.StatusOK)
	body, err := io.ReadAll(rest)
	if err != nil {
		t.Fatal(err)
	}
	data := events(string(body))
	if len(data) < 2 || data[len(data)-1] != "[DONE]" ||
		!strings.Contains(data[len(data)-2], `"finish_reason":{"type":"abort","message":"Aborted by AbortReq.","status_code":null`) {
		t.Errorf("the stream ended with %v", data[max(0, len(data)-2):])
	}
	n.idle()
}

func TestSIGTERMDrains(t *testing.T) {
	var still atomic.Int64 // where the clock stands still, 0 = it runs
	n := bootWith(t, Config{}, func(s *Server) {
		runs := s.engine.clock
		s.engine.clock = func() time.Duration {
			if at := still.Load(); at != 0 {
				return time.Duration(at)
			}
			return runs()
		}
	})
	t.Cleanup(n.kill)
	_, rest, hangUp := n.stream("/v1/chat/completions",
		`{"messages":[{"role":"user","content":"hi"}],"max_tokens":3000,"ignore_eos":true,"stream":true}`)
	defer hangUp()
	still.Store(int64(n.engine.clock())) // until the drain has been seen
	n.stop()
	eventually(t, "health says 503", func() bool { return n.get("/health").status == http.StatusServiceUnavailable })
	still.Store(int64(time.Hour))
	body, err := io.ReadAll(rest)
	if err != nil {
		t.Fatalf("the stream in flight was cut: %v", err)
	}
	if data := events(string(body)); data[len(data)-1] != "[DONE]" {
		t.Errorf("the stream in flight ended with %q", data[len(data)-1])
	}
	if err := <-n.done; err != nil {
		t.Errorf("Run = %v, want nil after a drain", err)
	}
	n.ended.Store(true)
	n.client.CloseIdleConnections()
}

func TestHealthFailsWhenTheSchedulerIsStuck(t *testing.T) {
	n := boot(t, Config{
		TimeScale: 1, ChunkedPrefillSize: -1, HealthDelay: time.Millisecond, HealthTimeout: 50 * time.Millisecond,
	})
	ctx, hangUp := context.WithCancel(t.Context())
	defer hangUp()
	done := make(chan struct{})
	go func() {
		n.do(ctx, http.MethodPost, "/generate", `{"input_ids":[`+longPrompt(60_000)+`]}`)
		close(done)
	}()
	eventually(t, "a long pass runs", func() (busy bool) {
		n.engine.read(func(c *core) { busy = c.step.busy })
		return busy
	})
	if r := n.get("/health"); r.status != http.StatusServiceUnavailable {
		t.Errorf("status %d under a pass of two seconds, want 503 after the timeout", r.status)
	}
	hangUp()
	<-done
}

func TestHealthTakesAtLeastItsDelay(t *testing.T) {
	start := time.Now()
	n := boot(t, Config{TimeScale: 20, StartupDelay: time.Second})
	eventually(t, "the engine has started", func() bool { return n.get("/health").status == http.StatusOK })
	if took := time.Since(start); took < 100*time.Millisecond {
		t.Errorf("healthy after %v, want start-up and the second of /health: 100 ms at scale 20", took)
	}
}

func TestPortInUseIsNamed(t *testing.T) {
	n := boot(t, Config{})
	_, err := New(Config{ModelPath: "m", Port: n.cfg.Port}, n.log)
	if err == nil || !strings.Contains(err.Error(), "--port") || !strings.Contains(err.Error(), "in use") {
		t.Errorf("New on a taken port: %v, want an error that names --port", err)
	}
}

func TestConfigRefuses(t *testing.T) {
	cases := map[string]struct {
		cfg  Config
		want string
	}{
		"no model":                  {Config{}, "--model-path"},
		"an unknown mode":           {Config{ModelPath: "m", Mode: "both"}, "--disaggregation-mode"},
		"an unknown backend":        {Config{ModelPath: "m", TransferBackend: "carrier-pigeon"}, "--disaggregation-transfer-backend"},
		"fake transfers on prefill": {Config{ModelPath: "m", Mode: ModePrefill, TransferBackend: "fake"}, "fake"},
		"radix with fake transfers": {Config{ModelPath: "m", Mode: ModeDecode, TransferBackend: "fake", DecodeRadix: true}, "radix"},
		"an unknown GPU":            {Config{ModelPath: "m", GPU: "abacus"}, "--gpu"},
		"a stopped clock":           {Config{ModelPath: "m", TimeScale: 0.001}, "--time-scale"},
		"a negative page":           {Config{ModelPath: "m", PageSize: -1}, "--page-size"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if err := tc.cfg.complete(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one that names %s", err, tc.want)
			}
		})
	}
}

func TestMetricsHaveSGLangsNames(t *testing.T) {
	n := boot(t, Config{EnableMetrics: true, Mode: ModeDecode, ConditionalAgg: true})
	n.post("/generate", `{"text":"hello there","do_local_prefill":true,"sampling_params":{"max_new_tokens":4,"ignore_eos":true}}`).
		want(t, http.StatusOK)
	r := n.get("/metrics")
	r.want(t, http.StatusOK)
	for _, name := range []string{
		"num_running_reqs", "num_queue_reqs", "gen_throughput", "cache_hit_rate", "token_usage", "full_token_usage",
		"num_used_tokens", "kv_available_tokens", "kv_evictable_tokens", "kv_used_tokens", "num_retracted_reqs",
		"num_paused_reqs", "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs",
		"num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "utilization", "max_total_num_tokens",
		"page_size", "num_pages", "context_len", "prompt_tokens_total", "generation_tokens_total",
		"cached_tokens_total", "num_requests_total", "num_aborted_requests_total", "num_bootstrap_failed_reqs_total",
		"num_transfer_failed_reqs_total", "evicted_tokens_total",
	} {
		if !strings.Contains(r.body, "\nsglang:"+name+"{") {
			t.Errorf("sglang:%s is missing", name)
		}
	}
	for _, want := range []string{`engine_type="decode"`, `model_name="m"`, `sglang:generation_tokens_total{engine_type="decode"`} {
		if !strings.Contains(r.body, want) {
			t.Errorf("no %s in /metrics", want)
		}
	}
}

func TestEqualSeedsGiveEqualText(t *testing.T) {
	text := func(seed uint64) string {
		n := boot(t, Config{Seed: seed, TimeScale: 100})
		return n.post("/generate", `{"text":"hello","sampling_params":{"max_new_tokens":8,"ignore_eos":true}}`).body
	}
	a, b, c := text(1), text(1), text(2)
	cut := func(s string) string { head, _, _ := strings.Cut(s, `"meta_info"`); return head }
	if cut(a) != cut(b) || cut(a) == cut(c) {
		t.Errorf("seeds 1, 1, 2 gave\n%s\n%s\n%s", cut(a), cut(b), cut(c))
	}
}

func TestASlowLinkSlowsTransfers(t *testing.T) {
	latency := func(slowdown float64) time.Duration {
		c := Config{ModelPath: "m", Mode: ModePrefill, TransferSlowdown: slowdown}
		if err := c.complete(); err != nil {
			t.Fatal(err)
		}
		k := c.core()
		return k.cost.Transfer(50_000, k.link) - k.link.Latency
	}
	if got, want := latency(10), 10*latency(1); (got - want).Abs() > time.Millisecond {
		t.Errorf("a link ten times slower takes %v, want %v", got, want)
	}
}

// Several answers share one stream; each is whole, whatever the interleaving.
func TestStreamsOfManyAnswers(t *testing.T) {
	cases := map[string]struct{ path, body, index string }{
		"a batch on generate": {"/generate",
			`{"text":["one","two","three"],"stream":true,"sampling_params":{"max_new_tokens":5,"ignore_eos":true}}`, `"index":%d}`},
		"n on chat": {"/v1/chat/completions",
			`{"messages":[{"role":"user","content":"x"}],"n":3,"stream":true,"max_tokens":5,"ignore_eos":true}`, `[{"index":%d,`},
		"a batch on completions": {"/v1/completions",
			`{"prompt":["one","two","three"],"stream":true,"max_tokens":5,"ignore_eos":true}`, `[{"index":%d,`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			r := boot(t, Config{TimeScale: 20}).post(tc.path, tc.body)
			r.want(t, http.StatusOK)
			data := events(r.body)
			if data[len(data)-1] != "[DONE]" || strings.Count(r.body, "[DONE]") != 1 {
				t.Fatalf("the stream ends with %q", data[len(data)-1])
			}
			for i := range 3 {
				ends := 0
				for _, d := range data {
					ours := strings.Contains(d, fmt.Sprintf(tc.index, i))
					if ours && (strings.Contains(d, `"finish_reason":"length"`) || strings.Contains(d, `{"type":"length","length":5}`)) {
						ends++
					}
				}
				if ends != 1 {
					t.Errorf("answer %d ended %d times", i, ends)
				}
			}
		})
	}
}

func TestFlushWaitsForItsTimeout(t *testing.T) {
	n := boot(t, Config{TimeScale: 2})
	_, rest, hangUp := n.stream("/generate",
		`{"text":"go on","sampling_params":{"max_new_tokens":20,"ignore_eos":true},"stream":true}`)
	defer hangUp()
	if r := n.post("/flush_cache", ""); r.status != http.StatusBadRequest {
		t.Errorf("flushed a busy engine: %+v", r)
	}
	if r := n.post("/flush_cache?timeout=30", ""); r.status != http.StatusOK {
		t.Errorf("flush with patience: %+v", r)
	}
	_, _ = io.Copy(io.Discard, rest) // finished before the flush
}

func TestFastTokensLeaveInGroups(t *testing.T) {
	n := boot(t, Config{TimeScale: 200})
	r := n.post("/v1/completions", `{"prompt":"x","max_tokens":1000,"ignore_eos":true,"stream":true}`)
	r.want(t, http.StatusOK, `"finish_reason":"length"`)
	chunks := len(events(r.body)) - 1
	// A step is 0.1 ms of real time, a tick 2 ms.
	if chunks > 200 {
		t.Errorf("%d chunks for 1000 tokens at 0.1 ms each, want groups of about 20", chunks)
	}
	var all []string
	for _, d := range events(r.body) {
		if _, text, ok := strings.Cut(d, `"text":"`); ok {
			text, _, _ = strings.Cut(text, `"`)
			all = append(all, text)
		}
	}
	if words := strings.Fields(strings.Join(all, "")); len(words) != 1000 {
		t.Errorf("%d words arrived, want 1000", len(words))
	}
}
