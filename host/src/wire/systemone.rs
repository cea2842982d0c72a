//! `POST /v1/systemone`: TypeSafe's typed questions about a state, and the short `prompt` + `schema` form.
//!
//! Question ids stay here: the engine sees instructions and criteria only.

use forkpoint_engine::decide::{MAX_LEVELS, MAX_OPTIONS};
use forkpoint_engine::{Answer, ChoiceOption, Conversation, Criteria, Message, Question, Role, Verdict};
use serde_json::{Map, Value, json};

use super::error::{ApiError, Kind};
use super::value::kind_of;

/// Questions that one call may ask.
const MAX_QUESTIONS: usize = 4096;

/// The id of the short form's only question.
const SHORT_FORM_ID: &str = "answer";

/// A request, checked: the state as a conversation, the questions as the engine takes them.
#[derive(Debug)]
pub struct SystemOneRequest {
    /// The model asked for.
    pub model: Option<String>,
    /// One user turn that holds the state.
    pub conversation: Conversation,
    /// For each question its id and, for a score, the levels as they were sent.
    pub asked: Vec<Asked>,
    /// The same questions, for the engine.
    pub questions: Vec<Question>,
    /// Keeps this request's pages apart from those of requests with another salt.
    pub cache_salt: Option<String>,
}

/// What answering a question needs besides the engine's answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    /// The client's name for it.
    pub id: String,
    /// A score's levels as they were sent; empty for the others.
    pub levels: Vec<Value>,
    /// Which probe is to answer, as `policy/probe` (`x_probe`).
    pub probe: Option<String>,
}

impl SystemOneRequest {
    /// Reads a request out of its body.
    ///
    /// # Errors
    /// [`Kind::Invalid`] or [`Kind::Unsupported`], with the path of what is wrong.
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        for media in ["assets", "images", "audio", "videos"] {
            if body.get(media).is_some_and(|value| !is_blank(value)) {
                let error = ApiError::field(media, "images and other media are not supported");
                return Err(error.with_kind(Kind::Unsupported));
            }
        }
        let model = optional_text(body, "model")?;
        let cache_salt = optional_text(body, "cache_salt")?;
        if let (None, Some(prompt), Some(schema)) =
            (body.get("questions"), body.get("prompt"), body.get("schema"))
        {
            let state = render_state(prompt, "prompt")?;
            let (question, levels) = read_schema(schema)?;
            let asked =
                vec![Asked { id: SHORT_FORM_ID.into(), levels, probe: optional_text(body, "x_probe")? }];
            let conversation = user_turn(state);
            return Ok(Self { model, conversation, asked, questions: vec![question], cache_salt });
        }
        let state = body.get("state").ok_or_else(|| ApiError::field("state", "this field is required"))?;
        let state = render_state(state, "state")?;
        let questions = match body.get("questions") {
            None => return Err(ApiError::field("questions", "this field is required")),
            Some(Value::Object(questions)) => questions,
            Some(other) => {
                let message = format!("must be an object of questions by id, got {}", kind_of(other));
                return Err(ApiError::field("questions", message));
            }
        };
        if questions.is_empty() {
            return Err(ApiError::field("questions", "at least one question is needed"));
        }
        if questions.len() > MAX_QUESTIONS {
            let message = format!("at most {MAX_QUESTIONS} questions a call, got {}", questions.len());
            return Err(ApiError::field("questions", message));
        }
        let (mut asked, mut read) =
            (Vec::with_capacity(questions.len()), Vec::with_capacity(questions.len()));
        for (id, question) in questions {
            let place = Place(vec![json!("questions"), json!(id)]);
            if id.is_empty() {
                return Err(place.error("a question's id must not be empty"));
            }
            let probe = read_probe(question, &place)?;
            let (question, levels) = read_question(question, &place, probe.is_some())?;
            asked.push(Asked { id: id.clone(), levels, probe });
            read.push(question);
        }
        Ok(Self { model, conversation: user_turn(state), asked, questions: read, cache_salt })
    }

    /// The response's `answers`, in the order asked.
    #[must_use]
    pub fn answers(&self, answers: &[Answer]) -> Value {
        let mut map = Map::with_capacity(answers.len());
        for ((asked, question), answer) in self.asked.iter().zip(&self.questions).zip(answers) {
            let mut shown = show(asked, question, answer);
            if asked.probe.is_some() {
                shown["x_rung"] = json!(answer.rung);
            }
            map.insert(asked.id.clone(), shown);
        }
        Value::Object(map)
    }
}

