//! Two versions of the contract in one server.

use std::fs;

use forkpoint::guest_tools::{CONTRACT, CONTRACTS, Wit, componentize};
use forkpoint::policy::{CHAIN_EXHAUSTED, FaultKind, LoadCode, Plan, PolicyState, RouteRequest};
use forkpoint_engine::{Message, Role};

use super::{Bench, eventually, fault, fixture, root, say, text, trial, with};

/// Starts with `old`, built against 0.1, and `new`, built against the trial of 0.2.
async fn both(rules: &str) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("scripted"), dir.path().join("old.wasm")).unwrap();
    fs::write(dir.path().join("new.wasm"), trial()).unwrap();
    Bench::over(dir, with(toml::from_str(rules).unwrap())).await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_version_serves_alone_and_in_one_chain() {
    let bench = both("").await;
    for (policy, contract) in [("old", "0.1.0"), ("new", "0.2.0-trial")] {
        let status = bench.status(policy);
        assert_eq!((status.state, status.last_error), (PolicyState::Serving, None));
        assert_eq!(status.contract.as_deref(), Some(contract));
    }
    assert_eq!(text(&bench.run("old", "reply:from 0.1").await), "from 0.1");
    let asked = bench.run("new", "d").await;
    assert_eq!(text(&asked), "asked");
    let [decision] = &asked.trace.steps[0].decisions[..] else { panic!("{:?}", asked.trace) };
    assert_eq!((decision.questions[0].instructions.as_str(), decision.answers.len()), ("Is it so?", 1));
    drop(asked);

    // Each passes over what the other answers.
    let chain = ["new", "old"];
    let routed = bench.route(&chain, say("no-tools\nreply:from 0.1")).await;
    assert_eq!((text(&routed).as_str(), routed.trace.steps.len()), ("from 0.1", 2));
    drop(routed);
    let routed = bench.route(&["old", "new"], say("ask:boolean:Is it?\ndecide\nnext")).await;
    assert_eq!((text(&routed).as_str(), routed.policy.as_str()), ("added", "new"));
    drop(routed);
    let routed = bench.route(&chain, say("next")).await;
    assert_eq!((routed.reason.as_str(), routed.trace.steps.len()), (CHAIN_EXHAUSTED, 2));
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_has_one_name_for_each_client() {
    let bench = both("").await;
    let turns = |turns: &[(Role, &str)], tenant: &str| RouteRequest {
        messages: turns.iter().map(|(role, text)| Message::new(*role, *text)).collect(),
        tenant: tenant.into(),
        ..say("")
    };
    let name = async |request| text(&bench.route(&["new"], request).await);
    let first = name(turns(&[(Role::User, "continue")], "acme")).await;
    assert!(first.len() == 16 && first.bytes().all(|digit| digit.is_ascii_hexdigit()), "{first}");
    let later = [(Role::User, "continue"), (Role::Assistant, "I did."), (Role::User, "c")];
    assert_eq!(name(turns(&later, "acme")).await, first);
    assert_ne!(name(turns(&later, "globex")).await, first, "another client");
    assert_ne!(name(turns(&later[2..], "acme")).await, first, "another conversation");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_store_refuses_is_told_by_kind() {
    let bench = both("grant = { store = false }").await;
    for asks in ["get", "set", "add"] {
        assert_eq!(text(&bench.run("new", asks).await), "denied", "{asks}");
    }
    let denied = bench.run("old", "get:k\nreply:unreached").await;
    assert_eq!(fault(&denied).kind, FaultKind::Denied, "0.1 has no other way to say so");
    drop(denied);
    assert!(!bench.status("new").capabilities.used.contains_key("store"));
    bench.end().await;

    let bench = both("limits = { store_bytes = 200 }").await;
    let run = async |asks: &str| text(&bench.run("new", asks).await);
    assert_eq!(run("get").await, "none");
    assert_eq!(run("add").await, "added");
    assert_eq!(run("get").await, "1");
    assert_eq!(run("set").await, "set");
    assert_eq!(run("get").await, "set");
    assert_eq!(run("add").await, "not-a-counter");
    assert_eq!(run(&"set".repeat(100)).await, "full");
    assert_eq!(run("get").await, "set", "what failed changed nothing");
    assert_eq!(bench.status("new").capabilities.used["store"], 8);
    // In 0.1 the same are sentences.
    let notes = bench.notes("old", &format!("set:k={}\nset:k=x\nadd:k", "x".repeat(300))).await;
    assert!(notes.contains("of 200 bytes") && notes.contains("not a counter"), "{notes}");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_says_when_to_ask_again() {
    let bench = both("").await;
    let routed = bench.run("new", "r").await;
    let Plan::Reject { status, code, message, retry_after } = &routed.plan else { panic!("no rejection") };
    assert_eq!((*status, code.as_str(), message.as_str(), *retry_after), (429, "spent", "Spent.", Some(17)));
    let record = serde_json::to_value(&routed.trace.steps[0].plan).unwrap();
    assert_eq!(record["retry_after"], 17);
    drop(routed);
    let routed = bench.run("old", "reject:429:spent:Spent.").await;
    assert!(matches!(routed.plan, Plan::Reject { retry_after: None, .. }));
    let record = serde_json::to_value(&routed.trace.steps[0].plan).unwrap();
    assert_eq!(record.get("retry_after"), None);
    drop(routed);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_version_takes_the_place_of_the_other_and_of_its_state() {
    let bench = both("").await;
    let scripted = fs::read(fixture("scripted")).unwrap();
    let swap = async |bytes: &[u8], contract: &str| {
        bench.replace("old", bytes);
        eventually("it is replaced", || bench.status("old").contract.as_deref() == Some(contract)).await;
    };
    assert_eq!(bench.notes("old", "add:k").await, "add 1");
    swap(&trial(), "0.2.0-trial").await;
    assert_eq!(text(&bench.run("old", "add").await), "added");
    assert_eq!(text(&bench.run("old", "get").await), "2");
    swap(&scripted, "0.1.0").await;
    assert_eq!(bench.notes("old", "add:k").await, "add 3");
    assert_eq!((bench.status("old").loads, bench.status("old").last_error), (3, None));
    bench.end().await;
}

/// The trial's policy built against `wit` under another version.
fn built_against(version: &str, wit: &str) -> Vec<u8> {
    let core = fs::read_to_string(root().join("tests/fixtures/trial.core.wat")).unwrap();
    let named =
        |text: &str| text.replace("@0.1.0", "@0.2.0-trial").replace("@0.2.0-trial", &format!("@{version}"));
    componentize(named(&core).as_bytes(), false, Wit::Text(&named(wit))).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_that_is_not_served_is_refused_and_told_which_are() {
    let bench = both("").await;
    let [(_, newest), _] = CONTRACTS;
    for version in ["0.3.0", "0.2.0", "0.2.0-trial.2", "0.1.0-trial", "1.1.0"] {
        bench.replace("new", &built_against(version, newest));
        let refused =
            format!("@{version}; the versions of the contract served here are 0.2.0-trial and 0.1.0");
        eventually("it is refused", || {
            let error = bench.status("new").last_error;
            error.is_some_and(|error| error.code == LoadCode::WrongWorld && error.message.contains(&refused))
        })
        .await;
        assert_eq!(bench.status("new").contract.as_deref(), Some("0.2.0-trial"), "the last good one");
        assert_eq!(text(&bench.run("new", "get").await), "none");
    }
    // One that has the name of a version and not its types.
    for (version, wit) in [("0.2.0-trial", CONTRACT), ("0.1.0", newest)] {
        bench.replace("new", &built_against(version, wit));
        let misfit = format!("does not fit forkpoint:policy/policy@{version}: ");
        eventually("it is refused", || {
            bench.status("new").last_error.is_some_and(|error| error.message.contains(&misfit))
        })
        .await;
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_names_a_trial_in_full() {
    let dir = tempfile::tempdir().unwrap();
    for (name, contract) in [("whole", "0.2.0-trial"), ("minor", "0.2"), ("older", "0.1")] {
        fs::write(dir.path().join(format!("{name}.wasm")), trial()).unwrap();
        fs::write(dir.path().join(format!("{name}.toml")), format!("contract = '{contract}'")).unwrap();
    }
    let bench = Bench::over(dir, |_| {}).await;
    assert_eq!(bench.status("whole").last_error, None);
    for name in ["minor", "older"] {
        let error = bench.status(name).last_error.unwrap();
        assert_eq!(error.code, LoadCode::WrongWorld);
        assert!(error.message.contains("built against 0.2.0-trial"), "{}", error.message);
    }
    bench.end().await;
}
