package fleet

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const good = `version: 1
pool: {namespace: local, name: demo, model: Qwen/Qwen3-32B, aliases: [qwen3]}
workers:
- {name: prefill-0, id: p0, role: prefill, url: "http://127.0.0.1:9300", revision: r1,
   bootstrap: {host: 127.0.0.1, port: 8998}}
- {name: decode-0, id: d0, role: decode, url: "http://[fd00::1]:9301", revision: r1, state: Draining,
   topology: {rail: a}}
`

func TestParse(t *testing.T) {
	got, err := Parse("fleet.yaml", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	want := &File{
		Version: 1,
		Pool:    Pool{Namespace: "local", Name: "demo", Model: "Qwen/Qwen3-32B", Aliases: []string{"qwen3"}},
		Workers: []Worker{
			{Name: "decode-0", ID: "d0", Role: Decode, URL: "http://[fd00::1]:9301", Revision: "r1", State: Draining,
				Topology: map[string]string{"rail": "a"}},
			{Name: "prefill-0", ID: "p0", Role: Prefill, URL: "http://127.0.0.1:9300", Revision: "r1", State: Active,
				Bootstrap: &Bootstrap{Host: "127.0.0.1", Port: 8998}},
		},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("Parse, sorted by name with states filled in (-want +got):\n%s", d)
	}
}

func TestParseEmptyFleetIsLegal(t *testing.T) {
	f, err := Parse("f", []byte("version: 1\npool: {namespace: a, name: b, model: c}\nworkers: []\n"))
	if err != nil || len(f.Workers) != 0 {
		t.Fatalf("Parse = %v, %v; want no workers, no error", f, err)
	}
}

func TestParseFaults(t *testing.T) {
	const head = "version: 1\npool: {namespace: a, name: b, model: c}\nworkers:\n"
	w := func(extra string) string {
		return head + "- {name: d0, id: i0, role: decode, url: \"http://h:1\"}\n- " + extra + "\n"
	}
	cases := map[string]struct {
		in   string
		want []string // each must appear in the error
	}{
		"an empty file says how to start": {"", []string{"f:1: the file is empty", "version: 1"}},
		"broken YAML names its line":      {"version: 1\npool: {namespace: a\n", []string{"f:2: "}},
		"an unknown key names line and key": {
			"version: 1\nmodel: x\n",
			[]string{"f:2: model: unknown key; remove it"},
		},
		"a nested unknown key too": {
			w("{name: d1, id: i1, role: decode, urll: x}"),
			[]string{"f:5: urll: unknown key"},
		},
		"a key given twice": {
			"version: 1\nversion: 1\n",
			[]string{"f:2: ", "twice", "keep one"},
		},
		"a list where a number belongs": {"version: [1]\n", []string{"f:1: version"}},
		"a word where a port belongs": {
			w("{name: p, id: i, role: prefill, url: 'http://h:2', bootstrap: {host: h, port: ssh}}"),
			[]string{"f:5:", "port", "whole number"},
		},
		"a missing version": {
			"pool: {namespace: a, name: b, model: c}\n",
			[]string{"version: version 0 is not supported; write `version: 1`"},
		},
		"another version names its line": {
			"# c\nversion: 2\npool: {namespace: a, name: b, model: c}\n",
			[]string{"f:2: version: version 2"},
		},
		"a missing model": {
			"version: 1\npool: {namespace: a, name: b}\n",
			[]string{"f:2: pool.model: missing; write the name"},
		},
		"an alias equal to the model": {
			"version: 1\npool: {namespace: a, name: b, model: c, aliases: [c]}\n",
			[]string{`pool.aliases[0]: "c" is already a name`},
		},
		"an alias given twice": {
			"version: 1\npool: {namespace: a, name: b, model: c, aliases: [x, x]}\n",
			[]string{`pool.aliases[1]: "x" is already a name`},
		},
		"a missing worker name": {
			w("{id: i1, role: decode, url: 'http://h:2'}"),
			[]string{"f:5: workers[1].name: missing"},
		},
		"a missing id": {
			w("{name: d1, role: decode, url: 'http://h:2'}"),
			[]string{"f:5: workers[1].id: missing; write a UUID"},
		},
		"a name given twice": {
			w("{name: d0, id: i1, role: decode, url: 'http://h:2'}"),
			[]string{`f:5: workers[1].name: "d0" is also workers[0]'s name`},
		},
		"an id given twice": {
			w("{name: d1, id: i0, role: decode, url: 'http://h:2'}"),
			[]string{`workers[1].id: "i0" is also workers[0]'s id`},
		},
		"a url given twice": {
			w("{name: d1, id: i1, role: decode, url: 'http://h:1'}"),
			[]string{"workers[1].url", "also workers[0]'s url"},
		},
		"an unknown role": {
			w("{name: d1, id: i1, role: Decode, url: 'http://h:2'}"),
			[]string{`workers[1].role: "Decode" is not a role; write prefill or decode`},
		},
		"an unknown state": {
			w("{name: d1, id: i1, role: decode, url: 'http://h:2', state: Gone}"),
			[]string{`workers[1].state: "Gone" is not a state; write Active or Draining`},
		},
		"a prefill worker without bootstrap": {
			w("{name: p, id: i1, role: prefill, url: 'http://h:2'}"),
			[]string{"f:5: workers[1].bootstrap: missing on a prefill worker; write {host"},
		},
		"a decode worker with bootstrap": {
			w("{name: d1, id: i1, role: decode, url: 'http://h:2', bootstrap: {host: h, port: 1}}"),
			[]string{"workers[1].bootstrap: only prefill workers have one; remove it"},
		},
		"a bracketed bootstrap host": {
			w("{name: p, id: i1, role: prefill, url: 'http://h:2', bootstrap: {host: '[::1]', port: 1}}"),
			[]string{"workers[1].bootstrap.host", "without brackets"},
		},
		"a bootstrap port out of range": {
			w("{name: p, id: i1, role: prefill, url: 'http://h:2', bootstrap: {host: h, port: 70000}}"),
			[]string{"workers[1].bootstrap.port: 70000 is not a port"},
		},
		"two faults are both reported": {
			w("{name: d0, id: i0, role: decode, url: 'http://h:2'}"),
			[]string{"workers[1].name", "workers[1].id"},
		},
		"control characters in a name": {
			w(`{name: "d\n1", id: i1, role: decode, url: 'http://h:2'}`),
			[]string{"workers[1].name", "control characters"},
		},
		"a multi-line worker names the field": {
			head + "- name: d0\n  id: i0\n  role: decode\n  url: ftp://h:1\n",
			[]string{"f:7: workers[0].url"},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			f, err := Parse("f", []byte(tc.in))
			if err == nil {
				t.Fatalf("Parse = %+v, want an error", f)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
		})
	}
}

// R107: a URL that would fail later in odd ways is refused at the door.
func TestCheckURL(t *testing.T) {
	cases := map[string]struct{ in, want string }{
		"http is fine":             {"http://10.0.0.1:80", ""},
		"https is fine":            {"https://w:443", ""},
		"IPv6 is fine":             {"http://[::1]:9300", ""},
		"no scheme":                {"10.0.0.1:80", "no http:// or https:// scheme"},
		"host without scheme":      {"localhost:80", "no http:// or https:// scheme"},
		"grpc":                     {"grpc://h:1", `scheme "grpc" is neither`},
		"trailing slash":           {"http://h:1/", "more than scheme, host and port"},
		"a path":                   {"http://h:1/v1", "more than scheme, host and port"},
		"a query":                  {"http://h:1?x=1", "more than scheme, host and port"},
		"user info":                {"http://u:p@h:1", "more than scheme, host and port"},
		"no port":                  {"http://h", "names no port"},
		"port zero":                {"http://h:0", "names no port"},
		"port out of range":        {"http://h:70000", "names no port"},
		"no host":                  {"http://:80", "names no host"},
		"empty":                    {"", "missing"},
		"unbracketed IPv6 address": {"http://fd00::1:80", "more than scheme"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := CheckURL(tc.in)
			if tc.want == "" && got != "" || tc.want != "" && got == "" {
				t.Errorf("CheckURL(%q) = %q, want %q", tc.in, got, tc.want)
			}
			if name != "unbracketed IPv6 address" && !strings.Contains(got, tc.want) {
				t.Errorf("CheckURL(%q) = %q, want it to contain %q", tc.in, got, tc.want)
			}
		})
	}
}

