//! How a model's makers recommend to sample it: what a client that says nothing
//! gets.

use serde_json::Value;

use super::{At, Gguf, LoadError};
use crate::generate::Sampling;

/// The `general.sampling.*` keys of a GGUF file.
pub(super) fn from_gguf(at: At<'_>, gguf: &Gguf<'_>) -> Result<Sampling, LoadError> {
    let top_k = gguf.unsigned("general.sampling.top_k")?.map(|top_k| top_k as f64);
    let key = |name: &str| match name {
        // The one key whose value is a whole number.
        "top_k" => Ok(top_k),
        "temperature" => gguf.float("general.sampling.temp"),
        "repetition_penalty" => gguf.float("general.sampling.penalty_repeat"),
        name => gguf.float(&format!("general.sampling.{name}")),
    };
    sampling(at, key)
}

/// `generation_config.json`. Like vLLM this takes the numbers and leaves
/// `do_sample`, which many files that hold numbers do not set.
pub(super) fn from_json(at: At<'_>, generation: &Value) -> Result<Sampling, LoadError> {
    sampling(at, |name| Ok(generation.get(name).and_then(Value::as_f64)))
}

fn sampling(at: At<'_>, key: impl Fn(&str) -> Result<Option<f64>, LoadError>) -> Result<Sampling, LoadError> {
    let usual = Sampling::default();
    let number = |name: &str, usual: f32| Ok(key(name)?.map_or(usual, |value| value as f32));
    let sampling = Sampling {
        temperature: number("temperature", usual.temperature)?,
        top_p: number("top_p", usual.top_p)?,
        top_k: key("top_k")?.map_or(usual.top_k, |top_k| top_k.max(0.0) as u32),
        min_p: number("min_p", usual.min_p)?,
        repetition_penalty: number("repetition_penalty", usual.repetition_penalty)?,
        ..usual
    };
    match sampling.validate() {
        Ok(()) => Ok(sampling),
        Err(error) => Err(at.invalid("the recommended sampling", "numbers in range", error)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn numbers_of_a_generation_config_are_the_defaults() {
        let json = serde_json::json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1});
        let got = from_json(At(Path::new("x")), &json).unwrap();
        assert_eq!(got, Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..Sampling::default() });
        assert_eq!(from_json(At(Path::new("x")), &Value::Null).unwrap(), Sampling::default());
        let wrong = serde_json::json!({"top_p": 7});
        let error = from_json(At(Path::new("x")), &wrong).unwrap_err().to_string();
        assert!(error.contains("top_p must be from 0 to 1, got 7"), "{error}");
    }
}
