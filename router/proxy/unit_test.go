package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sony/gobreaker/v2"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// R52: rooms are unique among live attempts, in range, and free again after use.
func TestRoomsAreUnique(t *testing.T) {
	var r rooms
	var mu sync.Mutex
	live := map[int64]bool{}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 500 {
				room := r.take()
				mu.Lock()
				if room < 1 || live[room] {
					t.Errorf("room %d: out of range or taken", room)
				}
				live[room] = true
				mu.Unlock()
				if room%3 == 0 {
					mu.Lock()
					delete(live, room)
					mu.Unlock()
					r.free(room)
				}
			}
		})
	}
	wg.Wait()
	if len(r.live) != len(live) {
		t.Errorf("%d rooms live, want %d", len(r.live), len(live))
	}
	for room := range live {
		r.free(room)
	}
	if len(r.live) != 0 {
		t.Errorf("%d rooms left", len(r.live))
	}
}

func TestAttemptIDs(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := newAttemptID()
		if len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" || seen[id] {
			t.Fatalf("attempt id %q: want 32 new hex digits", id)
		}
		seen[id] = true
	}
}

// R64, against a model: a session is held back exactly while a turn of it that
// the router left has not ended.
func TestRunningTurnsAgainstAModel(t *testing.T) {
	type model struct {
		session kvc.SessionKey
		left    bool
	}
	rapid.Check(t, func(t *rapid.T) {
		var r runningTurns
		want := map[string]*model{}
		ids := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		sessions := rapid.SampledFrom([]kvc.SessionKey{"", "s1", "s2"})
		waiting := map[kvc.SessionKey][]<-chan struct{}{}
		t.Repeat(map[string]func(*rapid.T){
			"start": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				if want[id] != nil {
					t.Skip("attempt ids are new")
				}
				s := sessions.Draw(t, "session")
				r.start(id, s)
				want[id] = &model{session: s}
			},
			"end": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				r.end(id)
				delete(want, id)
			},
			"leave": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				r.leave(id, time.Hour)
				if m := want[id]; m != nil {
					m.left = true
					if m.session == "" {
						delete(want, id) // nobody could wait for it
					}
				}
			},
			"reset": func(*rapid.T) {
				r.reset()
				for id, m := range want {
					if m.left {
						delete(want, id)
					}
				}
			},
			"": func(t *rapid.T) {
				for _, s := range []kvc.SessionKey{"s1", "s2"} {
					held := false
					for _, m := range want {
						held = held || m.left && m.session == s
					}
					c := r.cancelled(s)
					if (c != nil) != held {
						t.Fatalf("session %s held back: %t, want %t", s, c != nil, held)
					}
					if c != nil {
						waiting[s] = append(waiting[s], c)
					}
					if !held { // whoever waited was let go
						for _, c := range waiting[s] {
							select {
							case <-c:
							default:
								t.Fatalf("session %s is free, but a wait goes on", s)
							}
						}
						waiting[s] = nil
					}
				}
				if r.cancelled("") != nil {
					t.Fatal("a sessionless turn was held back")
				}
				if len(r.m) != len(want) {
					t.Fatalf("%d turns remembered, want %d", len(r.m), len(want))
				}
			},
		})
	})
}

func TestALeftTurnIsForgottenAfterItsLimit(t *testing.T) {
	var r runningTurns
	r.start("a", "s")
	r.leave("a", 10*time.Millisecond)
	c := r.cancelled("s")
	if c == nil {
		t.Fatal("the session is not held back")
	}
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatal("the limit passed without an end")
	}
	if r.cancelled("s") != nil {
		t.Error("the session is still held back")
	}
}