func TestWriteThenParse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	want, err := Parse("f", []byte(good))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // also over an existing file
		if err := Write(path, want); err != nil {
			t.Fatal(err)
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(path, data)
	if err != nil {
		t.Fatalf("Parse(Write(f)): %v\n%s", err, data)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("Parse(Write(f)) differs (-want +got):\n%s", d)
	}
	left, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(left) != 1 {
		t.Errorf("directory holds %v (%v), want the fleet file only", left, err)
	}
}

func TestWriteRefusesAnInvalidFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	err := Write(path, &File{Version: 1})
	if _, ok := errors.AsType[*FieldError](err); !ok {
		t.Fatalf("Write = %v, want a FieldError", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an invalid file was written (%v)", err)
	}
}

func FuzzFleetFile(f *testing.F) {
	f.Add([]byte(good))
	f.Add([]byte("version: 1\nworkers:\n- {name: a\n"))
	f.Add([]byte("version: 1\npool: &a {name: *a}\n"))
	f.Add([]byte("a: &x [*x]\n"))
	f.Add([]byte("- - -\n? : !!binary |\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := Parse("fuzz", data)
		if err != nil {
			if strings.TrimSpace(err.Error()) == "" {
				t.Fatal("an error without words")
			}
			return
		}
		path := filepath.Join(t.TempDir(), "f")
		if err := Write(path, file); err != nil {
			t.Fatalf("a parsed file cannot be written: %v", err)
		}
		again, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		back, err := Parse(path, again)
		if err != nil {
			t.Fatalf("a written file cannot be parsed: %v\n%s", err, again)
		}
		if d := cmp.Diff(file, back, cmpopts.EquateEmpty()); d != "" {
			t.Fatalf("round trip (-first +second):\n%s", d)
		}
	})
}

