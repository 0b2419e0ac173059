package replay

import "github.com/kvc-dev/kvc/router/trace"

// Recorded is a Source of given sessions, in order.
type Recorded struct{ sessions []trace.Session }

// NewRecorded replays sessions once.
func NewRecorded(sessions []trace.Session) *Recorded { return &Recorded{sessions: sessions} }

// Next returns the next session, false after the last.
func (r *Recorded) Next() (trace.Session, bool) {
	if len(r.sessions) == 0 {
		return trace.Session{}, false
	}
	s := r.sessions[0]
	r.sessions = r.sessions[1:]
	return s, true
}

// Generated is a Source without end.
type Generated struct{ g *trace.Generator }

// NewGenerated draws sessions of g for as long as they are asked for.
func NewGenerated(g *trace.Generator) Generated { return Generated{g} }

// Next draws a session.
func (g Generated) Next() (trace.Session, bool) { return g.g.Session(), true }
