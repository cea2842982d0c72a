//! `answers.json`: what an engine would answer, written by the author of a test.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};

use forkpoint_engine::{Answer, Criteria, Question, Rung};
use serde::Deserialize;

use crate::policy::offline::Oracle;
use crate::policy::{Failure, FailureKind};

/// How the fault begins of a question that no entry answers.
const UNANSWERED: &str = "answers.json has no answer to";

/// How far probabilities may be from a sum of 1: people write two decimals.
const SLOPPY: f64 = 0.02;

/// One entry of `answers.json`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scripted {
    /// A part of the instructions of the questions that it answers.
    pub asked: Option<String>,
    /// The probe that these questions name; the answer is then a probe's.
    pub probe: Option<String>,
    /// The probability of yes.
    pub yes: Option<f64>,
    /// Of each option by name, or of each level from the lowest.
    pub probabilities: Option<Probabilities>,
    /// How far to trust it [default: 1].
    pub mass: Option<f64>,
    /// The call fails, with `kind: message`.
    pub failure: Option<String>,
    /// A draft, or why there is none.
    pub draft: Option<ScriptedDraft>,
    /// What a fork comes to: `ok`, or `kind: message` where it fails.
    pub fork: Option<String>,
}

/// What a draft comes to.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged, expecting = "expected a draft's text or {\"failure\": \"kind: message\"}")]
pub enum ScriptedDraft {
    /// The text.
    Text(String),
    /// It fails.
    Failed(ScriptedFailure),
}

/// Why a draft fails.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedFailure {
    /// `kind: message`.
    pub failure: String,
}

/// Probabilities as people write them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Probabilities {
    /// Of options by name; those left out have none.
    Named(BTreeMap<String, f64>),
    /// In order.
    Listed(Vec<f64>),
}

/// A script that is played to a policy.
#[derive(Debug, Default)]
pub struct Script {
    entries: Vec<Scripted>,
    drafts: Mutex<VecDeque<Result<String, Failure>>>,
    forks: Mutex<VecDeque<Result<(), Failure>>>,
    /// What the script does not cover, or answers wrongly.
    faults: Mutex<Vec<String>>,
}

impl Script {
    /// Reads `answers.json`.
    ///
    /// # Errors
    /// A sentence that names the entry.
    pub fn parse(text: &str) -> Result<Self, String> {
        let entries: Vec<Scripted> = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let (mut drafts, mut forks) = (VecDeque::new(), VecDeque::new());
        for (at, entry) in entries.iter().enumerate() {
            let wrong = |what: String| format!("entry {}: {what}", at + 1);
            entry.check().map_err(wrong)?;
            drafts.extend(entry.draft().transpose().map_err(wrong)?);
            forks.extend(entry.fork().transpose().map_err(wrong)?);
        }
        Ok(Self { entries, drafts: drafts.into(), forks: forks.into(), faults: Mutex::default() })
    }

    /// What was asked and not answered, and what was to fail and was not asked, in sentences.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let left = |failure: &Failure, what: &str| format!("{what} that fails ({failure}) was not made");
        let drafts = self.drafts.lock().unwrap_or_else(PoisonError::into_inner);
        faults.extend(drafts.iter().filter_map(|draft| Some(left(draft.as_ref().err()?, "a draft"))));
        let forks = self.forks.lock().unwrap_or_else(PoisonError::into_inner);
        faults.extend(forks.iter().filter_map(|fork| Some(left(fork.as_ref().err()?, "a fork"))));
        faults
    }

    /// Whether something was asked that no entry answers.
    #[must_use]
    pub fn unanswered(&self) -> bool {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.iter().any(|fault| fault.starts_with(UNANSWERED))
    }

    fn fault(&self, what: String) -> Failure {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).push(what.clone());
        Failure { kind: FailureKind::Unavailable, message: what }
    }
}

impl Scripted {
    fn check(&self) -> Result<(), String> {
        let answers = [self.yes.is_some(), self.probabilities.is_some(), self.failure.is_some()];
        let made = usize::from(self.draft.is_some()) + usize::from(self.fork.is_some());
        match (answers.iter().filter(|there| **there).count(), made > 0) {
            (0, true) if made == 1 && self.asked.is_none() && self.probe.is_none() => Ok(()),
            // A failure may be of whatever is asked.
            (1, false) if self.failure.is_some() => {
                self.failure.iter().try_for_each(|it| failure_of(it).map(drop))
            }
            (1, false) if self.asked.is_some() || self.probe.is_some() => Ok(()),
            (1, false) => Err("needs \"asked\" or \"probe\", to say which questions it answers".to_owned()),
            _ => Err("has one of \"yes\", \"probabilities\", \"failure\", \"draft\" and \"fork\"".to_owned()),
        }
    }

    /// What the draft of this entry comes to, if it is one.
    fn draft(&self) -> Option<Result<Result<String, Failure>, String>> {
        Some(match self.draft.as_ref()? {
            ScriptedDraft::Text(text) => Ok(Ok(text.clone())),
            ScriptedDraft::Failed(ScriptedFailure { failure }) => failure_of(failure).map(Err),
        })
    }

