package sidecar

import (
	"testing"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

func mustScan(t testing.TB, s string) *scan.Body {
	t.Helper()
	b, err := scan.Parse([]byte(s), scan.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestEditByProfileAndMode(t *testing.T) {
	boot := &admission.Bootstrap{Host: "h", Port: 1, Room: 2}
	const (
		nothing = "nothing"
		local   = "local"
		meet    = "bootstrap"
		refused = "refused"
	)
	type key struct {
		path kvc.DirectPath
		mode kvc.Mode
	}
	// wire.md §1, the splice table, row by row.
	want := map[key]string{
		{kvc.ConditionalAggregation, kvc.Direct}: local,
		{kvc.ConditionalAggregation, kvc.Seed}:   meet, {kvc.ConditionalAggregation, kvc.Reseed}: meet,
		{kvc.ConditionalAggregation, kvc.Fallback}: meet,
		{kvc.NativeAdmission, kvc.Direct}:          nothing, {kvc.NativeAdmission, kvc.Seed}: meet,
		{kvc.NativeAdmission, kvc.Reseed}: meet, {kvc.NativeAdmission, kvc.Fallback}: meet,
		{kvc.Unified, kvc.Direct}: nothing, {kvc.Unified, kvc.Seed}: nothing, {kvc.Unified, kvc.Reseed}: nothing,
		{kvc.Unified, kvc.Fallback}:    nothing,
		{kvc.DeltaTransfer, kvc.Delta}: meet, {kvc.DeltaTransfer, kvc.Seed}: meet, {kvc.DeltaTransfer, kvc.Reseed}: meet,
		{kvc.DeltaTransfer, kvc.Fallback}: meet,
	}
	for k, w := range want {
		tn := &turn{in: admission.Turn{Leg: admission.LegDecode, Bootstrap: boot}, path: k.path, mode: k.mode,
			route: block.Chat, body: mustScan(t, "{}")}
		e, f := tn.edit()
		got := nothing
		switch {
		case f != nil:
			got = refused
		case e.local && e.bootstrap != nil:
			got = "both"
		case e.local:
			got = local
		case e.bootstrap != nil:
			got = meet
		}
		if got != w {
			t.Errorf("%s %s: %s, want %s", k.path, k.mode, got, w)
		}
	}
}

func TestSpliceText(t *testing.T) {
	e := edit{rid: "kvc-x", bootstrap: &admission.Bootstrap{Host: `fd00::1`, Port: 8998, Room: 1<<63 - 1}, usage: true}
	got := string(e.apply(mustScan(t, `{"do_local_prefill":true,"a":1,"stream_options":{"x":1},"bootstrap_room":[1,2]}`)))
	b := mustScan(t, got)
	for key, want := range map[string]string{
		"rid": `"kvc-x"`, "bootstrap_host": `"fd00::1"`, "bootstrap_port": "8998", "bootstrap_room": "9223372036854775807", "a": "1",
	} {
		if v, ok := b.Get(key); !ok || string(v.Raw) != want {
			t.Errorf("%s = %s, want %s in %s", key, v.Raw, want, got)
		}
	}
	if _, ok := b.Get("do_local_prefill"); ok {
		t.Errorf("the client's do_local_prefill passed: %s", got)
	}
}

func TestNeedsUsage(t *testing.T) {
	for body, want := range map[string]bool{
		`{"stream":true}`: true, `{"stream":false}`: false, `{}`: false,
		`{"stream":true,"stream_options":{"include_usage":true}}`:  false,
		`{"stream":true,"stream_options":{"include_usage":false}}`: true,
		`{"stream":true,"stream_options":"odd"}`:                   true,
	} {
		if got := needsUsage(block.Chat, mustScan(t, body)); got != want {
			t.Errorf("chat %s: %t, want %t", body, got, want)
		}
		if needsUsage(block.Generate, mustScan(t, body)) {
			t.Errorf("generate %s: usage asked for", body)
		}
	}
}
