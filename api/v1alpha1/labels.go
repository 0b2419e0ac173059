package v1alpha1

// Labels (wire.md §8). The comment names the writer and the readers.
const (
	LabelPool        = "kvc.dev/pool"         // build → all
	LabelSet         = "kvc.dev/set"          // build → all
	LabelRole        = "kvc.dev/role"         // build → all: RolePrefill, RoleDecode, RoleRouter
	LabelReplica     = "kvc.dev/replica"      // set controller → router: ordinal of the instance
	LabelWorkerIndex = "kvc.dev/worker-index" // set controller → router: 0 is the leader, the only pod routed to
	LabelRevision    = "kvc.dev/revision"     // set controller → router: for pairing
	LabelDrain       = "kvc.dev/drain"        // manager → router: "true" while leaving
)

// Values of LabelRole and of KVC_ROLE.
const (
	RolePrefill = "prefill"
	RoleDecode  = "decode"
	RoleRouter  = "router"
)

// Annotations (wire.md §8).
const (
	AnnotationDrainSince        = "kvc.dev/drain-since"         // manager: RFC 3339
	AnnotationDrainSoftDeadline = "kvc.dev/drain-soft-deadline" // manager: RFC 3339
	AnnotationDrainDeadline     = "kvc.dev/drain-deadline"      // manager: RFC 3339
	AnnotationDrainRequested    = "kvc.dev/drain-requested"     // kvc drain: "true"
	AnnotationPorts             = "kvc.dev/ports"               // set controller: JSON of build.Ports; absent = defaults
	AnnotationTopology          = "kvc.dev/topology"            // manager → router: JSON, level to domain
	AnnotationBootstrapPort     = "sglang.ai/bootstrap-port"    // build → SGLang's own gateway
)

// ReadinessGateTransfer is the gate of the pair probe.
const ReadinessGateTransfer = "kvc.dev/transfer"

// Containers of a worker pod.
const (
	ContainerEngine  = "engine"
	ContainerSidecar = "kvc-sidecar"
)

// Default ports (wire.md §0).
const (
	PortEngine      = 30000
	PortBootstrap   = 8998
	PortSidecar     = 9300
	PortRouter      = 8000
	PortRouterAdmin = 9301
)

// Environment of the sidecar (wire.md §8) and, for EnvEngineKey and
// EnvTimeScale, of the engine.
const (
	EnvWorker       = "KVC_WORKER" // the pod's UID
	EnvPod          = "KVC_POD"
	EnvPool         = "KVC_POOL"
	EnvNamespace    = "KVC_NAMESPACE"
	EnvRole         = "KVC_ROLE"
	EnvDirectPath   = "KVC_DIRECT_PATH"
	EnvEngineURL    = "KVC_ENGINE_URL"
	EnvEngineKey    = "KVC_ENGINE_KEY"
	EnvPreStopNonce = "KVC_PRESTOP_NONCE"
	EnvTimeScale    = "KVC_TIME_SCALE"
)

// Files that a pod mounts.
const (
	DirToken    = "/etc/kvc/token"       // Secret <pool>-internal, key token
	DirRouting  = "/etc/kvc/routing"     // ConfigMap <pool>-routing, key routing.json
	DirJournal  = "/var/lib/kvc/journal" // emptyDir: the sidecar's ledger
	DirRun      = "/run/kvc"             // emptyDir: the KV event socket
	FileRouting = "routing.json"
	FileToken   = "token"
	KeyEngine   = "engine-key" // of Secret <pool>-internal
)

// InternalSecretName is the Secret that holds a pool's own credentials.
func InternalSecretName(pool string) string { return pool + "-internal" }

// RoutingConfigMapName is the ConfigMap that holds a pool's routing.json.
func RoutingConfigMapName(pool string) string { return pool + "-routing" }

// SetName is the name of the set of one role of a pool.
func SetName(pool string, r Role) string { return pool + "-" + r.Label() }

// Label is the role as LabelRole and KVC_ROLE spell it.
func (r Role) Label() string {
	if r == Prefill {
		return RolePrefill
	}
	return RoleDecode
}
