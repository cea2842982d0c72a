//! How a reply is shown to its client: whole or as events, in the chat form or the older one.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use forkpoint_engine::{FinishReason, TokenLogprob};
use serde_json::{Value, json};

use crate::serve::RequestContext;
use crate::wire::chat::{Naming, UsageReport};
use crate::wire::{completions, sse};

/// The object that a reply is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `chat.completion` and its chunks.
    Chat,
    /// `text_completion`, whole or in parts.
    Text,
}

/// How one request's reply is delivered.
#[derive(Clone)]
pub struct Delivery {
    /// The object that it is.
    pub form: Form,
    /// Whether it is streamed.
    pub stream: bool,
    /// Whether the stream's last chunk carries the usage.
    pub include_usage: bool,
    /// Whether log-probabilities were asked for.
    pub logprobs: bool,
    /// What names it.
    pub naming: Naming,
    /// The request.
    pub context: RequestContext,
}

impl Delivery {
    /// A whole reply's body.
    #[must_use]
    pub fn whole(
        &self,
        text: &str,
        tokens: &[TokenLogprob],
        reason: FinishReason,
        usage: UsageReport,
    ) -> Value {
        let tokens = self.logprobs.then_some(tokens);
        match self.form {
            Form::Chat => self.naming.chat_completion(text, tokens, reason, usage),
            Form::Text => completions::completion(&self.naming, text, tokens, reason, usage),
        }
    }

    /// What a stream opens with: in the chat form, who speaks.
    #[must_use]
    pub fn opening(&self) -> Option<Bytes> {
        let delta = json!({ "role": "assistant", "content": "" });
        (self.form == Form::Chat)
            .then(|| sse::event(&self.naming.chat_chunk(delta, None, None, self.include_usage)))
    }

    /// A part of the reply. `offset` is how many characters went before it.
    #[must_use]
    pub fn part(&self, text: &str, tokens: &[TokenLogprob], offset: usize) -> Bytes {
        let tokens = self.logprobs.then_some(tokens);
        sse::event(&match self.form {
            Form::Chat => {
                self.naming.chat_chunk(json!({ "content": text }), tokens, None, self.include_usage)
            }
            Form::Text => completions::chunk(&self.naming, text, tokens, None, self.include_usage, offset),
        })
    }

    /// What a stream closes with: why it ended, the usage where it was asked for, and the end mark.
    #[must_use]
    pub fn closing(&self, reason: FinishReason, usage: UsageReport, offset: usize) -> Bytes {
        let (last, object) = match self.form {
            Form::Chat => (
                self.naming.chat_chunk(json!({}), None, Some(reason), self.include_usage),
                "chat.completion.chunk",
            ),
            Form::Text => (
                completions::chunk(&self.naming, "", None, Some(reason), self.include_usage, offset),
                completions::OBJECT,
            ),
        };
        let mut bytes = sse::event(&last).to_vec();
        if self.include_usage {
            bytes.extend_from_slice(&sse::event(&self.naming.usage_chunk(object, usage)));
        }
        bytes.extend_from_slice(&sse::DONE);
        bytes.into()
    }

    /// A reply that is known already, in the form that the client asked for.
    #[must_use]
    pub fn canned(&self, text: &str, usage: UsageReport) -> Response {
        self.context.record.note().usage = Some(usage);
        if !self.stream {
            return json_response(&self.whole(text, &[], FinishReason::Stop, usage));
        }
        let mut bytes = self.opening().unwrap_or_default().to_vec();
        bytes.extend_from_slice(&self.part(text, &[], 0));
        bytes.extend_from_slice(&self.closing(FinishReason::Stop, usage, text.chars().count()));
        event_stream(Body::from(bytes))
    }
}

/// A JSON body with status 200.
pub(crate) fn json_response(body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A body of server-sent events, which no proxy is to keep or to hold back.
pub(crate) fn event_stream(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}
