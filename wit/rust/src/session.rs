//! Asking the engine about a session.

use crate::bindings::forkpoint::policy::engine;
use crate::question::read_answer;
use crate::{Answer, Completion, Error, Question, Result, Sampling, Session};

impl Session {
    /// Answers the questions, each independently of the others, in one engine step. The session does not
    /// change.
    ///
    /// # Errors
    /// When the engine did not serve the call; the failure says why.
    pub fn decide<const N: usize>(&self, questions: [Question; N]) -> Result<[Answer; N]> {
        let answers = self.decide_all(&questions)?;
        answers
            .try_into()
            .map_err(|got: Vec<_>| Error::Policy(format!("{N} questions got {} answers", got.len())))
    }

    /// Answers as many questions as there are, in one engine step: for lists made at run time.
    ///
    /// # Errors
    /// When the engine did not serve the call; the failure says why.
    pub fn decide_all(&self, questions: &[Question]) -> Result<Vec<Answer>> {
        let answers = engine::decide(self, questions)?;
        Ok(questions.iter().zip(answers).map(|(question, answer)| read_answer(question, answer)).collect())
    }

    /// Answers one question.
    ///
    /// # Errors
    /// When the engine did not serve the call; the failure says why.
    pub fn ask(&self, question: Question) -> Result<Answer> {
        let [answer] = self.decide([question])?;
        Ok(answer)
    }

    /// Writes a reply in this session, which then holds it: for drafts and cascades, on a fork.
    ///
    /// # Errors
    /// When the engine did not serve the call; the failure says why.
    pub fn draft(&self, sampling: &Sampling) -> Result<Completion> {
        Ok(engine::generate(self, sampling)?)
    }
}
