package emulator

import (
	"encoding/binary"
	"strconv"
	"unicode/utf8"
)

// A token id packs the bytes it stands for into 31 bits, so that ids can be
// turned back into text without a vocabulary:
//
//	bit 30 clear: 1–4 ASCII bytes, count−1 in bits 28–29, seven bits each
//	bit 30 set:   1–3 bytes of any kind, count in bits 24–25, eight bits each
//	bit 30 set, count 0: a special token, its number in the low bits
const (
	bytesFlag  = 1 << 30
	countShift = 24
	asciiShift = 28
)

// Special tokens of the chat template.
const (
	tokStart = bytesFlag + iota
	tokEnd   // also end of sequence
	tokSystem
	tokUser
	tokAssistant
	tokTool
	tokDeveloper
	tokFunction
	tokTools
	tokToolCall
	tokImage
	tokNext // first unused
)

// specialText is what a special token reads as.
func specialText(id int32) string {
	names := [...]string{
		"<|im_start|>", "<|im_end|>", "system\n", "user\n", "assistant\n", "tool\n",
		"developer\n", "function\n", "<tools>", "<tool_call>", "<|image_pad|>",
	}
	if n := int(id - tokStart); n < len(names) {
		return names[n]
	}
	return "<|" + strconv.Itoa(int(id)) + "|>"
}

// roleToken returns the special token of a role; ok is false for unknown ones.
func roleToken(role string) (id int32, ok bool) {
	switch role {
	case "system":
		return tokSystem, true
	case "user":
		return tokUser, true
	case "assistant":
		return tokAssistant, true
	case "tool":
		return tokTool, true
	case "developer":
		return tokDeveloper, true
	case "function":
		return tokFunction, true
	}
	return 0, false
}

// appendTokens tokenises text and appends the ids to dst. The cut depends on
// nothing but the text from its start, so a longer text begins with the same
// ids, up to the last piece of the shorter one.
func appendTokens(dst []int32, text []byte) []int32 {
	for len(text) >= 4 {
		if w := binary.LittleEndian.Uint32(text); w&0x80808080 == 0 {
			dst = append(dst, int32(3<<asciiShift|w&0x7f|w>>1&0x3f80|w>>2&0x1fc000|w>>3&0xfe00000))
			text = text[4:]
			continue
		}
		dst = append(dst, packBytes(text[:3]))
		text = text[3:]
	}
	if len(text) > 0 {
		dst = append(dst, packTail(text))
	}
	return dst
}

// packTail packs the last one to three bytes of a text.
func packTail(b []byte) int32 {
	id := int32(len(b)-1) << asciiShift
	for i, c := range b {
		if c >= utf8.RuneSelf {
			return packBytes(b)
		}
		id |= int32(c) << (7 * i)
	}
	return id
}

func packBytes(b []byte) int32 {
	id := int32(bytesFlag | len(b)<<countShift)
	for i, c := range b {
		id |= int32(c) << (8 * i)
	}
	return id
}

// appendText appends the bytes that id stands for; special tokens have none.
func appendText(dst []byte, id int32) []byte {
	switch {
	case id < 0 || isSpecial(id):
		return dst
	case id&bytesFlag != 0:
		for i := range id >> countShift & 3 {
			dst = append(dst, byte(id>>(8*i)))
		}
		return dst
	}
	for i := range id>>asciiShift&3 + 1 {
		dst = append(dst, byte(id>>(7*i)&0x7f))
	}
	return dst
}

func isSpecial(id int32) bool { return id&bytesFlag != 0 && id>>countShift&3 == 0 }

// tokensText returns the text of ids, leaving special tokens out.
func tokensText(ids []int32) string {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = appendText(b, id)
	}
	return string(b)
}
