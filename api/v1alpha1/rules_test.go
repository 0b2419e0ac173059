package v1alpha1

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// withArgs validates the full pool with extra arguments.
func withArgs(args ...string) []string {
	p := fullPool()
	p.Spec.Engine.ExtraArgs = args
	Default(p)
	var out []string
	for _, e := range Validate(p) {
		out = append(out, e.Error())
	}
	return out
}

// Each flag that KVC renders is refused in both spellings, at its place, with
// what to write instead. What only begins like it is the user's.
func TestEveryOwnedFlagIsRefused(t *testing.T) {
	for flag, remedy := range ownedFlags() {
		if remedy == "" {
			t.Errorf("%s has no remedy", flag)
		}
		for _, args := range [][]string{{flag, "x"}, {flag + "=x"}, {flag}} {
			errs := withArgs(append([]string{"--log-level", "info"}, args...)...)
			if len(errs) != 1 || !strings.HasPrefix(errs[0], "spec.engine.extraArgs[2]: ") || !strings.Contains(errs[0], remedy) {
				t.Errorf("%v: %v, want one refusal that says %q", args, errs, remedy)
			}
		}
		if errs := withArgs(flag + "-of-my-own"); len(errs) != 0 {
			t.Errorf("%s-of-my-own: %v", flag, errs)
		}
	}
}

// argparse takes an unambiguous beginning for the flag itself, so no beginning
// of an owned flag gets through.
func TestNoBeginningOfAnOwnedFlagGetsThrough(t *testing.T) {
	for flag := range ownedFlags() {
		for n := len("--x"); n < len(flag); n++ {
			if errs := withArgs(flag[:n] + "=1"); len(errs) == 0 && !slices.Contains(rankFlags(), flag[:n]) {
				t.Errorf("%s, the beginning of %s, is accepted", flag[:n], flag)
			}
		}
	}
}

func TestEveryRemovedAndRankFlagIsRefused(t *testing.T) {
	for _, flag := range removedFlags() {
		for _, args := range [][]string{{flag, "1"}, {flag + "=1"}} {
			if errs := withArgs(args...); len(errs) != 1 || !strings.Contains(errs[0], "removed this flag") {
				t.Errorf("%v: %v", args, errs)
			}
		}
	}
	for _, flag := range rankFlags() {
		for args, ok := range map[string]bool{flag + " 1": true, flag + "=1": true, flag + " 2": false, flag + "=2": false,
			flag + "=": false, flag + "=01": false, flag: false, flag + " --log-level": false} {
			if errs := withArgs(strings.Split(args, " ")...); (len(errs) == 0) != ok {
				t.Errorf("%q: %v, want accepted = %v", args, errs, ok)
			}
		}
	}
}

// The bounds of routing.json, at their edges and just outside.
func TestRoutingFileBounds(t *testing.T) {
	for field, b := range map[string][2]int64{
		"routing.stickyBonus": {0, 1_000_000}, "routing.rejectThreshold": {1, 1000}, "routing.maxAppendTokens": {1, 1<<31 - 1},
		"routing.highWaterPercent": {1, 100}, "routing.maxProbes": {1, 256}, "routing.protectIdleSeconds": {0, 86400},
		"session.ttlSeconds": {1, 604800}, "slo_classes[0].ttftMilliseconds": {1, 1<<31 - 1},
		"slo_classes[0].itlMilliseconds": {1, 1<<31 - 1}, "slo_classes[0].priority": {0, 1000},
		"slo_classes[0].maxResidentPercent": {1, 100},
	} {
		part, member, _ := strings.Cut(field, ".")
		file := func(n int64) []byte {
			if part == "slo_classes[0]" {
				return fmt.Appendf(nil, "{\"slo_classes\": [{\"name\": \"a\",\n%q: %d}]}", member, n)
			}
			return fmt.Appendf(nil, "{%q: {\n%q: %d}}", part, member, n)
		}
		for n, ok := range map[int64]bool{b[0]: true, b[1]: true, b[0] - 1: false, b[1] + 1: false} {
			_, err := ParseRoutingFile(file(n))
			if (err == nil) != ok {
				t.Errorf("%s = %d: %v, want accepted = %v", field, n, err, ok)
			}
			if err != nil && !strings.HasPrefix(err.Error(), "routing.json:2: "+field+": ") {
				t.Errorf("%s = %d: the error does not say where: %v", field, n, err)
			}
		}
	}
}

// A router that reloads routing.json keeps the last good one: nothing that is
// not whole may parse. Every cut of a file is refused.
func TestNoCutOfARoutingFileParses(t *testing.T) {
	p := fullPool()
	Default(p)
	data, err := NewRoutingFile(p).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	whole := strings.TrimSpace(string(data))
	for n := range len(whole) {
		if f, err := ParseRoutingFile([]byte(whole[:n])); err == nil {
			t.Fatalf("the cut at %d of %d parses: %+v", n, len(whole), f)
		}
	}
	if _, err := ParseRoutingFile([]byte(whole)); err != nil {
		t.Error(err)
	}
}

