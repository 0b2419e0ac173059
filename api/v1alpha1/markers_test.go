package v1alpha1

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The markers are what the API server enforces, Default and Validate are what
// kvc up enforces. These tests read the markers from the source and hold one
// against the other, field by field.

// markers maps "Type.Field", and "Type" for markers on a type, to marker lines
// without "+kubebuilder:".
func markers(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	add := func(key string, doc *ast.CommentGroup) {
		if doc == nil {
			return
		}
		for _, c := range doc.List {
			if m, ok := strings.CutPrefix(strings.TrimSpace(strings.TrimPrefix(c.Text, "//")), "+kubebuilder:"); ok {
				out[key] = append(out[key], m)
			}
		}
	}
	inspect(t, func(n ast.Node) bool {
		decl, ok := n.(*ast.GenDecl)
		if !ok {
			return true
		}
		for _, spec := range decl.Specs {
			typ, ok := spec.(*ast.TypeSpec)
			if !ok {
				continue
			}
			add(typ.Name.Name, decl.Doc)
			if s, ok := typ.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, name := range f.Names {
						add(typ.Name.Name+"."+name.Name, f.Doc)
					}
				}
			}
		}
		return true
	})
	return out
}

// inspect visits the syntax of the package's own files.
func inspect(t *testing.T, visit func(ast.Node) bool) {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, visit)
	}
}

func marker(list []string, name string) (value string, ok bool) {
	for _, m := range list {
		if v, found := strings.CutPrefix(m, name+"="); found {
			return v, true
		}
	}
	return "", false
}

// fullPool has every optional part, so that a walk meets every field.
func fullPool() *KVCPool {
	return &KVCPool{
		ObjectMeta: metav1.ObjectMeta{Name: "full"},
		Spec: KVCPoolSpec{
			Model:  ModelSpec{Name: "m", Cache: &ModelCacheSpec{HostPath: "/cache"}},
			Engine: EngineSpec{KVTier: &KVTierSpec{Host: resource.MustParse("64Gi")}},
			Topology: TopologySpec{
				Levels:  []TopologyLevel{{Name: "rail", NodeLabelKey: "kvc.dev/rail"}},
				Pairing: &PairingSpec{Domain: "rail"},
			},
			Prefill:     RoleSpec{Pack: &PackSpec{Required: "rail"}},
			Decode:      RoleSpec{Pack: &PackSpec{Preferred: "rail"}, Scaling: ScalingSpec{Mode: ScalingAuto}},
			Router:      RouterSpec{Auth: &RouterAuth{SecretName: "keys"}},
			Autoscaling: &AutoscalingSpec{Prefill: &ReplicaBounds{Min: 1, Max: 2}, Decode: &ReplicaBounds{Min: 1, Max: 2}},
			SLOClasses:  []SLOClass{{Name: "interactive"}},
		},
	}
}

// visitFields calls f for every field of the API's own structs below v.
func visitFields(v reflect.Value, path string, f func(path, key string, v reflect.Value)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			visitFields(v.Elem(), path, f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			visitFields(v.Index(i), path+"["+strconv.Itoa(i)+"]", f)
		}
	case reflect.Struct:
		t := v.Type()
		if t.PkgPath() != reflect.TypeFor[KVCPool]().PkgPath() {
			return
		}
		for i := range t.NumField() {
			name, _, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
			at := join(path, name)
			f(at, t.Name()+"."+t.Field(i).Name, v.Field(i))
			visitFields(v.Field(i), at, f)
		}
	}
}

func TestDefaultsAreThoseOfTheMarkers(t *testing.T) {
	all := markers(t)
	p := fullPool()
	Default(p)
	seen := 0
	visitFields(reflect.ValueOf(&p.Spec), "spec", func(path, key string, v reflect.Value) {
		want, ok := marker(all[key], "default")
		if !ok || strings.HasSuffix(path, "decode.scaling.mode") { // set to Auto by fullPool
			return
		}
		seen++
		data, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Trim(string(data), `"`); got != strings.Trim(want, `"`) {
			t.Errorf("%s defaults to %s, its marker says %s", path, got, want)
		}
	})
	if seen < 50 {
		t.Errorf("only %d defaults met: the walk misses fields", seen)
	}
}

