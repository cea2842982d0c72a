//! The engine: a model, sessions on its KV cache, decisions and replies.
//!
//! An [`Engine`] is a cheap handle on one thread that owns the model, the pages
//! of keys and values, and the schedule. A [`Session`] holds a conversation on
//! resident pages: forks share them, a decision reads labels after a short
//! suffix of one, and a reply continues from there. The same tokens give the
//! same logits, bit for bit, whatever was computed before or beside them.
//!
//! ```
//! use forkpoint_engine::{
//!     Conversation, Criteria, Engine, Generation, Message, Options, Question, Role, Sampling, Verdict,
//! };
//!
//! # let checkpoint = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/qwen3-tiny");
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let engine = Engine::start(&checkpoint, &Options::default())?;
//! let messages = vec![Message::new(Role::User, "Remove every file under /var/lib.")];
//! let mut session = engine.open(Conversation { messages, tools: vec![] }, "").await?;
//!
//! let question = Question {
//!     instructions: "Does this need a shell?".into(),
//!     criteria: Criteria::Boolean { yes: None, no: None },
//! };
//! let answers = session.decide(&[question]).await?;
//! assert!(matches!(answers[0].verdict, Verdict::Boolean(yes) if (0.0..=1.0).contains(&yes)));
//!
//! // Only the reply's opening is computed before its first token.
//! let sampling = Sampling { max_tokens: Some(8), ..Sampling::default() };
//! let reply = session.generate(Generation { sampling, ..Generation::default() }).await?.complete().await?;
//! assert!(reply.tokens <= 8);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod chat;
pub mod decide;
pub mod detokenize;
mod engine;
mod error;
mod features;
mod generate;
mod kv;
pub mod load;
pub mod model;
pub mod probe;
mod schedule;
mod session;
mod shared;
pub mod template;
pub mod tokenizer;
mod words;

pub use chat::{Conversation, Message, Role, Tool};
pub use decide::{Answer, ChoiceOption, Criteria, Question, Rung, Verdict};
pub use engine::{Counters, Engine, ModelInfo, Options};
pub use error::{EngineError, StartError};
pub use features::Span;
pub use forkpoint_kernels::KvPrecision;
pub use generate::{Completion, Ended, Event, FinishReason, Generation, Sampling, TokenLogprob};
pub use load::Quantize;
pub use probe::{Examples, Probe};
pub use session::{Session, Stream, Usage};
pub use words::Prompt;
