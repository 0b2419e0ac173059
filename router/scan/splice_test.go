package scan_test

import (
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/scan"
)

func TestApply(t *testing.T) {
	set := func(kv ...string) (m []scan.Member) {
		for i := 0; i < len(kv); i += 2 {
			m = append(m, scan.Member{Key: kv[i], Value: []byte(kv[i+1])})
		}
		return m
	}
	cases := map[string]struct {
		in   string
		edit scan.Splice
		want string
	}{
		"nothing to do":                 {`{ "a" : 1 }`, scan.Splice{}, `{ "a" : 1 }`},
		"delete what is not there":      {`{"a":1}`, scan.Splice{Del: []string{"b"}}, `{"a":1}`},
		"delete the first":              {`{ "a":1, "b":2}`, scan.Splice{Del: []string{"a"}}, `{ "b":2}`},
		"delete one in the middle":      {`{"a":1, "b":2, "c":3}`, scan.Splice{Del: []string{"b"}}, `{"a":1, "c":3}`},
		"delete the last":               {`{"a":1 , "b":2 }`, scan.Splice{Del: []string{"b"}}, `{"a":1 }`},
		"delete the only one":           {`{ "a":1 }`, scan.Splice{Del: []string{"a"}}, `{  }`},
		"delete all":                    {`{"a":1,"b":2}`, scan.Splice{Del: []string{"b", "a"}}, `{}`},
		"delete a run at the end":       {`{"a":1,"b":2,"c":3}`, scan.Splice{Del: []string{"b", "c"}}, `{"a":1}`},
		"delete a run at the front":     {`{"a":1,"b":2,"c":3}`, scan.Splice{Del: []string{"b", "a"}}, `{"c":3}`},
		"delete every other":            {`{"a":1,"b":2,"c":3,"d":4}`, scan.Splice{Del: []string{"b", "d"}}, `{"a":1,"c":3}`},
		"delete every copy":             {`{"x":1,"a":0,"x":2,"x":3}`, scan.Splice{Del: []string{"x"}}, `{"a":0}`},
		"a nested copy stays":           {`{"a":{"x":1},"x":2}`, scan.Splice{Del: []string{"x"}}, `{"a":{"x":1}}`},
		"add to an empty object":        {`{}`, scan.Splice{Set: set("a", "1")}, `{"a":1}`},
		"add two to an empty object":    {` { } `, scan.Splice{Set: set("a", "1", "b", "2")}, ` {"a":1,"b":2 } `},
		"add after the last":            {"{\"a\":1\n}\n", scan.Splice{Set: set("b", "2", "c", "3")}, "{\"a\":1,\"b\":2,\"c\":3\n}\n"},
		"replace keeps the place":       {`{"a":1, "b" : 2 ,"c":3}`, scan.Splice{Set: set("b", `"x"`)}, `{"a":1, "b" : "x" ,"c":3}`},
		"replace drops other copies":    {`{"b":1,"a":2,"b":3,"c":4}`, scan.Splice{Set: set("b", "9")}, `{"a":2,"b":9,"c":4}`},
		"replace sees an escaped key":   {`{"\u0062":1,"a":2}`, scan.Splice{Set: set("b", "9")}, `{"\u0062":9,"a":2}`},
		"set wins over delete":          {`{"a":1,"b":2}`, scan.Splice{Del: []string{"a"}, Set: set("a", "9")}, `{"a":9,"b":2}`},
		"delete all, then add":          {`{"a":1,"b":2}`, scan.Splice{Del: []string{"a", "b"}, Set: set("c", "3")}, `{"c":3}`},
		"delete the last, then add":     {`{"a":1,"b":2}`, scan.Splice{Del: []string{"b"}, Set: set("c", "3")}, `{"a":1,"c":3}`},
		"the last of equal sets wins":   {`{"a":1}`, scan.Splice{Set: set("b", "1", "b", "2", "a", "3", "a", "4")}, `{"a":4,"b":2}`},
		"cut":                           {`{"a":[1,2]}`, scan.Splice{Cut: [][2]int{{6, 8}}}, `{"a":[2]}`},
		"cut two, any order":            {`{"a":[1,2,3]}`, scan.Splice{Cut: [][2]int{{8, 10}, {6, 8}}}, `{"a":[3]}`},
		"cut inside a removed member":   {`{"a":[1,2],"b":1}`, scan.Splice{Del: []string{"a"}, Cut: [][2]int{{6, 8}}}, `{"b":1}`},
		"cut inside a replaced member":  {`{"a":[1,2],"b":1}`, scan.Splice{Set: set("a", "7"), Cut: [][2]int{{6, 8}}}, `{"a":7,"b":1}`},
		"cut beside every kind of edit": {`{"a":1,"m":[1,2],"b":2}`, scan.Splice{Del: []string{"a"}, Set: set("b", "3", "c", "4"), Cut: [][2]int{{12, 14}}}, `{"m":[2],"b":3,"c":4}`},
		"a key that needs quoting":      {`{}`, scan.Splice{Set: set("a\"\n", "1")}, `{"a\"\u000a":1}`},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := string(parse(t, tc.in).Apply(nil, tc.edit))
			if got != tc.want {
				t.Errorf("Apply = %s, want %s", got, tc.want)
			}
			parse(t, got)
		})
	}
}

func TestApplyReusesItsBuffer(t *testing.T) {
	b := parse(t, `{"model":"m","rid":"x","messages":["`+strings.Repeat("a", 4000)+`"]}`)
	edit := scan.Splice{Del: []string{"bootstrap_room"}, Set: []scan.Member{{Key: "rid", Value: []byte(`"kvc-1"`)}, {Key: "do_local_prefill", Value: []byte("true")}}}
	dst := make([]byte, 0, 8192)
	out := b.Apply(dst, edit)
	if &out[0] != &dst[:1][0] {
		t.Error("the given buffer was not used")
	}
	if n := testing.AllocsPerRun(100, func() { out = b.Apply(dst, edit) }); n != 0 {
		t.Errorf("Apply allocates %v times", n)
	}
}

// R19, R20: what a re-marshalling proxy would change stays as it was sent.
func TestR20ApplyKeepsBytes(t *testing.T) {
	const in = "{\n \"seed\": 9007199254740993, \"temperature\": 1.0,\"tools\":[{\"type\":\"function\",\"function\":" +
		`{"name":"z","description":"\u00e9\/","parameters":{"zeta":{"anyOf":[{"type":"null"},{"type":"integer","minimum":1E2}]},"alpha":{}}}}],` +
		"\"model\" : \"alias\",\"bootstrap_room\":1}"
	const want = "{\n \"seed\": 9007199254740993, \"temperature\": 1.0,\"tools\":[{\"type\":\"function\",\"function\":" +
		`{"name":"z","description":"\u00e9\/","parameters":{"zeta":{"anyOf":[{"type":"null"},{"type":"integer","minimum":1E2}]},"alpha":{}}}}],` +
		"\"model\" : \"real\",\"rid\":\"kvc-1\"}"
	got := parse(t, in).Apply(nil, scan.Splice{
		Del: []string{"bootstrap_host", "bootstrap_port", "bootstrap_room"},
		Set: []scan.Member{{Key: "model", Value: []byte(`"real"`)}, {Key: "rid", Value: []byte(`"kvc-1"`)}},
	})
	if string(got) != want {
		t.Errorf("Apply = %s\nwant %s", got, want)
	}
}
