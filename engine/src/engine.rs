//! The engine's handle: cheap to clone, usable from any thread.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use forkpoint_kernels::{KvPrecision, cpu::Cpu};

use crate::chat::Conversation;
use crate::decide::Labels;
use crate::error::{EngineError, StartError};
use crate::generate::Sampling;
use crate::kv;
use crate::kv::Purpose;
use crate::load::{Checkpoint, Quantize};
use crate::model::Llama;
use crate::schedule::{Base, Command, Gauges, Limits, Scheduler};
use crate::session::{Session, Usage};
use crate::shared::Shared;
use crate::tokenizer::Known;

/// Pages that a session and a decision on it need at the very least.
const LEAST_PAGES: usize = 8;

/// How an engine is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Threads of the processor; 0 takes as many as there are cores.
    pub threads: usize,
    /// Bytes for keys and values.
    pub kv_memory: u64,
    /// Tokens of prefill that one step computes at most; how many it takes
    /// follows the machine's pace, so that a step lasts about 100 ms.
    pub chunk: usize,
    /// Calls that may wait for the engine.
    pub queue: usize,
    /// How long a prompt waits for pages that live sessions hold.
    pub patience: Duration,
    /// Tokens a session may hold; 0 takes the model's own.
    pub context: usize,
    /// How keys and values are kept.
    pub kv_precision: KvPrecision,
    /// What the matrices of a plain checkpoint are packed to.
    pub quantize: Option<Quantize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: 0,
            kv_memory: 1 << 30,
            chunk: 256,
            queue: 256,
            patience: Duration::from_secs(30),
            context: 0,
            kv_precision: KvPrecision::Bf16,
            quantize: None,
        }
    }
}

/// What is served.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelInfo {
    /// The checkpoint's own name.
    pub name: String,
    /// Its architecture.
    pub architecture: String,
    /// Parameters.
    pub parameters: u64,
    /// Bytes of weights.
    pub bytes: u64,
    /// Tokens a session may hold.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Of what determines the logits.
    pub fingerprint: u128,
    /// What runs it: "avx2, 2 threads".
    pub device: String,
    /// What its matrices were packed to as they were loaded.
    pub quantize: Option<Quantize>,
    /// How keys and values are kept.
    pub kv_precision: KvPrecision,
    /// Bytes of a page, over all layers.
    pub page_bytes: usize,
    /// How its makers recommend to sample it.
    pub sampling: Sampling,
    /// Why this model answers no questions, if so.
    pub decide_unsupported: Option<String>,
}

/// The engine's counters since its start, and its state now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps run.
    pub steps: u64,
    /// Tokens of sessions computed.
    pub prefill_tokens: u64,
    /// Tokens of sessions found resident.
    pub reused_tokens: u64,
    /// Questions answered.
    pub decisions: u64,
    /// Suffix tokens computed for them.
    pub decided_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens computed for the server's own study.
    pub studied_tokens: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Sessions and replies alive.
    pub sessions: u64,
    /// Calls that wait or run.
    pub waiting: u64,
    /// Pages held by live sessions.
    pub pages_held: u64,
    /// Pages kept for reuse.
    pub pages_cached: u64,
    /// Pages in the arena.
    pub pages_total: u64,
    /// Bytes of a page, over all layers.
    pub page_bytes: u64,
    /// Bytes of a page's hidden states; 0 while none are kept.
    pub hidden_page_bytes: u64,
}

