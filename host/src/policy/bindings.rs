//! The contract of `wit/policy.wit` as Rust types and traits.

wasmtime::component::bindgen!({
    path: "../wit",
    world: "policy",
    imports: { default: async | trappable },
    exports: { default: async },
    with: { "forkpoint:policy/engine.session": super::guest::Place },
    trappable_error_type: { "forkpoint:policy/engine.failure" => super::guest::Refusal },
});

pub(super) use exports_of_the_contract::*;

/// The generated modules under shorter names.
mod exports_of_the_contract {
    pub(in super::super) use super::forkpoint::policy::{dispatch, engine, host, types};
}
