package v1alpha1

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// walker compares a YAML tree with the Go type it is to fill.
type walker struct {
	problems []problem
	seen     map[visit]bool // an alias makes the tree a graph, possibly a cyclic one
}

type visit struct {
	node *yaml.Node
	typ  reflect.Type
}

func (w *walker) report(n *yaml.Node, path, format string, args ...any) {
	w.problems = append(w.problems, problem{line: n.Line, field: path, text: fmt.Sprintf(format, args...)})
}

func (w *walker) walk(n *yaml.Node, t reflect.Type, path string) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if n.ShortTag() == "!!null" || w.seen[visit{n, t}] {
		return // null leaves the zero value
	}
	w.seen[visit{n, t}] = true

	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		w.custom(n, t, path)
		return
	}
	switch t.Kind() {
	case reflect.Struct:
		w.object(n, t, path)
	case reflect.Map:
		w.table(n, t, path)
	case reflect.Slice:
		w.list(n, t, path)
	case reflect.Interface:
	default:
		w.scalar(n, t, path)
	}
}

// object checks a mapping against the members of a struct.
func (w *walker) object(n *yaml.Node, t reflect.Type, path string) {
	known := members(t)
	w.pairs(n, path, func(key, value *yaml.Node) {
		at := join(path, key.Value)
		if typ, ok := known[key.Value]; ok {
			w.walk(value, typ, at)
			return
		}
		w.report(key, at, "unknown field; %s", remedy(key.Value, slices.Sorted(maps.Keys(known))))
	}, func(merged *yaml.Node) { w.walk(merged, t, path) })
}

// table checks a mapping with free keys.
func (w *walker) table(n *yaml.Node, t reflect.Type, path string) {
	w.pairs(n, path, func(key, value *yaml.Node) {
		w.walk(value, t.Elem(), path+"["+key.Value+"]")
	}, func(merged *yaml.Node) { w.walk(merged, t, path) })
}

// pairs visits the members of a mapping, once per key. A merge key ("<<") hands
// over each mapping that it merges.
func (w *walker) pairs(n *yaml.Node, path string, member func(k, v *yaml.Node), merge func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		w.report(n, path, "expected a mapping of names to values, found %s", describe(n))
		return
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch first := lines[key.Value]; {
		case key.ShortTag() == "!!merge":
			for _, m := range mergedNodes(value) {
				merge(m)
			}
			continue
		case key.Kind != yaml.ScalarNode || key.ShortTag() != "!!str":
			w.report(key, path, "a name here is %s; write it as text, in quotes if need be", describe(key))
		case first != 0:
			w.report(key, join(path, key.Value), "given twice, first in line %d; remove one", first)
		default:
			member(key, value)
		}
		lines[key.Value] = key.Line
	}
}

func mergedNodes(n *yaml.Node) []*yaml.Node {
	if n.Kind == yaml.SequenceNode {
		return n.Content
	}
	return []*yaml.Node{n}
}

func (w *walker) list(n *yaml.Node, t reflect.Type, path string) {
	if t.Elem().Kind() == reflect.Uint8 { // []byte is base64 text
		w.scalar(n, reflect.TypeFor[string](), path)
		return
	}
	if n.Kind != yaml.SequenceNode {
		w.report(n, path, "expected a list (lines starting with \"- \", or [a, b]), found %s", describe(n))
		return
	}
	for i, item := range n.Content {
		w.walk(item, t.Elem(), path+"["+strconv.Itoa(i)+"]")
	}
}

// custom lets a type with its own JSON form (quantities, int-or-string, times)
// say whether it accepts the value.
func (w *walker) custom(n *yaml.Node, t reflect.Type, path string) {
	var value any
	err := n.Decode(&value)
	if err != nil {
		w.report(n, path, "%s", syntaxProblem(err).text)
		return
	}
	data, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(data, reflect.New(t).Interface())
	}
	if err != nil {
		w.report(n, path, "%s is not a valid %s: %v", describe(n), strings.ToLower(t.Name()), err)
	}
}

func (w *walker) scalar(n *yaml.Node, t reflect.Type, path string) {
	tag := n.ShortTag()
	switch k := t.Kind(); {
	case n.Kind != yaml.ScalarNode:
		w.report(n, path, "expected %s, found %s", expected(k), describe(n))
	case k == reflect.String && tag == "!!str", k == reflect.Bool && tag == "!!bool":
	case k == reflect.String:
		w.report(n, path, "expected text, found %s; write it in quotes", describe(n))
	case isInteger(k) && tag == "!!int":
		if err := n.Decode(reflect.New(t).Interface()); err != nil {
			w.report(n, path, "%s is out of range for this field; write a smaller number", n.Value)
		}
	case isFloat(k) && (tag == "!!int" || tag == "!!float"):
	default:
		w.report(n, path, "expected %s, found %s", expected(k), describe(n))
	}
}

func isInteger(k reflect.Kind) bool { return k >= reflect.Int && k <= reflect.Uint64 }

func isFloat(k reflect.Kind) bool { return k == reflect.Float32 || k == reflect.Float64 }

func expected(k reflect.Kind) string {
	switch {
	case k == reflect.String:
		return "text"
	case k == reflect.Bool:
		return "true or false"
	case isInteger(k):
		return "a whole number"
	}
	return "a number"
}

// describe says what a node is in words, with its value where that helps.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	}
	return strconv.Quote(n.Value)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// members lists the JSON members of a struct, those of inlined structs included.
func members(t reflect.Type) map[string]reflect.Type {
	out := map[string]reflect.Type{}
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported():
		case name == "" && f.Anonymous:
			maps.Copy(out, members(f.Type))
		case name == "":
			out[f.Name] = f.Type
		default:
			out[name] = f.Type
		}
	}
	return out
}

// remedy for a misspelt name: the nearest known one, or all of them.
func remedy(name string, known []string) string {
	best, distance := "", 1+max(1, len(name)/3)
	for _, k := range known {
		if d := editDistance(strings.ToLower(name), strings.ToLower(k)); d < distance {
			best, distance = k, d
		}
	}
	if best != "" {
		return fmt.Sprintf("did you mean %q?", best)
	}
	const most = 20
	if len(known) > most {
		return "remove it"
	}
	return "known here are " + strings.Join(known, ", ")
}

// editDistance counts the letters to insert, delete or replace.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
