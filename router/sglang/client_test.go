package sglang

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/block"
)

// served is an engine that answers with scripted bodies by path.
func served(t *testing.T, answers map[string]http.HandlerFunc) *Client {
	t.Helper()
	mux := http.NewServeMux()
	for path, h := range answers {
		mux.HandleFunc(path, h)
	}
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return &Client{Base: srv.URL, Key: "k", HTTP: srv.Client()}
}

func text(s string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
}

func TestServerInfo(t *testing.T) {
	// sglang-contract §4.2: server arguments, nulls included, and scheduler facts.
	const body = `{"model_path":"Qwen/Qwen3-32B","served_model_name":null,"tp_size":2,"dp_size":1,"page_size":64,
		"disaggregation_mode":"decode","disaggregation_decode_enable_radix_cache":true,"enable_cache_report":true,
		"max_running_requests":null,"status":"ready","max_total_num_tokens":412345,"startup_time":37.251,
		"internal_states":[{"memory_usage":{}}],"version":"0.5.23","kv_events":null}`
	c := served(t, map[string]http.HandlerFunc{"/server_info": func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer k" {
			w.WriteHeader(http.StatusUnauthorized)
		}
		_, _ = io.WriteString(w, body)
	}})
	i, err := c.ServerInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if i.Model() != "Qwen/Qwen3-32B" || i.MaxTotalTokens != 412345 || i.PageSize != 64 || i.Mode != "decode" ||
		!i.DecodeRadixCache || !i.CacheReport || i.ConditionalAgg || i.Version != "0.5.23" {
		t.Errorf("info %+v", i)
	}
	if _, ok := i.Started(); ok {
		t.Error("a duration was taken for a start time")
	}
}

func TestServerInfoFallsBackToTheOldName(t *testing.T) {
	c := served(t, map[string]http.HandlerFunc{"/get_server_info": text(`{"served_model_name":"m","startup_time":1764000000.5}`)})
	i, err := c.ServerInfo(t.Context())
	if err != nil || i.Model() != "m" {
		t.Fatalf("info %+v, %v", i, err)
	}
	if at, ok := i.Started(); !ok || at.UnixMilli() != 1764000000500 {
		t.Errorf("Started = %v, %t", at, ok)
	}
}

func TestLoads(t *testing.T) {
	// sglang-contract §4.3.
	const body = `{"timestamp":"2026-08-22T10:00:00.000000+00:00","version":"0.5.18","loads":[{"dp_rank":0,"num_running_reqs":3,
		"num_waiting_reqs":1,"num_waiting_uncached_tokens":7,"num_used_tokens":18231,"num_total_tokens":20231,
		"max_total_num_tokens":412345,"gen_throughput":512.3,"total_prefill_uncached_tokens":5000,"total_prefill_busy_us":2000000,
		"decode_moments":null,"disaggregation":{"mode":"decode","prefill_bootstrap_queue_reqs":0,"prefill_inflight_queue_reqs":1,
		"decode_prealloc_queue_reqs":2,"decode_transfer_queue_reqs":3}}]}`
	c := served(t, map[string]http.HandlerFunc{"/v1/loads": text(body)})
	l, err := c.Loads(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if l.Running != 3 || l.Waiting != 1 || l.WaitingUncachedTokens != 7 ||
		l.UsedTokens != 18231 || l.Transferring() != 6 ||
		l.PrefillRate() != 2500 || l.Idle() {
		t.Errorf("load %+v", l)
	}
	if (&Load{}).PrefillRate() != 0 || !(&Load{}).Idle() {
		t.Error("an engine that counts nothing has a rate, or is not idle")
	}
	empty := served(t, map[string]http.HandlerFunc{"/v1/loads": text(`{"loads":[]}`)})
	if _, err := empty.Loads(t.Context()); err == nil {
		t.Error("no rank is no load")
	}
}

func TestCacheTokens(t *testing.T) {
	const metrics = "# HELP sglang:kv_used_tokens x\n# TYPE sglang:kv_used_tokens gauge\n" +
		"sglang:kv_used_tokens{model_name=\"a}b\",tp_rank=\"0\"} 100.0\nsglang:kv_used_tokens{model_name=\"a}b\",tp_rank=\"1\"} 100.0\n" +
		"sglang:kv_used_tokens_other 7\nsglang:kv_evictable_tokens 2.5e3 1764000000\n"
	c := served(t, map[string]http.HandlerFunc{"/metrics": text(metrics)})
	if n, err := c.CacheTokens(t.Context()); err != nil || n != 2600 {
		t.Errorf("CacheTokens = %d, %v; want 2600", n, err)
	}
	c = served(t, map[string]http.HandlerFunc{"/metrics": text("sglang:kv_used_tokens 1\n")})
	if _, err := c.CacheTokens(t.Context()); err == nil {
		t.Error("half the sum was taken for the sum")
	}
}

func TestAbortNamesOneRequest(t *testing.T) {
	var got string
	c := served(t, map[string]http.HandlerFunc{"POST /abort_request": func(_ http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		got = string(b)
	}})
	if err := c.Abort(t.Context(), "kvc-1"); err != nil || got != `{"rid":"kvc-1"}` {
		t.Errorf("Abort sent %s, %v", got, err)
	}
	if err := c.Abort(t.Context(), ""); err == nil {
		t.Error("an empty rid is a prefix of every rid")
	}
}

func TestProbeLocalPrefill(t *testing.T) {
	for name, tc := range map[string]struct {
		status int
		want   bool
		fails  bool
	}{
		"200 means it can":          {200, true, false},
		"400 means it cannot":       {400, false, false},
		"500 means nothing":         {500, false, true},
		"401 means a wrong key":     {401, false, true},
		"404 means a wrong surface": {404, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range []block.Route{block.Chat, block.Completions, block.Generate} {
				var sent map[string]any
				c := served(t, map[string]http.HandlerFunc{Path(r): func(w http.ResponseWriter, req *http.Request) {
					if err := json.NewDecoder(req.Body).Decode(&sent); err != nil {
						t.Error(err)
					}
					w.WriteHeader(tc.status)
				}})
				ok, err := c.ProbeLocalPrefill(t.Context(), r, "m")
				if ok != tc.want || (err != nil) != tc.fails {
					t.Errorf("%s: %t, %v", r, ok, err)
				}
				if _, room := sent["bootstrap_room"]; sent["do_local_prefill"] != true || room {
					t.Errorf("%s: sent %v, want do_local_prefill and no room", r, sent)
				}
			}
		})
	}
}

