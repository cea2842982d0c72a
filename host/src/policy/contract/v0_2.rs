//! The newest contract, `wit/trial/policy.wit`, as Rust types and traits: the one that the host speaks. Its imports
//! are `policy/imports.rs`.

wasmtime::component::bindgen!({
    path: "../wit/trial",
    world: "policy",
    imports: {
        default: trappable,
        "forkpoint:policy/engine.decide": async | trappable,
        "forkpoint:policy/engine.generate": async | trappable,
        "forkpoint:policy/engine.[method]session.fork": async | trappable,
        "forkpoint:policy/engine.[method]session.append": async | trappable,
        "forkpoint:policy/engine.[method]session.usage": async | trappable,
    },
    exports: { default: async },
    with: { "forkpoint:policy/engine.session": crate::policy::guest::Place },
    trappable_error_type: { "forkpoint:policy/engine.failure" => crate::policy::guest::Refusal },
});

pub(in crate::policy) use self::forkpoint::policy::{dispatch, engine, host, types};
