package admission

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Leg says which of a turn's two requests this is.
type Leg string

// The values of x-kvc-leg.
const (
	LegPrefill Leg = "prefill"
	LegDecode  Leg = "decode"
)

// Admit says how a decode leg comes by its place.
type Admit string

// The values of x-kvc-admit.
const (
	AdmitAsk   Admit = "ask"   // the question travels with the turn (fused)
	AdmitLease Admit = "lease" // a lease was granted by the RPC
	AdmitNone  Admit = "none"  // fallback: wait in the worker's bounded queue
)

// The values of x-kvc-origin: who composed an answer.
const (
	OriginSidecar = "sidecar"
	OriginEngine  = "engine"
)

// Bootstrap is the rendezvous of the two legs (x-kvc-bootstrap).
type Bootstrap struct {
	Host string // without brackets
	Port int
	Room int64 // 1..2^63-1; 0 means "not written yet" to a decode engine
}

// String is the header's form: host,port,room.
func (b Bootstrap) String() string {
	return b.Host + "," + strconv.Itoa(b.Port) + "," + strconv.FormatInt(b.Room, 10)
}

// ParseBootstrap reads String's form.
func ParseBootstrap(s string) (Bootstrap, error) {
	bad := func(what string) (Bootstrap, error) {
		return Bootstrap{}, fmt.Errorf("%s: %s: want host,port,room, such as 10.0.0.7,8998,12345", HeaderBootstrap, what)
	}
	host, rest, ok := strings.Cut(s, ",")
	port, room, ok2 := strings.Cut(rest, ",")
	if !ok || !ok2 || host == "" || strings.ContainsAny(host, "[]\"\\ /") {
		return bad("malformed")
	}
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 {
		return bad("port out of range 1..65535")
	}
	r, err := strconv.ParseInt(room, 10, 64)
	if err != nil || r < 1 {
		return bad("room out of range 1..2^63-1")
	}
	return Bootstrap{Host: host, Port: int(p), Room: r}, nil
}

// BlockCheck is x-kvc-blocks: what the router hashed, for comparison only.
type BlockCheck struct {
	Format string
	Count  int
	Last   block.Hash // the zero hash when Count is 0
}

// CheckOf summarises a chain.
func CheckOf(hs []block.Hash) BlockCheck {
	c := BlockCheck{Format: block.Format, Count: len(hs)}
	if len(hs) > 0 {
		c.Last = hs[len(hs)-1]
	}
	return c
}

// String is the header's form: format,count,hex of last.
func (c BlockCheck) String() string {
	return c.Format + "," + strconv.Itoa(c.Count) + "," + c.Last.String()
}

// ParseBlockCheck reads String's form.
func ParseBlockCheck(s string) (BlockCheck, error) {
	f := strings.Split(s, ",")
	if len(f) != 3 {
		return BlockCheck{}, fmt.Errorf("%s: want format,count,last", HeaderBlocks)
	}
	n, err := strconv.Atoi(f[1])
	if err != nil || n < 0 {
		return BlockCheck{}, fmt.Errorf("%s: count must be a number, not %q", HeaderBlocks, f[1])
	}
	h, err := block.ParseHash(f[2])
	if err != nil {
		return BlockCheck{}, fmt.Errorf("%s: %w", HeaderBlocks, err)
	}
	return BlockCheck{Format: f[0], Count: n, Last: h}, nil
}

// Turn is everything a router says beside the body of a turn (wire.md §1).
// Zero members are not sent.
type Turn struct {
	Leg     Leg
	Attempt string // 32 hex digits, the same on both legs
	Admit   Admit  // decode legs only
	Lease   string // with AdmitLease
	Epoch   string // the epoch the router believes in; "" = unknown

	Session, Lineage kvc.SessionKey
	Turn             int
	Class            string

	InputTokens, AppendTokens, OutputTokens int
	PrefillUncached                         int

	Blocks    *BlockCheck
	Bootstrap *Bootstrap
}

// Write sets the headers of t on h, the wire version included.
func (t Turn) Write(h http.Header) {
	h.Set(HeaderWire, WireVersion)
	text := func(name, v string) {
		if v != "" {
			h.Set(name, v)
		}
	}
	number := func(name string, v int) {
		if v != 0 {
			h.Set(name, strconv.Itoa(v))
		}
	}
	text(HeaderLeg, string(t.Leg))
	text(HeaderAttempt, t.Attempt)
	text(HeaderAdmit, string(t.Admit))
	text(HeaderLease, t.Lease)
	text(HeaderEpoch, t.Epoch)
	text(HeaderSession, string(t.Session))
	text(HeaderLineage, string(t.Lineage))
	text(HeaderClass, t.Class)
	number(HeaderInputTokens, t.InputTokens)
	number(HeaderAppendTokens, t.AppendTokens)
	number(HeaderOutputTokens, t.OutputTokens)
	number(HeaderPrefillUncached, t.PrefillUncached)
	if t.Leg == LegDecode {
		h.Set(HeaderTurn, strconv.Itoa(t.Turn))
	}
	if t.Blocks != nil {
		h.Set(HeaderBlocks, t.Blocks.String())
	}
	if t.Bootstrap != nil {
		h.Set(HeaderBootstrap, t.Bootstrap.String())
	}
}

