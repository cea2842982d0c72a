;; A component whose `route` is not the contract's.
(component
  (core module $core
    (func (export "route") (param i32) (result i32) (local.get 0)))
  (core instance $core (instantiate $core))
  (func $route (param "request" u32) (result u32) (canon lift (core func $core "route")))
  (export "route" (func $route)))
