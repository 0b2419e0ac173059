package emulator

// writer produces the text of one sequence: plain ASCII words, a function of
// the seed, the prompt and the sample number alone. Every token is a whole
// four-byte piece, so an answer sent back as an assistant message is tokenised
// into the ids that were generated.
type writer struct {
	state uint64
	words int  // tokens that carry text
	stop  bool // an end token follows the words
}

// newWriter returns the writer of one answer; plan sets its length.
func newWriter(seed uint64, prompt []int32, sample int) writer {
	h := mix(seed ^ 0x9e3779b97f4a7c15)
	for _, id := range prompt {
		h = (h ^ uint64(uint32(id))) * 0x9e3779b97f4a7c15
		h ^= h >> 32
	}
	return writer{state: mix(h + uint64(sample)*0xbf58476d1ce4e5b9)}
}

// Lengths drawn when the model may stop by itself.
const (
	shortestStop = 32
	longestStop  = 512
)

// plan sets the length: at most limit tokens. With ignoreEOS it is exactly
// limit; otherwise the text may stop earlier, at a length drawn from the prompt
// but not below least.
func (w *writer) plan(limit, least int, ignoreEOS bool) {
	w.words, w.stop = limit, false
	if ignoreEOS {
		return
	}
	drawn := max(shortestStop+int(w.state%(longestStop-shortestStop)), least)
	if drawn <= limit {
		w.words, w.stop = drawn-1, true
	}
}

// total is the number of tokens, the end token included.
func (w *writer) total() int {
	if w.stop {
		return w.words + 1
	}
	return w.words
}

// token returns the i-th token, from 0.
func (w *writer) token(i int) int32 {
	if w.stop && i >= w.words {
		return tokEnd
	}
	const consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
	r := mix(w.state + uint64(i))
	pick := func(s string) int32 {
		c := s[r%uint64(len(s))]
		r /= uint64(len(s))
		return int32(c)
	}
	end := int32(' ')
	if i == w.words-1 {
		end = '.' // a client that trims white space keeps every token
	}
	return 3<<asciiShift | pick(consonants) | pick(vowels)<<7 | pick(consonants)<<14 | end<<21
}

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
