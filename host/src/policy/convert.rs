//! Between the contract's types and the engine's. Each function is total: what cannot be said on the other side
//! is an error with a sentence for the policy's author.

use forkpoint_engine as fp;
use serde_json::{Value, json};

use super::contract::{engine, host, types};
use super::plan::SamplingOverrides;
use super::store::StoreError;
use super::trace::{Failure, FailureKind};

/// A turn for the guest. Tool calls that are not in OpenAI's shape are left out.
pub(super) fn message_out(message: &fp::Message) -> types::Message {
    let calls = message.tool_calls.as_ref().and_then(Value::as_array);
    types::Message {
        role: match message.role {
            fp::Role::System => types::Role::System,
            fp::Role::User => types::Role::User,
            fp::Role::Assistant => types::Role::Assistant,
            fp::Role::Tool => types::Role::Tool,
        },
        content: message.content.clone(),
        tool_calls: calls.into_iter().flatten().filter_map(tool_call_out).collect(),
        tool_call_id: message.tool_call_id.clone(),
    }
}

fn tool_call_out(call: &Value) -> Option<types::ToolCall> {
    let function = call.get("function")?;
    // Clients write the arguments as a string of JSON; some write the JSON itself.
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    };
    let text = |value: &Value, key| value.get(key).and_then(Value::as_str).map(str::to_owned);
    Some(types::ToolCall {
        id: text(call, "id").unwrap_or_default(),
        name: text(function, "name")?,
        arguments,
    })
}

/// A turn from the guest.
pub(super) fn message_in(message: types::Message) -> fp::Message {
    let calls: Vec<Value> = message.tool_calls.into_iter().map(tool_call_in).collect();
    fp::Message {
        role: match message.role {
            types::Role::System => fp::Role::System,
            types::Role::User => fp::Role::User,
            types::Role::Assistant => fp::Role::Assistant,
            types::Role::Tool => fp::Role::Tool,
        },
        content: message.content,
        tool_calls: (!calls.is_empty()).then_some(Value::Array(calls)),
        tool_call_id: message.tool_call_id,
    }
}

fn tool_call_in(call: types::ToolCall) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": { "name": call.name, "arguments": call.arguments },
    })
}

/// A tool for the guest.
pub(super) fn tool_out(tool: &fp::Tool) -> types::Tool {
    types::Tool {
        name: tool.name.clone(),
        description: tool.description.clone(),
        parameters: tool.parameters.to_string(),
    }
}

/// What the client set, for the guest.
pub(super) fn sampling_out(sampling: &SamplingOverrides) -> types::Sampling {
    types::Sampling {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        max_tokens: sampling.max_tokens,
        seed: sampling.seed,
        stop: sampling.stop.clone(),
    }
}

/// What the guest sets.
pub(super) fn sampling_in(sampling: types::Sampling) -> SamplingOverrides {
    SamplingOverrides {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        max_tokens: sampling.max_tokens,
        seed: sampling.seed,
        stop: sampling.stop,
    }
}

/// A question for the engine, and the probe that it names.
pub(super) fn question_in(question: engine::Question) -> (fp::Question, Option<String>) {
    let criteria = match question.criteria {
        engine::Criteria::Choice(options) => fp::Criteria::Choice(
            options
                .into_iter()
                .map(|option| fp::ChoiceOption { name: option.name, description: option.description })
                .collect(),
        ),
        engine::Criteria::Boolean(sides) => fp::Criteria::Boolean { yes: sides.yes, no: sides.no },
        engine::Criteria::Score(levels) => fp::Criteria::Score(levels),
    };
    (fp::Question { instructions: question.instructions, criteria }, question.probe)
}

/// An answer for the guest.
pub(super) fn answer_out(question: &fp::Question, answer: &fp::Answer) -> engine::Answer {
    let probabilities = answer.probabilities.clone();
    let confidence = answer.confidence;
    let verdict = match answer.verdict {
        fp::Verdict::Choice(place) => {
            let name = match &question.criteria {
                fp::Criteria::Choice(options) => options.get(place).map(|option| option.name.clone()),
                _ => None,
            };
            let choice = name.unwrap_or_default();
            engine::Verdict::Choice(engine::ChoiceAnswer { choice, probabilities, confidence })
        }
        fp::Verdict::Boolean(yes) => engine::Verdict::Boolean(yes),
        fp::Verdict::Score(score) => {
            engine::Verdict::Score(engine::ScoreAnswer { score, probabilities, confidence })
        }
    };
    let rung = match answer.rung {
        fp::Rung::Labels => engine::Rung::Labels,
        fp::Rung::Probe => engine::Rung::Probe,
    };
    engine::Answer { verdict, mass: answer.mass, rung }
}