// R67: a breaker opens on consecutive faults only, lets one probe through, and
// does not count what is neutral.
func TestBreaker(t *testing.T) {
	states := make(chan string, 16)
	b := newBreaker(3, 30*time.Millisecond, func(to gobreaker.State) { states <- to.String() })
	fail := func(err error) {
		t.Helper()
		done, ok := b.allow()
		if !ok {
			t.Fatal("the breaker is open too early")
		}
		done(err)
	}
	boom := errors.New("boom")
	for range 10 {
		fail(errNeutral)
	}
	fail(boom)
	fail(boom)
	fail(nil)
	fail(boom)
	fail(boom)
	if b.String() != "closed" {
		t.Fatalf("breaker %s after two faults in a row, want closed", b)
	}
	fail(boom)
	if _, ok := b.allow(); ok || b.String() != "open" {
		t.Fatalf("breaker %s after three faults in a row, want open", b)
	}
	for end := time.Now().Add(patience); b.String() != "half-open" && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	probe, ok := b.allow()
	if !ok {
		t.Fatal("no probe after the pause")
	}
	if _, ok := b.allow(); ok {
		t.Error("a second probe beside the first")
	}
	probe(nil)
	if b.String() != "closed" {
		t.Errorf("breaker %s after a good probe, want closed", b)
	}
	if got := []string{<-states, <-states, <-states}; !slices.Equal(got, []string{"open", "half-open", "closed"}) {
		t.Errorf("told %v", got)
	}
}

// The classification of answers, one by one: what the client gets, whether it is
// tried again, and what the breaker learns.
func TestAnswerFaults(t *testing.T) {
	const sidecar, engine = admission.OriginSidecar, admission.OriginEngine
	cases := map[string]struct {
		code    int
		origin  string
		body    string
		header  map[string]string
		prefill bool

		retry, outcome string
		neutral        bool
		status         int // what the client gets
		reason         string
	}{
		"an engine's 400 is the client's":      {code: 400, origin: engine, outcome: "upstream_refused", neutral: true, status: 400},
		"an engine's 429 too":                  {code: 429, origin: engine, outcome: "upstream_refused", neutral: true, status: 429},
		"a redirect is not followed":           {code: 302, origin: engine, outcome: "upstream_refused", neutral: true, status: 302},
		"an engine's 500 is tried again":       {code: 500, origin: engine, retry: "decode_5xx", outcome: "upstream_error", status: 500},
		"an engine's 503 too":                  {code: 503, origin: engine, retry: "decode_5xx", outcome: "upstream_error", status: 503},
		"without an origin it is the engine's": {code: 503, retry: "decode_5xx", outcome: "upstream_error", status: 503},
		"401 is our own fault":                 {code: 401, origin: engine, outcome: "upstream_error", neutral: true, status: 502, reason: reasonWorkerAuth},
		"403 too, from a sidecar":              {code: 403, origin: sidecar, outcome: "upstream_error", neutral: true, status: 502, reason: reasonWorkerAuth},
		"an expired lease is asked anew": {code: 409, origin: sidecar, body: `{"reason":"lease-expired"}`,
			retry: "lease_expired", outcome: "upstream_error", neutral: true, status: 429},
		"a stale epoch is told apart": {code: 409, origin: sidecar, body: `{"reason":"stale-epoch"}`,
			retry: "stale_epoch", outcome: "upstream_error", neutral: true, status: 429},
		"an engine's 409 is the client's": {code: 409, origin: engine, outcome: "upstream_refused", neutral: true, status: 409},
		"no place in the queue ends the turn": {code: 503, origin: sidecar, header: map[string]string{"Retry-After": "7"},
			outcome: "contended", neutral: true, status: 429, reason: reasonContended},
		"a draining worker is passed over": {code: 503, origin: sidecar, header: map[string]string{admission.HeaderReason: "draining"},
			retry: "decode_5xx", outcome: "upstream_error", neutral: true, status: 503},
		"a sidecar's 400 is our bug":   {code: 400, origin: sidecar, retry: "decode_5xx", outcome: "upstream_error", neutral: true, status: 502},
		"a sidecar's 502 is a fault":   {code: 502, origin: sidecar, retry: "decode_5xx", outcome: "upstream_error", status: 502},
		"prefill: 400 is the client's": {code: 400, origin: engine, prefill: true, outcome: "prefill_error", neutral: true, status: 400},
		"prefill: 500 is tried again":  {code: 500, origin: engine, prefill: true, retry: "prefill", outcome: "prefill_error", status: 500},
		"prefill: 409 finds another":   {code: 409, origin: sidecar, prefill: true, retry: "prefill", outcome: "prefill_error", neutral: true, status: 429},
		"prefill: a sidecar's 503 too": {code: 503, origin: sidecar, prefill: true, retry: "prefill", outcome: "prefill_error", status: 502},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			resp := &http.Response{StatusCode: tc.code, Header: http.Header{"Content-Type": {"application/json"}},
				Body: io.NopCloser(strings.NewReader(tc.body))}
			resp.Header.Set(admission.HeaderOrigin, tc.origin)
			for k, v := range tc.header {
				resp.Header.Set(k, v)
			}
			f := answerFault(resp, tc.prefill)
			if f.retry != tc.retry || f.outcome != tc.outcome || f.neutral != tc.neutral {
				t.Errorf("retry %q outcome %q neutral %t, want %q %q %t", f.retry, f.outcome, f.neutral, tc.retry, tc.outcome, tc.neutral)
			}
			if (f.health() == errNeutral) != tc.neutral { //nolint:errorlint // the very value
				t.Errorf("the breaker learns %v", f.health())
			}
			w := httptest.NewRecorder()
			f.write(w)
			if w.Code != tc.status || tc.reason != "" && w.Header().Get(admission.HeaderReason) != tc.reason {
				t.Errorf("the client gets %d %q, want %d %q", w.Code, w.Header().Get(admission.HeaderReason), tc.status, tc.reason)
			}
			if w.Header().Get(admission.HeaderOrigin) != "" {
				t.Error("a header of ours reached the client")
			}
			if f.refusal == nil && w.Body.String() != tc.body {
				t.Errorf("the engine's body %q became %q", tc.body, w.Body)
			}
			if !json.Valid(bytes.TrimPrefix(f.inBand().body(), nil)) || f.Error() == "" {
				t.Errorf("in-band %s, error %q", f.inBand().body(), f.Error())
			}
		})
	}
}

