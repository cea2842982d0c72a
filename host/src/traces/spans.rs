//! Spans out of what was noted of a request. Names and keys are those of OpenTelemetry's semantic conventions
//! for HTTP and generative models where they have one, and begin with `forkpoint.` where they do not. No span
//! holds a word of a prompt, a question, an answer or a message.

use std::borrow::Cow;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use forkpoint_engine::{FinishReason, Rung};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status};
use opentelemetry::{Array, InstrumentationScope, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::SpanData;

use super::context::{TraceContext, new_span_id};
use super::timeline::{Asked, Dispatched, Forwarded, Phase, Timeline};
use crate::policy::Step;
use crate::wire::chat::UsageReport;

#[cfg(test)]
pub(super) mod tests;

static SCOPE: LazyLock<InstrumentationScope> = LazyLock::new(|| {
    InstrumentationScope::builder("forkpoint").with_version(env!("CARGO_PKG_VERSION")).build()
});

/// Methods that stand in a span's name as they are; others are clients' own words.
const METHODS: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"];

/// How a request ended.
#[derive(Debug)]
pub(crate) struct Outcome<'a> {
    /// Its id.
    pub(crate) id: &'a str,
    /// Its method.
    pub(crate) method: &'a str,
    /// Its path.
    pub(crate) path: &'a str,
    /// The route's pattern, if it has one.
    pub(crate) route: Option<&'a str>,
    /// When it came and when it was over.
    pub(crate) when: (Instant, Instant),
    /// The status, if there was an answer.
    pub(crate) status: Option<u16>,
    /// The client left before the answer was whole.
    pub(crate) left: bool,
    /// The error's code, where one was answered.
    pub(crate) error: Option<&'a str>,
    /// The model that answered.
    pub(crate) model: Option<&'a str>,
    /// The policy that decided, the kind of its plan and the reason.
    pub(crate) policy: Option<&'a str>,
    pub(crate) plan: Option<&'a str>,
    pub(crate) reason: Option<&'a str>,
    /// What was spent.
    pub(crate) usage: Option<UsageReport>,
}

/// The spans of a request: its own, and below it one a part.
pub(super) fn of_request(
    context: &TraceContext,
    outcome: &Outcome<'_>,
    timeline: &Timeline,
) -> Vec<SpanData> {
    let mut spans = Spans { context, done: Vec::new() };
    let (_, over) = outcome.when;
    spans.server(outcome, timeline);
    let server = context.server.span_id();
    let within = |phase: &Phase| (phase.from, phase.to.unwrap_or(over));
    if let Some((phase, how)) = &timeline.opened {
        let usage = how.as_ref().and_then(|how| how.as_ref().ok());
        let session = Attributes::default()
            .with("forkpoint.session.tokens", usage.map(|usage| usage.tokens))
            .with("forkpoint.session.reused", usage.map(|usage| usage.reused))
            .with("forkpoint.session.computed", usage.map(|usage| usage.computed));
        let error = match how {
            Some(how) => how.as_ref().err().map(String::as_str),
            None => outcome.error,
        };
        spans.add(new_span_id(), server, "open session", within(phase), session.failed(error));
    }
    if let Some((phase, asked)) = &timeline.decided {
        let error = outcome.error.filter(|_| asked.is_none());
        let attributes = asked.as_ref().map(asked_attributes).unwrap_or_default();
        spans.add(new_span_id(), server, "decide", within(phase), attributes.failed(error));
    }
    if let Some((asked, steps)) = &timeline.chain {
        steps.iter().for_each(|step| spans.policy(*asked, step, false));
    }
    match &timeline.dispatched {
        Some((phase, Dispatched::Generate { operation, finish })) => {
            spans.generate(within(phase), operation, *finish, outcome);
        }
        Some((phase, Dispatched::Forward(forwarded))) => {
            spans.forward(within(phase), forwarded, outcome);
        }
        None => {}
    }
    spans.done
}

/// The spans of a policy that was asked in shadow, `asked` being when the policies of its request were.
pub(super) fn of_shadow(context: &TraceContext, asked: Instant, step: &Step) -> Vec<SpanData> {
    let mut spans = Spans { context, done: Vec::new() };
    spans.policy(asked, step, true);
    spans.done
}

/// Spans of one trace.
struct Spans<'a> {
    context: &'a TraceContext,
    done: Vec<SpanData>,
}