fn user_turn(state: String) -> Conversation {
    Conversation { messages: vec![Message::new(Role::User, state)], tools: Vec::new() }
}

fn show(asked: &Asked, question: &Question, answer: &Answer) -> Value {
    let numbered = |values: &[Value]| -> Value {
        values
            .iter()
            .enumerate()
            .map(|(level, value)| (level.to_string(), value.clone()))
            .collect::<Map<_, _>>()
            .into()
    };
    match (&answer.verdict, &question.criteria) {
        (Verdict::Choice(index), Criteria::Choice(options)) => {
            let probabilities: Map<String, Value> = options
                .iter()
                .zip(&answer.probabilities)
                .map(|(option, probability)| (option.name.clone(), json!(probability)))
                .collect();
            json!({
                "type": "choice",
                "choice": options.get(*index).map(|option| &option.name),
                "confidence": answer.confidence,
                "probabilities": probabilities,
                "x_label_mass": answer.mass,
            })
        }
        (Verdict::Score(_), Criteria::Score(_)) => {
            let probabilities: Vec<Value> = answer.probabilities.iter().map(|p| json!(p)).collect();
            json!({
                "type": "score",
                "score": expected_level(&answer.probabilities),
                "confidence": answer.confidence,
                "legend": numbered(&asked.levels),
                "probabilities": numbered(&probabilities),
                "x_label_mass": answer.mass,
            })
        }
        (Verdict::Boolean(yes), _) => json!({ "type": "noul", "noul": yes, "x_label_mass": answer.mass }),
        // The engine answers each question in its own type.
        (verdict, _) => json!({ "type": "unknown", "x_verdict": verdict }),
    }
}

/// Σ i·p over the probabilities that are returned, so that clients who check the sum find it exact.
pub(super) fn expected_level(probabilities: &[f64]) -> f64 {
    (0u32..).zip(probabilities).map(|(level, probability)| f64::from(level) * probability).sum()
}

/// Where in the body something stands.
pub(super) struct Place(pub(super) Vec<Value>);

impl Place {
    pub(super) fn error(&self, message: impl AsRef<str>) -> ApiError {
        ApiError::at(self.0.iter().cloned(), message)
    }

    pub(super) fn child(&self, step: impl Into<Value>) -> Self {
        let mut path = self.0.clone();
        path.push(step.into());
        Self(path)
    }
}

fn optional_text(body: &Value, field: &str) -> Result<Option<String>, ApiError> {
    match body.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok((!text.is_empty()).then(|| text.clone())),
        Some(other) => Err(ApiError::field(field, format!("must be a string, got {}", kind_of(other)))),
    }
}

fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// A string as it is, an object or array as compact JSON.
fn render_state(state: &Value, field: &str) -> Result<String, ApiError> {
    match state {
        Value::String(text) => Ok(text.clone()),
        Value::Object(_) | Value::Array(_) => Ok(state.to_string()),
        other => {
            let message = format!("must be a string, an object or an array, got {}", kind_of(other));
            Err(ApiError::field(field, message))
        }
    }
}

/// Text, or structure rendered to compact JSON; none for null and for nothing.
fn optional_prose(value: Option<&Value>, place: &Place) -> Result<Option<String>, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(value @ (Value::Object(_) | Value::Array(_))) => Ok(Some(value.to_string())),
        Some(other) => {
            let message = format!("must be a string, an object, an array or null, got {}", kind_of(other));
            Err(place.error(message))
        }
    }
}

