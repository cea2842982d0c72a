//! From examples to a probe, on an engine: reading features, fitting, judging.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio::task::JoinSet;

use super::artifact::{Probe, short};
use super::examples::{Example, Examples};
use super::quality::{self, LabelReads, Quality};
use crate::chat::Conversation;
use crate::decide::{Question, mode};
use crate::engine::Engine;
use crate::error::EngineError;

/// Examples whose features are read at once.
const AT_ONCE: usize = 8;

/// Why a probe could not be fitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// An example could not be read: most often it does not fit the context.
    #[error("example {example}: {error}")]
    Example {
        /// Its place, counted from 1.
        example: usize,
        /// The engine's reason.
        error: EngineError,
    },
    /// Halves without a common family would be too small.
    #[error("{examples} examples are too few to fit one half of the families and judge by the other")]
    Few {
        /// Labelled examples.
        examples: usize,
    },
    /// The engine could not serve the whole.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The fit broke off.
    #[error("the fit broke off: {0}")]
    Broken(String),
}

/// Examples with the features that a probe is fitted from.
#[derive(Debug, Clone)]
pub struct Learned {
    examples: Examples,
    features: Vec<Vec<f32>>,
    layer: usize,
    model: u128,
}

/// Label reads of single examples: whether each was right.
#[derive(Debug, Clone, PartialEq)]
pub struct Labelled {
    /// The example's place and its answer's probabilities, in the labels' order.
    pub read: Vec<(usize, Vec<f64>)>,
}

/// How answers compare with the labels of examples that nothing was fitted from.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evaluation {
    /// Over all examples.
    pub quality: Quality,
    /// Examples and accuracy by tag; those without any stand under "".
    pub tags: BTreeMap<String, (usize, f64)>,
    /// The likeliest label's probability of each example, and whether it was right.
    pub confidences: Vec<(f64, bool)>,
}

impl Engine {
    /// Reads the features of examples, after every request. `progress` hears how many
    /// are done.
    ///
    /// # Errors
    /// [`ProbeError`] names the example that cannot be read.
    pub async fn learn(
        &self,
        examples: Examples,
        mut progress: impl FnMut(usize),
    ) -> Result<Learned, ProbeError> {
        let layer = super::layer(self.model().layers);
        self.keep_hidden(&[layer]).await?;
        let span = examples.span;
        let rows: Vec<Conversation> = examples.examples.iter().map(|row| row.conversation.clone()).collect();
        let read = |engine: Self, conversation: Conversation| async move {
            let session = engine.study_features(conversation).await?;
            let features = session.features(span, &[layer]).await?.pop().ok_or(EngineError::Stopped)?;
            if features.iter().all(|number| number.is_finite()) {
                Ok(features)
            } else {
                Err(EngineError::Invalid("the model's hidden states are not finite".into()))
            }
        };
        let features = self.each(rows, read, &mut progress).await?;
        Ok(Learned { examples, features, layer, model: self.model().fingerprint })
    }

    /// Answers examples by label reads, after every request: at most so many, evenly
    /// from all that have a label. None where their file does not say the question.
    ///
    /// # Errors
    /// [`ProbeError`] names the example that cannot be read.
    pub async fn read_labels(
        &self,
        examples: &Examples,
        most: usize,
    ) -> Result<Option<Labelled>, ProbeError> {
        let Some(instructions) = examples.question.clone() else { return Ok(None) };
        let question = Question { instructions, criteria: examples.criteria() };
        let labelled: Vec<usize> =
            (0..examples.examples.len()).filter(|&i| examples.examples[i].label.is_some()).collect();
        let count = labelled.len().min(most);
        let places: Vec<usize> = (0..count).map(|i| labelled[i * labelled.len() / count]).collect();
        let rows: Vec<Conversation> =
            places.iter().map(|&place| examples.examples[place].conversation.clone()).collect();
        let read = |engine: Self, conversation: Conversation| {
            let question = question.clone();
            async move {
                let mut session = engine.study(conversation).await?;
                let answer = session.decide(&[question]).await?.pop().ok_or(EngineError::Stopped)?;
                Ok(answer.probabilities)
            }
        };
        let answers = self.each(rows, read, |_| {}).await?;
        Ok(Some(Labelled { read: places.into_iter().zip(answers).collect() }))
    }

    /// Reads something of each conversation, a few at once, in order.
    async fn each<T: Send + 'static, F: Future<Output = Result<T, EngineError>> + Send + 'static>(
        &self,
        rows: Vec<Conversation>,
        read: impl Fn(Self, Conversation) -> F,
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<T>, ProbeError> {
        let mut done: Vec<Option<T>> = rows.iter().map(|_| None).collect();
        let mut rows = rows.into_iter().enumerate();
        // Dropping the set ends what it still reads.
        let mut reads = JoinSet::new();
        for finished in 0.. {
            while reads.len() < AT_ONCE
                && let Some((place, row)) = rows.next()
            {
                let read = read(self.clone(), row);
                reads.spawn(async move { (place, read.await) });
            }
            progress(finished);
            let Some(read) = reads.join_next().await else { break };
            let (place, read) = read.map_err(|error| ProbeError::Broken(error.to_string()))?;
            done[place] = Some(read.map_err(|error| ProbeError::Example { example: place + 1, error })?);
        }
        Ok(done.into_iter().flatten().collect())
    }
}

impl Labelled {
    /// The share that was right.
    #[must_use]
    pub fn quality(&self, examples: &Examples) -> LabelReads {
        LabelReads { examples: self.read.len(), accuracy: short(self.evaluate(examples).quality.accuracy) }
    }

