package session

import (
	"encoding/hex"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/scan"
)

// Config is the ordered list of sources (api.md router.session). Header names
// match case-insensitively and with - and _ alike (R83).
type Config struct {
	Headers    []string
	BodyFields []string // a dot enters an object: session_params.id
	Parents    []string // headers that name the parent session, e.g. x-parent-session-id
	Agents     []Agent  // headers that tell the sub-agents of one session apart
}

// Agent is a pair of headers of agents that run several conversations under one
// session id: which of them speaks, and which one started it.
type Agent struct {
	ID     string // header with the speaker's id
	Parent string // header with the id of the agent that started it, "" = none
}

// Default is api.md's list, followed by the other names that coding agents and
// gateways are known to send.
func Default() Config {
	return Config{
		Headers: []string{
			"x-claude-code-session-id", "session-id", "x-session-id", "x-kvc-session",
			"thread-id", "x-session-affinity", "x-dynamo-session-id", "x-smg-routing-key",
			"x-sgl-routing-key", "x-litellm-session-id",
		},
		BodyFields: []string{"prompt_cache_key", "session_id", "session_params.id", "session_params.session_id"},
		Parents:    []string{"x-parent-session-id"},
		Agents:     []Agent{{ID: "x-claude-code-agent-id", Parent: "x-claude-code-parent-agent-id"}},
	}
}

// Source says where an id came from (a metric label): "header:<name>" and
// "body:<field>" with the configured name, never the client's spelling.
type Source string

// Sources that are not a header or a body field.
const (
	Continuation Source = "continuation" // Q18: extends a known conversation
	FromRandom   Source = "derived"      // a new session without an id
	None         Source = "none"         // sessionless
)

// ID is a client-given session id.
type ID struct {
	Raw    string // at most MaxID bytes
	Parent string // raw id of the session that started this one, "" = a root
	Source Source
}

// MaxID is the longest id kept as it is; a longer one is replaced by its hash
// (R85).
const MaxID = 256

// FromRequest applies the sources in order; ok is false when none gives a
// usable id (empty, control characters, request-id style names: R84, R85).
// An unusable value passes the turn to the next source. b may be nil.
func FromRequest(c Config, header map[string][]string, b *scan.Body) (id ID, ok bool) {
	for _, name := range c.Headers {
		if requestScoped(name) {
			continue
		}
		if raw, ok := headerValue(header, name); ok {
			id = ID{Raw: raw, Source: Source("header:" + name)}
			return c.lineage(id, header), true
		}
	}
	if b == nil {
		return ID{}, false
	}
	for _, path := range c.BodyFields {
		if requestScoped(path) {
			continue
		}
		if raw, ok := bodyValue(b, path); ok {
			id = ID{Raw: raw, Source: Source("body:" + path)}
			return c.lineage(id, header), true
		}
	}
	return ID{}, false
}

// lineage adds what the headers say about sub-agents and parents. A sub-agent
// is a session of its own, since its prompt is not its parent's.
func (c Config) lineage(id ID, header map[string][]string) ID {
	for _, a := range c.Agents {
		agent, ok := headerValue(header, a.ID)
		if !ok {
			continue
		}
		root := id.Raw
		id.Raw, id.Parent = bounded(root+"/"+agent), root
		if parent, ok := headerValue(header, a.Parent); ok && parent != agent {
			id.Parent = bounded(root + "/" + parent)
		}
		return id
	}
	for _, name := range c.Parents {
		if parent, ok := headerValue(header, name); ok && parent != id.Raw {
			id.Parent = parent
			return id
		}
	}
	return id
}

// Key is key(s) of wire.md §0.
func Key(namespace, pool, id string) kvc.SessionKey {
	b := make([]byte, 0, 256)
	b = append(b, "kvc-session-v1\x00"...)
	b = append(b, namespace...)
	b = append(b, '/')
	b = append(b, pool...)
	b = append(b, 0)
	b = append(b, id...)
	return kvc.SessionKey(block.Hash(xxh3.Hash(b)).String())
}

// Tails finds the session whose last prompt ended with a block.
type Tails interface {
	ByTail(h block.Hash) (key, lineage kvc.SessionKey, ok bool)
}

// Continue finds the session that a request without an id continues: the one
// whose tail is the deepest block of the request's chain (Q18). Its cost is one
// lookup per block when there is none.
func Continue(blocks []block.Hash, t Tails) (key, lineage kvc.SessionKey, ok bool) {
	for _, b := range slices.Backward(blocks) {
		if key, lineage, ok = t.ByTail(b); ok {
			return key, lineage, true
		}
	}
	return "", "", false
}

// Derived is the raw id of a new session without an id; random is 16 bytes.
func Derived(random []byte) string { return "derived:" + hex.EncodeToString(random) }
