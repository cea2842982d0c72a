//! `POST /v1/decisions`: OpenAI's form of typed questions, over an `input` of messages.

use forkpoint_engine::{Answer, ChoiceOption, Conversation, Criteria, Message, Question, Role, Verdict};
use serde_json::{Map, Value, json};

use super::error::{ApiError, Kind};
use super::systemone::{Place, check_levels, expected_level, too_many_options};
use super::value::kind_of;

/// Questions that one call may ask, as at OpenAI.
const MAX_QUESTIONS: usize = 400;

/// A request, checked.
#[derive(Debug)]
pub struct DecisionsRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// The input as turns.
    pub conversation: Conversation,
    /// The questions, for the engine.
    pub questions: Vec<Question>,
    /// For each question its name, and the values that its options stand for.
    asked: Vec<Asked>,
    /// Keeps this request's pages apart from those of requests with another salt.
    pub cache_salt: Option<String>,
}

#[derive(Debug)]
struct Asked {
    name: Option<String>,
    /// A choice's values as they were sent: strings or booleans.
    values: Vec<Value>,
    /// A score's labels.
    labels: Vec<String>,
}

impl DecisionsRequest {
    /// Reads a request out of its body.
    ///
    /// # Errors
    /// [`Kind::Invalid`] or [`Kind::Unsupported`], naming the field.
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        let model = text_field(body, "model")?;
        let cache_salt = text_field(body, "cache_salt")?;
        let place = Place(vec![json!("input")]);
        let messages = match body.get("input") {
            None => return Err(place.error("this field is required")),
            Some(Value::String(text)) => vec![Message::new(Role::User, text.clone())],
            Some(Value::Array(items)) if !items.is_empty() => items
                .iter()
                .enumerate()
                .map(|(index, item)| read_item(item, &place.child(index)))
                .collect::<Result<_, _>>()?,
            Some(Value::Array(_)) => return Err(place.error("at least one message is needed")),
            Some(other) => {
                return Err(
                    place.error(format!("must be a string or an array of messages, got {}", kind_of(other)))
                );
            }
        };
        let place = Place(vec![json!("questions")]);
        let list = match body.get("questions") {
            None => return Err(place.error("this field is required")),
            Some(Value::Array(list)) => list,
            Some(other) => return Err(place.error(format!("must be an array, got {}", kind_of(other)))),
        };
        if !(1..=MAX_QUESTIONS).contains(&list.len()) {
            return Err(
                place.error(format!("from 1 to {MAX_QUESTIONS} questions a call, got {}", list.len()))
            );
        }
        let (mut questions, mut asked) = (Vec::with_capacity(list.len()), Vec::with_capacity(list.len()));
        for (index, question) in list.iter().enumerate() {
            let (question, names) = read_question(question, &place.child(index))?;
            questions.push(question);
            asked.push(names);
        }
        let conversation = Conversation { messages, tools: Vec::new() };
        Ok(Self { model, conversation, questions, asked, cache_salt })
    }

    /// The response's `answers`, in the order asked.
    #[must_use]
    pub fn answers(&self, answers: &[Answer]) -> Value {
        self.asked.iter().zip(answers).map(|(asked, answer)| asked.show(answer)).collect()
    }
}

impl Asked {
    fn show(&self, answer: &Answer) -> Value {
        let mut shown = match answer.verdict {
            Verdict::Boolean(yes) => json!({ "type": "predicate", "name": self.name, "probability": yes }),
            Verdict::Choice(index) => {
                let probabilities: Vec<Value> = self
                    .values
                    .iter()
                    .zip(&answer.probabilities)
                    .map(|(value, probability)| json!({ "value": value, "probability": probability }))
                    .collect();
                json!({
                    "type": "choice",
                    "name": self.name,
                    "choice": self.values.get(index),
                    "confidence": answer.confidence,
                    "probabilities": probabilities,
                })
            }
            Verdict::Score(_) => {
                let probabilities: Vec<Value> = self
                    .labels
                    .iter()
                    .zip(&answer.probabilities)
                    .enumerate()
                    .map(|(value, (label, probability))| {
                        json!({ "value": value, "label": label, "probability": probability })
                    })
                    .collect();
                json!({
                    "type": "score",
                    "name": self.name,
                    "score": expected_level(&answer.probabilities),
                    "confidence": answer.confidence,
                    "probabilities": probabilities,
                })
            }
        };
        shown["x_label_mass"] = json!(answer.mass);
        shown
    }
}

fn text_field(body: &Value, field: &str) -> Result<Option<String>, ApiError> {
    match body.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(other) => Err(ApiError::field(field, format!("must be a string, got {}", kind_of(other)))),
    }
}

