package emulator

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"
)

// load is what a sidecar reads of /v1/loads (contract §4.3).
type load struct {
	Running   int     `json:"num_running_reqs"`
	Waiting   int     `json:"num_waiting_reqs"`
	Uncached  int     `json:"num_waiting_uncached_tokens"`
	Used      int     `json:"num_used_tokens"`
	Total     int     `json:"num_total_tokens"`
	Active    int     `json:"num_active_tokens"`
	Capacity  int     `json:"max_total_num_tokens"`
	Usage     float64 `json:"token_usage"`
	Prefilled int     `json:"total_prefill_uncached_tokens"`
	Disagg    struct {
		Mode      string `json:"mode"`
		Bootstrap int    `json:"prefill_bootstrap_queue_reqs"`
		Inflight  int    `json:"prefill_inflight_queue_reqs"`
		Prealloc  int    `json:"decode_prealloc_queue_reqs"`
		Transfer  int    `json:"decode_transfer_queue_reqs"`
		Retracted int    `json:"decode_retracted_queue_reqs"`
	} `json:"disaggregation"`
	Queues struct {
		Waiting int `json:"waiting"`
	} `json:"queues"`
}

func (n *node) load() load {
	n.t.Helper()
	r := n.get("/v1/loads")
	r.want(n.t, http.StatusOK)
	var body struct {
		Loads []load `json:"loads"`
	}
	if err := json.Unmarshal([]byte(r.body), &body); err != nil || len(body.Loads) != 1 {
		n.t.Fatalf("loads: %v in %s", err, r.body)
	}
	return body.Loads[0]
}

func TestLoadsOfAPairInMidTransfer(t *testing.T) {
	x := slowPair(t)
	done := make(chan struct{}, 3)
	send := func(n *node, body string) {
		go func() { n.post("/generate", body); done <- struct{}{} }()
	}
	body := x.room(`{"input_ids":[`+longPrompt(50_000)+`]}`, 1)
	send(x.p, body)
	send(x.d, body)
	x.transferring(t)

	d := x.d.load()
	if d.Disagg.Mode != "decode" || d.Disagg.Transfer != 1 || d.Used != 50_000 || d.Active != d.Total-50_000 {
		t.Errorf("decode side: %+v, want one transfer whose 50,000 tokens are used but not active", d)
	}
	// A turn whose decode side never comes waits in the bootstrap queue.
	send(x.p, x.room(`{"rid":"lonely","input_ids":[`+longPrompt(1_000)+`]}`, 2))
	eventually(t, "the lonely turn waits", func() bool { return x.p.load().Disagg.Bootstrap == 1 })
	if p := x.p.load(); p.Disagg.Mode != "prefill" || p.Waiting != 1 || p.Running+p.Disagg.Inflight != 1 || p.Uncached != 1_000 {
		t.Errorf("prefill side: %+v", p)
	}
	x.p.post("/abort_request", `{"abort_all":true}`).want(t, http.StatusOK)
	x.d.post("/abort_request", `{"abort_all":true}`).want(t, http.StatusOK)
	for range 3 {
		<-done
	}
	x.p.idle()
	x.d.idle()
}

func TestLoadsAtRestAndAtWork(t *testing.T) {
	n := boot(t, Config{TimeScale: 1, MaxTotalTokens: 9_500})
	rest := n.load()
	if rest.Used != 0 || rest.Total != 0 || rest.Usage != 0 || rest.Capacity != 9_500 {
		t.Errorf("at rest: %+v", rest)
	}
	_, body, hangUp := n.stream("/generate",
		`{"input_ids":[`+longPrompt(4_000)+`],"stream":true,"sampling_params":{"max_new_tokens":5000,"ignore_eos":true}}`)
	defer body.Close()
	defer hangUp()
	busy := n.load()
	if busy.Running != 1 || busy.Used < 4_000 || busy.Usage < 0.4 || busy.Usage > 0.6 || busy.Prefilled != 4_000 {
		t.Errorf("at work: %+v", busy)
	}
	second := make(chan struct{})
	go func() { n.post("/generate", `{"rid":"q","input_ids":[`+longPrompt(9_000)+`]}`); close(second) }()
	eventually(t, "the second turn waits for KV", func() bool { return n.load().Queues.Waiting == 1 })
	// Its first 4,000 ids are resident already.
	if w := n.load(); w.Waiting != 1 || w.Uncached < 4_900 || w.Uncached > 5_000 || w.Total < w.Used+9_000 {
		t.Errorf("with a queue: %+v", w)
	}
	hangUp()
	<-second
	n.idle()
	after := n.load()
	if after.Used != 0 || after.Usage != 0 {
		t.Errorf("cached KV counts as used: %+v", after)
	}
}

func TestDPRankEntriesExpire(t *testing.T) {
	g := newRegistry()
	g.rooms[1] = dpRank{rank: 3, at: time.Now().Add(-dpRankLife - time.Second)}
	g.rooms[2] = dpRank{rank: 4, at: time.Now()}
	ask := func() string {
		r := recorded(g, http.MethodPost, "/query_dp_ranks", `{"bootstrap_rooms":[1,2]}`)
		return r.body
	}
	if got := ask(); got != `{"2":4}` {
		t.Errorf("answered %s, want only the entry that has not expired", got)
	}
	recorded(g, http.MethodPost, "/register_dp_rank", `{"bootstrap_room":5,"dp_rank":0}`)
	if _, left := g.rooms[1]; left {
		t.Error("an expired entry is kept for ever")
	}
}
