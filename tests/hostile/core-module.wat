;; A core module: what `forkpoint policy componentize` turns into a component, and nobody did.
(module
  (memory (export "memory") 1)
  (func (export "route") (param i32) (result i32)
    (unreachable)))
