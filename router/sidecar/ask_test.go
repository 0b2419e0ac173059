package sidecar

import (
	"crypto/sha256"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

func TestFusedTurnIsAdmittedBy103(t *testing.T) {
	r := newRig(t).ready()
	in := ask(session, 0)
	a := r.send(t.Context(), in, chatPath, chat(0, true))
	if a.status != 200 || a.err != nil || len(a.early) != 1 {
		t.Fatalf("status %d, %d early hints, %v; want 103 then 200", a.status, len(a.early), a.err)
	}
	v := a.verdict(t)
	if !v.CanAdmit || v.Mode != "seed" || v.Lease == nil || v.Worker != "uid-1" || v.Epoch != "uid-1/1999999999500" ||
		v.State != "Active" {
		t.Errorf("verdict %+v, want an admitted seed signed by the worker", v)
	}
	if got := a.early[0].Get(admission.HeaderLease); v.Lease == nil || got != v.Lease.ID {
		t.Errorf("lease header %q, want the verdict's %+v", got, v.Lease)
	}
	if len(a.early[0].Get(admission.HeaderVerdict)) > 1024 {
		t.Error("the verdict header is longer than 1 KiB")
	}
	for _, name := range []string{admission.HeaderVerdict, admission.HeaderLease} {
		if a.header.Get(name) != "" {
			t.Errorf("%s reappears on the final answer", name)
		}
	}
	if a.header.Get(admission.HeaderOrigin) != "engine" || a.header.Get(admission.HeaderWire) != "1" {
		t.Errorf("headers %v, want the engine's answer on wire 1", a.header)
	}
	r.quiet()

	// The next turn finds its prompt and runs on D alone.
	a = r.send(t.Context(), ask(session, 1), chatPath, chat(1, true))
	if v := a.verdict(t); v.Mode != "direct" || v.ResidentTokens == 0 {
		t.Errorf("second turn %+v, want direct over what is resident", v)
	}
	s := r.quiet()
	if s.Sessions != 1 || s.Totals.PromptTokens != 240 || s.Totals.GeneratedTokens != 40 {
		t.Errorf("status %+v, want both turns counted", s)
	}
}

func TestRefusalIs409WithTheVerdict(t *testing.T) {
	e := newEngine(t)
	e.info["max_total_num_tokens"] = 500 // less than the prompt
	r := startRig(t, e).ready()
	a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, true))
	v := a.verdict(t)
	if a.status != http.StatusConflict || a.header.Get("Content-Type") != admission.ContentTypeVerdict || len(a.early) != 0 {
		t.Fatalf("status %d %v with %d early hints, want 409 alone", a.status, a.header, len(a.early))
	}
	if v.CanAdmit || v.Reason != "session-not-resident-no-capacity" || v.Lease != nil ||
		a.header.Get(admission.HeaderOrigin) != "sidecar" {
		t.Errorf("verdict %+v from %s, want a refusal for capacity", v, a.header.Get(admission.HeaderOrigin))
	}
	if e.count() != 0 {
		t.Error("a refused turn reached the engine")
	}
	if s := r.quiet(); s.Totals.Refusals["session-not-resident-no-capacity"] != 1 {
		t.Errorf("refusals %v, want it counted", s.Totals.Refusals)
	}
}

func TestLeaseTurn(t *testing.T) {
	r := newRig(t).ready()
	in := ask(session, 0)
	q := r.question(in, chat(0, false))
	v, err := r.ctl.Ask(t.Context(), r.base, q)
	if err != nil || !v.CanAdmit || v.Mode != "seed" {
		t.Fatalf("Ask = %+v, %v", v, err)
	}
	again, err := r.ctl.Ask(t.Context(), r.base, q)
	if err != nil || again.Lease.ID != v.Lease.ID {
		t.Errorf("the same attempt asked twice: %+v, %v; want the same lease", again, err)
	}
	in.Admit, in.Lease = admission.AdmitLease, v.Lease.ID
	other := in
	other.Attempt = attempts()
	if a := r.send(t.Context(), other, chatPath, chat(0, false)); a.status != 409 || a.verdict(t).Reason != "lease-expired" {
		t.Errorf("another attempt presented the lease: %d %s; want 409 lease-expired", a.status, a.body)
	}
	a := r.send(t.Context(), in, chatPath, chat(0, false))
	if a.status != 200 || a.body != wholeAnswer || len(a.early) != 0 {
		t.Errorf("presenting the lease: %d %s; want the engine's answer and no 103", a.status, a.body)
	}
	if a := r.send(t.Context(), in, chatPath, chat(0, false)); a.status != 409 || a.verdict(t).Reason != "lease-expired" {
		t.Errorf("presenting it twice: %d %s; want 409 lease-expired", a.status, a.body)
	}
	r.quiet()
}