/// The bytes of a question that reach the prompt: a lower bound on what it costs follows from them.
pub(super) fn question_bytes(question: &fp::Question) -> usize {
    let text = |part: &Option<String>| part.as_ref().map_or(0, String::len);
    let criteria = match &question.criteria {
        fp::Criteria::Choice(options) => {
            options.iter().map(|option| option.name.len() + text(&option.description)).sum()
        }
        fp::Criteria::Boolean { yes, no } => text(yes) + text(no),
        fp::Criteria::Score(levels) => levels.iter().map(String::len).sum(),
    };
    question.instructions.len() + criteria
}

/// A reply for the guest.
pub(super) fn completion_out(completion: fp::Completion) -> engine::Completion {
    let finish_reason = match completion.reason {
        fp::FinishReason::Stop => "stop",
        fp::FinishReason::Length => "length",
    };
    engine::Completion {
        text: completion.text,
        tokens: completion.tokens,
        finish_reason: finish_reason.into(),
    }
}

/// What the guest is told when the engine did not serve a call.
pub(super) fn failure_out(error: &fp::EngineError) -> engine::Failure {
    let message = error.to_string();
    match error {
        fp::EngineError::Invalid(_) | fp::EngineError::Template(_) => engine::Failure::Invalid(message),
        fp::EngineError::TooLong { .. } | fp::EngineError::Full { .. } => engine::Failure::Full(message),
        _ => engine::Failure::Unavailable(message),
    }
}

/// What the guest was told, as it is written down.
pub(super) fn failure_in(failure: &engine::Failure) -> Failure {
    let (kind, message) = match failure {
        engine::Failure::Invalid(message) => (FailureKind::Invalid, message),
        engine::Failure::Full(message) => (FailureKind::Full, message),
        engine::Failure::Budget(message) => (FailureKind::Budget, message),
        engine::Failure::Denied(message) => (FailureKind::Denied, message),
        engine::Failure::Unavailable(message) => (FailureKind::Unavailable, message),
    };
    Failure { kind, message: message.clone() }
}

/// What the guest is told when its store did not take a value.
pub(super) fn store_failure_out(error: &StoreError) -> host::StoreFailure {
    let message = error.to_string();
    match error {
        StoreError::TooLong(_) => host::StoreFailure::TooLong(message),
        StoreError::Full { .. } => host::StoreFailure::Full(message),
        StoreError::NotACounter(_) => host::StoreFailure::NotACounter(message),
        StoreError::Overflow(_) => host::StoreFailure::Overflow(message),
        StoreError::Unavailable(_) => host::StoreFailure::Unavailable(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_call_survives_the_way_in_and_out() {
        let calls = json!([{ "id": "c1", "type": "function",
            "function": { "name": "bash", "arguments": "{\"cmd\":\"ls\"}" } }]);
        let mut message = fp::Message::new(fp::Role::Assistant, "");
        message.tool_calls = Some(calls);
        assert_eq!(message_in(message_out(&message)), message);
        message.tool_calls =
            Some(json!([{ "function": { "name": "bash", "arguments": { "cmd": "ls" } } }, 7]));
        let out = message_out(&message);
        assert_eq!(out.tool_calls.len(), 1, "what is no call is left out");
        assert_eq!(out.tool_calls[0].arguments, "{\"cmd\":\"ls\"}");
    }

    #[test]
    fn a_choice_is_answered_by_name() {
        let option = |name: &str| fp::ChoiceOption { name: name.into(), description: None };
        let criteria = fp::Criteria::Choice(vec![option("a"), option("b")]);
        let question = fp::Question { instructions: String::new(), criteria };
        let answer = fp::Answer {
            verdict: fp::Verdict::Choice(1),
            probabilities: vec![0.25, 0.75],
            confidence: 0.5,
            mass: 0.9,
            argmax_is_label: true,
            rung: fp::Rung::Probe,
        };
        let engine::Verdict::Choice(choice) = answer_out(&question, &answer).verdict else { panic!() };
        assert_eq!((choice.choice.as_str(), choice.probabilities[1]), ("b", 0.75));
    }
}
