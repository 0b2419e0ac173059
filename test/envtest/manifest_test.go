package envtest

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/kvc-dev/kvc/api/v1alpha1"
	"github.com/kvc-dev/kvc/test/envtest/kit"
)

// files lists manifests of config/samples. The tree of specs is built from it,
// so it runs before the suite.
func files(pattern string) []string {
	names, err := filepath.Glob(filepath.Join(kit.Root(), "config", "samples", pattern))
	if err != nil || len(names) == 0 {
		panic("no samples match " + pattern)
	}
	return names
}

func read(name string) []byte {
	GinkgoHelper()
	data, err := os.ReadFile(name)
	Expect(err).NotTo(HaveOccurred())
	return data
}

// parse reads a manifest as a client sends it: nothing typed, nothing defaulted.
func parse(data []byte) *unstructured.Unstructured {
	GinkgoHelper()
	u := &unstructured.Unstructured{}
	Expect(yaml.Unmarshal(data, &u.Object)).To(Succeed())
	return u
}

// manifest is a KVCPool of a few lines of spec.
func manifest(name, spec string) *unstructured.Unstructured {
	GinkgoHelper()
	return parse([]byte("apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nmetadata: {name: " + name + "}\nspec:\n" + spec))
}

// create sends u to a namespace of its own and returns what the server stored.
func create(ctx SpecContext, u *unstructured.Unstructured) *unstructured.Unstructured {
	GinkgoHelper()
	u = u.DeepCopy()
	u.SetNamespace(namespace(ctx))
	Expect(env.Client.Create(ctx, u, strict())).To(Succeed())
	return u
}

// strict is what kubectl asks for: an unknown field is an error.
func strict() client.CreateOption { return client.FieldValidation(metav1.FieldValidationStrict) }

// decode turns what the server stored into a type.
func decode[T any](u *unstructured.Unstructured) *T {
	GinkgoHelper()
	data, err := u.MarshalJSON()
	Expect(err).NotTo(HaveOccurred())
	out := new(T)
	Expect(json.Unmarshal(data, out)).To(Succeed())
	return out
}

// causes are the refusals in an error, "field: message" each.
func causes(err error) []string {
	GinkgoHelper()
	Expect(apierrors.IsInvalid(err)).To(BeTrue(), "want 422 Invalid, got: %v", err)
	var status *apierrors.StatusError
	Expect(errors.As(err, &status)).To(BeTrue())
	var out []string
	for _, c := range status.ErrStatus.Details.Causes {
		switch {
		case strings.Contains(c.Message, "some validation rules were not checked"):
		case c.Field == "<nil>": // a rule on the root, where the schema knows no metadata.name
			out = append(out, strings.Replace(c.Message, "Invalid value: metadata.name ", "metadata.name: ", 1))
		default:
			out = append(out, c.Field+": "+c.Message)
		}
	}
	return out
}

// wanted is the first line of an invalid sample: "# field: fragment".
func wanted(data []byte) (field, fragment string) {
	GinkgoHelper()
	first, _, _ := strings.Cut(string(data), "\n")
	first, ok := strings.CutPrefix(first, "# ")
	Expect(ok).To(BeTrue(), "the first line is a comment with what is expected")
	field, fragment, ok = strings.Cut(first, ": ")
	Expect(ok).To(BeTrue(), "the comment is field: fragment")
	return field, fragment
}

// warnings collects what the server warns of.
type warnings struct {
	mu   sync.Mutex
	text []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, text)
}

func (w *warnings) all() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.text...)
}

// warned is a client whose warnings are kept.
func warned() (client.Client, *warnings) {
	GinkgoHelper()
	w := &warnings{}
	cfg := rest.CopyConfig(env.Config)
	cfg.WarningHandler = w
	c, err := client.New(cfg, client.Options{Scheme: env.Scheme})
	Expect(err).NotTo(HaveOccurred())
	return c, w
}

// get reads an object back.
func get(ctx SpecContext, u *unstructured.Unstructured) *unstructured.Unstructured {
	GinkgoHelper()
	out := &unstructured.Unstructured{}
	out.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind(u.GetKind()))
	Expect(env.Client.Get(ctx, client.ObjectKeyFromObject(u), out)).To(Succeed())
	return out
}