// Unknown members are refused at every depth with the line, and the right
// spelling is offered.
func TestMisspeltMembersOfARoutingFile(t *testing.T) {
	for text, want := range map[string]string{
		"{\"routin\": {}}":                                              `routing.json:1: routin: unknown field; did you mean "routing"?`,
		"{\"routing\":\n{\"preSet\": \"Paper\"}}":                       `routing.json:2: routing.preSet: unknown field; did you mean "preset"?`,
		"{\"routing\":\n{\"admission\":\n{\"timeoutMillisecond\": 1}}}": `routing.json:3: routing.admission.timeoutMillisecond: unknown field; did you mean "timeoutMilliseconds"?`,
		"{\"session\":\n{\"header\": []}}":                              `routing.json:2: session.header: unknown field; did you mean "headers"?`,
		"{\"slo_classes\":\n[{\"name\": \"a\",\n\"prority\": 1}]}":      `routing.json:3: slo_classes[0].prority: unknown field; did you mean "priority"?`,
		"{\"routing\": {},\n\"routing\": {}}":                           "routing.json:2: routing: given twice, first in line 1; remove one",
		"{\"routing\": []}":                                             "routing.json:1: routing: expected a mapping of names to values, found a list",
	} {
		if _, err := ParseRoutingFile([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("%s\n got %v\nwant %s", text, err, want)
		}
	}
}

// Every refusal that Validate can give for a wrong number or word is one line
// and names its field; several come together, each once.
func TestRefusalsComeTogetherOnceEach(t *testing.T) {
	p := fullPool()
	Default(p)
	var want []string
	for i, change := range []struct {
		field string
		do    func()
	}{
		{"metadata.name", func() { p.Name = "UPPER" }},
		{"spec.model.name", func() { p.Spec.Model.Name = "" }},
		{"spec.engine.pageSize", func() { *p.Spec.Engine.PageSize = 0 }},
		{"spec.engine.kvCacheDtype", func() { p.Spec.Engine.KVCacheDtype = "int2" }},
		{"spec.routing.maxProbes", func() { p.Spec.Routing.MaxProbes = new(int32(0)) }},
		{"spec.prefill.drain.maxConcurrent", func() { *p.Spec.Prefill.Drain.MaxConcurrent = 0 }},
		{"spec.decode.tensorParallelSize", func() { *p.Spec.Decode.TensorParallelSize = 0 }},
		{"spec.router.service.port", func() { *p.Spec.Router.Service.Port = 0 }},
		{"spec.sloClasses[0].priority", func() { p.Spec.SLOClasses[0].Priority = new(int32(1001)) }},
	} {
		change.do()
		want = append(want, change.field)
		var got []string
		for _, e := range Validate(p) {
			got = append(got, e.Field)
			if strings.Contains(e.Error(), "\n") {
				t.Errorf("more than one line: %q", e.Error())
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff(slices.Sorted(slices.Values(want)), got); diff != "" {
			t.Fatalf("after %d faults (-want +got):\n%s", i+1, diff)
		}
	}
}

// ParsePool puts each refusal at the line of its field, of the nearest parent
// where the field was left out.
func TestValidationErrorsStandAtTheirLines(t *testing.T) {
	const manifest = head + "  engine:\n    pageSize: 0\n    extraArgs:\n    - --log-level\n    - info\n    - --tp=2\n" +
		"  decode:\n    replicas: 0\n    drain: {softTimeoutSeconds: 9,\n      hardTimeoutSeconds: 5}\n" +
		"  sloClasses:\n  - name: a\n  - name: a\n  routing: {admission: {hedgeAfterMilliseconds: 60000}}\n"
	_, err := ParsePool("pool.yaml", []byte(manifest))
	if err == nil {
		t.Fatal("accepted")
	}
	place := regexp.MustCompile(`^pool\.yaml:(\d+): ([^:]+): .+$`)
	var got []string
	for line := range strings.Lines(err.Error()) {
		m := place.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			t.Fatalf("no place in %q", line)
		}
		got = append(got, m[1]+" "+m[2])
	}
	want := []string{"7 spec.engine.pageSize", "11 spec.engine.extraArgs[2]", "13 spec.decode.replicas",
		"14 spec.decode.drain.softTimeoutSeconds", "18 spec.sloClasses[1].name", "19 spec.routing.admission.hedgeAfterMilliseconds"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s\n%v", diff, err)
	}
}

// A valid pool written as JSON and read again is the same pool: kvc and kubectl
// see one thing.
func TestAPoolReadsBackAsWritten(t *testing.T) {
	p := fullPool()
	p.APIVersion, p.Kind = GroupVersion.String(), KindPool
	Default(p)
	data, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParsePool("pool.json", data)
	if err != nil {
		t.Fatal(err)
	}
	again, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(data), string(again)); diff != "" {
		t.Errorf("(-written +read):\n%s", diff)
	}
}

// No bytes make the reader of manifests panic, and what it refuses it refuses in
// lines that name the file.
func TestParsePoolNeverPanics(t *testing.T) {
	piece := rapid.SampledFrom([]string{head, "  decode: ", "{", "}", "[", "]", "- ", "\n", "  ", "a: 1", "replicas: 3\n", "&a", "*a",
		"<<: *a\n", "!!binary x", "? ", "|", ">", "'", `"`, "\t", "---\n", "null", "~", "1e999", ".nan", "0x1f", "\x00", "é"})
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(piece, 0, 12).Draw(t, "pieces"), "")
		_, err := ParsePool("pool.yaml", []byte(text))
		if err == nil {
			return
		}
		for line := range strings.Lines(err.Error()) {
			if !strings.HasPrefix(line, "pool.yaml") {
				t.Fatalf("%q for %q does not name the file", line, text)
			}
		}
	})
}
