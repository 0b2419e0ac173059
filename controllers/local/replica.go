package local

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/controllers/build"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/kvc"
)

// replica is one place in the pool. Pods come and go in it: an engine that ends
// takes its pod along, and the next one is a new incarnation.
type replica struct {
	role    v1alpha1.Role
	ordinal int
	name    string
	gpus    []string

	// The rest is guarded by the cluster's mutex.
	pod     *podRun // nil between two pods
	ready   bool    // in the fleet file
	pods    int
	failed  int    // consecutive pods that ended before they were ready
	problem string // why the last one ended
}

// podRun is one pod as it runs.
type podRun struct {
	id      string
	ports   []int32
	spec    *corev1.Pod
	engine  command
	sidecar command

	enginePID int     // guarded by the cluster's mutex
	state     service // of the sidecar; guarded by the cluster's mutex
}

// Ports of a pod, in the order in which they are taken.
const (
	portEngine = iota
	portBootstrap
	portSidecar
	portCount
)

func (p *podRun) url() string {
	return "http://" + net.JoinHostPort(loopback, itoa(p.ports[portSidecar]))
}

// keepReplica runs one pod after another until ctx is done.
func (c *Cluster) keepReplica(ctx context.Context, r *replica) {
	delay := backoff{base: c.opts.backoff}
	for ctx.Err() == nil {
		started := time.Now()
		problem := c.runPod(ctx, r)
		if ctx.Err() != nil {
			return
		}
		c.log.Warn("engine ended; making a new pod", "worker", r.name, "reason", problem)
		sleep(ctx, delay.next(time.Since(started)))
	}
}

// runPod runs one pod until its engine ends or ctx is done. The sidecar of an
// ended engine may still have streams to close: it is stopped on the side.
func (c *Cluster) runPod(ctx context.Context, r *replica) (problem string) {
	pod, err := c.newPod(ctx, r)
	if err != nil {
		// The next attempt would fare no better: WaitReady may give up at once.
		c.update(func() { r.failed, r.problem = maxFailures, err.Error() })
		return err.Error()
	}
	c.update(func() { r.pod, r.pods = pod, r.pods+1 })

	sidecarCtx, stopSidecar := context.WithCancel(ctx)
	c.podsDone.Go(func() {
		defer c.ports.give(pod.ports)
		c.keepInPlace(sidecarCtx, pod.sidecar, pod.url()+"/readyz", func(change func(*service)) {
			c.sidecarChanged(r, pod, change)
		})
	})
	defer stopSidecar()

	problem = c.runEngine(ctx, pod)
	if ctx.Err() == nil {
		c.endPod(r, problem)
	}
	return problem
}

// runEngine runs the engine once. It has no restart in place: its peers hold
// connections to this incarnation.
func (c *Cluster) runEngine(ctx context.Context, pod *podRun) string {
	p, err := c.spawn.run(pod.engine)
	if err != nil {
		return err.Error()
	}
	c.update(func() { pod.enginePID = p.pid })
	select {
	case <-p.done:
	case <-ctx.Done():
		p.terminate(c.opts.Grace)
	}
	c.update(func() { pod.enginePID = 0 })
	return p.describeEnd()
}

// endPod takes a pod out of the fleet file, before anything else is done.
func (c *Cluster) endPod(r *replica, problem string) {
	c.updateFleet(func() bool {
		left := r.ready
		if r.ready {
			r.failed = 0
		}
		r.pod, r.ready, r.problem = nil, false, problem
		r.failed++
		return left
	})
}

// sidecarChanged notes a change of a pod's sidecar. The first time it is ready
// the worker joins the fleet, and stays while its sidecar restarts: residency is
// still there, and the router's breaker knows how to wait.
func (c *Cluster) sidecarChanged(r *replica, pod *podRun, change func(*service)) {
	c.updateFleet(func() (joined bool) {
		change(&pod.state)
		if r.pod != pod {
			return false // a later incarnation has the place
		}
		if pod.state.ready && !r.ready {
			r.ready, r.failed, joined = true, 0, true
		}
		if !r.ready && pod.state.failed >= maxFailures {
			r.failed, r.problem = maxFailures, "its sidecar: "+pod.state.problem
		}
		return joined
	})
}