// An engine's error body is bounded.
func TestErrorBodiesAreBounded(t *testing.T) {
	resp := &http.Response{StatusCode: http.StatusInternalServerError, Header: http.Header{},
		Body: io.NopCloser(io.LimitReader(zeros{}, 10<<20))}
	if f := answerFault(resp, false); len(f.body) != maxErrorBody {
		t.Errorf("%d bytes kept, want %d", len(f.body), maxErrorBody)
	}
	broken := &http.Response{StatusCode: http.StatusBadRequest, Header: http.Header{}, Body: io.NopCloser(io.MultiReader(
		strings.NewReader("half"), errReader{}))}
	f := answerFault(broken, false)
	w := httptest.NewRecorder()
	f.write(w)
	if w.Code != 502 || strings.Contains(w.Body.String(), "half") {
		t.Errorf("half an error body became %d %s", w.Code, w.Body)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// A cancelled leg ends with the cause of the cancel, not with its own error.
func TestWhy(t *testing.T) {
	pf := prefillFault(errors.New("p"))
	cases := map[string]struct {
		cause   error
		err     error
		outcome string
		status  int
	}{
		"a broken connection":       {nil, io.ErrUnexpectedEOF, telemetry.OutcomeUpstreamError, 502},
		"an open breaker":           {nil, errBreaker, telemetry.OutcomeUnavailable, 503},
		"the client left":           {errClientGone, context.Canceled, telemetry.OutcomeClientCancelled, 499},
		"silence":                   {errIdle, context.Canceled, telemetry.OutcomeIdle, 504},
		"the prefill leg failed":    {pf, context.Canceled, telemetry.OutcomePrefillError, 502},
		"silence beats the reset":   {errIdle, io.ErrUnexpectedEOF, telemetry.OutcomeIdle, 504},
		"a wrapped fault is itself": {fmt.Errorf("x: %w", pf), context.Canceled, telemetry.OutcomePrefillError, 502},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(context.Background())
			if tc.cause != nil {
				cancel(tc.cause)
			}
			defer cancel(nil)
			f := why(ctx, tc.err)
			if f.outcome != tc.outcome || f.refusal.status != tc.status {
				t.Errorf("outcome %q status %d, want %q %d", f.outcome, f.refusal.status, tc.outcome, tc.status)
			}
		})
	}
	if (*fault)(nil).health() != nil {
		t.Error("no fault is not healthy")
	}
}

