//! How well probes answer a question that they were not fitted on the families of,
//! beside label reads and the commonest label.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use forkpoint_engine::Engine;
use forkpoint_engine::probe::{Evaluation, Examples, Learned, ProbeError, calibration_error};
use serde::Serialize;

/// What is tried.
#[derive(Debug, Clone)]
pub(crate) struct Trial {
    /// Examples of each label that a probe is fitted from.
    pub(crate) per_label: usize,
    /// The same for the learning curve.
    pub(crate) curve: Vec<usize>,
    /// Samples of each size, in both directions between the halves.
    pub(crate) repeats: u64,
    /// Examples that label reads answer, of both halves; 0 for none.
    pub(crate) label_reads: usize,
}

/// A question's result. Shares are from 0 to 1.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Judged {
    pub(crate) name: String,
    pub(crate) labels: Vec<String>,
    /// Labelled examples, and those out of scope.
    pub(crate) examples: usize,
    pub(crate) out_of_scope: usize,
    /// Mean over samples and both directions.
    pub(crate) accuracy: f64,
    pub(crate) majority: f64,
    pub(crate) label_reads: Option<f64>,
    /// Of the samples' answers together.
    pub(crate) ece: f64,
    pub(crate) brier: f64,
    /// How well mass tells out-of-scope texts: area under the ROC curve.
    pub(crate) scope: Option<f64>,
    pub(crate) tags: BTreeMap<String, f64>,
    /// Examples a label, and accuracy.
    pub(crate) curve: Vec<(usize, f64)>,
    #[serde(skip)]
    confidences: Vec<(f64, bool)>,
}

/// Several questions together.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Table {
    pub(crate) model: String,
    pub(crate) device: String,
    pub(crate) per_label: usize,
    pub(crate) repeats: u64,
    pub(crate) questions: Vec<Judged>,
    pub(crate) accuracy: f64,
    pub(crate) majority: f64,
    pub(crate) label_reads: Option<f64>,
    pub(crate) ece: f64,
    /// Over all questions' answers together, where those that are too sure make up for those that are not enough.
    pub(crate) ece_pooled: f64,
    pub(crate) scope: Option<f64>,
}

/// Judges a question: each half of its families by probes fitted from the other.
pub(crate) async fn judge(
    engine: &Engine,
    name: &str,
    examples: Examples,
    trial: &Trial,
    progress: impl FnMut(usize),
) -> Result<Judged, ProbeError> {
    let label_reads = match trial.label_reads {
        0 => None,
        most => engine.read_labels(&examples, most).await?.map(|read| read.quality(&examples).accuracy),
    };
    let learned = engine.learn(examples, progress).await?;
    let trial = trial.clone();
    let name = name.to_owned();
    let judged = tokio::task::spawn_blocking(move || measure(&name, &learned, &trial, label_reads));
    judged.await.map_err(|error| ProbeError::Broken(error.to_string()))?
}

fn measure(
    name: &str,
    learned: &Learned,
    trial: &Trial,
    label_reads: Option<f64>,
) -> Result<Judged, ProbeError> {
    let halves = learned.halves()?;
    let tried: Vec<Evaluation> = evaluations(&halves, trial.per_label, trial.repeats);
    let mean = |of: &dyn Fn(&Evaluation) -> f64| tried.iter().map(of).sum::<f64>() / tried.len() as f64;
    let mut tags: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for (tag, (count, accuracy)) in tried.iter().flat_map(|evaluation| &evaluation.tags) {
        let entry = tags.entry(tag.clone()).or_default();
        *entry = (entry.0 + *count as f64, entry.1 + *count as f64 * accuracy);
    }
    let scopes: Vec<f64> = tried.iter().filter_map(|evaluation| evaluation.quality.scope).collect();
    let confidences: Vec<_> = tried.iter().flat_map(|evaluation| evaluation.confidences.clone()).collect();
    let examples = learned.examples();
    let labelled: usize = examples.counts().iter().sum();
    let curve = trial.curve.iter().map(|&count| {
        let tried = evaluations(&halves, count, trial.repeats);
        let accuracy = tried.iter().map(|evaluation| evaluation.quality.accuracy).sum::<f64>();
        (count, accuracy / tried.len() as f64)
    });
    Ok(Judged {
        name: name.to_owned(),
        labels: examples.labels.clone(),
        examples: labelled,
        out_of_scope: examples.examples.len() - labelled,
        accuracy: mean(&|evaluation| evaluation.quality.accuracy),
        majority: mean(&|evaluation| evaluation.quality.majority),
        label_reads,
        ece: calibration_error(&confidences),
        brier: mean(&|evaluation| evaluation.quality.brier),
        scope: (!scopes.is_empty()).then(|| scopes.iter().sum::<f64>() / scopes.len() as f64),
        tags: tags.into_iter().map(|(tag, (count, right))| (tag, right / count)).collect(),
        curve: curve.collect(),
        confidences,
    })
}