// question is what the router would ask before sending body.
func (r *rig) question(in admission.Turn, body string) admission.Question {
	r.t.Helper()
	b, err := scan.Parse([]byte(body), scan.Limits{})
	if err != nil {
		r.t.Fatal(err)
	}
	chain, err := block.Of(block.Chat, b, "m", nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return admission.NewQuestion(kvc.Question{
		Attempt: in.Attempt, Blocks: chain.Blocks,
		Request: kvc.Request{Session: in.Session, Lineage: in.Lineage, Turn: in.Turn, OutputTokens: in.OutputTokens},
	}, in.Epoch, block.Chat)
}

// R82: what was promised to a router that vanished comes back by itself.
func TestLeaseExpires(t *testing.T) {
	clock := newClock()
	r := newRig(t, func(c *Config) { c.Now = clock.now }).ready()
	in := ask(session, 0)
	v, err := r.ctl.Ask(t.Context(), r.base, r.question(in, chat(0, false)))
	if err != nil || !v.CanAdmit {
		t.Fatalf("Ask = %+v, %v", v, err)
	}
	if s := r.s.status(); s.Reserved == 0 {
		t.Error("the lease reserves nothing")
	}
	clock.advance(time.Duration(v.Lease.TTLMS)*time.Millisecond + time.Millisecond)
	r.quiet()
	if got := r.metric("kvc_sidecar_leases_expired_total"); got != 1 {
		t.Errorf("leases_expired = %v, want 1", got)
	}
	in.Admit, in.Lease = admission.AdmitLease, v.Lease.ID
	if a := r.send(t.Context(), in, chatPath, chat(0, false)); a.status != 409 || a.verdict(t).Reason != "lease-expired" {
		t.Errorf("an expired lease: %d %s; want 409 lease-expired", a.status, a.body)
	}
}

func TestReleasedLeaseIsGone(t *testing.T) {
	r := newRig(t).ready()
	in := ask(session, 0)
	v, err := r.ctl.Ask(t.Context(), r.base, r.question(in, chat(0, false)))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // unknown the second time, and still 204
		if err := r.ctl.Release(t.Context(), r.base, v.Lease.ID); err != nil {
			t.Errorf("Release: %v", err)
		}
	}
	r.quiet()
	if got := r.metric("kvc_sidecar_leases_expired_total"); got != 0 {
		t.Errorf("a released lease counts as expired: %v", got)
	}
}

func TestStaleEpochIsRefusedOnEveryLeg(t *testing.T) {
	r := newRig(t).ready()
	for _, admit := range []admission.Admit{admission.AdmitAsk, admission.AdmitLease, admission.AdmitNone} {
		in := ask(session, 0)
		in.Admit, in.Lease, in.Epoch = admit, "x", "uid-1/1"
		a := r.send(t.Context(), in, chatPath, chat(0, false))
		if v := a.verdict(t); a.status != 409 || v.Reason != "stale-epoch" || v.Epoch != "uid-1/1999999999500" {
			t.Errorf("%s with an old epoch: %d %+v; want 409 stale-epoch and the epoch in force", admit, a.status, v)
		}
	}
	q := r.question(ask(session, 0), chat(0, false))
	q.Epoch = "uid-1/1"
	if v, err := r.ctl.Ask(t.Context(), r.base, q); err != nil || v.CanAdmit || v.Reason != "stale-epoch" {
		t.Errorf("RPC with an old epoch: %+v, %v; want a refusal", v, err)
	}
	if r.e.count() != 0 {
		t.Error("a turn for another incarnation reached the engine")
	}
}