/// The probe that a question names.
fn read_probe(question: &Value, place: &Place) -> Result<Option<String>, ApiError> {
    match question.get("x_probe") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => Ok(Some(name.clone())),
        Some(other) => {
            let message = format!("must be a string, \"policy/probe\", got {}", kind_of(other));
            Err(place.child("x_probe").error(message))
        }
    }
}

/// A question that `probed` says a probe answers needs no words.
fn read_question(question: &Value, place: &Place, probed: bool) -> Result<(Question, Vec<Value>), ApiError> {
    let Value::Object(fields) = question else {
        return Err(place.error(format!("must be an object, got {}", kind_of(question))));
    };
    let instructions = optional_prose(fields.get("instructions"), &place.child("instructions"))?;
    let criteria = fields.get("criteria").filter(|criteria| !criteria.is_null());
    let at_criteria = place.child("criteria");
    let at_type = place.child("type");
    let (criteria, levels) = match fields.get("type") {
        Some(Value::String(kind)) if kind == "noul" => (read_noul(criteria, &at_criteria)?, Vec::new()),
        Some(Value::String(kind)) if kind == "choice" => (read_choice(criteria, &at_criteria)?, Vec::new()),
        Some(Value::String(kind)) if kind == "score" => read_score(criteria, &at_criteria)?,
        Some(Value::String(kind)) if kind == "box" => {
            return Err(at_type
                .error("\"box\" needs an image; images are not supported")
                .with_kind(Kind::Unsupported));
        }
        None => return Err(at_type.error("this field is required: \"noul\", \"choice\" or \"score\"")),
        Some(other) => {
            return Err(at_type.error(format!("must be \"noul\", \"choice\" or \"score\", got {other}")));
        }
    };
    if matches!(&criteria, Criteria::Boolean { yes: None, no: None })
        && instructions.as_deref().is_none_or(|text| text.trim().is_empty())
        && !probed
    {
        return Err(place
            .child("instructions")
            .error("a noul needs instructions, or criteria that describe a side"));
    }
    Ok((Question { instructions: instructions.unwrap_or_default(), criteria }, levels))
}

fn read_noul(criteria: Option<&Value>, place: &Place) -> Result<Criteria, ApiError> {
    let sides = match criteria {
        None => return Ok(Criteria::Boolean { yes: None, no: None }),
        Some(Value::Object(sides)) => sides,
        Some(other) => {
            let message = format!("must be an object with \"true\" and/or \"false\", got {}", kind_of(other));
            return Err(place.error(message));
        }
    };
    if let Some(side) = sides.keys().find(|side| *side != "true" && *side != "false") {
        return Err(place.child(side.as_str()).error("a noul has the sides \"true\" and \"false\" only"));
    }
    let side = |name: &str| optional_prose(sides.get(name), &place.child(name));
    Ok(Criteria::Boolean { yes: side("true")?, no: side("false")? })
}

fn read_choice(criteria: Option<&Value>, place: &Place) -> Result<Criteria, ApiError> {
    let options = match criteria {
        None => {
            return Err(place.error("this field is required: an object of options with their descriptions"));
        }
        Some(Value::Object(options)) => options,
        Some(other) => {
            let message =
                format!("must be an object of options with their descriptions, got {}", kind_of(other));
            return Err(place.error(message));
        }
    };
    if options.is_empty() {
        return Err(place.error("a choice needs at least one option"));
    }
    too_many_options(options.len(), place)?;
    let options = options
        .iter()
        .map(|(name, description)| {
            let place = place.child(name.as_str());
            if name.is_empty() {
                return Err(place.error("an option's name must not be empty"));
            }
            Ok(ChoiceOption { name: name.clone(), description: optional_prose(Some(description), &place)? })
        })
        .collect::<Result<_, _>>()?;
    Ok(Criteria::Choice(options))
}

