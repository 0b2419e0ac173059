package v1alpha1

import (
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ParsePool reads one KVCPool manifest (YAML or JSON), fills its defaults and
// validates it. name is the file's, for messages. The error names, one line per
// problem: file, line, field, what is wrong, what to write instead. Unknown and
// duplicate fields are refused, and so are several documents in one file.
func ParsePool(name string, data []byte) (*KVCPool, error) {
	d, err := readDocument(name, KindPool, data)
	if err != nil {
		return nil, err
	}
	if err := d.isPool(); err != nil {
		return nil, err
	}
	pool := &KVCPool{}
	if err := d.decode(pool); err != nil {
		return nil, err
	}
	Default(pool)
	if err := d.explain(Validate(pool)); err != nil {
		return nil, err
	}
	return pool, nil
}

// isPool refuses other kinds before their fields are called unknown.
func (d *document) isPool() error {
	want := map[string]string{"apiVersion": GroupVersion.String(), "kind": KindPool}
	for _, member := range []string{"apiVersion", "kind"} {
		key, value := child(d.root, member)
		switch {
		case value == nil:
			return d.fail([]problem{{line: d.root.Line, field: member,
				text: fmt.Sprintf("missing; write %s: %s", member, want[member])}})
		case value.Value != want[member]:
			return d.fail([]problem{{line: key.Line, field: member,
				text: fmt.Sprintf("%q is not read here; write %s: %s", value.Value, member, want[member])}})
		}
	}
	return nil
}

// explain puts validation errors at their lines.
func (d *document) explain(errs field.ErrorList) error {
	problems := make([]problem, 0, len(errs))
	for _, e := range errs {
		problems = append(problems, problem{
			line: d.line(e.Field), field: e.Field, text: strings.ReplaceAll(e.ErrorBody(), "\n", " "),
		})
	}
	return d.fail(problems)
}
