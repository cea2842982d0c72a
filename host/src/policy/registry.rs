//! Which policies are served, in which version, and what can be said about each.

use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;

use super::contract::Pre;
use super::entry::{Entry, PLANS};
use super::fault::FaultKind;
use super::instance::Instance;
use super::loader::LoadError;
use super::manifest::Canary;
use super::settings::PolicySettings;
use super::share::Share;
use super::status::{CanaryStatus, CapabilityStatus, LastError, PolicyState, PolicyStatus};
use super::store::KeyValue;
use super::waiting::WaitingPart;
use crate::probe::shelf::Probes;

/// Digits of a hash that stand for a version.
pub(super) const VERSION_DIGITS: usize = 12;

/// One version of a policy and its probes, ready to be called. In-flight requests keep theirs when the next is published.
#[derive(Clone)]
pub(super) struct Published {
    pub(super) name: Arc<str>,
    /// SHA-256 of the component, in hexadecimal digits.
    pub(super) hash: String,
    pub(super) contract: String,
    pub(super) bytes: u64,
    pub(super) loaded_at: u64,
    pub(super) pre: Pre,
    /// What its manifest and the operator say.
    pub(super) settings: Arc<PolicySettings>,
    /// What its questions may be answered by; none where probes are switched off.
    pub(super) probes: Option<Arc<Probes>>,
    pub(super) entry: Arc<Entry>,
    pub(super) warm: WaitingPart<Self, Instance>,
    /// Instances made ahead; none where calls are to make their own.
    pub(super) ready: Option<WaitingPart<Self, Instance>>,
    /// Its start calls an import, so that an instance cannot be made before there is a call for it.
    pub(super) late: Arc<AtomicBool>,
}

impl Published {
    /// The first digits of the hash.
    pub(super) fn version(&self) -> &str {
        &self.hash[..VERSION_DIGITS]
    }

    /// Whether it is known that its instances cannot be made ahead.
    pub(super) fn is_late(&self) -> bool {
        self.late.load(Relaxed)
    }

    pub(super) fn set_late(&self) {
        self.late.store(true, Relaxed);
    }
}

/// A new version on its trial.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) version: Arc<Published>,
    pub(super) canary: Canary,
    trial: Arc<Trial>,
}

#[derive(Default)]
struct Trial {
    calls: AtomicU64,
    faults: AtomicU64,
}

/// What a trial has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Promote,
    RollBack,
}

impl Candidate {
    /// Counts a call, and says what follows from all of them.
    pub(super) fn count(&self, failed: bool) -> Option<Verdict> {
        let faults = self.trial.faults.fetch_add(u64::from(failed), Relaxed) + u64::from(failed);
        let calls = self.trial.calls.fetch_add(1, Relaxed) + 1;
        let promoted = self.canary.promote_after.is_some_and(|after| calls >= after);
        let judged = calls >= Canary::ENOUGH || promoted;
        let too_many = |share: Share| judged && faults as f64 > share.get() * calls as f64;
        if self.canary.rollback_at.is_some_and(too_many) {
            return Some(Verdict::RollBack);
        }
        promoted.then_some(Verdict::Promote)
    }

    /// Whether this is the same trial.
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.trial, &other.trial)
    }
}

/// The versions of one policy that serve.
#[derive(Clone)]
struct Slot {
    current: Arc<Published>,
    candidate: Option<Candidate>,
}

/// The policies by name. Readers take a snapshot and no lock.
#[derive(Default)]
pub(super) struct Registry {
    slots: ArcSwap<HashMap<String, Slot>>,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
}

impl Registry {
    /// The version that has proven itself.
    pub(super) fn current(&self, name: &str) -> Option<Arc<Published>> {
        self.slots.load().get(name).map(|slot| slot.current.clone())
    }

    /// A new version that is on its trial.
    pub(super) fn candidate(&self, name: &str) -> Option<Candidate> {
        self.slots.load().get(name)?.candidate.clone()
    }

    /// All versions that serve: the proven one, and one on its trial.
    pub(super) fn versions(&self, name: &str) -> Vec<Arc<Published>> {
        let candidate = self.candidate(name).map(|candidate| candidate.version);
        self.current(name).into_iter().chain(candidate).collect()
    }

