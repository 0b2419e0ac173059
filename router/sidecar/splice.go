package sidecar

import (
	"encoding/json"
	"strconv"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

// rendezvous are the members that only we may set, in every mode (R53): a
// client's own room would crash the schedulers of both engines.
var rendezvous = [...]string{"bootstrap_host", "bootstrap_port", "bootstrap_room", "do_local_prefill"}

// edit is what one leg's body needs beside the client's bytes (wire.md §1).
type edit struct {
	rid       string
	local     bool                 // do_local_prefill
	bootstrap *admission.Bootstrap // nil = none
	usage     bool                 // stream_options.include_usage
}

// apply writes the spliced body. Everything outside the members named here is
// byte-identical (R19, R20).
func (e edit) apply(b *scan.Body) []byte {
	s := scan.Splice{Del: rendezvous[:]}
	set := func(key string, value []byte) { s.Set = append(s.Set, scan.Member{Key: key, Value: value}) }
	set("rid", quote(e.rid))
	if e.local {
		set("do_local_prefill", []byte("true"))
	}
	if p := e.bootstrap; p != nil {
		set("bootstrap_host", quote(p.Host))
		set("bootstrap_port", strconv.AppendInt(nil, int64(p.Port), 10))
		set("bootstrap_room", strconv.AppendInt(nil, p.Room, 10))
	}
	if e.usage {
		set("stream_options", withUsage(b))
	}
	return b.Apply(make([]byte, 0, len(b.Bytes())+256), s)
}

// withUsage is the client's stream_options with include_usage set.
func withUsage(b *scan.Body) []byte {
	if v, ok := b.Get("stream_options"); ok {
		if o, err := scan.Parse(v.Raw, scan.Limits{}); err == nil {
			return o.Apply(nil, scan.Splice{Set: []scan.Member{{Key: "include_usage", Value: []byte("true")}}})
		}
	}
	return []byte(`{"include_usage":true}`)
}

// needsUsage reports whether a usage chunk has to be asked for on the client's
// behalf, and therefore dropped again (R16).
func needsUsage(r block.Route, b *scan.Body) bool {
	if stream, _ := b.Bool("stream"); !stream || r == block.Generate {
		return false
	}
	v, ok := b.Get("stream_options")
	if !ok {
		return true
	}
	o, err := scan.Parse(v.Raw, scan.Limits{})
	if err != nil {
		return true
	}
	asked, _ := o.Bool("include_usage")
	return !asked
}

func quote(s string) []byte {
	b, err := json.Marshal(s)
	if err != nil { // a string always encodes
		return []byte(`""`)
	}
	return b
}