/// The engine. Clones share one model; it stops when the last clone, session
/// and stream is gone, or by [`Engine::stop`].
#[derive(Debug, Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    /// Loads a checkpoint (a `.gguf` file or a safetensors folder) and starts
    /// the engine's thread. Blocks while it loads.
    ///
    /// # Errors
    /// When the checkpoint is not supported or does not fit this machine.
    pub fn start(checkpoint: &Path, options: &Options) -> Result<Self, StartError> {
        let mut checkpoint = Checkpoint::open(checkpoint)?;
        if let Some(quantize) = options.quantize {
            checkpoint = checkpoint.quantized(quantize)?;
        }
        let config = &checkpoint.config;
        let context = match options.context {
            0 => config.context,
            wanted => wanted.min(config.context),
        };
        let page_bytes = config.kv_shape(1, options.kv_precision).page_bytes();
        let pages = (options.kv_memory / page_bytes as u64) as usize;
        if pages < LEAST_PAGES {
            let bytes = options.kv_memory;
            return Err(StartError::KvMemory { bytes, pages, page_bytes, least: LEAST_PAGES });
        }
        let kv = config.kv_shape(pages, options.kv_precision);
        let threads = match options.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let patience = options.patience;
        let limits = Limits { chunk: options.chunk.max(1), queue: options.queue, context, patience };
        let tokenizer = Arc::clone(&checkpoint.tokenizer);
        let template = Arc::clone(&checkpoint.template);
        let labels = Labels::prove(&tokenizer, &template);
        let mut model = ModelInfo {
            name: checkpoint.name.clone(),
            architecture: config.architecture.clone(),
            parameters: checkpoint.parameters(),
            bytes: checkpoint.tensor_bytes(),
            context,
            vocab: config.vocab,
            layers: config.layers,
            width: config.width,
            fingerprint: checkpoint.fingerprint(),
            device: String::new(),
            quantize: options.quantize,
            kv_precision: options.kv_precision,
            page_bytes,
            sampling: checkpoint.sampling.clone(),
            decide_unsupported: labels.as_ref().err().cloned(),
        };
        let gauges = Arc::new(Gauges::default());

        // The model is built on the thread that will own it.
        let (commands, receiver) = mpsc::channel();
        let (started, starting) = mpsc::sync_channel(1);
        let (words, counters) = (Arc::clone(&tokenizer), Arc::clone(&gauges));
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let device = match Cpu::detect(threads) {
                Ok(device) => device,
                Err(error) => return drop(started.send(Err(StartError::from(error)))),
            };
            let model = match Llama::load(device, &checkpoint, kv, limits.rows()) {
                Ok(model) => model,
                Err(error) => return drop(started.send(Err(error))),
            };
            // The file's pages are no longer needed: the weights were repacked.
            drop(checkpoint);
            drop(started.send(Ok(model.device())));
            Scheduler::new(model, words, pages, limits, counters).run(&receiver);
        })?;
        model.device = starting.recv().unwrap_or_else(|_| {
            Err(StartError::Thread(std::io::Error::other("it ended while the model was loading")))
        })?;
        let shared = Shared {
            commands,
            tokenizer,
            known: Known::default(),
            template,
            labels,
            model,
            gauges,
            pages,
            ids: AtomicU64::new(0),
            thread: Mutex::new(Some(thread)),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What is served.
    #[must_use]
    pub fn model(&self) -> &ModelInfo {
        &self.shared.model
    }

    /// A snapshot of the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let gauges = &self.shared.gauges;
        Counters {
            steps: gauges.steps.load(Relaxed),
            prefill_tokens: gauges.prefill_tokens.load(Relaxed),
            reused_tokens: gauges.reused_tokens.load(Relaxed),
            decisions: gauges.decisions.load(Relaxed),
            decided_tokens: gauges.decided_tokens.load(Relaxed),
            generated_tokens: gauges.generated_tokens.load(Relaxed),
            studied_tokens: gauges.studied_tokens.load(Relaxed),
            hidden_page_bytes: gauges.hidden_page_bytes.load(Relaxed),
            evictions: gauges.evictions.load(Relaxed),
            sessions: gauges.sessions.load(Relaxed),
            waiting: gauges.waiting.load(Relaxed),
            pages_held: gauges.pages_held.load(Relaxed),
            pages_cached: gauges.pages_cached.load(Relaxed),
            pages_total: self.shared.pages as u64,
            page_bytes: self.shared.model.page_bytes as u64,
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The tokens of a text, as [`Engine::open_text`] holds it.
    #[must_use]
    pub fn tokens(&self, text: &str) -> Vec<u32> {
        self.shared.bos().into_iter().chain(self.shared.encode(text)).collect()
    }

    /// Tokens in a text, special tokens written in it counted as such.
    #[must_use]
    pub fn count_tokens(&self, text: &str) -> usize {
        self.shared.encode(text).len()
    }

    /// Opens a session that holds a conversation: what is resident already is
    /// reused, the rest is computed. `salt` keeps tenants' pages apart.
    ///
    /// # Errors
    /// When the conversation does not fit the template, the context window or
    /// the cache.
    pub async fn open(&self, conversation: Conversation, salt: &str) -> Result<Session, EngineError> {
        self.open_for(Purpose::Request, conversation, salt).await
    }

    /// Opens a session for the server's own study rather than for a request: it is
    /// computed after all of those, and leaves no page behind.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub async fn study(&self, conversation: Conversation) -> Result<Session, EngineError> {
        self.open_for(Purpose::Study, conversation, "").await
    }

    /// As [`Engine::study`], for [`Session::features`] alone: blocks above the kept
    /// layers are not computed.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub async fn study_features(&self, conversation: Conversation) -> Result<Session, EngineError> {
        self.open_for(Purpose::Features, conversation, "").await
    }

    /// Keeps the hidden states after each of these counts of blocks, 1 to the model's
    /// layers, for [`Session::features`] of sessions that are opened from now on.
    ///
    /// # Errors
    /// When there is no such layer, or no memory.
    pub async fn keep_hidden(&self, layers: &[usize]) -> Result<(), EngineError> {
        let most = self.shared.model.layers;
        if let Some(layer) = layers.iter().find(|&&layer| layer == 0 || layer > most) {
            return Err(EngineError::Invalid(format!(
                "there is no layer {layer}, the model has 1 to {most}"
            )));
        }
        let layers = layers.to_vec();
        self.shared.call(|reply| Command::Keep { layers, reply }).await
    }

    async fn open_for(
        &self,
        purpose: Purpose,
        conversation: Conversation,
        salt: &str,
    ) -> Result<Session, EngineError> {
        let (shared, tenant) = (Arc::clone(&self.shared), salt.to_owned());
        // A long conversation takes milliseconds to put into tokens.
        let (conversation, text, tokens) = blocking(move || {
            let text = shared.template.render(&conversation.messages, &conversation.tools, false)?;
            let tokens = match purpose {
                Purpose::Request => shared.encode_known(&tenant, &text),
                // Each is opened once.
                Purpose::Study | Purpose::Features => shared.encode(&text),
            };
            Ok((conversation, text, tokens))
        })
        .await?;
        self.hold(conversation, text, tokens, salt, false, purpose).await
    }

    /// Opens a session that holds a plain text, for completions: a reply
    /// continues it, with no turn opened. `decide` is refused on it.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub async fn open_text(&self, text: &str, salt: &str) -> Result<Session, EngineError> {
        let (shared, tenant, text) = (Arc::clone(&self.shared), salt.to_owned(), text.to_owned());
        let (text, tokens) = blocking(move || {
            let tokens: Vec<u32> =
                shared.bos().into_iter().chain(shared.encode_known(&tenant, &text)).collect();
            Ok((text, tokens))
        })
        .await?;
        if tokens.is_empty() {
            return Err(EngineError::Invalid("a prompt needs at least one token".into()));
        }
        self.hold(Conversation::default(), text, tokens, salt, true, Purpose::Request).await
    }

    /// Opens a session that holds these tokens, as [`Engine::open_text`].
    ///
    /// # Errors
    /// As [`Engine::open`]; also when a token is not in the vocabulary.
    pub async fn open_tokens(&self, tokens: &[u32], salt: &str) -> Result<Session, EngineError> {
        self.shared.check_tokens(tokens)?;
        let text = self.shared.tokenizer.decode(tokens);
        self.hold(Conversation::default(), text, tokens.to_vec(), salt, true, Purpose::Request).await
    }

    async fn hold(
        &self,
        conversation: Conversation,
        text: String,
        tokens: Vec<u32>,
        salt: &str,
        plain: bool,
        purpose: Purpose,
    ) -> Result<Session, EngineError> {
        let resident = self.shared.resident();
        let root = Base::Root(kv::root(self.shared.model.fingerprint, salt), purpose);
        let grown = resident.grow(root, tokens).await?;
        let usage = Usage {
            tokens: grown.tokens as u32,
            reused: grown.reused as u32,
            computed: grown.computed as u32,
            ..Usage::default()
        };
        Ok(Session::new(resident, conversation, text, plain, usage))
    }

    /// Whether the engine's thread runs. Once it has ended, every call is
    /// answered with [`EngineError::Stopped`].
    #[must_use]
    pub fn is_running(&self) -> bool {
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends every call with [`EngineError::Stopped`] and joins the thread.
    pub fn stop(&self) {
        drop(self.shared.commands.send(Command::Stop));
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked");
        }
    }
}

/// Runs work that takes milliseconds away from the threads that serve.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EngineError> + Send + 'static,
) -> Result<T, EngineError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(EngineError::Stopped))
}
