//! Request and response types of the wire formats, and their errors. Nothing here knows the engine's thread,
//! a policy or a socket: bytes and values in, values out.

pub mod chat;
pub mod completions;
pub mod decisions;
pub mod error;
pub mod sampling;
pub mod sse;
pub mod systemone;
pub mod value;

pub use error::{ApiError, Dialect, Kind};