    /// The version to call for the session of this hash, and the trial that it stands for.
    pub(super) fn pick(&self, name: &str, session: u64) -> Option<(Arc<Published>, Option<Candidate>)> {
        let slots = self.slots.load();
        let slot = slots.get(name)?;
        // Not the same sessions for every policy.
        let mut hash = std::hash::DefaultHasher::new();
        (session, name).hash(&mut hash);
        let tried = slot.candidate.as_ref().filter(|candidate| candidate.canary.share.holds(hash.finish()));
        Some(match tried {
            Some(candidate) => (candidate.version.clone(), Some(candidate.clone())),
            None => (slot.current.clone(), None),
        })
    }

    /// The policy whose manifest binds a model name, the first by its own name.
    pub(super) fn routed(&self, model: &str) -> Option<String> {
        let slots = self.slots.load();
        let binds = slots.iter().filter(|(_, slot)| slot.current.settings.routes.contains(model));
        binds.map(|(name, _)| name.clone()).min()
    }

    /// What is known of a policy, once a file of its name has been seen.
    pub(super) fn entry(&self, name: &str) -> Option<Arc<Entry>> {
        self.entries().get(name).cloned()
    }

    /// A file is being loaded. `store` opens the policy's state at the first time.
    pub(super) fn begin(&self, name: &str, store: impl FnOnce() -> KeyValue) -> Arc<Entry> {
        let mut entries = self.entries();
        let entry = entries.entry(name.to_owned()).or_insert_with(|| Arc::new(Entry::new(store()))).clone();
        drop(entries);
        let mut load = entry.load();
        (load.present, load.loading, load.disabled) = (true, true, false);
        drop(load);
        entry
    }

    /// The file is the version that serves already; its probes and settings may be new. No other is on trial then.
    pub(super) fn keep(&self, entry: &Entry, version: &Published) {
        self.change(&version.name, |slot| {
            *slot = Slot { current: Arc::new(version.clone()), candidate: None };
        });
        self.loaded(entry, version);
    }

    /// The file is the version that is on trial already; its probes, settings and rule may be new.
    pub(super) fn keep_trying(&self, entry: &Entry, version: &Published, canary: Canary) {
        self.change(&version.name, |slot| {
            if let Some(candidate) = &mut slot.candidate {
                *candidate = Candidate { version: Arc::new(version.clone()), canary, ..candidate.clone() };
            }
        });
        self.loaded(entry, version);
    }

    /// What serves has other settings; its file is not the one that is there.
    pub(super) fn refresh(&self, name: &str, settings: &Arc<PolicySettings>) {
        self.change(name, |slot| {
            let settings = settings.clone();
            slot.current = Arc::new(Published { settings, ..Published::clone(&slot.current) });
        });
    }

    fn loaded(&self, entry: &Entry, version: &Published) {
        entry.store.limit_to(version.settings.limits.store_bytes);
        let mut load = entry.load();
        (load.loading, load.last_error) = (false, None);
    }

    /// Serves this version from now on, to every session.
    pub(super) fn publish(&self, version: Published) {
        let version = Arc::new(version);
        version.entry.store.limit_to(version.settings.limits.store_bytes);
        self.slots.rcu(|now| {
            let mut next = HashMap::clone(now);
            next.insert(version.name.to_string(), Slot { current: version.clone(), candidate: None });
            next
        });
        let mut load = version.entry.load();
        load.published += 1;
        (load.loading, load.last_error) = (false, None);
    }

    /// Serves this version to a share of the sessions, beside the one that has proven itself.
    pub(super) fn try_out(&self, version: Published, canary: Canary) {
        let version = Arc::new(version);
        let candidate = Candidate { version: version.clone(), canary, trial: Arc::default() };
        self.change(&version.name, |slot| slot.candidate = Some(candidate.clone()));
        let mut load = version.entry.load();
        load.published += 1;
        (load.loading, load.last_error) = (false, None);
    }

    /// Ends this trial, or any where none is named: every session gets the new version. Returns it, unless there is no
    /// such trial any more.
    pub(super) fn promote(&self, name: &str, trial: Option<&Candidate>) -> Option<Arc<Published>> {
        let taken = self.end_trial(name, trial, |slot, candidate| slot.current = candidate.version)?;
        taken.entry.store.limit_to(taken.settings.limits.store_bytes);
        Some(taken)
    }

