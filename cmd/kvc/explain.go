package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/kvc-dev/kvc/router/admission"
	"github.com/kvc-dev/kvc/router/proxy"
)

type explainOptions struct {
	admin   string
	file    string
	session string
	route   string
	json    bool
}

func newExplainCmd() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain [REQUEST-ID]",
		Short: "Tell why a turn went where it went, or where one would go",
		Long: "With a request id (the x-request-id of an answer), explain tells what was asked, refused, run and\n" +
			"retried for that turn. With --file it shows every worker's score for a request body as things stand\n" +
			"now; nothing is sent to a worker.",
		Example: "  kvc explain req-1c0ffee --admin http://127.0.0.1:9301\n" +
			"  kvc explain --file turn.json --session agent-7",
		RunE: func(cmd *cobra.Command, args []string) error { return explain(cmd, o, args) },
	}
	f := cmd.Flags()
	f.StringVar(&o.admin, "admin", "http://127.0.0.1:9301", "the router's admin `URL`; kvc up prints it")
	f.StringVar(&o.file, "file", "", "explain this request body (- = standard input)")
	f.StringVar(&o.session, "session", "", "with --file: the session `id`, as in x-session-id")
	f.StringVar(&o.route, "route", "chat", "with --file: chat, completions or generate")
	f.BoolVar(&o.json, "json", false, "print what the router answers")
	return cmd
}

func explain(cmd *cobra.Command, o explainOptions, args []string) error {
	switch {
	case len(args) > 1:
		return usageError{fmt.Errorf("%d arguments: give one request id", len(args))}
	case (len(args) == 1) == (o.file != ""):
		return usageError{errors.New("give a request id, or --file with a request body")}
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
	defer cancel()
	var out []byte
	var err error
	if len(args) == 1 {
		out, err = explainTurn(ctx, o, args[0])
	} else {
		out, err = explainBody(ctx, o, cmd.InOrStdin())
	}
	if err != nil {
		return err
	}
	_, err = cmd.OutOrStdout().Write(out)
	return err
}

func (o explainOptions) url(key, value string) string {
	return strings.TrimSuffix(o.admin, "/") + admission.PathExplain + "?" + url.Values{key: {value}}.Encode()
}

// explainTurn tells what became of a turn.
func explainTurn(ctx context.Context, o explainOptions, id string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, o.url("request_id", id), nil)
	if err != nil {
		return nil, usageError{fmt.Errorf("--admin: %w", err)}
	}
	var d proxy.Decision
	raw, err := askRouter(req, &d)
	if err != nil || o.json {
		return raw, err
	}
	var b bytes.Buffer
	printDecision(&b, &d)
	return b.Bytes(), nil
}

// explainBody tells where a request would go now.
func explainBody(ctx context.Context, o explainOptions, stdin io.Reader) ([]byte, error) {
	body, err := readBody(o.file, stdin)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.url("route", o.route), bytes.NewReader(body))
	if err != nil {
		return nil, usageError{fmt.Errorf("--admin: %w", err)}
	}
	if o.session != "" {
		req.Header.Set("x-session-id", o.session)
	}
	var x proxy.Explanation
	raw, err := askRouter(req, &x)
	if err != nil || o.json {
		return raw, err
	}
	var b bytes.Buffer
	printExplanation(&b, &x)
	return b.Bytes(), nil
}

func readBody(file string, stdin io.Reader) ([]byte, error) {
	if file == "-" {
		b, err := io.ReadAll(stdin)
		if err != nil {
			return nil, fmt.Errorf("read the request body: %w", err)
		}
		return b, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--file: %w", err)
	}
	return b, nil
}

// askRouter calls the router's admin port; its refusals become sentences.
func askRouter(req *http.Request, into any) ([]byte, error) {
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no router answers at --admin %s://%s: %w; kvc up prints its admin address",
			req.URL.Scheme, req.URL.Host, err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("read the router's answer: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		var e admission.ErrorBody
		if json.Unmarshal(raw, &e) == nil && e.Error.Message != "" {
			return nil, errors.New(e.Error.Message)
		}
		return nil, fmt.Errorf("the router answered %s; is --admin its admin address?", resp.Status)
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return nil, fmt.Errorf("read the router's answer: %w", err)
	}
	return raw, nil
}