impl Spans<'_> {
    fn server(&mut self, outcome: &Outcome<'_>, timeline: &Timeline) {
        let known = METHODS.contains(&outcome.method);
        let method = if known { outcome.method } else { "HTTP" };
        let name = [Some(method), outcome.route].into_iter().flatten().collect::<Vec<_>>().join(" ");
        let generated = matches!(timeline.dispatched, Some((_, Dispatched::Generate { .. })));
        // What an upstream's model reads and writes is counted there, and a policy's own reply has none.
        let read = generated || timeline.decided.is_some();
        let attributes = Attributes::default()
            .with("http.request.method", Some(if known { outcome.method } else { "_OTHER" }.to_owned()))
            .with("http.request.method_original", (!known).then(|| outcome.method.to_owned()))
            .with("http.route", outcome.route.map(str::to_owned))
            .with("http.response.status_code", outcome.status.map(u32::from))
            .with("url.path", Some(outcome.path.to_owned()))
            .with("url.scheme", Some("http"))
            .with("gen_ai.request.model", timeline.model.clone())
            .with("gen_ai.response.model", outcome.model.filter(|_| read).map(str::to_owned))
            .usage(outcome.usage.filter(|_| read), outcome.left)
            .with("forkpoint.request.id", Some(outcome.id.to_owned()))
            .with("forkpoint.policy.name", outcome.policy.map(str::to_owned))
            .with("forkpoint.plan", outcome.plan.map(str::to_owned))
            .with("forkpoint.reason", outcome.reason.map(str::to_owned))
            .with("forkpoint.client_left", outcome.left.then_some(true));
        // A client's mistake is no error of the server's; a stream may break off after its status was sent.
        let is_error =
            outcome.status.is_some_and(|status| status >= 500 || (status < 400 && outcome.error.is_some()));
        let attributes = match (outcome.error, is_error) {
            (error, true) => attributes.failed(error.or(Some("_OTHER"))),
            (error, false) => attributes.with("error.type", error.map(str::to_owned)),
        };
        let (id, parent) = (self.context.server.span_id(), self.context.parent.unwrap_or(SpanId::INVALID));
        self.add(id, parent, name, outcome.when, attributes);
        if let Some(span) = self.done.last_mut() {
            span.span_kind = SpanKind::Server;
            span.parent_span_is_remote = self.context.parent.is_some();
        }
    }

    fn policy(&mut self, asked: Instant, step: &Step, shadow: bool) {
        let from = asked + Duration::from_micros(step.at_us);
        let attributes = Attributes::default()
            .with("forkpoint.policy.name", Some(step.policy.clone()))
            .with(
                "forkpoint.policy.version",
                Some(step.version.clone()).filter(|version| !version.is_empty()),
            )
            .with("forkpoint.plan", step.plan.as_ref().map(|plan| plan.kind()))
            .with("forkpoint.reason", Some(step.reason.clone()))
            .with("forkpoint.policy.cpu_us", Some(step.used.cpu_us))
            .with("forkpoint.policy.host_us", Some(step.used.host_us))
            .with("forkpoint.policy.questions", Some(step.used.decisions))
            .with("forkpoint.policy.decided_tokens", Some(step.used.decided_tokens))
            .with("forkpoint.policy.generated_tokens", Some(step.used.generated_tokens))
            .with("forkpoint.policy.shadow", shadow.then_some(true))
            .failed(step.fault.as_ref().map(|fault| fault.kind.code()));
        let id = new_span_id();
        let until = from + Duration::from_micros(step.used.wall_us);
        self.add(
            id,
            self.context.server.span_id(),
            format!("policy {}", step.policy),
            (from, until),
            attributes,
        );
        for decision in &step.decisions {
            let from = from + Duration::from_micros(decision.at_us);
            let until = from + Duration::from_micros(decision.took_us);
            self.add(new_span_id(), id, "decide", (from, until), asked_attributes(&decision.into()));
        }
    }

    fn generate(
        &mut self,
        when: (Instant, Instant),
        operation: &'static str,
        finish: Option<FinishReason>,
        outcome: &Outcome<'_>,
    ) {
        let reason = finish.map(|reason| match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        });
        let attributes = Attributes::default()
            .with("gen_ai.operation.name", Some(operation))
            .with("gen_ai.provider.name", Some("forkpoint"))
            .with("gen_ai.request.model", outcome.model.map(str::to_owned))
            .with("gen_ai.response.finish_reasons", reason.map(|reason| list([reason])))
            .usage(outcome.usage, finish.is_none())
            .with("forkpoint.client_left", (finish.is_none() && outcome.left).then_some(true))
            .failed(outcome.error.filter(|_| finish.is_none()));
        self.add(new_span_id(), self.context.server.span_id(), "generate", when, attributes);
    }

    fn forward(&mut self, when: (Instant, Instant), to: &Forwarded, outcome: &Outcome<'_>) {
        let refused = to.status.filter(|status| *status >= 400).map(|status| status.to_string());
        let attributes = Attributes::default()
            .with("http.request.method", Some("POST"))
            .with("http.response.status_code", to.status.map(u32::from))
            .with("server.address", Some(to.address.clone()))
            .with("server.port", to.port.map(u32::from))
            .with("gen_ai.request.model", Some(to.model.clone()))
            .with("forkpoint.upstream", Some(to.upstream.clone()))
            .failed(outcome.error.or(refused.as_deref()));
        let name = format!("forward {}", to.upstream);
        self.add(to.span, self.context.server.span_id(), name, when, attributes);
        if let Some(span) = self.done.last_mut() {
            span.span_kind = SpanKind::Client;
        }
    }

    fn add(
        &mut self,
        id: SpanId,
        parent: SpanId,
        name: impl Into<Cow<'static, str>>,
        (from, until): (Instant, Instant),
        attributes: Attributes,
    ) {
        let server = &self.context.server;
        let (trace, flags, state) = (server.trace_id(), server.trace_flags(), server.trace_state().clone());
        self.done.push(SpanData {
            span_context: SpanContext::new(trace, id, flags, false, state),
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: self.context.time_of(from),
            end_time: self.context.time_of(until),
            attributes: attributes.all,
            dropped_attributes_count: 0,
            events: Default::default(),
            links: Default::default(),
            status: attributes.status,
            instrumentation_scope: SCOPE.clone(),
        });
    }
}

