;; Returns a plan whose reason claims to be almost 4 GiB long.
(module
  (memory (export "memory") 1)
  (global $free (mut i32) (i32.const 1024))
  ;; A bump allocator: takes memory for what the host passes in, and never gives it back.
  (func (export "cabi_realloc") (param $old i32) (param $old-size i32) (param $align i32) (param $size i32) (result i32)
    (local $at i32)
    (local.set $at (i32.and (i32.add (global.get $free) (i32.const 7)) (i32.const -8)))
    (global.set $free (i32.add (local.get $at) (local.get $size)))
    (if (i32.gt_u (global.get $free) (i32.shl (memory.size) (i32.const 16)))
      (then (drop (memory.grow (i32.add (i32.shr_u (local.get $size) (i32.const 16)) (i32.const 1))))))
    (local.get $at))
  ;; result<routing, string>: its case at 0, 1 for an error; then the error's address at 8 and length at 12, or the
  ;; routing: the plan's case at 8 and payload at 16, the reason at 104 and 108, the labels at 112 and 116.
  (func (export "route") (param $request i32) (result i32)
    (i32.store8 (i32.const 136) (i32.const 4))
    (i32.store (i32.const 232) (i32.const 512))
    (i32.store (i32.const 236) (i32.const 0xfffffff0))
    (i32.const 128))
)
