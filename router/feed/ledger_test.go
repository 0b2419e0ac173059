package feed

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// ledgerWorker is a real ledger behind a feed, serialised as a sidecar does it.
type ledgerWorker struct {
	mu     sync.Mutex
	ledger *kvc.Ledger
	server *Server
	now    time.Time
	rng    *rand.Rand
	chains map[kvc.SessionKey][]block.Hash
	turns  int
}

func (w *ledgerWorker) snapshot() (kvc.Snapshot, uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.server.Publish(w.ledger.Changes()...)
	return w.ledger.Snapshot(), w.server.Seq()
}

// turn plays a turn of some session: its prompt grows, forks or is reset, and
// the worker is small, so that every kind of change occurs.
func (w *ledgerWorker) turn() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turns++
	w.now = w.now.Add(time.Duration(w.rng.IntN(20)) * time.Second)
	key := kvc.SessionKey(fmt.Sprintf("%016x", w.rng.IntN(8)+1))
	chain := w.chains[key]
	if len(chain) == 0 {
		for i := range 10 {
			chain = append(chain, block.Hash(i+1)) // everyone's boilerplate
		}
	}
	if w.rng.IntN(6) == 0 {
		chain = chain[:w.rng.IntN(len(chain))]
	}
	chain = append([]block.Hash(nil), chain...)
	for range w.rng.IntN(20) {
		chain = append(chain, block.Hash(w.rng.Uint64()|1<<40))
	}
	w.chains[key] = chain
	q := kvc.Question{
		Attempt: fmt.Sprintf("%032x", w.turns), Blocks: chain,
		Request: kvc.Request{Session: key, Lineage: key, Turn: w.turns},
	}
	w.ledger.BeginUnadmitted(q, kvc.Fallback, w.now)
	w.server.Publish(w.ledger.Changes()...)
	u := kvc.Usage{PromptTokens: 24*len(chain) + 5, CompletionTokens: w.rng.IntN(200)}
	w.ledger.End(q.Attempt, u, kvc.OutcomeOK, w.now)
	switch w.rng.IntN(60) {
	case 0:
		w.ledger.Clear(w.now)
	case 1:
		w.ledger.Forget(key, w.now)
	}
	w.server.Publish(w.ledger.Changes()...)
}

// What a follower believes is what the ledger holds, whenever it came and
// however often its connection broke.
func TestFollowersBelieveWhatTheLedgerHolds(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			lw := &ledgerWorker{
				now: time.UnixMilli(1_000_000), rng: rand.New(rand.NewPCG(seed, 7)),
				chains: map[kvc.SessionKey][]block.Hash{},
				ledger: kvc.NewLedger(kvc.LedgerConfig{
					CapacityTokens: 6000, PageSize: 1, DirectPath: kvc.Unified, Params: kvc.Corrected(),
				}),
			}
			w := newWorker(t, hello("w1/1"), 0)
			w.Server.cfg.Snapshot = lw.snapshot
			lw.server = w.Server
			var followers []*Follower
			var pictures []*picture
			for i := range 5 {
				f, p := follow(t, w)
				followers, pictures = append(followers, f), append(pictures, p)
				for range 40 {
					lw.turn()
				}
				if i%2 == 1 {
					w.http.CloseClientConnections()
				}
			}
			snap, seq := lw.snapshot()
			wantBlocks := map[block.Hash]kvc.SessionKey{}
			for _, o := range snap.Blocks {
				for _, h := range o.Blocks {
					wantBlocks[h] = o.Owner
				}
			}
			wantSessions := map[kvc.SessionKey]kvc.SessionInfo{}
			for _, s := range snap.Sessions {
				wantSessions[s.Key] = s
			}
			for i, f := range followers {
				p := pictures[i]
				p.until(t, fmt.Sprint("seq ", seq), func() bool {
					pos := f.Position()
					return pos.Trusted && pos.Seq == seq
				})
				p.mu.Lock()
				if diff := cmp.Diff(wantBlocks, p.blocks); diff != "" {
					t.Errorf("follower %d, blocks (-ledger +follower):\n%s", i, diff)
				}
				if diff := cmp.Diff(wantSessions, p.sessions); diff != "" {
					t.Errorf("follower %d, sessions (-ledger +follower):\n%s", i, diff)
				}
				p.mu.Unlock()
			}
		})
	}
}