// printDecision tells a turn's story, one line a step.
func printDecision(w *bytes.Buffer, d *proxy.Decision) {
	fmt.Fprintf(w, "%s: turn %d of session %s on %s, %s input tokens of which %s are new, %d blocks\n",
		d.RequestID, d.Turn, cmp.Or(string(d.Session), "(none)"), d.Route, tokens(d.Input), tokens(d.Append), d.Blocks)
	for _, e := range d.Events {
		fmt.Fprintf(w, "%9.1f ms  %s\n", e.AtMS, sentence(e))
	}
	if d.Outcome == "" {
		fmt.Fprintln(w, "it is still running")
		return
	}
	fmt.Fprintf(w, "%9.1f ms  ended: %s", d.TookMS, d.Outcome)
	if d.Mode != "" {
		fmt.Fprintf(w, ", %s on %s", d.Mode, d.Worker)
	}
	if d.Reason != "" {
		fmt.Fprintf(w, " (%s)", d.Reason)
	}
	fmt.Fprintf(w, ", attempts %d\n", d.Attempts)
	if u := d.Usage; u != nil {
		fmt.Fprintf(w, "the engine counted %s prompt tokens, %s of them cached, and generated %s\n",
			tokens(u.Prompt), tokens(u.Cached), tokens(u.Completion))
	}
}

func sentence(e proxy.DecisionEvent) string {
	switch e.What {
	case "ask":
		s := fmt.Sprintf("asked %s (%s): %s", e.Worker, e.Way, e.Result)
		if e.Detail != "" {
			s += ", " + e.Detail
		}
		return s
	case "run":
		return fmt.Sprintf("ran %s on %s", e.Detail, e.Worker)
	case "retry":
		return "failed before the first byte: " + e.Detail
	}
	return strings.TrimSpace(e.What + " " + e.Worker + " " + e.Detail)
}

// printExplanation shows every worker's score; the chosen one is starred.
func printExplanation(w *bytes.Buffer, x *proxy.Explanation) {
	fmt.Fprintf(w, "turn %d of session %s (%s), home %s; %d blocks, %d of them shared with other sessions; "+
		"%s input tokens of which %s are new; preset %s\n",
		x.Turn, cmp.Or(string(x.Session), "(none)"), x.Source, cmp.Or(x.HomeName, "(none)"), x.Blocks, x.Shared,
		tokens(x.Input), tokens(x.Append), x.Preset)
	t := table.NewWriter()
	t.SetOutputMirror(w)
	t.SetStyle(table.StyleLight)
	t.AppendHeader(table.Row{
		"", "decode", "resident", "reuse", "sticky", "in flight", "assigned", "rejects", "feed", "why",
	})
	for _, c := range x.Decode {
		t.AppendRow(table.Row{star(c.Chosen), x.Names[string(c.Worker)], c.Resident, c.Reuse, c.Sticky, c.Inflight,
			fmt.Sprintf("%.1f", c.Assigned), c.Rejects, feedWord(c.Trusted), c.Why})
	}
	t.Render()
	if len(x.Prefill) == 0 {
		return
	}
	p := table.NewWriter()
	p.SetOutputMirror(w)
	p.SetStyle(table.StyleLight)
	p.AppendHeader(table.Row{"", "prefill", "tokens to compute", "tokens outstanding", "feed"})
	for _, c := range x.Prefill {
		p.AppendRow(table.Row{star(c.Chosen), x.Names[string(c.Worker)], tokens(c.Uncached), tokens(c.Outstanding),
			feedWord(c.Trusted)})
	}
	p.Render()
}

func star(chosen bool) string {
	if chosen {
		return "*"
	}
	return ""
}

func feedWord(trusted bool) string {
	if trusted {
		return "trusted"
	}
	return "not trusted"
}
