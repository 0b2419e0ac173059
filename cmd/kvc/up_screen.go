package main

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// screen shows a table that is redrawn in place on a terminal, and one line per
// worker that changed anywhere else, so that a log stays readable. Events that
// are written to it appear above the table.
type screen struct {
	mu    sync.Mutex
	out   io.Writer
	live  bool // a terminal
	width int  // of the terminal, in columns; 0 = unknown
	lines int  // of the table that is on the screen now

	said    map[string]string // by worker: what was last said of it
	summary time.Time         // when load was last said
	now     func() time.Time
}

func newScreen(out io.Writer) *screen {
	s := &screen{out: out, said: map[string]string{}, now: time.Now}
	if f, ok := out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		s.live = true
		if w, _, err := term.GetSize(int(f.Fd())); err == nil {
			s.width = w
		}
	}
	return s
}

// Write prints an event (the log's records come this way).
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
	return s.out.Write(p)
}

func (s *screen) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(s, format, args...) // nobody is left to tell when the terminal is gone
}

// clear takes the table off the screen.
func (s *screen) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.erase()
}

// erase moves back over the table and wipes it; the mutex is held.
func (s *screen) erase() {
	if s.lines > 0 {
		_, _ = fmt.Fprintf(s.out, "\x1b[%dA\x1b[J", s.lines)
		s.lines = 0
	}
}

// show draws the rows.
func (s *screen) show(rows []row) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.live {
		s.say(rows)
		return
	}
	text := tableOf(rows, s.width)
	s.erase()
	_, _ = io.WriteString(s.out, text)
	s.lines = strings.Count(text, "\n")
}

// say prints a line for each worker whose state changed, and one for every
// worker from time to time.
func (s *screen) say(rows []row) {
	const every = 10 * time.Second
	now := s.now()
	all := now.Sub(s.summary) >= every
	if all {
		s.summary = now
	}
	var b bytes.Buffer
	for _, r := range rows {
		line := r.line()
		if r.state != s.said[r.name] || all && line != s.said[r.name+"/line"] {
			fmt.Fprintf(&b, "%s %s\n", now.Format(time.TimeOnly), line)
			s.said[r.name], s.said[r.name+"/line"] = r.state, line
		}
	}
	_, _ = s.out.Write(b.Bytes())
}

// newEventLog writes records for people who watch: the time of day, no level.
func newEventLog(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			switch a.Key {
			case slog.LevelKey:
				return slog.Attr{}
			case slog.TimeKey:
				a.Value = slog.StringValue(a.Value.Time().Format(time.TimeOnly))
			}
			return a
		},
	}))
}
