package emulator

import (
	"fmt"
	"net/http"
	"slices"
)

// admissible applies the checks of an engine before any queue (contract §2.2,
// §2.5).
func (c *core) admissible(s *sequence) (f finish, ok bool) {
	// A room wins over the flag: the router chose to transfer.
	s.local = s.local && c.cfg.localOK && !s.boot.set
	if c.cfg.mode != ModeNull && !s.boot.set && !s.local {
		return abortFinish(http.StatusBadRequest, fmt.Sprintf(
			"Invalid request: Disaggregated request received without bootstrap room id. req.rid='%s'", s.rid)), false
	}
	if most := c.kv.Capacity(); s.prompt > most {
		return abortFinish(http.StatusBadRequest, fmt.Sprintf(
			"Request %s exceeds the maximum number of tokens: %d > %d", s.rid, s.prompt, most)), false
	}
	if c.cfg.mode == ModeNull || s.local || s.boot.fake() {
		return finish{}, true
	}
	return c.enterRoom(s)
}

// enterRoom makes s the one live request of its room.
func (c *core) enterRoom(s *sequence) (f finish, ok bool) {
	if s.boot.host == "" && c.cfg.mode == ModeDecode {
		c.effects = append(c.effects, effect{effectCrash, s})
		return abortFinish(http.StatusInternalServerError, fmt.Sprintf(
			"bootstrap_host is missing beside bootstrap_room. req.rid='%s'", s.rid)), false
	}
	if _, live := c.rooms[s.boot.room]; live {
		c.effects = append(c.effects, effect{effectCrash, s})
		return abortFinish(http.StatusInternalServerError, fmt.Sprintf(
			"bootstrap_room %d is already in use by a live request. req.rid='%s'", s.boot.room, s.rid)), false
	}
	c.rooms[s.boot.room] = s
	return finish{}, true
}

// submitPrefill queues a sequence on a prefill worker: it runs once the decode
// side has sent its pages (contract §2.3 step 3).
func (c *core) submitPrefill(s *sequence) {
	prefix, here := c.early[s.boot.room]
	if here || s.boot.fake() {
		s.peerPrefix = prefix
		s.state = stateWaiting
		c.waiting = append(c.waiting, s)
		return
	}
	s.state = stateBootstrap
	c.bootstrapping = append(c.bootstrapping, s)
}

// join is the decode side's pages arriving at the prefill worker: prefix
// tokens of the prompt need not be sent. Either side may come first.
func (c *core) join(room uint64, prefix int) {
	c.early[room] = prefix
	s := c.rooms[room]
	if s == nil || s.state != stateBootstrap {
		return
	}
	c.bootstrapping = slices.DeleteFunc(c.bootstrapping, func(o *sequence) bool { return o == s })
	c.submitPrefill(s)
	c.start()
}

// send puts the KV of a prefilled prompt on the wire. Transfers of one worker
// share its link one after another.
func (c *core) send(s *sequence, first int32) {
	s.state, s.first = stateInflight, first
	if s.boot.fake() {
		c.transferred(s)
		return
	}
	if s.peerGone {
		c.transferFailed(s, "Failed to send kv chunk, the decode instance is gone")
		return
	}
	tokens := max(s.prompt-s.peerPrefix, 0)
	took := c.cfg.cost.Transfer(tokens, c.cfg.link)
	c.linkFree = max(c.linkFree, c.now) + took
	c.count.transfer(tokens, took)
	at, _ := slices.BinarySearchFunc(c.timers, timer{at: c.linkFree}, func(a, b timer) int {
		if a.at <= b.at {
			return -1
		}
		return 1
	})
	c.timers = slices.Insert(c.timers, at, timer{at: c.linkFree, seq: s})
}

// transferred ends a prefill worker's part: one token, finish length 0
// (contract §2.3 step 5, §2.4).
func (c *core) transferred(s *sequence) {
	if s.peerGone {
		c.transferFailed(s, "Failed to send kv chunk, the decode instance is gone")
		return
	}
	if !s.boot.fake() {
		c.effects = append(c.effects, effect{effectDelivered, s})
	}
	s.firstAt = c.now
	c.count.generated(c.now)
	c.finish(s, finish{kind: "length"}, s.first)
}

// transferFailed is a prefill worker losing its decode side.
func (c *core) transferFailed(s *sequence, why string) {
	c.count.transferFailed++
	c.effects = append(c.effects, effect{effectRefused, s})
	c.finish(s, abortFinish(http.StatusInternalServerError, fmt.Sprintf(
		"Prefill transfer failed for request rank=0 req.rid='%s' req.bootstrap_room=%d with exception %s",
		s.rid, s.boot.room, transferError(s.boot.room, why))))
}

func transferError(room uint64, why string) string {
	return fmt.Sprintf("KVTransferError(bootstrap_room=%d): %s", room, why)
}

// leave is the decode side going away: noticed at once when it said so, else
// when the KV would be sent.
func (c *core) leave(room uint64, said bool) {
	delete(c.early, room)
	s := c.rooms[room]
	if s == nil || s.state == stateBootstrap {
		return
	}
	s.peerGone = true
	if said {
		c.transferFailed(s, "Aborted by the decode instance")
		c.start()
	}
}

