//! What is measured over HTTP: prefill, decode, decisions, the triage loop, and sessions side by side.

use std::sync::Arc;
use std::time::Instant;

use forkpoint_engine::{Question, Sampling};
use futures::future::join_all;
use serde_json::json;

use super::error::BenchError;
use super::forkpoint::TRIAGE;
use super::paired::{Case, Measured, Metric, measure};
use super::side::{Loop, Sample, Side};
use super::stats::{Summary, quantile};
use super::text::{Asked, Author, State, Text};
use crate::policy::RouteRequest;
use crate::serve::App;

const SPEED: &[Metric] = &[Metric { name: "speed", unit: "tokens/s", higher_is_better: true }];
const TIME: &[Metric] = &[Metric { name: "time", unit: "ms", higher_is_better: false }];
const LOAD: &[Metric] = &[
    Metric { name: "throughput", unit: "decisions/s", higher_is_better: true },
    Metric { name: "p50", unit: "ms", higher_is_better: false },
    Metric { name: "p95", unit: "ms", higher_is_better: false },
];

/// Tokens of the text that every side has before anything counts.
const WARM_UP: usize = 64;

/// Decisions of a client, one after the other.
const DECISIONS: usize = 4;

/// How much is measured.
#[derive(Debug, Clone)]
pub(super) struct Sizes {
    pub(super) repeats: usize,
    /// Tokens of prompts.
    pub(super) prefill: Vec<usize>,
    /// Tokens before a reply.
    pub(super) depths: Vec<usize>,
    /// Tokens of a reply whose speed is measured.
    pub(super) reply: u32,
    /// Tokens of a state.
    pub(super) state: usize,
    /// Questions a call.
    pub(super) questions: Vec<usize>,
    /// Clients at once.
    pub(super) clients: Vec<usize>,
    /// Tokens of the reply at the triage loop's end.
    pub(super) triage_reply: u32,
    /// Calls of a policy.
    pub(super) policy_calls: usize,
}

/// What measures.
pub(super) struct Run {
    pub(super) app: Arc<App>,
    pub(super) sides: Vec<Side>,
    pub(super) author: Author,
    pub(super) sizes: Sizes,
}

impl Run {
    /// Has every side load what it loads at its first call.
    pub(super) async fn warm_up(&mut self) -> Result<(), BenchError> {
        let text = self.author.text(WARM_UP);
        for side in &self.sides {
            match side.decode(&text, 4).await {
                // How the tokens arrived does not matter yet.
                Err(BenchError::Answer { .. }) => {}
                Err(error) if matches!(side, Side::Forkpoint(_)) => return Err(error),
                // What a peer cannot do is said where it is measured.
                _ => {}
            }
        }
        Ok(())
    }

    /// A prompt that nothing is resident of.
    pub(super) async fn prefill(&mut self, tokens: usize) -> Result<Measured, BenchError> {
        let case = Case {
            measure: "prefill",
            name: format!("prefill {tokens}"),
            metrics: SPEED,
            facts: json!({ "prompt_tokens": tokens }),
            rehearse: false,
            yardstick: false,
        };
        let author = &mut self.author;
        let prepare = async |_| Ok(author.text(tokens));
        let run = async |side: &Side, text: &Text| {
            Ok(Sample::one(text.tokens.len() as f64 / side.prefill(text).await?))
        };
        measure(&self.sides, self.sizes.repeats, case, prepare, run).await
    }

    /// A reply after a prompt that is resident.
    pub(super) async fn decode(&mut self, depth: usize) -> Result<Measured, BenchError> {
        let reply = self.sizes.reply;
        let case = Case {
            measure: "decode",
            name: format!("decode at {depth}"),
            metrics: SPEED,
            facts: json!({ "prompt_tokens": depth, "reply_tokens": reply }),
            rehearse: true,
            yardstick: false,
        };
        let text = self.author.text(depth);
        let run = async |side: &Side, text: &Text| {
            let decoded = side.decode(text, reply).await?;
            Ok(Sample::one(f64::from(decoded.tokens) / decoded.seconds))
        };
        measure(&self.sides, self.sizes.repeats, case, async |_| Ok(text.clone()), run).await
    }

    /// Questions about a state that is resident.
    pub(super) async fn decide(&mut self, state: &State, questions: usize) -> Result<Measured, BenchError> {
        let noun = if questions == 1 { "question" } else { "questions" };
        let mut case = Case {
            measure: "decide",
            name: format!("decide, {questions} {noun}"),
            metrics: TIME,
            facts: json!(null),
            rehearse: true,
            yardstick: false,
        };
        // Known before anything is asked, and the same but for the numbers in them.
        let mut asked = Vec::new();
        for _ in 0..=self.sizes.repeats {
            asked.push(self.author.questions(state, questions)?);
        }
        let suffixes: Vec<Vec<usize>> =
            asked[1..].iter().map(|asked| asked.iter().map(|asked| asked.suffix.len()).collect()).collect();
        case.facts =
            json!({ "state_tokens": state.tokens.len(), "questions": questions, "suffix_tokens": suffixes });
        let prepare =
            async |repeat: Option<usize>| Ok((repeat.is_some(), &asked[repeat.map_or(0, |n| n + 1)]));
        let run = async |side: &Side, (counts, asked): &(bool, &Vec<Asked>)| {
            if *counts {
                return side.decide_each_way(state, asked).await;
            }
            // The state becomes warm.
            side.decide(state, asked, 0, false).await?;
            Ok(Vec::new())
        };
        measure(&self.sides, self.sizes.repeats, case, prepare, run).await
    }