/// The limit on options is this server's own, so the message names it.
pub(super) fn too_many_options(options: usize, place: &Place) -> Result<(), ApiError> {
    if options <= MAX_OPTIONS {
        return Ok(());
    }
    let message = format!("a choice may have at most {MAX_OPTIONS} options on this server, got {options}");
    Err(place.error(message).with_kind(Kind::Unsupported))
}

/// Levels within the bounds of a score.
pub(super) fn check_levels(levels: usize, place: &Place) -> Result<(), ApiError> {
    if (2..=MAX_LEVELS).contains(&levels) {
        return Ok(());
    }
    Err(place.error(format!("a score needs from 2 to {MAX_LEVELS} levels, got {levels}")))
}

fn read_score(criteria: Option<&Value>, place: &Place) -> Result<(Criteria, Vec<Value>), ApiError> {
    let levels = match criteria {
        None => return Err(place.error("this field is required: an array of levels, lowest first")),
        Some(Value::Array(levels)) => levels,
        Some(other) => {
            return Err(
                place.error(format!("must be an array of levels, lowest first, got {}", kind_of(other)))
            );
        }
    };
    check_levels(levels.len(), place)?;
    let texts = levels
        .iter()
        .enumerate()
        .map(|(index, level)| {
            let place = place.child(index);
            optional_prose(Some(level), &place)?.ok_or_else(|| place.error("a level must not be null"))
        })
        .collect::<Result<_, _>>()?;
    Ok((Criteria::Score(texts), levels.clone()))
}

/// The short form's `schema`: `{"type": "choice", "options": [..]}`, `{"type": "boolean"}`,
/// `{"type": "score", "levels": [..]}` or `{"type": "score", "min": 1, "max": 5}`.
fn read_schema(schema: &Value) -> Result<(Question, Vec<Value>), ApiError> {
    let place = Place(vec![json!("schema")]);
    let Value::Object(fields) = schema else {
        return Err(place.error(format!("must be an object, got {}", kind_of(schema))));
    };
    let instructions =
        optional_prose(fields.get("instructions"), &place.child("instructions"))?.unwrap_or_default();
    let at_type = place.child("type");
    let (criteria, levels) = match fields.get("type").and_then(Value::as_str) {
        Some("choice") => {
            let place = place.child("options");
            let Some(Value::Array(options)) = fields.get("options") else {
                return Err(place.error("a choice needs an array of options"));
            };
            let mut map = Map::new();
            for (index, option) in options.iter().enumerate() {
                let Value::String(name) = option else {
                    return Err(place
                        .child(index)
                        .error(format!("must be a string, got {}", kind_of(option))));
                };
                if map.insert(name.clone(), Value::Null).is_some() {
                    return Err(place.child(index).error(format!("there are two options named {name:?}")));
                }
            }
            (read_choice(Some(&Value::Object(map)), &place)?, Vec::new())
        }
        Some("boolean") => (Criteria::Boolean { yes: None, no: None }, Vec::new()),
        Some("score") => match (fields.get("levels"), fields.get("min"), fields.get("max")) {
            (Some(levels), _, _) => read_score(Some(levels), &place.child("levels"))?,
            (None, Some(min), Some(max)) => {
                let (Some(min), Some(max)) = (min.as_i64(), max.as_i64()) else {
                    return Err(place.error("`min` and `max` must be whole numbers"));
                };
                // The span is bounded before it becomes a list.
                let span = usize::try_from(max.saturating_sub(min)).map_or(0, |span| span.saturating_add(1));
                check_levels(span, &place)?;
                let levels: Vec<Value> = (min..=max).map(|level| json!(level.to_string())).collect();
                read_score(Some(&Value::Array(levels)), &place)?
            }
            _ => return Err(place.child("levels").error("a score needs `levels`, or `min` and `max`")),
        },
        _ => return Err(at_type.error("must be \"choice\", \"boolean\" or \"score\"")),
    };
    Ok((Question { instructions, criteria }, levels))
}

