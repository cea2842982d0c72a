//! Test cases of policies: a folder each, with what a client sends, what the engine answers and what must come of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint_engine::{Conversation, Engine, Sampling};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::expect::{differences, outcome};
use super::script::Script;
use crate::policy::offline::OfflineSession;
use crate::policy::{
    Opening, RouteRequest, SamplingOverrides, SomeLimits, Step, Workbench, WorkbenchError, WorkbenchOptions,
};
use crate::wire::chat::ChatRequest;

/// The files that a case may have.
const FILES: [&str; 7] = [
    "request.json",
    "headers.json",
    "answers.json",
    "config.json",
    "limits.json",
    "store.json",
    "expect.json",
];

/// A case, read.
#[derive(Debug)]
pub struct Case {
    /// The folder's path under the one that was named.
    pub name: String,
    request: RouteRequest,
    script: Arc<Script>,
    config: BTreeMap<String, String>,
    limits: SomeLimits,
    store: BTreeMap<String, String>,
    expected: Value,
}

/// How a case went.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The case.
    pub name: String,
    /// What was not as expected; empty when it passed.
    pub faults: Vec<String>,
    /// How long it took.
    pub took: Duration,
}

/// The folders of cases under one, or the folder itself where it is one: those with a file of a case, and those that
/// hold no other folder, so that a case without its request is not passed over. Hidden folders are.
///
/// # Errors
/// When a folder cannot be read.
pub fn find(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    if FILES.iter().any(|file| folder.join(file).is_file()) {
        return Ok(vec![folder.to_owned()]);
    }
    let mut found = Vec::new();
    for inner in folders(folder)? {
        let cases = find(&inner)?;
        if cases.is_empty() {
            found.push(inner);
        } else {
            found.extend(cases);
        }
    }
    Ok(found)
}

/// The folders in one that are not hidden, in order.
fn folders(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    let hidden = |path: &Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    entries.retain(|path| path.is_dir() && !hidden(path));
    entries.sort();
    Ok(entries)
}

impl Case {
    /// Reads a case.
    ///
    /// # Errors
    /// A sentence with the file that is missing or cannot be read.
    pub fn read(folder: &Path, name: String) -> Result<Self, String> {
        let body: Value = required(folder, "request.json")?;
        let headers: BTreeMap<String, String> = optional(folder, "headers.json")?.unwrap_or_default();
        let request = request(&body, headers).map_err(|error| format!("request.json: {error}"))?;
        let script = match text(folder, "answers.json")? {
            Some(text) => Script::parse(&text).map_err(|error| format!("answers.json: {error}"))?,
            None => Script::default(),
        };
        let scalars = |file: &str| -> Result<BTreeMap<String, String>, String> {
            let values: BTreeMap<String, Value> = optional(folder, file)?.unwrap_or_default();
            values
                .into_iter()
                .map(|(key, value)| Ok((key, scalar(value).map_err(|e| format!("{file}: {e}"))?)))
                .collect()
        };
        let limits: SomeLimits = optional(folder, "limits.json")?.unwrap_or_default();
        if let Some(limit) = limits.useless() {
            return Err(format!("limits.json: {limit} = 0 leaves the policy nothing to run with"));
        }
        Ok(Self {
            name,
            request,
            script: Arc::new(script),
            config: scalars("config.json")?,
            limits,
            store: scalars("store.json")?,
            expected: required(folder, "expect.json")?,
        })
    }

    /// Runs the case, on an engine where one is given, else on what the script answers.
    ///
    /// # Errors
    /// When the component would not be served.
    pub async fn run(
        &self,
        component: &Path,
        cache: Option<PathBuf>,
        live: Option<&Engine>,
    ) -> Result<Verdict, WorkbenchError> {
        let (config, limits) = (self.config.clone(), self.limits);
        let options = WorkbenchOptions { config, limits, cache, ..WorkbenchOptions::default() };
        let mut bench = Workbench::load(component, &options)?;
        let mut faults = Vec::new();
        if let Err(error) = bench.store(&self.store) {
            faults.push(format!("store.json: {error}"));
        }
        let start = Instant::now();
        let step = match live {
            None => {
                let session = OfflineSession::holding(&self.request.messages, self.script.clone());
                bench.call(&self.request, session).await
            }
            Some(engine) => self.live(&bench, engine.clone()).await,
        };
        let took = start.elapsed();
        if live.is_none() {
            faults.extend(self.script.faults());
        }
        // What came of a question that nobody answered says no more than that.
        if live.is_some() || !self.script.unanswered() {
            let found = differences(&self.expected, &outcome(&step, &bench.stored()));
            // A fault that nobody expected explains the rest.
            let told = step.fault.as_ref().filter(|_| !found.is_empty());
            faults.extend(told.map(|fault| format!("the call ended with {fault}")));
            faults.extend(found);
        }
        bench.close().await;
        Ok(Verdict { name: self.name.clone(), faults, took })
    }

    async fn live(&self, bench: &Workbench, engine: Engine) -> Step {
        let conversation = Conversation { messages: self.request.messages.clone(), tools: Vec::new() };
        let session = Opening::new(async move { engine.open(conversation, "").await });
        bench.call_live(&self.request, session).await
    }
}

/// A chat request's body as a policy would see it.
///
/// # Errors
/// As the server would refuse it.
pub fn request(body: &Value, headers: BTreeMap<String, String>) -> Result<RouteRequest, String> {
    let chat = ChatRequest::read(body, &Sampling::default()).map_err(|error| error.to_string())?;
    Ok(RouteRequest {
        id: "test".to_owned(),
        model: chat.model.clone().unwrap_or_else(|| "auto".to_owned()),
        messages: chat.conversation.messages,
        tools: chat.conversation.tools,
        sampling: SamplingOverrides::set_in(body, &chat.sampling),
        drafts: chat.sampling,
        headers: headers.into_iter().collect(),
        ..RouteRequest::default()
    })
}

fn scalar(value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        Value::Number(number) => Ok(number.to_string()),
        Value::Bool(value) => Ok(value.to_string()),
        other => Err(format!("expected text, a number or a boolean, got {other}")),
    }
}

fn text(folder: &Path, file: &str) -> Result<Option<String>, String> {
    match std::fs::read_to_string(folder.join(file)) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{file}: {error}")),
    }
}

fn optional<T: DeserializeOwned>(folder: &Path, file: &str) -> Result<Option<T>, String> {
    let text = text(folder, file)?;
    text.map(|text| serde_json::from_str(&text).map_err(|error| format!("{file}: {error}"))).transpose()
}

fn required<T: DeserializeOwned>(folder: &Path, file: &str) -> Result<T, String> {
    optional(folder, file)?.ok_or_else(|| {
        format!("{file} is not there: a case has request.json and expect.json, and may have others")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_holds_no_request_is_not_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let make = |folder: &str, file: Option<&str>| {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
            if let Some(file) = file {
                std::fs::write(dir.path().join(folder).join(file), "{}").unwrap();
            }
        };
        make("group/one", Some("request.json"));
        make("half/notes", None);
        make("half", Some("expect.json"));
        make("typo", Some("requets.json"));
        make(".hidden", None);
        let found: Vec<PathBuf> = ["group/one", "half", "typo"].map(|name| dir.path().join(name)).into();
        assert_eq!(find(dir.path()).unwrap(), found);
        assert_eq!(find(&dir.path().join("half")).unwrap(), found[1..2]);
        let error = Case::read(&found[2], "typo".into()).unwrap_err();
        assert!(error.starts_with("request.json is not there"), "{error}");
    }
}
