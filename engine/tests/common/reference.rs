//! What a reference implementation computed for nine prompts: `tests/data/reference`.

use std::collections::BTreeMap;

/// One prompt and what follows it.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Reference {
    /// The prompt's name.
    pub(crate) id: String,
    /// The prompt, special tokens written out.
    pub(crate) text: String,
    /// Its tokens.
    pub(crate) token_ids: Vec<u32>,
    /// The 20 likeliest next tokens.
    pub(crate) top20: Vec<Candidate>,
    /// Tokens that answers start with, by their text.
    pub(crate) labels: BTreeMap<String, Label>,
    /// The likeliest token after each position.
    pub(crate) argmax: Vec<u32>,
    /// What greedy decoding gives, to the end of the turn or 32 tokens; empty for the longest prompt.
    #[serde(default)]
    pub(crate) greedy32: Vec<u32>,
}

/// A token and its logarithmic probability, in nats.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Candidate {
    pub(crate) id: u32,
    pub(crate) logprob: f32,
}

/// A label's first token, its logarithmic probability and its logit.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct Label {
    pub(crate) first_id: u32,
    pub(crate) logprob: f32,
    pub(crate) logit: f32,
}

/// All nine.
pub(crate) fn references() -> Vec<Reference> {
    let read = |id: &str| {
        let path = super::data(&format!("reference/{id}.json"));
        let text = std::fs::read_to_string(&path).expect("the reference is there");
        serde_json::from_str(&text).expect("the reference has this shape")
    };
    let ids = ["capital", "code", "multi", "noul", "raw", "route4", "score", "state3k", "state512"];
    ids.map(read).into()
}
