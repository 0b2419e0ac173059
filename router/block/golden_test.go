package block_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/scan"
)

var update = flag.Bool("update", false, "rewrite the hashes in testdata/golden.json")

// golden is one normative vector. Fields are the canonical bytes: the letter, a
// space, the payload. A change of Blocks for the same body needs a new Format.
type golden struct {
	Name   string          `json:"name"`
	Route  block.Route     `json:"route"`
	Model  string          `json:"model"`
	Salt   string          `json:"salt,omitempty"` // of the body, for the seed
	Body   json.RawMessage `json:"body"`
	Fields []string        `json:"fields,omitempty"`
	IDs    []uint32        `json:"ids,omitempty"`
	Turn   int             `json:"turn"`
	Blocks []string        `json:"blocks"`
}

// chain hashes canonical bytes as the package comment says, on its own.
func (g golden) chain() (hs []block.Hash, size int) {
	var raw []byte
	seed := []byte("kvc-b96-v1")
	seed = binary.LittleEndian.AppendUint64(seed, uint64(len(g.Model)))
	h := xxh3.Hash(append(append(seed, g.Model...), g.Salt...))
	for _, f := range g.Fields {
		kind, payload, _ := strings.Cut(f, " ")
		raw = append(append(append(raw, 0xFF), kind...), payload...)
	}
	if g.IDs != nil {
		h = xxh3.HashStringSeed("ids", h)
	}
	for _, id := range g.IDs {
		raw = binary.LittleEndian.AppendUint32(raw, id)
	}
	for i := 0; i+96 <= len(raw); i += 96 {
		h = xxh3.HashSeed(raw[i:i+96], h)
		hs = append(hs, block.Hash(h))
	}
	return hs, len(raw)
}

// The vectors are normative (wire.md §0): another implementation must agree.
func TestGoldenVectors(t *testing.T) {
	path := filepath.Join("testdata", "golden.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var vectors []golden
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	if *update {
		defer writeGolden(t, path, vectors)
	}
	for i := range vectors {
		g := &vectors[i]
		t.Run(g.Name, func(t *testing.T) {
			body, err := scan.Parse(g.Body, scan.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			c, err := block.Of(g.Route, body, g.Model, nil)
			if err != nil {
				t.Fatal(err)
			}
			want, size := g.chain()
			if !equal(c.Blocks, want) || c.Bytes+4*c.IDs != size || c.IDs != len(g.IDs) || c.Turn != g.Turn {
				t.Errorf("Of = %+v\nwant %v, %d canonical bytes, turn %d", c, want, size, g.Turn)
			}
			if len(c.Blocks) == 0 {
				t.Error("a vector without a full block says nothing")
			}
			if *update {
				g.Blocks = hexes(c.Blocks)
			}
			if strings.Join(g.Blocks, " ") != strings.Join(hexes(c.Blocks), " ") {
				t.Errorf("blocks %v, the vector says %v", hexes(c.Blocks), g.Blocks)
			}
		})
	}
}

func hexes(hs []block.Hash) (out []string) {
	for _, h := range hs {
		out = append(out, h.String())
	}
	return out
}

func equal(a, b []block.Hash) bool {
	return len(a) == len(b) && block.CommonPrefix(a, b) == len(a)
}

func writeGolden(t *testing.T, path string, vectors []golden) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(vectors); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}
