//! Which files of the drop directory have come, changed or gone. A file counts once it has been at rest for a
//! moment; what wakes the watcher (the system's events, or a slow poll where there are none) says nothing about
//! what happened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;

use super::runtime::StartError;
use super::settings::is_policy_name;

/// How long a file must be at rest.
const REST: Duration = Duration::from_millis(100);

/// How often the directory is read when nothing wakes the watcher: network file systems send no events.
const POLL: Duration = Duration::from_secs(2);

/// What tells one state of a file from another. The change time tells two writes within the resolution of the
/// modification time, and a change of permissions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Stamp {
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
    file: (u64, u64),
    /// Of a policy's manifest and of its folder of examples.
    beside: u64,
}

/// What follows a policy's name in the name of its manifest.
pub(super) const MANIFEST: &str = ".toml";

/// What follows a policy's name in the name of the folder of its probes' examples.
pub(super) const PROBES: &str = ".probes";

/// A policy's file that has come to rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) name: String,
    /// It is there, new or changed; or it is gone.
    pub(super) present: bool,
}

/// The policies in a directory: `*.wasm` whose stem is a policy's name.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) policies: BTreeMap<String, Stamp>,
    /// Files that end in `.wasm` and have a name that cannot be served.
    pub(super) misnamed: BTreeSet<PathBuf>,
}

/// Reads a directory.
pub(super) fn list(dir: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "wasm") {
            continue;
        }
        // Follows links: what a link points to is what is served. A file that is gone by now is not there.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        if !metadata.is_file() {
            continue;
        }
        match path.file_stem().and_then(|stem| stem.to_str()).filter(|name| is_policy_name(name)) {
            Some(name) => {
                let beside = stamp_beside(dir, name);
                listing.policies.insert(name.to_owned(), Stamp { beside, ..stamp(&metadata) });
            }
            None => drop(listing.misnamed.insert(path)),
        }
    }
    Ok(listing)
}

/// One number for the state of what lies beside a component.
fn stamp_beside(dir: &Path, name: &str) -> u64 {
    let of = |path: PathBuf| fs::metadata(path).ok().map(|metadata| stamp(&metadata));
    let manifest = of(dir.join(format!("{name}{MANIFEST}")));
    let examples = fs::read_dir(dir.join(format!("{name}{PROBES}"))).into_iter().flatten().flatten();
    let examples: BTreeMap<_, _> = examples.map(|entry| (entry.file_name(), of(entry.path()))).collect();
    let mut hash = DefaultHasher::new();
    (manifest, examples).hash(&mut hash);
    hash.finish()
}

#[cfg(unix)]
fn stamp(metadata: &fs::Metadata) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    Stamp {
        bytes: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        file: (metadata.dev(), metadata.ino()),
        beside: 0,
    }
}

#[cfg(not(unix))]
fn stamp(metadata: &fs::Metadata) -> Stamp {
    let modified = metadata.modified().ok();
    let modified = modified.and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    let modified = modified.map_or((0, 0), |time| (time.as_secs() as i64, i64::from(time.subsec_nanos())));
    Stamp { bytes: metadata.len(), modified, changed: (0, 0), file: (0, 0), beside: 0 }
}

/// Finds out when files have come to rest. Knows no clock and no disk.
#[derive(Debug, Default)]
pub(super) struct Settle {
    /// What was told last: the state of each file that is there.
    told: BTreeMap<String, Stamp>,
    /// States that differ from it, none for a file that is gone, and since when they have lasted.
    pending: BTreeMap<String, (Option<Stamp>, Instant)>,
}

impl Settle {
    /// Begins with files that have been told already.
    pub(super) fn new(told: BTreeMap<String, Stamp>) -> Self {
        Self { told, pending: BTreeMap::new() }
    }

    /// Takes a listing, and returns what has come to rest since the last one.
    fn observe(&mut self, now: Instant, listing: &BTreeMap<String, Stamp>) -> Vec<Change> {
        let names: BTreeSet<&String> = self.told.keys().chain(listing.keys()).collect();
        let mut pending = BTreeMap::new();
        for name in names {
            let stamp = listing.get(name).copied();
            if stamp == self.told.get(name).copied() {
                continue;
            }
            let since = match self.pending.get(name) {
                Some((before, since)) if *before == stamp => *since,
                _ => now,
            };
            pending.insert(name.clone(), (stamp, since));
        }
        let rested = |since: &Instant| now.saturating_duration_since(*since) >= REST;
        let mut changes = Vec::new();
        for (name, (stamp, _)) in pending.extract_if(.., |_, (_, since)| rested(since)) {
            changes.push(Change { name: name.clone(), present: stamp.is_some() });
            match stamp {
                Some(stamp) => self.told.insert(name, stamp),
                None => self.told.remove(&name),
            };
        }
        self.pending = pending;
        changes
    }

