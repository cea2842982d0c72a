//! What stands around every request: its id, its key, its place among those in flight, its deadline, and the
//! one line that the log has of it.

use std::any::Any;
use std::hash::{BuildHasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use async_stream::stream;
use axum::body::{Body, HttpBody};
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, StreamExt};
use opentelemetry::trace::SpanId;

use super::keys::{Access, Operator};
use super::{App, body};
use crate::journal;
use crate::traces::{Outcome, Timeline, TraceContext, as_they_came};
use crate::wire::chat::UsageReport;
use crate::wire::{ApiError, Dialect, Kind};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TYPESAFE_REQUEST_ID: HeaderName = HeaderName::from_static("x-typesafe-request-id");

/// What is asked every few seconds: needs no key, makes no span, and no line in the log as it stands.
const ROUTINE: [&str; 2] = ["/health", "/metrics"];

/// The route of a request that has none, for metrics.
const OTHER: &str = "other";

/// The status that the log shows when the client leaves before there is an answer, as nginx does.
const UNANSWERED: u16 = 499;

/// What a handler knows of its request besides the request.
#[derive(Clone)]
pub struct RequestContext {
    /// Its id: the client's `x-request-id`, or one made here.
    pub id: String,
    /// Keeps the pages of its key's owner apart from others'.
    pub salt: String,
    /// When it has to be over.
    pub deadline: Instant,
    /// Its place in a trace; none where traces are off.
    pub trace: Option<Arc<TraceContext>>,
    /// The client's trace headers, for an upstream where traces are off.
    passed: HeaderMap,
    operator: Operator,
    pub(crate) record: Arc<Record>,
}

impl RequestContext {
    /// Lets operators pass.
    ///
    /// # Errors
    /// [`Kind::Forbidden`].
    pub(super) fn operator(&self) -> Result<(), ApiError> {
        self.operator.check()
    }

    /// Notes a time for the request's spans, where it has any.
    pub(crate) fn time(&self, note: impl FnOnce(&mut Timeline)) {
        if self.trace.as_ref().is_some_and(|trace| trace.is_sampled()) {
            note(&mut self.record.note().timeline);
        }
    }

    /// The headers that carry the request's trace on to an upstream, below a span.
    pub(crate) fn trace_headers(&self, span: SpanId) -> HeaderMap {
        self.trace.as_ref().map_or_else(|| self.passed.clone(), |trace| trace.headers(span))
    }

    /// The salt of the request's key and the client's own, where it sends one.
    #[must_use]
    pub fn salted(&self, own: Option<&str>) -> String {
        match own {
            Some(own) => format!("{}/{own}", self.salt),
            None => self.salt.clone(),
        }
    }
}

/// What the log will say of a request.
#[derive(Debug, Default, Clone)]
pub(crate) struct Summary {
    /// The body has arrived.
    pub(crate) received: bool,
    pub(crate) model: Option<String>,
    pub(crate) policy: Option<String>,
    pub(crate) plan: Option<&'static str>,
    pub(crate) reason: Option<String>,
    pub(crate) usage: Option<UsageReport>,
    pub(crate) error: Option<String>,
    /// Its line in the journal, but for its outcome.
    pub(crate) journal: Option<Box<journal::Record>>,
    /// What its spans will be made of.
    pub(crate) timeline: Timeline,
}

/// Collects the summary while the request is answered.
#[derive(Debug, Default)]
pub(crate) struct Record(Mutex<Summary>);

