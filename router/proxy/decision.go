package proxy

import (
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvc-dev/kvc/router/kvc"
)

const (
	decisionsMost = 4096 // remembered turns
	eventsMost    = 32   // of one turn
)

// decision is what became of one turn, for kvc explain. It holds names, counts
// and reasons; never text, keys or addresses.
type decision struct {
	mu sync.Mutex
	v  Decision
	at time.Time
}

// Decision is one turn's story: GET /kvc/v1/explain?request_id=.
type Decision struct {
	RequestID string          `json:"request_id"`
	Route     string          `json:"route"`
	Session   kvc.SessionKey  `json:"session,omitempty"`
	Lineage   kvc.SessionKey  `json:"lineage,omitempty"`
	Turn      int             `json:"turn"`
	Blocks    int             `json:"blocks"`
	Input     int             `json:"input_tokens"`
	Append    int             `json:"append_tokens"`
	Started   time.Time       `json:"started"`
	Events    []DecisionEvent `json:"events"`
	Mode      string          `json:"mode,omitempty"`
	Worker    string          `json:"worker,omitempty"` // pod name
	Reason    string          `json:"reason,omitempty"`
	Attempts  int             `json:"attempts"`
	Outcome   string          `json:"outcome,omitempty"` // "" = still running
	TookMS    float64         `json:"took_ms,omitempty"`
	Usage     *DecisionUsage  `json:"usage,omitempty"`
}

// DecisionUsage is what the engine reported, in tokens.
type DecisionUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Cached     int `json:"cached_tokens"`
	Completion int `json:"completion_tokens"`
}

// DecisionEvent is one step.
type DecisionEvent struct {
	AtMS   float64 `json:"at_ms"`
	What   string  `json:"what"` // ask, run, retry, turn
	Worker string  `json:"worker,omitempty"`
	Detail string  `json:"detail,omitempty"`
	Way    string  `json:"way,omitempty"`    // of an ask: fused, rpc
	Result string  `json:"result,omitempty"` // of an ask
}

// decisionLog remembers the last turns.
type decisionLog struct {
	cache *lru.Cache[string, *decision]
}

func newDecisionLog() *decisionLog {
	c, err := lru.New[string, *decision](decisionsMost)
	if err != nil {
		c = nil // only for a size below 1
	}
	return &decisionLog{c}
}

func (l *decisionLog) start(t *turn) *decision {
	d := &decision{at: t.arrived, v: Decision{
		RequestID: t.id, Route: string(t.prompt.route), Session: t.req.Session, Lineage: t.req.Lineage,
		Turn: t.req.Turn, Blocks: len(t.prompt.chain.Blocks), Input: t.req.InputTokens, Append: t.req.AppendTokens,
		Started: t.arrived,
	}}
	l.cache.Add(t.id, d)
	return d
}

func (l *decisionLog) get(id string) (Decision, bool) {
	d, ok := l.cache.Get(id)
	if !ok {
		return Decision{}, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	v := d.v
	v.Events = append([]DecisionEvent(nil), v.Events...)
	return v, true
}

func (d *decision) add(e DecisionEvent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.v.Events) < eventsMost {
		e.AtMS = sinceMS(d.at)
		d.v.Events = append(d.v.Events, e)
	}
}

func sinceMS(t time.Time) float64 { return float64(time.Since(t).Microseconds()) / 1000 }

func (d *decision) event(what, worker, detail string) {
	d.add(DecisionEvent{What: what, Worker: worker, Detail: detail})
}

func (d *decision) asked(worker, way, result string, r kvc.Reply) {
	detail := string(r.Verdict.Reason)
	if r.Verdict.CanAdmit {
		detail = r.Verdict.Mode.String()
	}
	d.add(DecisionEvent{What: "ask", Worker: worker, Way: way, Result: result, Detail: detail})
}

func (d *decision) usage(u kvc.Usage) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if u != (kvc.Usage{}) {
		d.v.Usage = &DecisionUsage{u.PromptTokens, u.CachedTokens, u.CompletionTokens}
	}
}

func (d *decision) end(t *turn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.v.Mode, d.v.Worker, d.v.Reason = t.mode.String(), t.worker, string(t.reason)
	d.v.Attempts, d.v.Outcome, d.v.TookMS = t.machine.Attempts(), t.outcome, sinceMS(d.at)
}
