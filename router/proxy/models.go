package proxy

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/kvc-dev/kvc/router/fleet"
)

// model is an entry of /v1/models, in OpenAI's shape.
type model struct {
	ID      string `json:"id"`
	Object  string `json:"object"`
	Created int64  `json:"created"`
	OwnedBy string `json:"owned_by"`
	Root    string `json:"root"` // what an alias stands for
}

// models lists the served name, then the aliases (R123).
func (p *Proxy) models() []model {
	f := p.fleet.Load()
	if f == nil {
		return []model{}
	}
	var out []model
	for _, name := range append([]string{f.Pool.Model}, f.Pool.Aliases...) {
		out = append(out, model{ID: name, Object: "model", Created: p.started.Unix(), OwnedBy: "kvc", Root: f.Pool.Model})
	}
	return out
}

func (p *Proxy) serveModels(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", p.models()})
}

func (p *Proxy) serveModel(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	all := p.models()
	i := slices.IndexFunc(all, func(m model) bool { return m.ID == name })
	if i < 0 {
		unknownModel(name).write(w)
		return
	}
	writeJSON(w, http.StatusOK, all[i])
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, "encode answer", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // a client that left needs no answer
}

// serveHealth says that the process lives.
func (p *Proxy) serveHealth(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
}

// serveReady says whether turns can be served, and if not why.
func (p *Proxy) serveReady(w http.ResponseWriter, _ *http.Request) {
	why := p.unready()
	if len(why) == 0 {
		writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
		return
	}
	writeJSON(w, http.StatusServiceUnavailable,
		map[string]string{"status": "not ready", "reason": strings.Join(why, "; ")})
}

// unready lists what is missing.
func (p *Proxy) unready() (why []string) {
	if p.closing.Load() {
		why = append(why, "shutting down")
	}
	if p.fleet.Load() == nil {
		return append(why, "the fleet was not read yet")
	}
	decode, greeted := 0, 0
	for _, w := range *p.workers.Load() {
		if w.Role != fleet.Decode {
			continue
		}
		decode++
		if w.hello.Load() != nil {
			greeted++
		}
	}
	switch {
	case decode == 0:
		why = append(why, "the fleet has no decode worker")
	case greeted == 0:
		why = append(why, "no decode worker has answered yet")
	case !p.settling.over():
		why = append(why, "the workers' feeds were not read yet")
	}
	return why
}
