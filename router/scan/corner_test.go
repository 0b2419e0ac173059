package scan_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvc-dev/kvc/router/scan"
)

// RFC 8259 §6, number by number: each is a member's whole value.
func TestNumbersOfTheRFC(t *testing.T) {
	for number, ok := range map[string]bool{
		"0": true, "-0": true, "1": true, "-1": true, "10": true, "0.0": true, "-0.0": true, "0.5": true, "1.50": true,
		"0e0": true, "0E0": true, "0e+0": true, "0e-0": true, "1e00": true, "1E+007": true, "1.5e-3": true, "-1.5E3": true,
		"123456789012345678901234567890": true, "1e999999": true, "0.00000000000000000000000000001": true,
		"00": false, "01": false, "-00": false, "-01": false, "+0": false, "-": false, "+": false, ".": false, ".0": false,
		"0.": false, "-.5": false, "1.e1": false, "1e": false, "1e+": false, "1e-": false, "1e.5": false, "1e1.5": false,
		"1.2.3": false, "1ee1": false, "1e+-1": false, "--1": false, "- 1": false, "1 2": false, "0x0": false, "1_000": false,
		"1f": false, "Infinity": false, "-Infinity": false, "NaN": false, "-NaN": false, "\u0661": false, "1\u00a0": false,
		"0b1": false, "1,": false, "1e1e1": false, "٣": false, "０": false,
	} {
		for _, frame := range []string{`{"n":%s}`, `{"n": %s ,"m":0}`, `{"n":[%s]}`, `{"n":[0,%s,0]}`, `{"a":{"n":%s}}`} {
			in := fmt.Sprintf(frame, number)
			if valid := json.Valid([]byte(in)); valid != ok && number != "1," {
				t.Fatalf("the table is wrong about %s: encoding/json says %v", in, valid)
			}
			_, err := scan.Parse([]byte(in), scan.Limits{})
			if (err == nil) != json.Valid([]byte(in)) {
				t.Errorf("Parse(%s) = %v", in, err)
			}
		}
	}
}

// Every byte is tried as the one after a backslash and as a bare byte of a
// string, at every alignment of the eight-byte steps.
func TestEveryByteInAString(t *testing.T) {
	for c := range 256 {
		for _, lead := range []int{0, 1, 6, 7, 8, 9, 15, 16, 23, 31} {
			for _, form := range []string{"%s%c%s", `%s\%c%s`} {
				inner := fmt.Sprintf(form, strings.Repeat("a", lead), '\x01', strings.Repeat("b", 17))
				inner = strings.ReplaceAll(inner, "\x01", string([]byte{byte(c)}))
				in := []byte(`{"k":"` + inner + `"}`)
				_, err := scan.Parse(in, scan.Limits{})
				if valid := json.Valid(in); (err == nil) != valid {
					t.Errorf("Parse(%q) = %v, encoding/json says %v", in, err, valid)
				}
			}
		}
	}
}

// The text of strings is what encoding/json decodes, pairs and lone halves of
// surrogates included.
func TestUnicodeEscapes(t *testing.T) {
	for _, inner := range []string{
		`\u0000`, `\u001f`, `\u007F`, `\u00e9`, `\u20AC`, `\uFFFD`, `\uffff`, `\ufeff`,
		`\ud83c\udf0d`, `\uD83C\uDF0D`, `\ud83c`, `\udf0d`, `\ud83c\ud83c`, `\udf0d\ud83c`, `\ud83c\ud83c\udf0d`,
		`\ud83cx`, `\ud83c\n`, `\ud83c\\udf0d`, `\ud83c\u0041`, `x\ud83c\udf0dy`, `\\u0041`, `\\\u0041`, `\"\/\b\f\n\r\t`,
		`\ud800\udc00`, `\udbff\udfff`, `\ud7ff`, `\ue000`, `\ud83c\u`[:6], `日本\u8a9e`, `\u65e5本\u8a9e`,
	} {
		raw := []byte(`"` + inner + `"`)
		var want string
		if err := json.Unmarshal(raw, &want); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if got := string(scan.AppendUnescaped(nil, raw)); got != want {
			t.Errorf("AppendUnescaped(%s) = %q, want %q", raw, got, want)
		}
		b := parse(t, `{"k":`+string(raw)+`,"`+inner+`":1}`)
		if got, ok := b.String("k"); !ok || got != want {
			t.Errorf("String(%s) = %q, %v", raw, got, ok)
		}
		if n, ok := b.Int(want); !ok || n != 1 {
			t.Errorf("the member %s is not found by its text %q", raw, want)
		}
	}
}