#[cfg(test)]
mod tests {
    use forkpoint_engine::Rung;

    use super::*;

    fn ask(question: Value) -> Result<SystemOneRequest, ApiError> {
        SystemOneRequest::read(&json!({"state": "s", "questions": {"q": question}}))
    }

    #[test]
    fn every_form_of_a_question_reaches_the_engine_as_text() {
        let boolean = |yes: Option<&str>, no: Option<&str>| Criteria::Boolean {
            yes: yes.map(Into::into),
            no: no.map(Into::into),
        };
        let cases = [
            (json!({"type": "noul", "instructions": "Is it?"}), "Is it?", boolean(None, None)),
            (json!({"type": "noul", "criteria": {"true": "it is"}}), "", boolean(Some("it is"), None)),
            (
                json!({"type": "noul", "instructions": {"ask": ["b", 1]}, "criteria": {"true": null, "false": [1, 2]}}),
                r#"{"ask":["b",1]}"#,
                boolean(None, Some("[1,2]")),
            ),
            (
                json!({"type": "choice", "criteria": {"z": null, "청구": {"k": 1}}}),
                "",
                Criteria::Choice(vec![
                    ChoiceOption { name: "z".into(), description: None },
                    ChoiceOption { name: "청구".into(), description: Some(r#"{"k":1}"#.into()) },
                ]),
            ),
            (
                json!({"type": "score", "instructions": null, "criteria": ["low", {"b": 1}]}),
                "",
                Criteria::Score(vec!["low".into(), r#"{"b":1}"#.into()]),
            ),
        ];
        for (question, instructions, criteria) in cases {
            let request = ask(question).unwrap();
            assert_eq!(request.questions, [Question { instructions: instructions.into(), criteria }]);
        }
    }

    #[test]
    fn the_state_is_verbatim_or_compact_json() {
        let cases = [(json!("  as is\n"), "  as is\n"), (json!({"b": 1, "a": [2]}), r#"{"b":1,"a":[2]}"#)];
        for (state, text) in cases {
            let body = json!({"state": state, "questions": {"q": {"type": "noul", "instructions": "?"}}});
            let request = SystemOneRequest::read(&body).unwrap();
            assert_eq!(request.conversation.messages, [Message::new(Role::User, text)]);
        }
    }

    #[test]
    fn bad_requests_name_the_place() {
        let question = |question: Value| json!({"state": "s", "questions": {"q": question}});
        let many: Map<String, Value> = (0..27).map(|index| (format!("o{index}"), Value::Null)).collect();
        let cases = [
            (json!({"questions": {}}), json!(["state"]), "required"),
            (json!({"state": null, "questions": {}}), json!(["state"]), "got null"),
            (json!({"state": "s"}), json!(["questions"]), "required"),
            (json!({"state": "s", "prompt": "p"}), json!(["questions"]), "required"),
            (json!({"state": "s", "questions": {}}), json!(["questions"]), "at least one"),
            (json!({"state": "s", "questions": []}), json!(["questions"]), "got an array"),
            (json!({"state": "s", "questions": {"": {}}}), json!(["questions", ""]), "must not be empty"),
            (json!({"state": "s", "assets": {"a": {}}}), json!(["assets"]), "not supported"),
            (question(json!("?")), json!(["questions", "q"]), "got a string"),
            (question(json!({"instructions": "?"})), json!(["questions", "q", "type"]), "required"),
            (question(json!({"type": "boolean"})), json!(["questions", "q", "type"]), "got \"boolean\""),
            (question(json!({"type": "box"})), json!(["questions", "q", "type"]), "images are not supported"),
            (
                question(json!({"type": "noul"})),
                json!(["questions", "q", "instructions"]),
                "needs instructions",
            ),
            (
                question(json!({"type": "noul", "criteria": {"yes": "x"}})),
                json!(["questions", "q", "criteria", "yes"]),
                "sides",
            ),
            (question(json!({"type": "choice"})), json!(["questions", "q", "criteria"]), "required"),
            (
                question(json!({"type": "choice", "criteria": {}})),
                json!(["questions", "q", "criteria"]),
                "one option",
            ),
            (
                question(json!({"type": "choice", "criteria": many})),
                json!(["questions", "q", "criteria"]),
                "at most 26 options on this server, got 27",
            ),
            (
                question(json!({"type": "choice", "criteria": {"a": 1}})),
                json!(["questions", "q", "criteria", "a"]),
                "got a number",
            ),
            (
                question(json!({"type": "score", "criteria": {"0": "a"}})),
                json!(["questions", "q", "criteria"]),
                "array",
            ),
            (
                question(json!({"type": "score", "criteria": ["a"]})),
                json!(["questions", "q", "criteria"]),
                "got 1",
            ),
            (
                question(json!({"type": "score", "criteria": ["a", null]})),
                json!(["questions", "q", "criteria", 1]),
                "must not be null",
            ),
        ];
        for (body, path, message) in cases {
            let error = SystemOneRequest::read(&body).unwrap_err();
            assert_eq!(Value::Array(error.path.clone()), path, "{body}");
            assert!(error.message.contains(message), "{body}: {}", error.message);
        }
    }

    #[test]
    fn the_short_form_asks_one_question() {
        let schema = |schema: Value| SystemOneRequest::read(&json!({"prompt": "p", "schema": schema}));
        let request = schema(json!({"type": "choice", "options": ["a", "b"]})).unwrap();
        assert_eq!(request.asked, [Asked { id: "answer".into(), levels: vec![], probe: None }]);
        let levels = schema(json!({"type": "score", "min": 1, "max": 3})).unwrap().asked[0].levels.clone();
        assert_eq!(levels, [json!("1"), json!("2"), json!("3")]);
        schema(json!({"type": "boolean"})).unwrap();

        for bad in [
            json!({"type": "noul"}),
            json!({"type": "choice", "options": ["a", "a"]}),
            json!({"type": "score", "min": i64::MIN, "max": i64::MAX}),
            json!({"type": "score"}),
            json!([]),
        ] {
            assert_eq!(schema(bad.clone()).unwrap_err().path[0], "schema", "{bad}");
        }
    }

    #[test]
    fn answers_are_shown_as_typesafe_shows_them() {
        let request = SystemOneRequest::read(&json!({"state": "s", "questions": {
            "b c": {"type": "noul", "instructions": "?"},
            "a": {"type": "choice", "criteria": {"x": null, "y": null}},
            "s": {"type": "score", "criteria": ["lo", {"hi": 1}]},
        }}))
        .unwrap();
        let answer = |verdict, probabilities: [f64; 2]| Answer {
            verdict,
            probabilities: probabilities.to_vec(),
            confidence: 0.5,
            mass: 0.25,
            argmax_is_label: true,
            rung: Rung::Labels,
        };
        let shown = request.answers(&[
            answer(Verdict::Boolean(0.75), [0.75, 0.25]),
            answer(Verdict::Choice(1), [0.25, 0.75]),
            answer(Verdict::Score(0.75), [0.25, 0.75]),
        ]);
        assert_eq!(
            shown.to_string(),
            concat!(
                r#"{"b c":{"type":"noul","noul":0.75,"x_label_mass":0.25},"#,
                r#""a":{"type":"choice","choice":"y","confidence":0.5,"probabilities":{"x":0.25,"y":0.75},"x_label_mass":0.25},"#,
                r#""s":{"type":"score","score":0.75,"confidence":0.5,"legend":{"0":"lo","1":{"hi":1}},"#,
                r#""probabilities":{"0":0.25,"1":0.75},"x_label_mass":0.25}}"#
            )
        );
    }
}
