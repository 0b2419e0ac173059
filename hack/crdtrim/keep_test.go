package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// fullCRD is a generated CRD in small: a described field, a template with all that
// a template holds, and a second template deeper down.
const fullCRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: things.example.org
spec:
  group: example.org
  versions:
  - name: v1
    schema:
      openAPIV3Schema:
        type: object
        description: a thing
        required: [spec]
        properties:
          spec:
            type: object
            description: what is wanted
            required: [replicas]
            properties:
              replicas:
                type: integer
                description: how many
              decode:
                type: object
                properties:
                  template: &template
                    type: object
                    description: the pod template
                    required: [spec]
                    properties:
                      metadata:
                        type: object
                        description: metadata of the pod
                        properties:
                          labels:
                            type: object
                            description: labels of the pod
                            additionalProperties:
                              type: string
                              description: one label
                      spec:
                        type: object
                        description: spec of the pod
                        required: [containers]
                        properties:
                          containers:
                            type: array
                            description: the containers
                            x-kubernetes-list-type: map
                            x-kubernetes-list-map-keys: [name]
                            items:
                              type: object
                              description: one container
                              required: [name, image]
                              properties:
                                name:
                                  type: string
                                  description: its name
                                image:
                                  type: string
                                ports:
                                  type: array
                                  x-kubernetes-list-type: map
                                  x-kubernetes-list-map-keys: [containerPort, protocol]
                                  items:
                                    type: object
                                    required: [containerPort]
                                    properties:
                                      containerPort:
                                        type: integer
                                        description: the port
                                      protocol:
                                        type: string
                                        default: TCP
                          initContainers:
                            type: array
                            items:
                              type: object
                              required: [name]
              template: *template
