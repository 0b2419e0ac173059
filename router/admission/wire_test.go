package admission

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// golden pins the bytes of wire.md §2, §5 and §6: another release's peer reads
// exactly these.
func golden() map[string]struct {
	value any
	text  string
} {
	return map[string]struct {
		value any
		text  string
	}{
		"a question (§2)": {
			Question{Attempt: attempt, Session: "00000000000000aa", Lineage: "00000000000000ab", Epoch: "w/1", Turn: 7,
				Class: "interactive", InputTokens: 98304, AppendTokens: 713, OutputTokens: 900,
				PrefillUncachedTokens: 1611, Format: "kvc-b96-v1", Blocks: "AQAAAAAAAAA=", Route: "chat"},
			`{"attempt":"` + attempt + `","session":"00000000000000aa","lineage":"00000000000000ab","epoch":"w/1",` +
				`"turn":7,"class":"interactive","input_tokens":98304,"append_tokens":713,"output_tokens":900,` +
				`"prefill_uncached_tokens":1611,"format":"kvc-b96-v1","blocks":"AQAAAAAAAAA=","route":"chat"}`,
		},
		"a sessionless question leaves both keys out": {
			Question{Attempt: attempt, Format: "kvc-b96-v1", Route: "generate"},
			`{"attempt":"` + attempt + `","epoch":"","turn":0,"input_tokens":0,"append_tokens":0,"output_tokens":0,` +
				`"format":"kvc-b96-v1","blocks":"","route":"generate"}`,
		},
		"an admission (§2)": {
			Verdict{CanAdmit: true, Mode: "direct", Worker: "w", Epoch: "w/1",
				Lease: &Lease{ID: attempt, Tokens: 1613, TTLMS: 5000}, ResidentTokens: 97591, AppendTokens: 713,
				FreeTokens: 210000, State: "Active"},
			`{"can_admit":true,"mode":"direct","reason":"","worker":"w","epoch":"w/1","lease":{"id":"` + attempt +
				`","tokens":1613,"ttl_ms":5000},"resident_tokens":97591,"append_tokens":713,"free_tokens":210000,` +
				`"state":"Active","retry_after_ms":0,"pause_ms":0}`,
		},
		"a refusal has mode \"\" and no lease (§2)": {
			Verdict{Reason: "no-d-capacity", Worker: "w", Epoch: "w/1", State: "Active", RetryAfterMS: 250, PauseMS: 40},
			`{"can_admit":false,"mode":"","reason":"no-d-capacity","worker":"w","epoch":"w/1","resident_tokens":0,` +
				`"append_tokens":0,"free_tokens":0,"state":"Active","retry_after_ms":250,"pause_ms":40}`,
		},
		"a state (§6)": {
			State{State: "Draining", SoftDeadlineMS: 1000, HardDeadlineMS: 2000},
			`{"state":"Draining","soft_deadline_ms":1000,"hard_deadline_ms":2000}`,
		},
		"a sidecar's status (§5)": {
			SidecarStatus{Wire: 1, Worker: "w", Pod: "p", Role: "decode", Epoch: "w/1", Seq: 9, State: "Active", Ready: true,
				Engine: EngineStatus{Version: "0.5", StartedMS: 5}, DirectPath: map[string]string{"chat": "Unified"},
				ConfigHash: "ab", CapacityTokens: 100, Used: 50, Locked: 40, Protected: 30, Reserved: 20, Sessions: 17,
				InFlight: 3, EvictionCostTokens: 412160, Queues: QueueStatus{1, 2, 3},
				Totals: WorkerTotals{PrefillUncachedTokens: 1, PromptTokens: 2, GeneratedTokens: 3, EvictedTokens: 4,
					TransferredTokens: 5, Refusals: map[string]int64{"draining": 6}}, SoftDeadlineMS: 7, HardDeadlineMS: 8},
			`{"wire":1,"worker":"w","pod":"p","role":"decode","epoch":"w/1","seq":9,"state":"Active","ready":true,"reason":"",` +
				`"engine":{"version":"0.5","started_ms":5},"direct_path":{"chat":"Unified"},"config_hash":"ab",` +
				`"capacity_tokens":100,"used":50,"locked":40,"protected":30,"reserved":20,"sessions":17,"in_flight":3,` +
				`"eviction_cost_tokens":412160,"queues":{"prefill":1,"transfer":2,"waiting":3},` +
				`"totals":{"prefill_uncached_tokens":1,"prompt_tokens":2,"generated_tokens":3,"evicted_tokens":4,` +
				`"transferred_tokens":5,"refusals":{"draining":6}},"soft_deadline_ms":7,"hard_deadline_ms":8}`,
		},
		"a router's status (§5)": {
			RouterStatus{Wire: 1, Router: "r", StartedMS: 5, Ready: true, ConfigHash: "ab",
				Workers: []RouterWorker{{Worker: "w", Pod: "p", Role: "decode", State: "Active", Trusted: true, Seq: 4,
					InFlight: 2, Breaker: "closed", Modes: map[string]int64{"direct": 3}}},
				Classes: map[string]ClassStatus{"a": {1, 2, 3, 4, 5}}, Modes: map[string]int64{"direct": 3}, PinChanges: 1, Sessions: 2},
			`{"wire":1,"router":"r","started_ms":5,"ready":true,"config_hash":"ab","workers":[{"worker":"w","pod":"p",` +
				`"role":"decode","state":"Active","trusted":true,"seq":4,"in_flight":2,"breaker":"closed","capacity_tokens":0,` +
				`"used":0,"sessions":0,"modes":{"direct":3}}],"classes":{"a":{"requests":1,"ttft_ok":2,"itl_ok":3,"shed":4,` +
				`"queued":5}},"modes":{"direct":3},"pin_changes":1,"sessions":2}`,
		},
	}
}

