//! Instances that are kept between calls.

use std::fs;

use forkpoint::policy::FaultKind;

use super::{Bench, eventually, fault, fixture, say, text};

/// `p` calls itself stateless, `q` does not; so many instances are kept.
async fn start(warm: u32) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    for name in ["p", "q"] {
        fs::copy(fixture("scripted"), dir.path().join(format!("{name}.wasm"))).unwrap();
    }
    fs::write(dir.path().join("p.toml"), "stateless = true").unwrap();
    Bench::over(dir, |options| options.warm_instances = warm).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_called_again_where_both_sides_say_so() {
    let bench = start(2).await;
    for (policy, calls) in [("p", ["calls 1", "calls 2", "calls 3"]), ("q", ["calls 1"; 3])] {
        for wanted in calls {
            assert_eq!(bench.notes(policy, "calls").await, wanted, "{policy}");
        }
    }
    assert_eq!((bench.status("p").warm, bench.status("q").warm, bench.status("p").running), (1, 0, 0));
    let routed = bench.run("p", "decide:boolean:Again?\necho").await;
    let used = routed.trace.used();
    assert_eq!((used.warm, used.decisions), (1, 1));
    assert!(used.reused_tokens > 0 && used.memory > 0, "{used:?}");
    drop(routed);
    bench.end().await;

    let off = start(0).await;
    for _ in 0..2 {
        assert_eq!(off.notes("p", "calls").await, "calls 1", "the operator keeps none");
    }
    off.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_never_meets_another_tenants_instance() {
    let bench = start(4).await;
    let calls = async |tenant: &str| {
        let mut request = say("calls\necho");
        request.tenant = tenant.into();
        text(&bench.route(&["p"], request).await)
    };
    assert_eq!((calls("a").await, calls("b").await), ("calls 1".into(), "calls 1".into()));
    assert_eq!((calls("a").await, calls("b").await), ("calls 2".into(), "calls 2".into()));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_faulty_instance_is_not_called_again_and_bounds_hold_for_each_call() {
    let bench = start(2).await;
    for script in ["trap", "error:no", "loop", "grow", "flood:log", "reject:9999:x:y", "forward:nowhere"] {
        assert_eq!(bench.notes("p", "calls").await, "calls 1", "before {script}");
        assert_eq!(bench.run("p", "calls\necho").await.trace.used().warm, 1);
        fault(&bench.run("p", script).await);
    }
    // A budget is a call's, not an instance's.
    for _ in 0..3 {
        let asks = "ask:boolean:One?\nask:boolean:Two?\ndecide\necho";
        assert_eq!(bench.run("p", asks).await.trace.used().decisions, 2);
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_an_earlier_call_is_out_of_reach() {
    let bench = start(2).await;
    assert_eq!(bench.notes("p", "keep\nstale\ncalls").await, "calls 1");
    // The guest still holds the handle; its pages are free, and what it names is nobody's.
    eventually("the fork is given back", || bench.engine.counters().sessions == 0).await;
    let routed = bench.run("p", "fork\nstale\necho").await;
    assert_eq!(fault(&routed).kind, FaultKind::Trap);
    assert!(fault(&routed).message.contains("earlier call"), "{:?}", fault(&routed));
    drop(routed);
    // To let go of it is no use of it: collectors of garbage do so when they get to it.
    assert_eq!(bench.notes("p", "keep\ncalls").await, "calls 1");
    let routed = bench.run("p", "let-go\ncalls\necho").await;
    assert_eq!((text(&routed).as_str(), routed.trace.used().warm), ("calls 2", 1));
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_end_with_their_version() {
    let bench = start(2).await;
    assert_eq!(bench.notes("p", "calls").await, "calls 1");
    fs::write(bench.dir.path().join("p.toml"), "stateless = true\n[config]\na = 1").unwrap();
    eventually("the manifest is taken up", || bench.status("p").warm == 0).await;
    assert_eq!(bench.notes("p", "calls\nconfig:a").await, "calls 1\nconfig Some(\"1\")");
    bench.replace("p", &fs::read(fixture("reply-v1")).unwrap());
    eventually("the other component serves", || bench.status("p").loads == 2).await;
    assert_eq!(text(&bench.run("p", "calls\necho").await), "v1");
    assert_eq!(bench.status("p").warm, 1);
    bench.end().await;
}
