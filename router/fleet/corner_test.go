package fleet

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/kvc"
)

// top is a valid head of three lines; a worker begins at line 4.
const top = "version: 1\npool: {namespace: n, name: p, model: m}\nworkers:\n"

func decodeWorker(name string) string {
	return fmt.Sprintf("- {name: %s, id: id-%s, role: decode, url: \"http://%s:9300\"}\n", name, name, name)
}

// Each file has one fault; the message names the line, the field and the remedy.
func TestEveryFaultHasItsLineAndRemedy(t *testing.T) {
	prefill := "- {name: a, id: i, role: prefill, url: \"http://h:1\", bootstrap: {host: %s, port: %s}}\n"
	for claim, c := range map[string]struct {
		text  string
		line  int
		parts []string
	}{
		"version 0":                 {strings.Replace(top, "1", "0", 1), 1, []string{"version", "write `version: 1`"}},
		"version 2":                 {strings.Replace(top, "1", "2", 1), 1, []string{"version 2 is not supported", "write `version: 1`"}},
		"no model":                  {strings.Replace(top, ", model: m", "", 1), 2, []string{"pool.model: missing", "write the name the engines serve"}},
		"a blank around a name":     {strings.Replace(top, "name: p", `name: " p"`, 1), 2, []string{"pool.name", "remove them"}},
		"an alias twice":            {strings.Replace(top, "model: m", "model: m, aliases: [a, a]", 1), 2, []string{"pool.aliases[1]", "remove it"}},
		"an alias like the model":   {strings.Replace(top, "model: m", "model: m, aliases: [m]", 1), 2, []string{"pool.aliases[0]", "already a name"}},
		"a worker without an id":    {top + decodeWorker("a") + "- {name: b, role: decode, url: \"http://h:1\"}\n", 5, []string{"workers[1].id: missing", "UUID"}},
		"a name twice":              {top + decodeWorker("a") + strings.Replace(decodeWorker("b"), "name: b", "name: a", 1), 5, []string{"workers[1].name", "workers[0]'s name", "its own"}},
		"an id twice":               {top + decodeWorker("a") + strings.Replace(decodeWorker("b"), "id-b", "id-a", 1), 5, []string{"workers[1].id", "its own"}},
		"a url twice":               {top + decodeWorker("a") + strings.Replace(decodeWorker("b"), "//b:", "//a:", 1), 5, []string{"workers[1].url", "its own"}},
		"another role":              {top + strings.Replace(decodeWorker("a"), "decode", "unified", 1), 4, []string{"workers[0].role", "write prefill or decode"}},
		"another state":             {top + strings.Replace(decodeWorker("a"), "role:", "state: Gone, role:", 1), 4, []string{"workers[0].state", "write Active or Draining"}},
		"a state in lower case":     {top + strings.Replace(decodeWorker("a"), "role:", "state: draining, role:", 1), 4, []string{"write Active or Draining"}},
		"a url with a path":         {top + strings.Replace(decodeWorker("a"), ":9300", ":9300/v1", 1), 4, []string{"more than scheme, host and port", "http://host:port"}},
		"a url without a port":      {top + strings.Replace(decodeWorker("a"), ":9300", "", 1), 4, []string{"names no port"}},
		"a prefill worker alone":    {top + strings.Replace(decodeWorker("a"), "decode", "prefill", 1), 4, []string{"workers[0].bootstrap: missing", "port: 8998"}},
		"a bootstrap on decode":     {top + strings.Replace(decodeWorker("a"), "role:", "bootstrap: {host: h, port: 1}, role:", 1), 4, []string{"only prefill workers have one", "remove it"}},
		"bootstrap port 0":          {top + fmt.Sprintf(prefill, "h", "0"), 4, []string{"workers[0].bootstrap.port", "from 1 to 65535"}},
		"bootstrap port 65536":      {top + fmt.Sprintf(prefill, "h", "65536"), 4, []string{"from 1 to 65535"}},
		"a bracketed bootstrap":     {top + fmt.Sprintf(prefill, `"[::1]"`, "1"), 4, []string{"workers[0].bootstrap.host", "IPv6 without brackets"}},
		"a misspelt key":            {top + "- name: a\n  idd: x\n", 5, []string{"idd: unknown key", "fix its spelling"}},
		"a key twice":               {top + "- name: a\n  name: b\n", 5, []string{"name: key given twice", "keep one of the two"}},
		"text for the version":      {strings.Replace(top, "1", "one", 1), 1, []string{"version", `"one" is not a whole number`}},
		"a mapping for the workers": {strings.TrimSuffix(top, "\n") + " {a: 1}\n", 3, []string{"workers"}},
		"a second document":         {top + decodeWorker("a") + "---\n" + top, 5, []string{"second document", "keep one"}},
	} {
		t.Run(claim, func(t *testing.T) {
			_, err := Parse("fleet.yaml", []byte(c.text))
			if err == nil {
				t.Fatalf("accepted:\n%s", c.text)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one fault: %v", err)
			}
			if want := fmt.Sprintf("fleet.yaml:%d: ", c.line); !strings.HasPrefix(err.Error(), want) {
				t.Errorf("error %q, want it at %s", err, want)
			}
			for _, part := range c.parts {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("error %q lacks %q", err, part)
				}
			}
		})
	}
}

