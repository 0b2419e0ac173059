package admission

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// NewQuestion puts a question on the wire.
func NewQuestion(q kvc.Question, epoch string, route block.Route) Question {
	return Question{
		Attempt: q.Attempt, Session: string(q.Session), Lineage: string(q.Lineage), Epoch: epoch,
		Turn: q.Turn, Class: q.Class,
		InputTokens: q.InputTokens, AppendTokens: q.AppendTokens, OutputTokens: q.OutputTokens,
		PrefillUncachedTokens: q.PrefillUncachedTokens,
		Format:                block.Format, Blocks: block.Encode(q.Blocks), Route: string(route),
	}
}

// Core reads a question off the wire. Its errors name the member.
func (q Question) Core() (kvc.Question, error) {
	bad := func(member, want string) (kvc.Question, error) {
		return kvc.Question{}, fmt.Errorf("%s: want %s", member, want)
	}
	switch {
	case !isHex(q.Attempt, 32):
		return bad("attempt", "32 hex digits")
	case q.Session != "" && !isHex(q.Session, 16):
		return bad("session", "16 hex digits")
	case q.Lineage != "" && !isHex(q.Lineage, 16):
		return bad("lineage", "16 hex digits")
	case q.Format != block.Format:
		return bad("format", block.Format)
	case min(q.Turn, q.InputTokens, q.AppendTokens, q.OutputTokens, q.PrefillUncachedTokens) < 0,
		max(q.Turn, q.InputTokens, q.AppendTokens, q.OutputTokens, q.PrefillUncachedTokens) > mostCount:
		return bad("turn and token counts", "numbers from 0 to "+strconv.Itoa(mostCount))
	}
	switch block.Route(q.Route) {
	case block.Chat, block.Completions, block.Generate:
	default:
		return bad("route", "chat, completions or generate")
	}
	hs, err := block.Decode(q.Blocks)
	if err != nil {
		return kvc.Question{}, fmt.Errorf("blocks: %w", err)
	}
	return kvc.Question{
		Attempt: q.Attempt,
		Request: kvc.Request{
			Session: kvc.SessionKey(q.Session), Lineage: kvc.SessionKey(q.Lineage), Turn: q.Turn,
			InputTokens: q.InputTokens, AppendTokens: q.AppendTokens, OutputTokens: q.OutputTokens,
			Class: q.Class,
		},
		Blocks:                hs,
		PrefillUncachedTokens: q.PrefillUncachedTokens,
	}, nil
}

// NewVerdict puts a verdict on the wire; the caller adds worker, epoch and state.
func NewVerdict(v kvc.Verdict) Verdict {
	w := Verdict{
		CanAdmit: v.CanAdmit, Mode: v.Mode.String(), Reason: string(v.Reason),
		ResidentTokens: v.ResidentTokens, AppendTokens: v.AppendTokens, FreeTokens: v.FreeTokens,
		RetryAfterMS: v.RetryAfter.Milliseconds(), PauseMS: v.Pause.Milliseconds(),
	}
	if v.CanAdmit && v.Lease.ID != "" {
		w.Lease = &Lease{ID: v.Lease.ID, Tokens: v.Lease.Tokens, TTLMS: v.Lease.TTL.Milliseconds()}
	}
	return w
}

// Core reads a verdict off the wire. An admission without a known mode, a refusal
// that carries one, and a refusal without a reason are errors: the caller treats
// them as unanswered. A stray 200 of something on the way, such as {} or an error
// object, has no reason (Q8).
func (v Verdict) Core() (kvc.Verdict, error) {
	mode, ok := kvc.ParseMode(v.Mode)
	if !ok || v.CanAdmit == (mode == kvc.ModeNone) {
		return kvc.Verdict{}, fmt.Errorf("verdict: can_admit %t with mode %q", v.CanAdmit, v.Mode)
	}
	if !v.CanAdmit && v.Reason == "" {
		return kvc.Verdict{}, errors.New("verdict: a refusal without a reason")
	}
	c := kvc.Verdict{
		CanAdmit: v.CanAdmit, Mode: mode, Reason: kvc.Reason(v.Reason),
		ResidentTokens: v.ResidentTokens, AppendTokens: v.AppendTokens, FreeTokens: v.FreeTokens,
		RetryAfter: time.Duration(v.RetryAfterMS) * time.Millisecond,
		Pause:      time.Duration(v.PauseMS) * time.Millisecond,
	}
	if v.Lease != nil {
		c.Lease = kvc.Lease{ID: v.Lease.ID, Tokens: v.Lease.Tokens, TTL: time.Duration(v.Lease.TTLMS) * time.Millisecond}
	}
	return c, nil
}
