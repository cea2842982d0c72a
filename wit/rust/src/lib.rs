//! Routing policies for [Forkpoint](https://github.com/forkpoint/forkpoint) in Rust.
//!
//! A policy is a function from a request, and the session that holds it in the KV cache, to what should be
//! done with it. It asks typed questions about the session on the way; each costs a short fork of the warm
//! cache rather than a prefill.
//!
//! ```
//! use forkpoint_policy::*;
//!
//! #[policy]
//! fn route(request: &Request, session: &Session) -> Result<Routing> {
//!     if request.last_user().is_empty() {
//!         return Ok(reject(400, "nothing-asked", "The last turn of the user is empty."));
//!     }
//!     let [shell, risk] = session.decide([
//!         boolean("Does the last request need a shell?"),
//!         choice("What would it do to this machine?", ["nothing", "change", "destroy"]),
//!     ])?;
//!     if risk.is("destroy") && risk.confidence > 0.8 {
//!         return Ok(reject(403, "shell-risk", "This would destroy data; ask a person."));
//!     }
//!     if shell.yes > 0.5 {
//!         return Ok(generate().mount(["bash"]).because("needs-shell"));
//!     }
//!     Ok(generate().because("plain"))
//! }
//! # fn main() {}
//! ```
//!
//! Build it as a `cdylib` for `wasm32-unknown-unknown` and turn the module into a component with
//! `forkpoint policy componentize`. What a policy is called with, and what its answers mean, is the contract's
//! to say: `wit/policy.wit`. What it returns as an error takes the policy's fallback.

#[allow(missing_docs, reason = "generated from wit/policy.wit; the contract's own comments come along")]
#[doc(hidden)]
pub mod bindings {
    wit_bindgen::generate!({
        path: "../policy.wit",
        world: "policy",
        pub_export_macro: true,
        export_macro_name: "export_policy",
        default_bindings_module: "forkpoint_policy::bindings",
    });
}

mod error;
mod hash;
mod host;
mod outcome;
mod plan;
mod question;
mod request;
mod session;

pub use bindings::forkpoint::policy::dispatch::{Forward, Generation, Plan, Rejection, Routing};
pub use bindings::forkpoint::policy::engine::{
    BooleanSides, ChoiceOption, Completion, Criteria, Failure, Question, Rung, Session, Usage,
};
pub use bindings::forkpoint::policy::types::{Message, Request, Role, Sampling, Tool, ToolCall};
pub use error::{Error, Result};
pub use forkpoint_policy_macros::policy;
pub use hash::stable_hash;
pub use host::{config, config_list, config_or, config_within, debug, error, info, store, warn};
pub use outcome::Outcome;
pub use plan::{ForwardTo, Generate, forward, generate, next, reject, reply};
pub use question::{Answer, boolean, choice, score};

/// Exports a function as the component's `route`: what [`macro@policy`] expands to.
#[macro_export]
macro_rules! export_route {
    ($route:path) => {
        const _: () = {
            struct Component;
            impl $crate::bindings::Guest for Component {
                fn route(
                    request: $crate::Request,
                    session: $crate::Session,
                ) -> ::core::result::Result<$crate::Routing, ::std::string::String> {
                    $crate::route_result($route(&request, &session))
                }
            }
    $crate::bindings::export_policy!(Component with_types_in $crate::bindings);
        };
    };
}

/// What `export_route!` makes of the function's result.
#[doc(hidden)]
pub fn route_result<T: Into<Routing>>(result: Result<T>) -> core::result::Result<Routing, String> {
    result.map(Into::into).map_err(|error| error.to_string())
}
