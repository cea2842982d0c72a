//! The `tojson` filter, as Python's `json.dumps` prints.

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};

/// How deep values may nest. Requests are parsed with a bound of 128.
const MAX_DEPTH: usize = 256;

/// `json.dumps(value, ensure_ascii, indent, separators, sort_keys)`; Transformers' filter has
/// `ensure_ascii` off where nothing is said.
pub(super) fn tojson(value: &Value, positional: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = positional.or(kwargs.get::<Option<Value>>("indent")?).filter(|indent| !indent.is_none());
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|separators| !separators.is_none());
    kwargs.assert_all_used()?;

    let indent = match indent {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(usize::try_from(indent)?.min(32))),
        },
    };
    let (item, key) = match separators {
        Some(pair) => {
            let text = |index: usize| -> Result<String, Error> {
                let text = pair.get_item(&Value::from(index))?;
                text.as_str().map(str::to_owned).ok_or_else(|| wrong("separators must be two strings"))
            };
            (text(0)?, text(1)?)
        }
        // Python drops the space at a line's end.
        None => (if indent.is_some() { "," } else { ", " }.into(), ": ".into()),
    };
    let value = serde_json::to_value(value).map_err(|error| wrong(&error.to_string()))?;
    let mut writer = Writer { out: String::new(), ensure_ascii, sort_keys, indent, item, key };
    writer.value(&value, 0)?;
    // Safe: what is printed goes to a model, not to a page.
    Ok(Value::from_safe_string(writer.out))
}

fn wrong(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.to_owned())
}

struct Writer {
    out: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    /// Between items.
    item: String,
    /// Between a key and its value.
    key: String,
}

impl Writer {
    fn value(&mut self, value: &serde_json::Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(wrong("a value nests too deep for tojson"));
        }
        match value {
            serde_json::Value::String(text) => self.string(text),
            serde_json::Value::Array(list) if list.is_empty() => self.out.push_str("[]"),
            serde_json::Value::Object(map) if map.is_empty() => self.out.push_str("{}"),
            serde_json::Value::Array(list) => {
                self.out.push('[');
                for (index, value) in list.iter().enumerate() {
                    self.next(index, depth + 1);
                    self.value(value, depth + 1)?;
                }
                self.line(depth);
                self.out.push(']');
            }
            serde_json::Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.out.push('{');
                for (index, (key, value)) in entries.into_iter().enumerate() {
                    self.next(index, depth + 1);
                    self.string(key);
                    self.out.push_str(&self.key);
                    self.value(value, depth + 1)?;
                }
                self.line(depth);
                self.out.push('}');
            }
            plain => self.out.push_str(&plain.to_string()),
        }
        Ok(())
    }

    fn next(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(&self.item);
        }
        self.line(depth);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn string(&mut self, text: &str) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            self.out.push_str(&quoted);
            return;
        }
        for character in quoted.chars() {
            if character.is_ascii() {
                self.out.push(character);
                continue;
            }
            // Beyond the first 65,536 characters Python writes the two halves of UTF-16.
            for unit in character.encode_utf16(&mut [0; 2]) {
                self.out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
}