// The file reads as wire.md §7 shows it; what YAML could misread is quoted.
func TestWriteLooksLikeTheContract(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	f := &File{Version: 1, Pool: Pool{Namespace: "local", Name: "? 0", Model: "Qwen/Qwen3-32B", Aliases: []string{"qwen3", "no"}},
		Workers: []Worker{
			{Name: "decode-0", ID: "8f", Role: Decode, URL: "http://127.0.0.1:9301", Revision: "r1", State: Active,
				Topology: map[string]string{"rail": "a", "a: b": "1"}},
			{Name: "prefill-0", ID: "p", Role: Prefill, URL: "http://[::1]:9300", Bootstrap: &Bootstrap{Host: "::1", Port: 8998}},
		}}
	if err := Write(path, f); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := `version: 1
pool: {namespace: local, name: "? 0", model: Qwen/Qwen3-32B, aliases: [qwen3, "no"]}
workers:
- {name: decode-0, id: "8f", role: decode, url: "http://127.0.0.1:9301", revision: r1, state: Active, ` +
		`topology: {"a: b": "1", rail: a}}
- {name: prefill-0, id: p, role: prefill, url: "http://[::1]:9300", bootstrap: {host: "::1", port: 8998}}
`
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("file (-want +got):\n%s", d)
	}
}
