//! The imports of the contract: what a guest may ask of the engine and of the host.

use std::time::{Duration, Instant, SystemTime};

use forkpoint_engine::{Message, Sampling};
use wasmtime::component::Resource;

use super::contract::{dispatch, engine, host, types};
use super::convert;
use super::guest::{Place, Refusal, State, budget, micros};
use super::trace::Decision;

/// Most bytes of a line in the log.
const MAX_LINE: usize = 4096;

/// Most calls of `decide` that the trace holds: failing ones cost no budget, and must cost no memory either.
const MAX_DECISIONS: usize = 256;

impl engine::Host for State {
    fn convert_failure(&mut self, refusal: Refusal) -> wasmtime::Result<engine::Failure> {
        match refusal {
            Refusal::Failure(failure) => Ok(failure),
            Refusal::Trap(error) => Err(error),
        }
    }

    async fn decide(
        &mut self,
        on: Resource<Place>,
        questions: Vec<engine::Question>,
    ) -> Result<Vec<engine::Answer>, Refusal> {
        let _outside = self.enter()?;
        let (questions, probes): (Vec<_>, Vec<_>) = questions.into_iter().map(convert::question_in).unzip();
        let admitted = self.admit(&on, &questions, &probes).await;
        // Opening the session is no part of the answer.
        let at = self.started.elapsed();
        let result = match admitted {
            Ok(admitted) => self.ask(&on, admitted, &probes).await,
            Err(refusal) => Err(refusal),
        };
        let took = self.started.elapsed().saturating_sub(at);
        self.waited += took;
        let kept = result.is_ok();
        let (out, answers, failure) = match result {
            Ok(answers) => {
                let out = answers.iter().zip(&questions).map(|(a, q)| convert::answer_out(q, a)).collect();
                (Ok(out), answers, None)
            }
            Err(refusal) => {
                let failure = match &refusal {
                    Refusal::Failure(failure) => Some(convert::failure_in(failure)),
                    // The call is over, and its fault says why.
                    Refusal::Trap(_) => None,
                };
                (Err(refusal), Vec::new(), failure)
            }
        };
        if self.decisions.len() < MAX_DECISIONS {
            let (at_us, took_us) = (micros(at), micros(took));
            // What was refused costs the policy nothing, and is not kept.
            let (questions, probes) = if kept { (questions, probes) } else { Default::default() };
            self.decisions.push(Decision { at_us, took_us, questions, probes, answers, failure });
        }
        out
    }

    async fn generate(
        &mut self,
        on: Resource<Place>,
        sampling: types::Sampling,
    ) -> Result<engine::Completion, Refusal> {
        let _outside = self.enter()?;
        if !self.may().generate {
            let message = "drafts (generate) are not granted to this policy".to_owned();
            return Err(Refusal::Failure(engine::Failure::Denied(message)));
        }
        let left = self.limits.generated_tokens.saturating_sub(self.used.generated_tokens);
        if left == 0 {
            return budget(format!("{} tokens (generated_tokens) are spent", self.limits.generated_tokens));
        }
        let overrides = convert::sampling_in(sampling);
        overrides.validate()?;
        let mut sampling = Sampling { logprobs: None, ..self.request.drafts.clone() };
        overrides.apply(&mut sampling);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        sampling.max_tokens = Some(sampling.max_tokens.map_or(left, |most| most.min(left)));
        self.open(&on).await?;
        let start = Instant::now();
        let place = self.writable(&on).await?;
        let drafted = place.draft(sampling).await;
        self.waited += start.elapsed();
        let completion = drafted?;
        self.used.drafts += 1;
        self.used.generated_tokens += u64::from(completion.tokens);
        Ok(convert::completion_out(completion))
    }
}

impl engine::HostSession for State {
    async fn fork(&mut self, this: Resource<Place>) -> Result<Resource<Place>, Refusal> {
        let _outside = self.enter()?;
        if self.used.forks >= self.limits.forks {
            return budget(format!("{} forks (forks) are made", self.limits.forks));
        }
        self.open(&this).await?;
        self.used.forks += 1;
        let start = Instant::now();
        let fork = self.sessions.get_mut(&this)?.fork().await;
        self.waited += start.elapsed();
        Ok(self.sessions.push(fork?))
    }

