//! What outlives the server, in a folder of its own: what policies store, and which version of each has proven
//! itself. Written before a call returns, so that an end by force loses nothing that was acknowledged; a loss of
//! power may lose what policies stored last.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};

use bytes::Bytes;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use serde::{Deserialize, Serialize};

use super::loader::Source;
use super::runtime::StartError;

/// Versions of a policy that are kept for a way back.
const KEPT: usize = 5;

/// Versions of a policy that were taken back and are known to have been.
const WITHDRAWN: usize = 32;

/// The folder, open. One server has it at a time.
pub(super) struct StateDir {
    dir: PathBuf,
    /// None once writing failed and it could not be opened again yet.
    open: RwLock<Option<Open>>,
    /// Held while a standing is changed.
    changing: Mutex<()>,
}

struct Open {
    database: Database,
    store: Keyspace,
    standing: Keyspace,
}

/// What is remembered of a policy's versions, by the SHA-256 of their components.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Standing {
    /// Versions that served every session, the newest last.
    pub(super) proven: Vec<String>,
    /// The version that is on trial.
    pub(super) tried: Option<String>,
    /// Versions that were taken back: none is served until it is uploaded again.
    pub(super) withdrawn: Vec<String>,
    /// The policy is switched off.
    pub(super) disabled: bool,
}

/// A version as it is kept for a way back: its component, and the manifest that it had last.
pub(super) struct Kept {
    hash: String,
    component: Bytes,
    manifest: Option<String>,
}

impl Kept {
    pub(super) fn of(source: &Source) -> Self {
        let manifest = source.manifest.as_ref().map(|manifest| manifest.text.clone());
        Self { hash: source.hash.clone(), component: source.bytes.clone(), manifest }
    }
}

impl Standing {
    /// A version serves every session.
    pub(super) fn prove(&mut self, hash: &str) {
        self.proven.retain(|proven| proven != hash);
        self.proven.push(hash.to_owned());
        self.tried = None;
        self.allow(hash);
    }

    /// A version serves no session.
    pub(super) fn withdraw(&mut self, hash: &str) {
        self.proven.retain(|proven| proven != hash);
        self.tried.take_if(|tried| tried == hash);
        self.allow(hash);
        self.withdrawn.push(hash.to_owned());
    }

    /// A version may serve again.
    pub(super) fn allow(&mut self, hash: &str) {
        self.withdrawn.retain(|withdrawn| withdrawn != hash);
    }

    /// Forgets the oldest of what is too much.
    pub(super) fn bound(&mut self) {
        let (proven, withdrawn) = (self.proven.len(), self.withdrawn.len());
        self.proven.drain(..proven.saturating_sub(KEPT));
        self.withdrawn.drain(..withdrawn.saturating_sub(WITHDRAWN));
    }
}

impl Open {
    fn at(dir: &Path) -> Result<Self, fjall::Error> {
        // Small values and few of them: the least that the library takes.
        let database =
            Database::builder(dir.join("database")).cache_size(1 << 20).worker_threads(1).open()?;
        let keyspace = |name| database.keyspace(name, KeyspaceCreateOptions::default);
        let (store, standing) = (keyspace("store")?, keyspace("standing")?);
        Ok(Self { database, store, standing })
    }
}

impl StateDir {
    /// Opens a folder, and makes it where it is missing.
    ///
    /// # Errors
    /// When it cannot be read or written, or another server has it.
    pub(super) fn open(dir: &Path) -> Result<Self, StartError> {
        let broken = |cause: String| StartError::State { dir: dir.to_owned(), cause };
        fs::create_dir_all(dir.join("versions")).map_err(|error| broken(error.to_string()))?;
        let open = Open::at(dir).map_err(|error| match error {
            fjall::Error::Locked => broken("another server has it; name another with --state".to_owned()),
            error => broken(error.to_string()),
        })?;
        Ok(Self { dir: dir.to_owned(), open: RwLock::new(Some(open)), changing: Mutex::default() })
    }

    /// Does something with the database. One that a full disk broke takes nothing more: it is opened anew.
    fn with<T>(&self, work: impl Fn(&Open) -> Result<T, fjall::Error>) -> Result<T, String> {
        {
            let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
            match open.as_ref().map(&work) {
                Some(Err(fjall::Error::Poisoned)) | None => {}
                Some(done) => return done.map_err(|error| error.to_string()),
            }
        }
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        // Another may have opened it meanwhile.
        match open.as_ref().map(&work) {
            Some(Err(fjall::Error::Poisoned)) | None => {}
            Some(done) => return done.map_err(|error| error.to_string()),
        }
        // Closed first: it holds the lock.
        *open = None;
        let again = open.insert(Open::at(&self.dir).map_err(|error| error.to_string())?);
        tracing::warn!(target: "policy", dir = ?self.dir, "the state was opened again after a failure");
        work(again).map_err(|error| error.to_string())
    }

    /// What a policy stored: keys and values as [`Self::put`] took them.
    pub(super) fn stored(&self, policy: &str) -> Vec<(String, Vec<u8>)> {
        let prefix = key(policy, "");
        let read = self.with(|open| {
            let mut stored = Vec::new();
            for entry in open.store.prefix(&prefix) {
                let (name, value) = entry.into_inner()?;
                if let Ok(name) = std::str::from_utf8(&name[prefix.len()..]) {
                    stored.push((name.to_owned(), value.to_vec()));
                }
            }
            Ok(stored)
        });
        read.unwrap_or_else(|error| {
            tracing::error!(target: "policy", policy, error, "what it stored cannot be read");
            Vec::new()
        })
    }

