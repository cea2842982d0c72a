//! Forkpoint's own side: the server of this process, over its HTTP API.

use forkpoint_engine::{Criteria, Engine, Question};
use serde_json::{Map, Value, json};

use super::client::{Arrival, Client};
use super::error::BenchError;
use super::side::{Decoded, Loop, Took};
use super::text::{Asked, State, Text};

/// The policy of the triage loop.
pub(super) const TRIAGE: &str = "triage";

/// Tokens of a page: what is resident is found in these.
const PAGE: u64 = 16;

/// The server of this process.
#[derive(Clone)]
pub(super) struct Forkpoint {
    pub(super) client: Client,
    pub(super) model: String,
    pub(super) context: usize,
    pub(super) engine: Engine,
}

impl Forkpoint {
    pub(super) async fn prefill(&self, text: &Text) -> Result<f64, BenchError> {
        let body = json!({
            "model": self.model, "prompt": text.text, "max_tokens": 1, "temperature": 0, "ignore_eos": true,
        });
        let timed = self.client.post("/v1/completions", &body).await?;
        let usage = &timed.body["usage"];
        self.same(text.tokens.len(), &usage["prompt_tokens"])?;
        if usage["x_forkpoint"]["reused"] != 0 {
            return Err(self.client.odd(format!("a text that should be cold was resident: {usage}")));
        }
        Ok(timed.seconds)
    }

    pub(super) async fn decode(&self, text: &Text, tokens: u32) -> Result<Decoded, BenchError> {
        let body = json!({
            "model": self.model, "prompt": text.text, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": { "include_usage": true },
        });
        let arrivals = self.client.stream("/v1/completions", &body).await?;
        let usage =
            arrivals.iter().rev().map(|arrival| &arrival.data["usage"]).find(|usage| usage.is_object());
        self.same(text.tokens.len(), usage.map_or(&Value::Null, |usage| &usage["prompt_tokens"]))?;
        decoded(&self.client, &arrivals, &self.engine, tokens)
    }