impl Record {
    /// The summary, to be filled in.
    pub(crate) fn note(&self) -> MutexGuard<'_, Summary> {
        // A summary half filled in is still worth a line.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The code of an error response, for the log.
#[derive(Debug, Clone)]
pub(crate) struct ErrorCode(pub(crate) String);

impl IntoResponse for ApiError {
    /// OpenAI's dialect; the other routes render their errors themselves.
    fn into_response(self) -> Response {
        let code = ErrorCode(self.code());
        let mut response = ApiError::into_response(self, Dialect::OpenAi);
        response.extensions_mut().insert(code);
        response
    }
}

/// Ends a request's line in the log when the response is over, or dropped by the client.
struct Ending {
    app: Arc<App>,
    record: Arc<Record>,
    id: String,
    method: Method,
    path: String,
    route: &'static str,
    started: Instant,
    trace: Option<Arc<TraceContext>>,
    status: StatusCode,
    finished: bool,
    _in_flight: Option<tokio::sync::OwnedSemaphorePermit>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        self.app.metrics.request(self.route, self.status.as_u16(), took);
        if !self.finished {
            self.app.metrics.disconnected();
        }
        let mut summary = std::mem::take(&mut *self.record.note());
        let usage = summary.usage;
        let status = self.status.as_u16();
        let ms = (took.as_secs_f64() * 1e4).round() / 10.0;
        if let (Some(journal), Some(mut line)) = (&self.app.journal, summary.journal.take()) {
            line.outcome = Some(journal::Outcome {
                status,
                ms,
                completion: usage.map(|usage| usage.completion),
                left: !self.finished,
                error: summary.error.clone(),
            });
            journal.write(*line);
        }
        let trace_id = self.trace.as_ref().and_then(|trace| trace.id());
        if let (Some(traces), Some(context)) = (&self.app.traces, &self.trace) {
            traces.request(context, &self.outcome(&summary), &summary.timeline);
        }
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    id = self.id,
                    trace_id,
                    status,
                    ms,
                    model = summary.model,
                    policy = summary.policy,
                    plan = summary.plan,
                    reason = summary.reason,
                    prompt = usage.map(|usage| usage.prompt),
                    reused = usage.map(|usage| usage.reused),
                    completion = usage.map(|usage| usage.completion),
                    decisions = usage.map(|usage| usage.decisions),
                    error = summary.error,
                    left = (!self.finished).then_some(true),
                    "{} {}",
                    self.method,
                    self.path
                )
            };
        }
        if ROUTINE.contains(&self.route) { line!(debug) } else { line!(info) }
    }
}

impl Ending {
    /// What the request's own span says.
    fn outcome<'a>(&'a self, summary: &'a Summary) -> Outcome<'a> {
        let unanswered = !self.finished && self.status.as_u16() == UNANSWERED;
        Outcome {
            id: &self.id,
            method: self.method.as_str(),
            path: &self.path,
            route: Some(self.route).filter(|route| *route != OTHER),
            when: (self.started, Instant::now()),
            status: (!unanswered).then(|| self.status.as_u16()),
            left: !self.finished,
            error: summary.error.as_deref(),
            model: summary.model.as_deref(),
            policy: summary.policy.as_deref(),
            plan: summary.plan,
            reason: summary.reason.as_deref(),
            usage: summary.usage,
        }
    }
}

