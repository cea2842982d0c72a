//! Sessions that are opened when they are first needed: what opens one, and what comes of one that cannot be.

use std::fs;
use std::time::{Duration, Instant};

use forkpoint::policy::{
    CHAIN_EXHAUSTED, Fallback, FaultKind, Opening, PolicyOptions, PolicyRules, RouteRequest,
};
use forkpoint_engine::{Conversation, EngineError, Message, Role};

use super::{Bench, eventually, fault, fixture, generated, say, text, with};

/// A request whose last turn is this script, after a turn of so many bytes.
fn after(bytes: usize, script: &str) -> RouteRequest {
    let mut request = say(script);
    request.messages.insert(0, Message::new(Role::System, "long ".repeat(bytes / 5)));
    request
}

/// More than the tiny model's context holds.
fn too_long(script: &str) -> RouteRequest {
    after(40_000, script)
}

fn upstream(options: &mut PolicyOptions) {
    options.upstreams = ["strong".to_owned()].into();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_decides_by_rules_computes_nothing() {
    let bench = Bench::start(&["scripted"], upstream).await;
    let scripts = [
        "reply:by rule",
        "reject:403:no:No.",
        "forward:strong",
        "max-tokens:3\ngenerate",
        // No question, a session that another call would have to open, and what is refused before.
        "decide\nreply:x",
        "next",
        "trap",
        "log:x\nget:a\nheader:b\nrequest\necho",
    ];
    for script in scripts {
        for request in [after(3_000, script), too_long(script)] {
            let routed = bench.route(&["scripted", "scripted"], request).await;
            assert!(routed.session.session().is_none() && routed.session.failure().is_none(), "{script}");
            let counters = bench.engine.counters();
            assert_eq!((counters.prefill_tokens, counters.sessions), (0, 0), "{script}");
        }
    }
    bench.end().await;

    let refused = "[limits]\ndecisions = 1\nforks = 0\ngenerated_tokens = 0\ndecided_tokens = 10";
    let bench = Bench::start(&["scripted"], with(toml::from_str(refused).unwrap())).await;
    let long = "word ".repeat(100);
    for step in [
        "ask:boolean:One?\nask:boolean:Two?\ndecide".to_owned(),
        format!("decide:boolean:{long}"),
        format!("extend:user {long}"),
        "fork".to_owned(),
        "draft:3".to_owned(),
    ] {
        let notes = bench.notes("scripted", &step).await;
        assert!(notes.starts_with("failure budget"), "{step}: {notes}");
        assert_eq!(bench.engine.counters().prefill_tokens, 0, "{step}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_the_session_opens_it_once() {
    for (step, adds) in [
        ("decide:boolean:Is it?", false),
        ("usage", false),
        ("fork", false),
        ("extend:user And then?", true),
        ("draft:2", true),
    ] {
        let bench = Bench::start(&["first=scripted", "second=scripted"], upstream).await;
        let script = format!("{step}\n{step}\nusage\nnext");
        let routed = bench.route(&["first", "second"], after(2_500, &script)).await;
        assert_eq!((routed.reason.as_str(), routed.trace.steps.len()), (CHAIN_EXHAUSTED, 2), "{step}");
        let usage = routed.session.usage().unwrap();
        assert_eq!((usage.reused, usage.computed), (0, usage.tokens), "{step}");
        assert!(usage.tokens > 500, "{step}: {usage:?}");
        let computed = bench.engine.counters().prefill_tokens;
        if adds {
            assert!(computed < 2 * u64::from(usage.tokens), "{step}: {computed} for {usage:?}");
        } else {
            assert_eq!(computed, u64::from(usage.tokens), "{step}");
        }
        // What the opening takes is waited for, and no work of the guest's.
        let used = routed.trace.steps[0].used;
        assert!(used.host_us > 0 && used.cpu_us < used.wall_us, "{step}: {used:?}");
        drop(routed);
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_cannot_be_opened_is_the_policys_to_handle_and_no_fault_of_its_own() {
    let fallbacks = [Fallback::Generate, Fallback::Next, Fallback::Reject];
    for fallback in fallbacks {
        let rules = PolicyRules { fallback: Some(fallback), ..PolicyRules::default() };
        let bench = Bench::start(&["scripted", "last=scripted"], |options| {
            upstream(options);
            options.defaults = rules;
        })
        .await;
        let route = async |script: &str| bench.route(&["scripted", "last"], too_long(script)).await;

        for step in ["decide:boolean:Is it?", "fork", "extend:user x", "draft:2"] {
            let notes = text(&route(&format!("{step}\n{step}\necho")).await);
            let lines: Vec<&str> = notes.lines().collect();
            assert_eq!(lines.len(), 2, "{step}: {notes}");
            assert!(
                lines[0].starts_with("failure full") && lines[0].contains("the context window holds 4096")
            );
            assert_eq!(lines[0], lines[1], "it is tried once");
        }
        assert_eq!(text(&route("usage\necho").await), "usage 0 0 0");

        let forwarded = route("decide:boolean:Is it?\nforward:strong").await;
        assert_eq!(forwarded.plan.kind(), "forward");
        assert!(matches!(forwarded.session.failure(), Some(EngineError::TooLong { limit: 4096, .. })));
        let passed = route("decide:boolean:Is it?\nnext").await;
        assert_eq!((passed.policy.as_str(), passed.reason.as_str()), ("last", CHAIN_EXHAUSTED));

        // No plan: no refusal either, but the engine's own error once it is carried out. The next policy is asked.
        for end in ["error:no", "trap", "reject:9999:x:y"] {
            let routed = route(&format!("decide:boolean:Is it?\n{end}")).await;
            let (last, kind) = (fallback == Fallback::Next, fault(&routed).kind);
            assert!(
                generated(&routed).session.is_none() && routed.trace.steps.len() == 1 + usize::from(last)
            );
            let reason = if last { CHAIN_EXHAUSTED.to_owned() } else { kind.reason() };
            assert_eq!(routed.reason, reason, "{end}");
            let error = routed.session.opened().await.unwrap_err();
            assert!(matches!(error, EngineError::TooLong { .. }), "{end}: {error}");
        }
        // A fault before the session was needed is one as any.
        let early = route("trap").await;
        match fallback {
            Fallback::Generate => assert!(generated(&early).session.is_none()),
            Fallback::Next => assert_eq!(early.policy, "last"),
            Fallback::Reject => assert_eq!(early.plan.kind(), "reject"),
        }
        assert_eq!(bench.engine.counters().prefill_tokens, 0);
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_policy_may_forward_what_no_session_holds() {
    let bench = Bench::start(&["asks=scripted", "decides=scripted"], |options| {
        upstream(options);
        options
            .rules
            .insert("asks".into(), toml::from_str("fallback = 'next'\ngrant.upstreams = []").unwrap());
        options.rules.insert("ghost".into(), toml::from_str("fallback = 'next'").unwrap());
        options.rules.insert("guard".into(), toml::from_str("fallback = 'reject'").unwrap());
    })
    .await;
    let script = "decide:boolean:Is it?\nforward:strong";
    for (chain, steps) in [(&["asks", "decides"][..], 2), (&["asks", "ghost", "decides"], 3)] {
        let routed = bench.route(chain, too_long(script)).await;
        assert_eq!((routed.plan.kind(), routed.policy.as_str()), ("forward", "decides"), "{chain:?}");
        assert_eq!(routed.trace.steps[0].reason, "policy-denied");
        assert_eq!(routed.trace.steps.len(), steps);
    }
    // One that refuses when it fails still lets nothing by.
    let routed = bench.route(&["asks", "guard", "decides"], too_long(script)).await;
    assert!(generated(&routed).session.is_none() && routed.policy == "guard");
    assert!(matches!(routed.session.opened().await, Err(EngineError::TooLong { .. })));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_on_trial_is_not_judged_by_requests_that_no_session_holds() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("reply-v1"), dir.path().join("p.wasm")).unwrap();
    fs::write(dir.path().join("p.toml"), "canary = { share = 1, rollback_at = 0.5 }").unwrap();
    let bench = Bench::over(dir, |_| {}).await;
    bench.replace("p", &fs::read(fixture("scripted")).unwrap());
    eventually("it is on trial", || bench.status("p").canary.is_some()).await;
    for _ in 0..25 {
        let routed = bench.route(&["p"], too_long("decide:boolean:Is it?\nerror:no")).await;
        assert_eq!(routed.reason, "policy-error");
    }
    let trial = bench.status("p").canary.expect("it goes on");
    assert_eq!((trial.calls, trial.faults), (0, 0));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_that_has_no_session_is_not_asked_and_costs_the_request_nothing() {
    let bench = Bench::start(&["watch=scripted", "scripted"], |options| {
        options.rules.insert("watch".into(), toml::from_str("shadow = true").unwrap());
    })
    .await;
    let routed = bench.route(&["watch", "scripted"], too_long("reply:x")).await;
    assert_eq!(text(&routed), "x");
    drop(routed);
    let routed = bench.route(&["watch", "scripted"], after(500, "reply:x")).await;
    assert_eq!(text(&routed), "x");
    assert!(routed.session.session().is_some(), "opened for the shadow's sake");
    drop(routed);
    eventually("one shadow is asked", || bench.status("watch").calls == 1).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policys_wall_time_is_not_spent_on_the_opening() {
    let rules = "fallback = 'generate'\n[limits]\ncpu_ms = 60_000\nwall_ms = 500";
    let bench = Bench::start(&["scripted"], with(toml::from_str(rules).unwrap())).await;
    for (end, ends_by) in [("reply:in time", None), ("loop", Some(FaultKind::Wall))] {
        let request = after(1_000, &format!("decide:boolean:Is it?\n{end}"));
        let conversation = Conversation { messages: request.messages.clone(), tools: Vec::new() };
        let engine = bench.engine.clone();
        let session = Opening::new(async move {
            tokio::time::sleep(Duration::from_millis(1_200)).await;
            engine.open(conversation, "").await
        });
        let start = Instant::now();
        let routed = bench.policies.route(&["scripted".to_owned()], request, session).await;
        let took = start.elapsed();
        assert_eq!(routed.trace.fault().map(|fault| fault.kind), ends_by, "{end}");
        assert!(took > Duration::from_millis(1_200) && took < Duration::from_secs(5), "{end}: {took:?}");
        let step = &routed.trace.steps[0];
        assert_eq!(step.decisions[0].answers.len(), 1, "{end}");
        assert!(
            step.decisions[0].took_us < 1_000_000 && step.used.host_us > 1_200_000,
            "{end}: {:?}",
            step.used
        );
        assert!(routed.session.session().is_some(), "{end}");
    }
    bench.end().await;
}
