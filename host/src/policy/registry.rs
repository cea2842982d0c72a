//! Which policies are served, in which version, and what can be said about each.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use serde::Serialize;

use super::bindings::PolicyPre;
use super::fault::FaultKind;
use super::guest::State;
use super::loader::{LoadCode, LoadError};
use super::settings::{Fallback, Limits, PolicySettings};
use super::store::KeyValue;
use super::trace::Step;
use crate::probe::ProbeStatus;
use crate::probe::shelf::Probes;

/// Digits of a hash that stand for a version.
const VERSION_DIGITS: usize = 12;

/// Kinds of plans, for counting.
const PLANS: [&str; 5] = ["generate", "forward", "reply", "reject", "next"];

/// One version of a policy and its probes, ready to be called. In-flight requests keep theirs when the next is published.
#[derive(Clone)]
pub(super) struct Published {
    pub(super) name: Arc<str>,
    /// SHA-256 of the component, in hexadecimal digits.
    pub(super) hash: String,
    pub(super) contract: String,
    pub(super) bytes: u64,
    pub(super) loaded_at: u64,
    pub(super) pre: PolicyPre<State>,
    /// What its questions may be answered by; none where probes are switched off.
    pub(super) probes: Option<Arc<Probes>>,
    pub(super) entry: Arc<Entry>,
}

impl Published {
    /// The first digits of the hash.
    pub(super) fn version(&self) -> &str {
        &self.hash[..VERSION_DIGITS]
    }
}

/// What all versions of a policy share.
pub(super) struct Entry {
    pub(super) settings: Arc<PolicySettings>,
    pub(super) store: Arc<KeyValue>,
    calls: AtomicU64,
    plans: [AtomicU64; PLANS.len()],
    faults: [AtomicU64; FaultKind::ALL.len()],
    load: Mutex<LoadState>,
}

#[derive(Default)]
struct LoadState {
    /// There is a file of that name.
    present: bool,
    /// A version is being loaded.
    loading: bool,
    /// Versions published so far.
    published: u64,
    last_error: Option<LastError>,
}

impl Entry {
    fn new(settings: &PolicySettings) -> Self {
        Self {
            settings: Arc::new(settings.clone()),
            store: Arc::new(KeyValue::new(settings.limits.store_bytes)),
            calls: AtomicU64::new(0),
            plans: Default::default(),
            faults: Default::default(),
            load: Mutex::default(),
        }
    }

    /// Counts a call.
    pub(super) fn count(&self, step: &Step) {
        self.calls.fetch_add(1, Relaxed);
        if let Some(plan) = step.plan.and_then(|plan| PLANS.iter().position(|&name| name == plan)) {
            self.plans[plan].fetch_add(1, Relaxed);
        }
        let fault = step.fault.as_ref().map(|fault| fault.kind);
        if let Some(fault) = fault.and_then(|kind| FaultKind::ALL.iter().position(|&one| one == kind)) {
            self.faults[fault].fetch_add(1, Relaxed);
        }
    }

    fn load(&self) -> MutexGuard<'_, LoadState> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a policy is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PolicyState {
    /// Some version is. The last error, if there is one, is of a newer file.
    Serving,
    /// None is: the file could not be loaded.
    Failed,
    /// None is yet: the file is being loaded.
    Compiling,
}

/// Why the last file of a policy was not loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LastError {
    /// The kind, for programs.
    pub code: LoadCode,
    /// One sentence for people.
    pub message: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// A policy as operators see it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyStatus {
    /// Its name: the file's, without `.wasm`.
    pub name: String,
    /// Whether it is served.
    pub state: PolicyState,
    /// SHA-256 of the component that is served.
    pub hash: Option<String>,
    /// The first 12 digits of the hash.
    pub version: Option<String>,
    /// The version of the contract (the WIT package) that the component was built against.
    pub contract: Option<String>,
    /// Bytes of the component.
    pub bytes: Option<u64>,
    /// When it was published, in seconds since 1970.
    pub loaded_at: Option<u64>,
    /// Versions published since the server's start.
    pub loads: u64,
    /// Why a later file is not served; none when the last file is.
    pub last_error: Option<LastError>,
    /// Calls since the server's start, over all versions.
    pub calls: u64,
    /// Of those, plans by their kind.
    pub plans: BTreeMap<&'static str, u64>,
    /// Of those, faults by their kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Bounds of a call.
    pub limits: Limits,
    /// What a fault leads to.
    pub fallback: Fallback,
    /// What its questions may be answered by, by name.
    pub probes: BTreeMap<String, ProbeStatus>,
}

/// The policies by name. Readers take a snapshot and no lock.
#[derive(Default)]
pub(super) struct Registry {
    published: ArcSwap<HashMap<String, Arc<Published>>>,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
}

impl Registry {
    /// The version to call now.
    pub(super) fn current(&self, name: &str) -> Option<Arc<Published>> {
        self.published.load().get(name).cloned()
    }

