package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/router/fleet"
)

// Cluster is a pool that runs on this machine.
type Cluster struct {
	opts    Options
	pool    *v1alpha1.KVCPool // as it is run: engine.type may differ from the manifest
	dir     string
	token   string
	env     []string
	notices []string
	lock    *os.File // keeps a second run out of dir
	spawn   *spawner
	ports   *portPool
	machine machine
	probe   *http.Client
	log     *slog.Logger

	listen, admin string // the router's addresses

	stopRouter, stopPods context.CancelFunc
	routerDone, podsDone sync.WaitGroup
	stopOnce             sync.Once
	done                 chan struct{}

	mu       sync.Mutex
	changed  chan struct{} // closed and replaced on every change below
	replicas []*replica    // prefill first, by ordinal
	router   service
}

// service is a program that restarts in place.
type service struct {
	pid      int
	ready    bool
	restarts int
	failed   int    // consecutive ends before it was ready
	problem  string // why it last ended
	waiting  string // why it says that it is not ready
}

// Worker is what is known of one replica's current pod.
type Worker struct {
	Name       string // "decode-0"
	ID         string // the incarnation; "" between two pods
	Role       string // prefill or decode
	SidecarURL string // http://host:port
	EnginePID  int    // 0 while it does not run
	SidecarPID int    // 0 while it does not run
	Ready      bool   // in the fleet file
	Waiting    string // why its sidecar says that it is not ready; "" = it does not say
	Pods       int    // pods so far; more than 1 means that engines ended
	Restarts   int    // of the current pod's sidecar
	GPUs       []string
	EngineLog  string
	SidecarLog string
}

// Start runs a pool until ctx is done or Stop is called. It returns as soon as
// every process has been asked to start; WaitReady waits for them. An error is
// one sentence that says what to change: a missing program, a port in use, too
// few GPUs.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	o = o.withDefaults()
	plan, err := planGPUs(ctx, o.Pool, o.gpus)
	if err != nil {
		return nil, err
	}
	o.Pool = plan.pool
	if o.Pool.Spec.Engine.Type == v1alpha1.EngineSGLang {
		if err := checkSGLang(ctx); err != nil {
			return nil, err
		}
	}
	c, err := newCluster(ctx, o, plan)
	if err != nil {
		return nil, err
	}
	routerCtx, stopRouter := context.WithCancel(context.WithoutCancel(ctx))
	podsCtx, stopPods := context.WithCancel(context.WithoutCancel(ctx))
	c.stopRouter, c.stopPods = stopRouter, stopPods
	c.routerDone.Go(func() { c.keepRouter(routerCtx) })
	for _, r := range c.replicas {
		c.podsDone.Go(func() { c.keepReplica(podsCtx, r) })
	}
	stopWatch := context.AfterFunc(ctx, c.Stop)
	go func() { // Stop by hand leaves nothing behind on ctx
		<-c.done
		stopWatch()
	}()
	return c, nil
}

// newCluster checks everything that can be checked before a process starts and
// prepares the run directory.
func newCluster(ctx context.Context, o Options, plan gpuPlan) (*Cluster, error) {
	if err := o.checkPrograms(); err != nil {
		return nil, err
	}
	scale, err := o.timeScaleEnv()
	if err != nil {
		return nil, err
	}
	c := &Cluster{
		opts: o, pool: o.Pool, log: o.Log,
		ports:    newPortPool(),
		probe:    &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}},
		done:     make(chan struct{}),
		changed:  make(chan struct{}),
		replicas: newReplicas(o.Pool, plan),
	}
	if plan.notice != "" {
		c.notices = append(c.notices, plan.notice)
	}
	if c.listen, err = resolveListen(ctx, "--listen", o.Listen, c.ports); err != nil {
		return nil, err
	}
	if c.admin, err = resolveListen(ctx, "--admin-listen", o.AdminListen, c.ports); err != nil {
		return nil, err
	}
	if c.dir, err = makeDir(o.Dir); err != nil {
		return nil, err
	}
	if c.lock, err = lockDir(c.dir); err != nil {
		return nil, err
	}
	if err := c.prepare(scale); err != nil {
		_ = c.lock.Close()
		return nil, err
	}
	c.spawn = newSpawner()
	return c, nil
}

