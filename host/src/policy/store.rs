//! The key-value store that the calls of one policy share. It survives reloads of the policy, and the server where
//! that has a folder for its state.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::state_dir::StateDir;

/// Longest key, in bytes.
const MAX_KEY: usize = 256;

/// What an entry costs besides its key and value, so that many small ones are bounded too.
const ENTRY: u64 = 64;

/// Why a value was not kept.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StoreError {
    #[error("a key may have {MAX_KEY} bytes, this one has {0}")]
    TooLong(usize),
    #[error("the store holds {held} of {limit} bytes, {more} more do not fit")]
    Full { held: u64, limit: u64, more: u64 },
    #[error("the value of {0:?} is not a counter")]
    NotACounter(String),
    #[error("the counter {0:?} would overflow")]
    Overflow(String),
    #[error("not stored: {0}")]
    Unavailable(String),
}

/// Values by key, each with an end where one was given; bounded in bytes.
pub(super) struct KeyValue {
    limit: AtomicU64,
    entries: Mutex<Entries>,
    /// Where values are written as well, and under whose name.
    disk: Option<(Arc<StateDir>, String)>,
}

#[derive(Debug, Default)]
struct Entries {
    by_key: HashMap<String, Entry>,
    bytes: u64,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    /// A counter is its decimal digits, so that `get` reads what `add` wrote.
    value: Vec<u8>,
    ends: Option<SystemTime>,
}

impl Entry {
    fn ended(&self, now: SystemTime) -> bool {
        self.ends.is_some_and(|end| end <= now)
    }

    /// The end in milliseconds since 1970, 8 bytes little-endian and 0 for none, then the value.
    fn to_bytes(&self) -> Vec<u8> {
        let ends = self.ends.and_then(|ends| ends.duration_since(UNIX_EPOCH).ok());
        let ends = ends.map_or(0, |ends| u64::try_from(ends.as_millis()).unwrap_or(u64::MAX));
        [&ends.to_le_bytes()[..], &self.value].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (ends, value) = bytes.split_first_chunk::<8>()?;
        let ends = match u64::from_le_bytes(*ends) {
            0 => None,
            ms => Some(UNIX_EPOCH.checked_add(Duration::from_millis(ms))?),
        };
        Some(Self { value: value.to_vec(), ends })
    }
}

