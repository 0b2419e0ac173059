package fleet

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// FieldError is one fault of a fleet file.
type FieldError struct {
	File   string
	Line   int    // 1-based; 0 = unknown
	Field  string // "workers[2].url"; "" = the whole file
	What   string // what is wrong
	Remedy string // what to write instead
}

// Error is "file:line: field: what; remedy".
func (e *FieldError) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		b.WriteByte(':')
		b.WriteString(strconv.Itoa(e.Line))
	}
	b.WriteString(": ")
	if e.Field != "" {
		b.WriteString(e.Field)
		b.WriteString(": ")
	}
	b.WriteString(e.What)
	if e.Remedy != "" {
		b.WriteString("; ")
		b.WriteString(e.Remedy)
	}
	return b.String()
}

// decodeError turns the YAML library's error into ours.
func decodeError(name string, err error) error {
	out := &FieldError{File: name, What: err.Error(), Remedy: "see wire.md §7 for the format"}
	var ye yaml.Error
	if !errors.As(err, &ye) {
		return out
	}
	out.What = strings.ReplaceAll(ye.GetMessage(), "\n", " ")
	tok := ye.GetToken()
	if tok == nil {
		return out
	}
	out.Line = tok.Position.Line
	var unknown *yaml.UnknownFieldError
	var typ *yaml.TypeError
	var node *yaml.UnexpectedNodeTypeError
	switch {
	case errors.As(err, &unknown):
		out.Field, out.What, out.Remedy = tok.Value, "unknown key", "remove it or fix its spelling"
	case strings.Contains(out.What, "already defined"): // found by the parser, without a type of its own
		out.Field, out.What, out.Remedy = tok.Value, "key given twice", "keep one of the two"
	case errors.As(err, &typ):
		out.Field = keyOf(tok)
		out.What = fmt.Sprintf("%q is not a %s", tok.Value, kindName(typ.DstType.Kind().String()))
		out.Remedy = "write a value of that kind"
	case errors.As(err, &node):
		out.Field = keyOf(tok)
	}
	return out
}

// keyOf is the key in front of a value's token; "" when there is none.
func keyOf(tok *token.Token) string {
	if c := tok.Prev; c != nil && c.Type == token.MappingValueType && c.Prev != nil {
		return c.Prev.Value
	}
	return ""
}

func kindName(k string) string {
	switch {
	case strings.HasPrefix(k, "int"), strings.HasPrefix(k, "uint"):
		return "whole number"
	case k == "slice":
		return "list"
	case k == "struct" || k == "map":
		return "mapping"
	}
	return k
}

// checker collects the faults that the YAML decoder does not see.
type checker struct {
	name   string
	doc    *ast.File // for line numbers only; nil = unknown
	faults []error
}

func newChecker(name string, data []byte) *checker {
	doc, err := parser.ParseBytes(data, 0)
	if err != nil {
		doc = nil // decoding succeeded, so only the line numbers are lost
	}
	return &checker{name: name, doc: doc}
}

// line finds the line of a path such as "workers[2].url", or of its nearest
// existing parent.
func (c *checker) line(field string) int {
	for p := field; c.doc != nil; {
		path, err := yaml.PathString("$." + p)
		if p == "" {
			path, err = yaml.PathString("$")
		}
		if err == nil {
			if n, err := path.FilterFile(c.doc); err == nil && n != nil && n.GetToken() != nil {
				return firstLine(n)
			}
		}
		if p == "" {
			break
		}
		p = p[:max(0, strings.LastIndexAny(p, ".["))]
	}
	return 1
}

// firstLine is the line a node starts on. A mapping's own token is its first
// colon, which is on the line of its first key.
func firstLine(n ast.Node) int { return n.GetToken().Position.Line }

// docLine is the line of a document's separator, else of its first node.
func docLine(d *ast.DocumentNode) int {
	if d.Start != nil {
		return d.Start.Position.Line
	}
	return d.GetToken().Position.Line
}

func (c *checker) fault(field, what, remedy string) {
	c.faults = append(c.faults, &FieldError{
		File: c.name, Line: c.line(field), Field: field, What: what, Remedy: remedy,
	})
}