    /// Ends this trial, or any where none is named: no session gets the new version. Returns it, unless there is no
    /// such trial any more.
    pub(super) fn withdraw(&self, name: &str, trial: Option<&Candidate>) -> Option<Arc<Published>> {
        self.end_trial(name, trial, |_, _| {})
    }

    fn end_trial(
        &self,
        name: &str,
        trial: Option<&Candidate>,
        end: impl Fn(&mut Slot, Candidate),
    ) -> Option<Arc<Published>> {
        let meant = |candidate: &Candidate| trial.is_none_or(|trial| candidate.is(trial));
        let before = self.slots.rcu(|now| {
            let mut next = HashMap::clone(now);
            if let Some(slot) = next.get_mut(name)
                && let Some(candidate) = slot.candidate.take_if(|candidate| meant(candidate))
            {
                end(slot, candidate);
            }
            next
        });
        let ended = before.get(name)?.candidate.clone().filter(meant)?;
        Some(ended.version)
    }

    fn change(&self, name: &str, change: impl Fn(&mut Slot)) {
        self.slots.rcu(|now| {
            let mut next = HashMap::clone(now);
            if let Some(slot) = next.get_mut(name) {
                change(slot);
            }
            next
        });
    }

    /// No version is served until the policy is enabled again.
    pub(super) fn disable(&self, name: &str, entry: &Entry) {
        self.slots.rcu(|now| {
            let mut next = HashMap::clone(now);
            next.remove(name);
            next
        });
        let mut load = entry.load();
        (load.loading, load.disabled, load.last_error) = (false, true, None);
    }

    /// The file could not be loaded: what was served is served on.
    pub(super) fn fail(&self, entry: &Entry, error: &LoadError) {
        let mut load = entry.load();
        load.loading = false;
        load.last_error = Some(LastError { code: error.code, message: error.message.clone(), at: now() });
    }

    /// The file is gone. Returns whether a version was served.
    pub(super) fn remove(&self, name: &str) -> bool {
        let before = self.slots.rcu(|now| {
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
        let slot = self.slots.load().get(name).cloned();
        let current = slot.as_ref().map(|slot| &slot.current);
        let candidate = slot.as_ref().and_then(|slot| slot.candidate.as_ref());
        let settings = current.map(|version| PolicySettings::clone(&version.settings)).unwrap_or_default();
        let versions = || current.into_iter().chain(candidate.map(|candidate| &candidate.version));
        let load = entry.load();
        if !load.present {
            return None;
        }
        let state = match (current, load.loading) {
            (Some(_), _) => PolicyState::Serving,
            (None, _) if load.disabled => PolicyState::Disabled,
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
            running: read(&entry.running),
            warm: versions().map(|version| version.warm.count(version) as u64).sum(),
            ready: versions().filter_map(|version| Some(version.ready.as_ref()?.count(version) as u64)).sum(),
            plans: PLANS.iter().zip(&entry.plans).map(|(&name, count)| (name, read(count))).collect(),
            faults: FaultKind::ALL
                .iter()
                .zip(&entry.faults)
                .map(|(kind, n)| (kind.code(), read(n)))
                .collect(),
            store_bytes: entry.store.bytes(),
            signed_by: settings.signed_by,
            description: settings.description,
            capabilities: CapabilityStatus {
                asked: settings.asked,
                granted: settings.granted,
                used: entry.uses.lock().unwrap_or_else(PoisonError::into_inner).clone(),
                refused: settings.refused,
            },
            routes: settings.routes.into_iter().collect(),
            shadow: settings.shadow,
            canary: candidate.map(|candidate| CanaryStatus {
                hash: candidate.version.hash.clone(),
                version: candidate.version.version().to_owned(),
                signed_by: candidate.version.settings.signed_by.clone(),
                rule: candidate.canary,
                calls: read(&candidate.trial.calls),
                faults: read(&candidate.trial.faults),
            }),
            limits: settings.limits,
            fallback: settings.fallback,
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
    use super::super::loader::LoadCode;
    use super::*;

    #[test]
    fn a_policy_that_never_loaded_is_failed_and_one_without_a_file_is_not_there() {
        let registry = Registry::default();
        let entry = registry.begin("auto", || KeyValue::new(0));
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