`

func parsed(t *testing.T, data []byte) map[string]any {
	t.Helper()
	var doc map[string]any
	if err := yaml.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

// dig descends through maps and the first element of lists.
func dig(t *testing.T, node any, path ...string) any {
	t.Helper()
	for _, name := range path {
		if list, ok := node.([]any); ok {
			node = list[0]
		}
		m, ok := node.(map[string]any)
		if !ok {
			t.Fatalf("nothing below %q of %v", name, path)
		}
		node = m[name]
	}
	return node
}

func fullTrimmed(t *testing.T) any {
	t.Helper()
	out, err := trim([]byte(fullCRD))
	if err != nil {
		t.Fatal(err)
	}
	return dig(t, parsed(t, out), "spec", "versions", "schema", "openAPIV3Schema")
}

func TestTrimKeepsAllThatStandsOutsideATemplate(t *testing.T) {
	schema := fullTrimmed(t)
	for _, c := range []struct {
		claim string
		path  []string
		want  any
	}{
		{"description of the kind", []string{"description"}, "a thing"},
		{"required members of the kind", []string{"required"}, []any{"spec"}},
		{"description of the spec", []string{"properties", "spec", "description"}, "what is wanted"},
		{"required members of the spec", []string{"properties", "spec", "required"}, []any{"replicas"}},
		{"description of a field", []string{"properties", "spec", "properties", "replicas", "description"}, "how many"},
	} {
		if diff := cmp.Diff(c.want, dig(t, schema, c.path...)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.claim, diff)
		}
	}
}

func TestTrimStripsEveryTemplateAtAnyDepth(t *testing.T) {
	schema := fullTrimmed(t)
	for _, where := range [][]string{
		{"properties", "spec", "properties", "template"},
		{"properties", "spec", "properties", "decode", "properties", "template"},
	} {
		template := dig(t, schema, where...)
		for _, c := range []struct {
			claim string
			path  []string
			want  any
		}{
			{"its own description stays for kubectl explain", []string{"description"}, "the pod template"},
			{"a partial template is allowed", []string{"required"}, nil},
			{"type stays", []string{"type"}, "object"},
			{"descriptions below go", []string{"properties", "spec", "description"}, nil},
			{"required below goes", []string{"properties", "spec", "required"}, nil},
			{"descriptions of map values go", []string{"properties", "metadata", "properties", "labels", "additionalProperties", "description"}, nil},
			{"types of map values stay", []string{"properties", "metadata", "properties", "labels", "additionalProperties", "type"}, "string"},
			{"labels are bounded for CEL", []string{"properties", "metadata", "properties", "labels", "maxProperties"}, float64(maxLabels)},
			{"containers are bounded for CEL", []string{"properties", "spec", "properties", "containers", "maxItems"}, float64(maxContainers)},
			{"init containers are bounded for CEL", []string{"properties", "spec", "properties", "initContainers", "maxItems"}, float64(maxContainers)},
			{"merge keys of a list stay", []string{"properties", "spec", "properties", "containers", "x-kubernetes-list-map-keys"}, []any{"name"}},
			{"of an item only the merge key stays required", []string{"properties", "spec", "properties", "containers", "items", "required"}, []any{"name"}},
			{"a defaulted merge key need not be required", []string{
				"properties", "spec", "properties", "containers", "items", "properties", "ports", "items", "required",
			}, []any{"containerPort"}},
			{"a default stays", []string{
				"properties", "spec", "properties", "containers", "items", "properties", "ports", "items", "properties", "protocol", "default",
			}, "TCP"},
			{"an atomic list requires nothing of its items", []string{"properties", "spec", "properties", "initContainers", "items", "required"}, nil},
		} {
			if diff := cmp.Diff(c.want, dig(t, template, c.path...)); diff != "" {
				t.Errorf("%v: %s (-want +got):\n%s", where, c.claim, diff)
			}
		}
	}
}

func TestTrimTwiceIsTrimOnce(t *testing.T) {
	once, err := trim([]byte(fullCRD))
	if err != nil {
		t.Fatal(err)
	}
	twice, err := trim(once)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(once), string(twice)); diff != "" {
		t.Errorf("make generate would not settle (-once +twice):\n%s", diff)
	}
	if !strings.HasPrefix(string(once), "---\n") || strings.Count(string(once), "---\n") != 1 {
		t.Error("the output must be one YAML document")
	}
}

func TestTrimRefusesWhatItCannotMakeSmall(t *testing.T) {
	long := strings.Repeat("long ", maxBytes/5)
	for claim, c := range map[string]struct{ in, want string }{
		"no YAML":                         {"a: [", "parse: "},
		"no CRD":                          {"kind: ConfigMap\ndata: {}\n", "spec.versions is empty"},
		"empty":                           {"", "spec.versions is empty"},
		"too large outside the templates": {strings.Replace(fullCRD, "how many", long, 1), "shorten it"},
	} {
		t.Run(claim, func(t *testing.T) {
			out, err := trim([]byte(c.in))
			if err == nil || !strings.Contains(err.Error(), c.want) || out != nil {
				t.Errorf("trim = %d bytes, %v; want an error with %q", len(out), err, c.want)
			}
		})
	}
	t.Run("the same text inside a template is no problem", func(t *testing.T) {
		if _, err := trim([]byte(strings.Replace(fullCRD, "one container", long, 1))); err != nil {
			t.Error(err)
		}
	})
}

func TestRunTrimsAFolderInPlace(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.yaml", "b.yaml", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(fullCRD), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := run([]string{dir}); err != nil {
		t.Fatal(err)
	}
	want, err := trim([]byte(fullCRD))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"a.yaml": string(want), "b.yaml": string(want), "notes.txt": fullCRD} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(got) != text {
			t.Errorf("%s holds %d bytes, %v; want %d", name, len(got), err, len(text))
		}
	}
}

func TestRunNamesWhatIsWrong(t *testing.T) {
	broken := t.TempDir()
	file := filepath.Join(broken, "pool.yaml")
	if err := os.WriteFile(file, []byte("kind: Pod\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for claim, c := range map[string]struct {
		args []string
		want string
	}{
		"no folder":      {nil, "usage: crdtrim FOLDER"},
		"two folders":    {[]string{"a", "b"}, "usage: crdtrim FOLDER"},
		"empty folder":   {[]string{t.TempDir()}, "run controller-gen first"},
		"missing folder": {[]string{filepath.Join(broken, "none")}, "run controller-gen first"},
		"a broken file":  {[]string{broken}, "pool.yaml: is no CustomResourceDefinition"},
	} {
		t.Run(claim, func(t *testing.T) {
			if err := run(c.args); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("run = %v, want %q", err, c.want)
			}
		})
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "kind: Pod\n" {
		t.Errorf("a refused file was changed: %q, %v", got, err)
	}
}

// TestTheRepositorysCRDsAreTrimmed fails when somebody regenerates the CRDs
// without trimming them.
func TestTheRepositorysCRDsAreTrimmed(t *testing.T) {
	files, err := filepath.Glob("../../config/crd/bases/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs in config/crd/bases: %v", err)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := trim(data)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(parsed(t, want), parsed(t, data)); diff != "" {
			t.Errorf("%s is not trimmed; run crdtrim config/crd/bases", name)
		}
	}
}