// The neighbours just inside each rule.
func TestNeighboursOfTheFaultsAreAccepted(t *testing.T) {
	prefill := "- {name: a, id: i, role: prefill, url: \"http://h:1\", bootstrap: {host: %s, port: %s}}\n"
	for claim, text := range map[string]string{
		"no workers yet":           top,
		"port 1":                   top + fmt.Sprintf(prefill, "h", "1"),
		"port 65535":               top + fmt.Sprintf(prefill, "h", "65535"),
		"an IPv6 bootstrap":        top + fmt.Sprintf(prefill, `"fd00::1"`, "8998"),
		"an IPv6 sidecar":          top + strings.Replace(decodeWorker("a"), "//a:", "//[::1]:", 1),
		"https":                    top + strings.Replace(decodeWorker("a"), "http:", "https:", 1),
		"two names, one host":      top + decodeWorker("a") + strings.Replace(decodeWorker("b"), "//b:9300", "//a:9301", 1),
		"aliases":                  strings.Replace(top, "model: m", "model: m, aliases: [a, b]", 1),
		"comments and blank lines": "# fleet\n\n" + top + "\n# one\n" + decodeWorker("a"),
		"JSON":                     `{"version":1,"pool":{"namespace":"n","name":"p","model":"m"},"workers":[]}`,
		"a leading ---":            "---\n" + top,
		"an end marker":            top + "...\n",
		"a comment before ---":     "# fleet\n---\n" + top,
		"Windows line ends":        strings.ReplaceAll(top+decodeWorker("a"), "\n", "\r\n"),
	} {
		t.Run(claim, func(t *testing.T) {
			if _, err := Parse("f", []byte(text)); err != nil {
				t.Error(err)
			}
		})
	}
}

// All faults come at once, one a line: an editor fixes them in one go.
func TestAllFaultsComeAtOnce(t *testing.T) {
	_, err := Parse("f", []byte(strings.Replace(top, "1", "9", 1)+
		"- {name: a, id: i, role: x, url: \"ftp://h:1\"}\n- {name: a, id: i, role: decode, url: \"http://h:1\", state: Off}\n"))
	if err == nil {
		t.Fatal("accepted")
	}
	var lines []string
	for line := range strings.Lines(err.Error()) {
		lines = append(lines, strings.Join(strings.SplitN(line, ":", 4)[:3], ":"))
	}
	want := []string{"f:1: version", "f:4: workers[0].url", "f:4: workers[0].role",
		"f:5: workers[1].state", "f:5: workers[1].name", "f:5: workers[1].id"}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Any cut of a file is either refused or a smaller fleet of whole workers: a
// reader that meets a writer without rename never sees half a worker.
func TestAPartialWriteNeverGivesHalfAWorker(t *testing.T) {
	text := top + decodeWorker("a") + decodeWorker("b") + decodeWorker("c")
	whole, err := Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for n := range len(text) {
		f, err := Parse("f", []byte(text[:n]))
		if err != nil {
			continue
		}
		for i, w := range f.Workers {
			if diff := cmp.Diff(whole.Workers[i], w); diff != "" {
				t.Fatalf("cut at %d gives another worker (-whole +cut):\n%s", n, diff)
			}
		}
	}
}

func TestWriteRoundTripsAnyFleet(t *testing.T) {
	text := rapid.StringMatching(`[a-zA-Z0-9~#!&*%@"'{}\[\],:?|>-]([a-zA-Z0-9 ~#!&*%@"'{}\[\],:?|>-]{0,10}[a-zA-Z0-9])?`)
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		f := &File{Version: 1, Pool: Pool{Namespace: text.Draw(t, "ns"), Name: text.Draw(t, "name"), Model: "m/" + text.Draw(t, "model")}}
		for i := range rapid.IntRange(0, 4).Draw(t, "workers") {
			w := Worker{Name: fmt.Sprintf("%d-%s", i, text.Draw(t, "w")), ID: kvc.WorkerID(fmt.Sprintf("%s-%d", text.Draw(t, "id"), i)),
				Role: Decode, URL: fmt.Sprintf("http://h:%d", i+1), State: rapid.SampledFrom([]State{Active, Draining}).Draw(t, "state"),
				Revision: rapid.SampledFrom([]string{"", "1", "true", "0x1f", "1e3", "null"}).Draw(t, "revision")}
			if rapid.Bool().Draw(t, "prefill") {
				w.Role, w.Bootstrap = Prefill, &Bootstrap{Host: "fd00::1", Port: rapid.IntRange(1, 65535).Draw(t, "port")}
			}
			if rapid.Bool().Draw(t, "topology") {
				w.Topology = map[string]string{"rail": rapid.SampledFrom([]string{"a", "1", "yes", "~"}).Draw(t, "rail")}
			}
			f.Workers = append(f.Workers, w)
		}
		path := filepath.Join(dir, "fleet.yaml")
		if err := Write(path, f); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		got, err := Parse(path, data)
		if err != nil {
			t.Fatal(err)
		}
		if len(f.Workers) == 0 {
			f.Workers, got.Workers = nil, nil
		}
		if diff := cmp.Diff(f, got); diff != "" {
			t.Fatalf("(-written +read):\n%s\n%s", diff, data)
		}
	})
	if left, err := filepath.Glob(filepath.Join(dir, ".fleet*")); err != nil || len(left) > 0 {
		t.Errorf("Write leaves %v, %v", left, err)
	}
}

func TestWriteLeavesTheOldFileWhenItFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, "old")
	err := Write(path, &File{Version: 7})
	if err == nil || !strings.Contains(err.Error(), "invalid fleet file") {
		t.Fatalf("Write = %v", err)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "old" {
		t.Errorf("the file holds %q, %v", data, err)
	}
	good := &File{Version: 1, Pool: Pool{Namespace: "n", Name: "p", Model: "m"}}
	if err := Write(filepath.Join(path, "below-a-file"), good); err == nil {
		t.Error("no error where there is no directory")
	}
}

// R113: a file that disappears keeps the last good fleet; when it returns with
// another content that is applied.
func TestFileSourceSurvivesDeletionAndReturn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, top+decodeWorker("a"))
	f := startFollow(t, path)
	wait(t, f.applied, "first fleet")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, f.rejected, "refusal"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("refusal %v, want the missing file", err)
	}
	write(t, path, top+decodeWorker("a")+decodeWorker("b"))
	for { // a writer without rename may be met half-way
		if got := wait(t, f.applied, "fleet after the return"); len(got.Workers) == 2 {
			return
		}
	}
}

// An invalid change is refused once, not at every look.
func TestAnInvalidChangeIsRefusedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fleet.yaml")
	write(t, path, top+decodeWorker("a"))
	f := startFollow(t, path)
	wait(t, f.applied, "first fleet")
	swap(t, path, "version: 9\n")
	wait(t, f.rejected, "refusal")
	swap(t, path, "version: 9\n") // the same content again is no change
	swap(t, path, top+decodeWorker("b"))
	if got := wait(t, f.applied, "repaired fleet"); got.Workers[0].Name != "b" {
		t.Errorf("applied %+v", got.Workers)
	}
	if n := len(f.rejected); n != 0 {
		t.Errorf("%d further refusals", n)
	}
}

// swap replaces a file by rename.
func swap(t *testing.T, path, text string) {
	t.Helper()
	write(t, path+".new", text)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// Others may write in the fleet file's directory without end (journals, logs);
// a change of the fleet is still seen.
func TestABusyDirectoryDoesNotHideAChange(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "fleet.yaml")
	write(t, path, top+decodeWorker("a"))
	f := startFollow(t, path)
	wait(t, f.applied, "first fleet")
	stop, stopped, busy := make(chan struct{}), make(chan error, 1), make(chan struct{})
	go func() {
		for i := 0; ; i++ {
			if i == 100 {
				close(busy)
			}
			select {
			case <-stop:
				stopped <- nil
				return
			default:
				if err := os.WriteFile(filepath.Join(dir, "journal"), []byte("x"), 0o600); err != nil {
					stopped <- err
					return
				}
			}
		}
	}()
	wait(t, busy, "noise")
	swap(t, path, top+decodeWorker("b"))
	if got := wait(t, f.applied, "fleet beside a busy journal"); got.Workers[0].Name != "b" {
		t.Errorf("applied %+v", got.Workers)
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}
