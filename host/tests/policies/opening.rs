//! Sessions that are opened when they are first needed: what opens one, and what comes of one that cannot be.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint::journal::{Journal, Kind};
use forkpoint::policy::{
    CHAIN_EXHAUSTED, Fallback, FaultKind, Opening, PlanRecord, PolicyOptions, PolicyRules, RouteRequest,
};
use forkpoint_engine::{Conversation, EngineError, Message, Role};

use super::platform::journal;
use super::{Bench, eventually, fault, fixture, generated, say, text, trial, with};

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
        // So that a policy that goes by the length still does.
        let told = text(&route("usage\nusage\necho").await);
        let tokens: Vec<u32> =
            told.lines().map(|line| line.split(' ').nth(1).unwrap().parse().unwrap()).collect();
        assert!(tokens[0] > 4096 && tokens[0] == tokens[1] && told.ends_with(" 0 0"), "{told}");

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
    let counts = || bench.status("p").canary.map(|trial| (trial.calls, trial.faults)).expect("it goes on");
    assert_eq!(counts(), (0, 0));
    // What the version does itself is: well, or badly.
    assert_eq!(text(&bench.route(&["p"], too_long("decide:boolean:Is it?\nreply:x")).await), "x");
    assert_eq!(counts(), (1, 0));
    assert_eq!(bench.route(&["p"], too_long("decide:boolean:Is it?\ntrap")).await.reason, "policy-trap");
    assert_eq!(counts(), (2, 1));
    bench.end().await;
}

/// Opens a request's session for real, so much later.
fn late(bench: &Bench, request: &RouteRequest, after: Duration) -> Opening {
    let conversation = Conversation { messages: request.messages.clone(), tools: Vec::new() };
    let engine = bench.engine.clone();
    Opening::new(async move {
        tokio::time::sleep(after).await;
        engine.open(conversation, "").await
    })
}

/// `rules` replies by rule, whatever is said; `watch` is in shadow.
async fn watched(journal: &Arc<Journal>) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("scripted"), dir.path().join("watch.wasm")).unwrap();
    fs::write(dir.path().join("rules.wasm"), trial()).unwrap();
    let journal = journal.clone();
    Bench::over(dir, |options| {
        options.journal = Some(journal);
        options.rules.insert("watch".into(), toml::from_str("shadow = true").unwrap());
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_plan_waits_for_a_shadow() {
    let (journal, wait) = (journal(), Duration::from_secs(2));
    let bench = watched(&journal).await;
    let chain = ["watch".to_owned(), "rules".to_owned()];
    // "c" lets `rules` reply with the conversation's name, "n" pass; the rest is the script of `watch`.
    for (first, plan, records) in [("calls\n", "reply", 1), ("no-tools\n", "generate", 2)] {
        let request = after(1_000, &format!("{first}decide:boolean:Is it?\nreply:seen"));
        let session = late(&bench, &request, wait);
        let start = Instant::now();
        let routed = bench.policies.route(&chain, request, session).await;
        assert!(start.elapsed() < wait / 2, "{plan}: {:?}", start.elapsed());
        assert_eq!((routed.plan.kind(), routed.trace.steps.len()), (plan, 1));
        assert!(routed.session.session().is_none() && routed.session.failure().is_none(), "{plan}");
        if plan == "generate" {
            // It follows the reply's own session.
            assert!(routed.session.opened().await.unwrap().usage().tokens > 100);
        }
        eventually("the shadow is written down", || journal.read(9).0.len() == records).await;
        let record = &journal.read(9).0[records - 1].record;
        assert_eq!((record.kind, record.policy.as_str()), (Kind::Shadow, "watch"));
        assert_eq!(record.steps[0].decisions[0].answers.len(), 1, "{record:?}");
        assert!(record.session.tokens > 100, "{record:?}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_computes_what_it_needs_and_no_more() {
    let journal = journal();
    let bench = watched(&journal).await;
    for (count, request) in [after(500, "calls\nreply:x"), too_long("calls\nreply:x")].into_iter().enumerate()
    {
        assert_eq!(bench.route(&["watch", "rules"], request).await.plan.kind(), "reply");
        eventually("the shadow is asked", || journal.read(9).0.len() == count + 1).await;
        let record = &journal.read(9).0[count].record;
        assert_eq!((record.plan.as_ref().map(PlanRecord::kind), record.session.tokens), (Some("reply"), 0));
        assert_eq!(bench.engine.counters().prefill_tokens, 0);
    }
    // One that asks of what no session holds learns that, as it would alone.
    let script = "calls\ndecide:boolean:Is it?\nreply:x";
    assert_eq!(bench.route(&["watch", "rules"], too_long(script)).await.plan.kind(), "reply");
    eventually("the shadow is asked", || journal.read(9).0.len() == 3).await;
    let record = &journal.read(9).0[2].record;
    assert!(record.steps[0].decisions[0].failure.is_some());
    assert_eq!(record.session.error.as_deref(), Some("context_length_exceeded"));
    assert!(record.session.tokens > 4096, "{:?}", record.session);
    // Where that is known already it is not asked.
    let routed = bench.route(&["watch", "rules"], too_long("d")).await;
    assert!(routed.session.failure().is_some());
    drop(routed);
    assert_eq!(bench.status("watch").calls, 3);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_opens_no_session_beyond_its_requests_time_or_the_servers() {
    let journal = journal();
    let bench = watched(&journal).await;
    let chain = ["watch".to_owned(), "rules".to_owned()];
    let script = "calls\ndecide:boolean:Is it?\nreply:seen";
    let request =
        RouteRequest { deadline: Some(Instant::now() + Duration::from_millis(200)), ..after(500, script) };
    let session = late(&bench, &request, Duration::from_secs(3600));
    assert_eq!(bench.policies.route(&chain, request, session).await.plan.kind(), "reply");
    tokio::time::sleep(Duration::from_millis(400)).await;
    let session = late(&bench, &after(500, script), Duration::from_secs(3600));
    assert_eq!(bench.policies.route(&chain, after(500, script), session).await.plan.kind(), "reply");
    let start = Instant::now();
    bench.end().await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert!(journal.read(9).0.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_is_kept_while_a_session_is_opened() {
    for (places, kind) in [(1, Some(FaultKind::Busy)), (2, None)] {
        let bench = Bench::start(&["scripted"], |options| {
            (options.concurrency, options.queue_wait) = (places, Duration::from_millis(50));
        })
        .await;
        let request = after(500, "decide:boolean:Is it?\nreply:asked");
        let session = late(&bench, &request, Duration::from_secs(1));
        let chain = ["scripted".to_owned()];
        let (asked, beside) = tokio::join!(bench.policies.route(&chain, request, session), async {
            tokio::time::sleep(Duration::from_millis(200)).await;
            bench.run("scripted", "reply:hi").await
        });
        assert_eq!(text(&asked), "asked");
        assert_eq!(beside.trace.fault().map(|fault| fault.kind), kind, "{places} places");
        drop((asked, beside));
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policys_wall_time_is_not_spent_on_the_opening() {
    let rules = "fallback = 'generate'\n[limits]\ncpu_ms = 60_000\nwall_ms = 500";
    let bench = Bench::start(&["scripted"], with(toml::from_str(rules).unwrap())).await;
    for (end, ends_by) in [("reply:in time", None), ("loop", Some(FaultKind::Wall))] {
        let request = after(1_000, &format!("decide:boolean:Is it?\n{end}"));
        let session = late(&bench, &request, Duration::from_millis(1_200));
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
