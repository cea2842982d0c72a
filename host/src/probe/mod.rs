//! Probes of a server's policies, and the tools to fit and judge them.

pub(crate) mod judge;
pub(crate) mod shelf;
pub(crate) mod shipped;

pub use shelf::{ProbeState, ProbeStatus};
