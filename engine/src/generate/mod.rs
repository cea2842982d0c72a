//! Generation: how a reply is sampled, and the stream it arrives in.

mod sample;
mod stop;

pub(crate) use sample::{Choice, Sampler};
pub(crate) use stop::StopScanner;

use serde::{Deserialize, Serialize};

use crate::chat::{Message, Tool};
use crate::error::EngineError;

/// How the next token is chosen. The defaults are OpenAI's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// 0 takes the likeliest token; above that, logits are divided by it.
    pub temperature: f32,
    /// Keeps the likeliest tokens whose probabilities reach this sum.
    pub top_p: f32,
    /// Keeps this many of the likeliest; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens at least this likely, relative to the likeliest.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens that the
    /// session holds already (Keskar et al. 2019); 1 changes nothing.
    pub repetition_penalty: f32,
    /// The random sequence; a reply with the same seed is the same reply.
    pub seed: Option<u64>,
    /// Most tokens to write; none: as many as the context window holds.
    pub max_tokens: Option<u32>,
    /// Strings that end the reply and are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end a turn do not end the reply: for measuring, where its
    /// length must not depend on what is written.
    pub ignore_eos: bool,
    /// Report the chosen token's log-probability and this many alternatives.
    pub logprobs: Option<u8>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: None,
            max_tokens: None,
            stop: Vec::new(),
            ignore_eos: false,
            logprobs: None,
        }
    }
}

impl Sampling {
    /// Checks every number's range.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] names the field, the range and what came.
    pub fn validate(&self) -> Result<(), EngineError> {
        let range = |name: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(EngineError::Invalid(format!("{name} must be from {low} to {high}, got {value}")))
            }
        };
        range("temperature", self.temperature, 0.0, 100.0)?;
        range("top_p", self.top_p, 0.0, 1.0)?;
        range("min_p", self.min_p, 0.0, 1.0)?;
        range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)?;
        if self.logprobs.is_some_and(|n| n > 20) {
            return Err(EngineError::Invalid(format!(
                "top_logprobs must be from 0 to 20, got {}",
                self.logprobs.unwrap_or_default()
            )));
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(EngineError::Invalid("a stop string must not be empty".into()));
        }
        Ok(())
    }
}

/// A reply to write, after what the session holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Generation {
    /// Turns added after the conversation, where they keep it warm.
    pub append: Vec<Message>,
    /// Tools shown in a system turn after the conversation, for the same
    /// reason; empty shows none.
    pub tools: Vec<Tool>,
    /// How the reply is sampled.
    pub sampling: Sampling,
}

/// One token of a reply and how likely it was, in nats, before temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its bytes, which may be a part of a character.
    pub bytes: Vec<u8>,
    /// ln p over the whole vocabulary.
    pub logprob: f32,
    /// The likeliest tokens with their bytes, likeliest first.
    pub top: Vec<(u32, Vec<u8>, f32)>,
}

/// What a [`Stream`](crate::Stream) yields.
#[derive(Debug)]
pub enum Event {
    /// More of the reply: whole characters.
    Text {
        /// May be empty when only log-probabilities arrive.
        text: String,
        /// The tokens that arrived, when log-probabilities were asked for.
        tokens: Vec<TokenLogprob>,
    },
    /// The reply is whole.
    End(Ended),
    /// The reply broke off.
    Failed(EngineError),
}

/// How a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Why.
    pub reason: FinishReason,
    /// Tokens between the session and the reply (appended turns, the turn's
    /// opening) that were computed for it.
    pub prompt: u32,
    /// Tokens of the reply.
    pub generated: u32,
    /// Tokens that the reply follows: the session's and `prompt`.
    pub context: u32,
    /// Tokens that are resident now: `context` and all of the reply but a last
    /// token that was never fed back.
    pub resident: u32,
    /// Whether the reply's text says all that is resident after `context`.
    pub spelled: bool,
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop string came.
    Stop,
    /// `max_tokens` or the context window was reached.
    Length,
}

/// A whole reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: u32,
    /// Why it ended.
    pub reason: FinishReason,
}