    async fn append(&mut self, this: Resource<Place>, messages: Vec<types::Message>) -> Result<u32, Refusal> {
        let _outside = self.enter()?;
        let messages: Vec<Message> = messages.into_iter().map(convert::message_in).collect();
        self.check_tokens(messages.iter().map(|message| message.content.len()).sum())?;
        self.open(&this).await?;
        let start = Instant::now();
        let place = self.writable(&this).await?;
        let before = place.usage().computed;
        let tokens = place.append(&messages).await;
        let computed = u64::from(place.usage().computed.saturating_sub(before));
        self.used.decided_tokens += computed;
        self.waited += start.elapsed();
        tokens
    }

    async fn usage(&mut self, this: Resource<Place>) -> wasmtime::Result<engine::Usage> {
        if self.sessions.get(&this)?.is_open() {
            self.count()?;
        } else {
            let _outside = self.enter()?;
            // There is no failure to tell here: what is told says whether the conversation is too long.
            if let Err(Refusal::Trap(error)) = self.open(&this).await {
                return Err(error);
            }
        }
        let usage = self.sessions.get(&this)?.told();
        Ok(engine::Usage { tokens: usage.tokens, reused: usage.reused, computed: usage.computed })
    }

    fn drop(&mut self, this: Resource<Place>) -> wasmtime::Result<()> {
        self.count()?;
        self.discard(this)
    }
}

impl host::Host for State {
    fn log(&mut self, level: host::Level, message: String) -> wasmtime::Result<()> {
        self.count()?;
        if !self.may().log {
            return Ok(());
        }
        self.used.log_lines += 1;
        let line = if self.used.log_lines > self.limits.log_lines {
            if self.used.log_lines > self.limits.log_lines + 1 {
                return Ok(());
            }
            "more lines than log_lines: the rest of this call's are dropped".to_owned()
        } else {
            one_line(&message)
        };
        let (policy, request) = (&*self.policy, self.request.id.as_str());
        match level {
            _ if self.request.offline => tracing::debug!(target: "policy", policy, request, "{line}"),
            host::Level::Debug => tracing::debug!(target: "policy", policy, request, "{line}"),
            host::Level::Info => tracing::info!(target: "policy", policy, request, "{line}"),
            host::Level::Warn => tracing::warn!(target: "policy", policy, request, "{line}"),
            host::Level::Error => tracing::error!(target: "policy", policy, request, "{line}"),
        }
        Ok(())
    }

    fn config(&mut self, key: String) -> wasmtime::Result<Option<String>> {
        self.count()?;
        Ok(self.settings.config.get(&key).cloned())
    }

    fn get(&mut self, key: String) -> wasmtime::Result<Result<Option<Vec<u8>>, host::StoreFailure>> {
        let _outside = self.enter()?;
        if !self.may().store {
            return Ok(Err(host::StoreFailure::Denied));
        }
        self.used.store_calls += 1;
        Ok(Ok(self.held.store.get(&key, SystemTime::now())))
    }

    fn set(
        &mut self,
        key: String,
        value: Vec<u8>,
        ttl_seconds: Option<u32>,
    ) -> wasmtime::Result<Result<(), host::StoreFailure>> {
        let _outside = self.enter()?;
        if !self.may().store {
            return Ok(Err(host::StoreFailure::Denied));
        }
        self.used.store_calls += 1;
        let set = self.held.store.set(&key, value, ttl_seconds.map(seconds), SystemTime::now());
        Ok(set.map_err(|error| convert::store_failure_out(&error)))
    }

    fn add(
        &mut self,
        key: String,
        delta: i64,
        ttl_seconds: Option<u32>,
    ) -> wasmtime::Result<Result<i64, host::StoreFailure>> {
        let _outside = self.enter()?;
        if !self.may().store {
            return Ok(Err(host::StoreFailure::Denied));
        }
        self.used.store_calls += 1;
        let sum = self.held.store.add(&key, delta, ttl_seconds.map(seconds), SystemTime::now());
        Ok(sum.map_err(|error| convert::store_failure_out(&error)))
    }
}

impl types::Host for State {}

impl dispatch::Host for State {}

fn seconds(ttl: u32) -> Duration {
    Duration::from_secs(u64::from(ttl))
}

/// A guest's text as one line of the log: it cannot forge another.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len().min(MAX_LINE));
    for c in text.chars() {
        if line.len() >= MAX_LINE {
            line.push('…');
            break;
        }
        line.push(if c.is_control() { ' ' } else { c });
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_log_is_one_line() {
        assert_eq!(one_line("a\r\nERROR forged\x1b[31m"), "a  ERROR forged [31m");
        assert!(one_line(&"x".repeat(1 << 20)).len() < MAX_LINE + 8);
    }
}
