//! Instances that are kept from one call to the next, for policies that say of themselves that they are stateless.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long an instance waits for a call before it may go: what is in its memory goes with it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Instances `I` of versions `V`, those used last at the end. One that served a tenant serves no other, and none
/// outlives its version.
pub(super) struct Warm<V, I> {
    most: usize,
    /// One permit an instance, given back once it has ended: the pool has no room for more.
    places: Arc<Semaphore>,
    idle: Mutex<VecDeque<Idle<V, I>>>,
}

struct Idle<V, I> {
    of: Weak<V>,
    tenant: String,
    since: Instant,
    // Ends before its place is free.
    instance: I,
    place: OwnedSemaphorePermit,
}

impl<V, I> Warm<V, I> {
    /// Keeps at most so many.
    pub(super) fn new(most: u32) -> Self {
        let places = Arc::new(Semaphore::new(most as usize));
        Self { most: most as usize, places, idle: Mutex::default() }
    }

    /// Whether any is ever kept.
    pub(super) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// The one that served this tenant last, if there is one.
    pub(super) fn take(&self, version: &Arc<V>, tenant: &str) -> Option<I> {
        let mut idle = self.idle();
        let index = idle.iter().rposition(|idle| idle.tenant == tenant && idle.is_of(version))?;
        idle.remove(index).map(|idle| idle.instance)
    }

    /// Keeps an instance; where there are too many, the one that waited longest goes.
    pub(super) fn put(&self, version: &Arc<V>, tenant: &str, instance: I) {
        drop(self.take_gone());
        let place = self.places.clone().try_acquire_owned().ok().or_else(|| self.end_oldest());
        // Where others are just ending, this one does too.
        let Some(place) = place else { return };
        let (of, tenant) = (Arc::downgrade(version), tenant.to_owned());
        self.idle().push_back(Idle { of, tenant, since: Instant::now(), instance, place });
    }

    /// Ends the instance that waited longest, and gives its place to another.
    fn end_oldest(&self) -> Option<OwnedSemaphorePermit> {
        // An instance takes its time to end: not while others wait for the lock.
        let oldest = self.idle().pop_front()?;
        drop(oldest.instance);
        Some(oldest.place)
    }

    /// How many are kept of a version.
    pub(super) fn count(&self, version: &Arc<V>) -> usize {
        self.idle().iter().filter(|idle| idle.is_of(version)).count()
    }

    /// Those whose version is gone, and those that waited too long.
    fn take_gone(&self) -> Vec<Idle<V, I>> {
        let mut idle = self.idle();
        let stays = |idle: &Idle<V, I>| idle.of.strong_count() > 0 && idle.since.elapsed() < PATIENCE;
        let (kept, gone) = std::mem::take(&mut *idle).into_iter().partition(stays);
        *idle = kept;
        Vec::from(gone)
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle<V, I>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A version's own part in the instances that are kept; as a field of the version it ends with it, and they do too.
pub(super) struct WarmPart<V, I>(Arc<Warm<V, I>>);

impl<V, I> WarmPart<V, I> {
    pub(super) fn new(warm: &Arc<Warm<V, I>>) -> Self {
        Self(warm.clone())
    }
}

impl<V, I> Clone for WarmPart<V, I> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V, I> Deref for WarmPart<V, I> {
    type Target = Warm<V, I>;

    fn deref(&self) -> &Warm<V, I> {
        &self.0
    }
}

impl<V, I> Drop for WarmPart<V, I> {
    fn drop(&mut self) {
        drop(self.0.take_gone());
    }
}

impl<V, I> Idle<V, I> {
    fn is_of(&self, version: &Arc<V>) -> bool {
        std::ptr::eq(self.of.as_ptr(), Arc::as_ptr(version))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_serves_its_version_and_tenant_alone() {
        let warm = Warm::new(3);
        let (old, new) = (Arc::new("old"), Arc::new("new"));
        warm.put(&old, "a", 1);
        warm.put(&old, "a", 2);
        assert_eq!(warm.take(&new, "a"), None);
        assert_eq!(warm.take(&old, "b"), None);
        assert_eq!((warm.take(&old, "a"), warm.count(&old)), (Some(2), 1));
        assert_eq!((warm.take(&old, "a"), warm.take(&old, "a")), (Some(1), None));
    }

    #[test]
    fn the_one_that_waited_longest_makes_room() {
        let warm = Warm::new(2);
        let version = Arc::new(());
        for instance in 1..=3 {
            warm.put(&version, "a", instance);
        }
        assert_eq!(warm.count(&version), 2);
        assert_eq!((warm.take(&version, "a"), warm.take(&version, "a")), (Some(3), Some(2)));
        let off = Warm::new(0);
        off.put(&version, "a", 1);
        assert_eq!((off.is_on(), off.take(&version, "a")), (false, None));
    }

    #[test]
    fn an_instance_goes_with_its_version() {
        struct Version {
            kept: WarmPart<Version, Arc<()>>,
        }
        let warm = Arc::new(Warm::new(2));
        let version = || Arc::new(Version { kept: WarmPart::new(&warm) });
        let (old, new) = (version(), version());
        let instance = Arc::new(());
        old.kept.put(&old, "a", instance.clone());
        new.kept.put(&new, "a", Arc::default());
        assert_eq!(Arc::strong_count(&instance), 2);
        drop(old);
        assert_eq!((Arc::strong_count(&instance), warm.count(&new)), (1, 1));
    }
}
