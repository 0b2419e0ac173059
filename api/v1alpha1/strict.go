package v1alpha1

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// document is one YAML document with the lines of its members, so that whatever
// is wrong with a value can be said where it stands.
type document struct {
	name string // of the file, for messages
	root *yaml.Node
}

// problem is one thing wrong with a document.
type problem struct {
	line  int    // 1-based; 0 = unknown
	field string // dotted path; "" = the document
	text  string // what is wrong and what to do
}

// fail turns problems into one error of one line each, in document order; nil
// when there are none.
func (d *document) fail(problems []problem) error {
	slices.SortStableFunc(problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	errs := make([]error, 0, len(problems))
	for _, p := range problems {
		where := d.name
		if p.line > 0 {
			where += ":" + strconv.Itoa(p.line)
		}
		if p.field != "" {
			where += ": " + p.field
		}
		errs = append(errs, errors.New(where+": "+p.text))
	}
	return errors.Join(errs...)
}

// readDocument parses the one YAML (or JSON) document of a file. what names the
// thing that the file should hold.
func readDocument(name, what string, data []byte) (*document, error) {
	d := &document{name: name}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var node yaml.Node
		err := dec.Decode(&node)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, d.fail([]problem{syntaxProblem(err)})
		}
		content := node.Content
		if len(content) == 0 || content[0].Kind == yaml.ScalarNode && content[0].Tag == "!!null" {
			continue // "---" with nothing after it
		}
		if d.root != nil {
			return nil, d.fail([]problem{{line: content[0].Line,
				text: "a second document starts here; keep one " + what + " per file"}})
		}
		d.root = content[0]
	}
	if d.root == nil {
		return nil, d.fail([]problem{{text: "the file is empty; it should hold a " + what}})
	}
	return d, nil
}

// decode fills into from the document. Unknown and duplicate members and values
// of a wrong type are problems, all of them reported at once.
func (d *document) decode(into any) error {
	w := walker{seen: map[visit]bool{}}
	w.walk(d.root, reflect.TypeOf(into).Elem(), "")
	if len(w.problems) > 0 {
		return d.fail(w.problems)
	}
	var value any
	if err := d.root.Decode(&value); err != nil {
		return d.fail([]problem{syntaxProblem(err)})
	}
	data, err := json.Marshal(value)
	if err != nil {
		return d.fail([]problem{{text: "a value has no JSON form (" + err.Error() + "); write it in quotes"}})
	}
	if err := json.Unmarshal(data, into); err != nil {
		p := problem{text: err.Error()}
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			p = problem{line: d.line(wrong.Field), field: wrong.Field,
				text: "a " + wrong.Value + " does not fit here; expected " + wrong.Type.String()}
		}
		return d.fail([]problem{p})
	}
	return nil
}

// line is where the deepest known part of a field path stands; 0 when not even
// its first part exists.
func (d *document) line(path string) int {
	node, line := d.root, 0
	for _, step := range pathSteps(path) {
		key, value := child(node, step)
		if value == nil {
			break
		}
		node, line = value, key.Line
	}
	return line
}

// pathSteps splits "spec.levels[2].name" and "metadata.labels[a.b/c]".
func pathSteps(path string) []string {
	var steps []string
	for path != "" {
		switch path[0] {
		case '.':
			path = path[1:]
		case '[':
			end := strings.IndexByte(path, ']')
			if end < 0 {
				return append(steps, path[1:])
			}
			steps = append(steps, path[1:end])
			path = path[end+1:]
		default:
			end := strings.IndexAny(path, ".[")
			if end < 0 {
				return append(steps, path)
			}
			steps = append(steps, path[:end])
			path = path[end:]
		}
	}
	return steps
}

// child finds a member of a mapping or an item of a sequence; key is the node
// whose line names it.
func child(node *yaml.Node, step string) (key, value *yaml.Node) {
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	switch node.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 {
			if node.Content[i].Value == step {
				return node.Content[i], node.Content[i+1]
			}
		}
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(step); err == nil && i >= 0 && i < len(node.Content) {
			return node.Content[i], node.Content[i]
		}
	}
	return nil, nil
}

// yamlLine is how the YAML parser names a line.
var yamlLine = regexp.MustCompile(`(?s)^yaml: (?:unmarshal errors:\s*)?line (\d+): (.*)$`)

func syntaxProblem(err error) problem {
	const remedy = " (check indentation, quotes and brackets there)"
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ := strconv.Atoi(m[1])
		return problem{line: line, text: "not valid YAML: " + m[2] + remedy}
	}
	return problem{text: fmt.Sprintf("not valid YAML: %s%s", strings.TrimPrefix(err.Error(), "yaml: "), remedy)}
}
