package proxy

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/session"
)

func onePool(t *testing.T, o Options) (*pool, *mockWorker, *mockWorker) {
	t.Helper()
	d, pf := newMockWorker(t, "decode-0", fleet.Decode), newMockWorker(t, "prefill-0", fleet.Prefill)
	return newPool(t, o, d, pf), d, pf
}

func key(s string) string { return string(session.Key("ns", "pool", s)) }

// The main path: the first turn of a session is asked by RPC and seeds through
// P and D at once; the next one travels fused and runs direct, without P.
func TestFirstTurnSeedsAndTheNextIsDirect(t *testing.T) {
	p, d, pf := onePool(t, testOptions())
	for _, stream := range []bool{true, false} {
		s := "s" + map[bool]string{true: "1", false: "2"}[stream]
		a := p.chat(s, stream)
		if a.code != 200 || a.mode() != "seed" || a.err != nil {
			t.Fatalf("first turn: %d %q %v %s", a.code, a.mode(), a.err, a.body)
		}
		d.hold(key(s))
		p.eventually("home known", func() bool {
			_, ok := p.proxy.state.Home(session.Key("ns", "pool", s))
			return ok
		})
		a = p.chat(s, stream)
		if a.code != 200 || a.mode() != "direct" || a.header.Get(admission.HeaderWorker) != "decode-0" {
			t.Fatalf("second turn: %d mode %q worker %q", a.code, a.mode(), a.header.Get(admission.HeaderWorker))
		}
		if stream && string(a.body) != strings.Join(chatEvents("ok"), "") {
			t.Errorf("the stream's bytes changed:\n%s", a.body)
		}
	}
	pf.leg(1) // D does not wait for it in this kit
	if n := len(pf.seen()); n != 2 {
		t.Errorf("P saw %d legs, want 2: one per seed", n)
	}
	if n := len(d.questions()); n != 2 {
		t.Errorf("D was asked %d times by RPC, want 2: resident turns travel fused", n)
	}
	for i, l := range d.seen() {
		want := admission.AdmitLease
		if i%2 == 1 {
			want = admission.AdmitAsk
		}
		if l.turn.Admit != want || l.turn.Bootstrap == nil || l.turn.Epoch != d.epoch() {
			t.Errorf("leg %d: admit %q bootstrap %v epoch %q", i, l.turn.Admit, l.turn.Bootstrap, l.turn.Epoch)
		}
	}
	if got := p.sum("kvc_router_turns_total", "mode=direct", "outcome=ok"); got != 2 {
		t.Errorf("direct turns counted %v, want 2", got)
	}
	if got := p.sum("kvc_router_tokens_total", "kind=prompt"); got != 120 {
		t.Errorf("prompt tokens counted %v, want 120", got)
	}
}
