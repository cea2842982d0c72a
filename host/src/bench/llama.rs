//! llama.cpp's `llama-server`: `POST /completion` with the very tokens that Forkpoint computes.

use forkpoint_engine::Criteria;
use serde_json::{Value, json};

use super::client::{Client, Timed};
use super::error::BenchError;
use super::side::{Decoded, Loop, Took};
use super::text::{Asked, State, Text};

const COMPLETION: &str = "/completion";

/// Alternatives that are asked for where the answer is read off probabilities.
const TOP: u32 = 10;

/// Tokens of a warm state that a server may compute again without a word: the last one has to be.
const RECOMPUTED: u64 = 32;

/// How `llama-server` is asked a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// One token under a grammar of the labels.
    Grammar,
    /// One token, with the probabilities of the likeliest.
    Probabilities,
}

impl Way {
    pub(super) const ALL: [Self; 2] = [Self::Grammar, Self::Probabilities];

    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Grammar => "grammar",
            Self::Probabilities => "n_probs",
        }
    }
}

/// A `llama-server`.
#[derive(Clone)]
pub(super) struct Llama {
    pub(super) client: Client,
    pub(super) context: Option<usize>,
    pub(super) slots: usize,
    pub(super) build: Option<String>,
}

impl Llama {
    pub(super) async fn connect(client: Client) -> Result<Self, BenchError> {
        let props = client.get("/props").await?;
        let number = |value: &Value| value.as_u64().map(|number| number as usize);
        Ok(Self {
            client,
            context: number(&props["default_generation_settings"]["n_ctx"]),
            slots: number(&props["total_slots"]).unwrap_or(1),
            build: props["build_info"].as_str().map(str::to_owned),
        })
    }

    pub(super) async fn prefill(&self, text: &Text) -> Result<f64, BenchError> {
        let body = json!({ "prompt": text.tokens, "n_predict": 1, "temperature": 0, "cache_prompt": false, "id_slot": 0 });
        let timed = self.complete(&body, text.tokens.len()).await?;
        if timed.body["timings"]["cache_n"].as_u64().unwrap_or(0) > 0 {
            let timings = &timed.body["timings"];
            return Err(self.client.odd(format!("a text that should be cold was cached: {timings}")));
        }
        Ok(timed.seconds)
    }

    pub(super) async fn decode(&self, text: &Text, tokens: u32) -> Result<Decoded, BenchError> {
        let body = json!({
            "prompt": text.tokens, "n_predict": tokens, "temperature": 0, "cache_prompt": true,
            "ignore_eos": true, "stream": true, "id_slot": 0,
        });
        let arrivals = self.client.stream(COMPLETION, &body).await?;
        let predicted = |data: &Value| data["tokens_predicted"].as_u64().unwrap_or(0);
        let first = arrivals.iter().find(|arrival| predicted(&arrival.data) > 0);
        let last = arrivals.iter().rfind(|arrival| arrival.data["stop"] == true);
        let (Some(first), Some(last)) = (first, last) else {
            return Err(self.client.odd("the stream has no token or no end".into()));
        };
        let (before, all) = (predicted(&first.data), predicted(&last.data));
        if all != u64::from(tokens) || before >= all {
            return Err(self.client.odd(format!("a reply of {tokens} tokens was asked for, {all} came")));
        }
        Ok(Decoded { tokens: (all - before) as u32, seconds: last.at.duration_since(first.at).as_secs_f64() })
    }

    /// One question after the other: there is no call for several.
    pub(super) async fn decide(
        &self,
        state: &State,
        asked: &[Asked],
        client: usize,
        way: Way,
        warm: bool,
    ) -> Result<Took, BenchError> {
        let (mut seconds, mut note) = (0.0, None);
        for asked in asked {
            let prompt = [state.tokens.as_slice(), &asked.suffix].concat();
            let mut body = json!({
                "prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": true, "id_slot": client,
            });
            match way {
                Way::Grammar => body["grammar"] = json!(grammar(&asked.question.criteria)),
                Way::Probabilities => body["n_probs"] = json!(TOP),
            }
            let timed = self.complete(&body, prompt.len()).await?;
            seconds += timed.seconds;
            let computed = timed.body["timings"]["prompt_n"].as_u64().unwrap_or(0);
            if warm && computed > asked.suffix.len() as u64 + RECOMPUTED {
                note = Some(format!(
                    "{} computed {computed} tokens for a question of {} on a warm state",
                    self.client.side,
                    asked.suffix.len()
                ));
            }
        }
        Ok(Took { seconds, note })
    }

    /// Has the slot hold the state and nothing of a question.
    pub(super) async fn forget_question(&self, state: &State) -> Result<(), BenchError> {
        let body = json!({
            "prompt": state.tokens, "n_predict": 1, "temperature": 0, "cache_prompt": true, "id_slot": 0,
        });
        self.complete(&body, state.tokens.len()).await?;
        Ok(())
    }

    /// Each decision a call of its own, then the reply.
    pub(super) async fn triage(&self, calls: &Loop<'_>) -> Result<Took, BenchError> {
        let decided = self.decide(calls.state, calls.asked, 0, Way::Grammar, false).await?;
        let prompt = [calls.state.tokens.as_slice(), calls.opening].concat();
        let body = json!({
            "prompt": prompt, "n_predict": calls.reply, "temperature": 0, "cache_prompt": true,
            "ignore_eos": true, "id_slot": 0,
        });
        let timed = self.complete(&body, prompt.len()).await?;
        let predicted = &timed.body["tokens_predicted"];
        if predicted.as_u64() != Some(u64::from(calls.reply)) {
            let expected = calls.reply;
            return Err(self
                .client
                .odd(format!("a reply of {expected} tokens was asked for, {predicted} came")));
        }
        Ok(Took { seconds: decided.seconds + timed.seconds, note: decided.note })
    }

    /// A completion of a prompt that must have `expected` tokens.
    async fn complete(&self, body: &Value, expected: usize) -> Result<Timed, BenchError> {
        let timed = self.client.post(COMPLETION, body).await?;
        let counted = &timed.body["tokens_evaluated"];
        if counted.as_u64() != Some(expected as u64) {
            return Err(self
                .client
                .odd(format!("the prompt has {expected} tokens, the server counted {counted}")));
        }
        Ok(timed)
    }
}

/// The labels of a question as a GBNF grammar.
fn grammar(criteria: &Criteria) -> String {
    let labels: Vec<String> = match criteria {
        Criteria::Choice(options) => {
            ('A'..='Z').take(options.len()).map(|label| format!("\"{label}\"")).collect()
        }
        Criteria::Boolean { .. } => vec!["\"yes\"".into(), "\"no\"".into()],
        Criteria::Score(levels) => (0..levels.len()).map(|level| format!("\"{level}\"")).collect(),
    };
    format!("root ::= {}", labels.join(" | "))
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::ChoiceOption;

    use super::*;

    #[test]
    fn a_grammar_lists_the_labels() {
        let option = |name: &str| ChoiceOption { name: name.into(), description: None };
        let choice = Criteria::Choice(["a", "b", "c", "d"].map(option).into());
        assert_eq!(grammar(&choice), r#"root ::= "A" | "B" | "C" | "D""#);
        assert_eq!(grammar(&Criteria::Boolean { yes: None, no: None }), r#"root ::= "yes" | "no""#);
        assert_eq!(grammar(&Criteria::Score(vec!["x".into(), "y".into()])), r#"root ::= "0" | "1""#);
    }
}
