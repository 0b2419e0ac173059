package scan_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/scan"
)

func parse(t testing.TB, s string) *scan.Body {
	t.Helper()
	b, err := scan.Parse([]byte(s), scan.Limits{})
	if err != nil {
		t.Fatalf("Parse(%.80q): %v", s, err)
	}
	return b
}

func TestParseAccepts(t *testing.T) {
	cases := map[string]string{
		"an empty object":                    `{}`,
		"white space everywhere":             " \r\n\t{ \"a\" : [ 1 , 2 ] , \"b\" : { } } \n",
		"every kind of value":                `{"a":"x","b":-0.5e+10,"c":true,"d":false,"e":null,"f":[],"g":{}}`,
		"every escape":                       `{"a":"\"\\\/\b\f\n\r\t\u00e9\ud83c\udf0d"}`,
		"a lone surrogate escape":            `{"a":"\ud800"}`,
		"an escaped NUL":                     `{"a":"\u0000"}`,
		"invalid UTF-8 is the engine's case": "{\"a\":\"\xff\xfe\"}",
		"DEL is not a control character":     "{\"a\":\"\x7f\"}",
		"an empty key":                       `{"":1}`,
		"nesting at the limit":               `{"a":` + strings.Repeat("[", 511) + strings.Repeat("]", 511) + `}`,
	}
	for name, in := range cases {
		t.Run(name, func(t *testing.T) {
			b := parse(t, in)
			if !bytes.Equal(b.Bytes(), []byte(in)) {
				t.Error("Bytes is not the parsed body")
			}
		})
	}
}

