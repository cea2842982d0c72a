//! What the engine answers instead of a result.

use crate::template::TemplateError;

/// Why a call on the engine or a session did not succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A question or an argument that no state of the engine could answer.
    #[error("{0}")]
    Invalid(String),
    /// The conversation does not fit the model's chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The tokens would outgrow the context window.
    #[error("this needs {tokens} tokens, the context window holds {limit}")]
    TooLong {
        /// Tokens that the session would hold.
        tokens: usize,
        /// Tokens that it may hold.
        limit: usize,
    },
    /// Every page of the KV cache is held by a live session.
    #[error("the KV cache is full: {pages} pages are needed, {free} of {total} can be had")]
    Full {
        /// Pages that the call needs.
        pages: usize,
        /// Pages that are free or evictable.
        free: usize,
        /// Pages in the arena.
        total: usize,
    },
    /// More calls wait than the queue takes.
    #[error("{waiting} calls wait for the engine already, the queue takes {limit}")]
    Busy {
        /// Calls that wait.
        waiting: usize,
        /// The bound.
        limit: usize,
    },
    /// Hidden states are not kept, or were not yet when this session was opened.
    #[error("no hidden states are kept for this session: it was opened before a probe asked for them")]
    NoHidden,
    /// The device gives no memory for what was asked.
    #[error(transparent)]
    Device(#[from] forkpoint_kernels::KernelError),
    /// The engine stops or has stopped.
    #[error("the engine is shutting down")]
    Stopped,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The checkpoint could not be read or is not supported.
    #[error(transparent)]
    Load(#[from] crate::load::LoadError),
    /// The device cannot hold or run it.
    #[error(transparent)]
    Kernel(#[from] forkpoint_kernels::KernelError),
    /// The memory given to keys and values holds no usable context.
    #[error(
        "--kv-memory of {bytes} bytes holds {pages} pages of {page_bytes} bytes; at least {least} are needed"
    )]
    KvMemory {
        /// Bytes given.
        bytes: u64,
        /// Pages they make.
        pages: usize,
        /// Bytes of a page.
        page_bytes: usize,
        /// Pages that a session needs at least.
        least: usize,
    },
    /// Threads could not be started.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
}