/// Probes fitted from samples of one half, on the whole of the other.
fn evaluations(halves: &[Learned; 2], per_label: usize, repeats: u64) -> Vec<Evaluation> {
    let runs: Vec<(usize, u64)> = (0..repeats).flat_map(|seed| [(0, seed), (1, seed)]).collect();
    let run = |&(half, seed): &(usize, u64)| {
        let probe = halves[half].sample(per_label, seed).fit();
        halves[1 - half].evaluate(&probe)
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let parts = runs.chunks(runs.len().div_ceil(threads).max(1));
        let parts: Vec<_> =
            parts.map(|part| scope.spawn(move || part.iter().map(run).collect::<Vec<_>>())).collect();
        parts.into_iter().flat_map(|part| part.join().expect("a fit does not panic")).collect()
    })
}

impl Table {
    pub(crate) fn new(engine: &Engine, trial: &Trial, questions: Vec<Judged>) -> Self {
        let mean = |of: &dyn Fn(&Judged) -> Option<f64>| {
            let values: Vec<f64> = questions.iter().filter_map(of).collect();
            (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
        };
        let pooled: Vec<_> = questions.iter().flat_map(|question| question.confidences.clone()).collect();
        Self {
            model: engine.model().name.clone(),
            device: engine.model().device.clone(),
            per_label: trial.per_label,
            repeats: trial.repeats,
            accuracy: mean(&|question| Some(question.accuracy)).unwrap_or(0.0),
            majority: mean(&|question| Some(question.majority)).unwrap_or(0.0),
            label_reads: mean(&|question| question.label_reads),
            ece: mean(&|question| Some(question.ece)).unwrap_or(0.0),
            ece_pooled: calibration_error(&pooled),
            scope: mean(&|question| question.scope),
            questions,
        }
    }

    /// For people, as Markdown.
    pub(crate) fn text(&self) -> String {
        let share = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.2}"));
        let mut tags: Vec<&str> =
            self.questions.iter().flat_map(|question| question.tags.keys().map(String::as_str)).collect();
        tags.retain(|tag| !tag.is_empty());
        tags.sort_unstable();
        tags.dedup();
        let mut out = String::new();
        let heads = tags.iter().fold(String::new(), |heads, tag| heads + &format!(" {tag} |"));
        let _ = writeln!(
            out,
            "| question | labels | examples | majority | label reads | probe | ECE | Brier | scope |{heads}"
        );
        let _ = writeln!(out, "|---|---|---|---|---|---|---|---|---|{}", "---|".repeat(tags.len()));
        for question in &self.questions {
            let _ = write!(
                out,
                "| {} | {} | {} | {:.2} | {} | {:.2} | {:.3} | {:.2} | {} |",
                question.name,
                question.labels.len(),
                question.examples,
                question.majority,
                share(question.label_reads),
                question.accuracy,
                question.ece,
                question.brier,
                share(question.scope),
            );
            let _ = writeln!(
                out,
                "{}",
                tags.iter().fold(String::new(), |row, tag| row
                    + &format!(" {} |", share(question.tags.get(*tag).copied())))
            );
        }
        let _ = writeln!(
            out,
            "| **mean** | | | {:.2} | {} | **{:.2}** | {:.3} | | {} |{}",
            self.majority,
            share(self.label_reads),
            self.accuracy,
            self.ece,
            share(self.scope),
            " |".repeat(tags.len())
        );
        let curves: Vec<&Judged> =
            self.questions.iter().filter(|question| !question.curve.is_empty()).collect();
        if let Some(first) = curves.first() {
            let _ = writeln!(out);
            let counts =
                first.curve.iter().fold(String::new(), |row, (count, _)| row + &format!(" {count} |"));
            let _ = writeln!(out, "| examples a label |{counts}");
            let _ = writeln!(out, "|---|{}", "---|".repeat(first.curve.len()));
            for question in curves {
                let row = question
                    .curve
                    .iter()
                    .fold(String::new(), |row, (_, accuracy)| row + &format!(" {accuracy:.2} |"));
                let _ = writeln!(out, "| {} |{row}", question.name);
            }
        }
        out
    }
}