// ParseTurn reads a turn's headers. Its errors name the header and the remedy.
func ParseTurn(h http.Header) (Turn, error) {
	t := Turn{
		Leg:     Leg(h.Get(HeaderLeg)),
		Attempt: h.Get(HeaderAttempt),
		Admit:   Admit(h.Get(HeaderAdmit)),
		Lease:   h.Get(HeaderLease),
		Epoch:   h.Get(HeaderEpoch),
		Session: kvc.SessionKey(h.Get(HeaderSession)),
		Lineage: kvc.SessionKey(h.Get(HeaderLineage)),
		Class:   h.Get(HeaderClass),
	}
	if err := t.check(); err != nil {
		return Turn{}, err
	}
	for name, p := range map[string]*int{
		HeaderTurn: &t.Turn, HeaderInputTokens: &t.InputTokens, HeaderAppendTokens: &t.AppendTokens,
		HeaderOutputTokens: &t.OutputTokens, HeaderPrefillUncached: &t.PrefillUncached,
	} {
		if err := count(h, name, p); err != nil {
			return Turn{}, err
		}
	}
	return t, t.parseStructured(h)
}

func (t *Turn) check() error {
	switch {
	case t.Leg != LegPrefill && t.Leg != LegDecode:
		return fmt.Errorf("%s: want prefill or decode, not %q; turns reach a worker through the router", HeaderLeg, t.Leg)
	case !isHex(t.Attempt, 32):
		return fmt.Errorf("%s: want 32 hex digits", HeaderAttempt)
	case t.Session != "" && !isHex(string(t.Session), 16):
		return fmt.Errorf("%s: want 16 hex digits", HeaderSession)
	case t.Lineage != "" && !isHex(string(t.Lineage), 16):
		return fmt.Errorf("%s: want 16 hex digits", HeaderLineage)
	case t.Leg == LegPrefill:
		return nil
	}
	switch t.Admit {
	case AdmitAsk, AdmitNone:
		return nil
	case AdmitLease:
		if t.Lease == "" {
			return fmt.Errorf("%s: lease needs %s", HeaderAdmit, HeaderLease)
		}
		return nil
	}
	return fmt.Errorf("%s: want ask, lease or none, not %q", HeaderAdmit, t.Admit)
}

func (t *Turn) parseStructured(h http.Header) error {
	if s := h.Get(HeaderBlocks); s != "" {
		c, err := ParseBlockCheck(s)
		if err != nil {
			return err
		}
		t.Blocks = &c
	}
	if s := h.Get(HeaderBootstrap); s != "" {
		b, err := ParseBootstrap(s)
		if err != nil {
			return err
		}
		t.Bootstrap = &b
	}
	return nil
}

func count(h http.Header, name string, p *int) error {
	s := h.Get(name)
	if s == "" {
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n > mostCount {
		return fmt.Errorf("%s: want a number from 0 to %d, not %q", name, mostCount, s)
	}
	*p = n
	return nil
}

// mostCount bounds turn and token counts of the wire, so that sums of them stay
// numbers: a ledger that overflowed would admit everything.
const mostCount = 1 << 40

func isHex(s string, n int) bool {
	if len(s) != n {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// StripHopByHop removes the headers that belong to one connection: the fixed
// list of RFC 9110 §7.6.1, what Connection names, and framing, which is always
// computed anew (R35). Both directions of every proxy here use this function.
func StripHopByHop(h http.Header) {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name != "" {
				h.Del(name)
			}
		}
	}
	for _, name := range [...]string{
		"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
		"Te", "Trailer", "Transfer-Encoding", "Upgrade", "Http2-Settings", "Content-Length", "Expect",
	} {
		h.Del(name)
	}
}

// StripInternal removes every x-kvc-* header (R41).
func StripInternal(h http.Header) {
	for name := range h {
		if len(name) > 6 && strings.EqualFold(name[:6], "x-kvc-") {
			delete(h, name)
		}
	}
}

// Forwarded is a copy of a request's headers less what no hop of ours may pass
// on: another connection's (R35), our own (R41), and X-Override-*, which engines
// obey as orders from whoever sends them.
func Forwarded(in http.Header) http.Header {
	h := in.Clone()
	StripHopByHop(h)
	StripInternal(h)
	for name := range h {
		if strings.HasPrefix(name, "X-Override-") {
			delete(h, name)
		}
	}
	return h
}

// Authority joins host and port for a URL, IPv6 included (R108).
func (b Bootstrap) Authority() string { return net.JoinHostPort(b.Host, strconv.Itoa(b.Port)) }
