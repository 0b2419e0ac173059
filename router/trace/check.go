package trace

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"
)

// nominalITL and nominalTTFT stand for the recorded service time in schemas
// that have arrivals only, so that the gap between two arrivals can be read as
// service plus idle time. They are what a 32B model on one H100 takes.
const (
	nominalITL  = 20 * time.Millisecond
	nominalTTFT = 400 * time.Millisecond
)

func missing(field string) error {
	return &Error{Field: field, Msg: "is missing", Remedy: "add it or name another format"}
}

func bad(field, format string, args ...any) error {
	return &Error{Field: field, Msg: fmt.Sprintf(format, args...), Remedy: "correct the value"}
}

// tokens checks a required count.
func tokens(field string, n *int64, least int64) (int, error) {
	if n == nil {
		return 0, missing(field)
	}
	if *n < least || *n > maxTokens {
		return 0, bad(field, "%d is outside %d…%d", *n, least, maxTokens)
	}
	return int(*n), nil
}

// seconds checks an optional time. Recordings have times before their start
// where requests were logged out of order.
func seconds(field string, s *float64) (time.Duration, error) {
	if s == nil {
		return 0, nil
	}
	if math.IsNaN(*s) || math.Abs(*s) > maxSecondsSpan {
		return 0, bad(field, "%g is not a number of seconds", *s)
	}
	return time.Duration(*s * float64(time.Second)), nil
}

// name checks a session's name.
func name(field, s string) (string, error) {
	if s == "" {
		return "", missing(field)
	}
	if len(s) > maxNameBytes {
		return "", bad(field, "the name is longer than %d bytes", maxNameBytes)
	}
	return s, nil
}

// runs checks the [first, length] pairs of field h against the length of the prompt.
func runs(pairs [][]int64, s Space, in, blockTokens int) ([]Run, error) {
	out := make([]Run, 0, len(pairs))
	left := (in + blockTokens - 1) / blockTokens
	for i, p := range pairs {
		if len(p) != 2 {
			return nil, bad("h", "entry %d is not a pair [first, length]", i)
		}
		if p[0] < 0 || p[1] <= 0 {
			return nil, bad("h", "entry %d is [%d, %d], want first ≥ 0 and length ≥ 1", i, p[0], p[1])
		}
		if p[1] > int64(left) || p[0] > math.MaxInt64-p[1] {
			return nil, bad("h", "the runs hold more blocks than a prompt of %d tokens", in)
		}
		left -= int(p[1])
		out = append(out, Run{Space: s, First: p[0], Len: int(p[1])})
	}
	return out, nil
}

// ids turns a list of global block ids into runs.
func ids(field string, list []int64, in, blockTokens int) ([]Run, error) {
	if len(list) > (in+blockTokens-1)/blockTokens {
		return nil, bad(field, "%d blocks are more than a prompt of %d tokens has", len(list), in)
	}
	var out []Run
	for i, id := range list {
		if id < 0 {
			return nil, bad(field, "entry %d is %d, want an id ≥ 0", i, id)
		}
		out = appendID(out, Global, id)
	}
	return out, nil
}

// inTime sorts each session's records by time, keeping the sessions in the order
// of their first record, and lets no session start before zero.
func inTime(rs []Record) []Record {
	rank := make(map[string]int)
	start := make(map[string]time.Duration)
	for _, r := range rs {
		if _, ok := rank[r.Session]; !ok {
			rank[r.Session] = len(rank)
		}
		start[r.Session] = min(start[r.Session], r.Time)
	}
	for i := range rs {
		rs[i].Time -= start[rs[i].Session]
	}
	slices.SortStableFunc(rs, func(a, b Record) int {
		return cmp.Or(cmp.Compare(rank[a.Session], rank[b.Session]), cmp.Compare(a.Time, b.Time))
	})
	return rs
}

// openWith makes the first block of a prompt with global ids its system
// message, so that sessions that share it agree on where the message ends.
func openWith(r Record) Record {
	if len(r.Blocks) > 0 {
		r.SharedTokens = min(r.BlockTokens, r.InputTokens)
	}
	return r
}

// complete fills what follows from the order of each session's turns: the turn
// index, the appended tokens, and idle times where the schema has only arrivals.
func complete(rs []Record, idle bool) []Record {
	last := make(map[string]int) // index into rs
	for i := range rs {
		r := &rs[i]
		r.Time = max(0, r.Time)
		j, known := last[r.Session]
		last[r.Session] = i
		if !known {
			r.Turn = 0
			if r.AppendTokens == 0 {
				r.AppendTokens = r.InputTokens
			}
			continue
		}
		prev := &rs[j]
		r.Turn = prev.Turn + 1
		if r.AppendTokens == 0 && r.BlockTokens > 0 {
			r.AppendTokens = max(0, r.InputTokens-r.BlockTokens*commonBlocks(prev.Blocks, r.Blocks))
		}
		if idle {
			service := nominalTTFT + time.Duration(prev.OutputTokens)*nominalITL
			r.Think = max(0, r.Time-prev.Time-service)
		}
	}
	return rs
}
