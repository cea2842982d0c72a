//! Instances that wait for a call: warm ones, of policies that say of themselves that they are stateless, which have
//! answered calls before, and ready ones, which were made ahead of their only call.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a warm instance waits for a call before it may go: what is in its memory goes with it.
pub(super) const WARM_FOR: Duration = Duration::from_secs(60);

/// Instances `I` of versions `V`, those that came last at the end. One that served a tenant serves no other, and none
/// outlives its version.
pub(super) struct Waiting<V, I> {
    most: usize,
    patience: Option<Duration>,
    /// One permit an instance, given back once it has ended: the pool has room for no more.
    rooms: Arc<Semaphore>,
    idle: Mutex<VecDeque<Idle<V, I>>>,
    made: Arc<Made>,
}

/// How many instances of a version are being made, by its address.
type Made = Mutex<HashMap<usize, usize>>;

struct Idle<V, I> {
    of: Weak<V>,
    /// None before its first call.
    tenant: Option<String>,
    since: Instant,
    // Ends before its room is free.
    instance: I,
    room: OwnedSemaphorePermit,
}

/// Room for an instance that is being made.
pub(super) struct Room {
    of: usize,
    made: Arc<Made>,
    room: Option<OwnedSemaphorePermit>,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut made = locked(&self.made);
        if let Some(count) = made.get_mut(&self.of) {
            *count -= 1;
            if *count == 0 {
                made.remove(&self.of);
            }
        }
    }
}

impl<V, I> Waiting<V, I> {
    /// Keeps at most so many; those that wait longer than `patience` may go, where there is such a bound.
    pub(super) fn new(most: u32, patience: Option<Duration>) -> Self {
        let rooms = Arc::new(Semaphore::new(most as usize));
        Self { most: most as usize, patience, rooms, idle: Mutex::default(), made: Arc::default() }
    }

    /// Whether any is ever kept.
    pub(super) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// The one that served this tenant last, if there is one.
    pub(super) fn take(&self, version: &Arc<V>, tenant: &str) -> Option<I> {
        self.take_if(|idle| idle.tenant.as_deref() == Some(tenant) && idle.is_of(version))
    }

    /// One that has served nobody, if there is one.
    pub(super) fn take_ready(&self, version: &Arc<V>) -> Option<I> {
        self.take_if(|idle| idle.tenant.is_none() && idle.is_of(version))
    }

    fn take_if(&self, wanted: impl Fn(&Idle<V, I>) -> bool) -> Option<I> {
        let mut idle = self.idle();
        let index = idle.iter().rposition(wanted)?;
        idle.remove(index).map(|idle| idle.instance)
    }

    /// Keeps an instance that served a tenant; where there are too many, the one that waited longest goes.
    pub(super) fn put(&self, version: &Arc<V>, tenant: &str, instance: I) {
        // Where others are just ending, this one does too.
        if let Some(room) = self.room(|idle| (!idle.is_empty()).then_some(0)) {
            self.push(version, Some(tenant.to_owned()), instance, room);
        }
    }

    /// Room for one that is yet to be made, if need be that of a version which has more.
    pub(super) fn room_for(&self, version: &Arc<V>) -> Option<Room> {
        let of = Arc::as_ptr(version).addr();
        *locked(&self.made).entry(of).or_default() += 1;
        // Counted from here on, and until it is dropped.
        let mut made = Room { of, made: self.made.clone(), room: None };
        made.room = Some(self.room(|idle| {
            let mut counts = locked(&self.made).clone();
            idle.iter().for_each(|idle| *counts.entry(idle.of.as_ptr().addr()).or_default() += 1);
            // Without the one that this is about.
            let mine = counts.get(&of).map_or(0, |count| count - 1);
            let owners = idle.iter().map(|idle| idle.of.as_ptr().addr()).enumerate();
            let more = owners.filter(|(_, owner)| *owner != of && counts[owner] > mine);
            // Of the version that has most, the one that waited longest.
            more.min_by_key(|&(index, owner)| (Reverse(counts[&owner]), index)).map(|(index, _)| index)
        })?);
        Some(made)
    }

    /// Keeps one that has served nobody.
    pub(super) fn put_ready(&self, version: &Arc<V>, instance: I, mut room: Room) {
        if let Some(room) = room.room.take() {
            self.push(version, None, instance, room);
        }
    }

    fn push(&self, version: &Arc<V>, tenant: Option<String>, instance: I, room: OwnedSemaphorePermit) {
        let of = Arc::downgrade(version);
        self.idle().push_back(Idle { of, tenant, since: Instant::now(), instance, room });
    }

    /// Room that is free, or that of an instance which is chosen to go.
    fn room(&self, chosen: impl Fn(&VecDeque<Idle<V, I>>) -> Option<usize>) -> Option<OwnedSemaphorePermit> {
        drop(self.take_gone());
        if let Ok(room) = self.rooms.clone().try_acquire_owned() {
            return Some(room);
        }
        let gone = {
            let mut idle = self.idle();
            chosen(&idle).and_then(|index| idle.remove(index))?
        };
        // An instance takes its time to end: not while others wait for the lock.
        drop(gone.instance);
        Some(gone.room)
    }

