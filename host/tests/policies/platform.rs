//! What operators and manifests say: capabilities, settings, shadows, trials, versions and state.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use forkpoint::config::Bytes;
use forkpoint::journal::{Journal, JournalOptions, Kind};
use forkpoint::policy::{
    CHAIN_EXHAUSTED, ChangeError, Fallback, FaultKind, LoadCode, Plan, PlanRecord, PolicyOptions, PolicyState,
};
use forkpoint_engine::Tool;

use super::{Bench, eventually, fault, fixture, generated, say, text};

/// A server with everything that a plan may name.
fn everything(options: &mut PolicyOptions) {
    options.upstreams = ["strong".to_owned()].into();
    options.models = ["tiny".to_owned()].into();
    options.tools = ["search".to_owned()].into();
}

fn describe(dir: &Path, name: &str, manifest: &str) {
    fs::write(dir.join(format!("{name}.toml")), manifest).unwrap();
}

/// Starts with one scripted policy, its manifest and what the operator says of it.
async fn start(manifest: &str, rules: &str) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("scripted"), dir.path().join("p.wasm")).unwrap();
    describe(dir.path(), "p", manifest);
    let rules = toml::from_str(rules).unwrap();
    Bench::over(dir, |options| {
        everything(options);
        options.rules.insert("p".into(), rules);
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn each_capability_is_there_when_both_sides_say_so() {
    // One manifest that asks, one that does not, and an operator who grants nothing.
    let asks = "[capabilities]\ngenerate = true\nstore = true\nlog = true\nheaders = ['X-A']\n\
                upstreams = ['strong']\nmodels = ['tiny']\ntools = ['search']";
    let grants = "[grant]\nheaders = ['x-a', 'x-b']";
    let denies = "[grant]\ngenerate = false\nstore = false\nlog = false\nheaders = []\nupstreams = []\n\
                  models = []\ntools = []";
    for (manifest, rules, has) in
        [(asks, grants, true), ("[capabilities]", grants, false), (asks, denies, false)]
    {
        let bench = start(manifest, rules).await;
        let run = async |script: &str| bench.run("p", script).await;
        let notes = text(&run("draft:2\nset:a=1\nadd:n\necho").await);
        let denied = |note: &str| notes.contains(note);
        assert_eq!(denied("failure denied"), !has, "generate: {notes}");
        assert_eq!(denied("denied: the store"), !has, "store: {notes}");

        let routed = run("get:a\nlog:hello\nreply:done").await;
        match has {
            true => assert_eq!((text(&routed).as_str(), routed.trace.used().log_lines), ("done", 1)),
            // No value would be a lie.
            false => assert_eq!(fault(&routed).kind, FaultKind::Denied),
        }
        drop(routed);
        assert_eq!(run("log:hello\nreply:x").await.trace.used().log_lines, u64::from(has));

        let mut request = say("header:x-a\nheader:x-b\necho");
        request.headers = vec![("x-a".into(), "1".into()), ("X-B".into(), "2".into())];
        let seen = text(&bench.route(&["p"], request).await);
        let wanted = if has { "header Some(\"1\")\nheader None" } else { "header None\nheader None" };
        assert_eq!(seen, wanted, "what is asked and granted, and no other");

        for script in ["forward:strong", "model:tiny\ngenerate", "mount:search\ngenerate"] {
            let routed = run(script).await;
            match has {
                true => assert_eq!(routed.trace.fault(), None, "{script}"),
                false => assert_eq!(fault(&routed).kind, FaultKind::Denied, "{script}"),
            }
        }
        // The request's own tools need no leave.
        let mut request = say("mount:bash\ngenerate");
        request.tools =
            vec![Tool { name: "bash".into(), description: None, parameters: serde_json::json!({}) }];
        let routed = bench.route(&["p"], request).await;
        assert_eq!(generated(&routed).tools.as_deref(), Some(&["bash".to_owned()][..]));
        drop(routed);

        let status = bench.status("p").capabilities;
        let used: Vec<&str> = status.used.keys().map(String::as_str).collect();
        if has {
            assert_eq!(used, ["generate", "log", "models.tiny", "store", "tools.search", "upstreams.strong"]);
            assert_eq!(status.used["upstreams.strong"], 1);
        } else {
            assert!(used.is_empty(), "{used:?}");
        }
        assert_eq!(status.refused.is_empty(), manifest == "[capabilities]" || has, "{:?}", status.refused);
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_is_taken_up_and_a_broken_one_changes_nothing() {
    let bench =
        start("description = 'one'\nroutes = ['guarded']\nfallback = 'reject'\n[config]\na = 1", "").await;
    let status = bench.status("p");
    assert_eq!((status.description.as_deref(), status.loads), (Some("one"), 1));
    assert_eq!(bench.notes("p", "config:a").await, "config Some(\"1\")");
    assert!(matches!(bench.run("p", "trap").await.plan, Plan::Reject { status: 503, .. }));
    assert_eq!(bench.policies.routed("guarded").as_deref(), Some("p"));
    assert_eq!(bench.policies.routed("p"), None, "its own name needs no route");

    describe(bench.dir.path(), "p", "descriptoin = 'two'");
    eventually("the manifest is refused", || bench.status("p").last_error.is_some()).await;
    let error = bench.status("p").last_error.unwrap();
    assert_eq!(error.code, LoadCode::Manifest);
    assert!(
        error.message.contains("p.toml: line 1, column 1") && error.message.contains("descriptoin"),
        "{error:?}"
    );
    assert_eq!(bench.notes("p", "config:a").await, "config Some(\"1\")", "the last good one");

    describe(bench.dir.path(), "p", "description = 'three'\n[limits]\nforks = 0");
    eventually("the next is taken up", || bench.status("p").description.as_deref() == Some("three")).await;
    let status = bench.status("p");
    assert_eq!((status.limits.forks, status.last_error, status.loads), (0, None, 1));
    assert_eq!(bench.policies.routed("guarded"), None);

    fs::remove_file(bench.dir.path().join("p.toml")).unwrap();
    eventually("without one it is bare", || bench.status("p").description.is_none()).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_pins_its_component_and_names_its_contract() {
    let hash = start("", "").await;
    let pinned = hash.status("p").hash.unwrap();
    hash.end().await;
    for (manifest, code) in [
        (format!("sha256 = '{pinned}'\ncontract = '0.1'"), None),
        (format!("sha256 = '{}'", "0".repeat(64)), Some(LoadCode::Pin)),
        ("contract = '0.2'".to_owned(), Some(LoadCode::WrongWorld)),
        ("contract = '0.2.0-trial'".to_owned(), Some(LoadCode::WrongWorld)),
    ] {
        let bench = start(&manifest, "").await;
        let status = bench.status("p");
        assert_eq!(status.last_error.map(|error| error.code), code, "{manifest}");
        assert_eq!(status.state == PolicyState::Serving, code.is_none(), "{manifest}");
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_may_carry_its_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(fixture("scripted")).unwrap();
    let (name, manifest) = (b"forkpoint:manifest", b"description = 'inside'");
    let size = 1 + name.len() + manifest.len();
    // A custom section: identifier 0, its size, its name with a length, its bytes (all short enough for one byte).
    bytes.extend([0, u8::try_from(size).unwrap(), u8::try_from(name.len()).unwrap()]);
    bytes.extend(name);
    bytes.extend(manifest);
    fs::write(dir.path().join("p.wasm"), bytes).unwrap();
    let bench = Bench::over(dir, |_| {}).await;
    assert_eq!(bench.status("p").description.as_deref(), Some("inside"));
    describe(bench.dir.path(), "p", "description = 'beside'");
    eventually("the file wins", || bench.status("p").description.as_deref() == Some("beside")).await;
    bench.end().await;
}

pub(super) fn journal() -> std::sync::Arc<Journal> {
    let (max_file, max_total) = (Bytes(1 << 20), Bytes(1 << 20));
    Journal::open(&JournalOptions { dir: None, prompts: true, max_file, max_total }).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_in_shadow_is_journaled_and_decides_nothing() {
    let kept = journal();
    let journal = kept.clone();
    let bench = Bench::start(&["new=scripted", "v1=reply-v1"], |options| {
        everything(options);
        options.journal = Some(journal);
        options.rules.insert("new".into(), toml::from_str("shadow = true").unwrap());
    })
    .await;
    let routed =
        bench.route(&["new", "v1"], say("decide:boolean:Is it?\nbecause:other\nforward:strong")).await;
    assert_eq!(text(&routed), "v1");
    assert_eq!(routed.trace.steps.len(), 1, "the shadow is no step of the request");
    drop(routed);
    eventually("the shadow is written down", || !kept.read(9).0.is_empty()).await;
    let record = &kept.read(9).0[0].record;
    assert_eq!((record.kind, record.policy.as_str(), record.reason.as_str()), (Kind::Shadow, "new", "other"));
    assert_eq!(record.plan.as_ref().map(PlanRecord::kind), Some("forward"));
    assert_eq!(record.steps[0].decisions[0].answers.len(), 1, "asked on the same session");
    assert_eq!(record.outcome, None);

    // Alone in its chain it leaves the request to the model; its faults are nobody else's.
    let routed = bench.route(&["new"], say("trap")).await;
    assert_eq!((routed.reason.as_str(), routed.policy.as_str()), (CHAIN_EXHAUSTED, ""));
    drop(routed.session.opened().await.unwrap());
    eventually("so is its fault", || kept.read(9).0.len() == 2).await;
    assert_eq!(kept.read(9).0[1].record.reason, "policy-trap");
    bench.end().await;
}

/// Asks so many conversations, and returns the answers in order.
async fn answers(bench: &Bench, count: usize) -> Vec<String> {
    let mut answers = Vec::new();
    for n in 0..count {
        answers.push(text(&bench.run("p", &format!("Conversation {n}")).await));
    }
    answers
}

/// Starts with `reply-v1` as the policy `p`, over a state folder.
async fn trial(state: &Path, manifest: &str) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("reply-v1"), dir.path().join("p.wasm")).unwrap();
    describe(dir.path(), "p", manifest);
    Bench::over(dir, |options| options.state = Some(state.to_owned())).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_is_tried_on_its_share_and_promoted_or_taken_back() {
    let state = tempfile::tempdir().unwrap();
    let bench = trial(state.path(), "canary = { share = 0.5 }").await;
    assert_eq!(answers(&bench, 3).await, ["v1"; 3], "the first version has nothing to be tried beside");
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the second is on trial", || bench.status("p").canary.is_some()).await;
    let tried = answers(&bench, 40).await;
    let new = tried.iter().filter(|answer| *answer == "v2").count();
    assert!((8..=32).contains(&new), "{new} of 40");
    assert_eq!(answers(&bench, 40).await, tried, "a conversation keeps its version");
    let canary = bench.status("p").canary.unwrap();
    assert_eq!((canary.calls, canary.faults), (2 * new as u64, 0));

    bench.policies.roll_back("p").await.unwrap();
    assert_eq!(answers(&bench, 40).await, vec!["v1"; 40]);
    let status = bench.status("p");
    assert_eq!((status.canary, status.last_error.unwrap().code), (None, LoadCode::Withdrawn));

    // Uploaded again, it may try again.
    bench.policies.upload("p", fs::read(fixture("reply-v2")).unwrap().into()).await.unwrap();
    assert_eq!(answers(&bench, 40).await, tried);
    bench.policies.promote("p").await.unwrap();
    assert_eq!(answers(&bench, 40).await, vec!["v2"; 40]);
    assert!(matches!(bench.policies.promote("p").await, Err(ChangeError::Conflict(_))));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_headers_of_a_request_are_those_that_the_version_called_could_see() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture("reply-v1"), dir.path().join("p.wasm")).unwrap();
    describe(dir.path(), "p", "[capabilities]\nheaders = ['x-old']\n");
    let rules = toml::from_str("[grant]\nheaders = ['x-old', 'x-new']").unwrap();
    let bench = Bench::over(dir, |options| _ = options.rules.insert("p".into(), rules)).await;
    let header = |name: &str| (name.to_owned(), "1".to_owned());
    let headers = [header("X-Old"), header("X-New"), header("X-Other")];
    let seen = async || bench.run("p", "hello").await.visible(&headers);
    assert_eq!(seen().await, [header("x-old")]);
    // The version that is tried on everyone sees another one.
    describe(bench.dir.path(), "p", "canary = { share = 1 }\n[capabilities]\nheaders = ['x-new']\n");
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the second is on trial", || bench.status("p").canary.is_some()).await;
    assert_eq!(answers(&bench, 1).await, ["v2"]);
    assert_eq!(seen().await, [header("x-new")]);
    bench.policies.roll_back("p").await.unwrap();
    assert_eq!(bench.run("nobody", "hello").await.visible(&headers), []);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trial_ends_by_itself_where_the_manifest_says_so() {
    let state = tempfile::tempdir().unwrap();
    let bench = trial(state.path(), "canary = { share = 1, rollback_at = 0.5, promote_after = 30 }").await;
    bench.replace("p", &fs::read(fixture("scripted")).unwrap());
    eventually("it is on trial", || bench.status("p").canary.is_some()).await;
    for call in 0..20 {
        assert_eq!(bench.run("p", "trap").await.reason, "policy-trap", "call {call}");
    }
    assert_eq!(text(&bench.run("p", "trap").await), "v1", "taken back after 20 calls");
    assert!(bench.status("p").last_error.unwrap().message.contains("failed too often"));

    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the next is on trial", || bench.status("p").canary.is_some()).await;
    assert_eq!(answers(&bench, 30).await, vec!["v2"; 30]);
    let status = bench.status("p");
    assert_eq!((status.canary, status.last_error), (None, None), "promoted");
    assert_eq!(status.version, status.hash.map(|hash| hash[..12].to_owned()));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_decided_of_versions_holds_over_a_restart() {
    let state = tempfile::tempdir().unwrap();
    let manifest = "canary = { share = 0.5 }";
    let bench = trial(state.path(), manifest).await;
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the second is on trial", || bench.status("p").canary.is_some()).await;
    let tried = answers(&bench, 20).await;
    let reopen = async |bench: Bench| {
        let Bench { dir, engine, policies } = bench;
        policies.stop().await;
        drop(policies);
        engine.stop();
        Bench::over(dir, |options| options.state = Some(state.path().to_owned())).await
    };
    let bench = reopen(bench).await;
    assert_eq!(answers(&bench, 20).await, tried, "the trial goes on");
    bench.policies.roll_back("p").await.unwrap();
    let bench = reopen(bench).await;
    assert_eq!(answers(&bench, 5).await, ["v1"; 5], "the file is the one that was taken back");
    assert_eq!(bench.status("p").last_error.unwrap().code, LoadCode::Withdrawn);

    bench.policies.disable("p").await.unwrap();
    assert_eq!(bench.status("p").state, PolicyState::Disabled);
    assert_eq!(bench.run("p", "x").await.reason, "policy-unavailable");
    let bench = reopen(bench).await;
    assert_eq!(bench.status("p").state, PolicyState::Disabled);
    assert_eq!(bench.policies.enable("p").await.unwrap().state, PolicyState::Serving);
    assert_eq!(answers(&bench, 1).await, ["v1"]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_version_before_comes_back_by_a_word() {
    let state = tempfile::tempdir().unwrap();
    let bench = trial(state.path(), "").await;
    let nothing = bench.policies.roll_back("p").await.unwrap_err();
    assert!(
        matches!(&nothing, ChangeError::Conflict(what) if what.contains("no version of p before")),
        "{nothing}"
    );
    bench.policies.upload("p", fs::read(fixture("reply-v2")).unwrap().into()).await.unwrap();
    assert_eq!(answers(&bench, 1).await, ["v2"]);
    let status = bench.policies.roll_back("p").await.unwrap();
    assert_eq!(status.last_error.unwrap().code, LoadCode::Withdrawn);
    assert_eq!(answers(&bench, 1).await, ["v1"]);

    // What cannot serve is refused before it is written.
    let before = fs::read(bench.path("p")).unwrap();
    let refused = bench.policies.upload("p", b"\0asm".as_slice().to_owned().into()).await.unwrap_err();
    assert!(
        matches!(&refused, ChangeError::Refused(error) if error.code == LoadCode::Truncated),
        "{refused}"
    );
    let refused = bench.policies.describe("p", "x = 1".into()).await.unwrap_err();
    assert!(matches!(&refused, ChangeError::Refused(error) if error.code == LoadCode::Manifest), "{refused}");
    assert_eq!(fs::read(bench.path("p")).unwrap(), before);
    assert!(matches!(bench.policies.upload("../p", before.clone().into()).await, Err(ChangeError::Name(_))));
    let status = bench.policies.describe("p", "description = 'new'".into()).await.unwrap().unwrap();
    assert_eq!(status.description.as_deref(), Some("new"), "of the version that serves");
    assert_eq!(answers(&bench, 1).await, ["v1"]);

    bench.policies.remove("p").await.unwrap();
    assert!(bench.policies.get("p").is_none() && !bench.path("p").exists());
    assert!(matches!(bench.policies.remove("p").await, Err(ChangeError::Unknown(_))));
    let left: HashSet<_> =
        fs::read_dir(bench.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_taken_back_twice_stays_away_and_what_was_removed_is_forgotten() {
    let state = tempfile::tempdir().unwrap();
    let bench = trial(state.path(), "").await;
    let scripted = fs::read(fixture("scripted")).unwrap();
    for component in [fs::read(fixture("reply-v2")).unwrap(), scripted] {
        bench.policies.upload("p", component.into()).await.unwrap();
    }
    bench.policies.roll_back("p").await.unwrap();
    assert_eq!(answers(&bench, 1).await, ["v2"]);
    bench.policies.roll_back("p").await.unwrap();
    assert_eq!(answers(&bench, 1).await, ["v1"]);
    // The file is the newest of the three; a change beside it must not bring it back.
    describe(bench.dir.path(), "p", "description = 'touched'");
    eventually("the manifest is read", || bench.status("p").description.as_deref() == Some("touched")).await;
    assert_eq!(answers(&bench, 1).await, ["v1"]);

    bench.policies.disable("p").await.unwrap();
    bench.policies.remove("p").await.unwrap();
    let status = bench.policies.upload("p", fs::read(fixture("reply-v2")).unwrap().into()).await.unwrap();
    assert_eq!((status.state, status.last_error), (PolicyState::Serving, None));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_file_put_back_ends_a_trial() {
    let state = tempfile::tempdir().unwrap();
    let bench = trial(state.path(), "canary = { share = 1 }").await;
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("the second is on trial", || bench.status("p").canary.is_some()).await;
    assert_eq!(answers(&bench, 1).await, ["v2"]);
    bench.replace("p", &fs::read(fixture("reply-v1")).unwrap());
    eventually("the trial is over", || bench.status("p").canary.is_none()).await;
    assert_eq!(answers(&bench, 1).await, ["v1"]);
    // A trial that is called off in its favour serves everyone.
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    eventually("it is on trial again", || bench.status("p").canary.is_some()).await;
    describe(bench.dir.path(), "p", "");
    eventually("it serves", || bench.status("p").canary.is_none()).await;
    assert_eq!(answers(&bench, 5).await, vec!["v2"; 5]);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gate_that_cannot_be_loaded_still_refuses() {
    for (manifest, component, status) in [
        ("fallback = 'reject'", &b"garbage"[..], 503),
        ("fallback = 'generate'", b"garbage", 0),
        // Nothing of the component can be read, and its manifest can.
        ("fallback = 'reject'", b"", 503),
        ("fallback = 'generate'", b"", 0),
        // Nobody knows what it was there to keep out.
        ("fallbak = 'reject'", b"garbage", 503),
        ("fallbak = 'reject'", b"", 503),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("p.wasm"), component).unwrap();
        describe(dir.path(), "p", manifest);
        let bench = Bench::over(dir, |_| {}).await;
        let routed = bench.run("p", "hello").await;
        assert_eq!(routed.reason, "policy-unavailable", "{manifest}");
        let refused = matches!(routed.plan, Plan::Reject { status: 503, .. });
        assert_eq!(refused, status == 503, "{manifest}");
        let told = bench.status("p").fallback;
        assert_eq!(told == Fallback::Reject, refused, "{manifest}: {told:?}");
        drop(routed);
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_survives_the_server_and_is_one_policys() {
    let state = tempfile::tempdir().unwrap();
    for (round, want) in ["add 1\nset", "add 2\nset", "add 3\nset"].into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            fs::copy(fixture("scripted"), dir.path().join(format!("{name}.wasm"))).unwrap();
        }
        let bench = Bench::over(dir, |options| options.state = Some(state.path().to_owned())).await;
        assert_eq!(bench.notes("a", "add:n\nset:k=v").await, want, "round {round}");
        assert_eq!(bench.notes("b", "get:k").await, "get None");
        assert!(bench.status("a").store_bytes > 0 && bench.status("b").store_bytes == 0);
        bench.end().await;
    }
}
