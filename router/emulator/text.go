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
	const wordLen = 3
	k := mix(w.state+uint64(i)) % uint64(len(vocabulary)/(wordLen+1)) * (wordLen + 1)
	end := int32(' ')
	if i == w.words-1 {
		end = '.' // a client that trims white space keeps every token
	}
	v := vocabulary[k:]
	return 3<<asciiShift | int32(v[0]) | int32(v[1])<<7 | int32(v[2])<<14 | end<<21
}

// vocabulary is words of three letters, each followed by a space.
const vocabulary = "" +
	"ace act add age aid aim air all and any arc are ark arm art ash ask bag bar bat bay bed bee bet big bit " +
	"box bud bus but buy cab cap car cat cow cry cup cut day dew did dig dog dot dry due ear eat egg elm end " +
	"era eve eye fan far few fig fit fix fly fog for fox fun fur gap gas get gem got had has hat hay hen her " +
	"hid him his hit hop hot how hub hut ice ill ink inn its ivy jam jar jet job joy key kit lab law lay led " +
	"leg let lid lip lit log lot low map mat may men met mix mud mug nap net new nod nor not now nut oak oar " +
	"oat odd off oil old one orb ore our out owl own pad pan paw pay pea pen pie pin pit pot put ram ran raw " +
	"ray red rib rid rim rod row run rye sad sap saw sea see set she shy sit six sky son sow spy sun tan tap " +
	"tar tea ten the tie tin toe ton top toy "

// mix is the finaliser of splitmix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
