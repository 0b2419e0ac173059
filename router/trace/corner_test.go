package trace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// gz compresses a text.
func gz(t testing.TB, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.WriteString(w, text); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// In every schema a broken line is named by its number, wherever it stands, and
// blank lines count.
func TestABrokenLineIsNamedInEverySchema(t *testing.T) {
	for _, format := range Formats() {
		good := strings.TrimSpace(sample(t, format))
		n := strings.Count(good, "\n") + 1
		for claim, bad := range map[string]string{
			"no JSON": "hello", "a cut object": `{"s":"a"`, "two objects": "{}{}", "an array": "[]", "a number": "5",
			"text": `"x"`, "null": "null", "an empty object": "{}", "a NUL": "\x00", "a stray comma": `{"s":"a",}`,
		} {
			for _, o := range []Options{{Name: "f"}, {Name: "f", Format: format}} {
				_, err := Decode(strings.NewReader(good+"\n\n"+bad+"\n"+good), o)
				var e *Error
				if !errors.As(err, &e) || e.Line != n+2 || e.Remedy == "" || !strings.HasPrefix(err.Error(), fmt.Sprintf("f:%d: ", n+2)) {
					t.Errorf("%s, %s in line %d: %v", format, claim, n+2, err)
				}
			}
		}
	}
}

// The last line needs no line end; Windows line ends and blank lines are fine.
func TestLineEndsDoNotMatter(t *testing.T) {
	for _, format := range Formats() {
		good := strings.TrimSpace(sample(t, format))
		want, err := Decode(strings.NewReader(good+"\n"), Options{})
		if err != nil {
			t.Fatal(err)
		}
		for claim, text := range map[string]string{
			"no line end":      good,
			"Windows":          strings.ReplaceAll(good, "\n", "\r\n") + "\r\n",
			"blank lines":      "\n \n" + strings.ReplaceAll(good, "\n", "\n\n\t\n") + "\n\n",
			"indented":         "  " + strings.ReplaceAll(good, "\n", "\n  "),
			"blanks at an end": strings.ReplaceAll(good, "\n", " \n") + "   ",
		} {
			got, err := Decode(strings.NewReader(text), Options{})
			if err != nil {
				t.Errorf("%s, %s: %v", format, claim, err)
				continue
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", format, claim, diff)
			}
		}
	}
}

// A download that broke off is an error at every cut, never a shorter trace.
func TestATruncatedGzipIsNeverAShorterTrace(t *testing.T) {
	whole := gz(t, strings.Repeat(strings.TrimSpace(sample(t, Weka))+"\n", 40))
	if _, err := Decode(bytes.NewReader(whole), Options{}); err != nil {
		t.Fatal(err)
	}
	for n := 2; n < len(whole); n++ {
		if tr, err := Decode(bytes.NewReader(whole[:n]), Options{Name: "f.gz"}); err == nil {
			t.Fatalf("%d of %d bytes give %d records", n, len(whole), len(tr.Records))
		} else if !strings.Contains(err.Error(), "f.gz") {
			t.Fatalf("the error does not name the file: %v", err)
		}
	}
}

// A flipped bit is caught by the checksum or before.
func TestADamagedGzipIsRefused(t *testing.T) {
	whole := gz(t, strings.Repeat(strings.TrimSpace(sample(t, Mooncake))+"\n", 20))
	for at := len(whole) / 2; at < len(whole); at += 3 {
		broken := slices.Clone(whole)
		broken[at] ^= 0x10
		if tr, err := Decode(bytes.NewReader(broken), Options{Name: "f"}); err == nil {
			t.Errorf("a flipped bit in byte %d gives %d records", at, len(tr.Records))
		}
	}
}

// gzip -c a b > c is one trace.
func TestConcatenatedGzipIsOneTrace(t *testing.T) {
	text := strings.TrimSpace(sample(t, LMCache)) + "\n"
	want, err := Decode(strings.NewReader(text+text), Options{})
	if err != nil {
		t.Fatal(err)
	}
	got, err := Decode(bytes.NewReader(append(gz(t, text), gz(t, text)...)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-plain +gzip):\n%s", diff)
	}
}

// The bound of a line holds inside a compressed file too: a small bomb is
// refused, not unpacked.
func TestABombOfOneLineIsRefused(t *testing.T) {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.Copy(w, &repeat{' ', maxLineBytes + 1}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := Decode(&b, Options{Name: "f"})
	var e *Error
	if !errors.As(err, &e) || e.Line != 1 || !strings.Contains(e.Msg, "longer than 32 MiB") {
		t.Errorf("error = %v", err)
	}
}

// With a limit nothing after it is read: a broken tail does not matter.
func TestTheLimitStopsBeforeABrokenTail(t *testing.T) {
	for _, format := range Formats() {
		first, _, _ := strings.Cut(strings.TrimSpace(sample(t, format)), "\n")
		tr, err := Decode(strings.NewReader(first+"\nbroken\n"), Options{Limit: 1})
		if err != nil || len(tr.Records) != 1 {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// Members that a schema does not know are ignored: datasets grow columns.
func TestUnknownMembersAreIgnored(t *testing.T) {
	for _, format := range Formats() {
		good := strings.TrimSpace(sample(t, format))
		want, err := Decode(strings.NewReader(good), Options{})
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.SplitSeq(good, "\n") {
			lines = append(lines, strings.Replace(line, "{", `{"x_new":{"deep":[null,1e9]},`, 1))
		}
		got, err := Decode(strings.NewReader(strings.Join(lines, "\n")), Options{})
		if err != nil {
			t.Errorf("%s: %v", format, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", format, diff)
		}
	}
}
