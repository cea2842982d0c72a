//! What a line of the journal says.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::time::SystemTime;

use forkpoint_engine::{EngineError, Message, Role, Tool, Usage};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::files;
use crate::date::timestamp;
use crate::models::hex;
use crate::policy::{Opening, PlanRecord, RouteRequest, Routed, SamplingOverrides, Step, would_hold};
use crate::wire::ApiError;

/// The version of the format: a field that changes its meaning raises it, a new field does not.
pub const VERSION: u32 = 1;

/// The reason of a request that ended while policies were asked: its client left, or its time was over.
pub const UNFINISHED: &str = "unfinished";

/// What a record is of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A request and what was done with it.
    #[default]
    Request,
    /// A policy that was asked in shadow: its plan was not carried out.
    Shadow,
}

/// One line of the journal.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// [`VERSION`].
    pub v: u32,
    /// When it was written, in UTC, such as `2026-11-30T01:02:03.456Z`.
    pub time: String,
    /// What it is of.
    pub kind: Kind,
    /// The request's id.
    pub id: String,
    /// The id of its trace, where it is traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// The model that the client named.
    pub model: String,
    /// The policy whose plan was carried out, or the last one asked.
    pub policy: String,
    /// Its version: the first 12 digits of the component's SHA-256.
    pub version: String,
    /// Why: the policy's own code, or one of the server's own (docs/journal.md).
    pub reason: String,
    /// What was done; none where a shadow made no plan, or the request ended before there was one.
    pub plan: Option<PlanRecord>,
    /// The policies that were asked, in order.
    pub steps: Vec<Step>,
    /// The conversation's turns, oldest first.
    pub messages: Vec<Turn>,
    /// The client's tools; empty unless prompts are kept.
    pub tools: Vec<Tool>,
    /// What the client set of the sampling.
    pub sampling: SamplingOverrides,
    /// The client's headers that a policy saw; empty unless prompts are kept.
    pub headers: Vec<(String, String)>,
    /// The request's session; zeros where none was needed.
    pub session: SessionRecord,
    /// How it ended; none for a shadow.
    pub outcome: Option<Outcome>,
}

/// A turn of the conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Who speaks.
    pub role: Role,
    /// Bytes of its text.
    pub bytes: usize,
    /// Its text, where prompts are kept.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub content: Option<String>,
    /// What an assistant turn calls, where prompts are kept.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tool_calls: Option<Value>,
    /// Which call a tool turn answers.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub tool_call_id: Option<String>,
}

/// Tokens of a session, or why it could not be opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionRecord {
    /// All; of one that would outgrow the context, those that it would hold.
    pub tokens: u32,
    /// Those that were resident.
    pub reused: u32,
    /// Those that were computed for the request.
    pub computed: u32,
    /// The error's code, where it could not be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl From<&Opening> for SessionRecord {
    fn from(session: &Opening) -> Self {
        session.failure().map_or_else(|| session.told().into(), Self::from)
    }
}

impl From<&EngineError> for SessionRecord {
    fn from(error: &EngineError) -> Self {
        Self { error: Some(ApiError::from(error).code()), ..would_hold(error).into() }
    }
}

impl From<Usage> for SessionRecord {
    fn from(usage: Usage) -> Self {
        Self { tokens: usage.tokens, reused: usage.reused, computed: usage.computed, error: None }
    }
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The HTTP status; 499 where the client left before there was an answer.
    pub status: u16,
    /// Milliseconds from the request's arrival to its answer's end.
    pub ms: f64,
    /// Tokens of the reply.
    pub completion: Option<u32>,
    /// The client left before the answer was whole.
    pub left: bool,
    /// The error's code, where one was answered.
    pub error: Option<String>,
}

/// What was read of a journal.
#[derive(Debug, Default)]
pub struct Read {
    /// Its records, oldest first.
    pub records: Vec<Record>,
    /// Lines that are none, with where and why.
    pub broken: Vec<String>,
}

impl Record {
    /// What there is to say of a request once its plan is there; the outcome comes at its end.
    #[must_use]
    pub fn of(
        request: &RouteRequest,
        routed: &Routed,
        headers: Vec<(String, String)>,
        prompts: bool,
    ) -> Self {
        let plan = PlanRecord::from(&routed.plan);
        Self {
            policy: routed.policy.clone(),
            version: routed.version.clone(),
            reason: routed.reason.clone(),
            plan: Some(plan),
            steps: routed.trace.steps.clone(),
            session: (&routed.session).into(),
            ..Self::about(request, headers, prompts)
        }
        .without_texts(prompts)
    }

    /// What there is to say of a request that ends while policies are asked.
    #[must_use]
    pub fn unfinished(request: &RouteRequest, prompts: bool) -> Self {
        Self { reason: UNFINISHED.to_owned(), ..Self::about(request, Vec::new(), prompts) }
    }

    /// What a policy in shadow would have done.
    #[must_use]
    pub fn shadow(
        request: &RouteRequest,
        step: Step,
        session: SessionRecord,
        headers: Vec<(String, String)>,
        prompts: bool,
    ) -> Self {
        Self {
            kind: Kind::Shadow,
            policy: step.policy.clone(),
            version: step.version.clone(),
            reason: step.reason.clone(),
            plan: step.plan.clone(),
            steps: vec![step],
            session,
            ..Self::about(request, headers, prompts)
        }
        .without_texts(prompts)
    }

