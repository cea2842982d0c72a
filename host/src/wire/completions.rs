//! `POST /v1/completions`: OpenAI's older form, a text that the model continues.

use forkpoint_engine::{FinishReason, Sampling, TokenLogprob};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::chat::{Naming, UsageReport, finite};
use super::error::{ApiError, Kind};
use super::sampling::{SamplingFields, refuse_unsupported};
use super::value::{TextOr, read};

/// Tokens of a completion where the request names no bound: OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    prompt: TextOr<Value>,
    logprobs: Option<u8>,
}

/// A completion request, checked.
#[derive(Debug)]
pub struct CompletionRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// The text to continue.
    pub prompt: String,
    /// How it is continued.
    pub sampling: Sampling,
    /// Whether and how it is streamed, and the salt.
    pub fields: SamplingFields,
}

impl CompletionRequest {
    /// Reads a request out of its body; sampling that it leaves out is as `usual`.
    ///
    /// # Errors
    /// [`Kind::Invalid`] or [`Kind::Unsupported`], naming the field.
    pub fn read(body: &Value, usual: &Sampling) -> Result<Self, ApiError> {
        let fields: Fields = read(body)?;
        let sampling_fields: SamplingFields = read(body)?;
        refuse_unsupported(body)?;
        let prompt = match fields.prompt {
            TextOr::Text(text) => text,
            TextOr::Many(many) => match many.as_slice() {
                [Value::String(text)] => text.clone(),
                [Value::Number(_) | Value::Array(_), ..] => {
                    let error = ApiError::field("prompt", "token ids are not supported yet; send text");
                    return Err(error.with_kind(Kind::Unsupported));
                }
                many => {
                    let error = ApiError::field("prompt", format!("one text a request, got {}", many.len()));
                    return Err(error.with_kind(Kind::Unsupported));
                }
            },
        };
        if prompt.is_empty() {
            return Err(ApiError::field("prompt", "must not be empty"));
        }
        let mut sampling = sampling_fields.sampling(usual)?;
        sampling.max_tokens = sampling.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
        sampling.logprobs = fields.logprobs;
        if let Some(top @ 21..) = fields.logprobs {
            return Err(ApiError::field("logprobs", format!("must be from 0 to 20, got {top}")));
        }
        Ok(Self {
            model: fields.model.filter(|model| !model.is_empty()),
            prompt,
            sampling,
            fields: sampling_fields,
        })
    }
}

/// The object's name, whole or in chunks.
pub const OBJECT: &str = "text_completion";

/// A whole completion.
#[must_use]
pub fn completion(
    naming: &Naming,
    text: &str,
    tokens: Option<&[TokenLogprob]>,
    reason: FinishReason,
    usage: UsageReport,
) -> Value {
    let mut reply = chunk(naming, text, tokens, Some(reason), false, 0);
    reply["usage"] = usage.to_json();
    reply
}

/// A chunk of a streamed completion. `offset` is where its text starts in the whole reply, in characters.
#[must_use]
pub fn chunk(
    naming: &Naming,
    text: &str,
    tokens: Option<&[TokenLogprob]>,
    reason: Option<FinishReason>,
    usage_follows: bool,
    offset: usize,
) -> Value {
    let mut chunk = naming.other(
        OBJECT,
        json!([{
            "index": 0,
            "text": text,
            "logprobs": tokens.map(|tokens| logprobs(tokens, offset)),
            "finish_reason": reason,
        }]),
    );
    if usage_follows {
        chunk["usage"] = Value::Null;
    }
    chunk
}

/// The four parallel arrays of the older log-probability format.
fn logprobs(tokens: &[TokenLogprob], mut offset: usize) -> Value {
    let (mut texts, mut chosen, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let text = String::from_utf8_lossy(&token.bytes).into_owned();
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        chosen.push(finite(token.logprob));
        let map: Map<String, Value> = token
            .top
            .iter()
            .map(|(_, bytes, logprob)| (String::from_utf8_lossy(bytes).into_owned(), json!(finite(*logprob))))
            .collect();
        top.push(map);
    }
    json!({ "tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_one_text() {
        let request =
            CompletionRequest::read(&json!({"prompt": ["Once"], "logprobs": 1}), &Sampling::default())
                .unwrap();
        assert_eq!((request.prompt.as_str(), request.sampling.max_tokens), ("Once", Some(16)));
        assert_eq!(request.sampling.logprobs, Some(1));

        let cases = [
            (json!({}), "prompt: this field is required"),
            (json!({"prompt": ""}), "prompt: must not be empty"),
            (json!({"prompt": [1, 2]}), "prompt: token ids are not supported yet"),
            (json!({"prompt": ["a", "b"]}), "prompt: one text a request, got 2"),
            (json!({"prompt": "a", "logprobs": 21}), "logprobs: must be from 0 to 20, got 21"),
            (json!({"prompt": "a", "echo": true}), "echo: is not supported yet"),
        ];
        for (body, message) in cases {
            let error = CompletionRequest::read(&body, &Sampling::default()).unwrap_err();
            assert!(error.message.starts_with(message), "{body}: {}", error.message);
        }
    }
}
