package proxy

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/klauspost/compress/zstd"
)

const (
	firstBuffer = 64 << 10         // what a body gets before it has shown its length
	pooledMost  = 4 << 20          // larger buffers are left to the collector
	bodyStall   = 30 * time.Second // a client that sends nothing for so long has left (T3)
)

// shared is a body that several legs read, each from its start. Its buffers go
// back to the pool when the last reader has closed: a transport may read on
// after its round trip returned.
type shared struct {
	b    []byte
	bufs [2]*bytes.Buffer // the pooled memory behind b, nil when there is none
	pool *sync.Pool
	refs atomic.Int32
}

func (s *shared) release() {
	if s.refs.Add(-1) != 0 {
		return
	}
	for _, b := range s.bufs {
		if b != nil && b.Cap() <= pooledMost {
			b.Reset()
			s.pool.Put(b)
		}
	}
}

// reader returns a request body over the shared bytes.
func (s *shared) reader() io.ReadCloser {
	s.refs.Add(1)
	return &sharedReader{Reader: bytes.NewReader(s.b), s: s}
}

type sharedReader struct {
	*bytes.Reader
	s    *shared
	once sync.Once
}

func (r *sharedReader) Close() error {
	r.once.Do(r.s.release)
	return nil
}

// WriteTo hides bytes.Reader's from io.Copy's fast path only in name: the
// transport uses it, and one large write is what we want.
func (r *sharedReader) WriteTo(w io.Writer) (int64, error) { return r.Reader.WriteTo(w) }

func (p *Proxy) buffer() *bytes.Buffer {
	if b, ok := p.bufs.Get().(*bytes.Buffer); ok {
		return b
	}
	return new(bytes.Buffer)
}

// readBody reads a request's body, decoded (R24) and bounded before and after
// decoding (R25).
func (p *Proxy) readBody(w http.ResponseWriter, r *http.Request) (*shared, *refusal) {
	limit := p.opt.MaxBody
	if r.ContentLength > limit {
		return nil, tooLarge(limit) // before the first read: an Expect: 100-continue upload never starts (T2)
	}
	src, refuse := decoder(r.Header.Get("Content-Encoding"), &stallReader{
		r: http.MaxBytesReader(w, r.Body, limit), rc: http.NewResponseController(w),
	})
	if refuse != nil {
		return nil, refuse
	}
	defer func() { _ = src.Close() }() // everything wanted has been read by then
	buf := p.buffer()
	err := fill(buf, io.LimitReader(src, limit+1), r.ContentLength)
	s := &shared{b: buf.Bytes(), bufs: [2]*bytes.Buffer{buf}, pool: &p.bufs}
	s.refs.Store(1)
	if refuse := bodyFault(err, int64(buf.Len()), limit); refuse != nil {
		s.release()
		return nil, refuse
	}
	// The server reads on in the background to notice a hang-up; a deadline left
	// behind would look like one.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{})
	p.metrics.Body(buf.Len())
	return s, nil
}

// fill reads src to its end. A claimed length is believed once a first buffer
// has arrived: memory is given to bytes, not to promises.
func fill(buf *bytes.Buffer, src io.Reader, length int64) error {
	buf.Grow(int(min(max(length, 0)+bytes.MinRead, firstBuffer)))
	if length > firstBuffer {
		n, err := io.CopyN(buf, src, firstBuffer-bytes.MinRead)
		if err != nil {
			return noEOF(err)
		}
		buf.Grow(int(length - n + bytes.MinRead))
	}
	_, err := buf.ReadFrom(src)
	return err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return nil // decoding may shorten as well as lengthen
	}
	return err
}

func bodyFault(err error, n, limit int64) *refusal {
	var tooBig *http.MaxBytesError
	var coded *codingError
	switch {
	case errors.As(err, &tooBig) || n > limit:
		return tooLarge(limit)
	case errors.As(err, &coded):
		return &refusal{status: http.StatusBadRequest, reason: reasonCoding, code: "invalid_encoding",
			message: "The request body is not valid " + coded.name + " data."}
	case err != nil:
		return &refusal{status: http.StatusBadRequest, reason: reasonBody, code: "incomplete_body",
			message: "The request body ended early."}
	}
	return nil
}

func tooLarge(limit int64) *refusal {
	return &refusal{status: http.StatusRequestEntityTooLarge, reason: reasonTooLarge, code: "body_too_large",
		message: fmt.Sprintf("The request body is larger than the limit of %d bytes; "+
			"shorten the request, or raise the router's --max-body-bytes.", limit)}
}

// stallReader moves the connection's read deadline along while bytes arrive.
type stallReader struct {
	r  io.ReadCloser
	rc *http.ResponseController
	at time.Time
}

func (s *stallReader) Read(b []byte) (int, error) {
	if now := time.Now(); now.Sub(s.at) > time.Second {
		s.at = now
		_ = s.rc.SetReadDeadline(now.Add(bodyStall)) // unsupported in tests with recorders
	}
	return s.r.Read(b)
}

func (s *stallReader) Close() error { return s.r.Close() }

// codingError marks a body that does not decode.
type codingError struct {
	name string
	err  error
}

func (e *codingError) Error() string { return e.name + ": " + e.err.Error() }
func (e *codingError) Unwrap() error { return e.err }

// decoder undoes a Content-Encoding. Agents compress their large turns.
func decoder(coding string, r io.ReadCloser) (io.ReadCloser, *refusal) {
	switch strings.ToLower(strings.TrimSpace(coding)) {
	case "", "identity":
		return r, nil
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(r)
		return decoded("gzip", z, err, func() { _ = z.Close() }, r)
	case "zstd":
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(32<<20))
		return decoded("zstd", z, err, func() { z.Close() }, r)
	}
	return nil, &refusal{status: http.StatusUnsupportedMediaType, reason: reasonCoding, code: "unsupported_encoding",
		message: "The request's Content-Encoding is not supported; send gzip, zstd or no encoding."}
}

func decoded(name string, z io.Reader, err error, stop func(), r io.ReadCloser) (io.ReadCloser, *refusal) {
	if err != nil {
		return nil, bodyFault(&codingError{name, err}, 0, 1)
	}
	return &decodedBody{name: name, z: z, stop: stop, r: r}, nil
}

type decodedBody struct {
	name string
	z    io.Reader
	stop func()
	r    io.ReadCloser
}

func (d *decodedBody) Read(b []byte) (int, error) {
	n, err := d.z.Read(b)
	var tooBig *http.MaxBytesError
	if err != nil && !errors.Is(err, io.EOF) && !errors.As(err, &tooBig) {
		err = &codingError{d.name, err}
	}
	return n, err
}

func (d *decodedBody) Close() error {
	d.stop()
	return d.r.Close()
}
