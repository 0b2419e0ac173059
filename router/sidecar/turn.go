package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

var errNotReady = errors.New("the engine has not answered yet")

// turn is one leg of one turn, from its body to its end.
type turn struct {
	s     *Sidecar
	in    admission.Turn
	inc   *incarnation
	route block.Route
	path  kvc.DirectPath // of this route
	body  *scan.Body
	q     kvc.Question

	mismatch bool // our hashes differ from the router's
	mode     kvc.Mode
	expected kvc.Expectation
	ledger   *kvc.Ledger
	began    time.Time

	// The engine's request, which outlives the client when its abort is deferred.
	cancel    context.CancelFunc
	mu        sync.Mutex
	deferring bool // an abort now would hit a KV hand-off
	streaming bool // the engine's first output was seen
	gone      bool // client, deadline or shutdown: the answer is wanted no more
	cap       *time.Timer
}

// serveTurn is the data path of wire.md §1: read the whole body, admit, answer,
// splice, forward.
func (s *Sidecar) serveTurn(route block.Route) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		t, refusal := s.readTurn(w, r, route)
		if refusal == nil {
			refusal = t.enter(r.Context(), w)
		}
		if refusal != nil {
			refusal.write(w)
			return
		}
		t.run(w, r)
	}
}

// refusal is an answer that the sidecar composes itself.
type refusal struct {
	status     int
	message    string
	verdict    *admission.Verdict // for 409
	retryAfter string
}

func (f *refusal) write(w http.ResponseWriter) {
	if f.status == 0 { // the peer has gone: nobody reads
		panic(http.ErrAbortHandler)
	}
	if f.retryAfter != "" {
		w.Header().Set("Retry-After", f.retryAfter)
	}
	if f.verdict != nil {
		admission.WriteJSON(w, f.status, admission.ContentTypeVerdict, f.verdict)
		return
	}
	admission.WriteError(w, f.status, f.message)
}

func bad(status int, format string, args ...any) *refusal {
	return &refusal{status: status, message: fmt.Sprintf(format, args...)}
}

// gone is the refusal nobody reads.
func gone() *refusal { return &refusal{} }

// readTurn reads headers and the whole body, also when the turn will be
// refused: an answer before the end of the upload would break the connection.
func (s *Sidecar) readTurn(w http.ResponseWriter, r *http.Request, route block.Route) (*turn, *refusal) {
	raw, err := readBody(w, r, s.cfg.MaxBodyBytes)
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, bad(http.StatusRequestEntityTooLarge,
			"request body is larger than %d bytes; shorten the prompt or raise the limit", tooLarge.Limit)
	case err != nil:
		return nil, gone()
	}
	in, err := admission.ParseTurn(r.Header)
	if err != nil {
		return nil, bad(http.StatusBadRequest, "%v", err)
	}
	if (in.Leg == admission.LegPrefill) != (s.cfg.Role == fleet.Prefill) {
		return nil, bad(http.StatusBadRequest, "%s: this worker is a %s worker", admission.HeaderLeg, s.cfg.Role)
	}
	inc := s.book.current()
	if inc == nil {
		return nil, unready()
	}
	body, err := scan.Parse(raw, scan.Limits{})
	if err != nil {
		return nil, bad(http.StatusBadRequest, "request body is not a JSON object: %v", err)
	}
	t := &turn{s: s, in: in, inc: inc, route: route, path: inc.path(route), body: body, began: s.cfg.Now()}
	return t, t.hash()
}

func readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	var b bytes.Buffer
	if n := r.ContentLength; n > 0 && n <= limit {
		b.Grow(int(n) + bytes.MinRead)
	}
	_, err := b.ReadFrom(http.MaxBytesReader(w, r.Body, limit))
	return b.Bytes(), err
}

func unready() *refusal {
	return &refusal{status: http.StatusServiceUnavailable, message: errNotReady.Error(), retryAfter: "1"}
}

// hash makes the ledger's question from the body itself; the router's numbers
// are hints (Q17) and its hashes a check.
func (t *turn) hash() *refusal {
	sc, _ := scratches.Get().(*block.Scratch)
	defer scratches.Put(sc)
	chain, err := block.Of(t.route, t.body, t.inc.model, sc)
	if err != nil {
		return bad(http.StatusBadRequest, "prompt: %v", err)
	}
	// The chain may live in the scratch, which the next turn reuses.
	blocks := append([]block.Hash(nil), chain.Blocks...)
	if c := t.in.Blocks; c != nil && *c != admission.CheckOf(blocks) {
		t.mismatch = true
		t.s.metrics.mismatches.Inc()
	}
	t.q = kvc.Question{
		Attempt: t.in.Attempt,
		Request: kvc.Request{
			Session: t.in.Session, Lineage: t.in.Lineage, Turn: t.in.Turn, Class: t.in.Class,
			InputTokens: t.s.book.tokens(chain), AppendTokens: t.in.AppendTokens, OutputTokens: t.in.OutputTokens,
		},
		Blocks:                blocks,
		PrefillUncachedTokens: t.in.PrefillUncached,
	}
	return nil
}