func TestBoundsAreThoseOfTheMarkers(t *testing.T) {
	all := markers(t)
	met := 0
	base := fullPool()
	Default(base)
	visitFields(reflect.ValueOf(&base.Spec), "spec", func(path, key string, v reflect.Value) {
		lo, hasLo := marker(all[key], "validation:Minimum")
		hi, hasHi := marker(all[key], "validation:Maximum")
		if !hasLo && !hasHi || path == "spec.routing.blockBytes" { // its bound is one value, with its own message
			return
		}
		met++
		var least, most int
		check := func(n int, bad bool) {
			p := base.DeepCopy()
			setByPath(t, p, path, int32(n))
			got := false
			for _, e := range Validate(p) {
				got = got || e.Field == path && strings.HasPrefix(e.Detail, "must be ")
			}
			if got != bad {
				t.Errorf("%s = %d: refused for its bounds = %v, want %v", path, n, got, bad)
			}
		}
		if hasLo {
			least, _ = strconv.Atoi(lo)
			check(least, false)
			check(least-1, true)
		}
		if hasHi {
			most, _ = strconv.Atoi(hi)
			check(most, false)
			check(most+1, true)
		}
	})
	if met < 45 {
		t.Errorf("only %d bounds met: the walk misses fields", met)
	}
}

func TestEnumsAreThoseOfTheMarkers(t *testing.T) {
	all := markers(t)
	base := fullPool()
	Default(base)
	met := 0
	visitFields(reflect.ValueOf(&base.Spec), "spec", func(path, key string, v reflect.Value) {
		enum, ok := marker(all[v.Type().Name()], "validation:Enum")
		if !ok {
			enum, ok = marker(all[key], "validation:Enum")
		}
		if !ok || v.Kind() != reflect.String {
			return
		}
		met++
		p := base.DeepCopy()
		setByPath(t, p, path, "Bogus")
		for _, e := range Validate(p) {
			if e.Field != path || !strings.Contains(e.ErrorBody(), "supported values:") {
				continue
			}
			for value := range strings.SplitSeq(enum, ";") {
				if !strings.Contains(e.ErrorBody(), strconv.Quote(value)) {
					t.Errorf("%s: %q is in the enum and not in %q", path, value, e.ErrorBody())
				}
			}
			if got, want := strings.Count(e.ErrorBody(), `"`)/2-1, len(strings.Split(enum, ";")); got != want {
				t.Errorf("%s: %d supported values, the enum has %d", path, got, want)
			}
			return
		}
		t.Errorf("%s: Bogus is not refused", path)
	})
	if met < 20 {
		t.Errorf("only %d enums met: the walk misses fields", met)
	}
}