// R23: broken bodies are refused at once, with the place and a reason.
func TestR23ParseRefuses(t *testing.T) {
	cases := map[string]struct {
		in     string
		offset int
		msg    string
	}{
		"nothing":                      {"", 0, "the body is empty"},
		"only white space":             {" \n", 2, "the body is empty"},
		"an array":                     {`[]`, 0, "must be one JSON object"},
		"a string":                     {`"x"`, 0, "must be one JSON object"},
		"a byte order mark":            {"\xef\xbb\xbf{}", 0, "must be one JSON object"},
		"a cut object":                 {`{`, 1, "the body ends"},
		"a cut key":                    {`{"a`, 3, "not closed"},
		"a cut value":                  {`{"a":`, 5, "the body ends"},
		"a cut string":                 {`{"a":"b`, 7, "not closed"},
		"a cut string after backslash": {`{"a":"b\`, 7, "broken escape"},
		"a cut nested object":          {`{"a":{"b":1}`, 12, "the body ends"},
		"no colon":                     {`{"a" 1}`, 5, "a colon"},
		"no comma":                     {`{"a":1 "b":2}`, 7, "a comma or a closing brace"},
		"a comma too many":             {`{"a":1,}`, 7, "a member name"},
		"a comma too many in an array": {`{"a":[1,]}`, 8, "a value"},
		"a bare key":                   {`{a:1}`, 1, "a member name"},
		"a single-quoted key":          {`{'a':1}`, 1, "a member name"},
		"a mismatched bracket":         {`{"a":[1}}`, 7, "a comma or a closing bracket"},
		"trailing garbage":             {`{"a":1}x`, 7, "unexpected data"},
		"a second object":              {`{"a":1}{"b":2}`, 7, "unexpected data"},
		"a raw newline in a string":    {"{\"a\":\"x\ny\"}", 7, "control character"},
		"a NUL in a string":            {"{\"a\":\"x\x00y\"}", 7, "control character"},
		"a NUL for a value":            {"{\"a\":\x00}", 5, "NUL byte"},
		"a NUL after the object":       {"{}\x00", 2, "unexpected data"},
		"an unknown escape":            {`{"a":"\x41"}`, 6, "broken escape"},
		"a short unicode escape":       {`{"a":"\u12"}`, 6, "broken escape"},
		"a bad hex digit":              {`{"a":"\u12g4"}`, 6, "broken escape"},
		"a misspelt literal":           {`{"a":tru}`, 5, "true, false or null"},
		"a capital literal":            {`{"a":True}`, 5, "a value"},
		"NaN":                          {`{"a":NaN}`, 5, "a value"},
		"a leading zero":               {`{"a":01}`, 6, "a comma"},
		"a plus sign":                  {`{"a":+1}`, 5, "a value"},
		"a lone minus":                 {`{"a":-}`, 6, "a digit"},
		"a bare point":                 {`{"a":.5}`, 5, "a value"},
		"no digit after the point":     {`{"a":1.}`, 7, "a digit"},
		"no digit in the exponent":     {`{"a":1e+}`, 8, "a digit"},
		"hex":                          {`{"a":0x1}`, 6, "a comma"},
		"nesting over the limit":       {`{"a":` + strings.Repeat("[", 512), 516, "deeper than 512"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			b, err := scan.Parse([]byte(tc.in), scan.Limits{})
			var syntax *scan.SyntaxError
			if !errors.As(err, &syntax) {
				t.Fatalf("Parse = %v, %v, want a SyntaxError", b, err)
			}
			if syntax.Offset != tc.offset || !strings.Contains(syntax.Msg, tc.msg) {
				t.Errorf("Parse = %v, want %q at byte %d", err, tc.msg, tc.offset)
			}
			if json.Valid([]byte(tc.in)) && strings.HasPrefix(strings.TrimSpace(tc.in), "{") {
				t.Error("encoding/json accepts this")
			}
		})
	}
}

func TestR23DeepNestingIsRefusedFast(t *testing.T) {
	for _, open := range []string{"[", `{"a":`} {
		in := []byte(`{"messages":` + strings.Repeat(open, 10_000_000/len(open)))
		took := time.Hour // the best of several: the machine may be busy
		for range 10 {
			start := time.Now()
			_, err := scan.Parse(in, scan.Limits{})
			took = min(took, time.Since(start))
			if err == nil || !strings.Contains(err.Error(), "nested deeper than 512 levels") {
				t.Fatalf("Parse = %v, want the nesting limit named", err)
			}
		}
		if took > 5*time.Millisecond {
			t.Errorf("refusal took %v, want well under 5 ms", took)
		}
	}
}

func TestLimits(t *testing.T) {
	if _, err := scan.Parse([]byte(`{"a":[[1]]}`), scan.Limits{MaxDepth: 3}); err != nil {
		t.Errorf("depth 3 of 3: %v", err)
	}
	if _, err := scan.Parse([]byte(`{"a":[[1]]}`), scan.Limits{MaxDepth: 2}); err == nil {
		t.Error("depth 3 of 2 was accepted")
	}
	many := func(n int) []byte {
		return []byte("{" + strings.TrimSuffix(strings.Repeat(`"a":1,`, n), ",") + "}")
	}
	if _, err := scan.Parse(many(scan.DefaultMaxMembers), scan.Limits{}); err != nil {
		t.Errorf("members at the limit: %v", err)
	}
	if _, err := scan.Parse(many(scan.DefaultMaxMembers+1), scan.Limits{}); err == nil ||
		!strings.Contains(err.Error(), "4096 top-level members") {
		t.Errorf("members over the limit = %v, want the limit named", err)
	}
}

func TestGet(t *testing.T) {
	const in = `{"a":1, "b" : {"a":2} ,"a":[3],"c\"":4}`
	b := parse(t, in)
	for key, want := range map[string]string{"a": "[3]", "b": `{"a":2}`, `c"`: "4"} {
		v, ok := b.Get(key)
		if !ok || string(v.Raw) != want || in[v.Start:v.End] != want {
			t.Errorf("Get(%q) = %q [%d:%d], %v, want %s", key, v.Raw, v.Start, v.End, ok, want)
		}
	}
	if v, ok := b.Get("missing"); ok {
		t.Errorf("Get(missing) = %q", v.Raw)
	}
	if _, ok := new(scan.Body).Get("a"); ok {
		t.Error("an empty Body has members")
	}
}

// R53: an escaped key is the same key, or a stripped member would leak through.
func TestEscapedKeysAreSeen(t *testing.T) {
	for _, in := range []string{
		`{"mod\u0065l":"m"}`, `{"\u006d\u006F\u0064\u0065\u006c":"m"}`, `{"model":"m"}`,
		`{"model":"x","m\u006fdel":"m"}`,
	} {
		b := parse(t, in)
		if s, ok := b.String("model"); !ok || s != "m" {
			t.Errorf("String(model) of %s = %q, %v", in, s, ok)
		}
		if got := string(b.Apply(nil, scan.Splice{Del: []string{"model"}})); got != "{}" {
			t.Errorf("Del(model) of %s = %s, want {}", in, got)
		}
	}
	if s, ok := parse(t, `{"a\/b\n":"m"}`).String("a/b\n"); !ok || s != "m" {
		t.Errorf("String = %q, %v", s, ok)
	}
}

func TestString(t *testing.T) {
	cases := map[string]struct {
		raw, want string
		ok        bool
	}{
		"plain":             {`"abc"`, "abc", true},
		"empty":             {`""`, "", true},
		"escapes":           {`"a\"\\\/\b\f\n\r\tz"`, "a\"\\/\b\f\n\r\tz", true},
		"unicode":           {`"\u0041\u00E9\u20ac"`, "Aé€", true},
		"a surrogate pair":  {`"\ud83c\udf0d"`, "🌍", true},
		"a lone high half":  {`"\ud83cx"`, "\ufffdx", true},
		"a lone low half":   {`"\udf0d"`, "\ufffd", true},
		"two high halves":   {`"\ud83c\ud83c\udf0d"`, "\ufffd🌍", true},
		"high then newline": {`"\ud83c\n"`, "\ufffd\n", true},
		"a number":          {`1`, "", false},
		"null":              {`null`, "", false},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got, ok := parse(t, `{"k":`+tc.raw+`}`).String("k")
			if got != tc.want || ok != tc.ok {
				t.Errorf("String = %q, %v, want %q, %v", got, ok, tc.want, tc.ok)
			}
			var std string
			if tc.ok && json.Unmarshal([]byte(tc.raw), &std) == nil && std != got {
				t.Errorf("encoding/json reads %q", std)
			}
		})
	}
}

func TestInt(t *testing.T) {
	cases := map[string]struct {
		want int64
		ok   bool
	}{
		`0`: {0, true}, `-7`: {-7, true}, `9007199254740993`: {9007199254740993, true},
		`9223372036854775807`: {9223372036854775807, true}, `100.0`: {100, true}, `1e3`: {1000, true},
		`9223372036854775808`: {}, `1.5`: {}, `"3"`: {}, `true`: {}, `null`: {}, `[1]`: {}, `1e400`: {},
	}
	for raw, tc := range cases {
		if got, ok := parse(t, `{"k":`+raw+`}`).Int("k"); got != tc.want || ok != tc.ok {
			t.Errorf("Int(%s) = %d, %v, want %d, %v", raw, got, ok, tc.want, tc.ok)
		}
	}
	if _, ok := parse(t, `{}`).Int("k"); ok {
		t.Error("an absent member is an integer")
	}
}

func TestBool(t *testing.T) {
	for raw, want := range map[string][2]bool{
		`true`: {true, true}, `false`: {false, true}, `null`: {}, `"true"`: {}, `1`: {},
	} {
		if v, ok := parse(t, `{"k":`+raw+`}`).Bool("k"); v != want[0] || ok != want[1] {
			t.Errorf("Bool(%s) = %v, %v, want %v", raw, v, ok, want)
		}
	}
}

func TestKeysRunInBodyOrder(t *testing.T) {
	b := parse(t, `{"z":1,"a":2,"z":3,"\u0062":4}`)
	var got []string
	b.Keys(func(key string, v scan.Value) bool {
		got = append(got, fmt.Sprintf("%s=%s", key, v.Raw))
		return len(got) < 4
	})
	if want := "z=1 a=2 z=3 b=4"; strings.Join(got, " ") != want {
		t.Errorf("Keys = %v, want %s", got, want)
	}
	n := 0
	b.Keys(func(string, scan.Value) bool { n++; return false })
	if n != 1 {
		t.Errorf("Keys went on after false: %d calls", n)
	}
}

func TestResetReusesTheBody(t *testing.T) {
	b := new(scan.Body)
	if err := b.Reset([]byte(`{"a":1}`), scan.Limits{}); err != nil {
		t.Fatal(err)
	}
	if err := b.Reset([]byte(`{"b":`), scan.Limits{}); err == nil {
		t.Fatal("a broken body was accepted")
	}
	if _, ok := b.Get("a"); ok || b.Bytes() != nil {
		t.Error("members of the last body survive an error")
	}
	if err := b.Reset([]byte(`{"c":3}`), scan.Limits{}); err != nil {
		t.Fatal(err)
	}
	if n, ok := b.Int("c"); !ok || n != 3 {
		t.Errorf("Int(c) = %d, %v", n, ok)
	}
	in := []byte(`{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}`)
	if n := testing.AllocsPerRun(100, func() { _ = b.Reset(in, scan.Limits{}) }); n != 0 {
		t.Errorf("Reset allocates %v times", n)
	}
}

func TestIterate(t *testing.T) {
	cases := map[string]struct {
		raw  string
		want []string
	}{
		"empty array":        {`[ ]`, nil},
		"empty object":       {`{ }`, nil},
		"array":              {`[1, "a,]" ,[2,[3]],{"x":"}"},null ]`, []string{`1`, `"a,]"`, `[2,[3]]`, `{"x":"}"}`, `null`}},
		"object":             {`{"a" : 1 , "b":"\"}","c":{}}`, []string{`a:1`, `b:"\"}"`, `c:{}`}},
		"escaped quotes":     {`["\\","\\\"","a\\\\"]`, []string{`"\\"`, `"\\\""`, `"a\\\\"`}},
		"numbers then space": {"[1\n,2\t]", []string{"1", "2"}},
		"a string":           {`"abc"`, nil},
		"a number":           {`12`, nil},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			v, _ := parse(t, `{"k":`+tc.raw+`}`).Get("k")
			var got []string
			it := scan.Iterate(v.Raw)
			for it.Next() {
				s := string(it.Value())
				if from, to := it.Span(); string(v.Raw[from:to]) != s {
					t.Errorf("Span [%d:%d] is not the value %s", from, to, s)
				}
				if len(it.Key()) > 0 {
					s = string(it.Key()) + ":" + s
				}
				got = append(got, s)
			}
			if strings.Join(got, "|") != strings.Join(tc.want, "|") {
				t.Errorf("elements %q, want %q", got, tc.want)
			}
			if it.Next() {
				t.Error("Next after the end")
			}
		})
	}
}

func TestIterateDoesNotAllocate(t *testing.T) {
	v, _ := parse(t, `{"k":[{"role":"user","c\u006fntent":"a"},{"role":"tool","content":[1,2]}]}`).Get("k")
	found := 0
	n := testing.AllocsPerRun(100, func() {
		for it := scan.Iterate(v.Raw); it.Next(); {
			for m := scan.Iterate(it.Value()); m.Next(); {
				if m.KeyIs("content") {
					found++
				}
			}
		}
	})
	if n != 0 || found != 2*101 {
		t.Errorf("%v allocations, %d found, want 0 and %d", n, found, 2*101)
	}
}

func TestFind(t *testing.T) {
	v, ok := scan.Find([]byte(`{"a":1,"b":{"a":9},"\u0061":2}`), "a")
	if !ok || string(v.Raw) != "2" {
		t.Errorf("Find = %q, %v, want the last copy", v.Raw, ok)
	}
	for _, raw := range []string{`["a"]`, `"a"`, `{}`, ``} {
		if _, ok := scan.Find([]byte(raw), "a"); ok {
			t.Errorf("Find in %q found something", raw)
		}
	}
}

func TestEqualKeyWithALongEscapedKey(t *testing.T) {
	name := strings.Repeat("k", 100)
	if !scan.EqualKey([]byte(strings.Repeat(`\u006b`, 100)), name) {
		t.Error("an escaped key longer than the buffer is not recognised")
	}
	if scan.EqualKey([]byte(`\u006b`), name) || scan.EqualKey([]byte(name+"k"), name) {
		t.Error("different keys are equal")
	}
}

func TestQuoted(t *testing.T) {
	for _, s := range []string{"", "abc", "a\"b\\c\n\x00\x1f/", "北🌍", "kvc-0123"} {
		var back string
		if err := json.Unmarshal(scan.Quoted(s), &back); err != nil || back != s {
			t.Errorf("Quoted(%q) = %s, reads back as %q, %v", s, scan.Quoted(s), back, err)
		}
	}
}
