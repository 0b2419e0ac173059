package admission

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

var attempt = strings.Repeat("0123456789abcdef", 2)

func validTurn() Turn {
	return Turn{
		Leg: LegDecode, Attempt: attempt, Admit: AdmitAsk, Epoch: "uid/17", Session: "00000000000000aa",
		Lineage: "00000000000000ab", Turn: 3, Class: "interactive", InputTokens: 98304, AppendTokens: 713,
		OutputTokens: 900, PrefillUncached: 1611,
		Blocks:    &BlockCheck{Format: block.Format, Count: 2, Last: 0xfedc},
		Bootstrap: &Bootstrap{Host: "fd00::7", Port: 8998, Room: 1<<63 - 1},
	}
}

func TestTurnHeadersRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := validTurn()
		want.Leg = rapid.SampledFrom([]Leg{LegDecode, LegPrefill}).Draw(t, "leg")
		want.Admit = rapid.SampledFrom([]Admit{AdmitAsk, AdmitLease, AdmitNone}).Draw(t, "admit")
		want.Lease = rapid.StringMatching(`[0-9a-f]{32}`).Draw(t, "lease")
		want.InputTokens = rapid.IntRange(0, 1<<40).Draw(t, "input")
		if want.Leg == LegPrefill {
			want.Turn = 0 // said on decode legs only
		}
		if rapid.Bool().Draw(t, "sessionless") {
			want.Session, want.Lineage, want.Blocks, want.Bootstrap = "", "", nil, nil
		}
		h := http.Header{}
		want.Write(h)
		got, err := ParseTurn(h)
		if err != nil {
			t.Fatalf("ParseTurn: %v", err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("headers changed the turn (-want +got):\n%s", d)
		}
	})
}

func TestParseTurnNamesTheHeader(t *testing.T) {
	cases := map[string]struct{ header, value string }{
		"a turn without a leg did not come from a router":  {HeaderLeg, ""},
		"an unknown leg is refused":                        {HeaderLeg, "both"},
		"an attempt must not be a prefix of another":       {HeaderAttempt, attempt[:31]},
		"upper case hex is another spelling, so refused":   {HeaderAttempt, strings.ToUpper(attempt)},
		"a decode leg says how it is admitted":             {HeaderAdmit, ""},
		"an unknown way of admission is refused":           {HeaderAdmit, "please"},
		"a session is a key, not a raw id":                 {HeaderSession, "agent-42"},
		"a lineage is a key, not a raw id":                 {HeaderLineage, "agent-42"},
		"negative tokens are refused":                      {HeaderInputTokens, "-1"},
		"tokens whose sums overflow are refused":           {HeaderOutputTokens, "4611686018427387904"},
		"a turn index is a number":                         {HeaderTurn, "first"},
		"a block check has three parts":                    {HeaderBlocks, "kvc-b96-v1,2"},
		"a block count is a number":                        {HeaderBlocks, "kvc-b96-v1,-2,000000000000fedc"},
		"a block hash is 16 hex digits":                    {HeaderBlocks, "kvc-b96-v1,2,xyz"},
		"a bootstrap has three parts":                      {HeaderBootstrap, "10.0.0.7,8998"},
		"a bootstrap host comes without brackets":          {HeaderBootstrap, "[fd00::7],8998,1"},
		"room 0 means not written yet to an engine":        {HeaderBootstrap, "10.0.0.7,8998,0"},
		"a room beyond 63 bits does not fit the engine":    {HeaderBootstrap, "10.0.0.7,8998,9223372036854775808"},
		"port 0 is no port":                                {HeaderBootstrap, "10.0.0.7,0,1"},
		"a host with a quote cannot enter a body verbatim": {HeaderBootstrap, `a"b,8998,1`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			h := http.Header{}
			validTurn().Write(h)
			h.Set(tc.header, tc.value)
			_, err := ParseTurn(h)
			if err == nil || !strings.Contains(err.Error(), tc.header) {
				t.Errorf("ParseTurn(%s: %q) = %v, want an error naming the header", tc.header, tc.value, err)
			}
		})
	}
	t.Run("lease without a lease id is refused", func(t *testing.T) {
		h := http.Header{}
		validTurn().Write(h)
		h.Set(HeaderAdmit, "lease")
		if _, err := ParseTurn(h); err == nil {
			t.Error("ParseTurn accepted admit=lease without a lease")
		}
	})
}

