package fleet

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// encode spells a fleet file as wire.md §7 shows it, one worker a line. It is
// written by hand because the library leaves texts such as "? x" unquoted, which
// it cannot read back.
func encode(f *File) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "version: %d\n", f.Version)
	pool := mapping{}
	pool.text("namespace", f.Pool.Namespace)
	pool.text("name", f.Pool.Name)
	pool.text("model", f.Pool.Model)
	if len(f.Pool.Aliases) > 0 {
		var all []string
		for _, a := range f.Pool.Aliases {
			all = append(all, scalar(a))
		}
		pool.raw("aliases", "["+strings.Join(all, ", ")+"]")
	}
	fmt.Fprintf(&b, "pool: %s\n", pool)
	if len(f.Workers) == 0 {
		b.WriteString("workers: []\n")
		return []byte(b.String())
	}
	b.WriteString("workers:\n")
	for i := range f.Workers {
		fmt.Fprintf(&b, "- %s\n", f.Workers[i].encode())
	}
	return []byte(b.String())
}

func (w *Worker) encode() mapping {
	m := mapping{}
	m.text("name", w.Name)
	m.text("id", string(w.ID))
	m.text("role", string(w.Role))
	m.text("url", w.URL)
	if w.Bootstrap != nil {
		at := mapping{}
		at.text("host", w.Bootstrap.Host)
		at.raw("port", strconv.Itoa(w.Bootstrap.Port))
		m.raw("bootstrap", at.String())
	}
	if w.Revision != "" {
		m.text("revision", w.Revision)
	}
	if w.State != "" {
		m.text("state", string(w.State))
	}
	if len(w.Topology) > 0 {
		levels := mapping{}
		for _, k := range slices.Sorted(maps.Keys(w.Topology)) {
			levels.raw(scalar(k), scalar(w.Topology[k]))
		}
		m.raw("topology", levels.String())
	}
	return m
}

// mapping is a YAML flow mapping in the order of its making.
type mapping []string

func (m *mapping) text(key, value string) { m.raw(key, scalar(value)) }
func (m *mapping) raw(key, value string)  { *m = append(*m, key+": "+value) }
func (m mapping) String() string          { return "{" + strings.Join(m, ", ") + "}" }

// scalar writes a text plainly when no YAML reader could take it for anything
// else, and quoted otherwise.
func scalar(s string) string {
	letters := strings.TrimLeft(strings.ToLower(s), "abcdefghijklmnopqrstuvwxyz")
	if len(letters) == len(s) || strings.Trim(letters, "abcdefghijklmnopqrstuvwxyz0123456789-_./") != "" {
		return strconv.Quote(s)
	}
	switch strings.ToLower(s) {
	case "y", "n", "yes", "no", "on", "off", "true", "false", "null":
		return strconv.Quote(s)
	}
	return s
}
