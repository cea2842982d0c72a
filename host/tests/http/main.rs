//! The server from outside, over HTTP, on a tiny random model.

mod bad_input;
mod basics;
mod openings;
mod operators;
mod policies;
#[path = "../server/mod.rs"]
mod server;
