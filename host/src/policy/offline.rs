//! Sessions without an engine: for the canary call, for tests of policies and for replays of the journal. What is
//! answered is someone else's to say, by [`Oracle`].

use std::sync::Arc;

use forkpoint_engine::{Answer, Completion, Criteria, FinishReason, Message, Question, Role, Rung, Usage};

use super::trace::{Failure, FailureKind};

/// Says what an engine would.
pub trait Oracle: Send + Sync {
    /// Answers the questions of one call of `decide`, each with the probe that it names.
    ///
    /// # Errors
    /// What the guest is told instead.
    fn decide(&self, questions: &[(&Question, Option<&str>)]) -> Result<Vec<Answer>, Failure>;

    /// Makes a fork.
    ///
    /// # Errors
    /// What the guest is told instead.
    fn fork(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// Writes a draft.
    ///
    /// # Errors
    /// What the guest is told instead.
    fn draft(&self) -> Result<String, Failure>;
}

/// Answers every question evenly.
#[derive(Debug, Clone, Copy)]
pub struct Even;

impl Oracle for Even {
    fn decide(&self, questions: &[(&Question, Option<&str>)]) -> Result<Vec<Answer>, Failure> {
        questions.iter().map(|(question, _)| even(question)).collect()
    }

    fn draft(&self) -> Result<String, Failure> {
        Ok("A draft.".to_owned())
    }
}

fn even(question: &Question) -> Result<Answer, Failure> {
    let count = match &question.criteria {
        Criteria::Choice(options) => options.len(),
        Criteria::Boolean { .. } => 2,
        Criteria::Score(levels) => levels.len(),
    };
    let probabilities = vec![1.0 / count.max(1) as f64; count];
    Answer::of(&question.criteria, probabilities, 1.0, Rung::Labels)
        .map_err(|error| Failure { kind: FailureKind::Invalid, message: error.to_string() })
}

/// A session that holds no keys and values.
#[derive(Clone)]
pub struct OfflineSession {
    usage: Usage,
    oracle: Arc<dyn Oracle>,
}

impl OfflineSession {
    /// A session that found and computed so many tokens.
    #[must_use]
    pub fn new(usage: Usage, oracle: Arc<dyn Oracle>) -> Self {
        Self { usage, oracle }
    }

    /// A session that holds these turns. A token is four bytes of text.
    #[must_use]
    pub fn holding(messages: &[Message], oracle: Arc<dyn Oracle>) -> Self {
        let mut session = Self::new(Usage::default(), oracle);
        session.append(messages);
        session
    }

    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    pub(super) fn fork(&self) -> Result<Self, Failure> {
        self.oracle.fork()?;
        let tokens = self.usage.tokens;
        let usage = Usage { tokens, reused: tokens, ..Usage::default() };
        Ok(Self { usage, oracle: self.oracle.clone() })
    }

    pub(super) fn append(&mut self, messages: &[Message]) -> u32 {
        for message in messages {
            let tokens = u32::try_from(message.content.len() / 4 + 1).unwrap_or(u32::MAX);
            self.usage.tokens = self.usage.tokens.saturating_add(tokens);
            self.usage.computed = self.usage.computed.saturating_add(tokens);
        }
        self.usage.tokens
    }

    pub(super) fn decide(&mut self, questions: &[(&Question, Option<&str>)]) -> Result<Vec<Answer>, Failure> {
        self.usage.decisions += u32::try_from(questions.len()).unwrap_or(u32::MAX);
        self.oracle.decide(questions)
    }

    pub(super) fn draft(&mut self, most: Option<u32>) -> Result<Completion, Failure> {
        let text = self.oracle.draft()?;
        let before = self.usage.tokens;
        self.append(&[Message::new(Role::Assistant, text.as_str())]);
        let tokens = self.usage.tokens - before;
        let most = most.unwrap_or(u32::MAX);
        let reason = if tokens > most { FinishReason::Length } else { FinishReason::Stop };
        Ok(Completion { text, tokens: tokens.min(most), reason })
    }
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::Verdict;

    use super::*;

    #[test]
    fn even_answers_are_of_the_kind_that_was_asked() {
        let ask = |criteria| Even.decide(&[(&Question { instructions: "q".into(), criteria }, None)]);
        let levels = ["low", "mid", "high", "top"].map(str::to_owned).to_vec();
        let score = &ask(Criteria::Score(levels)).unwrap()[0];
        assert_eq!((score.verdict, score.probabilities.len()), (Verdict::Score(1.5), 4));
        assert_eq!(ask(Criteria::Boolean { yes: None, no: None }).unwrap()[0].verdict, Verdict::Boolean(0.5));
        assert_eq!(ask(Criteria::Choice(vec![])).unwrap_err().kind, FailureKind::Invalid);
    }

    #[test]
    fn a_session_counts_what_it_is_given() {
        let mut session = OfflineSession::holding(&[Message::new(Role::User, "12345678")], Arc::new(Even));
        assert_eq!(session.usage().tokens, 3);
        assert_eq!(session.draft(Some(2)).unwrap().reason, FinishReason::Length);
        assert_eq!((session.usage().tokens, session.fork().unwrap().usage().reused), (6, 6));
    }
}
