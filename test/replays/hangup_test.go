package replays

import (
	"bufio"
	"net/http"
	"strings"
	"testing"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/kvc"
	"github.com/kvc-dev/kvc/router/trace"
)

// Many clients close the connection at [DONE] instead of reading to the end of
// the body. They have their whole answer, so the session is resident: its next
// turns are Direct, and nothing is taken for a cancelled turn.
func TestClientsThatCloseAtDoneKeepTheirSession(t *testing.T) {
	p := newPool(t, kvc.ConditionalAggregation, 50)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	c := trace.NewConversation("hangup")
	for turn := range 8 {
		messages := c.Turn(trace.Record{Turn: turn, AppendTokens: 2000, OutputTokens: 20})
		body := `{"model":"` + model + `","stream":true,"max_tokens":20,"ignore_eos":true,"messages":[` + string(messages) + `]}`
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, p.router.URL+"/v1/chat/completions",
			strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Session-Id", "hangup")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(resp.Body)
		for lines.Scan() && lines.Text() != "data: [DONE]" {
		}
		resp.Body.Close() // at once: the last chunk of the body may still be on its way
		want := "direct"
		if turn == 0 {
			want = "seed"
		}
		if got := resp.Header.Get(admission.HeaderMode); got != want {
			t.Errorf("turn %d ran as %s, want %s", turn, got, want)
		}
		c.Answer("so be it")
		p.eventually("the turn ended", func() bool {
			for _, w := range p.proxy.Status().Workers {
				if w.InFlight != 0 {
					return false
				}
			}
			return true
		})
	}
}
