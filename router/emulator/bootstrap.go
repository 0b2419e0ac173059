package emulator

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"
)

// registration is what a prefill rank says about itself (contract §2.7).
type registration struct {
	AttnTPSize               int    `json:"attn_tp_size"`
	AttnTPRank               int    `json:"attn_tp_rank"`
	AttnCPSize               int    `json:"attn_cp_size"`
	AttnCPRank               int    `json:"attn_cp_rank"`
	AttnDPSize               int    `json:"attn_dp_size"`
	AttnDPRank               int    `json:"attn_dp_rank"`
	PPSize                   int    `json:"pp_size"`
	PPRank                   int    `json:"pp_rank"`
	SystemDPSize             int    `json:"system_dp_size"`
	SystemDPRank             int    `json:"system_dp_rank"`
	RankIP                   string `json:"rank_ip"`
	RankPort                 int    `json:"rank_port"`
	PageSize                 int    `json:"page_size"`
	KVCacheDtype             string `json:"kv_cache_dtype"`
	LoadBalanceMethod        string `json:"load_balance_method"`
	EnableDSACacheLayerSplit bool   `json:"enable_dsa_cache_layer_split"`
	PrefillHTTPPort          int    `json:"prefill_http_port"`
}

// route is the answer to a decode worker that asks who is there. Decode builds
// a PrefillServerInfo from it, which unknown members break (contract §2.7).
type route struct {
	AttnTPSize                 int    `json:"attn_tp_size"`
	AttnCPSize                 int    `json:"attn_cp_size"`
	DPSize                     int    `json:"dp_size"`
	PPSize                     int    `json:"pp_size"`
	PageSize                   int    `json:"page_size"`
	KVCacheDtype               string `json:"kv_cache_dtype"`
	FollowBootstrapRoom        bool   `json:"follow_bootstrap_room"`
	EnableDSACacheLayerSplit   bool   `json:"enable_dsa_cache_layer_split"`
	PrefillHTTPPort            int    `json:"prefill_http_port"`
	TargetTPRank               *int   `json:"target_tp_rank"`
	TargetTPRanks              []int  `json:"target_tp_ranks"`
	TargetCPRanks              []int  `json:"target_cp_ranks"`
	TargetPPRanks              []int  `json:"target_pp_ranks"`
	RequiredDstInfoNum         *int   `json:"required_dst_info_num"`
	RequiredPrefillResponseNum *int   `json:"required_prefill_response_num"`
}

// rankAddress is where a rank takes rooms.
type rankAddress struct {
	RankIP   string `json:"rank_ip"`
	RankPort int    `json:"rank_port"`
}

type rankKey struct{ dp, cp, tp, pp int }

// dpRank is a room's entry in /register_dp_rank.
type dpRank struct {
	rank int
	at   time.Time
}

// dpRankLife is how long such an entry lives (contract §2.7).
const dpRankLife = 120 * time.Second

// registry is the bootstrap HTTP server of a prefill worker (contract §2.7).
type registry struct {
	mu    sync.Mutex
	info  registration
	ranks map[rankKey]rankAddress
	rooms map[uint64]dpRank
}

func newRegistry() *registry {
	return &registry{ranks: map[rankKey]rankAddress{}, rooms: map[uint64]dpRank{}}
}

// registerSelf registers every rank of this engine.
func (g *registry) registerSelf(s *Server) {
	for tp := range s.cfg.TPSize {
		g.register(registration{
			AttnTPSize: s.cfg.TPSize, AttnTPRank: tp, AttnCPSize: 1, AttnDPSize: 1, PPSize: 1, SystemDPSize: 1,
			RankIP: advertised(s.cfg.Host), RankPort: port(s.rank), PageSize: s.cfg.PageSize,
			KVCacheDtype: s.cfg.KVCacheDtype, LoadBalanceMethod: "follow_bootstrap_room", PrefillHTTPPort: s.cfg.Port,
		})
	}
}