    pub(super) async fn decide(
        &self,
        state: &State,
        asked: &[Asked],
        warm: bool,
    ) -> Result<Took, BenchError> {
        let timed = self.client.post("/v1/systemone", &systemone(&self.model, state, asked)).await?;
        answered(&self.client, &timed.body, asked)?;
        let usage = &timed.body["usage"];
        let cached = usage["input_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        let computed = (state.tokens.len() as u64).saturating_sub(cached);
        if warm && computed >= PAGE {
            return Err(self
                .client
                .odd(format!("{computed} tokens of a state that should be warm were computed")));
        }
        Ok(Took { seconds: timed.seconds, note: None })
    }

    pub(super) async fn triage(&self, calls: &Loop<'_>) -> Result<Took, BenchError> {
        let body = json!({
            "model": TRIAGE,
            "messages": [{ "role": "user", "content": calls.state.text }],
            "max_tokens": calls.reply, "temperature": 0, "ignore_eos": true,
        });
        let timed = self.client.post("/v1/chat/completions", &body).await?;
        let usage = &timed.body["usage"];
        let tokens = calls.state.tokens.len() + calls.opening.len();
        self.same(tokens, &usage["prompt_tokens"])?;
        let (decisions, reply) = (&usage["x_forkpoint"]["decisions"], &usage["completion_tokens"]);
        if (decisions.as_u64(), reply.as_u64())
            != (Some(calls.asked.len() as u64), Some(u64::from(calls.reply)))
        {
            let expected = format!("{} decisions and {} tokens", calls.asked.len(), calls.reply);
            return Err(self.client.odd(format!("the triage loop has {expected}, this was {usage}")));
        }
        Ok(Took { seconds: timed.seconds, note: None })
    }

    /// Checks that a prompt is the tokens that peers are sent.
    fn same(&self, expected: usize, counted: &Value) -> Result<(), BenchError> {
        if counted.as_u64() == Some(expected as u64) {
            return Ok(());
        }
        Err(self.client.odd(format!("the prompt has {expected} tokens, the server counted {counted}")))
    }
}

/// The body of a `POST /v1/systemone`, the same for every server that has this route.
pub(super) fn systemone(model: &str, state: &State, asked: &[Asked]) -> Value {
    let questions: Map<String, Value> =
        asked.iter().enumerate().map(|(n, asked)| (format!("q{n}"), wire(&asked.question))).collect();
    json!({ "model": model, "state": state.text, "questions": questions })
}

/// A question in TypeSafe's wire.
fn wire(question: &Question) -> Value {
    let instructions = &question.instructions;
    match &question.criteria {
        Criteria::Choice(options) => {
            let options: Map<String, Value> =
                options.iter().map(|option| (option.name.clone(), json!(option.description))).collect();
            json!({ "type": "choice", "instructions": instructions, "criteria": options })
        }
        Criteria::Boolean { yes: None, no: None } => json!({ "type": "noul", "instructions": instructions }),
        Criteria::Boolean { yes, no } => {
            json!({ "type": "noul", "instructions": instructions, "criteria": { "true": yes, "false": no } })
        }
        Criteria::Score(levels) => {
            json!({ "type": "score", "instructions": instructions, "criteria": levels })
        }
    }
}

/// Checks that every question got an answer.
pub(super) fn answered(client: &Client, body: &Value, asked: &[Asked]) -> Result<(), BenchError> {
    let got = body["answers"].as_object().map_or(0, Map::len);
    if got == asked.len() {
        return Ok(());
    }
    Err(client.odd(format!("{} questions got {got} answers: {body}", asked.len())))
}

/// Reads a stream of OpenAI's completions. An event may carry the text of several tokens, since some are a part of a
/// character: those of the first are counted, so that only later ones are in the time.
pub(super) fn decoded(
    client: &Client,
    arrivals: &[Arrival],
    engine: &Engine,
    expected: u32,
) -> Result<Decoded, BenchError> {
    let choice = |arrival: &Arrival| arrival.data["choices"][0].clone();
    let text = |arrival: &&Arrival| choice(arrival)["text"].as_str().is_some_and(|text| !text.is_empty());
    let ends = |arrival: &&Arrival| choice(arrival)["finish_reason"].is_string();
    let usage = arrivals.iter().rev().find_map(|arrival| arrival.data["usage"]["completion_tokens"].as_u64());
    let (Some(first), Some(last), Some(tokens)) =
        (arrivals.iter().find(text), arrivals.iter().rfind(ends), usage)
    else {
        return Err(client.odd("the stream has no text, no end or no usage".into()));
    };
    if tokens != u64::from(expected) {
        return Err(client.odd(format!("a reply of {expected} tokens was asked for, {tokens} came")));
    }
    let shown =
        choice(first)["text"].as_str().map_or(1, |text| tokens_of(text, |text| engine.count_tokens(text)));
    let later = expected.saturating_sub(u32::try_from(shown).unwrap_or(u32::MAX));
    let seconds = last.at.duration_since(first.at).as_secs_f64();
    if later == 0 || seconds <= 0.0 {
        return Err(client.odd(format!("all {expected} tokens of a reply arrived at once")));
    }
    Ok(Decoded { tokens: later, seconds })
}

/// Tokens that a reply's text came from, at least one. Bytes that are no character come as U+FFFD, which itself would
/// be three.
fn tokens_of(text: &str, count: impl Fn(&str) -> usize) -> usize {
    let (broken, whole): (String, String) = text.chars().partition(|&c| c == char::REPLACEMENT_CHARACTER);
    (broken.chars().count() + count(&whole)).max(1)
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::ChoiceOption;

    use super::*;
    use crate::wire::systemone::SystemOneRequest;

    #[test]
    fn questions_go_over_the_wire_and_come_back_as_they_were() {
        let question = |criteria| Question { instructions: "Which?".into(), criteria };
        let option = |name: &str| ChoiceOption { name: name.into(), description: Some(format!("of {name}")) };
        let questions = [
            question(Criteria::Choice(vec![option("a"), option("b")])),
            question(Criteria::Boolean { yes: None, no: None }),
            question(Criteria::Boolean { yes: Some("it is".into()), no: Some("not".into()) }),
            question(Criteria::Score(vec!["low".into(), "high".into()])),
        ];
        let state = State { text: "A case.".into(), tokens: vec![1, 2] };
        let asked: Vec<Asked> =
            questions.iter().map(|question| Asked { question: question.clone(), suffix: vec![3] }).collect();
        let read = SystemOneRequest::read(&systemone("m", &state, &asked)).unwrap();
        assert_eq!(read.questions, questions);
        assert_eq!(read.conversation, state.conversation());
    }

    #[test]
    fn bytes_that_are_no_character_are_one_token_each() {
        let count = |text: &str| text.len();
        assert_eq!(tokens_of("ab", count), 2);
        assert_eq!(tokens_of("a\u{FFFD}b\u{FFFD}", count), 4);
        assert_eq!(tokens_of("", count), 1);
    }
}