/// The outermost layer.
pub(super) async fn guard(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let id = request_id(request.headers());
    let dialect = Dialect::of(request.uri().path());
    let record = Arc::<Record>::default();
    let body = body::Unread::of(&mut request);
    let route = route_of(&request);
    let traces = app.traces.as_ref().filter(|_| !ROUTINE.contains(&route));
    let trace = traces.map(|traces| traces.begin(request.headers(), started));
    let mut ending = Ending {
        record: record.clone(),
        id: id.clone(),
        method: request.method().clone(),
        path: request.uri().path().to_owned(),
        route,
        started,
        trace: trace.clone(),
        status: StatusCode::from_u16(UNANSWERED).unwrap_or(StatusCode::BAD_REQUEST),
        finished: false,
        _in_flight: None,
        app: app.clone(),
    };
    let answered = async {
        let Access { salt, operator } = match ROUTINE.contains(&route) {
            true => Access { salt: String::new(), operator: Operator::No },
            false => match app.keys.check(request.headers()) {
                Ok(access) => access,
                Err(error) => {
                    // Who has no key is not to fill a collector.
                    ending.trace = None;
                    return Err(error);
                }
            },
        };
        if request.method() == Method::POST {
            let permit = app.in_flight.clone().try_acquire_owned().map_err(|_| {
                let message =
                    format!("{} requests are in flight, the server's limit", app.server.max_in_flight);
                ApiError::new(Kind::Busy, message)
            })?;
            ending._in_flight = Some(permit);
        }
        let timeout = app.server.request_timeout();
        let deadline = started + timeout;
        let passed = if trace.is_none() { as_they_came(request.headers()) } else { HeaderMap::new() };
        request.extensions_mut().insert(RequestContext {
            id: id.clone(),
            salt,
            deadline,
            trace,
            passed,
            operator,
            record: record.clone(),
        });
        let posted = request.method() == Method::POST;
        let late = || match posted && !record.note().received {
            // The client is late, not the server.
            true => body::slow(timeout),
            false => ApiError::new(Kind::Timeout, format!("not done within {} ms", timeout.as_millis())),
        };
        tokio::time::timeout_at(deadline.into(), next.run(request)).await.map_err(|_| late())
    };
    let mut response = match answered.await {
        Ok(response) => response,
        Err(error) => {
            let code = ErrorCode(error.code());
            let mut response = error.into_response(dialect);
            response.extensions_mut().insert(code);
            response
        }
    };
    if !body.read_out().await {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        if dialect == Dialect::TypeSafe {
            response.headers_mut().insert(TYPESAFE_REQUEST_ID, value.clone());
        }
        response.headers_mut().insert(REQUEST_ID, value);
    }
    ending.status = response.status();
    if let Some(ErrorCode(code)) = response.extensions_mut().remove::<ErrorCode>() {
        record.note().error = Some(code);
    }
    end_with_body(response, ending)
}

/// Lets the ending come when the body has been sent, or at once when it is whole already.
fn end_with_body(response: Response, mut ending: Ending) -> Response {
    if response.body().size_hint().exact().is_some() {
        ending.finished = true;
        return response;
    }
    // An upstream's answer may say its length: once so much is sent, no one asks whether there is more.
    let length = response.headers().get(header::CONTENT_LENGTH);
    let mut missing = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    ending.finished = missing == Some(0);
    response.map(|body| {
        Body::from_stream(stream! {
            let mut parts = body.into_data_stream();
            while let Some(part) = parts.next().await {
                if let (Some(missing), Ok(part)) = (&mut missing, &part) {
                    *missing = missing.saturating_sub(part.len() as u64);
                    ending.finished = *missing == 0;
                }
                yield part;
            }
            ending.finished = true;
            drop(ending);
        })
    })
}

/// Turns a panic into an error that says no more than that.
pub(super) async fn no_panic(request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path());
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            tracing::error!(panic = panic_message(&*panic), "a handler panicked");
            ApiError::new(Kind::Internal, "an internal error; the server's log says more")
                .into_response(dialect)
        }
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("not a text")
}

/// The route's pattern, so that metrics have as many series as there are routes.
fn route_of(request: &Request) -> &'static str {
    let matched = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str);
    super::ROUTES.iter().map(|(_, path, _)| *path).find(|path| *path == matched).unwrap_or_else(|| {
        // Axum writes a wildcard of several segments in its own way.
        if matched == "/v1/models/{*name}" { "/v1/models/{name}" } else { OTHER }
    })
}

/// The client's id where it can stand in a header and a log line, else a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    match given {
        Some(given)
            if (1..=128).contains(&given.len()) && given.bytes().all(|byte| byte.is_ascii_graphic()) =>
        {
            given.to_owned()
        }
        _ => new_id(),
    }
}

/// 128 bits that no one can guess: a keyed hash of a counter, the key drawn at start.
fn new_id() -> String {
    static KEYS: LazyLock<(RandomState, RandomState)> = LazyLock::new(Default::default);
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{:016x}{:016x}", KEYS.0.hash_one(count), KEYS.1.hash_one(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_is_kept_if_it_is_harmless() {
        let with = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
            request_id(&headers)
        };
        assert_eq!(with(b"trace-7"), "trace-7");
        for bad in [&b""[..], b"two words", b"\xff", &[b'a'; 129]] {
            assert_eq!(with(bad).len(), 32);
        }
        assert_ne!(new_id(), new_id());
    }
}
