//! Models: one file a shape.

mod llama;

pub use llama::Config;
pub(crate) use llama::{Llama, Step};