// The contract's own probe, byte for byte in meaning (§2.6).
func TestProbeGenerateBody(t *testing.T) {
	var sent any
	c := served(t, map[string]http.HandlerFunc{"/generate": func(_ http.ResponseWriter, r *http.Request) {
		if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
			t.Error(err)
		}
	}})
	if _, err := c.ProbeLocalPrefill(t.Context(), block.Generate, "m"); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"input_ids": []any{1.0}, "sampling_params": map[string]any{"max_new_tokens": 1.0}, "do_local_prefill": true}
	if d := cmp.Diff(any(want), sent); d != "" {
		t.Errorf("probe (-want +got):\n%s", d)
	}
}

func TestProbeNativeAdmission(t *testing.T) {
	for status, want := range map[int]bool{200: true, 400: true, 422: true, 404: false, 405: false} {
		c := served(t, map[string]http.HandlerFunc{"/admit_direct_append": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "{}")
		}})
		if ok, err := c.ProbeNativeAdmission(t.Context()); ok != want || err != nil {
			t.Errorf("status %d: %t, %v; want %t", status, ok, err, want)
		}
	}
	c := served(t, map[string]http.HandlerFunc{"/admit_direct_append": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }})
	if _, err := c.ProbeNativeAdmission(t.Context()); err == nil {
		t.Error("503 proves nothing, so it is an error")
	}
}

func TestErrorsAreBoundedAndTyped(t *testing.T) {
	c := served(t, map[string]http.HandlerFunc{"/health": func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, strings.Repeat("\xff", 10000))
	}})
	err := c.Health(t.Context())
	var api *APIError
	if !errors.As(err, &api) || api.Status != 503 || len(api.Body) > 2048 || !Refused(err, 503) || Refused(err, 500) {
		t.Errorf("Health = %v", err)
	}
	gone := &Client{Base: "http://127.0.0.1:1"}
	if err := gone.Health(t.Context()); err == nil || Refused(err, 503) {
		t.Errorf("a closed port: %v", err)
	}
}

func TestConnWatchSeesANewConnection(t *testing.T) {
	c := served(t, map[string]http.HandlerFunc{"/v1/loads": text(`{"loads":[{}]}`)})
	fresh := 0
	ctx := WithConnWatch(context.Background(), func() { fresh++ })
	for range 3 {
		if _, err := c.Loads(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if fresh != 1 {
		t.Errorf("fresh = %d after three calls on one connection, want 1", fresh)
	}
	c.HTTP.CloseIdleConnections()
	if _, err := c.Loads(ctx); err != nil || fresh != 2 {
		t.Errorf("fresh = %d, %v; want 2 after the connection went", fresh, err)
	}
}

func TestRouteOf(t *testing.T) {
	for _, r := range []block.Route{block.Chat, block.Completions, block.Generate} {
		if got, ok := RouteOf(Path(r)); got != r || !ok {
			t.Errorf("RouteOf(Path(%s)) = %s, %t", r, got, ok)
		}
	}
	if _, ok := RouteOf("/v1/embeddings"); ok {
		t.Error("another path has a route")
	}
}

func FuzzServerInfo(f *testing.F) {
	f.Add([]byte(`{"startup_time":1764000000.5,"served_model_name":"m"}`))
	f.Add([]byte(`{"startup_time":"x","page_size":1e400}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var s ServerInfo
		if json.Unmarshal(b, &s) != nil {
			return
		}
		if at, ok := s.Started(); ok && at.IsZero() {
			t.Fatal("a start at the zero time")
		}
	})
}

func FuzzGauge(f *testing.F) {
	f.Add([]byte("a{x=\"}\"} 1\na 2\n"))
	f.Fuzz(func(_ *testing.T, b []byte) { gauge(b, "a") })
}
