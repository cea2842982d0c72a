//! Probes: fixed questions, answered from labelled examples.
//!
//! Small models are poor at answering a question that they are asked, and good at
//! something else: what a text means is in the activations that its prefill computed.
//! A probe is a linear head on the mean of one middle layer's hidden states over a
//! span of a session, fitted from [`Examples`]. It costs no token, and its
//! probabilities are calibrated by cross-validation. docs/decisions/007
//! has what was measured to choose the layer, the span and the mean.

mod artifact;
mod ask;
mod compact;
mod examples;
mod fit;
mod learn;
mod lines;
mod quality;
mod scope;

pub use artifact::{ArtifactError, MAX_ARTIFACT, Probe};
pub use examples::{Example, Examples, ExamplesError, FEW, Header, Kind, MAX_BYTES, MAX_EXAMPLES, Row};
pub use learn::{Evaluation, Labelled, Learned, ProbeError};
pub use quality::{LabelReads, Quality, calibration_error};

/// How deep a probe reads, as a share of the model's blocks: where label-free sentence
/// meaning peaked on SmolLM2, over eight questions.
const DEPTH: (usize, usize) = (1, 2);

/// The count of blocks after which a probe reads a model of so many.
#[must_use]
pub fn layer(layers: usize) -> usize {
    (layers * DEPTH.0).div_ceil(DEPTH.1).clamp(1, layers.max(1))
}
