//! What is wrong with a checkpoint.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use forkpoint_kernels::KernelError;

/// Why a checkpoint could not be loaded. Every variant names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The operating system refused the file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// The file ends too early, or a count in it is too large.
    #[error("{}: {what} needs {needs} bytes at byte {at}, but the file has {length}", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What was being read.
        what: String,
        /// Bytes that it needs.
        needs: u64,
        /// Where it starts.
        at: u64,
        /// Length of the file.
        length: u64,
    },
    /// A key, tensor or file that must be there is not.
    #[error("{}: {what} is missing", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// The key, tensor or file.
        what: String,
    },
    /// A value that cannot be right.
    #[error("{}: {what} must be {expected}, got {got}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The key, tensor or field.
        what: String,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A valid checkpoint that this engine cannot run.
    #[error("{}: {what} {got} is not supported; supported: {supported}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Which choice: "architecture", "pre-tokenizer", "type of tensor blk.0.attn_q.weight".
        what: String,
        /// What the file asks for.
        got: String,
        /// What would work.
        supported: String,
    },
    /// The bytes of a tensor do not make up the matrix that was announced.
    #[error("{}: tensor {tensor}: {source}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's canonical name.
        tensor: String,
        /// What is wrong with it.
        source: KernelError,
    },
}

/// The file that is being read, to make errors that name it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At<'a>(pub(crate) &'a Path);

impl At<'_> {
    /// Wraps an error of the operating system.
    pub(crate) fn io(self, source: std::io::Error) -> LoadError {
        LoadError::Io { path: self.0.into(), source }
    }

    /// Something that must be there is not.
    pub(crate) fn missing(self, what: impl Display) -> LoadError {
        LoadError::Missing { path: self.0.into(), what: what.to_string() }
    }

    /// A value that cannot be right.
    pub(crate) fn invalid(self, what: impl Display, expected: impl Display, got: impl Display) -> LoadError {
        LoadError::Invalid {
            path: self.0.into(),
            what: what.to_string(),
            expected: expected.to_string(),
            got: shortened(&got.to_string()),
        }
    }

    /// A choice that this engine does not know.
    pub(crate) fn unsupported(
        self,
        what: impl Display,
        got: impl Display,
        supported: impl Display,
    ) -> LoadError {
        LoadError::Unsupported {
            path: self.0.into(),
            what: what.to_string(),
            got: shortened(&got.to_string()),
            supported: supported.to_string(),
        }
    }
}

/// What a file says, cut to a length that a log line can bear.
fn shortened(text: &str) -> String {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}
