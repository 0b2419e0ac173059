package sidecar

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/kvc"
)

// crash ends a sidecar the hard way: what is on disk now is all that the next
// one finds. The journal is copied before the orderly end writes it again.
func crash(t *testing.T, r *rig, dir string) string {
	t.Helper()
	path := filepath.Join(dir, journalName)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("no journal at the crash: %v", err)
	}
	r.stop()
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// journalled waits until the journal holds the session.
func journalled(t *testing.T, dir string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		data, err := os.ReadFile(filepath.Join(dir, journalName))
		if err == nil {
			if _, snap, err := decodeJournal(data); err == nil && len(snap.Sessions) == 1 && snap.Sessions[0].Active == 0 {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the session is not journalled: %v", err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func TestRestartKeepsEpochAndResidency(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t)
	journal := func(c *Config) { c.JournalDir = dir }
	r := startRig(t, e, journal).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	before := r.quiet()
	journalled(t, dir)
	crash(t, r, dir)

	r = startRig(t, e, journal).ready()
	after := r.s.status()
	if after.Epoch != before.Epoch || after.Used != before.Used || after.Sessions != 1 {
		t.Errorf("after the restart %+v, want epoch and residency of %+v", after, before)
	}
	if after.Seq < before.Seq+1000 {
		t.Errorf("seq %d after %d: a follower of the old process could resume", after.Seq, before.Seq)
	}
	if v := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false)).verdict(t); v.Mode != "direct" {
		t.Errorf("next turn %+v, want direct", v)
	}
	r.quiet()
}

func TestJournalThatCannotBeTrusted(t *testing.T) {
	cases := map[string]struct {
		damage func(t *testing.T, path string, e *engine)
		suffix bool // the epoch is marked with the sidecar's start
	}{
		"corrupt: empty, and a new epoch": {func(t *testing.T, path string, _ *engine) {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			data[len(data)-1] ^= 1
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
		}, true},
		"truncated: empty, and a new epoch": {func(t *testing.T, path string, _ *engine) {
			if err := os.Truncate(path, 100); err != nil {
				t.Fatal(err)
			}
		}, true},
		"gone: empty, and a new epoch": {func(t *testing.T, path string, _ *engine) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}, true},
		"of an engine that restarted since: empty": {func(_ *testing.T, _ string, e *engine) {
			e.set(func() { e.info["startup_time"] = 1500000000.0 })
		}, true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			e := newEngine(t)
			e.info["startup_time"] = 1600000000.0 // long before the sidecar
			journal := func(c *Config) { c.JournalDir = dir }
			r := startRig(t, e, journal).ready()
			r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
			before := r.quiet()
			journalled(t, dir)
			tc.damage(t, crash(t, r, dir), e)

			r = startRig(t, e, journal).ready()
			after := r.s.status()
			if after.Used != 0 || after.Sessions != 0 || after.Epoch == before.Epoch {
				t.Errorf("after %+v, before %+v; want an empty ledger under another epoch", after, before)
			}
			if marked := strings.Count(after.Epoch, "/") == 2; marked != tc.suffix {
				t.Errorf("epoch %q, marked %t, want %t", after.Epoch, marked, tc.suffix)
			}
			if v := r.send(t.Context(), ask(session, 1), chatPath, chat(1, false)).verdict(t); v.Mode != "reseed" {
				t.Errorf("next turn %+v, want a reseed", v)
			}
			r.quiet()
		})
	}
}

// An engine that started after us had no sidecar before us.
func TestPlainEpochForAnEngineThatStartedLater(t *testing.T) {
	r := newRig(t).ready()
	if s := r.s.status(); s.Epoch != "uid-1/1999999999500" || s.Engine.StartedMS != 1999999999500 {
		t.Errorf("epoch %q, started %d", s.Epoch, s.Engine.StartedMS)
	}
}

// Releases that give a duration as startup_time still have an identity.
func TestJournalWithoutAbsoluteStart(t *testing.T) {
	dir := t.TempDir()
	e := newEngine(t)
	e.info["startup_time"] = 37.25
	journal := func(c *Config) { c.JournalDir = dir }
	r := startRig(t, e, journal).ready()
	r.send(t.Context(), ask(session, 0), chatPath, chat(0, false))
	before := r.quiet()
	journalled(t, dir)
	crash(t, r, dir)
	r = startRig(t, e, journal).ready()
	if after := r.s.status(); after.Epoch != before.Epoch || after.Sessions != 1 {
		t.Errorf("after %+v, before %+v; want the same incarnation", after, before)
	}
}

func TestJournalFailureIsCountedOnly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "missing")
	r := newRig(t, func(c *Config) { c.JournalDir = dir }).ready()
	if a := r.send(t.Context(), ask(session, 0), chatPath, chat(0, false)); a.status != 200 {
		t.Errorf("status %d without a journal", a.status)
	}
	r.until("counted", func(admission.SidecarStatus) bool {
		return r.metric("kvc_sidecar_journal_total", "result", "error") > 0
	})
}

func TestJournalRoundTrip(t *testing.T) {
	h := journalHead{Worker: "w", Epoch: "w/1", Engine: "x", StartedMS: 1, Seq: 9}
	s := kvc.Snapshot{
		Sessions: []kvc.SessionInfo{{Key: session, Lineage: session, Tail: 5, Blocks: 2, LastUse: time.UnixMilli(5).UTC()}},
		Blocks:   []kvc.OwnedBlocks{{Owner: session, Blocks: []block.Hash{4, 5}}}, State: []byte{1, 2},
	}
	data, err := encodeJournal(h, s)
	if err != nil {
		t.Fatal(err)
	}
	gotHead, got, err := decodeJournal(data)
	if err != nil {
		t.Fatal(err)
	}
	gotHead.Version, gotHead.Size, gotHead.Sum = 0, 0, ""
	if d := cmp.Diff(h, gotHead) + cmp.Diff(s, got); d != "" {
		t.Errorf("round trip: %s", d)
	}
	for i := range data {
		bad := bytes.Clone(data)
		bad[i] ^= 0x41
		if _, back, err := decodeJournal(bad); err == nil && cmp.Diff(s, back) != "" {
			t.Fatalf("a flipped byte at %d changed the ledger unnoticed", i)
		}
	}
}

func FuzzJournal(f *testing.F) {
	data, err := encodeJournal(journalHead{Worker: "w"}, kvc.Snapshot{State: []byte("x")})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add([]byte("{\"version\":1,\"size\":0,\"sum\":\"" + sum(nil) + "\"}\n"))
	f.Fuzz(func(_ *testing.T, b []byte) {
		if _, s, err := decodeJournal(b); err == nil {
			l := kvc.NewLedger(kvc.LedgerConfig{CapacityTokens: 1000, Params: kvc.Corrected(), DirectPath: kvc.Unified})
			_ = l.Restore(s)
		}
	})
}