/// One item of the input: a message, a call of a tool, or what the tool answered.
fn read_item(item: &Value, place: &Place) -> Result<Message, ApiError> {
    let Value::Object(fields) = item else {
        return Err(place.error(format!("must be an object, got {}", kind_of(item))));
    };
    let text = |name: &str| match fields.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => Err(place.child(name).error(format!("must be a string, got {}", kind_of(other)))),
        None => Err(place.child(name).error("this field is required")),
    };
    match fields.get("type").and_then(Value::as_str).unwrap_or("message") {
        "message" => {
            let role = match text("role")?.as_str() {
                "user" => Role::User,
                "developer" | "system" => Role::System,
                "assistant" => Role::Assistant,
                other => {
                    let message = format!("must be user, developer, system or assistant, got {other:?}");
                    return Err(place.child("role").error(message));
                }
            };
            Ok(Message::new(role, read_content(fields.get("content"), &place.child("content"))?))
        }
        call @ ("function_call" | "custom_tool_call") => {
            let arguments = text(if call == "function_call" { "arguments" } else { "input" })?;
            let calls = json!([{
                "id": text("call_id")?,
                "type": "function",
                "function": { "name": text("name")?, "arguments": arguments },
            }]);
            Ok(Message { tool_calls: Some(calls), ..Message::new(Role::Assistant, "") })
        }
        "function_call_output" | "custom_tool_call_output" => {
            let output = read_content(fields.get("output"), &place.child("output"))?;
            Ok(Message { tool_call_id: Some(text("call_id")?), ..Message::new(Role::Tool, output) })
        }
        other => {
            let error = place.child("type").error(format!("items of type {other:?} are not supported"));
            Err(error.with_kind(Kind::Unsupported))
        }
    }
}

/// A string, or parts joined by lines.
fn read_content(content: Option<&Value>, place: &Place) -> Result<String, ApiError> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text.clone()),
        Some(Value::Array(parts)) => parts,
        Some(other) => {
            return Err(place.error(format!("must be a string or an array of parts, got {}", kind_of(other))));
        }
        None => return Err(place.error("this field is required")),
    };
    let mut lines = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let place = place.child(index);
        match part["type"].as_str() {
            Some("input_text" | "output_text" | "text") => match part["text"].as_str() {
                Some(text) => lines.push(text.to_owned()),
                None => return Err(place.child("text").error("must be a string")),
            },
            Some("input_json") => match part.get("json").or_else(|| part.get("data")) {
                Some(value @ (Value::Object(_) | Value::Array(_))) => lines.push(value.to_string()),
                _ => return Err(place.child("json").error("must be an object or an array")),
            },
            Some("input_image") => {
                return Err(place
                    .child("type")
                    .error("images are not supported")
                    .with_kind(Kind::Unsupported));
            }
            _ => {
                let message = format!("must be \"input_text\" or \"input_json\", got {}", part["type"]);
                return Err(place.child("type").error(message));
            }
        }
    }
    Ok(lines.join("\n"))
}

fn read_question(question: &Value, place: &Place) -> Result<(Question, Asked), ApiError> {
    let Value::Object(fields) = question else {
        return Err(place.error(format!("must be an object, got {}", kind_of(question))));
    };
    let name = match fields.get("name") {
        None | Some(Value::Null) => None,
        Some(Value::String(name)) => Some(name.clone()),
        Some(other) => {
            return Err(place.child("name").error(format!("must be a string, got {}", kind_of(other))));
        }
    };
    let instructions = read_content(fields.get("instructions"), &place.child("instructions"))?;
    let mut asked = Asked { name, values: Vec::new(), labels: Vec::new() };
    let criteria = match fields.get("type").and_then(Value::as_str) {
        Some("predicate") => {
            if instructions.trim().is_empty() {
                return Err(place.child("instructions").error("must not be empty"));
            }
            Criteria::Boolean { yes: None, no: None }
        }
        Some("choice") => Criteria::Choice(read_choices(fields, place, &mut asked)?),
        Some("score") => Criteria::Score(read_levels(fields, place, &mut asked)?),
        _ => return Err(place.child("type").error("must be \"predicate\", \"choice\" or \"score\"")),
    };
    Ok((Question { instructions, criteria }, asked))
}

fn read_choices(
    fields: &Map<String, Value>,
    place: &Place,
    asked: &mut Asked,
) -> Result<Vec<ChoiceOption>, ApiError> {
    let place = place.child("choices");
    let Some(Value::Array(choices)) = fields.get("choices") else {
        return Err(place.error("a choice needs an array of choices"));
    };
    if choices.len() < 2 {
        return Err(place.error(format!("at least 2 choices are needed, got {}", choices.len())));
    }
    too_many_options(choices.len(), &place)?;
    let mut options: Vec<ChoiceOption> = Vec::with_capacity(choices.len());
    for (index, choice) in choices.iter().enumerate() {
        let place = place.child(index);
        let name = match &choice["value"] {
            Value::String(value) if !value.is_empty() => value.clone(),
            Value::Bool(value) => value.to_string(),
            _ => return Err(place.child("value").error("must be a string that is not empty, or a boolean")),
        };
        // true and "true" are two values at OpenAI, but the model would read one name.
        if options.iter().any(|option| option.name == name) {
            return Err(place.child("value").error(format!("there are two choices named {name:?}")));
        }
        asked.values.push(choice["value"].clone());
        options.push(ChoiceOption { name, description: description(choice, &place)? });
    }
    Ok(options)
}