// R19, R20, R53: D receives the client's exact bytes but for the spliced members.
func TestBodyIsByteIdenticalButForTheSplice(t *testing.T) {
	client := `{ "model":"m" , "stream":false,"bootstrap_room":7,"tools":[{"z":1,"a":{"y":2.50,"b":1e3}}],` +
		`"rid":"mine","seed":9007199254740993,"temperature":1.0,` +
		`"messages":[{"role":"user","content":"h\u00e9llo 北 🌍"}],"bootstrap_host":"evil","bootstrap_room":8}`
	cases := map[string]struct {
		path    kvc.DirectPath
		in      func() admission.Turn
		prepare bool // make the session resident first
		added   []string
	}{
		"a seed carries the rendezvous": {kvc.ConditionalAggregation, func() admission.Turn { return ask(session, 0) }, false,
			[]string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}},
		"a direct turn prefills locally": {kvc.ConditionalAggregation, func() admission.Turn { return ask(session, 1) }, true,
			[]string{"rid", "do_local_prefill"}},
		"unified adds nothing but the rid": {kvc.Unified, func() admission.Turn { return ask(session, 0) }, false,
			[]string{"rid"}},
		"a delta carries the rendezvous": {kvc.DeltaTransfer, func() admission.Turn { return ask(session, 1) }, true,
			[]string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}},
		"a fallback carries the rendezvous": {kvc.ConditionalAggregation, func() admission.Turn {
			in := ask(session, 0)
			in.Admit = admission.AdmitNone
			return in
		}, false, []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			e := newEngine(t)
			if tc.path == kvc.Unified {
				e.info["disaggregation_mode"] = "null"
			}
			r := startRig(t, e, func(c *Config) { c.DirectPath = tc.path }).ready()
			body := strings.Replace(client, "h\\u00e9llo", strings.Repeat("h\\u00e9llo ", 60), 1)
			if tc.prepare {
				r.send(t.Context(), ask(session, 0), chatPath, body)
				r.quiet()
			}
			in := tc.in()
			a := r.send(t.Context(), in, chatPath, body)
			if a.status != 200 || a.header.Get("X-Request-Id") != "mine" {
				t.Fatalf("status %d, x-request-id %q: %s; want 200 and the client's rid", a.status, a.header.Get("X-Request-Id"), a.body)
			}
			got := e.last()
			checkSplice(t, []byte(body), got.raw, tc.added)
			if got.body["rid"] != "kvc-"+in.Attempt {
				t.Errorf("rid %v, want kvc-%s", got.body["rid"], in.Attempt)
			}
			if _, ok := got.body["bootstrap_room"]; ok && (got.body["bootstrap_room"] != 42.0 || got.body["bootstrap_host"] != "10.0.0.7" ||
				got.body["bootstrap_port"] != 8998.0) {
				t.Errorf("rendezvous %v, want the router's", got.body)
			}
		})
	}
}

// checkSplice compares hashes of the bodies without the members that may differ,
// and what was added.
func checkSplice(t *testing.T, client, engine []byte, added []string) {
	t.Helper()
	ours := []string{"rid", "bootstrap_host", "bootstrap_port", "bootstrap_room", "do_local_prefill", "stream_options"}
	strip := func(b []byte) [sha256.Size]byte {
		p, err := scan.Parse(b, scan.Limits{})
		if err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		return sha256.Sum256(p.Apply(nil, scan.Splice{Del: ours}))
	}
	if strip(client) != strip(engine) {
		t.Errorf("bytes changed beside the splice:\nclient %s\nengine %s", client, engine)
	}
	want := map[string]int{}
	for _, k := range added {
		want[k] = 1
	}
	got := map[string]int{}
	dec := json.NewDecoder(strings.NewReader(string(engine)))
	for depth := 0; ; {
		tok, err := dec.Token()
		if err != nil {
			break
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
			} else {
				depth--
			}
		case string:
			for _, k := range ours {
				if depth == 1 && v == k {
					got[k]++
				}
			}
		}
	}
	for _, k := range ours {
		if got[k] != want[k] {
			t.Errorf("member %s appears %d times, want %d: %s", k, got[k], want[k], engine)
		}
	}
}

func TestBlocksAreACheckOnly(t *testing.T) {
	r := newRig(t).ready()
	in := ask(session, 0)
	in.Blocks = &admission.BlockCheck{Format: block.Format, Count: 3, Last: 9}
	if a := r.send(t.Context(), in, chatPath, chat(0, false)); a.status != 200 {
		t.Fatalf("a wrong check refused the turn: %d %s", a.status, a.body)
	}
	r.quiet()
	if got := r.metric("kvc_sidecar_block_mismatches_total"); got != 1 {
		t.Errorf("mismatches = %v, want 1", got)
	}
	// Under a lease, too, the body's own hashes are what becomes resident.
	in = ask("00000000000000bb", 0)
	q := r.question(in, `{"model":"m","messages":[{"role":"user","content":"`+strings.Repeat("other ", 100)+`"}]}`)
	v, err := r.ctl.Ask(t.Context(), r.base, q)
	if err != nil || !v.CanAdmit {
		t.Fatalf("Ask = %+v, %v", v, err)
	}
	in.Admit, in.Lease = admission.AdmitLease, v.Lease.ID
	in.Blocks = &admission.BlockCheck{Format: block.Format, Count: 1, Last: 1}
	if a := r.send(t.Context(), in, chatPath, chat(2, false)); a.status != 200 {
		t.Fatalf("lease turn: %d %s", a.status, a.body)
	}
	r.quiet()
	next := r.send(t.Context(), ask("00000000000000bb", 3), chatPath, chat(3, false))
	if v := next.verdict(t); v.Mode != "direct" {
		t.Errorf("the next turn is %+v, want direct: the body that ran was not credited", v)
	}
	r.quiet()
}
