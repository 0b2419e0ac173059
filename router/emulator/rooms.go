package emulator

import (
	"net/http"
	"strconv"
	"sync"
)

// The private data plane between emulators, in place of ZMQ and RDMA: the decode
// side posts a room to the prefill worker's rank port when its pages are
// allocated, and the answer comes when the KV has "arrived". No KV travels; how
// long it takes is the cost model's. DELETE gives a room up (SGLang's ABORT).

// roomRequest is the decode side's message.
type roomRequest struct {
	DecodePrefixLen int `json:"decode_prefix_len"`
}

// roomAnswer is the end of a transfer, with the metadata of contract §2.3 step 4.
type roomAnswer struct {
	First        int32  `json:"first_token"`
	CachedTokens int    `json:"cached_tokens"`
	Error        string `json:"error,omitempty"`
}

// rooms is the prefill side of the data plane.
type rooms struct {
	s  *Server
	mu sync.Mutex
	at map[uint64]chan roomAnswer
}

func newRooms(s *Server) *rooms { return &rooms{s: s, at: map[uint64]chan roomAnswer{}} }

func (m *rooms) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /rooms/{room}", m.join)
	mux.HandleFunc("DELETE /rooms/{room}", m.leave)
	return mux
}

func (m *rooms) join(w http.ResponseWriter, r *http.Request) {
	room, err := strconv.ParseUint(r.PathValue("room"), 10, 64)
	var body roomRequest
	if err != nil || !decodeSmall(w, r, &body) {
		return
	}
	answer := make(chan roomAnswer, 1)
	m.mu.Lock()
	_, taken := m.at[room]
	if !taken {
		m.at[room] = answer
	}
	m.mu.Unlock()
	if taken {
		writeJSON(w, http.StatusConflict, roomAnswer{Error: "the room is already in use"})
		return
	}
	defer m.forget(room)
	m.s.engine.do(func(c *core) { c.join(room, body.DecodePrefixLen) })
	select {
	case a := <-answer:
		writeJSON(w, http.StatusOK, a)
	case <-r.Context().Done():
		m.s.engine.do(func(c *core) { c.leave(room, false) })
	}
}

func (m *rooms) leave(w http.ResponseWriter, r *http.Request) {
	room, err := strconv.ParseUint(r.PathValue("room"), 10, 64)
	if err == nil {
		m.s.engine.do(func(c *core) { c.leave(room, true) })
	}
	w.WriteHeader(http.StatusNoContent)
}

// tell answers the decode side of a room, if it is still there.
func (m *rooms) tell(room uint64, a roomAnswer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if ch := m.at[room]; ch != nil {
		select {
		case ch <- a:
		default: // told already
		}
	}
}

func (m *rooms) forget(room uint64) {
	m.mu.Lock()
	delete(m.at, room)
	m.mu.Unlock()
	m.s.engine.do(func(c *core) { delete(c.early, room) })
}
