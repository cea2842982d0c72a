;; Has the host put the request outside its memory.
(module
  (memory (export "memory") 1)
  (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (i32.const 0x7fff0000))
  (func (export "route") (param $request i32) (result i32)
    (i32.const 0))
)
