//! What all versions of a policy share: its store, its counts, and the state of its file.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::fault::FaultKind;
use super::settings::Fallback;
use super::status::LastError;
use super::store::KeyValue;
use super::trace::{PlanRecord, Step};

/// Kinds of plans, for counting.
pub(super) const PLANS: [&str; 5] = ["generate", "forward", "reply", "reject", "next"];

/// What all versions of a policy share.
pub(super) struct Entry {
    pub(super) store: Arc<KeyValue>,
    pub(super) calls: AtomicU64,
    /// Calls under way, each on an instance of its own.
    pub(super) running: AtomicU64,
    pub(super) plans: [AtomicU64; PLANS.len()],
    pub(super) faults: [AtomicU64; FaultKind::ALL.len()],
    /// What a fault leads to, as last read; none until it was.
    fallback: Mutex<Option<Fallback>>,
    /// Held while a file of the policy is being loaded: one at a time.
    pub(super) turn: tokio::sync::Mutex<()>,
    /// Capabilities that were made use of, and how often.
    pub(super) uses: Mutex<BTreeMap<String, u64>>,
    load: Mutex<LoadState>,
}

#[derive(Default)]
pub(super) struct LoadState {
    /// There is a file of that name.
    pub(super) present: bool,
    /// A version is being loaded.
    pub(super) loading: bool,
    /// The operator switched it off.
    pub(super) disabled: bool,
    /// Versions published so far.
    pub(super) published: u64,
    pub(super) last_error: Option<LastError>,
}

impl Entry {
    pub(super) fn new(store: KeyValue) -> Self {
        Self {
            store: Arc::new(store),
            calls: AtomicU64::new(0),
            running: AtomicU64::new(0),
            plans: Default::default(),
            faults: Default::default(),
            fallback: Mutex::default(),
            turn: tokio::sync::Mutex::default(),
            uses: Mutex::default(),
            load: Mutex::default(),
        }
    }

    /// One that nothing is counted in for others, with a store of its own in memory.
    pub(super) fn apart(store_bytes: u64) -> Arc<Self> {
        Arc::new(Self::new(KeyValue::new(store_bytes)))
    }

    /// A call is under way while what this returns lives.
    pub(super) fn running(&self) -> Running<'_> {
        self.running.fetch_add(1, Relaxed);
        Running(&self.running)
    }

    /// Counts a call.
    pub(super) fn count(&self, step: &Step) {
        self.calls.fetch_add(1, Relaxed);
        let kind = step.plan.as_ref().map(PlanRecord::kind);
        if let Some(plan) = kind.and_then(|plan| PLANS.iter().position(|&name| name == plan)) {
            self.plans[plan].fetch_add(1, Relaxed);
        }
        let fault = step.fault.as_ref().map(|fault| fault.kind);
        if let Some(fault) = fault.and_then(|kind| FaultKind::ALL.iter().position(|&one| one == kind)) {
            self.faults[fault].fetch_add(1, Relaxed);
        }
        let mut uses = self.uses.lock().unwrap_or_else(PoisonError::into_inner);
        for used in &step.capabilities {
            *uses.entry(used.clone()).or_default() += 1;
        }
    }

    /// What a call leads to that finds no version.
    pub(super) fn fallback(&self) -> Option<Fallback> {
        *self.fallback.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers the fallback that holds while no version serves.
    pub(super) fn fall_back_to(&self, fallback: Fallback) {
        *self.fallback.lock().unwrap_or_else(PoisonError::into_inner) = Some(fallback);
    }

    pub(super) fn load(&self) -> MutexGuard<'_, LoadState> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call under way.
pub(super) struct Running<'a>(&'a AtomicU64);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