func TestWireGoldenJSON(t *testing.T) {
	for claim, c := range golden() {
		t.Run(claim, func(t *testing.T) {
			written, err := json.Marshal(c.value)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.text, string(written)); diff != "" {
				t.Errorf("the wire changed (-want +got):\n%s", diff)
			}
			read := reflect.New(reflect.TypeOf(c.value))
			if err := json.Unmarshal([]byte(c.text), read.Interface()); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.value, read.Elem().Interface()); diff != "" {
				t.Errorf("does not read back (-want +got):\n%s", diff)
			}
		})
	}
}

// §0: readers ignore unknown members, at every depth: changes are additive.
func TestReadersIgnoreUnknownMembers(t *testing.T) {
	for claim, c := range golden() {
		t.Run(claim, func(t *testing.T) {
			text := strings.ReplaceAll(c.text, "{", `{"x_later":{"deep":[1,null]},`)
			text = strings.ReplaceAll(text, ",}", "}")
			for _, m := range []string{`"direct_path":`, `"refusals":`, `"modes":`, `"classes":`} { // maps have no unknown members
				text = strings.ReplaceAll(text, m+`{"x_later":{"x_later":{"deep":[1,null]},"deep":[1,null]},`, m+"{")
				text = strings.ReplaceAll(text, m+`{"x_later":{"deep":[1,null]},`, m+"{")
			}
			read := reflect.New(reflect.TypeOf(c.value))
			if err := json.Unmarshal([]byte(text), read.Interface()); err != nil {
				t.Fatalf("%v in %s", err, text)
			}
			if diff := cmp.Diff(c.value, read.Elem().Interface()); diff != "" {
				t.Errorf("unknown members changed the meaning (-want +got):\n%s", diff)
			}
		})
	}
}

// §2: the verdict's header is one line of at most 1 KiB.
func TestAVerdictIsOneShortLine(t *testing.T) {
	v := NewVerdict(kvc.Verdict{CanAdmit: true, Mode: kvc.Reseed, Reason: kvc.ReasonLargeAppend, ResidentTokens: 1 << 40,
		AppendTokens: 1 << 40, FreeTokens: 1 << 40, RetryAfter: time.Hour, Pause: time.Hour,
		Lease: kvc.Lease{ID: attempt, Tokens: 1 << 40, TTL: time.Hour}})
	v.Worker, v.Epoch, v.State = strings.Repeat("w", 36), strings.Repeat("e", 80), "Draining"
	b, err := json.Marshal(v)
	if err != nil || len(b) > 1024 || bytes.ContainsAny(b, "\r\n") {
		t.Errorf("%d bytes, %v: %s", len(b), err, b)
	}
}

