//! What is served, what is refused, and that a bad file harms nobody.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use forkpoint::guest_tools::{CONTRACT, Wit, componentize};
use forkpoint::policy::{LoadCode, PolicyState};

use super::{Bench, eventually, fixture, root, text};

/// The hostile files under the names that they are served by, and the code that each must fail with.
fn hostile() -> BTreeMap<String, (Vec<u8>, String)> {
    let dir = root().join("tests/hostile");
    let expect = fs::read_to_string(dir.join("expect.toml")).unwrap();
    let expect: BTreeMap<String, String> = toml::from_str(&expect).unwrap();
    expect
        .into_iter()
        .map(|(file, code)| {
            let bytes = fs::read(dir.join(&file)).unwrap();
            let bytes = match file.as_str() {
                core if core.ends_with(".core.wat") => componentize(&bytes, false, Wit::Text(CONTRACT))
                    .unwrap_or_else(|error| panic!("{file}: {error}")),
                wat if wat.ends_with(".wat") => wat::parse_bytes(&bytes).unwrap().into_owned(),
                _ => bytes,
            };
            let name = file.split('.').next().unwrap_or_default().to_owned();
            (name, (bytes, code))
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hostile_file_has_its_code_and_harms_no_other() {
    let hostile = hostile();
    assert!(hostile.len() >= 20, "{:?}", hostile.keys());
    let dir = tempfile::tempdir().unwrap();
    for (name, (bytes, _)) in &hostile {
        fs::write(dir.path().join(format!("{name}.wasm")), bytes).unwrap();
    }
    fs::copy(fixture("scripted"), dir.path().join("good.wasm")).unwrap();
    let bench = Bench::over(dir, |_| {}).await;

    for (name, (_, code)) in &hostile {
        let status = bench.status(name);
        let error = status.last_error.unwrap_or_else(|| panic!("{name} is served"));
        assert_eq!(error.code.code(), code, "{name}: {}", error.message);
        assert_eq!((status.state, bench.policies.has(name)), (PolicyState::Failed, false), "{name}");
        assert!(error.message.len() < 700 && !error.message.contains('\0'), "{name}: {}", error.message);
    }
    let says = |name: &str, word: &str| {
        let message = bench.status(name).last_error.unwrap().message;
        assert!(message.contains(word), "{name}: {message}");
    };
    says("core-module", "forkpoint policy componentize");
    says("newer-contract", "the versions of the contract served here are 0.2.0-trial and 0.1.0");
    says("two-contracts", "a policy is built against one version");
    says("wrong-signature", "imports no interface of forkpoint:policy");
    says("wrong-world", "route");
    says("reads-files", "wasi:");
    says("loop", "cpu_ms");
    says("grow", "memory_mb");
    says("recurse", "stack");

    let good = bench.status("good");
    assert_eq!((good.state, good.last_error), (PolicyState::Serving, None));
    assert_eq!(good.hash.as_ref().unwrap().len(), 64);
    assert_eq!(good.contract.as_deref(), Some("0.1.0"));
    {
        let routed = bench.run("good", "reply:still here").await;
        assert_eq!(text(&routed), "still here");
        assert_eq!(Some(routed.version.as_str()), good.version.as_deref());

        // A request to a policy that never loaded is told why.
        let routed = bench.run("loop", "hello").await;
        assert_eq!((routed.plan.kind(), routed.reason.as_str()), ("generate", "policy-unavailable"));
        assert!(routed.trace.fault().unwrap().message.contains("canary"), "{:?}", routed.trace.fault());
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_too_large_are_not_read() {
    let bench = Bench::start(&["scripted"], |options| options.max_file = 1000).await;
    assert_eq!(bench.status("scripted").last_error.unwrap().code, LoadCode::TooLarge);
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_is_served_soon_after_it_is_dropped_and_gone_soon_after_it_is_removed() {
    let bench = Bench::start(&[], |_| {}).await;
    assert!(bench.policies.list().is_empty());
    fs::copy(fixture("reply-v1"), bench.path("fresh")).unwrap();
    let took = eventually("it is served", || bench.policies.has("fresh")).await;
    assert!(took < Duration::from_secs(5), "{took:?}");
    eprintln!("served {took:?} after the copy");
    assert_eq!(text(&bench.run("fresh", "hello").await), "v1");

    fs::remove_file(bench.path("fresh")).unwrap();
    eventually("it is gone", || bench.policies.get("fresh").is_none()).await;
    assert!(!bench.policies.has("fresh"));
    let routed = bench.run("fresh", "hello").await;
    assert_eq!(routed.reason, "policy-unavailable");
    assert!(routed.trace.fault().unwrap().message.contains("there is no fresh.wasm"));
    drop(routed);

    fs::copy(fixture("reply-v2"), bench.path("fresh")).unwrap();
    eventually("it is back", || bench.policies.has("fresh")).await;
    assert_eq!(text(&bench.run("fresh", "hello").await), "v2");
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_that_comes_late_is_followed() {
    let parent = tempfile::tempdir().unwrap();
    let plugins = parent.path().join("plugins");
    let bench = Bench::over(parent, |options| options.dir = plugins.clone()).await;
    fs::create_dir(&plugins).unwrap();
    fs::copy(fixture("reply-v1"), plugins.join("late.wasm")).unwrap();
    eventually("it is served", || bench.policies.has("late")).await;
    // Files are often links into a folder that is swapped as a whole.
    #[cfg(unix)]
    {
        let (old, new) = (bench.dir.path().join("old"), bench.dir.path().join("new"));
        for (dir, file) in [(&old, "reply-v1"), (&new, "reply-v2")] {
            fs::create_dir(dir).unwrap();
            fs::copy(fixture(file), dir.join("linked.wasm")).unwrap();
        }
        let data = plugins.join("..data");
        std::os::unix::fs::symlink(&old, &data).unwrap();
        std::os::unix::fs::symlink("..data/linked.wasm", plugins.join("linked.wasm")).unwrap();
        eventually("the link is followed", || bench.policies.has("linked")).await;
        assert_eq!(text(&bench.run("linked", "hello").await), "v1");
        let next = plugins.join("..next");
        std::os::unix::fs::symlink(&new, &next).unwrap();
        fs::rename(next, data).unwrap();
        let before = bench.status("linked").version;
        eventually("the new one is served", || bench.status("linked").version != before).await;
        assert_eq!(text(&bench.run("linked", "hello").await), "v2");
    }
    bench.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compiled_code_is_kept_and_damage_is_noticed() {
    let cache = tempfile::tempdir().unwrap();
    let keep = |options: &mut forkpoint::policy::PolicyOptions| options.cache = Some(cache.path().join("c"));
    let entries = || -> Vec<_> {
        fs::read_dir(cache.path().join("c")).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    Bench::start(&["reply-v1"], keep).await.end().await;
    let [entry] = entries().try_into().unwrap();
    let written = fs::metadata(&entry).unwrap().modified().unwrap();

    let bench = Bench::start(&["reply-v1"], keep).await;
    assert_eq!(text(&bench.run("reply-v1", "hello").await), "v1");
    bench.end().await;
    assert_eq!(fs::metadata(&entry).unwrap().modified().unwrap(), written, "used, not written again");

    let mut code = fs::read(&entry).unwrap();
    let middle = code.len() / 2;
    code[middle] ^= 0xff;
    fs::write(&entry, code).unwrap();
    let bench = Bench::start(&["reply-v1"], keep).await;
    assert_eq!(text(&bench.run("reply-v1", "hello").await), "v1");
    bench.end().await;
    assert_ne!(fs::metadata(&entry).unwrap().modified().unwrap(), written, "compiled anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bundled_policies_are_served_and_answer() {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(root().join("plugins")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "wasm" || extension == "toml") {
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let bench = Bench::over(dir, |options| {
        options.upstreams = ["strong", "fast", "flagship", "canary"].map(str::to_owned).into()
    })
    .await;
    let policies = bench.policies.list();
    assert!(policies.iter().any(|policy| policy.name == "auto"), "{policies:?}");
    for policy in policies {
        assert_eq!((policy.state, &policy.last_error), (PolicyState::Serving, &None), "{}", policy.name);
        for ask in ["Thanks!", "Delete every file under /var/lib.", "What does a fox eat?"] {
            let routed = bench.run(&policy.name, ask).await;
            assert_eq!(routed.trace.fault(), None, "{}: {ask}", policy.name);
        }
    }
    bench.end().await;
}