impl KeyValue {
    /// An empty store in memory that holds at most `limit` bytes of keys and values.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit: AtomicU64::new(limit), entries: Mutex::default(), disk: None }
    }

    /// The store of a policy as it was left, whatever its size.
    pub(super) fn open(state: Arc<StateDir>, policy: &str) -> Self {
        let mut entries = Entries::default();
        let now = SystemTime::now();
        for (key, value) in state.stored(policy) {
            let entry = Entry::from_bytes(&value);
            if entry.as_ref().is_none_or(|entry| entry.ended(now)) {
                // Should that fail, it is left out all the same.
                let _ = state.forget(policy, &key);
            } else if let Some(entry) = entry {
                entries.bytes += cost(&key, &entry);
                entries.by_key.insert(key, entry);
            }
        }
        let disk = Some((state, policy.to_owned()));
        Self { limit: AtomicU64::new(0), entries: Mutex::new(entries), disk }
    }

    /// Sets how many bytes it may hold; what is more already stays.
    pub(super) fn limit_to(&self, bytes: u64) {
        self.limit.store(bytes, Relaxed);
    }

    /// How many bytes it holds.
    pub(super) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str, now: SystemTime) -> Option<Vec<u8>> {
        let mut entries = self.lock();
        self.expire(&mut entries, key, now);
        entries.by_key.get(key).map(|entry| entry.value.clone())
    }

    /// Every key and value that has not ended.
    pub(super) fn all(&self, now: SystemTime) -> Vec<(String, Vec<u8>)> {
        let entries = self.lock();
        let live = entries.by_key.iter().filter(|(_, entry)| !entry.ended(now));
        live.map(|(key, entry)| (key.clone(), entry.value.clone())).collect()
    }

    /// Sets a value, for a time or for good.
    ///
    /// # Errors
    /// When the key is too long, the store is full or the disk does not take it.
    pub(super) fn set(
        &self,
        key: &str,
        value: Vec<u8>,
        ttl: Option<Duration>,
        now: SystemTime,
    ) -> Result<(), StoreError> {
        let mut entries = self.lock();
        self.expire(&mut entries, key, now);
        self.put(&mut entries, key, Entry { value, ends: ends(ttl, now) }, now)
    }

    /// Adds to a counter and returns the sum. A counter begins at 0, and its time counts from then.
    ///
    /// # Errors
    /// As [`Self::set`]; when the value is not a counter; when the sum does not fit.
    pub(super) fn add(
        &self,
        key: &str,
        delta: i64,
        ttl: Option<Duration>,
        now: SystemTime,
    ) -> Result<i64, StoreError> {
        let mut entries = self.lock();
        self.expire(&mut entries, key, now);
        let (old, ends) = match entries.by_key.get(key) {
            None => (0, ends(ttl, now)),
            Some(entry) => {
                let text = std::str::from_utf8(&entry.value).ok();
                let number = text.and_then(|text| text.parse::<i64>().ok());
                (number.ok_or_else(|| StoreError::NotACounter(key.to_owned()))?, entry.ends)
            }
        };
        let sum = old.checked_add(delta).ok_or_else(|| StoreError::Overflow(key.to_owned()))?;
        self.put(&mut entries, key, Entry { value: sum.to_string().into_bytes(), ends }, now)?;
        Ok(sum)
    }

    fn put(&self, entries: &mut Entries, key: &str, entry: Entry, now: SystemTime) -> Result<(), StoreError> {
        if key.len() > MAX_KEY {
            return Err(StoreError::TooLong(key.len()));
        }
        let limit = self.limit.load(Relaxed);
        let size = cost(key, &entry);
        let old = entries.by_key.get(key).map_or(0, |entry| cost(key, entry));
        if entries.bytes - old + size > limit {
            for ended in entries.expire_all(now) {
                self.forget(&ended);
            }
        }
        if entries.bytes - old + size > limit {
            return Err(StoreError::Full { held: entries.bytes - old, limit, more: size });
        }
        // On the disk before it is acknowledged, and not in memory where that fails.
        if let Some((state, policy)) = &self.disk {
            state.put(policy, key, &entry.to_bytes()).map_err(StoreError::Unavailable)?;
        }
        entries.bytes = entries.bytes - old + size;
        entries.by_key.insert(key.to_owned(), entry);
        Ok(())
    }

    /// Removes a value that has ended.
    fn expire(&self, entries: &mut Entries, key: &str, now: SystemTime) {
        if entries.by_key.get(key).is_some_and(|entry| entry.ended(now)) {
            let entry = entries.by_key.remove(key);
            entries.bytes -= entry.map_or(0, |entry| cost(key, &entry));
            self.forget(key);
        }
    }

    /// Takes what has ended off the disk; should that fail, it has ended all the same when it is read again.
    fn forget(&self, key: &str) {
        if let Some((state, policy)) = &self.disk
            && let Err(error) = state.forget(policy, key)
        {
            tracing::warn!(target: "policy", policy, %error, "an ended value stays on the disk");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Entries {
    /// Removes what has ended, and names it.
    fn expire_all(&mut self, now: SystemTime) -> Vec<String> {
        let ended = self.by_key.extract_if(|_, entry| entry.ended(now));
        let ended: Vec<String> = ended.map(|(key, _)| key).collect();
        self.bytes = self.by_key.iter().map(|(key, entry)| cost(key, entry)).sum();
        ended
    }
}

fn ends(ttl: Option<Duration>, now: SystemTime) -> Option<SystemTime> {
    ttl.and_then(|ttl| now.checked_add(ttl))
}

fn cost(key: &str, entry: &Entry) -> u64 {
    ENTRY + (key.len() + entry.value.len()) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn values_end_when_their_time_is_over() {
        let (store, now) = (KeyValue::new(1000), SystemTime::now());
        store.set("a", b"1".to_vec(), Some(SECOND), now).unwrap();
        store.set("b", b"2".to_vec(), None, now).unwrap();
        assert_eq!(store.get("a", now).unwrap(), b"1");
        assert_eq!(store.get("a", now + SECOND), None);
        assert_eq!(store.get("b", now + 1000 * SECOND).unwrap(), b"2");
    }

    #[test]
    fn a_counter_counts_and_its_time_runs_from_the_start() {
        let (store, now) = (KeyValue::new(1000), SystemTime::now());
        assert_eq!(store.add("hits", 2, Some(2 * SECOND), now), Ok(2));
        assert_eq!(store.add("hits", -5, Some(2 * SECOND), now + SECOND), Ok(-3));
        assert_eq!(store.get("hits", now + SECOND).unwrap(), b"-3");
        assert_eq!(store.add("hits", 1, None, now + 2 * SECOND), Ok(1), "the window is over");
        store.set("text", b"x".to_vec(), None, now).unwrap();
        assert_eq!(store.add("text", 1, None, now), Err(StoreError::NotACounter("text".into())));
        store.set("full", i64::MAX.to_string().into_bytes(), None, now).unwrap();
        assert_eq!(store.add("full", 1, None, now), Err(StoreError::Overflow("full".into())));
    }

    #[test]
    fn the_bound_holds_and_ended_values_make_room() {
        let (store, now) = (KeyValue::new(2 * (ENTRY + 11)), SystemTime::now());
        store.set("a", vec![0; 10], Some(SECOND), now).unwrap();
        store.set("b", vec![0; 10], None, now).unwrap();
        store.set("b", vec![1; 10], None, now).unwrap();
        let full = store.set("c", vec![0; 10], None, now).unwrap_err();
        assert_eq!(full, StoreError::Full { held: 150, limit: 150, more: 75 });
        assert_eq!(full.to_string(), "the store holds 150 of 150 bytes, 75 more do not fit");
        store.set("c", vec![0; 10], None, now + SECOND).unwrap();
        assert!(matches!(store.set("c", vec![0; 1000], None, now), Err(StoreError::Full { .. })));
        assert_eq!(store.get("c", now).unwrap().len(), 10, "what failed changed nothing");
        assert_eq!(store.set(&"k".repeat(257), vec![], None, now), Err(StoreError::TooLong(257)));
    }

    #[test]
    fn counters_are_atomic() {
        let (store, now) = (KeyValue::new(1000), SystemTime::now());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| drop(store.add("n", 1, None, now))));
            }
        });
        assert_eq!(store.get("n", now).unwrap(), b"4000");
    }

    #[test]
    fn what_was_stored_is_there_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let now = SystemTime::now();
        let open = || {
            let store = KeyValue::open(Arc::new(StateDir::open(folder.path()).unwrap()), "a");
            store.limit_to(1000);
            store
        };
        let store = open();
        store.set("value", b"x".to_vec(), None, now).unwrap();
        store.set("short", b"y".to_vec(), Some(SECOND), now).unwrap();
        store.add("hits", 2, Some(10 * SECOND), now).unwrap();
        drop(store);
        let store = open();
        assert_eq!(store.get("value", now).unwrap(), b"x");
        assert_eq!(store.get("short", now + SECOND), None, "its time ran on");
        assert_eq!(store.add("hits", 1, None, now + SECOND), Ok(3));
        assert!(store.bytes() > 0 && store.bytes() < 1000);
        // What has ended leaves the disk as well.
        drop(store);
        let names: Vec<String> =
            StateDir::open(folder.path()).unwrap().stored("a").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["hits", "value"]);
    }
}
