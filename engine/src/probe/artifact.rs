//! A fitted probe, and the file that holds it: JSON of some ten kilobytes with all
//! that is needed to answer, to know what it was fitted from and how good it is.
//! A file from a stranger is checked in full before anything is read with it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use half::bf16;
use serde::{Deserialize, Serialize};

use super::compact::Compact;
use super::examples::{Examples, Kind};
use super::fit::{self, Head, Scale};
use super::quality::{Quality, Sample};
use super::scope::{self, Nearness};
use crate::decide::{self, Answer, Criteria, MAX_LEVELS, MAX_OPTIONS, Reading, Rung};
use crate::engine::ModelInfo;
use crate::error::EngineError;
use crate::features::Span;

/// The format of the file. Another one is refused.
const FORMAT: u32 = 1;
/// Most bytes of a file.
pub const MAX_ARTIFACT: usize = 1 << 20;
/// Most numbers in a hidden state.
const MAX_WIDTH: usize = 1 << 16;

/// A fitted probe.
#[derive(Debug, Clone, PartialEq)]
pub struct Probe {
    /// What it answers.
    pub kind: Kind,
    /// The question in words, where its examples say it.
    pub question: Option<String>,
    /// Its labels; of a boolean yes and no, of a score the levels in order.
    pub labels: Vec<String>,
    /// Which tokens it reads.
    pub span: Span,
    /// After how many blocks.
    pub layer: usize,
    /// The fingerprint of the model that it was fitted on.
    pub model: u128,
    /// The hash of its examples.
    pub examples: u128,
    /// Examples of each label.
    pub counts: Vec<usize>,
    /// How well it does on examples that it was not fitted from.
    pub quality: Quality,
    temperature: f64,
    scale: Scale,
    head: Head,
    directions: Vec<Vec<f64>>,
    nearness: Nearness,
}

/// Why a file is not a probe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a probe of this version: {0}")]
pub struct ArtifactError(String);

/// The file. Vectors are bf16, little-endian, in base64.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    format: u32,
    kind: Kind,
    question: Option<String>,
    labels: Vec<String>,
    span: Span,
    layer: usize,
    model: String,
    examples: String,
    counts: Vec<usize>,
    quality: Quality,
    temperature: f64,
    mean: String,
    deviation: String,
    /// One a label but the last, or one alone where there are levels.
    weights: Vec<String>,
    /// Biases of the same labels, or the levels' thresholds.
    bias: Vec<f64>,
    directions: Vec<String>,
    half: f64,
    spread: f64,
}

impl Probe {
    /// Fits a probe to examples whose features were read, row by row.
    pub(super) fn fit(examples: &Examples, features: &[Vec<f32>], layer: usize, model: u128) -> Self {
        let (mut rows, mut labels, mut families, mut outside) = (vec![], vec![], vec![], vec![]);
        for (example, features) in examples.examples.iter().zip(features) {
            match example.label {
                Some(label) => {
                    rows.push(features.as_slice());
                    labels.push(label);
                    families.push(example.family);
                }
                None => outside.push(features.as_slice()),
            }
        }
        let (classes, ordinal) = (examples.labels.len(), examples.kind == Kind::Score);
        let sample =
            Sample { rows: &rows, labels: &labels, families: &families, outside: &outside, classes, ordinal };
        let validated = sample.validate();
        let scale = Scale::of(&rows);
        // Rounded as they are kept, before anything is fitted to them.
        let scale = Scale { mean: rounded(&scale.mean), deviation: rounded(&scale.deviation) };
        let scaled: Vec<Vec<f64>> = rows.iter().map(|row| scale.apply(row)).collect();
        let fitted = fit::fit(&Compact::new(&scaled), &labels, classes, ordinal, validated.strength);
        let head = match fitted {
            Head::Levels { weights, thresholds } => Head::Levels {
                weights: rounded(&weights),
                thresholds: thresholds.iter().map(|&threshold| short(threshold)).collect(),
            },
            // A softmax knows differences alone: the last label's row is nought.
            Head::Names { weights, bias } => {
                let (last, rest) = weights.split_last().expect("there are two labels or more");
                let less = |row: &Vec<f64>| row.iter().zip(last).map(|(w, l)| w - l).collect::<Vec<_>>();
                let mut weights: Vec<_> = rest.iter().map(|row| rounded(&less(row))).collect();
                weights.push(vec![0.0; last.len()]);
                let end = bias[rest.len()];
                Head::Names { weights, bias: bias.iter().map(|bias| short(bias - end)).collect() }
            }
        };
        let directions = scope::directions(&scaled).iter().map(|row| rounded(row)).collect();
        Self {
            kind: examples.kind,
            question: examples.question.clone(),
            labels: examples.labels.clone(),
            span: examples.span,
            layer,
            model,
            examples: examples.hash,
            counts: examples.counts(),
            quality: validated.quality.short(),
            temperature: short(validated.temperature),
            scale,
            head,
            directions,
            nearness: Nearness {
                half: short(validated.nearness.half),
                spread: short(validated.nearness.spread).max(1e-9),
            },
        }
    }

