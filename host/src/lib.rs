//! The Forkpoint server: HTTP in front, policies beside the engine, upstreams behind.
//!
//! [`serve`] speaks the OpenAI and TypeSafe wire formats ([`wire`]), [`policy`] runs routing policies as
//! WebAssembly components, [`dispatch`] carries out the plan a policy returned; [`mod@bench`] measures all of it.

pub mod author;
pub mod bench;
pub mod cli;
pub mod config;
mod date;
pub mod dispatch;
pub mod folders;
pub mod guest_tools;
pub mod journal;
pub mod models;
pub mod policy;
pub mod probe;
pub mod serve;
pub mod traces;
pub mod wire;
