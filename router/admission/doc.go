// Package admission is the Admit question on the wire (wire.md §0–3, §5): the
// header names and their text forms, the JSON types, the client that routers,
// benches and managers use, and the handler a sidecar mounts.
//
// It decides nothing: a verdict is made by router/kvc's ledger. It refuses to
// know sessions, prompts, engines and policies; it only keeps both ends of the
// wire spelling the same thing, authenticating alike and filtering alike.
package admission
