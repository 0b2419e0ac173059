package v1alpha1

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/kvc"
)

func TestRoutingFileReadsBackWhatAPoolWrote(t *testing.T) {
	p := fullPool()
	Default(p)
	want := NewRoutingFile(p)
	data, err := want.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseRoutingFile(data)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-wrote +read):\n%s", diff)
	}
	again, err := got.Marshal()
	if err != nil || string(again) != string(data) {
		t.Errorf("second writing differs: config_hash would change for nothing (%v)", err)
	}
}

func TestRoutingFileSharesNothingWithItsPool(t *testing.T) {
	p := fullPool()
	Default(p)
	f := NewRoutingFile(p)
	*f.Routing.StickyBonus = 99
	if *p.Spec.Routing.StickyBonus == 99 {
		t.Error("a change of the file reaches the pool")
	}
}

func TestParseRoutingFile(t *testing.T) {
	cases := map[string]struct{ data, want string }{
		"empty object: all defaults": {`{}`, ""},
		"the three parts": {
			`{"routing":{"preset":"Paper"},"slo_classes":[{"name":"a"}],"session":{"ttlSeconds":60}}`,
			"",
		},
		"a misspelt constant": {"{\"routing\": {\n\"stickyBonos\": 2}}",
			`routing.json:2: routing.stickyBonos: unknown field; did you mean "stickyBonus"?`},
		"the pool's spelling of a part": {`{"sloClasses":[]}`, `sloClasses: unknown field; did you mean "slo_classes"?`},
		"a constant out of range": {
			`{"routing":{"highWaterPercent":101}}`,
			"routing.json:1: routing.highWaterPercent: Invalid value: 101: must be between 1 and 100",
		},
		"two classes of one name": {
			`{"slo_classes":[{"name":"a"},{"name":"a"}]}`,
			"slo_classes[1].name: Duplicate value",
		},
		"nothing":     {``, "routing.json: the file is empty; it should hold a routing file"},
		"broken JSON": {`{"routing":`, "not valid YAML"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			f, err := ParseRoutingFile([]byte(tc.data))
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want == "":
				if *f.Routing.RejectThreshold != 3 || len(f.Session.Headers) == 0 {
					t.Errorf("not defaulted: %+v", f)
				}
			case err == nil || !strings.Contains(err.Error(), tc.want):
				t.Errorf("error = %v, want %q", err, tc.want)
			}
		})
	}
}

func TestParamsOfADefaultSpecAreThePreset(t *testing.T) {
	for preset, want := range map[RoutingPreset]kvc.Params{PresetCorrected: kvc.Corrected(), PresetPaper: kvc.Paper()} {
		spec := RoutingSpec{Preset: preset}
		defaultRouting(&spec)
		if diff := cmp.Diff(want, spec.Params()); diff != "" {
			t.Errorf("%s: the API's defaults are not the preset's (-preset +params):\n%s", preset, diff)
		}
	}
}

func TestParamsTakeWhatWasSet(t *testing.T) {
	spec := RoutingSpec{
		Preset: PresetPaper, StickyBonus: new(int32(7)), RejectThreshold: new(int32(8)), MaxAppendTokens: new(int32(9)),
		HighWaterPercent: new(int32(10)), MaxProbes: new(int32(11)), ProtectIdleSeconds: new(int32(12)),
	}
	got := spec.Params()
	want := kvc.Paper()
	want.StickyBonus, want.RejectThreshold, want.MaxAppendTokens = 7, 8, 9
	want.HighWaterPercent, want.MaxProbes, want.ProtectIdle = 10, 11, 12*time.Second
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := (&RoutingSpec{}).Params(); got.Preset != "Corrected" {
		t.Errorf("preset of an empty spec = %q", got.Preset)
	}
}

func FuzzParseRoutingFile(f *testing.F) {
	f.Add([]byte(`{"routing":{"preset":"Paper"},"slo_classes":[{"name":"a"}],"session":{"ttlSeconds":60}}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := ParseRoutingFile(data)
		if err != nil {
			return
		}
		written, err := file.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseRoutingFile(written); err != nil {
			t.Errorf("does not read back: %v\n%s", err, written)
		}
	})
}
