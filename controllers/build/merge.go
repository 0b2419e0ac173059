package build

import (
	"encoding/json"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
)

// mergeTemplate lays a user's partial template over what was rendered, by
// strategic merge: containers, env, volumes and tolerations merge by their keys.
func mergeTemplate(rendered, partial *corev1.PodTemplateSpec) (*corev1.PodTemplateSpec, error) {
	if partial == nil {
		return rendered, nil
	}
	base, err := json.Marshal(rendered)
	if err != nil {
		return nil, fmt.Errorf("encode the rendered template: %w", err)
	}
	patch, err := patchOf(partial)
	if err != nil {
		return nil, err
	}
	data, err := strategicpatch.StrategicMergePatch(base, patch, corev1.PodTemplateSpec{})
	if err != nil {
		return nil, fmt.Errorf("merge over the rendered template: %w", err)
	}
	out := &corev1.PodTemplateSpec{}
	if err := json.Unmarshal(data, out); err != nil {
		return nil, fmt.Errorf("read the merged template: %w", err)
	}
	return out, nil
}

// patchOf writes a partial template without the nulls that Go makes of absent
// lists ("containers": null): a strategic merge would read them as deletions.
func patchOf(partial *corev1.PodTemplateSpec) ([]byte, error) {
	data, err := json.Marshal(partial)
	if err != nil {
		return nil, fmt.Errorf("encode the template: %w", err)
	}
	var tree map[string]any
	if err := json.Unmarshal(data, &tree); err != nil {
		return nil, fmt.Errorf("encode the template: %w", err)
	}
	dropNulls(tree)
	if data, err = json.Marshal(tree); err != nil {
		return nil, fmt.Errorf("encode the template: %w", err)
	}
	return data, nil
}

func dropNulls(v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, member := range v {
			if member == nil {
				delete(v, key)
				continue
			}
			dropNulls(member)
		}
	case []any:
		for _, item := range v {
			dropNulls(item)
		}
	}
}
