// Package types holds what Go lacks and the contract has: the names are those that the generated bindings use.
package types

// What an option's tag may be.
const (
	OptionNone = 0
	OptionSome = 1
)

// Option is a value or nothing; the zero value is nothing.
type Option[T any] struct {
	tag   uint8
	value T
}

// None is nothing.
func None[T any]() Option[T] { return Option[T]{} }

// Some is a value.
func Some[T any](value T) Option[T] { return Option[T]{OptionSome, value} }

// Tag says which of the two it is.
func (o Option[T]) Tag() uint8 { return o.tag }

// IsSome says whether there is a value.
func (o Option[T]) IsSome() bool { return o.tag == OptionSome }

// Some is the value; without one it panics.
func (o Option[T]) Some() T {
	if o.tag != OptionSome {
		panic("an option without a value was read")
	}
	return o.value
}

// SomeOr is the value, or another one.
func (o Option[T]) SomeOr(otherwise T) T {
	if o.tag != OptionSome {
		return otherwise
	}
	return o.value
}

// What a result's tag may be.
const (
	ResultOk  = 0
	ResultErr = 1
)

// Result is a value or why there is none.
type Result[T any, E any] struct {
	tag   uint8
	value T
	cause E
}

// Ok is a value.
func Ok[T any, E any](value T) Result[T, E] { return Result[T, E]{tag: ResultOk, value: value} }

// Err says why there is no value.
func Err[T any, E any](cause E) Result[T, E] { return Result[T, E]{tag: ResultErr, cause: cause} }

// Tag says which of the two it is.
func (r Result[T, E]) Tag() uint8 { return r.tag }

// IsErr says whether there is no value.
func (r Result[T, E]) IsErr() bool { return r.tag == ResultErr }

// Ok is the value; without one it panics.
func (r Result[T, E]) Ok() T {
	if r.tag != ResultOk {
		panic("a result without a value was read")
	}
	return r.value
}

// Err is why there is no value; with one it panics.
func (r Result[T, E]) Err() E {
	if r.tag != ResultErr {
		panic("a result without an error was read")
	}
	return r.cause
}

// Tuple2 is a pair.
type Tuple2[T0 any, T1 any] struct {
	F0 T0
	F1 T1
}

// Unit is what a function gives back that gives nothing back.
type Unit struct{}
