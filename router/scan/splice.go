package scan

import (
	"cmp"
	"slices"
)

// Member is one member to add; Value is raw JSON.
type Member struct {
	Key   string
	Value []byte
}

// Splice is a set of edits: Del removes every copy of a key with its comma. Set
// writes each member once: in the place of the client's own last copy (its
// other copies are removed), else after the last member. A key in both is set.
// Cut removes spans given as offsets into the body (R125's block, with its
// comma).
type Splice struct {
	Del []string
	Set []Member
	Cut [][2]int
}

// edit replaces body[start:end] by comma, key and value as far as they are set.
type edit struct {
	start, end int
	comma      bool
	named      bool // write key, which may be ""
	key        string
	value      []byte
}

// Apply writes the edited body to dst[:0] and returns it. Bytes outside the
// edits are identical. dst must not overlap the body.
func (b *Body) Apply(dst []byte, s Splice) []byte {
	var buf [32]edit
	edits := b.edits(buf[:0], s)
	slices.SortStableFunc(edits, func(x, y edit) int { return cmp.Compare(x.start, y.start) })

	dst = dst[:0]
	if n := len(b.raw) + grow(edits); cap(dst) < n {
		dst = make([]byte, 0, n)
	}
	pos := 0
	for i := range edits {
		e := &edits[i]
		if e.start > pos {
			dst = append(dst, b.raw[pos:e.start]...)
		}
		dst = e.append(dst)
		pos = max(pos, e.end) // a cut inside a removed member is already gone
	}
	return append(dst, b.raw[pos:]...)
}

func (e *edit) append(dst []byte) []byte {
	if e.comma {
		dst = append(dst, ',')
	}
	if e.named {
		dst = append(AppendQuoted(dst, e.key), ':')
	}
	return append(dst, e.value...)
}

func grow(edits []edit) (n int) {
	for i := range edits {
		n += len(edits[i].value) + len(edits[i].key) + 4
	}
	return n
}

// fate says what happens to a member.
type fate uint8

const (
	keep fate = iota
	replace
	remove
)

// edits lists the changes. Removals take whole runs of members, so that exactly
// one comma stays between any two survivors.
func (b *Body) edits(out []edit, s Splice) []edit {
	last := -1 // last surviving member
	for i := 0; i < len(b.members); {
		f, set := b.fate(i, s)
		if f != remove {
			if f == replace {
				m := &b.members[i]
				out = append(out, edit{start: m.val, end: m.end, value: s.Set[set].Value})
			}
			last = i
			i++
			continue
		}
		end := i + 1
		for end < len(b.members) {
			if f, _ := b.fate(end, s); f != remove {
				break
			}
			end++
		}
		out = append(out, b.removal(i, end))
		i = end
	}
	out = b.additions(out, s, last)
	for _, c := range s.Cut {
		out = append(out, edit{start: c[0], end: c[1]})
	}
	return out
}

// fate of member i; set is the index of its replacement.
func (b *Body) fate(i int, s Splice) (f fate, set int) {
	m := &b.members[i]
	for j := range slices.Backward(s.Set) {
		if string(m.key) == s.Set[j].Key {
			if b.find(s.Set[j].Key) == i {
				return replace, j
			}
			return remove, 0
		}
	}
	if slices.ContainsFunc(s.Del, func(key string) bool { return string(m.key) == key }) {
		return remove, 0
	}
	return keep, 0
}

// removal drops members [from, to) with the commas that go with them.
func (b *Body) removal(from, to int) edit {
	switch {
	case to < len(b.members):
		return edit{start: b.members[from].start, end: b.members[to].start}
	case from > 0:
		return edit{start: b.members[from-1].end, end: b.members[to-1].end}
	default:
		return edit{start: b.members[from].start, end: b.members[to-1].end}
	}
}

// additions appends the members of Set that the client did not send.
func (b *Body) additions(out []edit, s Splice, last int) []edit {
	at, comma := b.open+1, false
	if last >= 0 {
		at, comma = b.members[last].end, true
	}
	for j := range s.Set {
		if b.find(s.Set[j].Key) >= 0 || setLater(s.Set, j) {
			continue
		}
		out = append(out, edit{start: at, end: at, comma: comma, named: true, key: s.Set[j].Key, value: s.Set[j].Value})
		comma = true
	}
	return out
}

// setLater reports that a later member of set has the key of set[j]; the last
// one wins.
func setLater(set []Member, j int) bool {
	for _, m := range set[j+1:] {
		if m.Key == set[j].Key {
			return true
		}
	}
	return false
}