fn asked_attributes(asked: &Asked) -> Attributes {
    let rung = |rung: &Rung| match rung {
        Rung::Labels => "labels",
        Rung::Probe => "probe",
    };
    let probes = (!asked.probes.is_empty()).then(|| list(asked.probes.iter().cloned()));
    let rungs = (!asked.rungs.is_empty()).then(|| list(asked.rungs.iter().map(rung)));
    Attributes::default()
        // A call that is refused is kept without its questions.
        .with("forkpoint.decide.questions", (asked.questions > 0).then_some(asked.questions as u64))
        .with("forkpoint.decide.probes", probes)
        .with("forkpoint.decide.rungs", rungs)
        .failed(asked.failure.map(|kind| kind.to_string()).as_deref())
}

fn list(words: impl IntoIterator<Item: Into<StringValue>>) -> Value {
    Value::Array(Array::String(words.into_iter().map(Into::into).collect()))
}

/// What is said of a span, and whether it failed.
#[derive(Default)]
struct Attributes {
    all: Vec<KeyValue>,
    status: Status,
}

impl Attributes {
    fn with(mut self, key: &'static str, value: Option<impl Said>) -> Self {
        self.all.extend(value.map(|value| KeyValue::new(key, value.said())));
        self
    }

    /// Tokens read, and those written where the reply is whole.
    fn usage(self, usage: Option<UsageReport>, partly: bool) -> Self {
        self.with("gen_ai.usage.input_tokens", usage.map(|usage| usage.prompt))
            .with("gen_ai.usage.output_tokens", usage.filter(|_| !partly).map(|usage| usage.completion))
            .with("gen_ai.usage.cache_read.input_tokens", usage.map(|usage| usage.reused))
    }

    /// An error of this kind, if there is one.
    fn failed(mut self, kind: Option<&str>) -> Self {
        if kind.is_some() {
            self.status = Status::error("");
        }
        self.with("error.type", kind.map(str::to_owned))
    }
}

/// What an attribute may say.
trait Said {
    fn said(self) -> Value;
}

macro_rules! said {
    ($($from:ty => $as:expr),*) => {
        $(impl Said for $from {
            fn said(self) -> Value {
                $as(self)
            }
        })*
    };
}

said!(
    bool => Value::Bool,
    &'static str => Value::from,
    String => Value::from,
    Value => std::convert::identity,
    u32 => |n| Value::I64(i64::from(n)),
    u64 => |n| Value::I64(i64::try_from(n).unwrap_or(i64::MAX))
);