    /// Whether it was fitted on this model, and so may answer on it.
    #[must_use]
    pub fn fits(&self, model: &ModelInfo) -> bool {
        self.model == model.fingerprint && self.width() == model.width && self.layer <= model.layers
    }

    /// Numbers in the hidden states that it reads.
    #[must_use]
    pub fn width(&self) -> usize {
        self.scale.mean.len()
    }

    /// Probabilities of its labels, and how near its examples a session lies, from the
    /// mean of the hidden states that it reads.
    #[must_use]
    pub fn read(&self, features: &[f32]) -> (Vec<f64>, f64) {
        let row = self.scale.apply(features);
        let distance = scope::distance(&row, &self.directions);
        (self.head.probabilities(&row, self.temperature), self.nearness.at(distance))
    }

    /// Whether it answers a question with these criteria.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] says what it answers.
    pub fn check(&self, criteria: &Criteria) -> Result<(), EngineError> {
        self.places(criteria).map(drop)
    }

    /// The answer to a question, from the features of a session.
    ///
    /// # Errors
    /// As [`Probe::check`].
    pub fn answer(&self, criteria: &Criteria, features: &[f32]) -> Result<Answer, EngineError> {
        let places = self.places(criteria)?;
        let (probabilities, mass) = self.read(features);
        let probabilities = places.iter().map(|&place| probabilities[place]).collect();
        let reading = Reading { probabilities, mass, argmax_is_label: true };
        Ok(Answer { rung: Rung::Probe, ..decide::answer(criteria, reading) })
    }

    /// Where each option's label stands among the probe's.
    fn places(&self, criteria: &Criteria) -> Result<Vec<usize>, EngineError> {
        let (kind, asked): (Kind, Vec<&str>) = match criteria {
            Criteria::Boolean { .. } => (Kind::Boolean, vec!["yes", "no"]),
            Criteria::Score(levels) => (Kind::Score, levels.iter().map(String::as_str).collect()),
            Criteria::Choice(options) => {
                (Kind::Choice, options.iter().map(|option| option.name.as_str()).collect())
            }
        };
        let place = |name: &&str| self.labels.iter().position(|label| label == name);
        let places: Option<Vec<usize>> = asked.iter().map(place).collect();
        let all = |places: &Vec<usize>| {
            let each_once = (0..self.labels.len()).all(|label| places.contains(&label));
            places.len() == self.labels.len() && each_once && (kind != Kind::Score || places.is_sorted())
        };
        match places {
            Some(places) if kind == self.kind && all(&places) => Ok(places),
            _ => Err(EngineError::Invalid(format!(
                "the probe answers a {} of {}, it was asked a {} of {}",
                self.kind.name(),
                self.labels.join(", "),
                kind.name(),
                asked.join(", ")
            ))),
        }
    }

