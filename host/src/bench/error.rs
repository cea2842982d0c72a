//! Why a bench did not come to its end.

/// Why a bench did not come to its end. Each message names the side that it is about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A peer is not there.
    #[error("the peer {side} at {url} does not answer: {error}; start it first, or leave out --against")]
    Unreachable {
        /// Its name in the table.
        side: String,
        /// Where it was looked for.
        url: String,
        /// What the connection said.
        error: String,
    },
    /// A call broke off.
    #[error("{side}: {path} broke off: {error}")]
    Call {
        /// Who was called.
        side: String,
        /// The route.
        path: String,
        /// What the connection said.
        error: String,
    },
    /// A call was refused.
    #[error("{side}: {path} answered {status}: {body}")]
    Status {
        /// Who was called.
        side: String,
        /// The route.
        path: String,
        /// The HTTP status.
        status: u16,
        /// The answer's first characters.
        body: String,
    },
    /// An answer is not what was asked for, so that its time would measure something else.
    #[error("{side}: {what}")]
    Answer {
        /// Who answered.
        side: String,
        /// What was expected and what came.
        what: String,
    },
    /// What is asked for cannot be measured here.
    #[error("{0}")]
    Unfit(String),
    /// Forkpoint's own server did not start.
    #[error(transparent)]
    Serve(#[from] crate::serve::ServeError),
    /// The engine, asked in process, refused.
    #[error("the engine: {0}")]
    Engine(#[from] forkpoint_engine::EngineError),
    /// The checkpoint cannot be opened.
    #[error("cannot open the model: {0}")]
    Checkpoint(#[from] forkpoint_engine::load::LoadError),
    /// The results cannot be written.
    #[error("cannot write {path}: {error}")]
    Write {
        /// Where to.
        path: String,
        /// The system's reason.
        error: std::io::Error,
    },
}

impl BenchError {
    /// The message, where it stands beside the side's name already.
    pub(super) fn without_side(&self) -> String {
        let text = self.to_string();
        match self {
            Self::Call { side, .. } | Self::Status { side, .. } | Self::Answer { side, .. } => {
                text.strip_prefix(&format!("{side}: ")).map_or(text.clone(), str::to_owned)
            }
            _ => text,
        }
    }
}

impl From<crate::models::ModelError> for BenchError {
    fn from(error: crate::models::ModelError) -> Self {
        Self::Serve(error.into())
    }
}
