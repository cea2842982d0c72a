//! The sampling fields that chat completions and completions share, and the fields that would change the
//! result but that this server does not honour, which are refused rather than ignored.

use forkpoint_engine::Sampling;
use serde::Deserialize;
use serde_json::Value;

use super::error::{ApiError, Kind};
use super::value::TextOr;

/// Stop strings that a request may name; OpenAI takes 4.
const MAX_STOP: usize = 16;

/// How a reply is sampled and delivered.
#[derive(Debug, Default, Deserialize)]
pub struct SamplingFields {
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<TextOr<String>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    ignore_eos: Option<bool>,
    /// Whether the reply arrives as server-sent events.
    #[serde(default)]
    pub stream: Option<bool>,
    /// How the stream ends.
    pub stream_options: Option<StreamOptions>,
    /// Keeps this request's pages apart from those of requests with another salt.
    pub cache_salt: Option<String>,
}

/// OpenAI's `stream_options`.
#[derive(Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// Whether a last chunk carries the usage.
    pub include_usage: Option<bool>,
}

impl SamplingFields {
    /// The engine's sampling, ranges checked; what the client leaves out is as `usual`. Log-probabilities are the
    /// caller's to set: the two routes ask for them differently.
    ///
    /// # Errors
    /// [`Kind::Invalid`] names the field.
    pub fn sampling(&self, usual: &Sampling) -> Result<Sampling, ApiError> {
        let mut sampling = Sampling { seed: self.seed.map(i64::cast_unsigned), ..usual.clone() };
        let set = |slot: &mut f32, value: Option<f32>| *slot = value.unwrap_or(*slot);
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.repetition_penalty, self.repetition_penalty);
        if let Some(top_k) = self.top_k {
            // -1 means all tokens in vLLM, 0 in llama.cpp.
            let top_k = if top_k == -1 { 0 } else { top_k };
            sampling.top_k = u32::try_from(top_k).map_err(|_| {
                ApiError::field("top_k", format!("must be -1, 0 or a positive number, got {top_k}"))
            })?;
        }
        for (name, value) in
            [("max_tokens", self.max_tokens), ("max_completion_tokens", self.max_completion_tokens)]
        {
            if value == Some(0) {
                return Err(ApiError::field(name, "must be at least 1, got 0"));
            }
        }
        sampling.max_tokens = self.max_completion_tokens.or(self.max_tokens);
        sampling.ignore_eos = self.ignore_eos.unwrap_or(sampling.ignore_eos);
        sampling.stop = match &self.stop {
            None => Vec::new(),
            Some(TextOr::Text(text)) => vec![text.clone()],
            Some(TextOr::Many(many)) if many.len() > MAX_STOP => {
                let message = format!("at most {MAX_STOP} strings, got {}", many.len());
                return Err(ApiError::field("stop", message));
            }
            Some(TextOr::Many(many)) => many.clone(),
        };
        if sampling.stop.iter().any(String::is_empty) {
            return Err(ApiError::field("stop", "a stop string must not be empty"));
        }
        sampling.validate().map_err(|error| {
            let error = ApiError::from(error);
            // The engine's message opens with the field's name.
            let field = error.message.split(' ').next().unwrap_or_default().to_owned();
            ApiError { path: vec![Value::from(field)], ..error }
        })?;
        Ok(sampling)
    }

    /// Whether the reply is to be streamed.
    #[must_use]
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether the stream's last chunk carries the usage.
    #[must_use]
    pub fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true))
    }
}

/// A field that would change the result, and the values that would not.
struct Unsupported {
    field: &'static str,
    harmless: fn(&Value) -> bool,
    instead: &'static str,
}

/// Each row: the field, values of it that change nothing, and what the client is told otherwise.
const UNSUPPORTED: &[Unsupported] = &[
    row("n", is_one, "only 1 reply a request is supported yet; send the request again for another"),
    row("best_of", is_one, "only 1 candidate is supported yet"),
    row("response_format", is_text_format, "only {\"type\": \"text\"} is supported yet"),
    row("tool_choice", is_auto, "only \"auto\" and \"none\" are supported yet"),
    row("functions", is_empty, "is not supported; use `tools`"),
    row("function_call", is_auto, "is not supported; use `tools`"),
    row("presence_penalty", is_zero, "is not supported yet; use `repetition_penalty`"),
    row("frequency_penalty", is_zero, "is not supported yet; use `repetition_penalty`"),
    row("logit_bias", is_empty, "is not supported yet"),
    row("modalities", is_text_only, "only [\"text\"] is supported"),
    row("audio", is_empty, "audio is not supported"),
    row("web_search_options", Value::is_null, "web search is not supported"),
    row("suffix", is_empty, "is not supported yet"),
    row("echo", is_false, "is not supported yet"),
    row("min_tokens", is_zero, "is not supported yet"),
    row("use_beam_search", is_false, "is not supported"),
    row("stop_token_ids", is_empty, "is not supported yet; use `stop`"),
    row("bad_words", is_empty, "is not supported yet"),
    row("continue_final_message", is_false, "is not supported yet"),
    row("chat_template", Value::is_null, "the model's own chat template is used"),
    row("chat_template_kwargs", is_empty, "is not supported yet"),
    row("documents", is_empty, "is not supported; put the texts into messages"),
    row("structured_outputs", is_empty, "is not supported yet"),
    row("guided_json", Value::is_null, "is not supported yet"),
    row("guided_regex", Value::is_null, "is not supported yet"),
    row("guided_choice", Value::is_null, "is not supported yet; /v1/systemone answers choices"),
    row("guided_grammar", Value::is_null, "is not supported yet"),
    row("grammar", is_empty, "is not supported yet"),
    row("json_schema", Value::is_null, "is not supported yet"),
];

