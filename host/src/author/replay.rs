//! Replays a journal through a policy, with no model: what was answered then is answered again, and the plans are
//! compared.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use forkpoint_engine::{Answer, Question, Usage};
use serde::Serialize;

use crate::journal::{Record, shorten};
use crate::policy::offline::{OfflineSession, Oracle};
use crate::policy::{Decision, Failure, FailureKind, PlanRecord, Step, Workbench};

/// What a replay found.
#[derive(Debug, Default, Serialize)]
pub struct Replay {
    /// Records of the policy.
    pub replayed: usize,
    /// Of those, as they were decided then.
    pub same: usize,
    /// Of those, decided otherwise.
    pub changed: Vec<Change>,
    /// Of those, records where the policy asked what was not asked then.
    pub unanswered: Vec<Unanswered>,
    /// Of those, records without the prompt's text: rules on text saw none.
    pub without_prompt: usize,
    /// Records of other policies.
    pub others: usize,
}

/// A request that is decided otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Change {
    /// The request's id.
    pub id: String,
    /// What was decided then.
    pub before: Decided,
    /// What is decided now.
    pub after: Decided,
}

/// A request whose replay asked what is not in its record.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Unanswered {
    /// The request's id.
    pub id: String,
    /// The question.
    pub asked: String,
}

/// What is compared: the plan, its reason, and the kind of a fault.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decided {
    /// None after a fault.
    pub plan: Option<PlanRecord>,
    /// The policy's word, or the fault's.
    pub reason: String,
    /// The fault's kind.
    pub fault: Option<&'static str>,
}

impl Decided {
    fn of(step: &Step, prompts: bool) -> Self {
        let mut plan = step.plan.clone();
        if !prompts {
            plan.iter_mut().for_each(shorten);
        }
        let fault = step.fault.as_ref().map(|fault| fault.kind.code());
        Self { plan, reason: step.reason.clone(), fault }
    }
}

impl Replay {
    /// Runs a policy over the records of the one that is named.
    pub async fn run(bench: &Workbench, name: &str, records: &[Record]) -> Self {
        let mut replay = Self::default();
        for record in records {
            let Some(then) = record.steps.iter().find(|step| step.policy == name) else {
                replay.others += 1;
                continue;
            };
            replay.replayed += 1;
            let prompts = record.has_prompt();
            replay.without_prompt += usize::from(!prompts);
            let recording = Arc::new(Recording::new(then.decisions.clone()));
            let session = &record.session;
            let usage = Usage {
                tokens: session.tokens,
                reused: session.reused,
                computed: session.computed,
                ..Usage::default()
            };
            let session = OfflineSession::new(usage, recording.clone());
            let now = bench.call(&record.request(), session).await;
            if let Some(asked) = recording.unanswered() {
                replay.unanswered.push(Unanswered { id: record.id.clone(), asked });
                continue;
            }
            // What was written down was shortened already.
            let (before, after) = (Decided::of(then, true), Decided::of(&now, prompts));
            if before == after {
                replay.same += 1;
            } else {
                replay.changed.push(Change { id: record.id.clone(), before, after });
            }
        }
        replay
    }
}

/// What was answered to one request then.
struct Recording {
    decisions: Vec<Decision>,
    next: AtomicUsize,
    unanswered: Mutex<Option<String>>,
}

impl Recording {
    fn new(decisions: Vec<Decision>) -> Self {
        Self { decisions, next: AtomicUsize::new(0), unanswered: Mutex::default() }
    }

    fn unanswered(&self) -> Option<String> {
        self.unanswered.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The answer to a question of any call.
    fn find(&self, question: &Question, probe: Option<&str>) -> Option<&Answer> {
        self.decisions.iter().find_map(|decision| {
            let asked = decision.questions.iter().zip(&decision.probes).zip(&decision.answers);
            let same = |((asked, named), _): &((&Question, &Option<String>), &Answer)| {
                *asked == question && named.as_deref() == probe
            };
            asked.into_iter().find(same).map(|(_, answer)| answer)
        })
    }

    fn missing(&self, what: String) -> Failure {
        let mut unanswered = self.unanswered.lock().unwrap_or_else(PoisonError::into_inner);
        let failure =
            Failure { kind: FailureKind::Unavailable, message: format!("not in the journal: {what}") };
        unanswered.get_or_insert(what);
        failure
    }
}

impl Oracle for Recording {
    fn decide(&self, questions: &[(&Question, Option<&str>)]) -> Result<Vec<Answer>, Failure> {
        let place = self.next.fetch_add(1, Relaxed);
        // A call that failed kept no questions: it is known by its place alone.
        if let Some(failure) = self.decisions.get(place).and_then(|decision| decision.failure.clone()) {
            return Err(failure);
        }
        questions
            .iter()
            .map(|&(question, probe)| {
                let found = self.find(question, probe).cloned();
                found.ok_or_else(|| self.missing(question.instructions.clone()))
            })
            .collect()
    }

    fn draft(&self) -> Result<String, Failure> {
        // Drafts are the model's text, which no journal keeps.
        Err(self.missing("a draft".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::{Criteria, Rung};

    use super::*;

    fn question(text: &str) -> Question {
        Question { instructions: text.into(), criteria: Criteria::Boolean { yes: None, no: None } }
    }

    fn decision(text: &str, yes: f64) -> Decision {
        let criteria = question(text).criteria;
        let answer = Answer::of(&criteria, vec![yes, 1.0 - yes], 1.0, Rung::Labels).unwrap();
        Decision {
            at_us: 0,
            took_us: 0,
            questions: vec![question(text)],
            probes: vec![None],
            answers: vec![answer],
            failure: None,
        }
    }

    #[test]
    fn what_was_answered_is_answered_again_in_any_order() {
        let recording = Recording::new(vec![decision("a?", 0.9), decision("b?", 0.1)]);
        let both = recording.decide(&[(&question("b?"), None), (&question("a?"), None)]).unwrap();
        assert_eq!((both[0].probabilities[0], both[1].probabilities[0]), (0.1, 0.9));
        assert_eq!(recording.unanswered(), None);
        assert!(recording.decide(&[(&question("a?"), Some("probe"))]).is_err(), "asked otherwise");
        assert_eq!(recording.unanswered().as_deref(), Some("a?"));
    }

    #[test]
    fn a_call_that_failed_fails_again() {
        let failure = Failure { kind: FailureKind::Full, message: "full".into() };
        let failed = Decision {
            failure: Some(failure.clone()),
            answers: vec![],
            questions: vec![],
            probes: vec![],
            ..decision("", 1.0)
        };
        let recording = Recording::new(vec![failed, decision("a?", 0.5)]);
        assert_eq!(recording.decide(&[(&question("a?"), None)]).unwrap_err(), failure);
        assert!(recording.decide(&[(&question("a?"), None)]).is_ok());
        assert!(recording.draft().is_err());
    }
}
