package replay

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvc-dev/kvc/router/trace"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// request is what the fake server saw.
type request struct {
	Session  string
	Auth     string
	Model    string
	Tokens   int
	Messages []struct{ Role, Content string }
	Raw      string
	At       time.Time
}

// fake is an OpenAI-compatible server that answers with as many words as asked.
type fake struct {
	*httptest.Server
	mu    sync.Mutex
	seen  []request
	conns atomic.Int64

	mode   func(n int) string                                  // header by request number, "" = none
	answer func(w http.ResponseWriter, r *http.Request, n int) // nil = stream
	pace   time.Duration                                       // between the chunks
}

func newFake(t *testing.T) *fake {
	t.Helper()
	f := &fake{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"object":"list","data":[{"id":"m1"}]}`)
	})
	mux.HandleFunc("POST /v1/chat/completions", f.chat)
	f.Server = httptest.NewUnstartedServer(mux)
	f.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			f.conns.Add(1)
		}
	}
	f.Start()
	t.Cleanup(f.Close)
	return f
}

func (f *fake) chat(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	var body struct {
		Model    string
		Tokens   int `json:"max_tokens"`
		Messages []struct{ Role, Content string }
	}
	if err := json.Unmarshal(raw, &body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	q := request{Session: r.Header.Get("X-Session-Id"), Auth: r.Header.Get("Authorization"), Model: body.Model,
		Tokens: body.Tokens, Messages: body.Messages, Raw: string(raw), At: time.Now()}
	f.mu.Lock()
	n := len(f.seen)
	f.seen = append(f.seen, q)
	f.mu.Unlock()
	if f.mode != nil {
		w.Header().Set("X-Kvc-Mode", f.mode(n))
		w.Header().Set("X-Kvc-Worker", "decode-0")
		w.Header().Set("X-Kvc-Attempts", "1")
	}
	if f.answer != nil {
		f.answer(w, r, n)
		return
	}
	f.stream(w, q.Tokens, fmt.Sprintf("answer %d;", n))
}

// stream sends tokens words in SGLang's shapes.
func (f *fake) stream(w http.ResponseWriter, tokens int, word string) {
	w.Header().Set("Content-Type", "text/event-stream")
	chunk(w, `{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`)
	for range tokens {
		time.Sleep(f.pace)
		chunk(w, fmt.Sprintf(`{"choices":[{"index":0,"delta":{"content":%q},"finish_reason":null}]}`, word))
	}
	chunk(w, `{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}`)
	chunk(w, fmt.Sprintf(`{"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":%d,`+
		`"prompt_tokens_details":{"cached_tokens":60}}}`, tokens))
	io.WriteString(w, "data: [DONE]\n\n")
}

func chunk(w http.ResponseWriter, data string) {
	io.WriteString(w, "data: "+data+"\n\n")
	w.(http.Flusher).Flush()
}

func (f *fake) requests() []request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]request(nil), f.seen...)
}

func (f *fake) options() Options {
	return Options{Target: Target{URL: f.URL}, Concurrency: 2, TimeScale: 1000, afterFailure: time.Millisecond}
}

// sessions makes n sessions of k short turns each.
func sessions(n, k int) []trace.Session {
	var out []trace.Session
	for i := range n {
		s := trace.Session{ID: fmt.Sprintf("s%d", i)}
		for j := range k {
			s.Turns = append(s.Turns, trace.Record{Session: s.ID, Turn: j, AppendTokens: 5, OutputTokens: 2,
				Think: time.Second})
		}
		out = append(out, s)
	}
	return out
}

func contents(r request) string {
	var parts []string
	for _, m := range r.Messages {
		parts = append(parts, m.Role)
	}
	return strings.Join(parts, " ")
}
