//! A request's place in a trace, and how it goes from one server to the next: W3C Trace Context, level 1.

use std::time::{Instant, SystemTime};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator};

use crate::policy::Share;

/// `version-traceid-parentid-flags`.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What tracing systems say of a trace beyond that.
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// Bytes of a `traceparent` of version 00.
const LENGTH: usize = 55;

/// What the spans of a request have in common.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceContext {
    /// The request's own span.
    pub(super) server: SpanContext,
    /// The client's span; none where the trace begins here.
    pub(super) parent: Option<SpanId>,
    /// One moment on the clock that spans are measured by, and on the one that they are told in.
    moment: (Instant, SystemTime),
}

impl TraceContext {
    /// The place of a request with these headers: in its client's trace, sampled if the client says so, or in a
    /// new one, sampled if it falls into the share.
    pub(super) fn new(headers: &HeaderMap, share: Share, moment: (Instant, SystemTime)) -> Self {
        let (trace, parent, sampled, state) = match client(headers) {
            Some(client) => (client.trace, Some(client.span), client.sampled, state(headers)),
            None => {
                let trace = RandomIdGenerator::default().new_trace_id();
                let [.., a, b, c, d, e, f, g, h] = trace.to_bytes();
                let sampled = share.holds(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
                (trace, None, sampled, TraceState::NONE)
            }
        };
        let flags = if sampled { TraceFlags::SAMPLED } else { TraceFlags::NOT_SAMPLED };
        Self { server: SpanContext::new(trace, new_span_id(), flags, false, state), parent, moment }
    }

    /// Whether its spans are kept.
    pub(crate) fn is_sampled(&self) -> bool {
        self.server.is_sampled()
    }

    /// The trace's id, as 32 hexadecimal digits; none where its spans are not kept.
    #[must_use]
    pub fn id(&self) -> Option<String> {
        self.is_sampled().then(|| self.server.trace_id().to_string())
    }

    /// The headers that carry the trace on to another server, as a child of a span.
    pub(crate) fn headers(&self, span: SpanId) -> HeaderMap {
        let (trace, flags) = (self.server.trace_id(), self.server.trace_flags().to_u8());
        let state = self.server.trace_state().header();
        let parent = format!("00-{trace}-{span}-{flags:02x}");
        let named = [(TRACEPARENT, parent), (TRACESTATE, state)].into_iter();
        let named = named.filter(|(_, value)| !value.is_empty());
        named.filter_map(|(name, value)| Some((name, HeaderValue::try_from(value).ok()?))).collect()
    }

    /// The time of day at an instant.
    pub(super) fn time_of(&self, instant: Instant) -> SystemTime {
        let (began, time) = self.moment;
        time + instant.saturating_duration_since(began)
    }
}

/// An id for a span that is told of before it is over.
pub(crate) fn new_span_id() -> SpanId {
    RandomIdGenerator::default().new_span_id()
}

/// A client's trace headers as they came, for an upstream where no traces are made here.
pub(crate) fn as_they_came(headers: &HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::new();
    for name in [TRACEPARENT, TRACESTATE] {
        for value in headers.get_all(&name) {
            kept.append(&name, value.clone());
        }
    }
    kept
}

/// What a client says of its trace.
#[derive(Debug, PartialEq, Eq)]
struct Client {
    trace: TraceId,
    span: SpanId,
    sampled: bool,
}

/// What the headers say; none where they say nothing, or nothing that can be read.
fn client(headers: &HeaderMap) -> Option<Client> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => read(value.to_str().ok()?),
        // Two parents are none.
        _ => None,
    }
}

