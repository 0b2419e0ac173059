package sidecar

import (
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// Config is one sidecar's surroundings. Zero durations and limits take the
// defaults named with them. Network deadlines are real time; Params are in
// emulated time and are divided by TimeScale here.
type Config struct {
	Worker     string         // pod UID, or a UUID per pod of the local runner
	Pod        string         // its name
	Role       fleet.Role     // decode (Unified included) or prefill
	DirectPath kvc.DirectPath // decode only
	EngineURL  string         // http://host:port of the engine beside us
	EngineKey  string         // its --api-key; "" = none

	Tokens       *admission.Tokens // the pool's bearer tokens; nil = open
	PreStopNonce string            // "" = the prestop route answers 404
	RoutingFile  string            // hot-reloaded; "" = Params stay
	JournalDir   string            // "" = no journal: a restart begins a new epoch
	Params       kvc.Params        // in force until a routing file is read
	TimeScale    float64           // 1

	MaxBodyBytes int64         // 64 MiB
	QueueLimit   int           // fallback turns waiting for room: 256
	QueueWait    time.Duration // how long one may wait: 30 s
	AbortCap     time.Duration // longest deferral of an abort: 30 s
	Grace        time.Duration // termination grace that prestop counts from: 300 s
	Poll         time.Duration // /v1/loads and the heartbeat: 1 s

	Log      *slog.Logger
	Now      func() time.Time
	Registry *prometheus.Registry // nil = its own
}

func (c *Config) setDefaults() {
	duration := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	duration(&c.QueueWait, 30*time.Second)
	duration(&c.AbortCap, 30*time.Second)
	duration(&c.Grace, 300*time.Second)
	duration(&c.Poll, time.Second)
	if c.TimeScale == 0 {
		c.TimeScale = 1
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 64 << 20
	}
	if c.QueueLimit == 0 {
		c.QueueLimit = 256
	}
	if c.Params.Preset == "" {
		c.Params = kvc.Corrected()
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Registry == nil {
		c.Registry = prometheus.NewRegistry()
	}
	c.EngineURL = strings.TrimSuffix(c.EngineURL, "/")
}

// validate names the field by its environment variable, which is what the
// reader of the message can change.
func (c *Config) validate() error {
	if c.Worker == "" {
		return errors.New("KVC_WORKER: empty; set it to the pod's UID")
	}
	if c.Role != fleet.Decode && c.Role != fleet.Prefill {
		return fmt.Errorf("KVC_ROLE: want decode or prefill, not %q", c.Role)
	}
	u, err := url.Parse(c.EngineURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Path != "" {
		return fmt.Errorf("KVC_ENGINE_URL: want http://host:port without a path, not %q", c.EngineURL)
	}
	if c.TimeScale < 0.01 {
		return fmt.Errorf("KVC_TIME_SCALE: want at least 0.01, not %g", c.TimeScale)
	}
	if c.Role == fleet.Prefill {
		return nil
	}
	switch c.DirectPath {
	case kvc.ConditionalAggregation, kvc.NativeAdmission, kvc.Unified, kvc.DeltaTransfer:
		return nil
	}
	return fmt.Errorf("KVC_DIRECT_PATH: want ConditionalAggregation, NativeAdmission, Unified or DeltaTransfer, not %q",
		c.DirectPath)
}