    /// How long until something may have come to rest.
    fn next(&self, now: Instant) -> Option<Duration> {
        let first = self.pending.values().map(|(_, since)| *since + REST).min()?;
        Some(first.saturating_duration_since(now))
    }
}

enum Wake {
    Look,
    Stop,
}

/// The thread that watches. It ends by [`Watch::stop`], or when this is dropped.
pub(super) struct Watch {
    wake: Sender<Wake>,
    thread: std::sync::Mutex<Option<JoinHandle<()>>>,
}

impl Watch {
    /// Watches a directory whose files `settle` knows, and sends what comes to rest.
    pub(super) fn start(
        dir: PathBuf,
        settle: Settle,
        changes: mpsc::UnboundedSender<Change>,
    ) -> Result<Self, StartError> {
        let (wake, woken) = channel();
        let waker = wake.clone();
        let name = "policy-watch";
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || watch(&dir, settle, &waker, &woken, &changes))
            .map_err(|cause| StartError::Thread { name, cause })?;
        Ok(Self { wake, thread: std::sync::Mutex::new(Some(thread)) })
    }

    /// Ends the thread and waits for it; it is never long busy.
    pub(super) fn stop(&self) {
        // The thread is gone already when nobody receives.
        let _ = self.wake.send(Wake::Stop);
        let thread = self.thread.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(target: "policy", "the watcher's thread panicked");
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop();
    }
}

