//! Reading typed values out of JSON bodies, with the path of what is wrong.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, Deserializer, SeqAccess, Visitor};
use serde_json::Value;
use serde_path_to_error::Segment;

use super::error::{ApiError, Kind};

/// Parses a body as JSON.
///
/// # Errors
/// [`Kind::Malformed`], with line and column.
pub fn parse(body: &[u8]) -> Result<Value, ApiError> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Err(ApiError::new(Kind::Malformed, "the body is empty, a JSON object is expected"));
    }
    if let Err(error) = std::str::from_utf8(body) {
        let message = format!("the body is not UTF-8: bad byte at offset {}", error.valid_up_to());
        return Err(ApiError::new(Kind::Malformed, message));
    }
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::new(Kind::Malformed, format!("the body is not valid JSON: {error}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        let message = format!("the body must be a JSON object, got {}", kind_of(&value));
        Err(ApiError::new(Kind::Invalid, message))
    }
}

/// Reads a type out of a parsed body. Fields that the type does not have are ignored.
///
/// # Errors
/// [`Kind::Invalid`] names the field, what was expected and what came.
pub fn read<'de, T: Deserialize<'de>>(body: &'de Value) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(body).map_err(|error| {
        let mut path: Vec<Value> = error
            .path()
            .iter()
            .filter_map(|segment| match segment {
                Segment::Seq { index } => Some(Value::from(*index)),
                Segment::Map { key } => Some(Value::from(key.as_str())),
                Segment::Enum { variant } => Some(Value::from(variant.as_str())),
                Segment::Unknown => None,
            })
            .collect();
        let message = error.inner().to_string();
        // serde reports a missing field at its parent; clients look for the field.
        if let Some(name) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
            path.push(Value::from(name));
            return ApiError::at(path, "this field is required");
        }
        if path.is_empty() { ApiError::new(Kind::Invalid, message) } else { ApiError::at(path, message) }
    })
}

/// A value's type, in JSON's words.
#[must_use]
pub fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A string or an array of `T`, as OpenAI takes in `content`, `stop` and `prompt`.
#[derive(Debug, Clone, PartialEq)]
pub enum TextOr<T> {
    /// A plain string.
    Text(String),
    /// An array.
    Many(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrVisitor<T> {
            type Value = TextOr<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or an array")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TextOr::Text(text.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut many = Vec::new();
                while let Some(item) = items.next_element()? {
                    many.push(item);
                }
                Ok(TextOr::Many(many))
            }
        }

        deserializer.deserialize_any(TextOrVisitor(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Body {
        #[expect(dead_code, reason = "only its errors are of interest")]
        items: Vec<TextOr<u32>>,
    }

    #[test]
    fn errors_name_the_place_and_what_came() {
        let cases = [
            (json!({}), "items: this field is required"),
            (json!({"items": 3}), "items: invalid type: integer `3`, expected a sequence"),
            (json!({"items": ["a", {}]}), "items[1]: invalid type: map, expected a string or an array"),
            (json!({"items": [["x"]]}), "items[0][0]: invalid type: string \"x\", expected u32"),
        ];
        for (body, message) in cases {
            assert_eq!(read::<Body>(&body).unwrap_err().message, message, "{body}");
        }
    }

    #[test]
    fn bodies_that_are_not_json_objects_say_what_they_are() {
        let cases: [(&[u8], &str); 5] = [
            (b" \n", "the body is empty"),
            (b"{\"a\": \xff}", "the body is not UTF-8: bad byte at offset 6"),
            (b"{\"a\": }", "the body is not valid JSON: expected value at line 1 column 7"),
            (b"[1]", "the body must be a JSON object, got an array"),
            (b"null", "the body must be a JSON object, got null"),
        ];
        for (body, message) in cases {
            let error = parse(body).unwrap_err();
            assert!(error.message.starts_with(message), "{}", error.message);
        }
    }
}
