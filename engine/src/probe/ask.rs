//! Asking a session, by probes where there are some.

use std::sync::Arc;

use super::artifact::Probe;
use crate::decide::{Answer, Question, question_text};
use crate::error::EngineError;
use crate::session::Session;

impl Session {
    /// As [`Session::decide`], but a question that has a probe beside it is answered by
    /// that: without a token, and with one reading of the session for all probes that
    /// look at the same span. Where the session has nothing in the probe's span, or began
    /// before hidden states were kept, labels are read. Probes that are fewer than questions stand beside the
    /// first ones.
    ///
    /// # Errors
    /// As [`Session::decide`]; [`EngineError::Invalid`] also where a probe answers
    /// other options than those asked.
    pub async fn decide_by(
        &mut self,
        questions: &[Question],
        probes: &[Option<Arc<Probe>>],
    ) -> Result<Vec<Answer>, EngineError> {
        let probe = |index: usize| probes.get(index).and_then(Option::as_ref);
        let mut answers: Vec<Option<Answer>> = vec![None; questions.len()];
        // What is cheap to refuse is refused before anything is computed.
        for (index, question) in questions.iter().enumerate() {
            match probe(index) {
                Some(probe) => probe.check(&question.criteria),
                None => question_text(question).map(drop),
            }
            .map_err(|error| at(index, error))?;
        }
        for (index, question) in questions.iter().enumerate() {
            let Some(probe) = probe(index) else { continue };
            let features = match self.kept_features(probe.span, probe.layer).await {
                Ok(features) if features.iter().all(|number| number.is_finite()) => features,
                Ok(_) => continue,
                Err(EngineError::NoHidden | EngineError::Invalid(_)) => continue,
                Err(error) => return Err(error),
            };
            answers[index] = Some(probe.answer(&question.criteria, &features)?);
            self.count_decision();
        }
        let places: Vec<usize> = (0..questions.len()).filter(|&index| answers[index].is_none()).collect();
        let asked: Vec<Question> = places.iter().map(|&index| questions[index].clone()).collect();
        let read = self.decide(&asked).await?;
        for (place, answer) in places.into_iter().zip(read) {
            answers[place] = Some(answer);
        }
        Ok(answers.into_iter().flatten().collect())
    }
}

fn at(index: usize, error: EngineError) -> EngineError {
    match error {
        EngineError::Invalid(what) => EngineError::Invalid(format!("question {index}: {what}")),
        other => other,
    }
}
