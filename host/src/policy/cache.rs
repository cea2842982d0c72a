//! Compiled code on disk, so that a component is compiled once for each runtime and not once for each start:
//! Python's takes seven seconds.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::models::hex;

/// Most bytes kept; the oldest entries go first.
const MAX_BYTES: u64 = 1 << 30;

/// A folder of compiled components. An entry is named `<component's SHA-256>-<runtime>-<its own SHA-256>.cwasm`:
/// a lookup knows the first two parts, and the third proves that the file is what was written.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Opens a folder that only this user may enter, and makes it where it is missing.
    ///
    /// # Errors
    /// When it cannot be made or belongs to someone else: code is executed from it.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        private(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The compiled code of the component with this hash, if an earlier run left it whole.
    pub(super) fn get(&self, engine: &Engine, hash: &str) -> Option<Component> {
        let prefix = prefix(engine, hash);
        for entry in fs::read_dir(&self.dir).ok()?.flatten() {
            let name = entry.file_name();
            let Some(sum) = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".cwasm"))
            else {
                continue;
            };
            let code = fs::read(entry.path()).ok()?;
            if hex(&Sha256::digest(&code)) == sum
                && let Ok(component) = deserialize(engine, &code)
            {
                return Some(component);
            }
            tracing::warn!(target: "policy", file = ?entry.path(), "a damaged cache entry is compiled anew");
            drop(fs::remove_file(entry.path()));
        }
        None
    }

    /// Keeps a component's compiled code. A file is whole or not there.
    ///
    /// # Errors
    /// When it cannot be written; the cache is as it was.
    pub(super) fn put(&self, engine: &Engine, hash: &str, component: &Component) -> io::Result<()> {
        let code = component.serialize().map_err(io::Error::other)?;
        self.make_room(code.len() as u64)?;
        let mut file = tempfile::NamedTempFile::new_in(&self.dir)?;
        file.write_all(&code)?;
        let name = format!("{}{}.cwasm", prefix(engine, hash), hex(&Sha256::digest(&code)));
        file.persist(self.dir.join(name))?;
        Ok(())
    }

    fn make_room(&self, wanted: u64) -> io::Result<()> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(&self.dir)?.flatten() {
            // Gone since it was listed: someone else has just renamed a file of theirs, or made room.
            let Some(metadata) = there(entry.metadata())? else { continue };
            entries.push((metadata.modified()?, metadata.len(), entry.path()));
        }
        let mut total: u64 = wanted + entries.iter().map(|(_, bytes, _)| bytes).sum::<u64>();
        entries.sort();
        for (_, bytes, path) in entries {
            if total <= MAX_BYTES {
                break;
            }
            there(fs::remove_file(path))?;
            total -= bytes;
        }
        Ok(())
    }
}

/// Nothing for a file that is not there.
fn there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[allow(unsafe_code, reason = "compiled code is loaded in this one place")]
fn deserialize(engine: &Engine, code: &[u8]) -> wasmtime::Result<Component> {
    // SAFETY: `code` must be what `Component::serialize` gave. It comes from a folder that only this user may
    // write, hashes to the name that `put` gave it, and was read into memory, so that it cannot change after the
    // check. Wasmtime itself refuses code of another version or configuration.
    unsafe { Component::deserialize(engine, code) }
}

/// What an entry's name begins with. The runtime's part is of its version, settings and the processor's features.
fn prefix(engine: &Engine, hash: &str) -> String {
    let mut runtime = DefaultHasher::new();
    engine.precompile_compatibility_hash().hash(&mut runtime);
    format!("{hash}-{:016x}-", runtime.finish())
}

#[cfg(unix)]
fn private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let me = rustix::process::geteuid().as_raw();
    let owner = fs::metadata(dir)?.uid();
    if owner != me {
        let message = format!("{} belongs to user {owner}, this server runs as {me}", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))
}

#[cfg(not(unix))]
fn private(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "(component)";

    fn entries(dir: &Path) -> Vec<PathBuf> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn an_entry_is_found_and_a_damaged_one_is_not_run() {
        let dir = tempfile::tempdir().unwrap();
        let (engine, cache) = (Engine::default(), Cache::open(dir.path()).unwrap());
        let component = Component::new(&engine, EMPTY).unwrap();
        assert!(cache.get(&engine, "00").is_none());
        cache.put(&engine, "00", &component).unwrap();
        assert!(cache.get(&engine, "00").is_some());
        assert!(cache.get(&engine, "01").is_none());

        let [path] = entries(dir.path()).try_into().unwrap();
        let mut code = fs::read(&path).unwrap();
        let last = code.len() - 1;
        code[last] ^= 1;
        fs::write(&path, &code).unwrap();
        assert!(cache.get(&engine, "00").is_none(), "one wrong bit");
        assert!(entries(dir.path()).is_empty(), "and it is gone");

        cache.put(&engine, "00", &component).unwrap();
        let [path] = entries(dir.path()).try_into().unwrap();
        fs::write(&path, b"").unwrap();
        assert!(cache.get(&engine, "00").is_none(), "empty");
    }

    #[test]
    fn policies_that_load_at_once_all_leave_their_code() {
        let dir = tempfile::tempdir().unwrap();
        let (engine, cache) = (Engine::default(), Cache::open(dir.path()).unwrap());
        let component = Component::new(&engine, EMPTY).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (engine, cache, component) = (&engine, &cache, &component);
                scope.spawn(move || {
                    for n in 0..50 {
                        cache.put(engine, &format!("{thread}{n:02}"), component).unwrap();
                    }
                });
            }
        });
        assert_eq!(entries(dir.path()).len(), 200);
    }

    #[cfg(unix)]
    #[test]
    fn the_folder_is_closed_to_others() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er");
        Cache::open(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