const fn row(field: &'static str, harmless: fn(&Value) -> bool, instead: &'static str) -> Unsupported {
    Unsupported { field, harmless, instead }
}

fn is_one(value: &Value) -> bool {
    value.as_u64() == Some(1)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_false(value: &Value) -> bool {
    value == &Value::Bool(false)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

fn is_auto(value: &Value) -> bool {
    matches!(value.as_str(), Some("auto" | "none"))
}

fn is_text_format(value: &Value) -> bool {
    value["type"] == "text"
}

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item == "text"))
}

/// Refuses what the server would have to ignore although it changes the result.
///
/// # Errors
/// [`Kind::Unsupported`] names the field and what to do instead.
pub fn refuse_unsupported(body: &Value) -> Result<(), ApiError> {
    for unsupported in UNSUPPORTED {
        match body.get(unsupported.field) {
            None | Some(Value::Null) => {}
            Some(value) if (unsupported.harmless)(value) => {}
            Some(_) => {
                return Err(
                    ApiError::field(unsupported.field, unsupported.instead).with_kind(Kind::Unsupported)
                );
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::value::read;
    use super::*;

    fn sampling(body: Value) -> Result<Sampling, ApiError> {
        read::<SamplingFields>(&body)?.sampling(&Sampling::default())
    }

    #[test]
    fn fields_reach_the_engine() {
        let got = sampling(json!({
            "temperature": 0.5, "top_p": 0.25, "top_k": -1, "min_p": 0.125, "repetition_penalty": 1.5, "seed": -1,
            "stop": "END", "max_tokens": 7, "max_completion_tokens": 9, "user": "ignored", "ignore_eos": true
        }))
        .unwrap();
        let want = Sampling {
            temperature: 0.5,
            top_p: 0.25,
            top_k: 0,
            min_p: 0.125,
            repetition_penalty: 1.5,
            seed: Some(u64::MAX),
            max_tokens: Some(9),
            stop: vec!["END".into()],
            ignore_eos: true,
            logprobs: None,
        };
        assert_eq!(got, want);
    }

    #[test]
    fn null_keeps_the_default() {
        let got =
            sampling(json!({"temperature": null, "stop": null, "max_tokens": null, "seed": null})).unwrap();
        assert_eq!(got, Sampling::default());
    }

    #[test]
    fn bad_values_name_their_field() {
        let cases = [
            (json!({"temperature": "hot"}), "temperature: invalid type: string \"hot\", expected f32"),
            (json!({"temperature": -1}), "temperature must be from 0 to"),
            (json!({"top_p": 1.5}), "top_p must be from 0 to 1"),
            (json!({"top_k": -2}), "top_k: must be -1, 0 or a positive number, got -2"),
            (json!({"max_tokens": 0}), "max_tokens: must be at least 1, got 0"),
            (json!({"max_tokens": -1}), "max_tokens: invalid value: integer `-1`"),
            (json!({"stop": ["a", ""]}), "stop: a stop string must not be empty"),
            (json!({"stop": ["a", 1]}), "stop[1]: invalid type: integer `1`"),
            (json!({"stop": vec!["x"; 17]}), "stop: at most 16 strings, got 17"),
            (json!({"stream": "yes"}), "stream: invalid type: string \"yes\", expected a boolean"),
        ];
        for (body, message) in cases {
            let error = sampling(body.clone()).unwrap_err();
            assert!(error.message.starts_with(message), "{body}: {}", error.message);
            assert!(!error.path.is_empty(), "{body}");
        }
    }

    #[test]
    fn what_changes_the_result_is_refused_and_what_does_not_is_not() {
        let refused = [
            json!({"n": 2}),
            json!({"response_format": {"type": "json_object"}}),
            json!({"tool_choice": "required"}),
            json!({"presence_penalty": 0.5}),
            json!({"logit_bias": {"50256": -100}}),
        ];
        for body in refused {
            assert_eq!(refuse_unsupported(&body).unwrap_err().kind, Kind::Unsupported, "{body}");
        }
        let taken = [
            json!({"n": 1, "response_format": {"type": "text"}, "tool_choice": "auto"}),
            json!({"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}),
            json!({"n": null, "store": true, "metadata": {"a": "b"}, "user": "x", "unheard_of": 1}),
        ];
        for body in taken {
            refuse_unsupported(&body).unwrap();
        }
    }
}
