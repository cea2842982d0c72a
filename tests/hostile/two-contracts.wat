;; A component that mixes two versions of the contract, both of which are served.
(component
  (import "forkpoint:policy/host@0.1.0" (instance $older
    (export "config" (func (param "key" string) (result (option string))))))
  (import "forkpoint:policy/host@0.2.0-trial" (instance $newer
    (export "config" (func (param "key" string) (result (option string))))))
  (core module $core
    (func (export "route") (param i32) (result i32) (local.get 0)))
  (core instance $core (instantiate $core))
  (func $route (param "request" u32) (result u32) (canon lift (core func $core "route")))
  (export "route" (func $route)))
