package sidecar

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvc-dev/kvc/router/kvc"
)

// The journal is one file, the whole ledger, replaced by write and rename soon
// after every change. It serves a sidecar that restarts beside a living engine,
// so it is bound to that engine's incarnation, and it is not synced: the page
// cache survives a process, and what does not survive a node neither does the
// engine. An unreadable one costs a new epoch, never a wrong belief.
const (
	journalName    = "ledger.v1"
	journalPause   = 20 * time.Millisecond // at least, between two writes
	journalDutyInv = 20                    // and at least 20 times as long as the last one took
)

// seqLeap keeps a feed's numbers of one epoch growing over a restart, and keeps
// a follower of the old process from resuming: what happened in between was
// lost with that process.
const seqLeap = 1 << 20

// journalHead is the first line, in JSON; the ledger's snapshot follows in gob.
type journalHead struct {
	Version   int    `json:"version"`
	Worker    string `json:"worker"`
	Epoch     string `json:"epoch"`
	Engine    string `json:"engine"` // identityOf
	StartedMS int64  `json:"started_ms"`
	Seq       uint64 `json:"seq"`
	Size      int    `json:"size"`
	Sum       string `json:"sum"` // xxh3 of what follows
}

// encodeJournal writes both parts.
func encodeJournal(h journalHead, s kvc.Snapshot) ([]byte, error) {
	var body bytes.Buffer
	if err := gob.NewEncoder(&body).Encode(s); err != nil {
		return nil, fmt.Errorf("encode journal: %w", err)
	}
	h.Version, h.Size, h.Sum = 1, body.Len(), sum(body.Bytes())
	head, err := json.Marshal(h)
	if err != nil {
		return nil, fmt.Errorf("encode journal: %w", err)
	}
	return append(append(head, '\n'), body.Bytes()...), nil
}

// decodeJournal reads what encodeJournal wrote, and nothing else.
func decodeJournal(data []byte) (h journalHead, s kvc.Snapshot, err error) {
	head, body, ok := bytes.Cut(data, []byte("\n"))
	if !ok {
		return h, s, errors.New("journal: no header line")
	}
	if err := json.Unmarshal(head, &h); err != nil {
		return h, s, fmt.Errorf("journal header: %w", err)
	}
	if h.Version != 1 || h.Size != len(body) || h.Sum != sum(body) {
		return h, s, errors.New("journal: version, size or checksum differ")
	}
	if err := gob.NewDecoder(bytes.NewReader(body)).Decode(&s); err != nil {
		return h, s, fmt.Errorf("journal body: %w", err)
	}
	return h, s, nil
}

func sum(b []byte) string { return fmt.Sprintf("%016x", xxh3.Hash(b)) }

// restored says what a journal was worth.
type restored struct {
	ok     bool   // the ledger is filled, epoch and seq go on
	served bool   // a sidecar served this engine before us, whatever is left of what it knew
	seq    uint64 // where the feed goes on
}

// restore fills l from the journal when it was written about this very engine,
// and takes over its epoch.
func (s *Sidecar) restore(inc *incarnation, l *kvc.Ledger) restored {
	if s.cfg.JournalDir == "" {
		return restored{}
	}
	data, err := os.ReadFile(filepath.Join(s.cfg.JournalDir, journalName))
	if errors.Is(err, fs.ErrNotExist) {
		return restored{}
	}
	var h journalHead
	var snap kvc.Snapshot
	if err == nil {
		h, snap, err = decodeJournal(data)
	}
	if err == nil && (h.Worker != s.cfg.Worker || h.Engine != inc.identity) {
		return restored{} // of an engine before this one
	}
	if err == nil {
		err = l.Restore(snap)
	}
	if err != nil {
		s.metrics.journal.WithLabelValues("unreadable").Inc()
		s.cfg.Log.Warn("journal unreadable; starting empty under a new epoch", "error", err)
		return restored{served: true}
	}
	inc.epoch, inc.startedMS = h.Epoch, h.StartedMS
	return restored{ok: true, served: true, seq: h.Seq + seqLeap}
}

// keepJournal writes after changes, never faster than the disk likes it.
func (s *Sidecar) keepJournal(ctx context.Context) {
	if s.cfg.JournalDir == "" {
		return
	}
	for {
		select {
		case <-ctx.Done():
			s.writeJournal()
			return
		case <-s.book.dirty:
		}
		started := time.Now()
		s.writeJournal()
		pause := max(journalPause, journalDutyInv*time.Since(started))
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// writeJournal replaces the file. A failure is counted and tried again with the
// next change; the sidecar serves on without.
func (s *Sidecar) writeJournal() {
	h, snap, ok := s.book.durable(s.cfg.Worker)
	if !ok {
		return
	}
	data, err := encodeJournal(h, snap)
	if err == nil {
		err = replaceFile(filepath.Join(s.cfg.JournalDir, journalName), data)
	}
	if err != nil {
		s.metrics.journal.WithLabelValues("error").Inc()
		s.cfg.Log.Warn("write journal", "error", err)
		return
	}
	s.metrics.journal.WithLabelValues("ok").Inc()
}

// durable copies what the journal holds, at one moment.
func (b *book) durable(worker string) (h journalHead, s kvc.Snapshot, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.l == nil {
		return h, s, false
	}
	h = journalHead{
		Worker: worker, Epoch: b.inc.epoch, Engine: b.inc.identity, StartedMS: b.inc.startedMS, Seq: b.out.Seq(),
	}
	return h, b.l.Snapshot(), true
}

func replaceFile(path string, data []byte) error {
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
