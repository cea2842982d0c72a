//! What the places for policies keep in memory after a burst. Alone in its process: it measures the whole of it.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use forkpoint::policy::{Opening, Policies, PolicyOptions, RouteRequest};
use forkpoint_engine::{EngineError, Message, Role};

const MIB: u64 = 1 << 20;

/// Bytes of this process that no file stands behind.
fn anonymous() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("the kernel says so");
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Calls of a policy that all hold this text at once, while they wait for a session that never opens.
async fn burst(policies: &Arc<Policies>, calls: usize, text: &str) {
    let request = Arc::new(RouteRequest {
        messages: vec![
            Message::new(Role::System, text),
            Message::new(Role::User, "decide:boolean:Is it?\nreply:done"),
        ],
        ..RouteRequest::default()
    });
    let calls = (0..calls).map(|_| async {
        let session = Opening::new(async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            Err(EngineError::Stopped)
        });
        let routed = policies.route(&["scripted".to_owned()], request.clone(), session).await;
        assert_eq!(routed.plan.kind(), "reply", "{:?}", routed.trace.fault());
    });
    futures::future::join_all(calls).await;
}

#[test]
fn a_burst_leaves_little_behind_where_there_are_many_places() {
    // In a process whose allocator gives back what is freed: the requests' texts are no part of the matter.
    const AGAIN: &str = "FORKPOINT_TEST_RESIDENT";
    if std::env::var_os(AGAIN).is_none() {
        let mut again = Command::new(std::env::current_exe().unwrap());
        let status = again.env(AGAIN, "1").env("MALLOC_MMAP_THRESHOLD_", "131072").status().unwrap();
        assert!(status.success(), "{status}");
        return;
    }
    tokio::runtime::Runtime::new().unwrap().block_on(leaves_little_behind());
}

async fn leaves_little_behind() {
    let dir = tempfile::tempdir().unwrap();
    let scripted = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/scripted.wasm");
    std::fs::copy(scripted, dir.path().join("scripted.wasm")).unwrap();
    let mut options = PolicyOptions { concurrency: 1_000, ..PolicyOptions::new(dir.path()) };
    options.defaults = toml::from_str("limits.cpu_ms = 10_000").unwrap();
    let policies = Policies::start(options).await.unwrap();
    // A guest that has read it has dirtied more than any place keeps.
    let text = "word ".repeat(1_200_000);
    burst(&policies, 1, &text).await;
    let before = anonymous();
    burst(&policies, 40, &text).await;
    let kept = anonymous().saturating_sub(before);
    // One place of so many keeps a MiB; one of few 4, 158 MiB for all of these.
    assert!(kept < 96 * MIB, "{} MiB for 40 calls", kept / MIB);
    policies.stop().await;
}
