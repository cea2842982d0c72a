//! The engine: a model, sessions on its KV cache, decisions and replies.

pub mod chat;
pub mod decide;
pub mod detokenize;
mod engine;
mod error;
mod generate;
mod kv;
pub mod load;
pub mod model;
mod schedule;
mod session;
pub mod template;
pub mod tokenizer;

pub use chat::{Conversation, Message, Role, Tool};
pub use decide::{Answer, ChoiceOption, Criteria, Question, Verdict};
pub use engine::{Counters, Engine, ModelInfo, Options};
pub use error::{EngineError, StartError};
pub use generate::{Completion, Ended, Event, FinishReason, Generation, Sampling, TokenLogprob};
pub use session::{Session, Stream, Usage};
