//! Spans of requests that only happened on paper.

use std::time::SystemTime;

use axum::http::HeaderMap;
use forkpoint_engine::Usage;
use serde_json::json;

use super::*;
use crate::policy::Share;

fn context() -> TraceContext {
    TraceContext::new(&HeaderMap::new(), Share::ALL, (Instant::now(), SystemTime::now()))
}

fn outcome(from: Instant) -> Outcome<'static> {
    Outcome {
        id: "r1",
        method: "POST",
        path: "/v1/chat/completions",
        route: Some("/v1/chat/completions"),
        when: (from, from + Duration::from_millis(100)),
        status: Some(200),
        left: false,
        error: None,
        model: Some("tiny"),
        policy: None,
        plan: None,
        reason: None,
        usage: Some(UsageReport { prompt: 20, completion: 5, reused: 16, computed: 4, ..Default::default() }),
    }
}

/// Any span.
pub(crate) fn span() -> SpanData {
    let spans = of_request(&context(), &outcome(Instant::now()), &Timeline::default());
    spans.into_iter().next().unwrap()
}

fn get<'a>(spans: &'a [SpanData], name: &str) -> &'a SpanData {
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} in {spans:#?}"))
}

fn said(span: &SpanData, key: &str) -> Option<Value> {
    span.attributes.iter().find(|said| said.key.as_str() == key).map(|said| said.value.clone())
}

fn is_error(span: &SpanData) -> bool {
    span.status != Status::Unset
}