// A broken escape is refused wherever the eight-byte steps meet it.
func TestBrokenEscapesAtEveryAlignment(t *testing.T) {
	for _, bad := range []string{`\u`, `\u1`, `\u12`, `\u123`, `\u123g`, `\uG123`, `\u 123`, `\U0041`, `\x41`, `\0`, `\'`, `\a`, `\v`} {
		for lead := range 20 {
			in := `{"k":"` + strings.Repeat("a", lead) + bad + `zz"}`
			if bad == `\u` || bad == `\u1` || bad == `\u12` || bad == `\u123` {
				in = `{"k":"` + strings.Repeat("a", lead) + bad + `"}`
			}
			_, err := scan.Parse([]byte(in), scan.Limits{})
			if err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("invalid JSON at byte %d: ", 6+lead)) {
				t.Errorf("Parse(%s) = %v, want the escape's offset %d", in, err, 6+lead)
			}
		}
	}
}

// Depth counts every container, of both kinds, and nothing else.
func TestDepthCountsContainers(t *testing.T) {
	for in, depth := range map[string]int{
		`{}`: 1, `{"a":"[[[["}`: 1, `{"a":[]}`: 2, `{"a":{}}`: 2, `{"a":[[]],"b":{"c":{}}}`: 3, `{"a":[1,[2],[3,[4]]]}`: 4,
		`{"a":[[],[],[],[]]}`: 3, `{"a":{"b":[{"c":[]}]}}`: 5,
	} {
		if _, err := scan.Parse([]byte(in), scan.Limits{MaxDepth: depth}); err != nil {
			t.Errorf("%s at its depth %d: %v", in, depth, err)
		}
		if depth == 1 {
			continue
		}
		if _, err := scan.Parse([]byte(in), scan.Limits{MaxDepth: depth - 1}); err == nil ||
			!strings.Contains(err.Error(), fmt.Sprintf("deeper than %d levels", depth-1)) {
			t.Errorf("%s below its depth: %v", in, err)
		}
	}
}

// Only the four blanks of the RFC are white space.
func TestOnlyTheFourBlanksAreWhiteSpace(t *testing.T) {
	for c := range 256 {
		blank := string([]byte{byte(c)})
		for _, frame := range []string{"@{}", "{@}", `{@"a":1}`, `{"a"@:1}`, `{"a":@1}`, `{"a":1@}`, `{"a":1,@"b":2}`, `{"a":[@]}`, `{"a":[1@,2]}`, "{}@"} {
			in := []byte(strings.ReplaceAll(frame, "@", blank))
			_, err := scan.Parse(in, scan.Limits{})
			if want := json.Valid(in) && !strings.ContainsAny(blank, "[]"); (err == nil) != want {
				t.Errorf("Parse(%q) = %v", in, err)
			}
		}
	}
}

// Every cut of a body is refused at or before its end, never read beyond.
func TestEveryCutIsRefused(t *testing.T) {
	const whole = ` {"a":"x\u00e9\n","b":[1,-2.5e+3,{"c":null}],"d":true,"e":{},"f":false} `
	end := strings.LastIndexByte(whole, '}')
	for n := range end + 1 {
		in := []byte(whole[:n])
		_, err := scan.Parse(slices.Clip(in), scan.Limits{})
		if err == nil {
			t.Errorf("the cut at %d is accepted: %s", n, in)
		}
	}
	parse(t, whole[:end+1])
}

// styles are ways to write the same object.
var styles = map[string]struct{ open, key, colon, comma, end string }{
	"compact":       {"{", "", ":", ",", "}"},
	"spaced":        {"{ ", "", ": ", ", ", " }"},
	"indented":      {"{\n  ", "", ": ", ",\n  ", "\n}\n"},
	"Windows":       {"\r\n{\r\n\t", "", " :\t", "\r\n\t, ", "\r\n}"},
	"comma leading": {"{", " ", " : ", "\n,", "\n}"},
}

type pair struct{ key, raw string }

