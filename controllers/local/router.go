package local

import (
	"context"
	"path/filepath"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// keepRouter runs the router until ctx is done and starts it again when it dies:
// all it knows can be rebuilt from the workers' feeds.
func (c *Cluster) keepRouter(ctx context.Context) {
	cmd := command{
		name: v1alpha1.RoleRouter,
		path: filepath.Join(c.opts.BinDir, "router"),
		args: []string{
			"--fleet", c.FleetPath(), "--listen", c.listen, "--admin-listen", c.admin,
			"--token-file", c.TokenPath(), "--routing-file", c.RoutingPath(),
		},
		env: c.env,
		log: c.logPath(v1alpha1.RoleRouter),
	}
	c.keepInPlace(ctx, cmd, c.AdminURL()+"/readyz", func(change func(*service)) {
		c.update(func() { change(&c.router) })
	})
}

func (c *Cluster) logPath(name string) string {
	return filepath.Join(c.dir, dirLogs, name+".log")
}