/// A step that asked twice and was refused the second time, then trapped.
fn step() -> Step {
    let question =
        |text: &str| json!({"instructions": text, "criteria": {"boolean": {"yes": null, "no": null}}});
    let answer = json!({
        "verdict": {"boolean": 0.9}, "probabilities": [0.9, 0.1], "confidence": 0.8, "mass": 0.7,
        "argmax_is_label": true, "rung": "probe",
    });
    let json = json!({
        "policy": "gate", "version": "0123", "at_us": 5_000, "plan": null, "reason": "policy-trap",
        "labels": [["said", "a secret"]], "capabilities": [], "used": {"wall_us": 9_000, "decisions": 2},
        "fault": {"kind": "trap", "message": "a secret"},
        "decisions": [
            {"at_us": 1_000, "took_us": 2_000, "questions": [question("a secret"), question("?")],
             "probes": ["shell", "A Secret"], "answers": [answer, answer], "failure": null},
            {"at_us": 4_000, "took_us": 10, "questions": [], "probes": [], "answers": [],
             "failure": {"kind": "budget", "message": "a secret"}},
        ],
    });
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_request_is_a_tree() {
    let (context, from) = (context(), Instant::now());
    let at = |ms| from + Duration::from_millis(ms);
    let usage = Usage { tokens: 20, reused: 16, computed: 4, ..Usage::default() };
    let timeline = Timeline {
        model: Some("gate".into()),
        opened: Some((Phase { from: at(1), to: Some(at(9)) }, Some(Ok(usage)))),
        chain: Some((at(10), vec![step()])),
        decided: None,
        dispatched: Some((
            Phase { from: at(30), to: Some(at(90)) },
            Dispatched::Generate { operation: "chat", finish: Some(FinishReason::Length) },
        )),
    };
    let spans = of_request(&context, &outcome(from), &timeline);
    let names: Vec<_> = spans.iter().map(|span| span.name.as_ref()).collect();
    let server = "POST /v1/chat/completions";
    assert_eq!(names, [server, "open session", "policy gate", "decide", "decide", "generate"]);
    let id = |span: &SpanData| span.span_context.span_id();
    let (root, policy) = (get(&spans, server), get(&spans, "policy gate"));
    assert_eq!((id(root), root.parent_span_id), (context.server.span_id(), SpanId::INVALID));
    for child in [1, 2, 5] {
        assert_eq!(spans[child].parent_span_id, id(root), "{}", names[child]);
    }
    assert!(spans[3..5].iter().all(|span| span.parent_span_id == id(policy)));
    assert!(spans.iter().all(|span| span.span_context.trace_id() == context.server.trace_id()));
    assert!(spans.iter().all(|span| span.start_time <= span.end_time));
    let since = |time: SystemTime| time.duration_since(root.start_time).unwrap().as_millis();
    let times = |span: &SpanData| (since(span.start_time), since(span.end_time));
    assert_eq!((times(policy), times(&spans[3])), ((15, 24), (16, 18)));
    assert_eq!((times(&spans[5]), times(root)), ((30, 90), (0, 100)));

    assert_eq!(said(root, "gen_ai.usage.output_tokens"), Some(Value::I64(5)));
    assert_eq!(said(root, "gen_ai.request.model"), Some("gate".into()));
    assert_eq!(said(&spans[3], "forkpoint.decide.questions"), Some(Value::I64(2)));
    assert_eq!(said(&spans[3], "forkpoint.decide.probes"), Some(list(["shell"])));
    assert_eq!(said(&spans[3], "forkpoint.decide.rungs"), Some(list(["probe", "probe"])));
    assert_eq!(said(&spans[4], "error.type"), Some("budget".into()));
    assert_eq!(said(policy, "error.type"), Some("trap".into()));
    assert_eq!(said(&spans[5], "gen_ai.response.finish_reasons"), Some(list(["length"])));
    let failed: Vec<bool> = spans.iter().map(is_error).collect();
    assert_eq!(failed, [false, false, true, false, true, false]);
    let text = format!("{spans:?}").to_lowercase();
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn what_has_not_ended_ends_with_the_request() {
    let (context, from) = (context(), Instant::now());
    let begun = Phase { from, to: None };
    let timeline = Timeline {
        dispatched: Some((begun, Dispatched::Generate { operation: "chat", finish: None })),
        ..Timeline::default()
    };
    let outcome = Outcome { left: true, ..outcome(from) };
    let spans = of_request(&context, &outcome, &timeline);
    let (server, generate) = (&spans[0], get(&spans, "generate"));
    assert_eq!(generate.end_time, server.end_time);
    for span in [server, generate] {
        assert_eq!(said(span, "forkpoint.client_left"), Some(Value::Bool(true)));
        // How much was written is not known.
        assert_eq!(said(span, "gen_ai.usage.output_tokens"), None);
        assert!(!is_error(span), "who leaves is no error");
    }
}

#[test]
fn an_error_is_one_where_it_happened() {
    let (context, from) = (context(), Instant::now());
    let forwarded = |status| {
        let to = Forwarded {
            span: SpanId::from(7),
            upstream: "strong".into(),
            model: "large".into(),
            address: "h".into(),
            port: Some(80),
            status,
        };
        let dispatched = Some((Phase { from, to: None }, Dispatched::Forward(to)));
        Timeline { dispatched, ..Timeline::default() }
    };
    let down = Outcome { status: Some(502), error: Some("upstream_unreachable"), ..outcome(from) };
    let spans = of_request(&context, &down, &forwarded(None));
    let forward = get(&spans, "forward strong");
    assert_eq!((forward.span_context.span_id(), &forward.span_kind), (SpanId::from(7), &SpanKind::Client));
    assert!(is_error(&spans[0]) && is_error(forward));
    assert_eq!(said(forward, "error.type"), Some("upstream_unreachable".into()));
    assert_eq!(said(&spans[0], "gen_ai.usage.input_tokens"), None, "the upstream counts its own");
    // An upstream's 429 goes to the client as it is: the client's call failed, the server did not.
    let busy = Outcome { status: Some(429), ..outcome(from) };
    let spans = of_request(&context, &busy, &forwarded(Some(429)));
    assert!(!is_error(&spans[0]));
    assert_eq!(said(get(&spans, "forward strong"), "error.type"), Some("429".into()));
    // A stream that broke off after its status was sent.
    let broken = Outcome { error: Some("request_timeout"), ..outcome(from) };
    assert!(is_error(&of_request(&context, &broken, &Timeline::default())[0]));
    let mistake = Outcome { status: Some(400), error: Some("invalid_json"), ..outcome(from) };
    let spans = of_request(&context, &mistake, &Timeline::default());
    assert_eq!((is_error(&spans[0]), said(&spans[0], "error.type")), (false, Some("invalid_json".into())));
}

#[test]
fn a_method_or_path_of_the_clients_own_is_no_name() {
    let outcome = Outcome { method: "BREW", path: "/pot", route: None, ..outcome(Instant::now()) };
    let spans = of_request(&context(), &outcome, &Timeline::default());
    assert_eq!(spans[0].name, "HTTP");
    assert_eq!(said(&spans[0], "http.request.method"), Some("_OTHER".into()));
    assert_eq!(said(&spans[0], "http.request.method_original"), Some("BREW".into()));
}

#[test]
fn a_policy_in_shadow_is_marked_and_hangs_below_its_request() {
    let context = context();
    let spans = of_shadow(&context, Instant::now(), &step());
    assert_eq!(spans.len(), 3);
    assert_eq!(spans[0].parent_span_id, context.server.span_id());
    assert_eq!(said(&spans[0], "forkpoint.policy.shadow"), Some(Value::Bool(true)));
}
