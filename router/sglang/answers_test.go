package sglang

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
)

// An engine's answer that cannot be read is an error on every control route,
// never a load or an engine of zeros.
func TestGarbageIsAnErrorOnEveryRoute(t *testing.T) {
	for claim, body := range map[string]string{
		"nothing": "", "html": "<html>busy</html>", "a cut answer": `{"loads":[{"num_running_reqs":`, "an array": "[]",
		"text": `"ok"`, "two answers": `{"loads":[{}]}{}`, "text for counts": `{"loads":[{"num_running_reqs":"3"}],` +
			`"max_total_num_tokens":"4","can_admit":"yes"}`,
	} {
		c := served(t, map[string]http.HandlerFunc{"/": text(body)})
		if l, err := c.Loads(t.Context()); err == nil {
			t.Errorf("%s is a load: %+v", claim, l)
		}
		if i, err := c.ServerInfo(t.Context()); err == nil {
			t.Errorf("%s is an engine: %+v", claim, i)
		}
		if a, err := c.AdmitDirectAppend(t.Context(), struct{}{}); err == nil {
			t.Errorf("%s is an admission: %+v", claim, a)
		}
		if n, err := c.CacheTokens(t.Context()); err == nil {
			t.Errorf("%s holds %d tokens", claim, n)
		}
	}
}

// Prometheus text as engines write it, and values that are no counts.
func TestCacheTokensOfOddMetrics(t *testing.T) {
	const evictable = "sglang:kv_evictable_tokens 1\n"
	for line, want := range map[string]int{
		"sglang:kv_used_tokens 5":                            6,
		"sglang:kv_used_tokens 0":                            1,
		"sglang:kv_used_tokens{} 5":                          6,
		`sglang:kv_used_tokens{a="x y",b="1"} 5 17`:          6,
		`sglang:kv_used_tokens{a="}"} 5.0`:                   6,
		`sglang:kv_used_tokens{a="sglang:kv_used"} 1e3`:      1001,
		"sglang:kv_used_tokens 5\nsglang:kv_used_tokens NaN": 6,
		"sglang:kv_used_tokens NaN":                          -1,
		"sglang:kv_used_tokens +Inf":                         -1,
		"sglang:kv_used_tokens -Inf":                         -1,
		"sglang:kv_used_tokens":                              -1,
		"sglang:kv_used_tokens five":                         -1,
		"# sglang:kv_used_tokens 5":                          -1,
		"sglang:kv_used_tokens_total 5":                      -1,
		"other:sglang:kv_used_tokens 5":                      -1,
	} {
		c := served(t, map[string]http.HandlerFunc{"/metrics": text(line + "\n" + evictable)})
		n, err := c.CacheTokens(t.Context())
		if want < 0 && err == nil || want >= 0 && (err != nil || n != want) {
			t.Errorf("%q: %d, %v, want %d", line, n, err, want)
		}
	}
}

// startup_time tells the process's start only when it can be one.
func TestStartedTakesOnlyUnixSeconds(t *testing.T) {
	for raw, ok := range map[string]bool{
		"1764000000": true, "1764000000.25": true, "1000000000": true, "37.2": false, "0": false, "-1764000000": false,
		"1764000000000": false, `"1764000000"`: false, "null": false, "": false, "[]": false,
	} {
		s := ServerInfo{StartupTime: []byte(raw)}
		if at, got := s.Started(); got != ok || got && (at.Year() < 2001 || at.Year() > 2100) {
			t.Errorf("startup_time %s: %v, %v, want %v", raw, at, got, ok)
		}
	}
}

// The key goes to the engine and nowhere else: no error repeats it.
func TestTheKeyIsSentAndNeverTold(t *testing.T) {
	const key = "sk-very-secret"
	for claim, h := range map[string]http.HandlerFunc{
		"401":     func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
		"garbage": text("<html>"),
		"abort":   func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		c := served(t, map[string]http.HandlerFunc{"/": func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer "+key {
				t.Errorf("%s: sent %q", claim, r.Header.Get("Authorization"))
			}
			h(w, r)
		}})
		c.Key = key
		if _, err := c.Loads(t.Context()); err == nil || strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", claim, err)
		}
	}
	open := served(t, map[string]http.HandlerFunc{"/": func(w http.ResponseWriter, r *http.Request) {
		if _, there := r.Header["Authorization"]; there {
			t.Error("an engine without a key is sent one")
		}
		_, _ = io.WriteString(w, `{"loads":[{}]}`)
	}})
	open.Key = ""
	if _, err := open.Loads(t.Context()); err != nil {
		t.Error(err)
	}
}

// A hanging engine ends a call at the caller's deadline.
func TestAHangingEngineEndsAtTheDeadline(t *testing.T) {
	c := served(t, map[string]http.HandlerFunc{"/": func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := c.Loads(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Loads = %v", err)
	}
}

// Only what proves local prefill is a yes: 200. A refusal is a no; all else is
// unknown, so an engine that is only starting is not taken for a stock one.
func TestProbeAnswersOnEverySurface(t *testing.T) {
	for _, r := range []block.Route{block.Chat, block.Completions, block.Generate} {
		for status, want := range map[int]string{200: "yes", 400: "no", 401: "unknown", 404: "unknown", 429: "unknown", 500: "unknown", 503: "unknown"} {
			answer := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
			c := served(t, map[string]http.HandlerFunc{Path(r): answer})
			ok, err := c.ProbeLocalPrefill(t.Context(), r, "m")
			got := map[bool]string{true: "yes", false: "no"}[ok]
			if err != nil {
				got = "unknown"
			}
			if got != want || ok && err != nil {
				t.Errorf("%s, status %d: %s, %v, want %s", r, status, got, err, want)
			}
		}
	}
}

// An idle engine has nothing in any queue: each one counts.
func TestIdleMeansEveryQueue(t *testing.T) {
	for claim, set := range map[string]func(*Load){
		"running": func(l *Load) { l.Running = 1 }, "waiting": func(l *Load) { l.Waiting = 1 },
		"bootstrap": func(l *Load) { l.Disaggregation.PrefillBootstrap = 1 },
		"inflight":  func(l *Load) { l.Disaggregation.PrefillInflight = 1 },
		"prealloc":  func(l *Load) { l.Disaggregation.DecodePrealloc = 1 },
		"transfer":  func(l *Load) { l.Disaggregation.DecodeTransfer = 1 },
	} {
		var l Load
		set(&l)
		if l.Idle() {
			t.Errorf("an engine with a request in %s is idle", claim)
		}
	}
}