// R35: one list and one function for both directions.
func TestStripHopByHop(t *testing.T) {
	h := http.Header{}
	for _, line := range []string{
		"Connection: close, x-foo", "Connection: X-Bar", "X-Foo: 1", "X-Bar: 1", "Keep-Alive: timeout=5", "Te: trailers",
		"Trailer: X-T", "Transfer-Encoding: chunked", "Upgrade: websocket", "Proxy-Authorization: x", "Proxy-Connection: x",
		"Proxy-Authenticate: x", "Content-Length: 12", "Expect: 100-continue", "Content-Type: application/json", "X-Keep: 1",
	} {
		k, v, _ := strings.Cut(line, ": ")
		h.Add(k, v)
	}
	StripHopByHop(h)
	want := http.Header{"Content-Type": {"application/json"}, "X-Keep": {"1"}}
	if d := cmp.Diff(want, h); d != "" {
		t.Errorf("after StripHopByHop (-want +got):\n%s", d)
	}
}

// R41, in every spelling a client can make up.
func TestStripInternal(t *testing.T) {
	h := http.Header{"X-Kvc-Leg": {"a"}, "X-KVC-Odd": {"a"}, "x-kvc-raw": {"a"}, "X-Kvcx": {"keep"}, "Accept": {"keep"}}
	StripInternal(h)
	if d := cmp.Diff(http.Header{"X-Kvcx": {"keep"}, "Accept": {"keep"}}, h); d != "" {
		t.Errorf("after StripInternal (-want +got):\n%s", d)
	}
}

func TestForwarded(t *testing.T) {
	in := http.Header{
		"Connection": {"X-Hop"}, "X-Hop": {"1"}, "X-Kvc-Leg": {"decode"}, "X-Override-Max-Tokens": {"9"},
		"Traceparent": {"00-1-2-01"}, "X-Overrides": {"keep"},
	}
	before := in.Clone()
	want := http.Header{"Traceparent": {"00-1-2-01"}, "X-Overrides": {"keep"}}
	if d := cmp.Diff(want, Forwarded(in)); d != "" {
		t.Errorf("Forwarded (-want +got):\n%s", d)
	}
	if d := cmp.Diff(before, in); d != "" {
		t.Errorf("Forwarded changed what it was given:\n%s", d)
	}
}

func TestBootstrapAuthorityBracketsIPv6(t *testing.T) {
	if got := (Bootstrap{Host: "fd00::1", Port: 8998}).Authority(); got != "[fd00::1]:8998" {
		t.Errorf("Authority = %q, want [fd00::1]:8998 (R108)", got)
	}
}

func TestCheckOf(t *testing.T) {
	if got := CheckOf([]block.Hash{1, 2}); got != (BlockCheck{block.Format, 2, 2}) {
		t.Errorf("CheckOf = %+v, want the count and the last hash", got)
	}
	if got := CheckOf(nil); got != (BlockCheck{block.Format, 0, 0}) {
		t.Errorf("CheckOf(nil) = %+v, want count 0", got)
	}
}

func FuzzParseTurn(f *testing.F) {
	f.Add("decode", attempt, "ask", "10.0.0.7,8998,1", "kvc-b96-v1,2,000000000000fedc", "7")
	f.Add("prefill", attempt, "", ",,", ",,", "")
	f.Fuzz(func(t *testing.T, leg, att, admit, boot, blocks, n string) {
		h := http.Header{}
		for k, v := range map[string]string{
			HeaderLeg: leg, HeaderAttempt: att, HeaderAdmit: admit, HeaderBootstrap: boot, HeaderBlocks: blocks,
			HeaderTurn: n, HeaderInputTokens: n, HeaderLease: att,
		} {
			h.Set(k, v)
		}
		turn, err := ParseTurn(h)
		if err != nil {
			return
		}
		again := http.Header{}
		turn.Write(again)
		back, err := ParseTurn(again)
		if turn.Leg == LegPrefill {
			turn.Turn = 0
		}
		if err != nil || !cmp.Equal(turn, back) {
			t.Fatalf("accepted turn does not survive its own headers: %+v -> %+v, %v", turn, back, err)
		}
	})
}

func FuzzVerdict(f *testing.F) {
	f.Add(true, "direct", "", 5)
	f.Add(false, "", "no-d-capacity", 0)
	f.Fuzz(func(t *testing.T, can bool, mode, reason string, resident int) {
		v, err := Verdict{CanAdmit: can, Mode: mode, Reason: reason, ResidentTokens: resident}.Core()
		if err != nil {
			return
		}
		if v.CanAdmit == (v.Mode == kvc.ModeNone) {
			t.Fatalf("Core accepted can_admit %t with mode %q", can, mode)
		}
	})
}
