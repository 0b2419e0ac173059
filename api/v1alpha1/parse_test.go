package v1alpha1

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// head is the beginning of a valid manifest of five lines.
const head = "apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nmetadata: {name: p}\nspec:\n  model: {name: m}\n"

func TestShortManifestIsComplete(t *testing.T) {
	p := mustPool(t, short)
	if got := ResolveDirectPath(&p.Spec); got != DirectPathDeltaTransfer {
		t.Errorf("directPath = %s", got)
	}
	if p.Name != "qwen3-32b" || *p.Spec.Decode.Replicas != 3 || *p.Spec.Router.Service.Port != 8000 {
		t.Errorf("pool = %+v", p.Spec)
	}
}

func TestSamplesAreValid(t *testing.T) {
	files, err := filepath.Glob("../../config/samples/pool_*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatalf("samples: %v, %v", files, err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParsePool(f, data); err != nil {
			t.Error(err)
		}
	}
}

// Every refusal names the file, the line, the field and the remedy.
func TestParsePoolRefuses(t *testing.T) {
	cases := map[string]struct{ manifest, want string }{
		"an empty file":    {"", "pool.yaml: the file is empty; it should hold a KVCPool"},
		"only a separator": {"---\n", "pool.yaml: the file is empty; it should hold a KVCPool"},
		"a list":           {"- a\n", `pool.yaml:1: apiVersion: missing; write apiVersion: kvc.dev/v1alpha1`},
		"a second document": {head + "---\nkind: Secret\n",
			"pool.yaml:7: a second document starts here; keep one KVCPool per file"},
		"no kind": {"apiVersion: kvc.dev/v1alpha1\n", "pool.yaml:1: kind: missing; write kind: KVCPool"},
		"another kind": {"apiVersion: kvc.dev/v1alpha1\nkind: DecodeSet\n",
			`pool.yaml:2: kind: "DecodeSet" is not read here; write kind: KVCPool`},
		"another version": {"apiVersion: kvc.dev/v2\nkind: KVCPool\n",
			`pool.yaml:1: apiVersion: "kvc.dev/v2" is not read here; write apiVersion: kvc.dev/v1alpha1`},
		"a misspelt field": {head + "  prefil: {replicas: 1}\n",
			`pool.yaml:6: spec.prefil: unknown field; did you mean "prefill"?`},
		"a field in another case": {head + "  Decode: {replicas: 1}\n",
			`pool.yaml:6: spec.Decode: unknown field; did you mean "decode"?`},
		"a field of nowhere": {head + "  decode: {gpus: 1}\n",
			"pool.yaml:6: spec.decode.gpus: unknown field; known here are drain, minReadySeconds, "},
		"a field twice": {head + "  decode: {replicas: 1}\n  prefill: {}\n  decode: {replicas: 2}\n",
			"pool.yaml:8: spec.decode: given twice, first in line 6; remove one"},
		"text for a number": {head + "  decode: {replicas: three}\n",
			`pool.yaml:6: spec.decode.replicas: expected a whole number, found "three"`},
		"a fraction for a number": {head + "  decode:\n    replicas: 1.5\n",
			`pool.yaml:7: spec.decode.replicas: expected a whole number, found "1.5"`},
		"a number too large for its field": {head + "  decode: {replicas: 99999999999}\n",
			"pool.yaml:6: spec.decode.replicas: 99999999999 is out of range for this field; write a smaller number"},
		"a number for text": {strings.Replace(head, "{name: m}", "{name: 7}", 1),
			`pool.yaml:5: spec.model.name: expected text, found "7"; write it in quotes`},
		"a list for a mapping": {head + "  decode: [1]\n",
			"pool.yaml:6: spec.decode: expected a mapping of names to values, found a list"},
		"a mapping for a list": {head + "  sloClasses: {name: a}\n",
			`pool.yaml:6: spec.sloClasses: expected a list (lines starting with "- ", or [a, b]), found a mapping`},
		"a mapping for a number": {head + "  decode: {replicas: {a: 1}}\n",
			"pool.yaml:6: spec.decode.replicas: expected a whole number, found a mapping"},
		"a bad quantity": {head + "  engine: {shmSize: lots}\n",
			`pool.yaml:6: spec.engine.shmSize: "lots" is not a valid quantity: quantities must match`},
		"a misspelt field below a template": {head + "  decode:\n    template:\n      spec:\n        toleration: []\n",
			`pool.yaml:9: spec.decode.template.spec.toleration: unknown field; did you mean "tolerations"?`},
		"broken YAML": {head + "  decode: {replicas: 1\n", "not valid YAML: "},
		"a tab":       {head + "\tdecode: 1\n", "pool.yaml:6: not valid YAML: found character that cannot start any token"},
		"an unnamed pool": {strings.Replace(head, "{name: p}", "{}", 1),
			"pool.yaml:3: metadata.name: Required value: give the pool a name, such as qwen3-32b"},
		"an invalid value": {head + "  decode:\n    tensorParallelSize: 4\n    nodesPerReplica: 3\n",
			"pool.yaml:8: spec.decode.nodesPerReplica: Invalid value: 3: does not divide tensorParallelSize 4"},
		"an item of a list": {head + "  sloClasses:\n  - {name: a}\n  - {name: b}\n  - {name: a}\n",
			`pool.yaml:9: spec.sloClasses[2].name: Duplicate value: "a"`},
		"a rule across fields is at the nearest line": {
			head + "  engine: {directPath: Unified}\n  prefill: {tensorParallelSize: 1, replicas: 1}\n",
			"pool.yaml:7: spec.prefill.replicas: Invalid value: 1: engine.directPath Unified needs prefill.replicas 0"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p, err := ParsePool("pool.yaml", []byte(tc.manifest))
			if err == nil {
				t.Fatalf("accepted: %+v", p.Spec)
			}
			if !strings.Contains(err.Error(), tc.want) || !strings.HasPrefix(err.Error(), "pool.yaml:") {
				t.Errorf("error = %q\nwant %q", err, tc.want)
			}
		})
	}
}