    /// How many of a version wait or are being made.
    pub(super) fn expected(&self, version: &Arc<V>) -> usize {
        let made = locked(&self.made).get(&Arc::as_ptr(version).addr()).copied();
        self.count(version) + made.unwrap_or(0)
    }

    /// How many are kept of a version.
    pub(super) fn count(&self, version: &Arc<V>) -> usize {
        self.idle().iter().filter(|idle| idle.is_of(version)).count()
    }

    /// Those whose version is gone, and those that waited too long.
    fn take_gone(&self) -> Vec<Idle<V, I>> {
        let mut idle = self.idle();
        let patient = |idle: &Idle<V, I>| self.patience.is_none_or(|most| idle.since.elapsed() < most);
        let stays = |idle: &Idle<V, I>| idle.of.strong_count() > 0 && patient(idle);
        let (kept, gone) = std::mem::take(&mut *idle).into_iter().partition(stays);
        *idle = kept;
        Vec::from(gone)
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<Idle<V, I>>> {
        locked(&self.idle)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A version's own part in the instances that wait; as a field of the version it ends with it, and they do too.
pub(super) struct WaitingPart<V, I>(Arc<Waiting<V, I>>);

impl<V, I> WaitingPart<V, I> {
    pub(super) fn new(waiting: &Arc<Waiting<V, I>>) -> Self {
        Self(waiting.clone())
    }
}

impl<V, I> Clone for WaitingPart<V, I> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V, I> Deref for WaitingPart<V, I> {
    type Target = Waiting<V, I>;

    fn deref(&self) -> &Waiting<V, I> {
        &self.0
    }
}

impl<V, I> Drop for WaitingPart<V, I> {
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
        let warm = Waiting::new(3, None);
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
        let warm = Waiting::new(2, None);
        let version = Arc::new(());
        for instance in 1..=3 {
            warm.put(&version, "a", instance);
        }
        assert_eq!(warm.count(&version), 2);
        assert_eq!((warm.take(&version, "a"), warm.take(&version, "a")), (Some(3), Some(2)));
        let off = Waiting::new(0, None);
        off.put(&version, "a", 1);
        assert_eq!((off.is_on(), off.take(&version, "a")), (false, None));
    }

    #[test]
    fn one_that_served_nobody_makes_room_for_a_version_that_has_fewer() {
        let ready = Waiting::new(2, None);
        let (one, other) = (Arc::new("one"), Arc::new("other"));
        for instance in 1..=2 {
            let room = ready.room_for(&one).unwrap();
            ready.put_ready(&one, instance, room);
        }
        assert!(ready.room_for(&one).is_none());
        let room = ready.room_for(&other).unwrap();
        assert_eq!((ready.count(&one), ready.take(&one, "")), (1, None));
        assert_eq!((ready.expected(&one), ready.expected(&other)), (1, 1));
        assert!(ready.room_for(&one).is_none(), "the other's is being made");
        ready.put_ready(&other, 3, room);
        assert!(ready.room_for(&one).is_none() && ready.room_for(&other).is_none());
        assert_eq!((ready.take_ready(&other), ready.take_ready(&other)), (Some(3), None));
        assert_eq!((ready.take_ready(&one), ready.take_ready(&one)), (Some(2), None));
    }

    #[test]
    fn what_is_being_made_counts_as_if_it_were_there() {
        let ready = Waiting::new(3, None);
        let (one, other) = (Arc::new("one"), Arc::new("other"));
        let room = ready.room_for(&other).unwrap();
        ready.put_ready(&other, 1, room);
        let rooms = [ready.room_for(&one).unwrap(), ready.room_for(&one).unwrap()];
        assert!(ready.room_for(&one).is_none(), "it has more than the other");
        assert_eq!((ready.expected(&one), ready.count(&one)), (2, 0));
        drop(rooms);
        assert_eq!(ready.expected(&one), 0);
        assert!(ready.room_for(&one).is_some(), "what was not made leaves its room");
    }

    #[test]
    fn one_that_waited_too_long_goes_with_the_next_that_comes() {
        let warm = Waiting::new(2, Some(Duration::ZERO));
        let version = Arc::new(());
        warm.put(&version, "a", 1);
        assert_eq!(warm.count(&version), 1);
        warm.put(&version, "a", 2);
        assert_eq!((warm.take(&version, "a"), warm.take(&version, "a")), (Some(2), None));
    }

    #[test]
    fn an_instance_goes_with_its_version() {
        struct Version {
            kept: WaitingPart<Version, Arc<()>>,
        }
        let warm = Arc::new(Waiting::new(2, None));
        let version = || Arc::new(Version { kept: WaitingPart::new(&warm) });
        let (old, new) = (version(), version());
        let instance = Arc::new(());
        old.kept.put(&old, "a", instance.clone());
        new.kept.put(&new, "a", Arc::default());
        assert_eq!(Arc::strong_count(&instance), 2);
        drop(old);
        assert_eq!((Arc::strong_count(&instance), warm.count(&new)), (1, 1));
    }
}