    /// The file's text.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (weights, bias) = match &self.head {
            Head::Names { weights, bias } => (
                weights.iter().rev().skip(1).rev().map(|row| pack(row)).collect(),
                bias[..bias.len() - 1].to_vec(),
            ),
            Head::Levels { weights, thresholds } => (vec![pack(weights)], thresholds.clone()),
        };
        let file = File {
            format: FORMAT,
            kind: self.kind,
            question: self.question.clone(),
            labels: self.labels.clone(),
            span: self.span,
            layer: self.layer,
            model: format!("{:032x}", self.model),
            examples: format!("{:032x}", self.examples),
            counts: self.counts.clone(),
            quality: self.quality.clone(),
            temperature: self.temperature,
            mean: pack(&self.scale.mean),
            deviation: pack(&self.scale.deviation),
            weights,
            bias,
            directions: self.directions.iter().map(|row| pack(row)).collect(),
            half: self.nearness.half,
            spread: self.nearness.spread,
        };
        serde_json::to_string_pretty(&file).expect("numbers and strings become JSON") + "\n"
    }

    /// Reads a file's text.
    ///
    /// # Errors
    /// Says what a file of a probe has and this one lacks.
    pub fn from_json(text: &str) -> Result<Self, ArtifactError> {
        if text.len() > MAX_ARTIFACT {
            return wrong(format!("{} bytes, a probe has at most {MAX_ARTIFACT}", text.len()));
        }
        let file: File = serde_json::from_str(text).map_err(|error| ArtifactError(error.to_string()))?;
        if file.format != FORMAT {
            return wrong(format!("format {}, this server reads {FORMAT}", file.format));
        }
        let labels = file.labels.len();
        let most = if file.kind == Kind::Score { MAX_LEVELS } else { MAX_OPTIONS };
        if !(2..=most).contains(&labels) || (file.kind == Kind::Boolean && file.labels != ["yes", "no"]) {
            return wrong(format!("a {} of the labels {}", file.kind.name(), file.labels.join(", ")));
        }
        let mean = unpack("mean", &file.mean, None)?;
        let width = mean.len();
        let deviation = unpack("deviation", &file.deviation, Some(width))?;
        if deviation.iter().any(|&deviation| deviation <= 0.0) {
            return wrong("a deviation that is not above 0".into());
        }
        let rows = |what: &str, rows: &[String]| -> Result<Vec<Vec<f64>>, ArtifactError> {
            rows.iter().map(|row| unpack(what, row, Some(width))).collect()
        };
        let mut weights = rows("weights", &file.weights)?;
        let directions = rows("directions", &file.directions)?;
        let (expected, biases) =
            if file.kind == Kind::Score { (1, labels - 1) } else { (labels - 1, labels - 1) };
        if weights.len() != expected || file.bias.len() != biases || file.counts.len() != labels {
            return wrong(format!("weights and counts for other than {labels} labels"));
        }
        if directions.len() > scope::DIRECTIONS || file.layer == 0 {
            return wrong(format!("{} directions after block {}", directions.len(), file.layer));
        }
        let numbers = [file.half, file.spread];
        if !numbers.iter().chain(&file.bias).all(|number| number.is_finite())
            || !(0.1..=10.0).contains(&file.temperature)
            || file.spread <= 0.0
        {
            return wrong("a temperature, bias or nearness that no fit gives".into());
        }
        file.quality.check(labels).map_err(ArtifactError)?;
        let head = if file.kind == Kind::Score {
            if !file.bias.is_sorted() {
                return wrong("thresholds that do not ascend".into());
            }
            Head::Levels { weights: weights.remove(0), thresholds: file.bias }
        } else {
            weights.push(vec![0.0; width]);
            Head::Names { weights, bias: file.bias.into_iter().chain([0.0]).collect() }
        };
        Ok(Self {
            kind: file.kind,
            question: file.question,
            labels: file.labels,
            span: file.span,
            layer: file.layer,
            model: hash("model", &file.model)?,
            examples: hash("examples", &file.examples)?,
            counts: file.counts,
            quality: file.quality,
            temperature: file.temperature,
            scale: Scale { mean, deviation },
            head,
            directions,
            nearness: Nearness { half: file.half, spread: file.spread },
        })
    }
}

fn wrong<T>(what: String) -> Result<T, ArtifactError> {
    Err(ArtifactError(what))
}

fn hash(what: &str, text: &str) -> Result<u128, ArtifactError> {
    let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
    number.ok_or_else(|| ArtifactError(format!("{what} of {text:?}, 32 hexadecimal digits were expected")))
}

/// Seven digits, which any reader of JSON takes for the same number.
pub(super) fn short(number: f64) -> f64 {
    format!("{number:.6e}").parse().unwrap_or(number)
}

/// As bf16 keeps them.
fn rounded(numbers: &[f64]) -> Vec<f64> {
    numbers.iter().map(|&number| bf16::from_f64(number).to_f64()).collect()
}

fn pack(numbers: &[f64]) -> String {
    let bytes: Vec<u8> = numbers.iter().flat_map(|&number| bf16::from_f64(number).to_le_bytes()).collect();
    BASE64.encode(bytes)
}

