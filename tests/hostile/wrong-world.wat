;; A component that exports something else.
(component
  (core module $core
    (func (export "greet") (result i32) (i32.const 1)))
  (core instance $core (instantiate $core))
  (func $greet (result u32) (canon lift (core func $core "greet")))
  (export "greet" (func $greet)))