// rules joins the CEL rules of a type.
func rules(t *testing.T, typ string) string {
	t.Helper()
	var out []string
	for _, m := range markers(t)[typ] {
		if r, ok := strings.CutPrefix(m, "validation:XValidation:rule="); ok {
			out = append(out, r)
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s has no rule: the test tests nothing", typ)
	}
	return strings.Join(out, "\n")
}

// What a rule spells out is spelt as in Go; a rule cannot refer to a constant.
func TestRulesNameWhatTheCodeNames(t *testing.T) {
	engine := rules(t, "EngineSpec")
	for flag := range ownedFlags() {
		if !strings.Contains(engine, "'"+flag+"'") {
			t.Errorf("the rules of EngineSpec.extraArgs let %s through, which is owned", flag)
		}
	}
	for _, flag := range removedFlags() {
		if !strings.Contains(engine, "'"+flag+"'") {
			t.Errorf("the rules of EngineSpec.extraArgs let %s through, which is removed", flag)
		}
	}
	for _, flag := range rankFlags() {
		if name := strings.TrimPrefix(flag, "--"); !strings.Contains(engine, "("+name+"|") &&
			!strings.Contains(engine, "|"+name+"|") && !strings.Contains(engine, "|"+name+")") {
			t.Errorf("the rules of EngineSpec.extraArgs let %s through, which is a rank", flag)
		}
	}
	if !strings.Contains(engine, "'"+DefaultSGLangImage+"'") {
		t.Errorf("the rule of EngineSpec.directPath does not know the stock image %s", DefaultSGLangImage)
	}
	for _, typ := range []string{"RoleSpec", "RouterSpec"} {
		if got := rules(t, typ); !strings.Contains(got, "'"+ContainerEngine+"', '"+ContainerSidecar+"'") ||
			!strings.Contains(got, "'"+Group+"/'") {
			t.Errorf("the rules of %s.template do not know our containers and labels", typ)
		}
	}
	if got := rules(t, "KVCPool"); !strings.Contains(got, "<= "+strconv.Itoa(maxPoolName)) {
		t.Error("the rule of KVCPool.metadata.name has another bound than Validate")
	}
}

// A refusal is of use when it says what to do: a rule's message has a colon or a
// semicolon between what is wrong and the remedy.
func TestEveryRuleNamesARemedy(t *testing.T) {
	met := 0
	for typ, list := range markers(t) {
		for _, m := range list {
			if !strings.HasPrefix(m, "validation:XValidation:") {
				continue
			}
			met++
			_, message, _ := strings.Cut(m, `,message="`)
			message, _, _ = strings.Cut(message, `"`)
			what, remedy, ok := strings.Cut(message, ": ")
			if !ok {
				what, remedy, ok = strings.Cut(message, ", such as ")
			}
			if !ok || what == "" || remedy == "" {
				t.Errorf("%s: %q names no remedy", typ, message)
			}
		}
	}
	if met < 50 {
		t.Errorf("only %d rules met", met)
	}
}

// setByPath stores a value at a field path.
func setByPath(t *testing.T, p *KVCPool, path string, value any) {
	t.Helper()
	found := false
	visitFields(reflect.ValueOf(&p.Spec), "spec", func(at, _ string, v reflect.Value) {
		if at != path {
			return
		}
		found = true
		if v.Kind() == reflect.Pointer {
			v.Set(reflect.New(v.Type().Elem()))
			v = v.Elem()
		}
		v.Set(reflect.ValueOf(value).Convert(v.Type()))
	})
	if !found {
		t.Fatalf("no field %s", path)
	}
}

func TestEveryFieldIsDocumentedByItsJSONName(t *testing.T) {
	inspect(t, func(n ast.Node) bool {
		f, ok := n.(*ast.Field)
		if !ok || f.Tag == nil || len(f.Names) == 0 {
			return true
		}
		tag := reflect.StructTag(strings.Trim(f.Tag.Value, "`"))
		name, _, _ := strings.Cut(tag.Get("json"), ",")
		if name == "" || name == "items" {
			return true
		}
		if first, _, _ := strings.Cut(f.Doc.Text(), " "); first != name {
			t.Errorf("the comment of %s starts with %q, want its JSON name %q", f.Names[0], first, name)
		}
		return true
	})
}

func TestDeepCopyIsDeep(t *testing.T) {
	p := fullPool()
	p.Spec.Prefill.Template = &corev1.PodTemplateSpec{}
	Default(p)
	c := p.DeepCopyObject().(*KVCPool)
	*c.Spec.Decode.Replicas = 77
	c.Spec.SLOClasses[0].Name = "other"
	if *p.Spec.Decode.Replicas == 77 || p.Spec.SLOClasses[0].Name == "other" {
		t.Error("a change of the copy reaches the original")
	}
}
