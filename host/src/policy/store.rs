//! The key-value store that the calls of one policy share. It survives reloads of the policy.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Longest key, in bytes.
const MAX_KEY: usize = 256;

/// What an entry costs besides its key and value, so that many small ones are bounded too.
const ENTRY: u64 = 64;

/// Values by key, each with an end where one was given; bounded in bytes.
#[derive(Debug)]
pub(super) struct KeyValue {
    limit: u64,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_key: HashMap<String, Entry>,
    bytes: u64,
}

#[derive(Debug)]
struct Entry {
    /// A counter is its decimal digits, so that `get` reads what `add` wrote.
    value: Vec<u8>,
    ends: Option<Instant>,
}

impl KeyValue {
    /// An empty store that holds at most `limit` bytes of keys and values.
    pub(super) fn new(limit: u64) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    /// The value of a key.
    pub(super) fn get(&self, key: &str, now: Instant) -> Option<Vec<u8>> {
        let mut entries = self.lock();
        entries.expire(key, now);
        entries.by_key.get(key).map(|entry| entry.value.clone())
    }

    /// Sets a value, for a time or for good.
    ///
    /// # Errors
    /// When the key is too long or the store is full.
    pub(super) fn set(
        &self,
        key: &str,
        value: Vec<u8>,
        ttl: Option<Duration>,
        now: Instant,
    ) -> Result<(), String> {
        let mut entries = self.lock();
        entries.expire(key, now);
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
        now: Instant,
    ) -> Result<i64, String> {
        let mut entries = self.lock();
        entries.expire(key, now);
        let (old, ends) = match entries.by_key.get(key) {
            None => (0, ends(ttl, now)),
            Some(entry) => {
                let text = std::str::from_utf8(&entry.value).ok();
                let number = text.and_then(|text| text.parse::<i64>().ok());
                (number.ok_or_else(|| format!("the value of {key:?} is not a counter"))?, entry.ends)
            }
        };
        let sum = old.checked_add(delta).ok_or_else(|| format!("the counter {key:?} would overflow"))?;
        self.put(&mut entries, key, Entry { value: sum.to_string().into_bytes(), ends }, now)?;
        Ok(sum)
    }

    fn put(&self, entries: &mut Entries, key: &str, entry: Entry, now: Instant) -> Result<(), String> {
        if key.len() > MAX_KEY {
            return Err(format!("a key may have {MAX_KEY} bytes, this one has {}", key.len()));
        }
        let size = cost(key, &entry);
        let old = entries.by_key.get(key).map_or(0, |entry| cost(key, entry));
        if entries.bytes - old + size > self.limit {
            entries.expire_all(now);
        }
        if entries.bytes - old + size > self.limit {
            return Err(format!(
                "the store holds {} of {} bytes, {size} more do not fit",
                entries.bytes - old,
                self.limit
            ));
        }
        entries.bytes = entries.bytes - old + size;
        entries.by_key.insert(key.to_owned(), entry);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Entries {
    fn expire(&mut self, key: &str, now: Instant) {
        if self.by_key.get(key).is_some_and(|entry| entry.ends.is_some_and(|end| end <= now)) {
            let entry = self.by_key.remove(key);
            self.bytes -= entry.map_or(0, |entry| cost(key, &entry));
        }
    }

    fn expire_all(&mut self, now: Instant) {
        self.by_key.retain(|_, entry| entry.ends.is_none_or(|end| end > now));
        self.bytes = self.by_key.iter().map(|(key, entry)| cost(key, entry)).sum();
    }
}

fn ends(ttl: Option<Duration>, now: Instant) -> Option<Instant> {
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
        let (store, now) = (KeyValue::new(1000), Instant::now());
        store.set("a", b"1".to_vec(), Some(SECOND), now).unwrap();
        store.set("b", b"2".to_vec(), None, now).unwrap();
        assert_eq!(store.get("a", now).unwrap(), b"1");
        assert_eq!(store.get("a", now + SECOND), None);
        assert_eq!(store.get("b", now + 1000 * SECOND).unwrap(), b"2");
    }

    #[test]
    fn a_counter_counts_and_its_time_runs_from_the_start() {
        let (store, now) = (KeyValue::new(1000), Instant::now());
        assert_eq!(store.add("hits", 2, Some(2 * SECOND), now), Ok(2));
        assert_eq!(store.add("hits", -5, Some(2 * SECOND), now + SECOND), Ok(-3));
        assert_eq!(store.get("hits", now + SECOND).unwrap(), b"-3");
        assert_eq!(store.add("hits", 1, None, now + 2 * SECOND), Ok(1), "the window is over");
        store.set("text", b"x".to_vec(), None, now).unwrap();
        assert!(store.add("text", 1, None, now).unwrap_err().contains("not a counter"));
        store.set("full", i64::MAX.to_string().into_bytes(), None, now).unwrap();
        assert!(store.add("full", 1, None, now).unwrap_err().contains("overflow"));
    }

    #[test]
    fn the_bound_holds_and_ended_values_make_room() {
        let (store, now) = (KeyValue::new(2 * (ENTRY + 11)), Instant::now());
        store.set("a", vec![0; 10], Some(SECOND), now).unwrap();
        store.set("b", vec![0; 10], None, now).unwrap();
        store.set("b", vec![1; 10], None, now).unwrap();
        let full = store.set("c", vec![0; 10], None, now).unwrap_err();
        assert!(full.contains("150 of 150 bytes"), "{full}");
        store.set("c", vec![0; 10], None, now + SECOND).unwrap();
        assert!(store.set("c", vec![0; 1000], None, now).is_err());
        assert_eq!(store.get("c", now).unwrap().len(), 10, "what failed changed nothing");
        assert!(store.set(&"k".repeat(257), vec![], None, now).is_err());
    }

    #[test]
    fn counters_are_atomic() {
        let (store, now) = (KeyValue::new(1000), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| drop(store.add("n", 1, None, now))));
            }
        });
        assert_eq!(store.get("n", now).unwrap(), b"4000");
    }
}