// bootstrapTimeout is a prefill worker that no decode worker came to.
func (c *core) bootstrapTimeout(s *sequence, seconds float64) {
	if s.state != stateBootstrap {
		return
	}
	c.count.bootstrapFailed++
	c.finish(s, abortFinish(http.StatusInternalServerError, fmt.Sprintf(
		"Prefill bootstrap failed for request rank=0 req.rid='%s' req.bootstrap_room=%d with exception %s",
		s.rid, s.boot.room, transferError(s.boot.room,
			fmt.Sprintf("Request %d timed out after %.1fs in KVPoll.Bootstrapping", s.boot.room, seconds)))))
}

// submitDecode queues a sequence on a decode worker.
func (c *core) submitDecode(s *sequence) {
	s.state = statePrealloc
	c.prealloc = append(c.prealloc, s)
	if s.boot.fake() {
		s.known = true
		return
	}
	c.effects = append(c.effects, effect{effectDiscover, s})
}

// discovered is the prefill worker of s answering on its bootstrap port.
func (c *core) discovered(s *sequence) {
	s.known = true
	c.start()
}

// preallocate gives KV to sequences whose prefill worker is known, in order of
// arrival: the first that does not fit holds up the rest (contract §2.3 step 3).
func (c *core) preallocate() {
	for i := 0; i < len(c.prealloc); {
		s := c.prealloc[i]
		if !s.known {
			i++
			continue
		}
		if !c.allocate(s) {
			return
		}
		c.prealloc = slices.Delete(c.prealloc, i, i+1)
		s.state = stateTransfer
		if s.boot.fake() {
			c.delivered(s, s.writer.token(0), 0)
			continue
		}
		c.effects = append(c.effects, effect{effectJoin, s})
	}
}

func (c *core) allocate(s *sequence) bool {
	own := s.tokens[:len(s.tokens)-1]
	if s.boot.fake() {
		own = nil
	}
	s.turn = c.kv.Begin(own)
	promised := 0
	for o := range c.seqs {
		if o.state == stateTransfer || o.state == stateJoining || o.state == stateRunning {
			promised += c.promise(o)
		}
	}
	if !c.hold(s, promised) {
		return false
	}
	s.cached = s.turn.Cached()
	if !s.boot.fake() {
		// Loading it back overlaps with the prefill elsewhere.
		s.fromHost = c.onHost(s)
		s.cached += s.fromHost
	}
	return true
}

// delivered is the KV of s arriving, with the first token and what the prefill
// worker found in its own cache; the answer reports the larger of the two
// (contract §6.3).
func (c *core) delivered(s *sequence, first int32, peerCached int) {
	if s.state != stateTransfer {
		return
	}
	s.first, s.reported = first, max(peerCached, s.cached)
	s.computed = s.prompt
	if !s.boot.fake() {
		c.commit(s, s.prompt)
	}
	delete(c.rooms, s.boot.room)
	c.count.prompt(s)
	s.state = stateJoining
	c.joining = append(c.joining, s)
}

// absorb moves what is ready into the batch. While a local prefill is cut into
// chunks, transferred sequences wait (contract §2.6).
func (c *core) absorb() {
	if c.partial != nil {
		return
	}
	for len(c.retracted) > 0 && len(c.running) < c.cfg.maxRunning && c.resume(c.retracted[0]) {
		c.retracted = c.retracted[1:]
	}
	for len(c.joining) > 0 && len(c.running) < c.cfg.maxRunning {
		s := c.joining[0]
		c.joining = c.joining[1:]
		s.state = stateRunning
		c.running = append(c.running, s)
		c.generate(s, s.first)
	}
}

// resume brings a retracted sequence back once the pool has room for it and a
// little more.
func (c *core) resume(s *sequence) bool {
	s.turn = c.kv.Begin(s.tokens[:len(s.tokens)-1])
	if !s.turn.Extend(len(s.tokens) + min(c.cfg.reserved, s.remaining())) {
		s.turn.End()
		s.turn = nil
		return false
	}
	s.state = stateRunning
	c.running = append(c.running, s)
	return true
}

// transferLost is a decode worker giving up on its prefill worker.
func (c *core) transferLost(s *sequence, message string) {
	if s.state == stateDone {
		return
	}
	c.count.transferFailed++
	c.finish(s, abortFinish(http.StatusInternalServerError, message))
	c.start()
}

// giveUpRoom tells the prefill worker that its decode side is going away. The
// other way round nothing is said: a decode worker learns of a dead or aborted
// prefill leg from the router, from heartbeats or from its own timeout.
func (c *core) giveUpRoom(s *sequence) {
	if s.state == stateTransfer && !s.boot.fake() {
		c.effects = append(c.effects, effect{effectAbortRoom, s})
	}
}

// peerLost fails every unfinished room of a prefill worker that is gone.
func (c *core) peerLost(of func(*sequence) bool, why string) {
	for s := range c.seqs {
		if (s.state == stateTransfer || s.state == statePrealloc) && !s.boot.fake() && of(s) {
			c.transferLost(s, lostMessage(s, why))
		}
	}
}
