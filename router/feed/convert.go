package feed

import (
	"fmt"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// maxBlocks keeps a list of blocks well inside a line: 11 characters a block.
const maxBlocks = 1 << 15

// framesOf turns one ledger change into frames: several only for block lists
// that fit no line.
func framesOf(c kvc.Change) []Frame {
	switch c.Kind {
	case kvc.ChangeSession:
		s := sessionOf(c.Session)
		return []Frame{&s}
	case kvc.ChangeSessionGone:
		return []Frame{&Session{Key: string(c.Session.Key), Gone: true}}
	case kvc.ChangeAdd:
		return blockFrames(KindAdd, c)
	case kvc.ChangeEvict:
		return blockFrames(KindEvict, c)
	case kvc.ChangeOwn:
		return blockFrames(KindOwn, c)
	case kvc.ChangeTurn:
		t := c.Turn
		return []Frame{&Turn{
			Head: Head{T: KindTurn}, Attempt: t.Attempt, Session: string(t.Session), Mode: t.Mode.String(),
			PromptTokens: t.Usage.PromptTokens, CachedTokens: t.Usage.CachedTokens,
			CompletionTokens: t.Usage.CompletionTokens, Outcome: string(t.Outcome),
		}}
	default:
		return []Frame{&Head{T: KindClear}}
	}
}

func blockFrames(k Kind, c kvc.Change) (fs []Frame) {
	for rest := c.Blocks; len(rest) > 0; {
		n := min(len(rest), maxBlocks)
		fs = append(fs, &Blocks{Head: Head{T: k}, Owned: Owned{Owner: string(c.Owner), B: block.Encode(rest[:n])}})
		rest = rest[n:]
	}
	return fs
}

// snapshotOf splits a snapshot into parts that fit a line each.
func snapshotOf(s kvc.Snapshot, seq uint64) []*Snap {
	const maxSessions, maxRuns = 2000, 4000 // a session is below 300 bytes, a run below 60 plus its blocks
	var part *Snap
	var parts []*Snap
	blocks := 0 // in part
	next := func() {
		part = &Snap{
			Head: Head{T: KindSnap, Seq: seq}, Part: len(parts),
			Sessions: []Session{}, Blocks: []Owned{}, // none, which is not null
		}
		parts = append(parts, part)
		blocks = 0
	}
	next()
	for _, info := range s.Sessions {
		if len(part.Sessions) == maxSessions {
			next()
		}
		part.Sessions = append(part.Sessions, sessionOf(info))
	}
	for _, o := range s.Blocks {
		for rest := o.Blocks; len(rest) > 0; {
			if blocks >= maxBlocks || len(part.Blocks) >= maxRuns || len(part.Sessions) > 0 {
				next()
			}
			n := min(len(rest), maxBlocks-blocks)
			part.Blocks = append(part.Blocks, Owned{Owner: string(o.Owner), B: block.Encode(rest[:n])})
			blocks += n
			rest = rest[n:]
		}
	}
	part.Last = true
	return parts
}

func sessionOf(s kvc.SessionInfo) Session {
	out := Session{
		Key: string(s.Key), Lineage: string(s.Lineage), Blocks: s.Blocks,
		ResidentTokens: s.ResidentTokens, LastUseMS: unixMS(s.LastUse), Active: s.Active,
		ProtectedUntilMS: unixMS(s.ProtectedUntil),
	}
	if s.Tail != 0 {
		out.Tail = s.Tail.String()
	}
	return out
}

func (s *Session) info() (kvc.SessionInfo, error) {
	info := kvc.SessionInfo{
		Key: kvc.SessionKey(s.Key), Lineage: kvc.SessionKey(s.Lineage), Blocks: s.Blocks,
		ResidentTokens: s.ResidentTokens, LastUse: fromMS(s.LastUseMS), Active: s.Active,
		ProtectedUntil: fromMS(s.ProtectedUntilMS),
	}
	if s.Key == "" {
		return info, errNoKey
	}
	if s.Tail == "" {
		return info, nil
	}
	tail, err := block.ParseHash(s.Tail)
	if err != nil {
		return info, fmt.Errorf("session tail: %w", err)
	}
	info.Tail = tail
	return info, nil
}

func (t *Turn) info() (kvc.TurnInfo, error) {
	mode, ok := kvc.ParseMode(t.Mode)
	if !ok {
		return kvc.TurnInfo{}, fmt.Errorf("turn mode %q is none of direct, delta, seed, reseed, fallback", t.Mode)
	}
	return kvc.TurnInfo{
		Attempt: t.Attempt, Session: kvc.SessionKey(t.Session), Mode: mode, Outcome: kvc.Outcome(t.Outcome),
		Usage: kvc.Usage{
			PromptTokens: t.PromptTokens, CachedTokens: t.CachedTokens, CompletionTokens: t.CompletionTokens,
		},
	}, nil
}

// add appends one part's content to a snapshot.
func (p *Snap) add(s *kvc.Snapshot) error {
	for i := range p.Sessions {
		info, err := p.Sessions[i].info()
		if err != nil {
			return err
		}
		s.Sessions = append(s.Sessions, info)
	}
	for _, o := range p.Blocks {
		hs, err := block.Decode(o.B)
		if err != nil {
			return err
		}
		s.Blocks = append(s.Blocks, kvc.OwnedBlocks{Owner: kvc.SessionKey(o.Owner), Blocks: hs})
	}
	return nil
}

func unixMS(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

func fromMS(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}
