package envtest

import (
	"testing"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/kvc-dev/kvc/test/envtest/kit"
)

// env is the suite's API server; written once, before any spec.
var env *kit.Env

func TestAPI(t *testing.T) {
	if why := kit.Missing(); why != "" {
		t.Skip(why)
	}
	RegisterFailHandler(Fail)
	RunSpecs(t, "The API on a real API server")
}

var _ = BeforeSuite(func() {
	var err error
	env, err = kit.Start()
	Expect(err).NotTo(HaveOccurred())
})

var _ = AfterSuite(func() {
	if env != nil {
		Expect(env.Stop()).To(Succeed())
	}
})

// namespace makes one for the running spec.
func namespace(ctx SpecContext) string {
	GinkgoHelper()
	ns, err := env.Namespace(ctx)
	Expect(err).NotTo(HaveOccurred())
	return ns
}
