package arch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvc-dev/kvc/"

// Layers of docs/architecture.md. A package that is not named here fails the
// test, so that nobody adds one without placing it.
var (
	core = []string{
		"router/kvc", "router/block", "router/scan", "router/session", "router/trace",
		"router/radix", "router/sim", "router/stats", "controllers/ratio",
	}
	vocabulary = []string{"api/v1alpha1", "controllers/plan", "controllers/build"}
	world      = []string{
		"controllers", "controllers/webhook", "controllers/local",
		"router/state", "router/fleet", "router/admission", "router/feed", "router/sglang", "router/proxy",
		"router/sidecar", "router/emulator", "router/replay", "router/dashboard", "router/telemetry",
	}
	// shared are the packages of the I/O layer that the others of that layer may import.
	shared = []string{
		"router/admission", "router/feed", "router/sglang", "router/state", "router/fleet", "router/telemetry",
	}
	// clients are what controllers may use of the router above the core.
	clients = []string{"router/admission", "router/feed", "router/sglang"}
	// localExtra: the local runner writes the fleet file and reads the router's status.
	localExtra = []string{"router/fleet"}
)

// coreBans are standard-library packages that would let the core touch the world.
var coreBans = []string{"net", "os", "log", "sync", "context", "unsafe", "plugin", "syscall"}

// pkg is what `go list -json` says of a package.
type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func layerOf(rel string) int {
	switch {
	case slices.Contains(core, rel):
		return 0
	case slices.Contains(vocabulary, rel):
		return 1
	case slices.Contains(world, rel):
		return 2
	case strings.HasPrefix(rel, "cmd/"), strings.HasPrefix(rel, "hack/"):
		return 3 // programs, and the tools of the repository
	}
	return -1
}

// violations lists what p imports against the rule, one sentence each.
func violations(p pkg) []string {
	rel := strings.TrimPrefix(p.ImportPath, module)
	if strings.HasPrefix(rel, "test/") {
		return nil
	}
	layer := layerOf(rel)
	if layer < 0 {
		return []string{fmt.Sprintf("%s belongs to no layer: place it in test/arch", rel)}
	}
	var bad []string
	for _, imp := range p.Imports {
		bad = append(bad, directViolation(rel, layer, imp)...)
	}
	if layer > 1 {
		return bad
	}
	for _, dep := range p.Deps {
		if why := deepViolation(layer, dep); why != "" {
			bad = append(bad, fmt.Sprintf("%s reaches %s, which %s", rel, dep, why))
		}
	}
	return bad
}

func directViolation(rel string, layer int, imp string) []string {
	to, ours := strings.CutPrefix(imp, module)
	switch {
	case !ours && layer == 0:
		return coreImport(rel, imp)
	case !ours:
		return nil
	case strings.HasPrefix(to, "test/"):
		return []string{fmt.Sprintf("%s imports %s: programs do not import tests", rel, to)}
	case layerOf(to) > layer:
		return []string{fmt.Sprintf("%s imports %s, which lies above it", rel, to)}
	case layer == 2 && layerOf(to) == 2 && !sidewaysAllowed(rel, to):
		return []string{fmt.Sprintf("%s imports %s sideways; only %v may be imported within the layer", rel, to, shared)}
	}
	return nil
}

func coreImport(rel, imp string) []string {
	first, _, _ := strings.Cut(imp, "/")
	if slices.Contains(coreBans, first) {
		return []string{fmt.Sprintf("%s imports %s: the core does no I/O, takes no locks and knows no clock", rel, imp)}
	}
	if strings.Contains(first, ".") && imp != "github.com/zeebo/xxh3" {
		return []string{fmt.Sprintf("%s imports %s: the core uses the standard library and xxh3 alone", rel, imp)}
	}
	return nil
}

func sidewaysAllowed(from, to string) bool {
	if strings.HasPrefix(from, "controllers") {
		if from == "controllers/local" && slices.Contains(localExtra, to) {
			return true
		}
		return strings.HasPrefix(to, "controllers") || slices.Contains(clients, to)
	}
	return slices.Contains(shared, to)
}

