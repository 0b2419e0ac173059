package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"sigs.k8s.io/yaml"
)

// maxBytes is what the last-applied annotation may hold. It holds the object as
// JSON.
const maxBytes = 262_144

// Bounds of what CEL rules walk inside a template.
const (
	maxContainers = 64
	maxLabels     = 256
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "crdtrim:", err)
		os.Exit(1)
	}
}

// run trims every CRD of one folder in place.
func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: crdtrim FOLDER")
	}
	files, err := filepath.Glob(filepath.Join(args[0], "*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("%s holds no CRD (*.yaml); run controller-gen first", args[0])
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			return fmt.Errorf("read a CRD: %w", err)
		}
		if data, err = trim(data); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			return fmt.Errorf("write a CRD: %w", err)
		}
	}
	return nil
}

// trim returns the CRD without what its templates do not need.
func trim(crd []byte) ([]byte, error) {
	var doc map[string]any
	if err := yaml.Unmarshal(crd, &doc); err != nil {
		return nil, fmt.Errorf("parse: %w", err)
	}
	spec, _ := doc["spec"].(map[string]any)
	versions, _ := spec["versions"].([]any)
	if len(versions) == 0 {
		return nil, errors.New("is no CustomResourceDefinition: spec.versions is empty")
	}
	for _, v := range versions {
		walk(v)
	}
	small, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if len(small) >= maxBytes {
		return nil, fmt.Errorf("is %d bytes of JSON, kubectl apply takes less than %d; shorten it", len(small), maxBytes)
	}
	out, err := yaml.JSONToYAML(small)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return append([]byte("---\n"), out...), nil
}

// walk finds the templates anywhere below node and strips them.
func walk(node any) {
	switch n := node.(type) {
	case []any:
		for _, v := range n {
			walk(v)
		}
	case map[string]any:
		props, _ := n["properties"].(map[string]any)
		if template, ok := props["template"].(map[string]any); ok {
			own, described := template["description"]
			strip(template, nil)
			bound(template)
			if described {
				template["description"] = own // kubectl explain of the field itself
			}
		}
		for key, v := range n {
			if key != "template" {
				walk(v)
			}
		}
	}
}

// strip removes descriptions and required lists from a schema and all below it.
// keys are the members that merge a list of such objects; they stay required,
// as the API server demands.
func strip(schema map[string]any, keys []any) {
	delete(schema, "description")
	delete(schema, "required")
	props, _ := schema["properties"].(map[string]any)
	var keep []any
	for _, k := range keys {
		name, _ := k.(string)
		member, _ := props[name].(map[string]any)
		if _, defaulted := member["default"]; !defaulted {
			keep = append(keep, k)
		}
	}
	if len(keep) > 0 {
		schema["required"] = keep
	}
	for _, v := range props {
		if member, ok := v.(map[string]any); ok {
			strip(member, nil)
		}
	}
	if values, ok := schema["additionalProperties"].(map[string]any); ok {
		strip(values, nil)
	}
	if items, ok := schema["items"].(map[string]any); ok {
		listKeys, _ := schema["x-kubernetes-list-map-keys"].([]any)
		strip(items, listKeys)
	}
}

// bound limits what CEL rules over a template walk.
func bound(template map[string]any) {
	for _, list := range []string{"containers", "initContainers"} {
		if s := at(template, "spec", list); s != nil {
			s["maxItems"] = maxContainers
		}
	}
	if s := at(template, "metadata", "labels"); s != nil {
		s["maxProperties"] = maxLabels
	}
}

// at descends through properties; nil when one is missing.
func at(schema map[string]any, path ...string) map[string]any {
	for _, name := range path {
		props, _ := schema["properties"].(map[string]any)
		schema, _ = props[name].(map[string]any)
	}
	return schema
}