func (c *checker) file(f *File) {
	if c.doc != nil && len(c.doc.Docs) > 1 {
		c.faults = append(c.faults, &FieldError{File: c.name, Line: docLine(c.doc.Docs[1]),
			What: "a second document starts here", Remedy: "keep one document per file"})
	}
	if f.Version != Version {
		c.fault("version", fmt.Sprintf("version %d is not supported", f.Version), "write `version: 1`")
	}
	c.need("pool.namespace", f.Pool.Namespace, "name the pool's namespace, e.g. local")
	c.need("pool.name", f.Pool.Name, "name the pool")
	c.need("pool.model", f.Pool.Model, "write the name the engines serve")
	for i, a := range f.Pool.Aliases {
		field := fmt.Sprintf("pool.aliases[%d]", i)
		c.need(field, a, "remove the empty alias")
		if a != "" && (a == f.Pool.Model || slices.Index(f.Pool.Aliases, a) < i) {
			c.fault(field, fmt.Sprintf("%q is already a name of this pool", a), "remove it")
		}
	}
	names, ids, urls := map[string]int{}, map[string]int{}, map[string]int{}
	for i := range f.Workers {
		w := &f.Workers[i]
		c.worker(i, w)
		c.unique(names, i, "name", w.Name)
		c.unique(ids, i, "id", string(w.ID))
		c.unique(urls, i, "url", w.URL)
	}
}

func (c *checker) need(field, value, remedy string) {
	switch {
	case value == "":
		c.fault(field, "missing", remedy)
	case strings.TrimSpace(value) != value || strings.ContainsFunc(value, isControl):
		c.fault(field, fmt.Sprintf("%q has surrounding blanks or control characters", value), "remove them")
	}
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

func (c *checker) unique(seen map[string]int, i int, key, value string) {
	if value == "" {
		return // reported as missing
	}
	if j, dup := seen[value]; dup {
		c.fault(fmt.Sprintf("workers[%d].%s", i, key),
			fmt.Sprintf("%q is also workers[%d]'s %s", value, j, key), "give each worker its own")
		return
	}
	seen[value] = i
}

func (c *checker) worker(i int, w *Worker) {
	at := func(key string) string { return fmt.Sprintf("workers[%d].%s", i, key) }
	c.need(at("name"), w.Name, "name the worker, e.g. decode-0")
	c.need(at("id"), string(w.ID), "write a UUID that is new for each engine start")
	if what := CheckURL(w.URL); what != "" {
		c.fault(at("url"), what, "write the sidecar's address as http://host:port")
	}
	switch w.Role {
	case Decode:
		if w.Bootstrap != nil {
			c.fault(at("bootstrap"), "only prefill workers have one", "remove it")
		}
	case Prefill:
		c.bootstrap(at("bootstrap"), w.Bootstrap)
	default:
		c.fault(at("role"), fmt.Sprintf("%q is not a role", w.Role), "write prefill or decode")
	}
	switch w.State {
	case "", Active, Draining:
	default:
		c.fault(at("state"), fmt.Sprintf("%q is not a state", w.State), "write Active or Draining")
	}
}

func (c *checker) bootstrap(field string, b *Bootstrap) {
	if b == nil {
		c.fault(field, "missing on a prefill worker", "write {host: HOST, port: 8998}, where decode workers reach it")
		return
	}
	switch {
	case b.Host == "":
		c.fault(field+".host", "missing", "write the host decode workers reach")
	case strings.ContainsAny(b.Host, "[]/,@ \t\r\n"):
		c.fault(field+".host", fmt.Sprintf("%q is not a bare host", b.Host), "write a name or address, IPv6 without brackets")
	}
	if b.Port < 1 || b.Port > 65535 {
		c.fault(field+".port", fmt.Sprintf("%d is not a port", b.Port), "write a number from 1 to 65535")
	}
}

// CheckURL says what is wrong with a worker's URL; "" means nothing. Only
// scheme, host and port are allowed, so that joining a path to it is safe.
func CheckURL(s string) string {
	if s == "" {
		return "missing"
	}
	u, err := url.Parse(s)
	switch {
	case err != nil || !strings.Contains(s, "://"):
		return fmt.Sprintf("%q has no http:// or https:// scheme", s)
	case u.Scheme != "http" && u.Scheme != "https":
		return fmt.Sprintf("scheme %q is neither http nor https", u.Scheme)
	case u.Hostname() == "":
		return fmt.Sprintf("%q names no host", s)
	case !validPort(u.Port()):
		return fmt.Sprintf("%q names no port from 1 to 65535", s)
	case u.Scheme+"://"+u.Host != s:
		return fmt.Sprintf("%q has more than scheme, host and port", s)
	}
	return ""
}

func validPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 1 && n <= 65535
}
