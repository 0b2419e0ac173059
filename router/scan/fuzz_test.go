package scan_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvc-dev/kvc/router/scan"
)

var seeds = []string{
	`{}`, `[]`, `{"a":1}`, ` { "a" : [ 1 , { "b" : "c" } ] } `, `{"a":1,"a":2}`, `{"\u0061":1,"b":2}`,
	`{"model":"m","messages":[{"role":"user","content":"\ud83c\udf0d \"x\" \\"}],"stream":true,"seed":9007199254740993}`,
	`{"a":01}`, `{"a":1.5e-3}`, `{"a":tru}`, "{\"a\":\"\x00\"}", "{\"a\":\"\xff\"}", `{"a":"\ud800"}`,
	`{"a":` + strings.Repeat("[", 20), `{"rid":1,"bootstrap_room":2,"rid":3}`, `{"a":{"rid":1}}`,
}

// FuzzScan: Parse agrees with encoding/json on what is valid and on what the
// members are.
func FuzzScan(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		b, err := scan.Parse(in, scan.Limits{MaxDepth: 1 << 20, MaxMembers: 1 << 20})
		trimmed := bytes.TrimLeft(in, " \t\r\n")
		valid := json.Valid(in) && trimmed[0] == '{'
		if (err == nil) != valid {
			t.Fatalf("Parse(%q) = %v, encoding/json says valid=%v", in, err, valid)
		}
		if !valid {
			return
		}
		var want map[string]json.RawMessage
		if err := json.Unmarshal(in, &want); err != nil || !utf8.Valid(in) {
			return
		}
		got := map[string]json.RawMessage{}
		b.Keys(func(key string, v scan.Value) bool { got[key] = v.Raw; return true })
		if len(got) != len(want) {
			t.Fatalf("%d members, want %d", len(got), len(want))
		}
		for key, raw := range want {
			v, ok := b.Get(key)
			if !ok || !bytes.Equal(v.Raw, raw) || !bytes.Equal(got[key], raw) {
				t.Fatalf("member %q = %q, %v, want %q", key, v.Raw, ok, raw)
			}
			checkValue(t, raw)
		}
	})
}

// checkValue walks a value and compares it with what encoding/json decodes.
func checkValue(t *testing.T, raw []byte) {
	var want any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&want); err != nil {
		t.Fatal(err)
	}
	if got := decode(raw); !reflect.DeepEqual(got, want) {
		t.Fatalf("walk of %q = %#v, want %#v", raw, got, want)
	}
}

// decode rebuilds a value through Iterate and AppendUnescaped.
func decode(raw []byte) any {
	switch raw[0] {
	case '"':
		return string(scan.AppendUnescaped(nil, raw))
	case '[':
		out := []any{}
		for it := scan.Iterate(raw); it.Next(); {
			out = append(out, decode(it.Value()))
		}
		return out
	case '{':
		out := map[string]any{}
		for it := scan.Iterate(raw); it.Next(); {
			key := string(scan.AppendUnescaped(nil, []byte(`"`+string(it.Key())+`"`)))
			out[key] = decode(it.Value())
		}
		return out
	case 't', 'f':
		return raw[0] == 't'
	case 'n':
		return nil
	}
	return json.Number(raw)
}

// FuzzSplice: the edited body means what a map edit would mean, and every
// member that was not edited keeps its raw bytes and its place.
func FuzzSplice(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), "rid", "bootstrap_room", `"kvc-1"`)
		f.Add([]byte(s), "a", "b", `{"x":[1]}`)
	}
	f.Fuzz(func(t *testing.T, in []byte, set, del, value string) {
		b, err := scan.Parse(in, scan.Limits{})
		if err != nil || !json.Valid([]byte(value)) || !utf8.ValidString(set) {
			return
		}
		value = strings.TrimSpace(value)
		out := b.Apply(nil, scan.Splice{Del: []string{del}, Set: []scan.Member{{Key: set, Value: []byte(value)}}})
		edited, err := scan.Parse(out, scan.Limits{})
		if err != nil {
			t.Fatalf("Apply of %q = %q: %v", in, out, err)
		}
		type pair struct{ key, raw string }
		var want, got []pair
		copies := 0
		b.Keys(func(key string, v scan.Value) bool {
			if key != set && key != del {
				want = append(want, pair{key, string(v.Raw)})
			}
			return true
		})
		edited.Keys(func(key string, v scan.Value) bool {
			switch key {
			case set:
				copies++
			default:
				got = append(got, pair{key, string(v.Raw)})
			}
			return true
		})
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("other members of %q = %v, want %v", out, got, want)
		}
		if v, _ := edited.Get(set); copies != 1 || string(v.Raw) != value {
			t.Fatalf("%q holds %d copies of %q, value %q, want one %q", out, copies, set, v.Raw, value)
		}
	})
}