// Q8, §0 "absent = unknown": only a whole verdict is an answer. All else is
// unknown and must never count as a refusal.
func TestOnlyAWholeVerdictIsAnAnswer(t *testing.T) {
	for claim, c := range map[string]struct {
		body string
		ok   bool
	}{
		"an admission":                     {`{"can_admit":true,"mode":"direct","lease":{"id":"a","tokens":1,"ttl_ms":5}}`, true},
		"an admission with a later member": {`{"can_admit":true,"mode":"seed","priority":9}`, true},
		"a refusal":                        {`{"can_admit":false,"mode":"","reason":"draining"}`, true},
		"a refusal for a later reason":     {`{"can_admit":false,"reason":"too-warm"}`, true},
		"an empty object":                  {`{}`, false},
		"null":                             {`null`, false},
		"an error object with status 200":  {`{"error":{"message":"upstream connect error"}}`, false},
		"a refusal without a reason":       {`{"can_admit":false,"mode":""}`, false},
		"a refusal that carries a mode":    {`{"can_admit":false,"mode":"direct","reason":"draining"}`, false},
		"an admission without a mode":      {`{"can_admit":true}`, false},
		"an admission in a later mode":     {`{"can_admit":true,"mode":"teleport"}`, false},
		"a mode in capitals":               {`{"can_admit":true,"mode":"Direct"}`, false},
		"a number for can_admit":           {`{"can_admit":1,"mode":"direct"}`, false},
		"text for a count":                 {`{"can_admit":true,"mode":"direct","free_tokens":"many"}`, false},
		"an array":                         {`[]`, false},
		"a cut answer":                     {`{"can_admit":false,"reason":"draini`, false},
		"two answers":                      {`{"can_admit":true,"mode":"direct"}{"can_admit":true,"mode":"direct"}`, false},
		"a proxy's page":                   {`<html>Bad gateway</html>`, false},
		"nothing":                          {``, false},
		"an answer beyond the bound":       {`{"can_admit":true,"mode":"direct","x":"` + strings.Repeat("x", maxAnswer) + `"}`, false},
		"binary noise":                     {"\x1f\x8b\x00\xff", false},
	} {
		t.Run(claim, func(t *testing.T) {
			base, client := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, c.body)
			}))
			v, err := client.Ask(t.Context(), base, NewQuestion(question(), "", block.Chat))
			if err == nil {
				_, err = v.Core()
			}
			if (err == nil) != c.ok {
				t.Errorf("answer %.80s: %v, want understood = %v", c.body, err, c.ok)
			}
		})
	}
}

// Every status but 2xx is no answer, whatever its body says, and the error
// quotes a bounded first line of it.
func TestNoStatusButSuccessIsAnAnswer(t *testing.T) {
	for _, code := range []int{301, 400, 401, 403, 404, 409, 413, 429, 500, 502, 503, 504} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			base, client := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(code)
				_, _ = io.WriteString(w, `{"can_admit":false,"mode":"","reason":"no-d-capacity"}`+"\nsecond line"+strings.Repeat("x", 5000))
			}))
			v, err := client.Ask(t.Context(), base, NewQuestion(question(), "", block.Chat))
			var status *StatusError
			if !errors.As(err, &status) || status.Code != code || v.Reason != "" {
				t.Fatalf("Ask = %+v, %v", v, err)
			}
			if len(err.Error()) > 400 || strings.Contains(err.Error(), "second line") {
				t.Errorf("the error is not bounded: %s", err)
			}
		})
	}
}

func TestAWorkerThatHangsIsUnknownAtTheDeadline(t *testing.T) {
	for claim, hang := range map[string]func(http.ResponseWriter, *http.Request){
		"before its header": func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-r.Context().Done()
		},
		"inside its answer": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = io.WriteString(w, `{"can_admit":fal`)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		},
	} {
		t.Run(claim, func(t *testing.T) {
			base, client := serve(t, http.HandlerFunc(hang))
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if _, err := client.Ask(ctx, base, NewQuestion(question(), "", block.Chat)); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("Ask = %v, want the deadline", err)
			}
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		srv := httptest.NewServer(http.NotFoundHandler())
		base := srv.URL
		srv.Close()
		if _, err := new(Client).Status(t.Context(), base); err == nil {
			t.Error("an unreachable worker has a status")
		}
	})
}

