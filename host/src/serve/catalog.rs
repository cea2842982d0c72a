//! What is served: models, routes, policies, health and metrics.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{App, unix_seconds};
use crate::date::date;
use crate::policy::{PolicyState, PolicyStatus};
use crate::wire::{ApiError, Kind};

/// Something that clients may name as the model.
pub(super) struct Served {
    pub(super) name: String,
    description: String,
    since: SystemTime,
}

impl Served {
    fn to_openai(&self) -> Value {
        json!({
            "id": self.name,
            "object": "model",
            "created": unix_seconds(self.since),
            "owned_by": "forkpoint",
            "description": self.description,
        })
    }

    fn to_typesafe(&self) -> Value {
        json!({ "name": self.name, "description": self.description, "release_date": date(self.since) })
    }
}

impl App {
    /// Everything that clients may name as the model: the model, then routes, then policies.
    pub(super) fn served(&self) -> Vec<Served> {
        let model = self.engine.model();
        let about = format!("{}, {} tokens of context", model.architecture, model.context);
        let mut served =
            vec![Served { name: self.model().to_owned(), description: about, since: self.started }];
        for (name, chain) in &self.routes {
            let description = format!("a route: {}", chain.join(", then "));
            served.push(Served { name: name.clone(), description, since: self.started });
        }
        for (name, policy) in self.policies.routes() {
            if !self.is_model(&name) && !self.routes.contains_key(&name) {
                let description = format!("a route: {policy}");
                served.push(Served { name, description, since: self.started });
            }
        }
        for policy in self.policies.list().into_iter().filter(is_served) {
            if self.is_model(&policy.name) || self.routes.contains_key(&policy.name) {
                continue;
            }
            let description = format!("a policy, version {}", version(&policy));
            served.push(Served { name: policy.name.clone(), description, since: self.started });
        }
        served
    }

    /// A name that stands for nothing: what is served, or why a policy of that name is not.
    pub(super) fn unknown_model(&self, name: &str) -> ApiError {
        let why = match self.policies.get(name).map(|policy| policy.state) {
            Some(PolicyState::Failed) => {
                format!(": the policy of that name failed to load, and GET /v1/policies/{name} says why")
            }
            Some(PolicyState::Compiling) => ": the policy of that name is being loaded".to_owned(),
            Some(PolicyState::Disabled) => ": the policy of that name is switched off".to_owned(),
            Some(PolicyState::Serving) | None => {
                let served: Vec<String> = self.served().into_iter().map(|served| served.name).collect();
                format!("; there are {}", served.join(", "))
            }
        };
        let message = format!("no model {name:?} is served{why}");
        ApiError { path: vec!["model".into()], ..ApiError::new(Kind::UnknownModel, message) }
    }
}

/// `GET /v1/models`: OpenAI's list and TypeSafe's in one object.
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let served = app.served();
    let (openai, typesafe): (Vec<Value>, Vec<Value>) =
        served.iter().map(|one| (one.to_openai(), one.to_typesafe())).unzip();
    Json(json!({ "object": "list", "data": openai, "models": typesafe }))
}

/// `GET /v1/models/{name}`.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let name = readable(name)?;
    let known = if app.is_model(&name) { app.model() } else { &name };
    match app.served().iter().find(|one| one.name == known) {
        Some(one) => Ok(Json(one.to_openai())),
        None => Err(app.unknown_model(&name)),
    }
}

/// `GET /v1/policies`.
pub(super) async fn policies(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": app.policies.list() }))
}

/// `GET /v1/policies/{name}`.
pub(super) async fn policy(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let name = readable(name)?;
    match app.policies.get(&name) {
        Some(policy) => Ok(Json(json!(policy))),
        None => {
            let names: Vec<String> = app.policies.list().into_iter().map(|policy| policy.name).collect();
            let there = if names.is_empty() {
                "there are none".into()
            } else {
                format!("there are {}", names.join(", "))
            };
            Err(ApiError::new(Kind::NotFound, format!("no policy {name:?}; {there}")))
        }
    }
}

/// A name in a path, unless its bytes are no text.
pub(super) fn readable(name: Result<Path<String>, PathRejection>) -> Result<String, ApiError> {
    name.map(|Path(name)| name).map_err(|error| ApiError::new(Kind::NotFound, error.body_text()))
}

/// `GET /health`: 200 while requests are taken, 503 while the server stops or once its engine has broken.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let stopping = app.stopping.is_cancelled();
    let (status, word) = match (stopping, app.engine.is_running()) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
        (false, false) => (StatusCode::SERVICE_UNAVAILABLE, "broken"),
        (false, true) => (StatusCode::OK, "ok"),
    };
    let uptime = app.started.elapsed().unwrap_or_default().as_secs();
    let body = json!({
        "status": word,
        "model": app.model(),
        "device": app.engine.model().device,
        "policies": app.policies.list().iter().filter(|policy| is_served(policy)).count(),
        "uptime_seconds": uptime,
        "version": env!("CARGO_PKG_VERSION"),
    });
    (status, Json(body)).into_response()
}

/// `GET /metrics`.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let in_flight = app.server.max_in_flight - app.in_flight.available_permits();
    let (journal, traces) = (app.journal.as_deref(), app.traces.as_deref());
    let text = app.metrics.render(&app.engine.counters(), &app.policies.list(), journal, traces, in_flight);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// Whether a version of it is served, be it the last good one.
pub(super) fn is_served(policy: &PolicyStatus) -> bool {
    policy.version.is_some()
}

/// The version that is served, or nothing.
pub(super) fn version(policy: &PolicyStatus) -> &str {
    policy.version.as_deref().unwrap_or_default()
}

/// A policy in one line, for the operator.
pub(super) fn describe_policy(policy: &PolicyStatus) -> String {
    if is_served(policy) {
        let refused = &policy.capabilities.refused;
        let refused = if refused.is_empty() {
            String::new()
        } else {
            format!(" (not granted: {})", refused.join(", "))
        };
        format!("{} {}{refused}", policy.name, version(policy))
    } else {
        let why = policy
            .last_error
            .as_ref()
            .map_or_else(|| "not compiled yet".into(), |error| error.message.clone());
        format!("{} NOT SERVED: {why}", policy.name)
    }
}
