//! What the model made of a session, for a probe to read: the mean of a layer's
//! hidden states over a span of tokens. Prefill left them beside the keys and
//! values, so a reading costs microseconds and no token.

use serde::{Deserialize, Serialize};

use crate::error::EngineError;
use crate::schedule::Reach;
use crate::session::Session;

/// Which tokens of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Span {
    /// All of them.
    Session,
    /// What the last user turn says, the template's marks around it left out.
    LastUser,
    /// Those that came after the session held so many.
    Since(u32),
    /// The last so many; 1 is the tip.
    Last(u32),
}

impl Session {
    /// The mean, over a span, of the hidden states after each of these counts of
    /// blocks: one vector of the model's width a layer. Equal tokens give equal bits,
    /// however they were computed, reused or forked.
    ///
    /// # Errors
    /// [`EngineError::NoHidden`] where [`Engine::keep_hidden`](crate::Engine::keep_hidden)
    /// was not asked for these layers before the session was opened;
    /// [`EngineError::Invalid`] where the span holds no token.
    pub async fn features(&self, span: Span, layers: &[usize]) -> Result<Vec<Vec<f32>>, EngineError> {
        let tokens = self.usage().tokens as usize;
        let reach = match span {
            Span::Session => Reach::Tokens(0..tokens),
            Span::Since(start) => Reach::Tokens((start as usize).min(tokens)..tokens),
            Span::Last(count) => Reach::Last(count as usize),
            Span::LastUser => Reach::Bytes(self.last_user()?),
        };
        self.resident().features(reach, layers.to_vec()).await
    }
}
