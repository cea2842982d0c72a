//! Instances that are made ahead of their call.

use std::fs;

use forkpoint::guest_tools::{Wit, componentize};
use forkpoint::policy::{PolicyOptions, RouteRequest};

use super::{Bench, eventually, fault, fixture, root, say, text, trial};

/// A policy whose start counts itself in the store, before any call: what a call gets under `k` counts its instances.
fn counts_its_starts() -> Vec<u8> {
    let core = fs::read_to_string(root().join("tests/fixtures/trial.core.wat")).unwrap();
    let start = r#"(func (export "_initialize")
        (call $add (i32.const 16) (i32.const 1) (i64.const 1) (i32.const 0) (i32.const 0) (i32.const 512)))"#;
    let end = core.rfind(')').unwrap();
    let core = format!("{}{start})", &core[..end]);
    componentize(core.as_bytes(), false, Wit::of("0.2.0-trial").unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_finds_an_instance_that_no_call_has_used() {
    let bench = Bench::start(&["p=scripted"], |_| {}).await;
    for _ in 0..3 {
        eventually("one is ready", || bench.status("p").ready == 1).await;
        let routed = bench.run("p", "calls\necho").await;
        let used = routed.trace.used();
        assert_eq!((text(&routed).as_str(), used.ready, used.warm), ("calls 1", 1, 0));
        assert!(used.memory > 0, "{used:?}");
    }
    // After a fault too.
    for script in ["trap", "loop", "grow"] {
        eventually("one is ready", || bench.status("p").ready == 1).await;
        fault(&bench.run("p", script).await);
    }
    eventually("one is ready", || bench.status("p").ready == 1).await;
    bench.end().await;

    let off = Bench::start(&["p=scripted"], |options| options.ready_instances = 0).await;
    for _ in 0..2 {
        let routed = off.run("p", "calls\necho").await;
        assert_eq!((text(&routed).as_str(), routed.trace.used().ready), ("calls 1", 0));
    }
    assert_eq!(off.status("p").ready, 0);
    off.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_leaves_as_many_as_it_was_and_the_operator_allows() {
    let bench = Bench::start(&["p=scripted", "q=reply-v1"], |options| options.ready_instances = 3).await;
    let burst = (0..8).map(|_| bench.run("p", "calls\necho"));
    for routed in futures::future::join_all(burst).await {
        assert_eq!(text(&routed), "calls 1");
    }
    let ready = || (bench.status("p").ready, bench.status("q").ready);
    eventually("all places are taken, and the other policy keeps its own", || ready() == (2, 1)).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_and_its_settings_have_instances_of_their_own() {
    let state = tempfile::tempdir().unwrap();
    let kept = |options: &mut PolicyOptions| options.state = Some(state.path().to_owned());
    let bench = Bench::start(&["p=reply-v1"], kept).await;
    eventually("one is ready", || bench.status("p").ready == 1).await;
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the other component serves", || bench.status("p").loads == 2).await;
    assert_eq!(text(&bench.run("p", "x").await), "v2");
    // What comes back has one too.
    bench.policies.roll_back("p").await.unwrap();
    eventually("one is ready", || bench.status("p").ready >= 1).await;
    let routed = bench.run("p", "x").await;
    assert_eq!((text(&routed).as_str(), routed.trace.used().ready), ("v1", 1));
    drop(routed);

    bench.replace("p", &fs::read(fixture("scripted")).unwrap());
    eventually("the third serves", || bench.status("p").loads == 4).await;
    fs::write(bench.dir.path().join("p.toml"), "description = \"new\"\n[config]\na = 1").unwrap();
    let described = || bench.status("p").description.as_deref() == Some("new");
    eventually("its manifest is taken up", described).await;
    eventually("one is ready", || bench.status("p").ready >= 1).await;
    let routed = bench.run("p", "config:a\necho").await;
    assert_eq!((text(&routed).as_str(), routed.trace.used().ready), ("config Some(\"1\")", 1));
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_is_there_for_the_first_call_of_each_tenant() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("scripted"), dir.path().join("p.wasm")).unwrap();
    fs::write(dir.path().join("p.toml"), "stateless = true").unwrap();
    let bench = Bench::over(dir, |options| options.warm_instances = 4).await;
    for (tenant, calls, used) in [("a", 1, (0, 1)), ("b", 1, (0, 1)), ("a", 2, (1, 0)), ("c", 1, (0, 1))] {
        eventually("one is ready", || bench.status("p").ready == 1).await;
        let request = RouteRequest { tenant: tenant.into(), ..say("calls\necho") };
        let routed = bench.route(&["p"], request).await;
        let (warm, ready) = (routed.trace.used().warm, routed.trace.used().ready);
        assert_eq!((text(&routed), (warm, ready)), (format!("calls {calls}"), used), "{tenant}");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_imports_belongs_to_its_call() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("counts.wasm"), counts_its_starts()).unwrap();
    fs::write(dir.path().join("plain.wasm"), trial()).unwrap();
    let bench = Bench::over(dir, |_| {}).await;
    eventually("one of the other is ready", || bench.status("plain").ready == 1).await;
    for count in 1..=3 {
        let routed = bench.run("counts", "g").await;
        assert_eq!((text(&routed), routed.trace.used().ready), (count.to_string(), 0));
    }
    assert_eq!(bench.status("counts").ready, 0);
    bench.end().await;
}