    /// A cold prompt, what the policy asks about it, and a reply.
    pub(super) async fn triage(&mut self) -> Result<Measured, BenchError> {
        // What the policy asks is known from calling it on another salt's pages, before anything counts.
        let mut rehearsed = Vec::new();
        for _ in 0..self.sizes.repeats {
            let state = self.author.state(self.sizes.state)?;
            let questions = questions_of(&self.app, &state).await?;
            let asked = self.author.put(&state, questions)?;
            let opening = self.author.opening(&state)?;
            rehearsed.push((state, asked, opening));
        }
        let reply = self.sizes.triage_reply;
        let suffixes: Vec<Vec<usize>> = rehearsed
            .iter()
            .map(|(_, asked, _)| asked.iter().map(|asked| asked.suffix.len()).collect())
            .collect();
        let case = Case {
            measure: "triage",
            name: "triage loop".to_owned(),
            metrics: TIME,
            facts: json!({
                "state_tokens": rehearsed.first().map(|(state, _, _)| state.tokens.len()),
                "suffix_tokens": suffixes,
                "reply_tokens": reply,
            }),
            rehearse: false,
            yardstick: false,
        };
        let prepare = async |repeat: Option<usize>| Ok(&rehearsed[repeat.unwrap_or(0)]);
        let run = async |side: &Side, (state, asked, opening): &&(State, Vec<Asked>, Vec<u32>)| {
            let took = side.triage(&Loop { state, asked, opening, reply }).await?;
            Ok(vec![Sample { way: "", values: vec![took.seconds * 1e3], note: took.note }])
        };
        measure(&self.sides, self.sizes.repeats, case, prepare, run).await
    }

    /// Clients at once, each with a state of its own that is resident.
    pub(super) async fn sessions(&mut self, states: &[State]) -> Result<Measured, BenchError> {
        let clients = states.len();
        let noun = if clients == 1 { "client" } else { "clients" };
        let case = Case {
            measure: "sessions",
            name: format!("sessions, {clients} {noun}"),
            metrics: LOAD,
            facts: json!({
                "clients": clients,
                "decisions_each": DECISIONS,
                "state_tokens": states.iter().map(|state| state.tokens.len()).collect::<Vec<_>>(),
            }),
            rehearse: true,
            yardstick: false,
        };
        let author = &mut self.author;
        let prepare = async |repeat: Option<usize>| {
            let asked: Result<Vec<_>, _> =
                states.iter().map(|state| author.questions(state, DECISIONS)).collect();
            Ok((repeat.is_some(), asked?))
        };
        let run = async |side: &Side, (warm, asked): &(bool, Vec<Vec<Asked>>)| {
            if let Err(what) = side.holds(clients) {
                return Err(BenchError::Answer { side: side.name().to_owned(), what });
            }
            load(side, states, asked, *warm).await
        };
        measure(&self.sides, self.sizes.repeats, case, prepare, run).await
    }
}

/// What the policy asks about a state, in order.
async fn questions_of(app: &App, state: &State) -> Result<Vec<Question>, BenchError> {
    let conversation = state.conversation();
    let request = RouteRequest {
        id: "bench".to_owned(),
        model: TRIAGE.to_owned(),
        messages: conversation.messages.clone(),
        drafts: Sampling::default(),
        ..RouteRequest::default()
    };
    let session = app.engine.open(conversation, "bench-rehearsal").await?;
    let routed = app.policies.route(&[TRIAGE.to_owned()], request, session).await;
    if let Some(fault) = routed.trace.fault() {
        return Err(BenchError::Unfit(format!("the policy {TRIAGE} failed: {fault}")));
    }
    let steps = routed.trace.steps.into_iter();
    Ok(steps.flat_map(|step| step.decisions).flat_map(|decision| decision.questions).collect())
}

/// All clients at once, each asking one question after the other.
async fn load(
    side: &Side,
    states: &[State],
    asked: &[Vec<Asked>],
    warm: bool,
) -> Result<Vec<Sample>, BenchError> {
    let start = Instant::now();
    let clients = states.iter().zip(asked).enumerate().map(|(client, (state, asked))| async move {
        let (mut times, mut note) = (Vec::new(), None);
        for (n, question) in asked.iter().enumerate() {
            let took = side.decide(state, std::slice::from_ref(question), client, warm || n > 0).await?;
            times.push(took.seconds * 1e3);
            note = took.note.or(note);
        }
        Ok::<_, BenchError>((times, note))
    });
    let done: Result<Vec<_>, _> = join_all(clients).await.into_iter().collect();
    let wall = start.elapsed().as_secs_f64();
    let (times, notes): (Vec<_>, Vec<_>) = done?.into_iter().unzip();
    let mut times = times.concat();
    times.sort_by(f64::total_cmp);
    let p50 = Summary::of(&times).map_or(f64::NAN, |summary| summary.median);
    let values = vec![times.len() as f64 / wall, p50, quantile(&times, 0.95)];
    Ok(vec![Sample { way: "", values, note: notes.into_iter().flatten().next() }])
}