// An error event's own code decides whether the client or the worker is to blame.
func TestStreamFaults(t *testing.T) {
	for code, want := range map[int]struct {
		status  int
		retry   string
		neutral bool
	}{
		400: {400, "", true}, 429: {429, "", true}, 499: {499, "", true},
		500: {502, telemetry.RetryDecodeStatus, false}, 503: {502, telemetry.RetryDecodeStatus, false},
		0: {502, telemetry.RetryDecodeStatus, false},
	} {
		f := streamFault(code)
		if f.refusal.status != want.status || f.retry != want.retry || f.neutral != want.neutral {
			t.Errorf("code %d: %d %q %t, want %+v", code, f.refusal.status, f.retry, f.neutral, want)
		}
	}
}

// R69, golden: every refusal of ours is OpenAI's error object, and every status
// has its type.
func TestRefusalShapes(t *testing.T) {
	cases := map[string]struct {
		e    *refusal
		want string
		hdr  map[string]string
	}{
		"bad member": {badMember("n", "n has to be 1."),
			`{"error":{"message":"n has to be 1.","type":"invalid_request_error","param":"n","code":"invalid_value"}}`,
			map[string]string{"X-Kvc-Reason": "invalid-member", "Retry-After": ""}},
		"unknown model": {unknownModel("gpt\n\"4\""),
			`{"error":{"message":"The model \"gpt\\u000a\\\"4\\\"\" does not exist here; GET /v1/models lists the names.",` +
				`"type":"invalid_request_error","param":"model","code":"model_not_found"}}`,
			map[string]string{"X-Kvc-Reason": "unknown-model"}},
		"no worker": {noWorker(),
			`{"error":{"message":"No worker can serve this model now; try again later.","type":"service_unavailable_error","param":null,"code":"no_worker"}}`,
			map[string]string{"X-Kvc-Reason": "no-worker", "Retry-After": "5"}},
		"contended": {contended(1500 * time.Millisecond),
			`{"error":{"message":"All workers are busy and the wait for a place ended; try again later.","type":"rate_limit_error","param":null,"code":"contended"}}`,
			map[string]string{"X-Kvc-Reason": "contended", "Retry-After": "2"}},
		"contended without a hint": {contended(0),
			`{"error":{"message":"All workers are busy and the wait for a place ended; try again later.","type":"rate_limit_error","param":null,"code":"contended"}}`,
			map[string]string{"Retry-After": "1"}},
		"upstream": {upstreamFault(reasonUpstream, "x"),
			`{"error":{"message":"x","type":"server_error","param":null,"code":"upstream_error"}}`,
			map[string]string{"X-Kvc-Reason": "upstream-error"}},
		"shutting down": {shuttingDown(),
			`{"error":{"message":"This router is shutting down; send the request again.","type":"service_unavailable_error","param":null,"code":"shutting_down"}}`,
			map[string]string{"X-Kvc-Reason": "shutting-down", "Retry-After": "1"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := httptest.NewRecorder()
			tc.e.write(w)
			if w.Body.String() != tc.want {
				t.Errorf("got  %s\nwant %s", w.Body, tc.want)
			}
			for k, v := range tc.hdr {
				if got := w.Header().Get(k); got != v {
					t.Errorf("%s = %q, want %q", k, got, v)
				}
			}
			if got := string(tc.e.inBand()); got != "data: "+tc.want+"\n\ndata: [DONE]\n\n" {
				t.Errorf("in-band %q", got)
			}
		})
	}
	long := unknownModel(strings.Repeat("é", 300))
	if len(long.message) > 400 || !json.Valid(long.body()) {
		t.Errorf("a long name is quoted in %d bytes", len(long.message))
	}
}

