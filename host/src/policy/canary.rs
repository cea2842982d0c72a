//! The call that a new component must survive before it serves: one small request on a session that needs no
//! engine and answers every question evenly.

use forkpoint_engine::{
    Answer, Completion, Criteria, EngineError, FinishReason, Message, Question, Role, Rung, Usage, Verdict,
};

use super::plan::RouteRequest;

/// A session without an engine. A token is four bytes of text.
#[derive(Debug, Clone, Default)]
pub(super) struct CanarySession {
    usage: Usage,
}

impl CanarySession {
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    pub(super) fn fork(&self) -> Self {
        let tokens = self.usage.tokens;
        Self { usage: Usage { tokens, reused: tokens, ..Usage::default() } }
    }

    pub(super) fn append(&mut self, messages: &[Message]) -> u32 {
        for message in messages {
            let tokens = u32::try_from(message.content.len() / 4 + 1).unwrap_or(u32::MAX);
            self.usage.tokens = self.usage.tokens.saturating_add(tokens);
            self.usage.computed = self.usage.computed.saturating_add(tokens);
        }
        self.usage.tokens
    }

    pub(super) fn decide(&mut self, questions: &[Question]) -> Result<Vec<Answer>, EngineError> {
        self.usage.decisions += u32::try_from(questions.len()).unwrap_or(u32::MAX);
        questions.iter().map(answer).collect()
    }

    pub(super) fn draft(&mut self) -> Completion {
        let text = "A draft.";
        let tokens = self.usage.tokens;
        self.append(&[Message::new(Role::Assistant, text)]);
        Completion { text: text.into(), tokens: self.usage.tokens - tokens, reason: FinishReason::Stop }
    }
}

fn answer(question: &Question) -> Result<Answer, EngineError> {
    let (count, verdict) = match &question.criteria {
        Criteria::Choice(options) => (options.len(), Verdict::Choice(0)),
        Criteria::Boolean { .. } => (2, Verdict::Boolean(0.5)),
        // Levels are as far apart as their numbers: the mean of an even answer is the middle.
        Criteria::Score(levels) => {
            (levels.len(), Verdict::Score(levels.len().saturating_sub(1) as f64 / 2.0))
        }
    };
    if count == 0 {
        return Err(EngineError::Invalid("a question needs something that may be answered".into()));
    }
    let probabilities = vec![1.0 / count as f64; count];
    Ok(Answer {
        verdict,
        probabilities,
        confidence: 0.0,
        mass: 1.0,
        argmax_is_label: true,
        rung: Rung::Labels,
    })
}

/// The request of the canary call.
pub(super) fn request() -> RouteRequest {
    RouteRequest {
        id: "canary".into(),
        model: "canary".into(),
        messages: vec![
            Message::new(Role::System, "You are a helpful assistant."),
            Message::new(Role::User, "Hello"),
        ],
        ..RouteRequest::default()
    }
}

/// The session that holds it.
pub(super) fn session() -> CanarySession {
    let mut session = CanarySession::default();
    session.append(&request().messages);
    session
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_even_and_of_the_kind_that_was_asked() {
        let ask = |criteria| session().decide(&[Question { instructions: "q".into(), criteria }]);
        let levels = ["low", "mid", "high", "top"].map(str::to_owned).to_vec();
        let score = &ask(Criteria::Score(levels)).unwrap()[0];
        assert_eq!((score.verdict, score.probabilities.len()), (Verdict::Score(1.5), 4));
        assert_eq!(ask(Criteria::Boolean { yes: None, no: None }).unwrap()[0].verdict, Verdict::Boolean(0.5));
        assert!(ask(Criteria::Choice(vec![])).is_err());
    }
}