func object(style string, pairs []pair) string {
	s := styles[style]
	var b strings.Builder
	b.WriteString(s.open)
	for i, p := range pairs {
		if i > 0 {
			b.WriteString(s.comma)
		}
		b.WriteString(s.key + string(scan.Quoted(p.key)) + s.colon + p.raw)
	}
	b.WriteString(s.end)
	return b.String()
}

// edited is what a splice means, on a list of members.
func edited(pairs []pair, del []string, set []pair) []pair {
	last := map[string]int{}
	for i, p := range pairs {
		last[p.key] = i
	}
	value := map[string]string{}
	for _, p := range set {
		value[p.key] = p.raw
	}
	var out []pair
	for i, p := range pairs {
		v, isSet := value[p.key]
		switch {
		case isSet && last[p.key] == i:
			out = append(out, pair{p.key, v})
		case isSet, slices.Contains(del, p.key):
		default:
			out = append(out, p)
		}
	}
	for i, p := range set {
		if _, there := last[p.key]; !there && !slices.ContainsFunc(set[i+1:], func(q pair) bool { return q.key == p.key }) {
			out = append(out, p)
		}
	}
	return out
}

func members(t testing.TB, in []byte) []pair {
	t.Helper()
	b, err := scan.Parse(in, scan.Limits{})
	if err != nil {
		t.Fatalf("%v in %s", err, in)
	}
	var out []pair
	b.Keys(func(key string, v scan.Value) bool {
		out = append(out, pair{key, string(v.Raw)})
		return true
	})
	return out
}

// checkSplice applies an edit and holds the result against the list model and,
// where keys are unique, against a map of encoding/json.
func checkSplice(t testing.TB, in string, pairs []pair, del []string, set []pair) {
	t.Helper()
	s := scan.Splice{Del: del}
	for _, p := range set {
		s.Set = append(s.Set, scan.Member{Key: p.key, Value: []byte(p.raw)})
	}
	body, err := scan.Parse([]byte(in), scan.Limits{})
	if err != nil {
		t.Fatalf("%v in %s", err, in)
	}
	out := body.Apply(nil, s)
	want := edited(pairs, del, set)
	if got := members(t, out); !slices.Equal(got, want) {
		t.Fatalf("Apply(%s; del %v, set %v) = %s\nmembers %v\nwant    %v", in, del, set, out, got, want)
	}
	var oracle, got map[string]any
	if err := json.Unmarshal([]byte(in), &oracle); err != nil {
		t.Fatal(err)
	}
	for _, key := range del {
		delete(oracle, key)
	}
	for _, p := range set {
		var v any
		if err := json.Unmarshal([]byte(p.raw), &v); err != nil {
			t.Fatal(err)
		}
		oracle[p.key] = v
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("encoding/json refuses %s: %v", out, err)
	}
	if !reflect.DeepEqual(got, oracle) {
		t.Fatalf("Apply(%s) = %s, encoding/json would give %v", in, out, oracle)
	}
	if len(del) == 0 && len(set) == 0 && string(out) != in {
		t.Fatalf("no edit changed %s to %s", in, out)
	}
}

// Every set of members removed from every position, in every style.
func TestEverySubsetIsRemovedInEveryStyle(t *testing.T) {
	pairs := []pair{{"a", "1"}, {"b", `"x,}"`}, {"c", `[1, {"a":2}]`}, {"d", "{}"}, {"a", "null"}}
	keys := []string{"a", "b", "c", "d", "none"}
	for style := range styles {
		for n := range len(pairs) + 1 {
			in := object(style, pairs[:n])
			for mask := range 1 << len(keys) {
				var del []string
				for i, key := range keys {
					if mask>>i&1 == 1 {
						del = append(del, key)
					}
				}
				checkSplice(t, in, pairs[:n], del, nil)
				checkSplice(t, in, pairs[:n], del, []pair{{"b", "9"}, {"new", `{"z":[]}`}})
			}
		}
	}
}

