//! One instance of a policy: from before its call, if it is made ahead, to its end, which no request waits for.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedSemaphorePermit;
use wasmtime::Store;

use super::canary;
use super::contract::Guest;
use super::guest::{Halt, Held, Place, State};
use super::limits::Limits;
use super::plan::RouteRequest;
use super::registry::Published;
use super::runtime::Runtime;
use super::wall::Wall;

/// An instance between two calls, or before its first.
pub(super) struct Instance {
    pub(super) store: Store<State>,
    pub(super) guest: Guest,
    /// Calls behind it.
    pub(super) calls: u32,
    /// Bytes of its memory after the first.
    pub(super) memory: Option<usize>,
}

/// Ends the instance of a call that is over, then frees its place; and makes an instance for the version's next call,
/// where such are made ahead.
pub(super) fn end(
    runtime: &Arc<Runtime>,
    version: &Arc<Published>,
    store: Store<State>,
    place: Option<OwnedSemaphorePermit>,
) {
    let ending = move || {
        drop(store);
        drop(place);
    };
    if !makes_ahead(version) {
        return ending();
    }
    let (of, version) = (runtime.clone(), Arc::downgrade(version));
    runtime.background.spawn(async move {
        ending();
        // A version that was replaced meanwhile needs no more.
        if let Some(version) = version.upgrade() {
            make(&of, &version).await;
        }
    });
}

/// Makes an instance for the version's next call, where such are made ahead, unless there is one.
pub(super) fn begin(runtime: &Arc<Runtime>, version: &Arc<Published>) {
    if makes_ahead(version) && version.ready.as_ref().is_some_and(|ready| ready.expected(version) == 0) {
        let (of, version) = (runtime.clone(), version.clone());
        runtime.background.spawn(async move { make(&of, &version).await });
    }
}

fn makes_ahead(version: &Published) -> bool {
    version.ready.as_ref().is_some_and(|ready| ready.is_on()) && !version.is_late()
}

/// Makes an instance that no call has used, if there is room for it.
pub(super) async fn make(runtime: &Runtime, version: &Arc<Published>) {
    let Some(ready) = &version.ready else { return };
    let Some(room) = ready.room_for(version) else { return };
    match ahead(runtime, version).await {
        Ok(instance) => ready.put_ready(version, instance, room),
        Err(error) => {
            // The call that it would have been for makes its own, and tells what is wrong.
            tracing::debug!(target: "policy", policy = &*version.name, "not made ahead: {error:#}");
            if let Some(Halt::Calls(_) | Halt::Denied(_)) = error.downcast_ref() {
                version.set_late();
            }
        }
    }
}

/// An instance within the policy's bounds. What its start imports is a call's, so that there one fails.
async fn ahead(runtime: &Runtime, version: &Published) -> wasmtime::Result<Instance> {
    let _ticking = runtime.tick();
    let limits = version.settings.limits;
    let wall = Arc::new(Wall::new(limits.wall()));
    let held = Held { store: version.entry.store.clone(), probes: None };
    let session = Place::Offline(canary::session());
    let when = (Instant::now(), wall.clone());
    let request = RouteRequest::default();
    let mut state = State::new(version.name.clone(), version.settings.clone(), held, &request, session, when);
    state.limits = Limits { calls: 0, ..limits };
    let mut store = runtime.store(state);
    store.data().clock.resume();
    let guest = wall.hold(version.pre.instantiate(&mut store)).await;
    store.data().clock.pause();
    let guest = guest.ok_or_else(|| wasmtime::Error::msg("its start takes longer than wall_ms"))??;
    Ok(Instance { store, guest, calls: 0, memory: None })
}