/// Reads a `traceparent`. A version that is not known yet is read as 00; what it adds comes after another dash.
fn read(value: &str) -> Option<Client> {
    let (known, more) = value.split_at_checked(LENGTH)?;
    let mut parts = known.split('-');
    let mut hex = |digits: usize| {
        let part = parts.next()?;
        let fits = part.len() == digits && part.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'));
        fits.then_some(part)
    };
    let (version, trace, span, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
    if version == "ff" || (version == "00" && !more.is_empty()) || !(more.is_empty() || more.starts_with('-'))
    {
        return None;
    }
    let trace = TraceId::from_hex(trace).ok().filter(|id| *id != TraceId::INVALID)?;
    let span = SpanId::from_hex(span).ok().filter(|id| *id != SpanId::INVALID)?;
    // Of the flags, only the first is known.
    let sampled = u8::from_str_radix(flags, 16).ok()? & 1 == 1;
    Some(Client { trace, span, sampled })
}

/// The state beside a parent: the headers of that name as one list; nothing where that is none.
fn state(headers: &HeaderMap) -> TraceState {
    let lists: Result<Vec<&str>, _> = headers.get_all(TRACESTATE).iter().map(HeaderValue::to_str).collect();
    lists.ok().and_then(|lists| lists.join(",").parse().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(named: &[(&HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in named {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn context(named: &[(&HeaderName, &str)], share: Share) -> TraceContext {
        TraceContext::new(&headers(named), share, (Instant::now(), SystemTime::now()))
    }

    #[test]
    fn a_parent_is_read_as_the_standard_says() {
        let trace = TraceId::from(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        let span = SpanId::from(0x00f0_67aa_0ba9_02b7);
        for (flags, sampled) in [("00", false), ("01", true), ("02", false), ("ff", true)] {
            let value = format!("{}{flags}", &PARENT[..LENGTH - 2]);
            assert_eq!(read(&value), Some(Client { trace, span, sampled }), "{value}");
        }
        for later in
            ["cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", &format!("01{}-what", &PARENT[2..])]
        {
            assert_eq!(read(later), Some(Client { trace, span, sampled: true }), "{later}");
        }
    }

    #[test]
    fn what_is_no_parent_begins_a_trace() {
        let bad = [
            "",
            "00",
            &PARENT[..LENGTH - 1],
            &format!("{PARENT}-"),
            &format!("{PARENT}-more"),
            &format!("01{}more", &PARENT[2..]),
            &format!("ff{}", &PARENT[2..]),
            &format!("0g{}", &PARENT[2..]),
            &PARENT.to_uppercase(),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_01",
            "0-04bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ];
        for value in bad {
            assert_eq!(read(value), None, "{value}");
        }
        let own = context(&[(&TRACEPARENT, "00-no")], Share::ALL);
        assert!(own.parent.is_none() && own.server.is_valid() && own.is_sampled());
        let twice = context(&[(&TRACEPARENT, PARENT), (&TRACEPARENT, PARENT)], Share::ALL);
        assert_eq!(twice.parent, None);
        let orphan = context(&[(&TRACESTATE, "a=1")], Share::ALL);
        assert_eq!(orphan.server.trace_state(), &TraceState::NONE, "a state belongs to a parent");
    }

    #[test]
    fn a_trace_is_carried_on_under_another_span() {
        let named = [(&TRACEPARENT, PARENT), (&TRACESTATE, "a=1, b=2"), (&TRACESTATE, "c=3")];
        let context = context(&named, Share::NONE);
        assert_eq!(context.id().as_deref(), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
        assert_ne!(context.parent, Some(context.server.span_id()));
        let sent = context.headers(SpanId::from(7));
        assert_eq!(sent["traceparent"], "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000007-01");
        assert_eq!(sent["tracestate"], "a=1,b=2,c=3");
        let broken = self::context(&[(&TRACEPARENT, PARENT), (&TRACESTATE, "no list")], Share::ALL);
        assert_eq!(broken.headers(SpanId::from(7)).len(), 1, "a state that is none is left out");
    }

    #[test]
    fn who_has_no_parent_is_drawn_by_share() {
        let sampled = |share| (0..1000).filter(|_| context(&[], share).is_sampled()).count();
        assert_eq!((sampled(Share::NONE), sampled(Share::ALL)), (0, 1000));
        let unsampled = context(&[(&TRACEPARENT, &PARENT.replace("-01", "-00"))], Share::ALL);
        assert_eq!(unsampled.id(), None, "the client decides where it has decided");
        assert!(unsampled.headers(SpanId::from(7))["traceparent"].to_str().unwrap().ends_with("-00"));
    }
}