fn read_levels(
    fields: &Map<String, Value>,
    place: &Place,
    asked: &mut Asked,
) -> Result<Vec<String>, ApiError> {
    let place = place.child("levels");
    let Some(Value::Array(levels)) = fields.get("levels") else {
        return Err(place.error("a score needs an array of levels, lowest first"));
    };
    check_levels(levels.len(), &place)?;
    let mut texts = Vec::with_capacity(levels.len());
    for (index, level) in levels.iter().enumerate() {
        let place = place.child(index);
        let Some(label) = level["label"].as_str().filter(|label| !label.is_empty()) else {
            return Err(place.child("label").error("must be a string that is not empty"));
        };
        asked.labels.push(label.to_owned());
        texts.push(match description(level, &place)? {
            Some(description) => format!("{label}: {description}"),
            None => label.to_owned(),
        });
    }
    Ok(texts)
}

fn description(of: &Value, place: &Place) -> Result<Option<String>, ApiError> {
    match &of["description"] {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        other => Err(place.child("description").error(format!("must be a string, got {}", kind_of(other)))),
    }
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::Rung;

    use super::*;

    fn request() -> DecisionsRequest {
        DecisionsRequest::read(&json!({
            "model": "m",
            "input": [
                {"role": "developer", "content": "Judge."},
                {"role": "user", "content": [
                    {"type": "input_text", "text": "a"}, {"type": "input_json", "json": {"k": 1}}]},
                {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "questions": [
                {"type": "predicate", "name": "p", "instructions": "Is it?"},
                {"type": "choice", "instructions": "Which?", "choices": [{"value": true}, {"value": "no"}]},
                {"type": "score", "instructions": [{"type": "input_text", "text": "How?"}],
                 "levels": [{"label": "lo"}, {"label": "hi", "description": "very"}]},
            ]
        }))
        .unwrap()
    }

    #[test]
    fn input_and_questions_reach_the_engine() {
        let request = request();
        let turns: Vec<(Role, &str)> =
            request.conversation.messages.iter().map(|turn| (turn.role, turn.content.as_str())).collect();
        let want = [
            (Role::System, "Judge."),
            (Role::User, "a\n{\"k\":1}"),
            (Role::Assistant, ""),
            (Role::Tool, "x"),
        ];
        assert_eq!(turns, want);
        assert_eq!(request.questions[2].criteria, Criteria::Score(vec!["lo".into(), "hi: very".into()]));
    }

    #[test]
    fn answers_keep_order_and_typed_values() {
        let answer = |verdict, probabilities: [f64; 2]| Answer {
            verdict,
            probabilities: probabilities.to_vec(),
            confidence: 0.5,
            mass: 0.25,
            argmax_is_label: true,
            rung: Rung::Labels,
        };
        let shown = request().answers(&[
            answer(Verdict::Boolean(0.75), [0.75, 0.25]),
            answer(Verdict::Choice(0), [0.75, 0.25]),
            answer(Verdict::Score(0.25), [0.75, 0.25]),
        ]);
        assert_eq!(shown[0]["probability"], 0.75);
        assert_eq!((&shown[1]["name"], &shown[1]["choice"]), (&Value::Null, &json!(true)));
        assert_eq!(shown[1]["probabilities"][1], json!({"value": "no", "probability": 0.25}));
        assert_eq!(shown[2]["score"], 0.25);
        assert_eq!(shown[2]["probabilities"][1], json!({"value": 1, "label": "hi", "probability": 0.25}));
    }

    #[test]
    fn bad_requests_name_the_place() {
        let question = |question: Value| json!({"input": "x", "questions": [question]});
        let cases = [
            (json!({"questions": []}), "input: this field is required"),
            (json!({"input": []}), "input: at least one message"),
            (json!({"input": [{"role": "tool", "content": "x"}]}), "input[0].role: must be user"),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "input[0].content[0].type: images are not supported",
            ),
            (json!({"input": "x", "questions": {}}), "questions: must be an array, got an object"),
            (json!({"input": "x", "questions": []}), "questions: from 1 to 400"),
            (
                question(json!({"type": "noul", "instructions": "?"})),
                "questions[0].type: must be \"predicate\"",
            ),
            (question(json!({"type": "predicate"})), "questions[0].instructions: this field is required"),
            (
                question(
                    json!({"type": "choice", "instructions": "?", "choices": [{"value": true}, {"value": "true"}]}),
                ),
                "questions[0].choices[1].value: there are two",
            ),
            (
                question(json!({"type": "score", "instructions": "?", "levels": [{"label": "a"}]})),
                "questions[0].levels: a score needs from 2 to 10 levels, got 1",
            ),
        ];
        for (body, message) in cases {
            let error = DecisionsRequest::read(&body).unwrap_err();
            assert!(error.message.starts_with(message), "{body}: {}", error.message);
        }
    }
}