    /// What is known of a policy, once a file of its name has been seen.
    pub(super) fn entry(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries().get(name).cloned()
    }

    /// A file is being loaded.
    pub(super) fn begin(&self, name: &str, settings: &PolicySettings) -> Arc<Entry> {
        let mut entries = self.entries();
        let entry = entries.entry(name.to_owned()).or_insert_with(|| Arc::new(Entry::new(settings))).clone();
        drop(entries);
        let mut load = entry.load();
        (load.present, load.loading) = (true, true);
        drop(load);
        entry
    }

    /// The file is the one that is served already; its probes may be new.
    pub(super) fn keep(&self, name: &str, entry: &Entry, probes: Option<Arc<Probes>>) {
        self.published.rcu(|now| {
            let mut next = HashMap::clone(now);
            if let Some(version) = next.get_mut(name) {
                *version = Arc::new(Published { probes: probes.clone(), ..Published::clone(version) });
            }
            next
        });
        let mut load = entry.load();
        (load.loading, load.last_error) = (false, None);
    }

    /// Serves this version from now on.
    pub(super) fn publish(&self, version: Published) {
        let version = Arc::new(version);
        self.published.rcu(|now| {
            let mut next = HashMap::clone(now);
            next.insert(version.name.to_string(), version.clone());
            next
        });
        let mut load = version.entry.load();
        load.published += 1;
        (load.loading, load.last_error) = (false, None);
    }

    /// The file could not be loaded: what was served is served on.
    pub(super) fn fail(&self, entry: &Entry, error: &LoadError) {
        let mut load = entry.load();
        load.loading = false;
        load.last_error = Some(LastError { code: error.code, message: error.message.clone(), at: now() });
    }

    /// The file is gone. Returns whether a version was served.
    pub(super) fn remove(&self, name: &str) -> bool {
        let before = self.published.rcu(|now| {
            let mut next = HashMap::clone(now);
            next.remove(name);
            next
        });
        if let Some(entry) = self.entry(name) {
            let mut load = entry.load();
            (load.present, load.loading, load.last_error) = (false, false, None);
        }
        before.contains_key(name)
    }

    /// Every policy that has a file, by name.
    pub(super) fn list(&self) -> Vec<PolicyStatus> {
        let entries = self.entries().clone();
        entries.iter().filter_map(|(name, entry)| self.status(name, entry)).collect()
    }

    /// One policy, if it has a file.
    pub(super) fn get(&self, name: &str) -> Option<PolicyStatus> {
        let entry = self.entry(name)?;
        self.status(name, &entry)
    }

    fn status(&self, name: &str, entry: &Entry) -> Option<PolicyStatus> {
        let current = self.current(name);
        let current = current.as_ref();
        let load = entry.load();
        if !load.present {
            return None;
        }
        let state = match (current, load.loading) {
            (Some(_), _) => PolicyState::Serving,
            (None, true) => PolicyState::Compiling,
            (None, false) => PolicyState::Failed,
        };
        let read = |count: &AtomicU64| count.load(Relaxed);
        Some(PolicyStatus {
            name: name.to_owned(),
            state,
            hash: current.map(|version| version.hash.clone()),
            version: current.map(|version| version.version().to_owned()),
            contract: current.map(|version| version.contract.clone()),
            bytes: current.map(|version| version.bytes),
            loaded_at: current.map(|version| version.loaded_at),
            loads: load.published,
            last_error: load.last_error.clone(),
            calls: read(&entry.calls),
            plans: PLANS.iter().zip(&entry.plans).map(|(&name, count)| (name, read(count))).collect(),
            faults: FaultKind::ALL
                .iter()
                .zip(&entry.faults)
                .map(|(kind, n)| (kind.code(), read(n)))
                .collect(),
            limits: entry.settings.limits,
            fallback: entry.settings.fallback,
            probes: current
                .and_then(|version| version.probes.as_ref())
                .into_iter()
                .flat_map(|probes| probes.iter())
                .map(|(name, probe)| (name.clone(), probe.status()))
                .collect(),
        })
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Entry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_that_never_loaded_is_failed_and_one_without_a_file_is_not_there() {
        let (registry, settings) = (Registry::default(), PolicySettings::default());
        let entry = registry.begin("auto", &settings);
        assert_eq!(registry.get("auto").unwrap().state, PolicyState::Compiling);
        registry.fail(&entry, &LoadError::new(LoadCode::Empty, "the file has no bytes"));
        let status = registry.get("auto").unwrap();
        assert_eq!(status.state, PolicyState::Failed);
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(json["state"], "failed");
        assert_eq!(json["last_error"]["code"], "empty");
        assert_eq!(json["faults"]["invalid-plan"], 0);
        assert!(!registry.remove("auto"));
        assert_eq!(registry.get("auto"), None);
        assert!(registry.list().is_empty());
    }
}
