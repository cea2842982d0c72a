// Package runtime gives the generated bindings memory and handles. The names are those that they use.
package runtime

import (
	"runtime"
	"unsafe"
)

// Handle is a resource of the host, owned until it is taken.
type Handle struct{ value int32 }

// MakeHandle owns a handle.
func MakeHandle(value int32) *Handle { return &Handle{value} }

// Use is the handle, which stays owned.
func (h *Handle) Use() int32 {
	if h.value == 0 {
		panic("a resource was used after it was given away")
	}
	return h.value
}

// Take is the handle, which is owned no more.
func (h *Handle) Take() int32 {
	value := h.Use()
	h.value = 0
	return value
}

// TakeOrNil is the handle, or 0 where it was taken before.
func (h *Handle) TakeOrNil() int32 {
	value := h.value
	h.value = 0
	return value
}

// Set owns a handle where none is owned.
func (h *Handle) Set(value int32) {
	if h.value != 0 {
		panic("a resource was given where there is one already")
	}
	h.value = value
}

// Allocate is memory that stays where it is until `pinner` lets go of it.
func Allocate(pinner *runtime.Pinner, size, align uintptr) unsafe.Pointer {
	if size == 0 {
		return nil
	}
	// Go aligns words to 8 bytes, and the contract asks for no more.
	if align > 8 {
		panic("memory aligned to more than 8 bytes was asked for")
	}
	pointer := unsafe.Pointer(unsafe.SliceData(make([]uint64, (size+7)/8)))
	pinner.Pin(pointer)
	return pointer
}

// What the host lowers.
var lowered runtime.Pinner

// Unpin lets go of what the host lowered, which the bindings have read.
func Unpin() { lowered.Unpin() }

//go:wasmexport cabi_realloc
func realloc(old unsafe.Pointer, oldSize, align, size uintptr) unsafe.Pointer {
	pointer := Allocate(&lowered, size, align)
	if old != nil && oldSize > 0 {
		copy(unsafe.Slice((*byte)(pointer), size), unsafe.Slice((*byte)(old), oldSize))
	}
	return pointer
}
