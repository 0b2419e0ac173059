package feed

import (
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// conn checks and applies the frames of one connection.
type conn struct {
	f     *Follower
	hello *Hello
	last  uint64        // seq of the last change applied
	live  bool          // changes continue at last+1
	deaf  bool          // residency is in a format that is not ours
	snap  *kvc.Snapshot // being received; nil otherwise
	part  int           // expected next
	seq   uint64        // of the snapshot being received
}

// frame applies one line. An error ends the connection.
func (c *conn) frame(line []byte) error {
	fr, err := Decode(line)
	if err != nil {
		return faultf(CauseMalformed, "%v", err)
	}
	if h, ok := fr.(*Hello); ok {
		if c.hello != nil {
			return faultf(CauseMalformed, "a second hello on one connection")
		}
		return c.greet(h)
	}
	if c.hello == nil {
		return faultf(CauseMalformed, "the first frame is %q, want hello", fr.head().T)
	}
	if s, ok := fr.(*Snap); ok {
		return c.snapshot(s)
	}
	if !c.live {
		return faultf(CauseGap, "a %q frame before the snapshot was complete", fr.head().T)
	}
	return c.change(fr)
}

// greet decides whether what is known can be carried on.
func (c *conn) greet(h *Hello) error {
	f, was := c.f, c.f.Position()
	if err := c.acceptable(h, was); err != nil {
		return err
	}
	if !h.Resume {
		switch {
		case h.Epoch != was.Epoch:
			f.distrust(CauseEpoch)
		case h.Seq < was.Seq:
			f.distrust(CauseRollback)
		default:
			f.distrust(CauseGap)
		}
	}
	c.hello = h
	c.deaf = h.Format != block.Format
	if c.deaf {
		f.distrust(CauseFormat)
	}
	c.live, c.last = h.Resume, was.Seq
	f.sink.Hello(*h)
	if h.State != "" {
		f.sink.State(h.State, fromMS(h.SoftDeadlineMS), fromMS(h.HardDeadlineMS))
	}
	return nil
}

// acceptable refuses a peer that no snapshot could make good.
func (c *conn) acceptable(h *Hello, was Position) error {
	worker := string(c.f.cfg.Worker)
	switch {
	case h.Wire > Wire:
		return faultf(CauseWire, "the worker speaks wire version %d, this router %d", h.Wire, Wire)
	case worker != "" && h.Worker != worker:
		return faultf(CauseWorker, "the address belongs to worker %q now", h.Worker)
	case h.Resume && (!was.Trusted || h.Epoch != was.Epoch || h.Seq < was.Seq):
		return faultf(CauseRollback, "the worker resumes at %d of %q, this router is at %d of %q",
			h.Seq, h.Epoch, was.Seq, was.Epoch)
	default:
		return nil
	}
}

// snapshot collects the parts and hands them over together, so that nobody
// sees half of one.
func (c *conn) snapshot(s *Snap) error {
	if s.Part == 0 {
		c.snap, c.part, c.seq = &kvc.Snapshot{}, 0, s.Seq
		c.live = false
	}
	if c.snap == nil || s.Part != c.part || s.Seq != c.seq {
		return faultf(CauseGap, "snapshot part %d of %d follows part %d of %d", s.Part, s.Seq, c.part-1, c.seq)
	}
	c.part++
	if !c.deaf {
		if err := s.add(c.snap); err != nil {
			return faultf(CauseMalformed, "%v", err)
		}
	}
	if !s.Last {
		return nil
	}
	snap := *c.snap
	c.snap, c.live, c.last = nil, true, s.Seq
	if !c.deaf {
		c.f.sink.Reset(snap)
	}
	c.f.advance(c.hello.Epoch, c.last)
	if !c.deaf {
		c.f.trust()
	}
	return nil
}

// change applies one numbered change, or a heartbeat between two.
func (c *conn) change(fr Frame) error {
	h := fr.head()
	want := c.last
	if h.T.raises() {
		want++
	}
	_, unknown := fr.(*Head)
	switch {
	case h.Seq == want || (unknown && h.T != KindClear && h.Seq == c.last):
	case h.Seq > want:
		return faultf(CauseGap, "%s frame %d follows %d", h.T, h.Seq, c.last)
	default:
		return faultf(CauseRollback, "%s frame %d follows %d", h.T, h.Seq, c.last)
	}
	if err := c.apply(fr); err != nil {
		return faultf(CauseMalformed, "%v", err)
	}
	c.last = h.Seq
	c.f.advance(c.hello.Epoch, c.last)
	return nil
}

func (c *conn) apply(fr Frame) error {
	sink := c.f.sink
	switch fr := fr.(type) {
	case *Load:
		sink.Load(*fr)
	case *State:
		sink.State(fr.State, fromMS(fr.SoftDeadlineMS), fromMS(fr.HardDeadlineMS))
	case *Turn:
		t, err := fr.info()
		if err != nil {
			return err
		}
		sink.Turn(t)
	case *Session:
		return c.session(fr)
	case *Blocks:
		return c.blocks(fr)
	case *Head:
		if fr.T == KindClear && !c.deaf {
			sink.Clear()
		}
	}
	return nil
}

func (c *conn) session(fr *Session) error {
	s, err := fr.info()
	switch {
	case c.deaf || err != nil:
		return err
	case fr.Gone:
		c.f.sink.SessionGone(s.Key)
	default:
		c.f.sink.Session(s)
	}
	return nil
}

func (c *conn) blocks(fr *Blocks) error {
	hs, err := block.Decode(fr.B)
	owner := kvc.SessionKey(fr.Owner)
	switch {
	case c.deaf || err != nil:
		return err
	case fr.T == KindEvict:
		c.f.sink.Evict(hs)
	case owner == "":
		return errNoOwner
	case fr.T == KindAdd:
		c.f.sink.Add(owner, hs)
	default:
		c.f.sink.Own(owner, hs)
	}
	return nil
}
