//! What an engine's handles share, and their side of its thread's commands.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::decide::Labels;
use crate::engine::ModelInfo;
use crate::error::EngineError;
use crate::schedule::{Base, Command, Gauges, Grown, Reach, Readings, SequenceId, Suffix, Write};
use crate::template::ChatTemplate;
use crate::tokenizer::{Known, Tokenizer};

/// What every handle shares.
pub(crate) struct Shared {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) known: Known,
    pub(super) template: Arc<ChatTemplate>,
    pub(super) labels: Result<Labels, String>,
    pub(super) model: ModelInfo,
    pub(super) gauges: Arc<Gauges>,
    pub(super) pages: usize,
    pub(super) ids: AtomicU64,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Shared {
    /// A handle on a session that is about to be made.
    pub(crate) fn resident(self: &Arc<Self>) -> Resident {
        Resident { id: self.ids.fetch_add(1, Relaxed), shared: Arc::clone(self) }
    }

    pub(crate) async fn read(&self, base: Base, suffixes: Vec<Suffix>) -> Result<Readings, EngineError> {
        self.call(|reply| Command::Read { base, suffixes, reply }).await
    }

    pub(crate) fn labels(&self) -> Result<&Labels, EngineError> {
        self.labels
            .as_ref()
            .map_err(|why| EngineError::Invalid(format!("{} answers no questions: {why}", self.model.name)))
    }

    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer.encode(text)
    }

    /// As [`Shared::encode`], sooner where a tenant's text was put into tokens before.
    pub(super) fn encode_known(&self, salt: &str, text: &str) -> Vec<u32> {
        self.tokenizer.encode_known(&self.known, salt, text)
    }

    /// The token that begins a text where the model's files ask for it.
    pub(super) fn bos(&self) -> Option<u32> {
        self.tokenizer.bos().filter(|_| self.tokenizer.add_bos())
    }

    pub(crate) fn starts_with_special(&self, text: &str) -> bool {
        self.tokenizer.starts_with_special(text)
    }

    /// # Errors
    /// Names the first token that the vocabulary does not have.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab = self.model.vocab;
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => {
                Err(EngineError::Invalid(format!("token {token} is not one of the vocabulary's {vocab}")))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn template(&self) -> &ChatTemplate {
        &self.template
    }

    pub(crate) fn eos(&self) -> Arc<[u32]> {
        self.tokenizer.eos().into()
    }

    /// Sends a command and waits for its reply; a thread that is gone is a
    /// state, not a fault.
    pub(super) async fn call<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, EngineError>>) -> Command,
    ) -> Result<T, EngineError> {
        let (sender, receiver) = oneshot::channel();
        self.commands.send(command(sender)).map_err(|_| EngineError::Stopped)?;
        receiver.await.unwrap_or(Err(EngineError::Stopped))
    }
}

/// A handle on a session in the engine's thread; dropping it releases the
/// session and whatever computes it.
#[derive(Debug)]
pub(crate) struct Resident {
    shared: Arc<Shared>,
    id: SequenceId,
}

impl Resident {
    pub(crate) fn id(&self) -> SequenceId {
        self.id
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) async fn grow(&self, base: Base, tokens: Vec<u32>) -> Result<Grown, EngineError> {
        let id = self.id;
        self.shared.call(|reply| Command::Grow { id, base, tokens, reply }).await
    }

    pub(crate) async fn features(
        &self,
        reach: Reach,
        layers: Vec<usize>,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let id = self.id;
        self.shared.call(|reply| Command::Features { id, reach, layers, reply }).await
    }

    pub(crate) async fn write(&self, base: Base, tokens: Vec<u32>, write: Write) -> Result<(), EngineError> {
        let id = self.id;
        self.shared.call(|reply| Command::Write { id, base, tokens, write, reply }).await
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // A thread that is gone holds no pages.
        drop(self.shared.commands.send(Command::Release { id: self.id }));
    }
}
