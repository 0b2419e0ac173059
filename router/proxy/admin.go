package proxy

import (
	"cmp"
	"net/http"
	"net/http/pprof"
	"slices"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/state"
)

// Admin serves the admin port: metrics, status, explanations, profiles. It is
// not for clients, and listens on loopback unless told otherwise (R116).
func (p *Proxy) Admin() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", p.metrics.Handler())
	mux.HandleFunc("GET /healthz", p.serveHealth)
	mux.HandleFunc("GET /readyz", p.serveReady)
	mux.HandleFunc("GET "+admission.PathStatus, p.serveStatus)
	mux.HandleFunc("GET "+admission.PathExplain, p.serveDecision)
	mux.HandleFunc("POST "+admission.PathExplain, p.serveExplain)
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		(&refusal{status: http.StatusNotFound, reason: reasonRoute, code: "unknown_route",
			message: "Unknown admin route " + quotePath(r.URL.Path) + "."}).write(w)
	})
	return mux
}

// Status is GET /kvc/v1/status (wire.md §5).
func (p *Proxy) Status() admission.RouterStatus {
	st := p.state.Stats()
	out := admission.RouterStatus{
		Wire: 1, Router: p.id, StartedMS: p.started.UnixMilli(), Ready: len(p.unready()) == 0,
		Workers: []admission.RouterWorker{}, Classes: p.classes.status(),
		PinChanges: st.PinChanges, Sessions: st.Sessions,
	}
	if h := p.config.Load(); h != nil {
		out.ConfigHash = *h
	}
	out.Modes = modeNames(st.Modes)
	for _, ws := range st.Workers {
		if w := p.worker(ws.ID); w != nil {
			out.Workers = append(out.Workers, p.workerStatus(w, ws))
		}
	}
	slices.SortStableFunc(out.Workers, func(a, b admission.RouterWorker) int { return cmp.Compare(a.Pod, b.Pod) })
	return out
}

// modeNames spells modes as on the wire.
func modeNames(counts map[kvc.Mode]int64) map[string]int64 {
	out := make(map[string]int64, len(counts))
	for m, n := range counts {
		out[m.String()] = n
	}
	return out
}

func (p *Proxy) workerStatus(w *worker, ws state.WorkerStats) admission.RouterWorker {
	r := admission.RouterWorker{
		Worker: string(w.ID), Pod: w.Name, Role: string(w.Role), State: "Active",
		Trusted: ws.Trusted, InFlight: ws.Running, Breaker: worst(w),
		CapacityTokens: ws.Load.Capacity, Used: ws.Load.Used, Sessions: ws.Sessions,
		Modes: modeNames(ws.Modes),
	}
	if g := w.hello.Load(); g != nil && r.CapacityTokens == 0 {
		r.CapacityTokens = g.capacity // before the first heartbeat
	}
	r.Seq = w.follower.Position().Seq
	if w.draining() {
		r.State = "Draining"
	}
	return r
}

// worst is the state of the worker's less healthy breaker.
func worst(w *worker) string {
	for _, s := range [...]string{"open", "half-open"} {
		if w.data.String() == s || w.admit.String() == s {
			return s
		}
	}
	return "closed"
}

func (p *Proxy) serveStatus(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, p.Status())
}

// serveDecision tells what became of a turn.
func (p *Proxy) serveDecision(w http.ResponseWriter, r *http.Request) {
	id := r.URL.Query().Get("request_id")
	d, ok := p.decisions.get(id)
	if !ok {
		(&refusal{status: http.StatusNotFound, reason: "unknown-request", param: "request_id", code: "unknown_request",
			message: "No turn with this x-request-id is remembered; the last 4096 are. " +
				"POST a request body here to see how it would be routed now."}).write(w)
		return
	}
	writeJSON(w, http.StatusOK, d)
}

// Explanation is every worker's score for a request, and why.
type Explanation struct {
	state.Explanation
	Route    string            `json:"route"`
	Turn     int               `json:"turn"`
	Source   string            `json:"session_source"`
	Names    map[string]string `json:"names"`     // pod names by worker id
	HomeName string            `json:"home_name"` // "" = no home
}

// serveExplain says how a request would be routed now; nothing is dispatched.
// The body is a turn's; ?route=chat|completions|generate, default chat.
func (p *Proxy) serveExplain(w http.ResponseWriter, r *http.Request) {
	route := block.Route(cmp.Or(r.URL.Query().Get("route"), string(block.Chat)))
	switch route {
	case block.Chat, block.Completions, block.Generate:
	default:
		badMember("route", "route has to be chat, completions or generate.").write(w)
		return
	}
	t := &turn{proxy: p, w: w, r: r}
	if refuse := t.accept(route); refuse != nil {
		refuse.write(w)
		return
	}
	defer t.prompt.body.release()
	source := t.understandSession()
	x := Explanation{
		Explanation: p.state.Explain(t.req, t.prompt.chain.Blocks),
		Route:       string(route), Turn: t.req.Turn, Source: string(source), Names: map[string]string{},
	}
	for id, wk := range *p.workers.Load() {
		x.Names[string(id)] = wk.Name
	}
	if x.Home != "" {
		x.HomeName = x.Names[string(x.Home)]
	}
	writeJSON(w, http.StatusOK, x)
}

// classCounters counts turns by SLO class. One class until the classes' issue:
// every turn is in the default one.
type classCounters struct{}

func (*classCounters) status() map[string]admission.ClassStatus {
	return map[string]admission.ClassStatus{}
}
