//! The journal: what is written down of a request, and `GET /v1/journal`, which streams it.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::Stream;
use serde::Deserialize;
use tokio::sync::broadcast::error::RecvError;

use super::{App, RequestContext};
use crate::journal::{Entry, Kind, Record};
use crate::policy::{RouteRequest, Routed};
use crate::wire::{ApiError, Kind as ErrorKind};

/// Which records are wanted; what is not said may be anything.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Filter {
    /// A policy that was asked.
    policy: Option<String>,
    /// The reason of the plan.
    reason: Option<String>,
    /// The kind of the plan.
    plan: Option<String>,
    /// The kind of a fault on the way.
    fault: Option<String>,
    /// The model that the client named.
    model: Option<String>,
    /// Of requests or of calls in shadow.
    kind: Option<Kind>,
    /// How many of the last records come first [default: 100].
    last: Option<usize>,
    /// Whether those that come are sent as well [default: true].
    follow: Option<bool>,
}

impl Filter {
    fn wants(&self, record: &Record) -> bool {
        let is =
            |wanted: &Option<String>, there: &str| wanted.as_deref().is_none_or(|wanted| wanted == there);
        let any = |wanted: &Option<String>, has: &dyn Fn(&str) -> bool| wanted.as_deref().is_none_or(has);
        any(&self.policy, &|name| record.steps.iter().any(|step| step.policy == name))
            && any(&self.fault, &|kind| {
                record
                    .steps
                    .iter()
                    .any(|step| step.fault.as_ref().is_some_and(|fault| fault.kind.code() == kind))
            })
            && is(&self.reason, &record.reason)
            && is(&self.model, &record.model)
            && is(&self.plan, record.plan.as_ref().map_or("", |plan| plan.kind()))
            && self.kind.is_none_or(|kind| kind == record.kind)
    }
}

impl App {
    /// Prepares the journal's line on a request that policies are about to be asked about: what there is to say should
    /// it end there.
    pub(super) fn note_begin(&self, context: &RequestContext, request: &RouteRequest) {
        if let Some(journal) = &self.journal {
            let record = Record::unfinished(request, journal.keeps_prompts());
            context.record.note().journal = Some(Box::new(record));
        }
    }

    /// The same once there is a plan; it is written when the answer is over.
    pub(super) fn note_plan(&self, context: &RequestContext, request: &RouteRequest, routed: &Routed) {
        let Some(journal) = &self.journal else { return };
        let headers = routed.visible(&request.headers);
        let record = Record::of(request, routed, headers, journal.keeps_prompts());
        context.record.note().journal = Some(Box::new(record));
    }
}

/// `GET /v1/journal`: server-sent events, each with a line of the journal as its data.
pub(super) async fn stream(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    filter: Result<Query<Filter>, QueryRejection>,
) -> Result<Response, ApiError> {
    context.operator()?;
    let Query(filter) = filter.map_err(|error| ApiError::new(ErrorKind::Invalid, error.body_text()))?;
    let Some(journal) = &app.journal else {
        return Err(ApiError::new(
            ErrorKind::NotFound,
            "the journal is switched off: [journal] enabled = false",
        ));
    };
    let (recent, mut live) = journal.read(usize::MAX);
    let mut recent: Vec<Arc<Entry>> =
        recent.into_iter().filter(|entry| filter.wants(&entry.record)).collect();
    recent.drain(..recent.len().saturating_sub(filter.last.unwrap_or(100)));
    let stopping = app.stopping.clone();
    let events = async_stream::stream! {
        for entry in recent {
            yield Ok::<_, Infallible>(Event::default().data(&entry.line));
        }
        while filter.follow.unwrap_or(true) {
            let next = tokio::select! {
                // What was written before the stop is told.
                biased;
                next = live.recv() => next,
                () = stopping.cancelled() => break,
            };
            match next {
                Ok(entry) if filter.wants(&entry.record) => yield Ok(Event::default().data(&entry.line)),
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => {
                    // The reader is slower than the server: better told than thought complete.
                    yield Ok(Event::default().event("missed").data(missed.to_string()));
                }
                Err(RecvError::Closed) => break,
            }
        }
    };
    Ok(sse(events))
}

fn sse(events: impl Stream<Item = Result<Event, Infallible>> + Send + 'static) -> Response {
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}
