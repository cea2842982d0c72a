;; A component that wants an interface that nobody grants.
(component
  (import "evil:net/http@1.0.0" (instance $wanted
    (export "fetch" (func (param "url" u32) (result u32)))))
  (core func $fetch (canon lower (func $wanted "fetch")))
  (core module $core
    (import "wanted" "fetch" (func (param i32) (result i32)))
    (func (export "route") (param i32) (result i32) (call 0 (local.get 0))))
  (core instance $core (instantiate $core (with "wanted" (instance (export "fetch" (func $fetch))))))
  (func $route (param "request" u32) (result u32) (canon lift (core func $core "route")))
  (export "route" (func $route)))