// newPod renders a replica's next pod and resolves its containers.
func (c *Cluster) newPod(ctx context.Context, r *replica) (*podRun, error) {
	ports, err := c.ports.take(ctx, portCount)
	if err != nil {
		return nil, err
	}
	templates, err := build.Pods(c.pool, r.role, build.Options{
		Host:  loopback,
		Ports: build.Ports{Engine: ports[portEngine], Bootstrap: ports[portBootstrap], Sidecar: ports[portSidecar]},
	})
	if err != nil {
		c.ports.give(ports)
		return nil, err
	}
	pod := &podRun{id: uuid.NewString(), ports: ports}
	pod.spec = build.Pod(&templates[0], build.Identity{
		Name: r.name, Namespace: c.namespace(), Replica: r.ordinal, Nonce: randomHex(16),
	})
	pod.spec.UID = types.UID(pod.id)
	if err := c.resolve(r, pod); err != nil {
		c.ports.give(ports)
		return nil, err
	}
	return pod, nil
}

// resolve turns the pod's two containers into commands. Other containers of a
// template need an image and are left out, which a notice in the log says.
func (c *Cluster) resolve(r *replica, pod *podRun) error {
	const idLength = 8
	dir := filepath.Join(c.dir, dirPods, r.name, pod.id[:idLength])
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make pod directory: %w", err)
	}
	for _, list := range [][]corev1.Container{pod.spec.Spec.InitContainers, pod.spec.Spec.Containers} {
		for i := range list {
			var into *command
			switch list[i].Name {
			case v1alpha1.ContainerEngine:
				into = &pod.engine
			case v1alpha1.ContainerSidecar:
				into = &pod.sidecar
			default:
				c.log.Warn("container left out: an image cannot be started here", "pod", r.name, "container", list[i].Name)
				continue
			}
			cmd, err := c.machine.containerCommand(pod.spec, &list[i], dir)
			if err != nil {
				return err
			}
			*into = cmd
		}
	}
	pod.engine.log = c.logPath(r.name + ".engine")
	pod.sidecar.log = c.logPath(r.name + ".sidecar")
	if len(r.gpus) > 0 {
		pod.engine.env = append(pod.engine.env,
			"CUDA_VISIBLE_DEVICES="+strings.Join(r.gpus, ","), "SGLANG_HOST_IP="+loopback)
	}
	return nil
}

// fleetWorker is the replica's entry in the fleet file.
func (r *replica) fleetWorker() fleet.Worker {
	w := fleet.Worker{
		Name: r.name, ID: kvc.WorkerID(r.pod.id), Role: fleet.Role(r.role.Label()), URL: r.pod.url(),
		State: fleet.Active, Revision: "r1",
	}
	if r.role == v1alpha1.Prefill {
		w.Bootstrap = &fleet.Bootstrap{Host: loopback, Port: int(r.pod.ports[portBootstrap])}
	}
	return w
}

// view is the replica as others see it; the cluster's mutex is held.
func (r *replica) view(c *Cluster) Worker {
	w := Worker{
		Name: r.name, Role: r.role.Label(), Ready: r.ready, Pods: r.pods, GPUs: r.gpus,
		EngineLog: c.logPath(r.name + ".engine"), SidecarLog: c.logPath(r.name + ".sidecar"),
	}
	if r.pod != nil {
		w.ID, w.SidecarURL = r.pod.id, r.pod.url()
		w.EnginePID, w.SidecarPID, w.Restarts = r.pod.enginePID, r.pod.state.pid, r.pod.state.restarts
		w.Waiting = r.pod.state.waiting
	}
	return w
}
