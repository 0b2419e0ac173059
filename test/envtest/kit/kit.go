package kit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/kvc-dev/kvc/api/v1alpha1"
)

// EnvAssets names the folder with kube-apiserver, etcd and kubectl.
const EnvAssets = "KUBEBUILDER_ASSETS"

// startTimeout is generous: a cold start beside other tests on two cores takes
// a minute. KUBEBUILDER_CONTROLPLANE_START_TIMEOUT overrides it.
const startTimeout = 3 * time.Minute

// Env is a running API server.
type Env struct {
	Config *rest.Config
	Client client.Client
	Scheme *k8sruntime.Scheme
	env    *envtest.Environment
}

// Missing says why no suite can run here; "" when it can.
func Missing() string {
	if os.Getenv(EnvAssets) != "" {
		return ""
	}
	return "no API server to test against: " + EnvAssets +
		" is not set; run make envtest or make test, which build one and set it"
}

// Root is the repository's root folder.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..", "..")
}

// Kubectl is the path of kubectl, of the API server's own version.
func Kubectl() string { return filepath.Join(os.Getenv(EnvAssets), "kubectl") }

// Scheme knows the built-in kinds and the project's.
func Scheme() *k8sruntime.Scheme {
	s := k8sruntime.NewScheme()
	utilruntime.Must(clientscheme.AddToScheme(s))
	utilruntime.Must(v1alpha1.AddToScheme(s))
	return s
}

// Start starts the server and installs config/crd/bases. Stop it.
func Start() (*Env, error) {
	e := &Env{Scheme: Scheme(), env: &envtest.Environment{
		CRDInstallOptions: envtest.CRDInstallOptions{
			Paths:              []string{filepath.Join(Root(), "config", "crd", "bases")},
			ErrorIfPathMissing: true,
			MaxTime:            startTimeout, // a CRD of 220 kB with 70 rules takes long to compile on a busy machine
		},
		ControlPlaneStartTimeout: startTimeout,
		ControlPlaneStopTimeout:  time.Minute,
	}}
	var err error
	if e.Config, err = e.env.Start(); err != nil {
		// A CRD that is refused leaves both processes behind.
		return nil, errors.Join(fmt.Errorf("start the API server and install the CRDs: %w", err), e.env.Stop())
	}
	// A suite is one impatient client; the defaults are for many polite ones.
	e.Config.QPS, e.Config.Burst = 500, 1000
	if e.Client, err = client.New(e.Config, client.Options{Scheme: e.Scheme}); err != nil {
		return nil, errors.Join(fmt.Errorf("make a client: %w", err), e.env.Stop())
	}
	return e, nil
}

// Stop ends both processes.
func (e *Env) Stop() error { return e.env.Stop() }

// Namespace makes a namespace of its own for a spec. Without a
// controller-manager nothing can delete it; the server's end does.
func (e *Env) Namespace(ctx context.Context) (string, error) {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "spec-"}}
	if err := e.Client.Create(ctx, ns); err != nil {
		return "", fmt.Errorf("create a namespace: %w", err)
	}
	return ns.Name, nil
}

// Kubeconfig writes a file by which kubectl reaches the server as its
// administrator.
func (e *Env) Kubeconfig(dir string) (string, error) {
	user, err := e.env.AddUser(envtest.User{Name: "admin", Groups: []string{"system:masters"}}, nil)
	if err != nil {
		return "", fmt.Errorf("add a user: %w", err)
	}
	data, err := user.KubeConfig()
	if err != nil {
		return "", fmt.Errorf("write a kubeconfig: %w", err)
	}
	name := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(name, data, 0o600); err != nil {
		return "", fmt.Errorf("write a kubeconfig: %w", err)
	}
	return name, nil
}
