package conformance

import (
	"bufio"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// page lists the cases for people who do not read tests.
const page = "docs/conformance.md"

var (
	row      = regexp.MustCompile(`^\| (R\d+) \| (.+) \| (.+) \| (\w+) \|$`)
	listed   = regexp.MustCompile("`(?:([a-z0-9/]+)\\.)?(Test\\w+)`")
	declared = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	caseName = regexp.MustCompile(`^TestR\d+`)
	numbers  = regexp.MustCompile(`R\d+`)
)

// minimum are the cases that no release goes without.
var minimum = strings.Fields(`R01 R03 R04 R05 R08 R19 R20 R21 R25 R26 R35 R38 R47 R48 R50 R51 R52 R56 R57 R60
	R67 R80 R81 R83 R125`)

// readPage returns the tests of each case, as folder.Test.
func readPage(t *testing.T, root string) map[string][]string {
	t.Helper()
	f, err := os.Open(filepath.Join(root, page))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cases := map[string][]string{}
	for s := bufio.NewScanner(f); s.Scan(); {
		m := row.FindStringSubmatch(s.Text())
		if m == nil {
			if strings.HasPrefix(s.Text(), "| R") {
				t.Errorf("%s: not a row of four cells: %s", page, s.Text())
			}
			continue
		}
		if _, twice := cases[m[1]]; twice {
			t.Errorf("%s lists %s twice", page, m[1])
		}
		cases[m[1]] = nil
		for _, ref := range listed.FindAllStringSubmatch(m[3], -1) {
			folder := ref[1]
			if folder == "" {
				folder = "test/conformance"
			}
			cases[m[1]] = append(cases[m[1]], folder+"."+ref[2])
		}
		if len(cases[m[1]]) == 0 {
			t.Errorf("%s names no test of %s", page, m[1])
		}
	}
	return cases
}

// readTests returns every test of the repository, as folder.Test.
func readTests(t *testing.T, root string) map[string]bool {
	t.Helper()
	tests := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		folder, err := filepath.Rel(root, filepath.Dir(path))
		for _, m := range declared.FindAllStringSubmatch(string(src), -1) {
			tests[filepath.ToSlash(folder)+"."+m[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return tests
}

// unlisted returns what is wrong between the page and the tests.
func unlisted(cases map[string][]string, tests map[string]bool) []string {
	var wrong []string
	for name, refs := range cases {
		for _, ref := range refs {
			if !tests[ref] {
				wrong = append(wrong, fmt.Sprintf("%s lists %s, which does not exist", name, ref))
			}
		}
	}
	for ref := range tests {
		_, test, _ := strings.Cut(ref, ".")
		if !caseName.MatchString(test) {
			continue
		}
		for _, name := range numbers.FindAllString(test, -1) {
			if !slices.Contains(cases[name], ref) {
				wrong = append(wrong, fmt.Sprintf("%s is not listed under %s", ref, name))
			}
		}
	}
	for _, name := range minimum {
		if len(cases[name]) == 0 {
			wrong = append(wrong, name+" has no test")
		}
	}
	slices.Sort(wrong)
	return wrong
}

func TestThePageListsTheTests(t *testing.T) {
	root := filepath.Join("..", "..")
	for _, w := range unlisted(readPage(t, root), readTests(t, root)) {
		t.Errorf("%s: %s", page, w)
	}
}

func TestUnlisted(t *testing.T) {
	cases := map[string][]string{}
	tests := map[string]bool{"router/scan.TestSomethingElse": true}
	for _, name := range minimum {
		ref := "test/conformance.Test" + name + "_Sample"
		cases[name], tests[ref] = []string{ref}, true
	}
	changes := map[string]struct {
		change func(cases map[string][]string, tests map[string]bool)
		want   []string
	}{
		"nothing is wrong": {func(map[string][]string, map[string]bool) {}, nil},
		"a test that is gone is noticed": {
			func(_ map[string][]string, tests map[string]bool) { delete(tests, "test/conformance.TestR50_Sample") },
			[]string{"R50 lists test/conformance.TestR50_Sample, which does not exist"},
		},
		"a test that nobody lists is noticed, under each of its cases": {
			func(_ map[string][]string, tests map[string]bool) { tests["router/scan.TestR50_R998Both"] = true },
			[]string{
				"router/scan.TestR50_R998Both is not listed under R50",
				"router/scan.TestR50_R998Both is not listed under R998",
			},
		},
		"a case without its row is noticed": {
			func(cases map[string][]string, _ map[string]bool) { delete(cases, "R81") },
			[]string{"R81 has no test", "test/conformance.TestR81_Sample is not listed under R81"},
		},
	}
	for name, tc := range changes {
		t.Run(name, func(t *testing.T) {
			cases, tests := maps.Clone(cases), maps.Clone(tests)
			tc.change(cases, tests)
			if got := unlisted(cases, tests); !slices.Equal(got, tc.want) {
				t.Errorf("unlisted = %q, want %q", got, tc.want)
			}
		})
	}
}
