//! Signed policies: what is served under which signature, and what a tampered file changes.

use std::fs;
use std::path::Path;

use forkpoint::author::sign::SigningKey;
use forkpoint::policy::{ChangeError, LoadCode, Plan, PolicyOptions, PolicyState, Signers};

use super::{Bench, eventually, fixture, text};

fn new_key() -> SigningKey {
    SigningKey::read(SigningKey::generate().unwrap().as_bytes()).unwrap()
}

fn known(keys: &[(&str, &SigningKey)], required: bool) -> Signers {
    Signers { keys: keys.iter().map(|(name, key)| ((*name).to_owned(), key.public())).collect(), required }
}

/// A fixture and its manifest, signed as the policy `p`.
fn signed(key: &SigningKey, component: &str, manifest: &str) -> (Vec<u8>, String) {
    let component = fs::read(fixture(component)).unwrap();
    let manifest = key.sign("p", &component, manifest).unwrap();
    (component, manifest)
}

fn put(dir: &Path, name: &str, (component, manifest): &(Vec<u8>, String)) {
    fs::write(dir.join(format!("{name}.toml")), manifest).unwrap();
    fs::write(dir.join(format!("{name}.wasm")), component).unwrap();
}

async fn start(name: &str, files: &(Vec<u8>, String), change: impl FnOnce(&mut PolicyOptions)) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    put(dir.path(), name, files);
    Bench::over(dir, change).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_served_under_a_known_signature_and_no_other() {
    let (alice, bob, eve) = (new_key(), new_key(), new_key());
    let manifest = "fallback = 'generate'\n[config]\ndeny-at = 0.8\n";
    let good = signed(&bob, "scripted", manifest);
    let hash = |files: &(Vec<u8>, String)| files.1.split('"').nth(1).unwrap().to_owned();
    let other = signed(&bob, "reply-v1", manifest);
    let tampered = (good.0.clone(), good.1.replace("0.8", "0.9"));
    let swapped = (other.0.clone(), good.1.clone());
    let repinned = (other.0.clone(), good.1.replace(&hash(&good), &hash(&other)));
    let unsigned = (good.0.clone(), manifest.to_owned());
    let forged = signed(&eve, "scripted", manifest);
    let refused = |code| (Err(code), "signed by none of the signers alice, bob");
    for (name, files, required, (code, says)) in [
        ("p", &good, true, (Ok(Some("bob")), "")),
        ("p", &good, false, (Ok(Some("bob")), "")),
        ("p", &unsigned, false, (Ok(None), "")),
        ("p", &unsigned, true, (Err(LoadCode::Signature), "asks for a signature by one of alice, bob")),
        ("p", &tampered, false, refused(LoadCode::Signature)),
        ("p", &repinned, false, refused(LoadCode::Signature)),
        ("p", &forged, false, refused(LoadCode::Signature)),
        ("q", &good, false, refused(LoadCode::Signature)),
        ("p", &swapped, false, (Err(LoadCode::Pin), "the manifest pins sha256")),
    ] {
        let signers = known(&[("alice", &alice), ("bob", &bob)], required);
        let bench = start(name, files, |options| options.signers = signers).await;
        let status = bench.status(name);
        match code {
            Ok(signer) => {
                assert_eq!((status.state, status.signed_by.as_deref()), (PolicyState::Serving, signer));
            }
            Err(code) => {
                let error = status.last_error.unwrap();
                assert_eq!((error.code, status.state), (code, PolicyState::Failed), "{}", error.message);
                assert!(error.message.contains(says), "{}", error.message);
                // What a manifest says that nobody signed does not open the gate.
                let routed = bench.run(name, "reply:served").await;
                assert_eq!(routed.reason, "policy-unavailable");
                let refuses = matches!(routed.plan, Plan::Reject { status: 503, .. });
                assert_eq!(refuses, code == LoadCode::Signature, "{says}");
            }
        }
        bench.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_signers_a_signature_says_nothing() {
    let bench = start("p", &signed(&new_key(), "scripted", ""), |_| {}).await;
    let status = bench.status("p");
    assert_eq!((status.state, status.signed_by), (PolicyState::Serving, None));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_inside_the_component_does_not_do_where_a_signature_must_be() {
    let mut component = fs::read(fixture("scripted")).unwrap();
    let (name, manifest) = (b"forkpoint:manifest", b"description = 'inside'");
    let size = 1 + name.len() + manifest.len();
    component.extend([0, u8::try_from(size).unwrap(), u8::try_from(name.len()).unwrap()]);
    component.extend(name);
    component.extend(manifest);
    let key = new_key();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("p.wasm"), &component).unwrap();
    let bench = Bench::over(dir, |options| options.signers = known(&[("alice", &key)], true)).await;
    let error = bench.status("p").last_error.unwrap();
    assert_eq!(error.code, LoadCode::Signature);
    assert!(error.message.contains("in p.toml beside the component"), "{}", error.message);
    // Signed beside it, it serves.
    put(bench.dir.path(), "p", &(component.clone(), key.sign("p", &component, "").unwrap()));
    eventually("it serves", || bench.status("p").signed_by.as_deref() == Some("alice")).await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_tampered_with_while_it_serves_changes_nothing() {
    let (alice, eve) = (new_key(), new_key());
    let first = signed(&alice, "reply-v1", "description = 'one'\n");
    let bench = start("p", &first, |options| options.signers = known(&[("alice", &alice)], true)).await;
    let serves = async |answer: &str| assert_eq!(text(&bench.run("p", "hello").await), answer);
    let failed = async |code| {
        let is = || bench.status("p").last_error.is_some_and(|error| error.code == code);
        eventually("it is refused", is).await;
    };
    serves("v1").await;
    bench.replace("p", &fs::read(fixture("reply-v2")).unwrap());
    failed(LoadCode::Pin).await;
    serves("v1").await;
    put(bench.dir.path(), "p", &signed(&eve, "reply-v2", "description = 'one'\n"));
    failed(LoadCode::Signature).await;
    fs::remove_file(bench.dir.path().join("p.toml")).unwrap();
    eventually("it is unsigned", || {
        bench.status("p").last_error.is_some_and(|error| error.message.contains("is not signed"))
    })
    .await;
    serves("v1").await;
    let status = bench.status("p");
    assert_eq!((status.signed_by.as_deref(), status.description.as_deref()), (Some("alice"), Some("one")));

    put(bench.dir.path(), "p", &signed(&alice, "reply-v2", "description = 'two'\n"));
    eventually("the next is taken up", || bench.status("p").description.as_deref() == Some("two")).await;
    serves("v2").await;
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_is_signed_too() {
    let (alice, eve) = (new_key(), new_key());
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::over(dir, |options| options.signers = known(&[("alice", &alice)], true)).await;
    let refused = |refused: ChangeError| match refused {
        ChangeError::Refused(error) => error.code,
        other => panic!("{other}"),
    };
    let (component, manifest) = signed(&alice, "reply-v1", "");
    let upload = async |bytes: &[u8]| bench.policies.upload("p", bytes.to_owned().into()).await;
    let describe = async |text: &str| bench.policies.describe("p", text.to_owned().into()).await;
    assert_eq!(refused(upload(&component).await.unwrap_err()), LoadCode::Signature);
    // The manifest comes first, and is judged before its component is there.
    assert_eq!(refused(describe("").await.unwrap_err()), LoadCode::Signature);
    let forged = signed(&eve, "reply-v1", "").1;
    assert_eq!(refused(describe(&forged).await.unwrap_err()), LoadCode::Signature);
    assert!(fs::read_dir(bench.dir.path()).unwrap().next().is_none(), "nothing was written");
    assert!(describe(&manifest).await.unwrap().is_none());
    assert_eq!(refused(upload(&fs::read(fixture("reply-v2")).unwrap()).await.unwrap_err()), LoadCode::Pin);
    assert_eq!(upload(&component).await.unwrap().signed_by.as_deref(), Some("alice"));
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_comes_back_with_the_manifest_that_it_was_signed_with() {
    let alice = new_key();
    let state = tempfile::tempdir().unwrap();
    let options = |options: &mut PolicyOptions| {
        options.state = Some(state.path().to_owned());
        options.signers = known(&[("alice", &alice)], true);
    };
    let bench = start("p", &signed(&alice, "reply-v1", "description = 'one'\n"), options).await;
    put(bench.dir.path(), "p", &signed(&alice, "reply-v2", "description = 'two'\n"));
    eventually("the second serves", || bench.status("p").description.as_deref() == Some("two")).await;
    let status = bench.policies.roll_back("p").await.unwrap();
    assert_eq!((status.signed_by.as_deref(), status.description.as_deref()), (Some("alice"), Some("one")));
    assert_eq!(text(&bench.run("p", "hello").await), "v1");
    // A restart finds the file that was taken back, and serves the same.
    let Bench { dir, engine, policies } = bench;
    policies.stop().await;
    drop(policies);
    engine.stop();
    let bench = Bench::over(dir, options).await;
    let status = bench.status("p");
    assert_eq!((status.signed_by.as_deref(), status.description.as_deref()), (Some("alice"), Some("one")));
    assert_eq!(status.last_error.unwrap().code, LoadCode::Withdrawn);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kept_version_that_nobody_signed_does_not_come_back() {
    let alice = new_key();
    let state = tempfile::tempdir().unwrap();
    let options = |options: &mut PolicyOptions| options.state = Some(state.path().to_owned());
    // Served while no signature was asked for.
    let bench = start("p", &(fs::read(fixture("reply-v1")).unwrap(), String::new()), options).await;
    assert_eq!(text(&bench.run("p", "hello").await), "v1");
    let Bench { dir, engine, policies } = bench;
    policies.stop().await;
    drop(policies);
    engine.stop();
    put(dir.path(), "p", &signed(&alice, "reply-v2", ""));
    let bench = Bench::over(dir, |options| {
        options.state = Some(state.path().to_owned());
        options.signers = known(&[("alice", &alice)], true);
    })
    .await;
    assert_eq!(bench.status("p").signed_by.as_deref(), Some("alice"));
    let refused = bench.policies.roll_back("p").await.unwrap_err();
    assert!(
        matches!(&refused, ChangeError::Refused(error) if error.code == LoadCode::Signature),
        "{refused}"
    );
    assert_eq!(text(&bench.run("p", "hello").await), "v2");
    bench.end().await;
}
