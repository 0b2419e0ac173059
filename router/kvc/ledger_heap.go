package kvc

// ranked is an element of a heap: it knows its order and remembers its place.
type ranked[T any] interface {
	before(T) bool
	// place points at the element's index plus one; 0 means "in no heap".
	place() *int
}

// heap is a binary min-heap whose elements can be removed from the middle.
// container/heap would box every comparison; eviction is hot enough to care.
type heap[T ranked[T]] []T

func (h *heap[T]) push(x T) {
	*h = append(*h, x)
	*x.place() = len(*h)
	h.up(len(*h) - 1)
}

// remove takes x out; an element that is in no heap is left alone.
func (h *heap[T]) remove(x T) {
	i := *x.place() - 1
	if i < 0 {
		return
	}
	last := len(*h) - 1
	h.swap(i, last)
	var none T
	(*h)[last] = none
	*h = (*h)[:last]
	*x.place() = 0
	if i < last {
		h.down(i)
		h.up(i)
	}
}

func (h heap[T]) swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	*h[i].place(), *h[j].place() = i+1, j+1
}

func (h heap[T]) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h[i].before(h[parent]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h heap[T]) down(i int) {
	for {
		least := 2*i + 1
		if least >= len(h) {
			return
		}
		if right := least + 1; right < len(h) && h[right].before(h[least]) {
			least = right
		}
		if !h[least].before(h[i]) {
			return
		}
		h.swap(i, least)
		i = least
	}
}
