//! Conversations to text, by the model's own Jinja template.
//!
//! Templates are written for Python's Jinja2 as Transformers sets it up:
//! `apply_chat_template` defines what a template may use. They come with the
//! model's files, so a render has a budget, and reaches nothing but its
//! arguments.

mod clock;
mod json;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::json;

use crate::chat::{Message, Tool};

/// What one render may cost: an instruction, or 64 bytes of text, is one. A thousand turns take about
/// a hundred thousand.
const FUEL: u64 = 10_000_000;
/// The longest template that is taken seriously. The longest of those in use has about 20 kB.
const MAX_SOURCE: usize = 1 << 20;
/// The names under which the two templates of a model are kept.
const PLAIN: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";
/// What models whose vocabulary has `<|im_start|>` were trained on when they say nothing else.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The model's files hold none, and its vocabulary was not made for ChatML.
    #[error("this model has no chat template; send it raw text")]
    Missing,
    /// The template is not Jinja. A fault of the model's files.
    #[error("the chat template does not parse: {0}")]
    Syntax(String),
    /// The template itself refused, through `raise_exception`: the conversation is not one that the
    /// model was made for. A client's mistake.
    #[error("the model's chat template refused the conversation: {0}")]
    Raised(String),
    /// The template took more steps, or made more text, than any sound one does.
    #[error("the chat template took more than {FUEL} steps")]
    Fuel,
    /// The template failed: most often the conversation lacks what it reads.
    #[error("the chat template failed: {0}")]
    Render(String),
}

impl TemplateError {
    /// Whether another conversation would have been rendered.
    #[must_use]
    pub fn is_clients(&self) -> bool {
        matches!(self, Self::Raised(_) | Self::Render(_) | Self::Fuel)
    }
}

/// What the template said when it refused. Travels as the source of a minijinja error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// Tells the time, for templates that write the date.
type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// A model's chat template. `Send + Sync`; renders of the same conversation are equal unless the
/// template writes the date.
#[derive(Clone)]
pub struct ChatTemplate {
    /// Absent where the model has no template.
    environment: Option<Environment<'static>>,
    with_tools: bool,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// Parses a template. `bos` and `eos` are what it finds as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// When the source is not Jinja.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, TemplateError> {
        let mut environment = environment()?;
        set_clock(&mut environment, Arc::new(SystemTime::now));
        add(&mut environment, PLAIN, source)?;
        let (bos, eos) = (bos.map(str::to_owned), eos.map(str::to_owned));
        Ok(Self { environment: Some(environment), with_tools: false, bos, eos })
    }

    /// The template that models get whose vocabulary has ChatML's marks and whose files hold none.
    #[must_use]
    pub fn chatml() -> Self {
        Self::new(CHATML, None, None).unwrap_or_else(|_| Self::missing())
    }

    /// Stands for the template of a model that has none: every render fails and says so.
    #[must_use]
    pub fn missing() -> Self {
        Self { environment: None, with_tools: false, bos: None, eos: None }
    }

    /// Adds the template that is used where tools are on offer ("tool_use" in a model's files).
    ///
    /// # Errors
    /// When the source is not Jinja.
    pub fn with_tools(mut self, source: &str) -> Result<Self, TemplateError> {
        if let Some(environment) = &mut self.environment {
            add(environment, WITH_TOOLS, source)?;
            self.with_tools = true;
        }
        Ok(self)
    }

    /// Replaces the clock behind `strftime_now`, which is read as UTC.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        if let Some(environment) = &mut self.environment {
            set_clock(environment, Arc::new(clock));
        }
        self
    }

    /// Renders a conversation; with `add_generation_prompt` the text ends where the model's reply
    /// begins.
    ///
    /// # Errors
    /// When the model has no template, the template refuses the conversation, or fails on it.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Tool],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let environment = self.environment.as_ref().ok_or(TemplateError::Missing)?;
        let name = if self.with_tools && !tools.is_empty() { WITH_TOOLS } else { PLAIN };
        let template = environment.get_template(name).map_err(classify)?;
        let messages: Vec<serde_json::Value> = messages.iter().map(message).collect();
        // Templates ask whether a name is defined, so what is absent must not be there as none.
        let mut names = BTreeMap::from([
            ("messages", Value::from(Serde(messages))),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ]);
        if !tools.is_empty() {
            let tools: Vec<serde_json::Value> = tools.iter().map(tool).collect();
            names.insert("tools", Value::from(Serde(tools)));
        }
        names.extend(self.bos.as_deref().map(|bos| ("bos_token", Value::from(bos))));
        names.extend(self.eos.as_deref().map(|eos| ("eos_token", Value::from(eos))));
        template.render(names).map_err(classify)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("present", &self.environment.is_some())
            .field("with_tools", &self.with_tools)
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish()
    }
}

/// Jinja as Transformers sets it up.
fn environment() -> Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(classify)?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, "the template raised an exception");
        Err(error.with_source(Refusal(message)))
    });
    Ok(environment)
}

fn set_clock(environment: &mut Environment<'static>, clock: Clock) {
    environment.add_function("strftime_now", move |format: &str| -> Result<String, Error> {
        clock::format(clock(), format)
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
    });
}

fn add(
    environment: &mut Environment<'static>,
    name: &'static str,
    source: &str,
) -> Result<(), TemplateError> {
    if source.len() > MAX_SOURCE {
        return Err(TemplateError::Syntax(format!("{} bytes, more than {MAX_SOURCE}", source.len())));
    }
    let source = without_generation_tags(source);
    environment.add_template_owned(name, source).map_err(|error| TemplateError::Syntax(error.to_string()))
}

/// A turn as templates expect it: the arguments of calls as values, not as JSON in a string.
fn message(message: &Message) -> serde_json::Value {
    let mut value = json!({ "role": message.role, "content": message.content });
    if let Some(calls) = &message.tool_calls {
        let mut calls = calls.clone();
        for call in calls.as_array_mut().into_iter().flatten() {
            if let Some(arguments) = call.pointer_mut("/function/arguments")
                && let Some(text) = arguments.as_str()
                && let Ok(parsed @ serde_json::Value::Object(_)) = serde_json::from_str(text)
            {
                *arguments = parsed;
            }
        }
        value["tool_calls"] = calls;
    }
    if let Some(call) = &message.tool_call_id {
        value["tool_call_id"] = json!(call);
    }
    value
}

/// A tool in OpenAI's shape, which templates print.
fn tool(tool: &Tool) -> serde_json::Value {
    let mut function = json!({ "name": tool.name });
    if let Some(description) = &tool.description {
        function["description"] = json!(description);
    }
    function["parameters"] = tool.parameters.clone();
    json!({ "type": "function", "function": function })
}

/// Turns `{% generation %}`, Transformers' mark for training, into a block that does nothing, with
/// its dashes kept.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inside = &tag[2..end];
        match inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Tells a refusal by the template from a failure of it.
fn classify(error: Error) -> TemplateError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Fuel;
    }
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = source {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return TemplateError::Raised(message.clone());
        }
        source = current.source();
    }
    TemplateError::Render(error.to_string())
}