var scratches = sync.Pool{New: func() any { return new(block.Scratch) }}

// tokens converts a chain's length by the learnt ratio; ids are tokens.
func (b *book) tokens(c block.Chain) int {
	if c.IDs > 0 {
		return c.IDs
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	perBlock := float64(block.IDs)
	if b.l != nil {
		perBlock = b.l.TokensPerBlock()
	}
	return int(float64(c.Bytes)/block.Bytes*perBlock + 0.5)
}

// enter gets the turn its place, by the way the router chose. On success the
// turn is on the book and must be run.
func (t *turn) enter(ctx context.Context, w http.ResponseWriter) *refusal {
	switch {
	case t.in.Leg == admission.LegPrefill:
		return t.conflict(t.s.book.enterPrefill(t))
	case t.in.Admit == admission.AdmitNone:
		return t.enterQueue(ctx, w)
	case t.in.Admit == admission.AdmitLease:
		return t.conflict(t.s.book.enterLease(t, t.in.Lease))
	}
	return t.enterAsk(ctx, w)
}

// enterAsk is the fused question: 103 with verdict and lease, or 409 (wire.md §1).
func (t *turn) enterAsk(ctx context.Context, w http.ResponseWriter) *refusal {
	v, err := t.s.admit(ctx, t.q, t.in.Epoch, t.route)
	switch {
	case ctx.Err() != nil:
		t.s.book.release(v.Lease.ID)
		return gone()
	case err != nil:
		return unready()
	case !v.CanAdmit:
		return t.s.refused(v)
	}
	wire := t.s.wireVerdict(v)
	if f := t.conflict(t.s.book.enterLease(t, v.Lease.ID)); f != nil {
		return f
	}
	early(w, wire)
	return nil
}

// early sends a verdict ahead of the answer.
func early(w http.ResponseWriter, v admission.Verdict) {
	h := w.Header()
	h.Set(admission.HeaderVerdict, oneLine(v))
	if v.Lease != nil {
		h.Set(admission.HeaderLease, v.Lease.ID)
	}
	w.WriteHeader(http.StatusEarlyHints)
	h.Del(admission.HeaderVerdict) // else they reappear on the final answer
	h.Del(admission.HeaderLease)
}

// enterQueue waits for room. The 103 at its end tells the router that the
// prefill leg may start (R60).
func (t *turn) enterQueue(ctx context.Context, w http.ResponseWriter) *refusal {
	reason, err := t.s.book.join(ctx, t, t.s.cfg.QueueLimit, t.s.cfg.QueueWait)
	switch {
	case errors.Is(err, errNotReady):
		return unready()
	case err != nil:
		return gone()
	case reason == kvc.ReasonQueueFull:
		return &refusal{
			status: http.StatusServiceUnavailable, retryAfter: "1",
			message: "queue-full: no room on this worker; retry later",
		}
	}
	if f := t.conflict(reason, nil); f != nil {
		return f
	}
	early(w, t.s.wireVerdict(kvc.Verdict{CanAdmit: true, Mode: kvc.Fallback}))
	return nil
}

// conflict turns a reason for not beginning into its 409.
func (t *turn) conflict(reason kvc.Reason, err error) *refusal {
	if err != nil {
		return unready()
	}
	if reason == kvc.ReasonNone {
		return nil
	}
	return t.s.refused(kvc.Verdict{Reason: reason})
}

func (s *Sidecar) refused(v kvc.Verdict) *refusal {
	wire := s.wireVerdict(v)
	return &refusal{status: http.StatusConflict, verdict: &wire}
}

// rid names the turn at the engine. The attempt's fixed length keeps one rid
// from being a prefix of another, which is how engines match aborts.
func (t *turn) rid() string { return "kvc-" + t.in.Attempt }

// handover reports whether a decode leg receives KV from a prefill worker.
func (t *turn) handover() bool {
	return t.in.Leg == admission.LegDecode && t.in.Bootstrap != nil && t.path.NeedsPrefill(t.mode)
}

// edit says what is spliced, by profile and mode (wire.md §1).
func (t *turn) edit() (edit, *refusal) {
	e := edit{rid: t.rid(), usage: needsUsage(t.route, t.body)}
	switch {
	case t.in.Leg == admission.LegPrefill || t.handover():
		if e.bootstrap = t.in.Bootstrap; e.bootstrap == nil {
			return e, bad(http.StatusBadRequest, "%s: missing on a prefill leg", admission.HeaderBootstrap)
		}
	case t.path == kvc.ConditionalAggregation:
		// Also a turn that would need P when no P could be chosen: slower, not lost.
		e.local = true
	case t.path == kvc.DeltaTransfer:
		return e, bad(http.StatusBadRequest, "%s: missing; this engine needs a prefill worker for every turn",
			admission.HeaderBootstrap)
	}
	return e, nil
}

// clientRID is the rid the client chose: it comes back as x-request-id.
func (t *turn) clientRID() string {
	rid, ok := t.body.String("rid")
	if !ok || len(rid) > 256 || strings.ContainsFunc(rid, func(r rune) bool { return r < ' ' || r > '~' }) {
		return ""
	}
	return rid
}