// advertised is the address that peers should dial (contract §1.4).
func advertised(host string) string {
	for _, name := range []string{"SGLANG_HOST_IP", "HOST_IP"} {
		if ip := os.Getenv(name); ip != "" {
			return ip
		}
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
		return host
	}
	addrs, _ := net.InterfaceAddrs() // none: only this machine can reach us
	for _, a := range addrs {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	return "127.0.0.1"
}

func (g *registry) register(r registration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.info = r
	g.ranks[rankKey{r.AttnDPRank, r.AttnCPRank, r.AttnTPRank, r.PPRank}] = rankAddress{r.RankIP, r.RankPort}
}

// ready reports whether every rank is registered, and how many are.
func (g *registry) ready() (bool, int) {
	want := g.info.AttnDPSize * g.info.AttnCPSize * g.info.AttnTPSize * g.info.PPSize
	return len(g.ranks) > 0 && len(g.ranks) >= want, len(g.ranks)
}

func (g *registry) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { plain(w, http.StatusOK, "OK") })
	mux.HandleFunc("PUT /route", g.putRoute)
	mux.HandleFunc("GET /route", g.getRoute)
	mux.HandleFunc("POST /register_dp_rank", g.registerDPRank)
	mux.HandleFunc("POST /query_dp_ranks", g.queryDPRanks)
	return mux
}

func plain(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text)) // a client that is gone needs no answer
}

// smallBody bounds the bodies of control routes.
const smallBody = 1 << 20

func decodeSmall(w http.ResponseWriter, r *http.Request, v any) bool {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, smallBody)).Decode(v); err != nil {
		plain(w, http.StatusBadRequest, err.Error())
		return false
	}
	return true
}

func (g *registry) putRoute(w http.ResponseWriter, r *http.Request) {
	var reg registration
	if decodeSmall(w, r, &reg) {
		g.register(reg)
		plain(w, http.StatusOK, "OK")
	}
}

func (g *registry) getRoute(w http.ResponseWriter, r *http.Request) {
	var key [4]int
	for i, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		n, err := strconv.Atoi(r.URL.Query().Get(name))
		if err != nil {
			plain(w, http.StatusBadRequest, "Missing inputs for bootstrap server.")
			return
		}
		key[i] = n
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	ready, n := g.ready()
	if !ready {
		plain(w, http.StatusServiceUnavailable,
			fmt.Sprintf("Prefill server not fully registered yet (%d workers registered).", n))
		return
	}
	if key == [4]int{-1, -1, -1, -1} {
		writeJSON(w, http.StatusOK, g.route())
		return
	}
	addr, ok := g.ranks[rankKey{key[0], key[1], key[2], key[3]}]
	if !ok {
		plain(w, http.StatusNotFound, "Bootstrap info not Found")
		return
	}
	writeJSON(w, http.StatusOK, addr)
}

func (g *registry) route() route {
	return route{
		AttnTPSize: g.info.AttnTPSize, AttnCPSize: g.info.AttnCPSize, DPSize: g.info.AttnDPSize, PPSize: g.info.PPSize,
		PageSize: g.info.PageSize, KVCacheDtype: g.info.KVCacheDtype,
		FollowBootstrapRoom:      g.info.LoadBalanceMethod == "follow_bootstrap_room",
		EnableDSACacheLayerSplit: g.info.EnableDSACacheLayerSplit, PrefillHTTPPort: g.info.PrefillHTTPPort,
	}
}

func (g *registry) registerDPRank(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Room uint64 `json:"bootstrap_room"`
		Rank int    `json:"dp_rank"`
	}
	if !decodeSmall(w, r, &body) {
		return
	}
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for room, e := range g.rooms {
		if now.Sub(e.at) > dpRankLife {
			delete(g.rooms, room)
		}
	}
	g.rooms[body.Room] = dpRank{body.Rank, now}
	plain(w, http.StatusOK, "OK")
}

func (g *registry) queryDPRanks(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Rooms []uint64 `json:"bootstrap_rooms"`
	}
	if !decodeSmall(w, r, &body) {
		return
	}
	found := map[string]int{}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, room := range body.Rooms {
		if e, ok := g.rooms[room]; ok && time.Since(e.at) <= dpRankLife {
			found[strconv.FormatUint(room, 10)] = e.rank
		}
	}
	writeJSON(w, http.StatusOK, found)
}