    /// What the fork of this entry comes to, if it is one.
    fn fork(&self) -> Option<Result<Result<(), Failure>, String>> {
        Some(match self.fork.as_ref()?.as_str() {
            "ok" => Ok(Ok(())),
            failure => failure_of(failure).map(Err).map_err(|error| format!("{error}, or ok for none")),
        })
    }

    fn answers(&self, question: &Question, probe: Option<&str>) -> bool {
        let said = self.asked.as_ref().is_none_or(|asked| question.instructions.contains(asked.as_str()));
        let named = self.probe.is_none() || self.probe.as_deref() == probe;
        self.draft.is_none() && self.fork.is_none() && said && named
    }

    fn answer(&self, question: &Question) -> Result<Answer, String> {
        let probabilities = match (&question.criteria, self.yes, &self.probabilities) {
            (Criteria::Boolean { .. }, Some(yes), _) => vec![yes, 1.0 - yes],
            (Criteria::Choice(options), None, Some(Probabilities::Named(named))) => {
                let known = |name: &String| options.iter().any(|option| option.name == *name);
                if let Some(name) = named.keys().find(|name| !known(name)) {
                    let there: Vec<&str> = options.iter().map(|option| option.name.as_str()).collect();
                    return Err(format!("there is no option {name:?}; there are {}", there.join(", ")));
                }
                options.iter().map(|option| named.get(&option.name).copied().unwrap_or(0.0)).collect()
            }
            (Criteria::Choice(_) | Criteria::Score(_), None, Some(Probabilities::Listed(list))) => {
                list.clone()
            }
            (Criteria::Boolean { .. }, ..) => return Err("a boolean is answered by \"yes\"".to_owned()),
            (Criteria::Choice(_), ..) => return Err("a choice is answered by \"probabilities\"".to_owned()),
            (Criteria::Score(_), ..) => {
                return Err(
                    "a score is answered by \"probabilities\", a list from the lowest level".to_owned()
                );
            }
        };
        let sum: f64 = probabilities.iter().sum();
        if (sum - 1.0).abs() > SLOPPY {
            return Err(format!("probabilities sum to 1, got {sum}"));
        }
        let probabilities = probabilities.into_iter().map(|p| p / sum).collect();
        let rung = if self.probe.is_some() { Rung::Probe } else { Rung::Labels };
        Answer::of(&question.criteria, probabilities, self.mass.unwrap_or(1.0), rung)
            .map_err(|error| error.to_string())
    }
}

impl Oracle for Script {
    fn decide(&self, questions: &[(&Question, Option<&str>)]) -> Result<Vec<Answer>, Failure> {
        let find = |&(question, probe): &(&Question, Option<&str>)| {
            let found = self.entries.iter().find(|entry| entry.answers(question, probe));
            let entry = found.ok_or_else(|| {
                let probe = probe.map(|probe| format!(" (probe {probe})")).unwrap_or_default();
                let asked = &question.instructions;
                self.fault(format!(
                    "{UNANSWERED} {asked:?}{probe}: the \"asked\" of its entry must be a part of these instructions"
                ))
            })?;
            if let Some(failure) = &entry.failure {
                return Err(failure_of(failure).unwrap_or_else(|error| self.fault(error)));
            }
            entry
                .answer(question)
                .map_err(|error| self.fault(format!("{:?}: {error}", question.instructions)))
        };
        questions.iter().map(find).collect()
    }

    fn fork(&self) -> Result<(), Failure> {
        // What the script does not mention succeeds.
        self.forks.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(Ok(()))
    }

    fn draft(&self) -> Result<String, Failure> {
        let next = self.drafts.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        next.unwrap_or_else(|| Err(self.fault("answers.json has no draft left".to_owned())))
    }
}