func TestParsePoolReportsEverythingAtOnceInOrder(t *testing.T) {
	_, err := ParsePool("p.yaml", []byte(short+"  routr: {}\n  sloClasses: none\n"))
	want := "p.yaml:9: spec.routr: unknown field; did you mean \"router\"?\n" +
		"p.yaml:10: spec.sloClasses: expected a list (lines starting with \"- \", or [a, b]), found \"none\""
	if err == nil || err.Error() != want {
		t.Errorf("error = %v\nwant %s", err, want)
	}
}

func TestParsePoolReadsEveryFormOfYAML(t *testing.T) {
	cases := map[string]string{
		"JSON": `{"apiVersion":"kvc.dev/v1alpha1","kind":"KVCPool","metadata":{"name":"p"},` +
			`"spec":{"model":{"name":"m"},"decode":{"replicas":2}}}`,
		"a leading separator": "---\n" + strings.Replace(short, "replicas: 3", "replicas: 2", 1) + "---\n",
		"anchors and aliases": head +
			"  prefill: &role {replicas: 2}\n  decode: *role\n",
		"merge keys": head +
			"  prefill: &role {tensorParallelSize: 2, replicas: 1}\n  decode: {<<: *role, replicas: 2}\n",
		"nulls": "apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nmetadata: {name: p, labels: ~}\nspec:\n  model: {name: m}\n" +
			"  router:\n  decode: {replicas: 2}\n",
	}
	for name, manifest := range cases {
		t.Run(name, func(t *testing.T) {
			if p := mustPool(t, manifest); *p.Spec.Decode.Replicas != 2 {
				t.Errorf("decode = %+v, want 2 replicas", p.Spec.Decode)
			}
		})
	}
}

func TestParsePoolReadsAWholeTemplate(t *testing.T) {
	p := mustPool(t, short+`
  router:
    service: {type: LoadBalancer}
    template: {spec: {nodeSelector: {pool: cpu}}}
  engine:
    resources: {requests: {cpu: "8", memory: 96Gi}}
    imagePullSecrets: [{name: a}]
`)
	if got := p.Spec.Router.Template.Spec.NodeSelector["pool"]; got != "cpu" {
		t.Errorf("nodeSelector = %q", got)
	}
	if got := p.Spec.Engine.Resources.Requests.Memory().String(); got != "96Gi" {
		t.Errorf("memory = %s", got)
	}
}

func TestPathSteps(t *testing.T) {
	for path, want := range map[string]string{
		"":                               "",
		"spec.decode.replicas":           "spec|decode|replicas",
		"spec.sloClasses[2].name":        "spec|sloClasses|2|name",
		"metadata.labels[kvc.dev/x].odd": "metadata|labels|kvc.dev/x|odd",
		"spec[":                          "spec|",
	} {
		if got := strings.Join(pathSteps(path), "|"); got != want {
			t.Errorf("pathSteps(%q) = %q, want %q", path, got, want)
		}
	}
}

func TestEditDistance(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "", 3}, {"prefil", "prefill", 1}, {"kitten", "sitting", 3}, {"ab", "ba", 2}} {
		if got := editDistance(tc.a, tc.b); got != tc.want {
			t.Errorf("editDistance(%q, %q) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
		if got := editDistance(tc.b, tc.a); got != tc.want {
			t.Errorf("editDistance(%q, %q) = %d, want %d: it is symmetric", tc.b, tc.a, got, tc.want)
		}
	}
}

// Whatever the bytes: no panic, every error names the file, and an accepted pool
// is valid, defaulted and reads back the same.
func FuzzParsePool(f *testing.F) {
	f.Add([]byte(short))
	f.Add([]byte("a: &a [*a]"))
	f.Add([]byte("spec: {<<: [1]}"))
	f.Add([]byte("apiVersion: kvc.dev/v1alpha1\nkind: KVCPool\nspec: &s {decode: *s}\n"))
	f.Add([]byte(strings.Replace(short, "{name: qwen3-32b}", "{name: p, creationTimestamp: 2020-01-01}", 1)))
	f.Add([]byte(short + "  router: {template: {spec: {containers: [{name: a, env: [{name: A, value: !!binary aGk=}]}]}}}\n"))
	f.Add([]byte("? {a: b}\n: 1\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := ParsePool("pool.yaml", data)
		if err != nil {
			for line := range strings.Lines(err.Error()) {
				if !strings.HasPrefix(line, "pool.yaml") {
					t.Errorf("line without the file: %q", line)
				}
			}
			return
		}
		if errs := Validate(p); len(errs) > 0 {
			t.Errorf("accepted and not valid: %v", errs)
		}
		again := p.DeepCopy()
		Default(again)
		if *again.Spec.Decode.Replicas != *p.Spec.Decode.Replicas {
			t.Error("not defaulted")
		}
	})
}