// R40: a usable client id is kept, else the body's, else a new one.
func TestRequestIDs(t *testing.T) {
	cases := map[string]struct{ header, rid, want string }{
		"the header wins":         {"a-1", "b", "a-1"},
		"the body's rid":          {"", "b", "b"},
		"an unusable header":      {"a b", "b", "b"},
		"control characters":      {"a\tb", "", ""},
		"not ASCII":               {"é", "", ""},
		"too long":                {strings.Repeat("x", 129), "", ""},
		"as long as allowed":      {strings.Repeat("x", 128), "", strings.Repeat("x", 128)},
		"neither":                 {"", "", ""},
		"an unusable rid as well": {"", "a b", ""},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			h := http.Header{}
			if tc.header != "" {
				h.Set("X-Request-Id", tc.header)
			}
			got := requestID(h, tc.rid)
			if tc.want == "" {
				if !strings.HasPrefix(got, "req-") || len(got) != 36 {
					t.Errorf("minted id %q", got)
				}
				return
			}
			if got != tc.want {
				t.Errorf("id %q, want %q", got, tc.want)
			}
		})
	}
}

// R34, R35, R37, R38, property: whatever a client sends, exactly what may travel
// does, once and unchanged.
func TestOutboundHeaderProperty(t *testing.T) {
	forbidden := []string{"Connection", "Keep-Alive", "Te", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Authorization",
		"Content-Length", "Expect", "Authorization", "X-Api-Key", "Cookie", "X-Kvc-Leg", "X-Kvc-Admit", "x-kvc-lower",
		"X-KVC-SHOUT", "X-Override-Rid", "X-Data-Parallel-Rank", "Idempotency-Key", "Content-Encoding"}
	ours := []string{"Content-Type", "Accept-Encoding", "X-Request-Id"}
	rapid.Check(t, func(t *rapid.T) {
		in := http.Header{}
		want := http.Header{}
		for range rapid.IntRange(0, 12).Draw(t, "fields") {
			name := rapid.OneOf(rapid.SampledFrom(forbidden), rapid.SampledFrom(ours), rapid.StringMatching(`X-[A-Z][a-z]{2,6}`)).Draw(t, "name")
			value := rapid.StringMatching(`[!-~]{1,12}`).Draw(t, "value")
			in[name] = append(in[name], value)
			if !slices.Contains(forbidden, name) && !slices.Contains(ours, name) {
				want[name] = append(want[name], value)
			}
		}
		for _, hop := range in["Connection"] {
			want.Del(hop)
		}
		before := in.Clone()
		got := outboundHeader(in, "id")
		if d := cmp.Diff(before, in); d != "" {
			t.Fatalf("the client's headers were changed: %s", d)
		}
		for name, v := range map[string]string{"Content-Type": "application/json", "Accept-Encoding": "identity", "X-Request-Id": "id"} {
			if d := cmp.Diff([]string{v}, got[name]); d != "" {
				t.Fatalf("%s: %s", name, d)
			}
			delete(got, name)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("travelling headers (-want +got):\n%s", d)
		}
	})
}

