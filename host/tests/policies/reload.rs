//! Versions swapped under load: each request is answered by one of them, whole. That memory stays flat is seen on a
//! server of its own, by `tests/clients/test_hot_reload.py`.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use forkpoint::policy::{LoadCode, PolicyState};

use super::{Bench, eventually, fixture, text};

const SWAPS: usize = 100;
const CLIENTS: usize = 8;

/// Asks both policies until it is told to stop, and returns how often the swapped one answered.
async fn client(bench: Arc<Bench>, done: Arc<AtomicBool>) -> u64 {
    let mut versions: HashMap<String, String> = HashMap::new();
    let mut answered = 0;
    while !done.load(Relaxed) {
        let routed = bench.run("swapped", "Which version answers?").await;
        let reply = text(&routed);
        assert!(reply == "v1" || reply == "v2", "{reply}");
        let before = versions.entry(routed.version.clone()).or_insert_with(|| reply.clone());
        assert_eq!(*before, reply, "one version, one answer");
        answered += 1;
        assert_eq!(text(&bench.run("steady", "And this one?").await), "v1");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    assert_eq!(versions.len(), 2, "{versions:?}");
    answered
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_hundred_swaps_under_load_lose_no_request() {
    let bench = Bench::start(&["swapped=reply-v1", "steady=reply-v1"], |_| {}).await;
    let bytes = [fs::read(fixture("reply-v1")).unwrap(), fs::read(fixture("reply-v2")).unwrap()];
    let (bench, done) = (Arc::new(bench), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..CLIENTS).map(|_| tokio::spawn(client(bench.clone(), done.clone()))).collect();
    for swap in 1..=SWAPS {
        let loads = bench.status("swapped").loads;
        bench.replace("swapped", &bytes[swap % 2]);
        eventually("the new version is served", || bench.status("swapped").loads > loads).await;
        if swap % 40 == 0 {
            bench.replace("swapped", b"\0asm garbage");
            eventually("the garbage is refused", || bench.status("swapped").last_error.is_some()).await;
            let status = bench.status("swapped");
            assert_eq!(status.last_error.unwrap().code, LoadCode::Malformed);
            assert_eq!(status.state, PolicyState::Serving, "the last good version");
        }
    }
    done.store(true, Relaxed);
    let mut answered = 0;
    for client in clients {
        answered += client.await.unwrap();
    }
    let status = bench.status("swapped");
    assert_eq!(status.last_error, None);
    assert_eq!(status.loads, 1 + SWAPS as u64);
    assert_eq!(status.calls, answered);
    assert_eq!(status.faults.values().sum::<u64>(), 0);
    assert_eq!(bench.status("steady").loads, 1);
    Arc::into_inner(bench).unwrap().end().await;
}