func deepViolation(layer int, dep string) string {
	first, _, _ := strings.Cut(dep, "/")
	switch {
	case strings.HasPrefix(dep, "sigs.k8s.io/controller-runtime"), strings.HasPrefix(dep, "k8s.io/client-go"):
		return "is a Kubernetes client"
	case layer == 0 && (first == "k8s.io" || first == "sigs.k8s.io"):
		return "is Kubernetes; the core does not know it"
	}
	if to, ours := strings.CutPrefix(dep, module); ours && layerOf(to) > layer {
		return "lies above it"
	}
	return ""
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps=false", "-json=ImportPath,Imports,Deps", "./...")
	cmd.Dir = path.Join("..", "..")
	out, err := cmd.Output()
	if err != nil {
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("list packages: %v\n%s", err, exit.Stderr)
		}
		t.Fatalf("list packages: %v", err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatalf("read the package list: %v", err)
		}
		pkgs = append(pkgs, p)
	}
}

// TestDependencyRule is the rule itself, over every package of the module.
func TestDependencyRule(t *testing.T) {
	pkgs := list(t)
	if len(pkgs) < 10 {
		t.Fatalf("go list found %d packages: the rule was not tested", len(pkgs))
	}
	for _, p := range pkgs {
		for _, v := range violations(p) {
			t.Error(v)
		}
	}
}

// TestRuleFindsViolations shows that each arm of the rule can fail.
func TestRuleFindsViolations(t *testing.T) {
	cases := map[string]struct {
		p    pkg
		want string
	}{
		"the core reads no files":          {pkg{ImportPath: module + "router/kvc", Imports: []string{"os"}}, "does no I/O"},
		"nor speaks HTTP":                  {pkg{ImportPath: module + "router/scan", Imports: []string{"net/http"}}, "does no I/O"},
		"nor logs":                         {pkg{ImportPath: module + "router/block", Imports: []string{"log/slog"}}, "does no I/O"},
		"nor takes other modules":          {pkg{ImportPath: module + "router/trace", Imports: []string{"golang.org/x/sync/errgroup"}}, "xxh3 alone"},
		"nor reaches Kubernetes by a path": {pkg{ImportPath: module + "router/sim", Deps: []string{"k8s.io/api/core/v1"}}, "does not know it"},
		"nor imports upwards": {
			pkg{ImportPath: module + "router/kvc", Imports: []string{module + "router/state"}}, "lies above it",
		},
		"the vocabulary has no client": {
			pkg{ImportPath: module + "controllers/build", Deps: []string{"k8s.io/client-go/rest"}}, "Kubernetes client",
		},
		"the proxy does not know the sidecar": {
			pkg{ImportPath: module + "router/proxy", Imports: []string{module + "router/sidecar"}}, "sideways",
		},
		"a controller uses clients only": {
			pkg{ImportPath: module + "controllers", Imports: []string{module + "router/state"}}, "sideways",
		},
		"nothing imports a program":      {pkg{ImportPath: module + "router/proxy", Imports: []string{module + "cmd/kvc"}}, "lies above it"},
		"nothing imports tests":          {pkg{ImportPath: module + "cmd/kvc", Imports: []string{module + "test/wrappers"}}, "do not import tests"},
		"a new package has to be placed": {pkg{ImportPath: module + "router/util"}, "no layer"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := strings.Join(violations(tc.p), "\n")
			if !strings.Contains(got, tc.want) {
				t.Errorf("violations(%+v) = %q, want a sentence with %q", tc.p, got, tc.want)
			}
		})
	}
}

// TestRuleAllows shows that the rule lets through what the design needs.
func TestRuleAllows(t *testing.T) {
	for _, p := range []pkg{
		{ImportPath: module + "router/kvc", Imports: []string{"time", "github.com/zeebo/xxh3", module + "router/block"}},
		{ImportPath: module + "router/proxy", Imports: []string{"net/http", module + "router/feed", module + "router/kvc"}},
		{ImportPath: module + "controllers/local", Imports: []string{"os/exec", module + "controllers/build", module + "router/fleet"}},
		{ImportPath: module + "controllers/build", Imports: []string{"k8s.io/api/core/v1"}, Deps: []string{"k8s.io/api/core/v1", "os"}},
		{ImportPath: module + "cmd/kvc", Imports: []string{module + "controllers/local", module + "router/replay"}},
	} {
		if got := violations(p); len(got) > 0 {
			t.Errorf("%s: %v, want none", p.ImportPath, got)
		}
	}
}