    fn about(request: &RouteRequest, headers: Vec<(String, String)>, prompts: bool) -> Self {
        let turn = |message: &Message| Turn {
            role: message.role,
            bytes: message.content.len(),
            content: prompts.then(|| message.content.clone()),
            tool_calls: message.tool_calls.clone().filter(|_| prompts),
            tool_call_id: message.tool_call_id.clone(),
        };
        Self {
            v: VERSION,
            time: timestamp(SystemTime::now()),
            id: request.id.clone(),
            trace_id: request.trace.as_ref().and_then(|trace| trace.id()),
            model: request.model.clone(),
            messages: request.messages.iter().map(turn).collect(),
            tools: if prompts { request.tools.clone() } else { Vec::new() },
            sampling: request.sampling.clone(),
            headers: if prompts { headers } else { Vec::new() },
            ..Self::default()
        }
    }

    /// A policy's replies and appended turns repeat the conversation: their length and hash stand for them.
    fn without_texts(mut self, prompts: bool) -> Self {
        if !prompts {
            let steps = self.steps.iter_mut().filter_map(|step| step.plan.as_mut());
            steps.chain(self.plan.as_mut()).for_each(shorten);
        }
        self
    }

    /// Whether the conversation's texts are in it.
    #[must_use]
    pub fn has_prompt(&self) -> bool {
        self.messages.iter().all(|turn| turn.content.is_some())
    }

    /// The request, as far as it was written down.
    #[must_use]
    pub fn request(&self) -> RouteRequest {
        let message = |turn: &Turn| Message {
            role: turn.role,
            content: turn.content.clone().unwrap_or_default(),
            tool_calls: turn.tool_calls.clone(),
            tool_call_id: turn.tool_call_id.clone(),
        };
        RouteRequest {
            id: self.id.clone(),
            model: self.model.clone(),
            messages: self.messages.iter().map(message).collect(),
            tools: self.tools.clone(),
            sampling: self.sampling.clone(),
            headers: self.headers.clone(),
            ..RouteRequest::default()
        }
    }

    /// Reads a journal: a file, or a folder of them.
    ///
    /// # Errors
    /// When a file cannot be read; lines that are no records are told apart.
    pub fn read_all(path: &Path) -> io::Result<Read> {
        let paths = match fs::metadata(path)?.is_dir() {
            true => files::list(path)?.into_iter().map(|(_, path)| path).collect(),
            false => vec![path.to_owned()],
        };
        let mut read = Read::default();
        for path in paths {
            for (number, line) in BufReader::new(fs::File::open(&path)?).lines().enumerate() {
                let line = line?;
                match serde_json::from_str::<Self>(&line) {
                    _ if line.trim().is_empty() => {}
                    Ok(record) if record.v == VERSION => read.records.push(record),
                    Ok(record) => {
                        let what = format!("version {} of the format, expected {VERSION}", record.v);
                        read.broken.push(format!("{}, line {}: {what}", path.display(), number + 1));
                    }
                    Err(error) => {
                        read.broken.push(format!("{}, line {}: {error}", path.display(), number + 1));
                    }
                }
            }
        }
        Ok(read)
    }
}

/// Puts a text's length and hash in its place, so that two plans can still be told apart.
pub(crate) fn shorten(plan: &mut PlanRecord) {
    let short = |text: &mut String| {
        let hash = hex(&Sha256::digest(text.as_bytes())[..6]);
        *text = format!("[{} bytes, sha256 {hash}]", text.len());
    };
    match plan {
        PlanRecord::Reply { text } => short(text),
        PlanRecord::Generate { append, .. } => {
            for message in append {
                short(&mut message.content);
                message.tool_calls = None;
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> RouteRequest {
        RouteRequest {
            id: "r".into(),
            messages: vec![Message::new(Role::User, "a secret")],
            ..RouteRequest::default()
        }
    }

    fn headers() -> Vec<(String, String)> {
        vec![("x-tenant".into(), "acme".into())]
    }

    fn step() -> Step {
        let json = serde_json::json!({
            "policy": "p", "version": "v", "reason": "r", "labels": [], "capabilities": [], "fault": null,
            "decisions": [], "used": {}, "plan": {"kind": "reply", "text": "the secret is a secret"},
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn prompts_are_kept_only_when_asked() {
        let bare = Record::shadow(&request(), step(), SessionRecord::default(), headers(), false);
        let line = serde_json::to_string(&bare).unwrap();
        assert!(!line.contains("secret") && !line.contains("acme"), "{line}");
        assert!(!bare.has_prompt() && bare.messages[0].bytes == 8);
        let Some(PlanRecord::Reply { text }) = &bare.plan else { panic!() };
        assert!(text.starts_with("[22 bytes, sha256 "), "{text}");
        let mut appended = Message::new(Role::Assistant, "a secret");
        appended.tool_calls = Some(serde_json::json!([{"function": {"arguments": "a secret"}}]));
        let mut plan = PlanRecord::Generate {
            continues: crate::policy::Continues::Session,
            model: None,
            append: vec![appended],
            tools: None,
            sampling: SamplingOverrides::default(),
        };
        shorten(&mut plan);
        assert!(!serde_json::to_string(&plan).unwrap().contains("a secret"));
        let full = Record::shadow(&request(), step(), SessionRecord::default(), headers(), true);
        let read: Record = serde_json::from_str(&serde_json::to_string(&full).unwrap()).unwrap();
        assert_eq!(read, full);
        assert_eq!(read.request().messages, request().messages);
    }

    #[test]
    fn a_line_that_is_no_record_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("j.jsonl");
        let good = serde_json::to_string(&Record { v: VERSION, ..Record::default() }).unwrap();
        fs::write(&path, format!("{good}\n{{\"v\": 9}}\nnot json\n\n{good}\n")).unwrap();
        let read = Record::read_all(&path).unwrap();
        assert_eq!((read.records.len(), read.broken.len()), (2, 2));
        assert!(read.broken[0].contains("line 2: version 9") && read.broken[1].contains("line 3"));
    }
}