// §5: unreachable or unreadable = unknown, never a status of zeros.
func TestAStatusThatCannotBeReadIsAnError(t *testing.T) {
	for claim, h := range map[string]http.HandlerFunc{
		"503":   func(w http.ResponseWriter, _ *http.Request) { WriteError(w, 503, "starting") },
		"empty": func(http.ResponseWriter, *http.Request) {},
		"html":  func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<p>") },
		"types": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"used":"5"}`) },
	} {
		base, client := serve(t, h)
		if s, err := client.Status(t.Context(), base); err == nil {
			t.Errorf("%s: Status = %+v", claim, s)
		}
	}
}

// A key or lease from elsewhere cannot name another resource.
func TestControlCallsEscapeTheirNames(t *testing.T) {
	var paths []string
	base, client := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		paths = append(paths, r.URL.EscapedPath())
		w.WriteHeader(http.StatusNoContent)
	}))
	if err := errors.Join(client.Release(t.Context(), base, "../state?x=1"), client.Forget(t.Context(), base, "a/b#c")); err != nil {
		t.Fatal(err)
	}
	want := []string{"/kvc/v1/leases/..%2Fstate%3Fx=1", "/kvc/v1/sessions/a%2Fb%23c"}
	if diff := cmp.Diff(want, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
}

// §0: the auth matrix. The first token is sent, all are accepted; the scheme is
// case-insensitive; nothing else passes.
func TestAuthMatrix(t *testing.T) {
	pool := StaticTokens("new", "old")
	for header, ok := range map[string]bool{
		"Bearer new": true, "Bearer old": true, "bearer new": true, "BEARER old": true, "Bearer  new ": true,
		"": false, "new": false, "Bearer": false, "Bearer ": false, "Bearer ne": false, "Bearer newer": false,
		"Bearer NEW": false, "Basic new": false, "Bearer new,old": false, "Bearer new old": false, "Token new": false,
	} {
		h := http.Header{}
		if header != "" {
			h.Set("Authorization", header)
		}
		if got := pool.Accepts(h); got != ok {
			t.Errorf("%q accepted = %v, want %v", header, got, ok)
		}
		for name, open := range map[string]*Tokens{"nil": nil, "empty": StaticTokens()} {
			if !open.Accepts(h) {
				t.Errorf("the open pool (%s) refuses %q", name, header)
			}
			open.Authorize(h)
			if h.Get("Authorization") != "" {
				t.Errorf("the open pool (%s) passes the client's key on", name)
			}
		}
	}
	h := http.Header{"Authorization": {"Bearer client"}}
	pool.Authorize(h)
	if diff := cmp.Diff(http.Header{"Authorization": {"Bearer new"}}, h); diff != "" {
		t.Errorf("sent (-want +got):\n%s", diff)
	}
}

func TestTokenFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	for claim, c := range map[string]struct {
		text  string
		first string // "" = refused
	}{
		"one line":          {"a\n", "a"},
		"no newline":        {"a", "a"},
		"Windows line ends": {"a\r\nb\r\n", "a"},
		"blank lines first": {"\n  \n a \n", "a"},
		"empty":             {"", ""},
		"only blanks":       {" \n\t\n", ""},
	} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		tokens, err := LoadTokens(path)
		switch {
		case c.first == "" && (err == nil || !strings.Contains(err.Error(), "write one token a line")):
			t.Errorf("%s: %v", claim, err)
		case c.first != "" && (err != nil || tokens.First() != c.first):
			t.Errorf("%s: %v, first %q", claim, err, tokens.First())
		}
	}
	if _, err := LoadTokens(path + ".none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// A rotation that goes wrong keeps the pool running on the last good tokens.
func TestTokensSurviveABrokenRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte("good"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := LoadTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	for claim, breakIt := range map[string]func() error{
		"emptied": func() error { return os.WriteFile(path, nil, 0o600) },
		"removed": func() error { return os.Remove(path) },
	} {
		if err := breakIt(); err != nil {
			t.Fatal(err)
		}
		if err := tokens.Reload(); err == nil {
			t.Errorf("%s: Reload has no error", claim)
		}
		if tokens.First() != "good" || tokens.Accepts(http.Header{}) {
			t.Errorf("%s: first %q, and an unauthorised request passes: %v", claim, tokens.First(), tokens.Accepts(http.Header{}))
		}
		if err := os.WriteFile(path, []byte("good"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(path, []byte("next\ngood\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := tokens.Reload(); err != nil || tokens.First() != "next" || !tokens.Accepts(http.Header{"Authorization": {"Bearer good"}}) {
		t.Errorf("the rotation did not come through: %v, %q", err, tokens.First())
	}
}

// §1: whatever a router writes a sidecar reads back.
func TestTurnHeadersRoundTripAnyTurn(t *testing.T) {
	hex := func(n int) *rapid.Generator[string] { return rapid.StringMatching(fmt.Sprintf("[0-9a-f]{%d}", n)) }
	count := rapid.IntRange(0, 1<<40)
	rapid.Check(t, func(t *rapid.T) {
		want := Turn{Leg: rapid.SampledFrom([]Leg{LegPrefill, LegDecode}).Draw(t, "leg"), Attempt: hex(32).Draw(t, "attempt"),
			Epoch: rapid.SampledFrom([]string{"", "w/1", "w/1/2"}).Draw(t, "epoch"), InputTokens: count.Draw(t, "in"),
			AppendTokens: count.Draw(t, "append"), OutputTokens: count.Draw(t, "out")}
		if rapid.Bool().Draw(t, "session") {
			want.Session, want.Lineage = kvc.SessionKey(hex(16).Draw(t, "s")), kvc.SessionKey(hex(16).Draw(t, "l"))
		}
		if want.Leg == LegDecode {
			want.Admit = rapid.SampledFrom([]Admit{AdmitAsk, AdmitLease, AdmitNone}).Draw(t, "admit")
			want.Turn, want.Class, want.PrefillUncached = count.Draw(t, "turn"), "batch", count.Draw(t, "uncached")
		}
		if want.Admit == AdmitLease {
			want.Lease = hex(32).Draw(t, "lease")
		}
		if rapid.Bool().Draw(t, "blocks") {
			c := CheckOf([]block.Hash{block.Hash(rapid.Uint64().Draw(t, "last"))})
			want.Blocks = &c
		}
		if rapid.Bool().Draw(t, "bootstrap") {
			want.Bootstrap = &Bootstrap{Host: rapid.SampledFrom([]string{"10.0.0.7", "fd00::7", "p-0.svc"}).Draw(t, "host"),
				Port: rapid.IntRange(1, 65535).Draw(t, "port"), Room: rapid.Int64Range(1, 1<<63-1).Draw(t, "room")}
		}
		h := http.Header{}
		want.Write(h)
		h.Set("X-Kvc-Later", "ignored") // changes are additive
		if h.Get(HeaderWire) != "1" {
			t.Fatalf("wire %q", h.Get(HeaderWire))
		}
		got, err := ParseTurn(h)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// §1: rooms are 1..2^63-1 (0 is "not written yet"), ports 1..65535, hosts
// without brackets or anything that could break out of a JSON string or a URL.
func TestBootstrapBounds(t *testing.T) {
	for s, ok := range map[string]bool{
		"h,1,1": true, "h,65535,9223372036854775807": true, "fd00::1,8998,5": true,
		"h,0,1": false, "h,65536,1": false, "h,1,0": false, "h,1,-1": false, "h,1,9223372036854775808": false,
		"h,+1,1": false, "h, 1,1": false, ",1,1": false, "h,1": false, "h": false, "": false, "h,1,1,1": false,
		"[fd00::1],1,1": false, `h",1,1`: false, `h\,1,1`: false, "h h,1,1": false, "h/x,1,1": false, "h,1,1.0": false,
	} {
		b, err := ParseBootstrap(s)
		if (err == nil) != ok {
			t.Errorf("%q: %+v, %v, want accepted = %v", s, b, err, ok)
		}
		if ok && b.String() != s {
			t.Errorf("%q reads back as %q", s, b)
		}
		if !ok && !strings.Contains(err.Error(), "want host,port,room, such as") {
			t.Errorf("%q: the remedy is missing in %v", s, err)
		}
	}
}