func TestSpliceIsTheEditOfAMap(t *testing.T) {
	key := rapid.SampledFrom([]string{"a", "b", "rid", "stream", `q"`, "é", "", "\n", "bootstrap_room"})
	raw := rapid.SampledFrom([]string{"0", "-1.5e3", "true", "null", `""`, `"\"],}{"`, "[]", `[ 1 , 2 ]`, `{"a":{"b":"}"}}`, `"\ud83c\udf0d"`})
	one := rapid.Custom(func(t *rapid.T) pair { return pair{key.Draw(t, "key"), raw.Draw(t, "raw")} })
	names := slices.Sorted(func(yield func(string) bool) {
		for name := range styles {
			if !yield(name) {
				return
			}
		}
	})
	rapid.Check(t, func(rt *rapid.T) {
		pairs := rapid.SliceOfN(one, 0, 8).Draw(rt, "members")
		in := object(rapid.SampledFrom(names).Draw(rt, "style"), pairs)
		checkSplice(t, in, pairs, rapid.SliceOfN(key, 0, 4).Draw(rt, "del"), rapid.SliceOfN(one, 0, 4).Draw(rt, "set"))
	})
}

// R19: what is not edited stays byte for byte, odd spellings included.
func TestUneditedSpellingsStay(t *testing.T) {
	odd := []string{`"t" : 1.0e+00`, `"\u0075": "\u00e9\/"`, `"n":9007199254740993`, `"d":-0`, `"w":[ ]`, "\"x\":\"\xff\""}
	for i := range odd {
		rest := strings.Join(slices.Delete(slices.Clone(odd), i, i+1), ",")
		in := "{" + strings.Join(slices.Insert(slices.Delete(slices.Clone(odd), i, i+1), i, `"rid":"mine"`), ",") + "}"
		b := parse(t, in)
		if out := string(b.Apply(nil, scan.Splice{Del: []string{"rid"}})); out != "{"+rest+"}" {
			t.Errorf("removed from %s: %s", in, out)
		}
		want := strings.Replace(in, `"mine"`, `"kvc-1"`, 1)
		if out := string(b.Apply(nil, scan.Splice{Set: []scan.Member{{Key: "rid", Value: []byte(`"kvc-1"`)}}})); out != want {
			t.Errorf("replaced in %s: %s", in, out)
		}
		if string(b.Bytes()) != in {
			t.Errorf("Apply changed the client's bytes")
		}
	}
}

// Integers as clients write them; what is no integer is none, never rounded.
func TestParseIntNeverRounds(t *testing.T) {
	for raw, want := range map[string]int64{
		"0": 0, "-0": 0, "0.0": 0, "-0.0": 0, "3": 3, "3.0": 3, "3e0": 3, "30e-1": 3, "0.3e1": 3, "1e3": 1000, "1E+3": 1000,
		"9223372036854775807": 1<<63 - 1, "-9223372036854775808": -1 << 63, "9007199254740993": 1<<53 + 1, "-12": -12,
	} {
		if got, ok := scan.ParseInt([]byte(raw)); !ok || got != want {
			t.Errorf("ParseInt(%s) = %d, %v, want %d", raw, got, ok, want)
		}
	}
	for _, raw := range []string{"", "3.5", `"3"`, "true", "null", "[]", "{}", "9223372036854775808", "-9223372036854775809", "1e19", "1e400", "1e-1"} {
		if got, ok := scan.ParseInt([]byte(raw)); ok {
			t.Errorf("ParseInt(%s) = %d, want none", raw, got)
		}
	}
}

// Quoted reads back as the text it quotes, for every byte that a key may hold.
func TestQuotedReadsBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.String().Draw(t, "s")
		raw := scan.Quoted(s)
		var got string
		if err := json.Unmarshal(raw, &got); err != nil || got != s {
			t.Fatalf("Quoted(%q) = %s reads as %q, %v", s, raw, got, err)
		}
		if back := scan.AppendUnescaped(nil, raw); string(back) != s {
			t.Fatalf("Quoted(%q) unescapes to %q", s, back)
		}
		if bytes.ContainsFunc(raw, func(r rune) bool { return r < 0x20 }) {
			t.Fatalf("Quoted(%q) holds a control character", s)
		}
	})
}

// Iterate sees what Parse validated, in order, at every depth.
func TestIterateWalksAsEncodingJSON(t *testing.T) {
	for _, raw := range []string{`[]`, `[ ]`, `{}`, `{ }`, `[1]`, `[ 1 , "a,]" , [ ] , {"k":[2]} ]`, `{"a":{"a":{"a":[[[0]]]}},"b":"}"}`,
		`["\"",[["\\"]],"]"]`, "[\n1\n,\r\n2\t]"} {
		parse(t, `{"v":`+raw+`}`)
		checkValue(t, []byte(raw))
	}
}