fn unpack(what: &str, text: &str, width: Option<usize>) -> Result<Vec<f64>, ArtifactError> {
    let bytes = BASE64.decode(text).map_err(|error| ArtifactError(format!("{what}: {error}")))?;
    let (pairs, rest) = bytes.as_chunks::<2>();
    let count = pairs.len();
    if !rest.is_empty() || !(1..=MAX_WIDTH).contains(&count) || width.is_some_and(|width| width != count) {
        return wrong(format!("{what} of {} bytes", bytes.len()));
    }
    let numbers: Vec<f64> = pairs.iter().map(|&pair| bf16::from_le_bytes(pair).to_f64()).collect();
    if numbers.iter().any(|number| !number.is_finite()) {
        return wrong(format!("{what} with a number that is not finite"));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A probe of three names on six features, with what it was fitted to.
    fn fitted(kind: &str) -> (Probe, Vec<Vec<f32>>) {
        let header = format!("{{\"probe\": {{\"kind\": \"{kind}\", \"labels\": [\"a\", \"b\", \"c\"]}}}}\n");
        let rows: Vec<String> = (0..30)
            .map(|i| format!("{{\"text\": \"t{i}\", \"label\": \"{}\"}}", ["a", "b", "c"][i % 3]))
            .collect();
        let examples = Examples::parse(&(header + &rows.join("\n"))).unwrap();
        let features: Vec<Vec<f32>> = (0..30)
            .map(|i| {
                (0..6).map(|j| if j == 0 { (i % 3) as f32 } else { ((i * j) % 7) as f32 * 0.1 }).collect()
            })
            .collect();
        (Probe::fit(&examples, &features, 2, 7), features)
    }

    #[test]
    fn a_file_gives_back_the_probe_bit_for_bit() {
        for kind in ["choice", "score"] {
            let (probe, features) = fitted(kind);
            let text = probe.to_json();
            let again = Probe::from_json(&text).unwrap();
            assert_eq!(again, probe);
            assert_eq!(again.read(&features[4]), probe.read(&features[4]));
            assert!(probe.quality.accuracy > 0.9, "{:?}", probe.quality);
            let (probabilities, mass) = probe.read(&features[4]);
            assert!(probabilities[1] > 0.5 && mass > 0.3, "{probabilities:?} {mass}");
        }
    }

    #[test]
    fn options_may_be_asked_in_any_order_and_levels_only_in_theirs() {
        let option = |name: &str| decide::ChoiceOption { name: name.into(), description: None };
        let (probe, features) = fitted("choice");
        let criteria = Criteria::Choice(["c", "a", "b"].map(option).to_vec());
        let answer = probe.answer(&criteria, &features[4]).unwrap();
        assert_eq!((answer.verdict, answer.rung), (decide::Verdict::Choice(2), Rung::Probe));
        for names in [vec!["a", "b"], vec!["a", "b", "d"], vec!["a", "b", "b"]] {
            let criteria = Criteria::Choice(names.iter().map(|name| option(name)).collect());
            let error = probe.check(&criteria).unwrap_err().to_string();
            assert!(error.starts_with("the probe answers a choice of a, b, c"), "{error}");
        }
        let (probe, _) = fitted("score");
        let levels = |names: [&str; 3]| Criteria::Score(names.map(String::from).to_vec());
        assert!(probe.check(&levels(["a", "b", "c"])).is_ok());
        assert!(probe.check(&levels(["c", "b", "a"])).is_err());
    }

    #[test]
    fn a_hostile_file_is_refused() {
        let (probe, _) = fitted("choice");
        let good: serde_json::Value = serde_json::from_str(&probe.to_json()).unwrap();
        let nan = BASE64.encode([0xc0, 0x7f].repeat(6));
        let mut boast = good["quality"].clone();
        boast["accuracy"] = 7.into();
        let mut crooked = good["quality"].clone();
        crooked["confusion"] = serde_json::json!([[1]]);
        let changes: [(&str, serde_json::Value); 18] = [
            ("temperature", 1e-300.into()),
            ("quality", boast),
            ("quality", crooked),
            ("spread", 0.into()),
            ("half", serde_json::Value::Null),
            ("directions", serde_json::json!(["AAAA"])),
            ("format", 2.into()),
            ("kind", "boolean".into()),
            ("labels", serde_json::json!(["a"])),
            ("mean", "AAA".into()),
            ("mean", nan.clone().into()),
            ("deviation", BASE64.encode([0; 12]).into()),
            ("weights", serde_json::json!([nan])),
            ("bias", serde_json::json!([1.0])),
            ("temperature", 0.0.into()),
            ("layer", 0.into()),
            ("model", "xyz".into()),
            ("extra", 1.into()),
        ];
        for (key, value) in changes {
            let mut file = good.clone();
            file[key] = value;
            assert!(Probe::from_json(&file.to_string()).is_err(), "{key}");
        }
        let text = probe.to_json();
        for cut in (0..text.len() - 2).step_by(97) {
            assert!(Probe::from_json(&text[..cut]).is_err(), "cut at {cut}");
        }
        assert!(Probe::from_json(&" ".repeat(MAX_ARTIFACT + 1)).is_err());
    }
}