// R41: no spelling of an internal header survives; look-alikes do.
func TestStripInternalTakesEverySpelling(t *testing.T) {
	h := http.Header{}
	for _, name := range []string{HeaderAdmit, HeaderLease, "x-kvc-later", "X-KVC-LEG", "x-KVC-Wire"} {
		h[name] = []string{"1"}
	}
	kept := http.Header{"X-Kvcx": {"1"}, "Kvc-Leg": {"1"}, "X-Request-Id": {"1"}, "X-Kv": {"1"}}
	maps.Copy(h, kept)
	StripInternal(h)
	if diff := cmp.Diff(kept, h); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestErrorBodiesAreOpenAIs(t *testing.T) {
	for status, kind := range map[int]string{400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error",
		413: "invalid_request_error", 429: "rate_limit_error", 500: "server_error", 502: "server_error", 503: "server_error"} {
		w := httptest.NewRecorder()
		WriteError(w, status, "say \"why\"\n")
		want := fmt.Sprintf(`{"error":{"message":"say \"why\"\n","type":%q,"param":null,"code":%d}}`, kind, status)
		if w.Code != status || w.Body.String() != want || w.Header().Get("Content-Length") != fmt.Sprint(len(want)) ||
			w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%d %v %s, want %s", w.Code, w.Header(), w.Body, want)
		}
	}
}

// A question too large to be one is 400, not a refusal, and is not read to its end.
func TestHandlerBoundsTheQuestion(t *testing.T) {
	w := httptest.NewRecorder()
	body := `{"blocks":"` + strings.Repeat("A", maxQuestion) + `"}`
	Handler(func(context.Context, Question) (Verdict, error) {
		t.Error("decided on a question beyond the bound")
		return Verdict{}, nil
	}).ServeHTTP(w, httptest.NewRequest(http.MethodPost, PathAdmit, strings.NewReader(body)))
	if w.Code != http.StatusBadRequest {
		t.Errorf("status %d", w.Code)
	}
}
