//! What outlives the server, in a folder of its own: what policies store, and which version of each has proven
//! itself. Written before a call returns, so that an end by force loses nothing that was acknowledged; a loss of
//! power may lose the last second.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use serde::{Deserialize, Serialize};

use super::runtime::StartError;

/// Versions of a policy that are kept for a way back.
const KEPT: usize = 5;

/// The folder, open. One server has it at a time.
pub(super) struct StateDir {
    dir: PathBuf,
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
    /// A version that was taken back: it is not served until another file takes its place or it is enabled.
    pub(super) withdrawn: Option<String>,
    /// The policy is switched off.
    pub(super) disabled: bool,
}

impl StateDir {
    /// Opens a folder, and makes it where it is missing.
    ///
    /// # Errors
    /// When it cannot be read or written, or another server has it.
    pub(super) fn open(dir: &Path) -> Result<Self, StartError> {
        let broken = |cause: String| StartError::State { dir: dir.to_owned(), cause };
        fs::create_dir_all(dir.join("versions")).map_err(|error| broken(error.to_string()))?;
        let database = Database::builder(dir.join("database"));
        // Small values and few of them: the least that the library takes.
        let database =
            database.cache_size(1 << 20).worker_threads(1).open().map_err(|error| match error {
                fjall::Error::Locked => broken("another server has it; name another with --state".to_owned()),
                error => broken(error.to_string()),
            })?;
        let keyspace = |name| database.keyspace(name, KeyspaceCreateOptions::default);
        let store = keyspace("store").map_err(|error| broken(error.to_string()))?;
        let standing = keyspace("standing").map_err(|error| broken(error.to_string()))?;
        Ok(Self { dir: dir.to_owned(), database, store, standing })
    }

    /// What a policy stored: keys and values as [`Self::put`] took them.
    pub(super) fn stored(&self, policy: &str) -> Vec<(String, Vec<u8>)> {
        let prefix = key(policy, "");
        let mut stored = Vec::new();
        for entry in self.store.prefix(&prefix) {
            match entry.into_inner() {
                Ok((name, value)) => {
                    if let Ok(name) = std::str::from_utf8(&name[prefix.len()..]) {
                        stored.push((name.to_owned(), value.to_vec()));
                    }
                }
                Err(error) => {
                    tracing::error!(target: "policy", policy, %error, "a stored value cannot be read");
                }
            }
        }
        stored
    }

    /// Writes a value.
    pub(super) fn put(&self, policy: &str, name: &str, value: &[u8]) -> Result<(), String> {
        self.store.insert(key(policy, name), value).map_err(|error| error.to_string())
    }

    /// Removes a value.
    pub(super) fn forget(&self, policy: &str, name: &str) -> Result<(), String> {
        self.store.remove(key(policy, name)).map_err(|error| error.to_string())
    }

    /// What is remembered of a policy.
    pub(super) fn standing(&self, policy: &str) -> Standing {
        match self.standing.get(policy) {
            Ok(Some(json)) => serde_json::from_slice(&json).unwrap_or_default(),
            Ok(None) => Standing::default(),
            Err(error) => {
                tracing::error!(target: "policy", policy, %error, "its standing cannot be read");
                Standing::default()
            }
        }
    }

    /// Changes what is remembered of a policy, on the disk before this returns.
    pub(super) fn remember(
        &self,
        policy: &str,
        change: impl FnOnce(&mut Standing),
    ) -> Result<Standing, String> {
        let mut standing = self.standing(policy);
        change(&mut standing);
        let forgotten = standing.proven.len().saturating_sub(KEPT);
        let forgotten: Vec<String> = standing.proven.drain(..forgotten).collect();
        let json = serde_json::to_vec(&standing).map_err(|error| error.to_string())?;
        self.standing.insert(policy, json).map_err(|error| error.to_string())?;
        self.database.persist(PersistMode::SyncAll).map_err(|error| error.to_string())?;
        for hash in forgotten {
            // A file that is left behind costs room and nothing else.
            drop(fs::remove_file(self.version(policy, &hash)));
        }
        Ok(standing)
    }

    /// Where a version's component is kept.
    pub(super) fn version(&self, policy: &str, hash: &str) -> PathBuf {
        self.dir.join("versions").join(policy).join(format!("{hash}.wasm"))
    }

    /// Keeps a version's component. It is whole or not there.
    pub(super) fn keep(&self, policy: &str, hash: &str, component: &[u8]) -> io::Result<()> {
        let path = self.version(policy, hash);
        if path.exists() {
            return Ok(());
        }
        let folder = path.parent().unwrap_or(&self.dir);
        fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        io::Write::write_all(&mut file, component)?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        if let Err(error) = self.database.persist(PersistMode::SyncAll) {
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
        for hash in 0..=KEPT {
            state.keep("a", &hash.to_string(), b"component").unwrap();
            state.remember("a", |standing| standing.proven.push(hash.to_string())).unwrap();
        }
        assert!(!state.version("a", "0").exists());
        assert_eq!(fs::read(state.version("a", "1")).unwrap(), b"component");
        assert_eq!(state.standing("a").proven.len(), KEPT);
    }
}
