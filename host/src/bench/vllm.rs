//! vLLM: `POST /v1/systemone` with Forkpoint's own bodies, `POST /v1/completions` with its tokens.

use forkpoint_engine::Engine;
use serde_json::{Value, json};

use super::client::Client;
use super::error::BenchError;
use super::forkpoint::{answered, decoded, systemone};
use super::side::{Decoded, Loop, Took};
use super::text::{Asked, State, Text};

/// A vLLM server.
#[derive(Clone)]
pub(super) struct Vllm {
    pub(super) client: Client,
    pub(super) context: Option<usize>,
    pub(super) version: Option<String>,
    model: String,
    /// Counts the tokens of a stream's first event.
    engine: Engine,
}

impl Vllm {
    pub(super) async fn connect(client: Client, engine: Engine) -> Result<Self, BenchError> {
        let models = client.get("/v1/models").await?;
        let served = &models["data"][0];
        let Some(model) = served["id"].as_str().map(str::to_owned) else {
            return Err(client.odd(format!("/v1/models names no model: {models}")));
        };
        let context = served["max_model_len"].as_u64().map(|tokens| tokens as usize);
        let version = client.get("/version").await.ok();
        let version = version.and_then(|answer| answer["version"].as_str().map(str::to_owned));
        Ok(Self { client, context, version, model, engine })
    }

    pub(super) async fn prefill(&self, text: &Text) -> Result<f64, BenchError> {
        let body = json!({
            "model": self.model, "prompt": text.tokens, "max_tokens": 1, "temperature": 0, "ignore_eos": true,
        });
        let timed = self.client.post("/v1/completions", &body).await?;
        self.same(text.tokens.len(), &timed.body["usage"])?;
        Ok(timed.seconds)
    }

    pub(super) async fn decode(&self, text: &Text, tokens: u32) -> Result<Decoded, BenchError> {
        let body = json!({
            "model": self.model, "prompt": text.tokens, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": { "include_usage": true },
        });
        let arrivals = self.client.stream("/v1/completions", &body).await?;
        decoded(&self.client, &arrivals, &self.engine, tokens)
    }

    pub(super) async fn decide(&self, state: &State, asked: &[Asked]) -> Result<Took, BenchError> {
        let timed = self.client.post("/v1/systemone", &systemone(&self.model, state, asked)).await?;
        answered(&self.client, &timed.body, asked)?;
        Ok(Took { seconds: timed.seconds, note: None })
    }

    /// Each decision a call of its own, then the reply.
    pub(super) async fn triage(&self, calls: &Loop<'_>) -> Result<Took, BenchError> {
        let mut seconds = 0.0;
        for asked in calls.asked {
            seconds += self.decide(calls.state, std::slice::from_ref(asked)).await?.seconds;
        }
        let body = json!({
            "model": self.model,
            "messages": [{ "role": "user", "content": calls.state.text }],
            "max_tokens": calls.reply, "temperature": 0, "ignore_eos": true,
        });
        let timed = self.client.post("/v1/chat/completions", &body).await?;
        let written = &timed.body["usage"]["completion_tokens"];
        if written.as_u64() != Some(u64::from(calls.reply)) {
            let expected = calls.reply;
            return Err(self
                .client
                .odd(format!("a reply of {expected} tokens was asked for, {written} came")));
        }
        Ok(Took { seconds: seconds + timed.seconds, note: None })
    }

    fn same(&self, expected: usize, usage: &Value) -> Result<(), BenchError> {
        if usage["prompt_tokens"].as_u64() == Some(expected as u64) {
            return Ok(());
        }
        Err(self.client.odd(format!("the prompt has {expected} tokens, the server counted {usage}")))
    }
}