// The log of decisions is bounded in turns and in events.
func TestDecisionLogIsBounded(t *testing.T) {
	l := newDecisionLog()
	tn := &turn{arrived: time.Now(), prompt: &prompt{route: "chat"}}
	for i := range decisionsMost + 10 {
		tn.id = fmt.Sprint("r", i)
		d := l.start(tn)
		for range eventsMost + 5 {
			d.event("retry", "w", "x")
		}
	}
	if _, ok := l.get("r9"); ok {
		t.Error("an old turn is still remembered")
	}
	v, ok := l.get(fmt.Sprint("r", decisionsMost+9))
	if !ok || len(v.Events) != eventsMost {
		t.Errorf("found %t, %d events, want the newest turn with %d", ok, len(v.Events), eventsMost)
	}
}

// The verdict of a 103 can only admit, with a mode of the closed set.
func TestEarlyVerdicts(t *testing.T) {
	cases := map[string]struct {
		line string
		ok   bool
	}{
		"an admission":              {`{"can_admit":true,"mode":"direct","lease":{"id":"x","tokens":1,"ttl_ms":5}}`, true},
		"unknown members":           {`{"can_admit":true,"mode":"seed","new":1}`, true},
		"a refusal":                 {`{"can_admit":false,"mode":"","reason":"no-d-capacity"}`, false},
		"no mode":                   {`{"can_admit":true,"mode":""}`, false},
		"a mode of another world":   {`{"can_admit":true,"mode":"turbo"}`, false},
		"not JSON":                  {`can_admit`, false},
		"a refusal that has a mode": {`{"can_admit":false,"mode":"direct"}`, false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if v, ok := earlyVerdict([]byte(tc.line)); ok != tc.ok || ok && !v.CanAdmit {
				t.Errorf("earlyVerdict = %+v, %t; want %t", v, ok, tc.ok)
			}
		})
	}
}

func FuzzEarlyVerdict(f *testing.F) {
	f.Add([]byte(`{"can_admit":true,"mode":"direct"}`))
	f.Add([]byte(`{"can_admit":true,"mode":"direct","lease":{"ttl_ms":-9223372036854775808}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		v, ok := earlyVerdict(line)
		if ok && (!v.CanAdmit || v.Mode == kvc.ModeNone) {
			t.Fatalf("%q admits as %+v", line, v)
		}
	})
}

// How an RPC's end is read: refusals are verdicts, 4xx is our own fault, the
// rest is unknown and the breaker's business.
func TestReadVerdict(t *testing.T) {
	cases := map[string]struct {
		answer admission.Verdict
		err    error
		result string
		health string // "", neutral, fault
	}{
		"admitted":        {answer: admission.Verdict{CanAdmit: true, Mode: "seed"}, result: telemetry.AskAdmitted},
		"refused":         {answer: admission.Verdict{Reason: "no-d-capacity"}, result: telemetry.AskRefused},
		"malformed":       {answer: admission.Verdict{CanAdmit: true}, result: telemetry.AskError, health: "fault"},
		"timed out":       {err: fmt.Errorf("x: %w", context.DeadlineExceeded), result: telemetry.AskTimeout, health: "fault"},
		"no connection":   {err: io.ErrUnexpectedEOF, result: telemetry.AskError, health: "fault"},
		"a 500":           {err: &admission.StatusError{Code: 500}, result: telemetry.AskError, health: "fault"},
		"a 401 (wire §0)": {err: &admission.StatusError{Code: 401}, result: telemetry.AskError, health: "neutral"},
		"a 400":           {err: fmt.Errorf("x: %w", &admission.StatusError{Code: 400}), result: telemetry.AskError, health: "neutral"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, result, err := readVerdict(tc.answer, tc.err)
			health := ""
			if err != nil {
				health = "fault"
			}
			if errors.Is(err, errNeutral) {
				health = "neutral"
			}
			if result != tc.result || health != tc.health {
				t.Errorf("result %q health %q, want %q %q", result, health, tc.result, tc.health)
			}
		})
	}
}