    /// Writes a value.
    pub(super) fn put(&self, policy: &str, name: &str, value: &[u8]) -> Result<(), String> {
        self.with(|open| open.store.insert(key(policy, name), value))
    }

    /// Removes a value.
    pub(super) fn forget(&self, policy: &str, name: &str) -> Result<(), String> {
        self.with(|open| open.store.remove(key(policy, name)))
    }

    /// What is remembered of a policy.
    pub(super) fn standing(&self, policy: &str) -> Standing {
        match self.with(|open| open.standing.get(policy)) {
            Ok(Some(json)) => serde_json::from_slice(&json).unwrap_or_default(),
            Ok(None) => Standing::default(),
            Err(error) => {
                tracing::error!(target: "policy", policy, error, "its standing cannot be read");
                Standing::default()
            }
        }
    }

    /// Changes what is remembered of a policy, on the disk before this returns. Components that are of no more use
    /// are removed.
    pub(super) fn remember(&self, policy: &str, change: impl FnOnce(&mut Standing)) -> Result<(), String> {
        let _one = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut standing = self.standing(policy);
        change(&mut standing);
        standing.bound();
        let json = serde_json::to_vec(&standing).map_err(|error| error.to_string())?;
        self.with(|open| {
            open.standing.insert(policy, json.as_slice())?;
            open.database.persist(PersistMode::SyncAll)
        })?;
        let versions = standing.proven.iter().chain(&standing.tried);
        let useful: Vec<PathBuf> =
            versions.flat_map(|hash| [self.version(policy, hash), self.manifest(policy, hash)]).collect();
        let there = fs::read_dir(self.dir.join("versions").join(policy));
        for entry in there.into_iter().flatten().flatten() {
            if !useful.contains(&entry.path()) {
                // A file that is left behind costs room and nothing else.
                drop(fs::remove_file(entry.path()));
            }
        }
        Ok(())
    }

    /// Where a version's component is kept.
    pub(super) fn version(&self, policy: &str, hash: &str) -> PathBuf {
        self.dir.join("versions").join(policy).join(format!("{hash}.wasm"))
    }

    /// Where the manifest is kept that a version had last.
    pub(super) fn manifest(&self, policy: &str, hash: &str) -> PathBuf {
        self.version(policy, hash).with_extension("toml")
    }

    /// Keeps a version. Each of its files is whole or not there.
    pub(super) fn keep(&self, policy: &str, version: &Kept) -> io::Result<()> {
        let component = self.version(policy, &version.hash);
        if !component.exists() {
            write(&component, &version.component)?;
        }
        let path = self.manifest(policy, &version.hash);
        match &version.manifest {
            Some(text) if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) => Ok(()),
            Some(text) => write(&path, text.as_bytes()),
            None => fs::remove_file(&path).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            }),
        }
    }
}

/// Writes a file beside its place, brings it to the disk, and renames.
fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    io::Write::write_all(&mut file, bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(Err(error)) = open.as_ref().map(|open| open.database.persist(PersistMode::SyncAll)) {
            tracing::error!(target: "policy", %error, "the state may not be on the disk");
        }
    }
}

/// Names of policies hold no zero byte, so that no policy reads another's values.
fn key(policy: &str, name: &str) -> Vec<u8> {
    [policy.as_bytes(), b"\0", name.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_standings_are_there_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        state.put("a", "k", b"1").unwrap();
        state.put("a", "k2", b"2").unwrap();
        state.put("ab", "k", b"3").unwrap();
        state.forget("a", "k2").unwrap();
        state.remember("a", |standing| standing.disabled = true).unwrap();
        let second = StateDir::open(folder.path()).err().expect("one server at a time").to_string();
        assert!(second.contains("another server has it"), "{second}");
        drop(state);
        let state = StateDir::open(folder.path()).unwrap();
        assert_eq!(state.stored("a"), [("k".to_owned(), b"1".to_vec())]);
        assert_eq!(state.stored("ab"), [("k".to_owned(), b"3".to_vec())]);
        assert!(state.standing("a").disabled && !state.standing("ab").disabled);
    }

    #[test]
    fn the_last_few_versions_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::open(folder.path()).unwrap();
        let version = |hash: &str, manifest: Option<&str>| Kept {
            hash: hash.to_owned(),
            component: Bytes::from_static(b"component"),
            manifest: manifest.map(str::to_owned),
        };
        for hash in 0..=KEPT {
            state.keep("a", &version(&hash.to_string(), Some("fallback = 'next'"))).unwrap();
            state.remember("a", |standing| standing.prove(&hash.to_string())).unwrap();
        }
        assert!(!state.version("a", "0").exists() && !state.manifest("a", "0").exists());
        state.keep("a", &version("trial", None)).unwrap();
        state.remember("a", |standing| standing.tried = Some("trial".into())).unwrap();
        assert!(state.version("a", "trial").exists());
        state.remember("a", |standing| standing.withdraw("trial")).unwrap();
        assert!(!state.version("a", "trial").exists(), "what was taken back is not kept");
        assert_eq!(state.standing("a").withdrawn, ["trial"]);
        assert_eq!(fs::read(state.version("a", "1")).unwrap(), b"component");
        assert_eq!(state.standing("a").proven.len(), KEPT);
        // The manifest is the one of last time, and there may be none any more.
        assert_eq!(fs::read(state.manifest("a", "1")).unwrap(), b"fallback = 'next'");
        state.keep("a", &version("1", Some("fallback = 'reject'"))).unwrap();
        assert_eq!(fs::read(state.manifest("a", "1")).unwrap(), b"fallback = 'reject'");
        state.keep("a", &version("1", None)).unwrap();
        assert!(!state.manifest("a", "1").exists() && state.version("a", "1").exists());
    }
}
