package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// crd has a template with everything that trim looks at, and its like beside it.
const crd = `spec:
  versions:
  - name: v1
    schema:
      openAPIV3Schema:
        description: the root
        required: [spec]
        properties:
          spec:
            description: what is wanted
            required: [template, beside]
            properties:
              beside: {description: of its own, type: object, required: [x], properties: {x: {type: string}}}
              role:
                properties:
                  template:
                    description: a partial one
                    properties:
                      metadata:
                        description: gone
                        properties:
                          labels: {description: gone, additionalProperties: {description: gone, type: string}}
                      spec:
                        description: gone
                        required: [containers]
                        properties:
                          containers:
                            description: gone
                            x-kubernetes-list-type: map
                            x-kubernetes-list-map-keys: [name, kind]
                            items:
                              required: [name, image]
                              properties:
                                name: {description: gone, type: string}
                                kind: {default: a, type: string}
                                description: {description: gone, type: string}
                                required: {description: gone, type: string}
                          initContainers: {items: {required: [name]}}
                          volumes: {items: {required: [name]}}
`

func trimmed(t *testing.T) map[string]any {
	t.Helper()
	out, err := trim([]byte(crd))
	if err != nil {
		t.Fatal(err)
	}
	var doc map[string]any
	if err := yaml.Unmarshal(out, &doc); err != nil {
		t.Fatal(err)
	}
	versions := doc["spec"].(map[string]any)["versions"].([]any)
	return versions[0].(map[string]any)["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)
}

func TestTrim(t *testing.T) {
	root := trimmed(t)
	template := at(root, "spec", "role", "template")
	containers := at(template, "spec", "containers")
	item := containers["items"].(map[string]any)
	cases := map[string]struct{ got, want any }{
		"a description outside a template stays":    {at(root, "spec")["description"], "what is wanted"},
		"a required list outside a template stays":  {at(root, "spec")["required"], []any{"template", "beside"}},
		"so does one beside it":                     {at(root, "spec", "beside")["required"], []any{"x"}},
		"the template's own description stays":      {template["description"], "a partial one"},
		"a description below a template goes":       {at(template, "spec")["description"], nil},
		"a required list below a template goes":     {at(template, "spec")["required"], nil},
		"the key of a merged list stays required":   {item["required"], []any{"name"}},
		"a field may be called description":         {at(item, "description")["type"], "string"},
		"or required":                               {at(item, "required")["type"], "string"},
		"descriptions of map values go":             {at(template, "metadata", "labels")["additionalProperties"], map[string]any{"type": "string"}},
		"a list that rules walk is bounded":         {containers["maxItems"], float64(maxContainers)},
		"so is the other":                           {at(template, "spec", "initContainers")["maxItems"], float64(maxContainers)},
		"and the labels":                            {at(template, "metadata", "labels")["maxProperties"], float64(maxLabels)},
		"a list that no rule walks is not bounded":  {at(template, "spec", "volumes")["maxItems"], nil},
		"required goes from plain lists altogether": {at(template, "spec", "volumes")["items"], map[string]any{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestTrimIsIdempotent(t *testing.T) {
	once, err := trim([]byte(crd))
	if err != nil {
		t.Fatal(err)
	}
	twice, err := trim(once)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(once), string(twice)); diff != "" {
		t.Error(diff)
	}
}

func TestRunRefuses(t *testing.T) {
	large := strings.Replace(crd, "the root", strings.Repeat("x", maxBytes), 1)
	cases := map[string]struct{ file, want string }{
		"what is no YAML":     {"a: [", "parse"},
		"what is no CRD":      {"kind: Secret", "spec.versions is empty"},
		"a CRD that is large": {large, "kubectl apply takes less than 262144; shorten it"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "crd.yaml")
			if err := os.WriteFile(file, []byte(tc.file), 0o600); err != nil {
				t.Fatal(err)
			}
			err := run([]string{dir})
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), file) {
				t.Errorf("error = %v, want %q and the file's name", err, tc.want)
			}
			if left, _ := os.ReadFile(file); string(left) != tc.file {
				t.Error("a refused file was changed")
			}
		})
	}
	t.Run("an empty folder", func(t *testing.T) {
		if err := run([]string{t.TempDir()}); err == nil || !strings.Contains(err.Error(), "run controller-gen first") {
			t.Errorf("error = %v", err)
		}
	})
	t.Run("no folder", func(t *testing.T) {
		if err := run(nil); err == nil {
			t.Error("accepted")
		}
	})
}
