;; A component made for a version of the contract that is not served.
(component
  (import "forkpoint:policy/host@9.0.0" (instance $wanted
    (export "config" (func (param "key" u32) (result u32)))))
  (core func $config (canon lower (func $wanted "config")))
  (core module $core
    (import "wanted" "config" (func (param i32) (result i32)))
    (func (export "route") (param i32) (result i32) (call 0 (local.get 0))))
  (core instance $core (instantiate $core (with "wanted" (instance (export "config" (func $config))))))
  (func $route (param "request" u32) (result u32) (canon lift (core func $core "route")))
  (export "route" (func $route)))