    /// How the reads compare with the labels.
    #[must_use]
    pub fn evaluate(&self, examples: &Examples) -> Evaluation {
        let read = self
            .read
            .iter()
            .map(|(place, probabilities)| (&examples.examples[*place], probabilities.clone()));
        evaluate(read, examples.labels.len())
    }
}

impl Learned {
    /// The examples.
    #[must_use]
    pub fn examples(&self) -> &Examples {
        &self.examples
    }

    /// Fits a probe to all of them: seconds of one thread for hundreds of examples.
    #[must_use]
    pub fn fit(&self) -> Probe {
        Probe::fit(&self.examples, &self.features, self.layer, self.model)
    }

    /// Two halves that share no family: to fit from, and to judge by.
    ///
    /// # Errors
    /// [`ProbeError::Few`] where a half has fewer than two families, or lacks a label.
    pub fn halves(&self) -> Result<[Self; 2], ProbeError> {
        // The families' hashes are even or odd, whatever else is in the file.
        let halves = [0, 1].map(|half| self.only(|_, example| example.family % 2 == half));
        for half in &halves {
            let labelled = half.examples.examples.iter().filter(|example| example.label.is_some());
            let families: std::collections::HashSet<u64> = labelled.map(|example| example.family).collect();
            if families.len() < 2 || half.examples.counts().contains(&0) {
                return Err(ProbeError::Few { examples: self.examples.counts().iter().sum() });
            }
        }
        Ok(halves)
    }

    /// At most `count` examples of each label, chosen by a seed, whole families first
    /// come; all of those out of scope are left out.
    #[must_use]
    pub fn sample(&self, count: usize, seed: u64) -> Self {
        let mut order: Vec<usize> = (0..self.features.len()).collect();
        order.sort_by_key(|&i| {
            let example = &self.examples.examples[i];
            (xxhash_rust::xxh3::xxh3_64_with_seed(&example.family.to_le_bytes(), seed), i)
        });
        let mut left = vec![count; self.examples.labels.len()];
        let mut chosen = vec![false; order.len()];
        for place in order {
            if let Some(label) = self.examples.examples[place].label
                && left[label] > 0
            {
                left[label] -= 1;
                chosen[place] = true;
            }
        }
        self.only(|place, _| chosen[place])
    }

    fn only(&self, keep: impl Fn(usize, &Example) -> bool) -> Self {
        let all = self.examples.examples.iter().zip(&self.features).enumerate();
        let kept = all.filter(|(place, (example, _))| keep(*place, example));
        let (examples, features) = kept.map(|(_, (example, row))| (example.clone(), row.clone())).unzip();
        Self { examples: Examples { examples, ..self.examples.clone() }, features, ..*self }
    }

    /// How a probe that was not fitted from these examples answers them.
    #[must_use]
    pub fn evaluate(&self, probe: &Probe) -> Evaluation {
        let read: Vec<_> = self.features.iter().map(|row| probe.read(row)).collect();
        let labelled =
            self.examples.examples.iter().zip(&read).filter(|(example, _)| example.label.is_some());
        let answers = labelled.map(|(example, (probabilities, _))| (example, probabilities.clone()));
        let mut evaluation = evaluate(answers, self.examples.labels.len());
        let far = |labelled: bool| -> Vec<f64> {
            let rows = self.examples.examples.iter().zip(&read);
            rows.filter(|(example, _)| example.label.is_some() == labelled)
                .map(|(_, (_, mass))| -mass)
                .collect()
        };
        let (inside, outside) = (far(true), far(false));
        if !inside.is_empty() && !outside.is_empty() {
            evaluation.quality.scope = Some(quality::area(&inside, &outside));
        }
        evaluation
    }
}

fn evaluate<'a>(read: impl Iterator<Item = (&'a Example, Vec<f64>)>, classes: usize) -> Evaluation {
    let (mut predicted, mut labels) = (Vec::new(), Vec::new());
    let mut confidences = Vec::new();
    let mut tags: BTreeMap<String, (usize, f64)> = BTreeMap::new();
    for (example, probabilities) in read {
        let Some(label) = example.label else { continue };
        let top = mode(&probabilities);
        let right = top == label;
        confidences.push((probabilities[top], right));
        let names = if example.tags.is_empty() { vec![String::new()] } else { example.tags.clone() };
        for name in names {
            let entry = tags.entry(name).or_default();
            *entry = (entry.0 + 1, entry.1 + f64::from(u8::from(right)));
        }
        predicted.push(probabilities);
        labels.push(label);
    }
    tags.values_mut().for_each(|(count, right)| *right /= *count as f64);
    Evaluation { quality: quality::measure(&predicted, &labels, classes), tags, confidences }
}