/// `kind: message`, as failures are shown.
fn failure_of(text: &str) -> Result<Failure, String> {
    let (kind, message) = text.split_once(':').unwrap_or((text, ""));
    let kind = serde_json::from_value(kind.trim().into())
        .map_err(|_| format!("a failure is invalid, full, budget, denied or unavailable, got {kind:?}"))?;
    Ok(Failure { kind, message: message.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::{ChoiceOption, Verdict};

    use super::*;

    fn ask(
        script: &Script,
        instructions: &str,
        criteria: Criteria,
        probe: Option<&str>,
    ) -> Result<Answer, Failure> {
        let question = Question { instructions: instructions.into(), criteria };
        script.decide(&[(&question, probe)]).map(|mut answers| answers.remove(0))
    }

    fn boolean() -> Criteria {
        Criteria::Boolean { yes: None, no: None }
    }

    fn choice(names: &[&str]) -> Criteria {
        let option = |name: &&str| ChoiceOption { name: (*name).into(), description: None };
        Criteria::Choice(names.iter().map(option).collect())
    }

    #[test]
    fn the_first_entry_that_fits_answers() {
        let script = Script::parse(
            r#"[{"probe": "shell", "yes": 0.9, "mass": 0.5}, {"asked": "a shell", "yes": 0.2},
                {"asked": "which", "probabilities": {"b": 0.75, "a": 0.25}},
                {"asked": "how", "probabilities": [0, 0.5, 0.5]}, {"draft": "Hello."}]"#,
        )
        .unwrap();
        let probed = ask(&script, "a shell?", boolean(), Some("shell")).unwrap();
        assert_eq!((probed.verdict, probed.rung, probed.mass), (Verdict::Boolean(0.9), Rung::Probe, 0.5));
        let read = ask(&script, "a shell?", boolean(), Some("other")).unwrap();
        assert_eq!((read.verdict, read.rung), (Verdict::Boolean(0.2), Rung::Labels));
        assert_eq!(ask(&script, "which?", choice(&["a", "b"]), None).unwrap().verdict, Verdict::Choice(1));
        let levels = Criteria::Score(vec![String::new(); 3]);
        assert_eq!(ask(&script, "how?", levels, None).unwrap().verdict, Verdict::Score(1.5));
        assert_eq!(script.draft().unwrap(), "Hello.");
        assert!(script.faults().is_empty());
    }

    #[test]
    fn what_the_script_does_not_say_is_told() {
        let script =
            Script::parse(r#"[{"asked": "which", "probabilities": {"x": 1}}, {"asked": "sum", "probabilities": [0.5, 0.1]}]"#)
                .unwrap();
        assert!(ask(&script, "what?", boolean(), None).is_err());
        assert!(ask(&script, "which?", choice(&["a", "b"]), None).is_err());
        assert!(ask(&script, "which?", boolean(), None).is_err());
        assert!(ask(&script, "sum?", choice(&["a", "b"]), None).is_err());
        assert!(script.draft().is_err());
        assert!(script.unanswered());
        let faults = script.faults().join("\n");
        for says in [
            "no answer to \"what?\": the \"asked\" of its entry must be a part",
            "no option \"x\"; there are a, b",
            "\"yes\"",
            "sum to 1",
            "no draft",
        ] {
            assert!(faults.contains(says), "{says} in {faults}");
        }
    }

    #[test]
    fn a_failure_is_the_contracts() {
        let script = Script::parse(r#"[{"failure": "unavailable: busy"}]"#).unwrap();
        let failure = ask(&script, "q", boolean(), None).unwrap_err();
        assert_eq!(failure, Failure { kind: FailureKind::Unavailable, message: "busy".into() });
        assert!(script.faults().is_empty());
    }

    #[test]
    fn forks_and_drafts_fail_in_order() {
        let script = Script::parse(
            r#"[{"fork": "ok"}, {"draft": "Hello."}, {"fork": "full: no page is left"},
                {"draft": {"failure": "unavailable: busy"}}, {"draft": "Again."}, {"asked": "x", "yes": 1}]"#,
        )
        .unwrap();
        let failure = |kind, message: &str| Failure { kind, message: message.into() };
        let (full, busy) =
            (failure(FailureKind::Full, "no page is left"), failure(FailureKind::Unavailable, "busy"));
        assert_eq!((script.fork(), script.draft()), (Ok(()), Ok("Hello.".into())));
        assert!(ask(&script, "x", boolean(), None).is_ok(), "neither answers a question");
        let left = ["a draft that fails (unavailable: busy)", "a fork that fails (full: no page is left)"];
        assert_eq!(script.faults(), left.map(|what| format!("{what} was not made")));
        assert_eq!((script.fork(), script.draft()), (Err(full), Err(busy)));
        assert_eq!((script.fork(), script.draft()), (Ok(()), Ok("Again.".into())), "no more are mentioned");
        assert!(script.faults().is_empty());
    }

    #[test]
    fn entries_that_say_nothing_or_too_much_are_refused() {
        for (text, says) in [
            (r#"[{"asked": "x"}]"#, "entry 1: has one of"),
            (r#"[{"yes": 1}]"#, "needs \"asked\" or \"probe\""),
            (r#"[{"asked": "x", "yes": 1, "probabilities": [1]}]"#, "has one of"),
            (r#"[{"asked": "x", "draft": "y"}]"#, "has one of"),
            (r#"[{"asked": "x", "failure": "tired"}]"#, "got \"tired\""),
            (r#"[{"asked": "x", "fork": "ok"}]"#, "has one of"),
            (r#"[{"draft": "y", "fork": "ok"}]"#, "has one of"),
            (r#"[{"fork": "fine"}]"#, "got \"fine\", or ok for none"),
            (r#"[{"fork": {"failure": "full"}}]"#, "expected a string"),
            (r#"[{"draft": {"failure": "tired: x"}}]"#, "got \"tired\""),
            (r#"[{"draft": {"fails": "full"}}]"#, "a draft's text or"),
            (r#"[{"aksed": "x"}]"#, "unknown field"),
            (r#"{}"#, "sequence"),
        ] {
            let error = Script::parse(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
