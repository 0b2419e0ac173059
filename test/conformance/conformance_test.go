package conformance

import (
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
	"github.com/kvc-dev/kvc/test/conformance/kit"
)

// soon is what the cases' "within 200 ms" is given on a loaded test machine: far
// below every timer that could stand in for the right behaviour.
const soon = 2 * time.Second

// surfaces are the turn routes with a body of each, streamed or not.
func surfaces(stream bool) map[string]kit.Request {
	flag := `"stream":false`
	if stream {
		flag = `"stream":true`
	}
	text := strings.Repeat("once upon a time ", 20)
	return map[string]kit.Request{
		"chat":        {Path: "/v1/chat/completions", Body: `{"model":"m",` + flag + `,"messages":[{"role":"user","content":"` + text + `"}]}`},
		"completions": {Path: "/v1/completions", Body: `{"model":"m",` + flag + `,"prompt":"` + text + `"}`},
		"generate":    {Path: "/generate", Body: `{` + flag + `,"text":"` + text + `","sampling_params":{"max_new_tokens":8}}`},
	}
}

// injected are the members that only our side adds to a body.
var injected = []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "do_local_prefill"}

// less is a body without the injected members, every other byte kept.
func less(t testing.TB, body []byte, more ...string) string {
	t.Helper()
	b, err := scan.Parse(body, scan.Limits{})
	if err != nil {
		t.Fatalf("a worker got a broken body: %v", err)
	}
	return string(b.Apply(nil, scan.Splice{Del: append(more, injected...)}))
}

// copies counts the top-level members with a name.
func copies(t testing.TB, body []byte, name string) (n int) {
	t.Helper()
	b, err := scan.Parse(body, scan.Limits{})
	if err != nil {
		t.Fatalf("a worker got a broken body: %v", err)
	}
	b.Keys(func(key string, _ scan.Value) bool {
		if key == name {
			n++
		}
		return true
	})
	return n
}

// wantMode checks how a turn ran.
func wantMode(t testing.TB, a kit.Answer, want kvc.Mode) {
	t.Helper()
	if got := a.Header.Get("X-Kvc-Mode"); got != want.String() {
		t.Errorf("the turn ran as %q (%s, %s attempts), want %q", got, a.Header.Get("X-Kvc-Reason"),
			a.Header.Get("X-Kvc-Attempts"), want)
	}
}

// wantJSONError checks an error of the router's own.
func wantJSONError(t testing.TB, a kit.Answer, status int) {
	t.Helper()
	message, kind, _ := a.Error()
	if a.Err != nil || a.Status != status || message == "" || kind == "" || a.Header.Get("Content-Type") != "application/json" {
		t.Errorf("answer %d %q %v: %.300s, want status %d with an error object", a.Status, a.Header.Get("Content-Type"), a.Err, a.Body, status)
	}
	if strings.Contains(a.Body, "127.0.0.1") {
		t.Errorf("the error shows an address: %s", a.Body)
	}
}

// The kit's own promise: a pool serves seeds, then direct turns, on all surfaces.
func TestKit(t *testing.T) {
	for name, peers := range map[string]bool{"real sidecars": false, "mock sidecars": true} {
		t.Run(name, func(t *testing.T) {
			p := kit.New(t, kit.Options{Decode: 2, Prefill: 1, Peers: peers})
			want := kvc.Seed
			for k := range 3 {
				wantMode(t, p.OK(kit.Request{Body: kit.Chat("ann", k, k%2 == 0), Session: "s1"}), want)
				p.Settled()
				want = kvc.Direct
			}
			for _, stream := range []bool{false, true} {
				for _, r := range surfaces(stream) {
					if a := p.OK(r); !strings.Contains(a.Body, "one two three") && !strings.Contains(a.Body, " three") {
						t.Errorf("%s: %s", r.Path, a.Body)
					}
				}
			}
		})
	}
}

// logged collects what router and sidecars log.
func logged() *syncBuffer { return new(syncBuffer) }

// hasHeader reports a header by any spelling in the exact head of a request.
func hasHeader(head, name string) bool {
	return strings.Contains(strings.ToLower(head)+"\r\n", "\r\n"+strings.ToLower(name)+":")
}

// chunks cuts b into pieces of n bytes.
func chunks(b []byte, n int) (out []string) {
	for len(b) > 0 {
		k := min(n, len(b))
		out, b = append(out, string(b[:k])), b[k:]
	}
	return out
}

// pieces is a script that streams exact pieces, one flush each, then ends.
func pieces(parts ...string) kit.Script {
	return func(ex *kit.Exchange) {
		ex.Stream()
		for _, s := range parts {
			ex.Send(s)
		}
	}
}

// unified is a pool of one decode worker without prefill workers: what is tested
// on it does not depend on legs.
func unified(t *testing.T, o kit.Options) *kit.Pool {
	t.Helper()
	o.Path = kvc.Unified
	return kit.New(t, o)
}
