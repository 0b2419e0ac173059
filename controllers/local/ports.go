package local

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"syscall"
)

// Ports are handed out below the range from which systems take the ports of
// outgoing connections, so that no connection of ours occupies one between the
// moment it was found free and the moment its owner binds it.
const (
	firstPort = 20000
	lastPort  = 32000
)

// portPool hands out ports that are free on loopback, each of them once at a time.
type portPool struct {
	mu   sync.Mutex
	used map[int32]bool
	next int32
}

func newPortPool() *portPool {
	return &portPool{
		used: map[int32]bool{},
		next: firstPort + rand.Int32N(lastPort-firstPort), // two runs on one machine rarely try the same
	}
}

// take returns n free ports; give them back when their owner is gone.
func (p *portPool) take(ctx context.Context, n int) ([]int32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]int32, 0, n)
	for range lastPort - firstPort {
		if len(out) == n {
			break
		}
		port := p.next
		if p.next++; p.next > lastPort {
			p.next = firstPort
		}
		if !p.used[port] && checkFree(ctx, net.JoinHostPort(loopback, itoa(port))) == nil {
			p.used[port] = true
			out = append(out, port)
		}
	}
	if len(out) < n {
		return nil, fmt.Errorf("fewer than %d free ports on %s between %d and %d", n, loopback, firstPort, lastPort)
	}
	return out, nil
}

func (p *portPool) give(ports []int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, port := range ports {
		delete(p.used, port)
	}
}

// checkFree says in one sentence why an address cannot be listened on.
func checkFree(ctx context.Context, addr string) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s is in use by another program; stop that program or choose another address", addr)
	}
	if err != nil {
		return fmt.Errorf("cannot listen on %s (%w); choose another address", addr, err)
	}
	if err := l.Close(); err != nil {
		return fmt.Errorf("check %s: %w", addr, err)
	}
	return nil
}

// resolveListen turns a wanted address into a free one. An empty address or port
// 0 takes a port from the pool.
func resolveListen(ctx context.Context, flag, want string, pool *portPool) (string, error) {
	if want == "" {
		want = net.JoinHostPort(loopback, "0")
	}
	host, port, err := net.SplitHostPort(want)
	if err != nil {
		return "", fmt.Errorf("%s %q is not an address; write host:port, such as 127.0.0.1:8000", flag, want)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%s %q has no valid port; write a number from 0 (choose one) to 65535", flag, want)
	} else if n != 0 {
		if err := checkFree(ctx, want); err != nil {
			return "", fmt.Errorf("%s: %w", flag, err)
		}
		return want, nil
	}
	ports, err := pool.take(ctx, 1)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, itoa(ports[0])), nil
}

// dialable replaces a wildcard host by one that a client can connect to.
func dialable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = loopback
	}
	return net.JoinHostPort(host, port)
}

func itoa(n int32) string { return strconv.Itoa(int(n)) }
