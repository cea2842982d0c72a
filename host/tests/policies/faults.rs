//! Policies that misbehave when they are asked to: each fault has its own kind, leads to the fallback, and touches
//! neither the session nor another policy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint::policy::{Fallback, FaultKind, Plan, PolicyOptions, PolicyRules};

use super::{Bench, fault, generated, say, text, untouched, with};

fn rules(text: &str) -> PolicyRules {
    toml::from_str(text).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_way_to_misbehave_is_told_apart() {
    // Time for ten thousand calls of an import, however slow the machine.
    let bench =
        Bench::start(&["bad=scripted", "good=scripted"], with(rules("[limits]\ncpu_ms = 1000"))).await;
    let cases = [
        ("loop", FaultKind::Cpu, "1000 ms"),
        ("grow", FaultKind::Memory, "memory_mb) is 64"),
        ("recurse", FaultKind::Stack, "stack"),
        ("trap", FaultKind::Trap, "unreachable"),
        ("panic:no", FaultKind::Trap, ""),
        ("bad-text", FaultKind::Trap, "utf-8"),
        ("foreign-session", FaultKind::Trap, ""),
        ("flood:config", FaultKind::Calls, "10000 times"),
        ("flood:log", FaultKind::Calls, "calls"),
        ("flood:decide", FaultKind::Calls, "calls"),
        ("flood:store", FaultKind::Calls, "calls"),
        ("flood:fork", FaultKind::Calls, "calls"),
        ("error:I will not", FaultKind::Error, "I will not"),
        ("error:two\nlines", FaultKind::Error, "two"),
        ("forward:nowhere", FaultKind::InvalidPlan, "no upstream named \"nowhere\": there are none"),
        ("model:other\ngenerate", FaultKind::InvalidPlan, "no model named \"other\""),
        ("mount:unheard-of\ngenerate", FaultKind::InvalidPlan, "no tool named \"unheard-of\""),
        ("reject:9999:x:y", FaultKind::InvalidPlan, "got 9999"),
        ("reject:200:x:y", FaultKind::InvalidPlan, "got 200"),
        ("because:two words\ngenerate", FaultKind::InvalidPlan, "two words"),
        ("temperature:-1\ngenerate", FaultKind::InvalidPlan, "temperature"),
        ("huge:20000000", FaultKind::Trap, ""),
    ];
    for (script, kind, says) in cases {
        let start = Instant::now();
        let routed = bench.run("bad", script).await;
        let fault = fault(&routed);
        assert_eq!(fault.kind, kind, "{script}: {fault}");
        assert!(fault.message.to_lowercase().contains(&says.to_lowercase()), "{script}: {fault}");
        assert_eq!(routed.reason, format!("policy-{}", kind.code()), "{script}");
        assert!(generated(&routed).session.is_none(), "{script}: the fallback");
        assert!(untouched(&routed), "{script}");
        assert!(start.elapsed() < Duration::from_secs(5), "{script}: {:?}", start.elapsed());
        assert_eq!(text(&bench.run("good", "reply:fine").await), "fine", "after {script}");
    }
    let (bad, good) = (bench.status("bad"), bench.status("good"));
    assert_eq!(bad.calls, cases.len() as u64);
    assert_eq!(bad.faults.values().sum::<u64>(), bad.calls);
    assert_eq!((bad.faults["cpu"], bad.faults["trap"], bad.faults["calls"]), (1, 5, 5), "{:?}", bad.faults);
    assert_eq!((good.calls, good.faults.values().sum::<u64>()), (cases.len() as u64, 0));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_never_returns_is_ended_link_by_link() {
    let names = ["first", "second", "third"];
    let change = |options: &mut PolicyOptions| {
        let endless = PolicyRules { fallback: Some(Fallback::Next), ..PolicyRules::default() };
        options.rules.extend(names.map(|name| (name.to_owned(), endless.clone())));
    };
    let bench = Bench::start(&["first=scripted", "second=scripted", "third=scripted"], change).await;
    let start = Instant::now();
    let routed = bench.route(&names, say("loop")).await;
    assert_eq!(routed.reason, "chain-exhausted");
    let reasons: Vec<&str> = routed.trace.steps.iter().map(|step| step.reason.as_str()).collect();
    assert_eq!(reasons, ["policy-cpu"; 3]);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fault_leads_to_the_fallback_that_is_set() {
    let set = |fallback| PolicyRules { fallback: Some(fallback), ..PolicyRules::default() };
    let change = |options: &mut PolicyOptions| {
        options.rules.insert("skips".into(), set(Fallback::Next));
        options.rules.insert("refuses".into(), set(Fallback::Reject));
    };
    let bench = Bench::start(&["skips=scripted", "refuses=scripted", "v1=reply-v1"], change).await;
    {
        let routed = bench.route(&["skips", "ghost", "v1"], say("trap")).await;
        assert_eq!((routed.reason.as_str(), routed.policy.as_str()), ("policy-unavailable", "ghost"));
        let routed = bench.route(&["skips", "v1"], say("trap")).await;
        assert_eq!((text(&routed).as_str(), routed.trace.steps[0].reason.as_str()), ("v1", "policy-trap"));
        let routed = bench.route(&["skips"], say("trap")).await;
        assert_eq!(routed.reason, "chain-exhausted");

        let routed = bench.route(&["refuses", "v1"], say("error:my secret")).await;
        let Plan::Reject { status, code, message, .. } = &routed.plan else {
            panic!("{}", routed.plan.kind())
        };
        assert_eq!((*status, code.as_str()), (503, "policy-failed"));
        assert!(message.contains("refuses") && !message.contains("secret"), "{message}");
        assert_eq!(routed.reason, "policy-error");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processor_time_is_the_guests_own_and_wall_time_is_all() {
    // A guest that waits for the engine longer than its processor time lasts has done nothing wrong.
    let settings = rules("[limits]\ncpu_ms = 20\ngenerated_tokens = 100_000");
    let bench = Bench::start(&["scripted"], with(settings)).await;
    let routed = bench.run("scripted", "draft:400\necho").await;
    assert!(text(&routed).starts_with("draft"));
    let used = routed.trace.used();
    assert!(used.cpu_us < 20_000 && used.host_us > used.cpu_us, "{used:?}");
    drop(routed);
    let routed = bench.run("scripted", "loop").await;
    let cpu = routed.trace.used().cpu_us;
    assert!((20_000..60_000).contains(&cpu), "{cpu} us of 20 ms");
    drop(routed);
    bench.end().await;

    // One that spins or waits beyond its wall time is ended, and what it waited for with it.
    let settings = rules("[limits]\ncpu_ms = 60_000\nwall_ms = 50\ngenerated_tokens = 100_000");
    let bench = Bench::start(&["scripted"], with(settings)).await;
    for script in ["loop", &"draft:3000\n".repeat(50)] {
        let start = Instant::now();
        let routed = bench.run("scripted", script).await;
        assert_eq!(fault(&routed).kind, FaultKind::Wall, "{script}");
        assert!(start.elapsed() < Duration::from_secs(3), "{script}: {:?}", start.elapsed());
        assert!(untouched(&routed), "{script}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_spinning_guest_does_not_hold_the_thread() {
    let bench = Bench::start(&["scripted"], with(rules("[limits]\ncpu_ms = 400"))).await;
    let bench = Arc::new(bench);
    // On the one worker thread both, so that only a true yield lets the other run.
    let spinning = tokio::spawn({
        let bench = bench.clone();
        async move { fault(&bench.run("scripted", "loop").await).kind }
    });
    let ticking = tokio::spawn(async {
        let mut ticks = 0;
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(300) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            ticks += 1;
        }
        ticks
    });
    assert_eq!(spinning.await.unwrap(), FaultKind::Cpu);
    let ticks = ticking.await.unwrap();
    assert!(ticks > 10, "{ticks} ticks of 5 ms in 300 ms");
    Arc::into_inner(bench).unwrap().end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_is_said_to_be_busy_and_serves_again() {
    let settings = rules("[limits]\ncpu_ms = 1000");
    let change = |options: &mut PolicyOptions| {
        (options.concurrency, options.queue_wait) = (1, Duration::from_millis(50));
        options.defaults = settings;
    };
    let bench = Bench::start(&["scripted"], change).await;
    let (spun, (busy, waited)) = tokio::join!(bench.run("scripted", "loop"), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let start = Instant::now();
        (bench.run("scripted", "reply:hi").await, start.elapsed())
    });
    assert_eq!(fault(&spun).kind, FaultKind::Cpu);
    assert_eq!((fault(&busy).kind, busy.reason.as_str()), (FaultKind::Busy, "policy-busy"));
    assert!(waited < Duration::from_secs(1), "{waited:?}");
    assert_eq!(text(&bench.run("scripted", "reply:hi").await), "hi");
    drop((spun, busy));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_takes_the_guest_along() {
    let settings = rules("[limits]\ncpu_ms = 60_000\ngenerated_tokens = 100_000");
    let change = |options: &mut PolicyOptions| (options.concurrency, options.defaults) = (1, settings);
    let bench = Bench::start(&["scripted"], change).await;
    for script in ["loop", &"draft:3000\n".repeat(50)] {
        let gone = tokio::time::timeout(Duration::from_millis(60), bench.run("scripted", script)).await;
        assert!(gone.is_err(), "{script} was to last longer");
        // Its place in the pool of one is free again.
        assert_eq!(text(&bench.run("scripted", "reply:next").await), "next");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_asks_for_more_memory_than_32_bits_hold_is_a_mistake_of_the_operator() {
    let mut options = PolicyOptions::new("nowhere");
    options.rules.insert("huge".into(), rules("[limits]\nmemory_mb = 5000"));
    let error = forkpoint::policy::Policies::start(options).await.err().unwrap().to_string();
    assert!(error.contains("huge") && error.contains("4095"), "{error}");
}