fn watch(
    dir: &Path,
    mut settle: Settle,
    waker: &Sender<Wake>,
    woken: &Receiver<Wake>,
    changes: &mpsc::UnboundedSender<Change>,
) {
    let mut events = Events::default();
    let mut misnamed = BTreeSet::new();
    let mut readable = true;
    loop {
        events.follow(dir, waker);
        match list(dir) {
            Ok(listing) => {
                readable = true;
                for path in listing.misnamed.difference(&misnamed) {
                    tracing::warn!(
                        target: "policy",
                        ?path,
                        "not served: a policy's name is 1 to 64 of a-z, 0-9, - and _"
                    );
                }
                misnamed = listing.misnamed;
                for change in settle.observe(Instant::now(), &listing.policies) {
                    if changes.send(change).is_err() {
                        return;
                    }
                }
            }
            // A directory that cannot be read now, as on a network, says nothing about its files.
            Err(error) => {
                if std::mem::replace(&mut readable, false) {
                    tracing::warn!(target: "policy", ?dir, %error, "cannot be read: what is served is served on");
                }
            }
        }
        let wait = settle.next(Instant::now()).unwrap_or(POLL).min(POLL);
        match woken.recv_timeout(wait) {
            Ok(Wake::Look) => {
                // A copy makes many events: one look at its end is enough.
                std::thread::sleep(Duration::from_millis(5));
                if woken.try_iter().any(|wake| matches!(wake, Wake::Stop)) {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Ok(Wake::Stop) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The system's events of a directory, which may be replaced by another of its name.
#[derive(Default)]
struct Events {
    watcher: Option<RecommendedWatcher>,
    of: Option<(u64, u64)>,
}

impl Events {
    fn follow(&mut self, dir: &Path, waker: &Sender<Wake>) {
        let file = fs::metadata(dir).ok().map(|metadata| stamp(&metadata).file);
        if self.of == file {
            return;
        }
        (self.watcher, self.of) = (None, file);
        if file.is_none() {
            return;
        }
        let waker = waker.clone();
        let wake = move |event: notify::Result<notify::Event>| {
            // Reading a file is an event too, and the loader reads them.
            if event.is_ok_and(|event| !matches!(event.kind, EventKind::Access(_))) {
                let _ = waker.send(Wake::Look);
            }
        };
        let watcher = notify::recommended_watcher(wake).and_then(|mut watcher| {
            watcher.watch(dir, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        match watcher {
            Ok(watcher) => self.watcher = Some(watcher),
            Err(error) => {
                // Said once for this directory.
                tracing::warn!(target: "policy", %error, "no events of the directory: it is read every 2 seconds");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(bytes: u64) -> Stamp {
        Stamp { bytes, modified: (0, 0), changed: (0, 0), file: (0, 0), beside: 0 }
    }

    fn files<const N: usize>(list: [(&str, u64); N]) -> BTreeMap<String, Stamp> {
        list.into_iter().map(|(name, bytes)| (name.to_owned(), at(bytes))).collect()
    }

    fn change(name: &str, present: bool) -> Change {
        Change { name: name.to_owned(), present }
    }

    #[test]
    fn a_file_counts_when_it_has_been_at_rest() {
        let start = Instant::now();
        let ms = |ms| start + Duration::from_millis(ms);
        let mut settle = Settle::new(files([("old", 1)]));
        assert_eq!(settle.observe(ms(0), &files([("old", 1)])), []);
        assert_eq!(settle.next(ms(0)), None);
        // A slow copy: it grows, and the clock starts again.
        assert_eq!(settle.observe(ms(10), &files([("old", 1), ("new", 1)])), []);
        assert_eq!(settle.observe(ms(90), &files([("old", 1), ("new", 2)])), []);
        assert_eq!(settle.observe(ms(150), &files([("old", 1), ("new", 2)])), []);
        assert_eq!(settle.next(ms(150)), Some(Duration::from_millis(40)));
        assert_eq!(settle.observe(ms(190), &files([("old", 1), ("new", 2)])), [change("new", true)]);
        assert_eq!(settle.observe(ms(400), &files([("old", 1), ("new", 2)])), [], "told once");
    }

    #[test]
    fn a_file_that_is_replaced_by_way_of_nothing_is_not_gone() {
        let start = Instant::now();
        let ms = |ms| start + Duration::from_millis(ms);
        let mut settle = Settle::new(files([("a", 1)]));
        assert_eq!(settle.observe(ms(0), &files([])), []);
        assert_eq!(settle.observe(ms(50), &files([("a", 2)])), []);
        assert_eq!(settle.observe(ms(150), &files([("a", 2)])), [change("a", true)]);
        assert_eq!(settle.observe(ms(200), &files([])), []);
        assert_eq!(settle.observe(ms(300), &files([])), [change("a", false)]);
        // There and back again: nothing happened.
        assert_eq!(settle.observe(ms(400), &files([("b", 1)])), []);
        assert_eq!(settle.observe(ms(450), &files([])), []);
        assert_eq!(settle.observe(ms(600), &files([])), []);
    }

    #[test]
    fn only_components_with_a_good_name_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["auto.wasm", "Bad Name.wasm", "auto.toml", ".auto.wasm", "auto.wasm.tmp", "x"] {
            fs::write(dir.path().join(name), b"x").unwrap();
        }
        fs::create_dir(dir.path().join("dir.wasm")).unwrap();
        let listing = list(dir.path()).unwrap();
        assert_eq!(listing.policies.keys().collect::<Vec<_>>(), ["auto"]);
        assert_eq!(listing.misnamed.len(), 2, "{:?}", listing.misnamed);
        assert!(list(&dir.path().join("none")).is_err());
    }

    #[test]
    fn a_real_directory_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugins");
        let (sender, mut changes) = mpsc::unbounded_channel();
        let watch = Watch::start(path.clone(), Settle::default(), sender).unwrap();
        let mut next = || {
            let start = Instant::now();
            loop {
                match changes.try_recv() {
                    Ok(change) => return change,
                    Err(_) if start.elapsed() > Duration::from_secs(10) => panic!("nothing came"),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        };
        // The directory itself comes late, and only the poll can see that.
        fs::create_dir(&path).unwrap();
        fs::write(path.join("a.wasm"), b"1").unwrap();
        assert_eq!(next(), change("a", true));
        // The same size, moved over it.
        fs::write(path.join("tmp"), b"2").unwrap();
        fs::rename(path.join("tmp"), path.join("a.wasm")).unwrap();
        let start = Instant::now();
        assert_eq!(next(), change("a", true));
        assert!(start.elapsed() < Duration::from_millis(1500), "events, not the poll: {:?}", start.elapsed());
        fs::remove_file(path.join("a.wasm")).unwrap();
        assert_eq!(next(), change("a", false));
        watch.stop();
    }
}
