// Package session says whose turn a request is: headers, body fields, continuation.
package session

import (
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

// Config is the ordered list of sources (api.md router.session). Header names
// match case-insensitively and with - and _ alike (R83).
type Config struct {
	Headers    []string
	BodyFields []string
	Parents    []string // headers that name the parent session, e.g. x-parent-session-id
}

// Default is api.md's list.
func Default() Config { panic("contract") }

// Source says where an id came from (a metric label).
type Source string // "header:<name>", "body:<field>", "continuation", "derived", "none"

// ID is a client-given session id.
type ID struct {
	Raw, Parent string
	Source      Source
}

// FromRequest applies the sources in order; ok is false when none gives a
// usable id (empty, control characters, request-id style names: R84, R85).
func FromRequest(c Config, header map[string][]string, b *scan.Body) (id ID, ok bool) {
	panic("contract")
}

// Key is key(s) of wire.md §0.
func Key(namespace, pool, id string) kvc.SessionKey { panic("contract") }

// Tails finds the session whose last prompt ended with a block.
type Tails interface {
	ByTail(h block.Hash) (key, lineage kvc.SessionKey, ok bool)
}

// Continue finds the session that a request without an id continues: the one
// whose tail is the deepest block of the request's chain (Q18).
func Continue(blocks []block.Hash, t Tails) (key, lineage kvc.SessionKey, ok bool) { panic("contract") }

// Derived is the raw id of a new session without an id; random is 16 bytes.
func Derived(random []byte) string { panic("contract") }
