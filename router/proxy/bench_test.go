package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvc-dev/kvc/router/block"
	"github.com/kvc-dev/kvc/router/fleet"
	"github.com/kvc-dev/kvc/router/telemetry"
)

// cpu is the process's user and system time in nanoseconds.
func cpu() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return float64(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRelay compares what one streamed event costs through the router,
// usage parsing included, with httputil.ReverseProxy and with no proxy at all.
// All ends share the process, so "direct" is the floor; the figure of merit is
// cpu-ns/chunk of relay over that of reverseproxy, at most 1.3. burst writes
// events as fast as it can, so that one read brings many; paced leaves a pause
// between them, so that each is read and flushed alone, as tokens are.
func BenchmarkRelay(b *testing.B) {
	for _, bc := range []struct {
		name   string
		events int
		pause  time.Duration
	}{
		// Long answers, so that what a turn costs once hardly counts.
		{"burst", 20000, 0},
		{"paced", 500, 50 * time.Microsecond},
	} {
		b.Run(bc.name, func(b *testing.B) { benchRelay(b, bc.events, bc.pause) })
	}
}

func benchRelay(b *testing.B, events int, pause time.Duration) {
	var answer [][]byte
	event := chatEvents("token")
	for range events - 3 {
		answer = append(answer, []byte(event[1]))
	}
	answer = append(answer, []byte(event[2]), []byte(event[3]), []byte(event[4]))
	want := len(bytes.Join(answer, nil))
	play := func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "text/event-stream")
		rc := http.NewResponseController(w)
		for _, e := range answer {
			_, _ = w.Write(e)
			_ = rc.Flush()
			if pause > 0 {
				time.Sleep(pause)
			}
		}
	}
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		play(w)
	}))
	defer upstream.Close()
	proxied := httptest.NewServer(reverseProxy(b, upstream.URL))
	defer proxied.Close()

	d := newMockWorker(b, "decode-0", fleet.Decode)
	d.path = "Unified"
	d.feed.Restart(d.hello(), 0)
	d.play = func(l *leg) { play(l.w) }
	p := newPool(b, testOptions(), d)

	for _, bc := range []struct{ name, url string }{
		{"direct", upstream.URL}, {"reverseproxy", proxied.URL}, {"relay", p.srv.URL},
	} {
		b.Run(bc.name, func(b *testing.B) {
			body := []byte(chatBody("bench", true))
			client := &http.Client{Transport: &http.Transport{DisableCompression: true}}
			defer client.CloseIdleConnections()
			buf := make([]byte, 64<<10)
			b.ReportAllocs()
			start := cpu()
			for b.Loop() {
				resp, err := client.Post(bc.url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
				if err != nil {
					b.Fatal(err)
				}
				n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, buf)
				resp.Body.Close()
				if err != nil || int(n) != want {
					b.Fatalf("%d bytes of %d, %v", n, want, err)
				}
			}
			b.ReportMetric((cpu()-start)/float64(b.N*events), "cpu-ns/chunk")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// reverseProxy is the standard library's, given what the relay has: pooled
// buffers, a transport of its own, the body read first.
func reverseProxy(b *testing.B, to string) http.Handler {
	target, err := url.Parse(to)
	if err != nil {
		b.Fatal(err)
	}
	tr := newTransport(telemetry.NewRouter(), "bench", time.Second)
	b.Cleanup(tr.CloseIdleConnections)
	return &httputil.ReverseProxy{FlushInterval: -1, BufferPool: &benchPool{}, Transport: tr,
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			body, err := io.ReadAll(r.In.Body)
			if err != nil {
				b.Error(err)
			}
			r.Out.Body = io.NopCloser(bytes.NewReader(body))
		}}
}

// benchPool gives ReverseProxy what the relay has: buffers to use again.
type benchPool struct{ pool sync.Pool }

func (p *benchPool) Get() []byte {
	if b, ok := p.pool.Get().([]byte); ok {
		return b
	}
	return make([]byte, relayBuffer)
}

func (p *benchPool) Put(b []byte) { p.pool.Put(b) } //nolint:staticcheck // SA6002: the interface takes a slice

// BenchmarkAccept is the way of a 400 KB turn from its first byte to its place.
func BenchmarkAccept(b *testing.B) {
	p := New(testOptions())
	defer p.Close()
	p.Apply(&fleet.File{Version: 1, Pool: fleet.Pool{Namespace: "n", Name: "p", Model: "m", Aliases: []string{"alias"}}})
	for _, model := range []string{"m", "alias"} {
		body := fmt.Appendf(nil, `{"model":"%s","messages":[{"role":"user","content":"%s"}]}`, model, bytes.Repeat([]byte("word "), 80000))
		b.Run(model, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				w := httptest.NewRecorder()
				r := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", bytes.NewReader(body))
				t := &turn{proxy: p, w: w, r: r}
				if refuse := t.accept(block.Chat); refuse != nil {
					b.Fatal(refuse.message)
				}
				t.understandSession()
				t.prompt.body.release()
			}
		})
	}
}