// prepare writes the files of the run and sets up what a container finds here.
func (c *Cluster) prepare(scale string) (err error) {
	if c.token, err = writeFiles(c.dir, c.pool); err != nil {
		return err
	}
	c.env = os.Environ()
	if scale != "" {
		c.env = append(c.env, scale)
	}
	secret := v1alpha1.InternalSecretName(c.pool.Name)
	c.machine = machine{
		binDir: c.opts.BinDir, dir: c.dir, environ: c.env,
		secrets: map[string]string{secret + "/" + v1alpha1.KeyEngine: randomHex(32)},
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writeFleet()
}

func newReplicas(pool *v1alpha1.KVCPool, plan gpuPlan) []*replica {
	var out []*replica
	for _, role := range v1alpha1.Roles() {
		for i := range int(*pool.Spec.Role(role).Replicas) {
			r := &replica{role: role, ordinal: i, name: roleName(role, i)}
			if i < len(plan.gpus[role]) {
				r.gpus = plan.gpus[role][i]
			}
			out = append(out, r)
		}
	}
	return out
}

// URL is where clients send requests, without a path.
func (c *Cluster) URL() string { return "http://" + dialable(c.listen) }

// AdminURL is the router's admin address, without a path.
func (c *Cluster) AdminURL() string { return "http://" + dialable(c.admin) }

// Dir is the run directory.
func (c *Cluster) Dir() string { return c.dir }

// FleetPath is the fleet file.
func (c *Cluster) FleetPath() string { return filepath.Join(c.dir, fileFleet) }

// TokenPath is the file with the bearer token that sidecars ask for.
func (c *Cluster) TokenPath() string { return filepath.Join(c.dir, dirToken, v1alpha1.FileToken) }

// Token is the bearer token that sidecars ask for. Never log it.
func (c *Cluster) Token() string { return c.token }

// RoutingPath is routing.json.
func (c *Cluster) RoutingPath() string { return filepath.Join(c.dir, dirRouting, v1alpha1.FileRouting) }

// Pool is the pool as it runs; engine.type may differ from what was asked for,
// which Notices then says.
func (c *Cluster) Pool() *v1alpha1.KVCPool { return c.pool.DeepCopy() }

// Notices are sentences that a person should see before anything else.
func (c *Cluster) Notices() []string { return slices.Clone(c.notices) }

// Done is closed when every process has ended.
func (c *Cluster) Done() <-chan struct{} { return c.done }

// Workers lists the replicas, prefill first.
func (c *Cluster) Workers() []Worker {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]Worker, 0, len(c.replicas))
	for _, r := range c.replicas {
		out = append(out, r.view(c))
	}
	return out
}

// RouterPID is the router's process; 0 while it does not run.
func (c *Cluster) RouterPID() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.router.pid
}

// update changes what the mutex guards and wakes those who wait for a change.
func (c *Cluster) update(change func()) {
	c.updateFleet(func() bool { change(); return false })
}

// updateFleet is update for a change that may concern the fleet file, which
// change then says. The file is written before anyone is woken: who sees a
// worker ready finds it in the file.
func (c *Cluster) updateFleet(change func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if change() {
		if err := c.writeFleet(); err != nil {
			c.log.Error("fleet file not written", "error", err)
		}
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

// Changed returns a channel that is closed at the next change of Workers.
func (c *Cluster) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// maxFailures is how often in a row something may end before it was ever ready
// until WaitReady gives up on it.
const maxFailures = 3

// WaitReady returns once every replica is in the fleet file and the router
// answers. It gives up when a program keeps ending before it is ready, with its
// last words, or when ctx is done.
func (c *Cluster) WaitReady(ctx context.Context) error {
	for {
		changed := c.Changed()
		waiting, err := c.waitingFor()
		if err != nil || waiting == "" {
			return err
		}
		select {
		case <-changed:
		case <-c.done:
			return errors.New("the pool was stopped before it was ready")
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w; see the logs in %s", waiting, ctx.Err(), filepath.Join(c.dir, dirLogs))
		}
	}
}

// waitingFor names the first thing that is not ready; "" when everything is.
func (c *Cluster) waitingFor() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	waiting := ""
	for _, r := range c.replicas {
		if r.failed >= maxFailures {
			return "", fmt.Errorf("%s does not start: %s", r.name, r.problem)
		}
		if !r.ready && waiting == "" {
			waiting = r.name
			if r.pod != nil && r.pod.state.waiting != "" {
				waiting += " (" + r.pod.state.waiting + ")"
			}
		}
	}
	if c.router.failed >= maxFailures {
		return "", fmt.Errorf("the router does not start: %s", c.router.problem)
	}
	if !c.router.ready && waiting == "" {
		waiting = "the router"
	}
	return waiting, nil
}

// Stop ends every process, the router first so that it stops sending turns, and
// returns when all are gone. It may be called more than once.
func (c *Cluster) Stop() {
	c.stopOnce.Do(func() {
		c.stopRouter()
		c.routerDone.Wait()
		c.stopPods()
		c.podsDone.Wait()
		c.spawn.close()
		_ = c.lock.Close()
		c.probe.CloseIdleConnections()
		close(c.done)
	})
	<-c.done
}

// writeFleet stores who is ready. A state that somebody wrote into the file by
// hand, to drain a worker, is kept for as long as that incarnation lives. The
// mutex is held.
func (c *Cluster) writeFleet() error {
	asked := c.statesAsked()
	f := &fleet.File{
		Version: fleet.Version,
		Pool: fleet.Pool{
			Namespace: c.namespace(), Name: c.pool.Name,
			Model: c.pool.Spec.Model.ServedName, Aliases: c.pool.Spec.Model.Aliases(),
		},
	}
	for _, r := range c.replicas {
		if r.ready {
			w := r.fleetWorker()
			if s, ok := asked[string(w.ID)]; ok {
				w.State = s
			}
			f.Workers = append(f.Workers, w)
		}
	}
	return fleet.Write(c.FleetPath(), f)
}

func (c *Cluster) statesAsked() map[string]fleet.State {
	data, err := os.ReadFile(c.FleetPath())
	if err != nil {
		return nil
	}
	f, err := fleet.Parse(c.FleetPath(), data)
	if err != nil {
		return nil
	}
	out := map[string]fleet.State{}
	for _, w := range f.Workers {
		out[string(w.ID)] = w.State
	}
	return out
}

// namespace is the pool's; "local" when the manifest has none.
func (c *Cluster) namespace() string {
	if c.pool.Namespace != "" {
		return c.pool.Namespace
	}
	return "local"
}
