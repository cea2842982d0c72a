//! What operators do to policies besides dropping files.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::entry::Entry;
use super::loader::{self, LoadCode, LoadError};
use super::manifest::Manifest;
use super::publish::{blocking, read_manifest};
use super::registry::Candidate;
use super::state_dir::Standing;
use super::status::PolicyStatus;
use super::watch::MANIFEST;
use super::{Policies, Shared, is_policy_name};

/// Why a policy was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// There is no policy of that name.
    #[error("no policy {0:?}")]
    Unknown(String),
    /// The name cannot be a policy's.
    #[error("{0:?} cannot be a policy's name: 1 to 64 of a-z, 0-9, - and _, a letter or digit first")]
    Name(String),
    /// The component or manifest was refused; nothing changed.
    #[error(transparent)]
    Refused(#[from] LoadError),
    /// It cannot be done as things stand.
    #[error("{0}")]
    Conflict(String),
    /// The disk does not take it.
    #[error("cannot write {path}: {error}")]
    Disk {
        /// What was to be written.
        path: String,
        /// The system's reason.
        error: String,
    },
}

impl Policies {
    /// Takes a component as a new version: checked first, then written to the directory as a file that is dropped
    /// there would be, and served.
    ///
    /// # Errors
    /// When it is refused or cannot be written: what was there stays.
    pub async fn upload(&self, name: &str, component: Bytes) -> Result<PolicyStatus, ChangeError> {
        named(name)?;
        let shared = &self.shared;
        let beside = shared.options.dir.join(format!("{name}{MANIFEST}"));
        let most = shared.options.max_file;
        let bytes = component.clone();
        let source = blocking(move || {
            let mut source = loader::source(bytes, most)?;
            source.manifest = read_manifest(&beside, &source.bytes)?;
            Ok(source)
        });
        let source = source.await?;
        let hash = source.hash.clone();
        shared.check(name, &Entry::apart(0), source).await?;
        self.write(&format!("{name}.wasm"), component).await?;
        // Uploaded on purpose: a version that was taken back before may serve again.
        self.remember(name, move |standing| standing.allow(&hash)).await?;
        shared.load(name).await?;
        self.status(name)
    }

    /// Takes a policy's manifest: checked first, then written beside its component. It may come before its component,
    /// or pin the next one: then it waits for it, and nothing is returned.
    ///
    /// # Errors
    /// When it cannot be read, does not fit the component, or cannot be written: what was there stays.
    pub async fn describe(&self, name: &str, manifest: Bytes) -> Result<Option<PolicyStatus>, ChangeError> {
        named(name)?;
        let shared = &self.shared;
        let bytes = manifest.clone();
        // Thousands of examples take a while to read.
        let read = blocking(move || {
            let refused = |message: String| LoadError::new(LoadCode::Manifest, message);
            let text = std::str::from_utf8(&bytes).map_err(|error| refused(error.to_string()))?;
            Manifest::parse(text).map_err(|error| refused(error.to_string()))
        });
        let read = read.await?;
        // Also one that waits: it names the component that it waits for.
        shared.options.signers.judge(name, Some(&read))?;
        let path = shared.options.dir.join(format!("{name}.wasm"));
        let mut waits = !path.exists();
        if !waits {
            let most = shared.options.max_file;
            let mut source = blocking(move || loader::read(&path, most)).await?;
            source.manifest = Some(read);
            waits = source.check_pin().is_err();
            if !waits {
                shared.check(name, &Entry::apart(0), source).await?;
            }
        }
        self.write(&format!("{name}{MANIFEST}"), manifest.clone()).await?;
        if waits {
            return Ok(None);
        }
        self.load(name).await?;
        self.status(name).map(Some)
    }

    /// Takes a policy's component and manifest out of the directory. What it stored stays.
    ///
    /// # Errors
    /// When there is none, or the files cannot be removed.
    pub async fn remove(&self, name: &str) -> Result<(), ChangeError> {
        let entry = self.known(name)?;
        let _turn = entry.turn.lock().await;
        for file in [format!("{name}.wasm"), format!("{name}{MANIFEST}")] {
            let path = self.shared.options.dir.join(&file);
            match tokio::fs::remove_file(&path).await {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(ChangeError::Disk { path: file, error: error.to_string() });
                }
                _ => {}
            }
        }
        self.shared.registry.remove(name);
        self.remember(name, |standing| *standing = Standing::default()).await?;
        tracing::info!(target: "policy", policy = name, "removed");
        Ok(())
    }

    /// Switches a policy off, over restarts too; its file stays.
    ///
    /// # Errors
    /// When there is none, or that cannot be written down.
    pub async fn disable(&self, name: &str) -> Result<PolicyStatus, ChangeError> {
        let entry = self.known(name)?;
        let _turn = entry.turn.lock().await;
        self.remember(name, |standing| standing.disabled = true).await?;
        self.shared.registry.disable(name, &entry);
        tracing::info!(target: "policy", policy = name, "disabled");
        self.status(name)
    }

    /// Switches a policy on again.
    ///
    /// # Errors
    /// When there is none, that cannot be written down, or its file is refused.
    pub async fn enable(&self, name: &str) -> Result<PolicyStatus, ChangeError> {
        self.known(name)?;
        self.remember(name, |standing| standing.disabled = false).await?;
        self.load(name).await?;
        self.status(name)
    }

    /// Lets the version on trial serve every session.
    ///
    /// # Errors
    /// When none is on trial.
    pub async fn promote(&self, name: &str) -> Result<PolicyStatus, ChangeError> {
        self.known(name)?;
        if !self.shared.promote(name, None).await {
            return Err(ChangeError::Conflict(format!("no version of {name} is on trial")));
        }
        self.status(name)
    }

    /// Takes back the version on trial; where none is, the version that serves, for the one before it.
    ///
    /// # Errors
    /// When there is no earlier version.
    pub async fn roll_back(&self, name: &str) -> Result<PolicyStatus, ChangeError> {
        let entry = self.known(name)?;
        if self.shared.withdraw(name, None, "by an operator").await {
            return self.status(name);
        }
        let _turn = entry.turn.lock().await;
        let Some(now) = self.shared.registry.current(name) else {
            return Err(ChangeError::Conflict(format!("no version of {name} is served")));
        };
        let standing = self.shared.standings.of(name);
        let before = standing.proven.iter().rev().find(|hash| **hash != now.hash).cloned();
        let Some(before) = before.filter(|hash| self.shared.standings.version(name, hash).is_some()) else {
            let message = format!("no version of {name} before {} is kept", now.version());
            return Err(ChangeError::Conflict(message));
        };
        let withdrawn = now.hash.clone();
        // Remembered first: should the server end here, it comes up as it was asked to be.
        self.remember(name, move |standing| standing.withdraw(&withdrawn)).await?;
        if let Err(error) = self.shared.serve_kept(name, &entry, Some(&before)).await {
            let still = now.hash.clone();
            self.remember(name, move |standing| standing.prove(&still)).await?;
            return Err(error.into());
        }
        self.shared.make_ready(name);
        tracing::warn!(target: "policy", policy = name, from = now.version(), "rolled back by an operator");
        let message = format!("version {} was rolled back: by an operator", now.version());
        self.shared.registry.fail(&entry, &LoadError::new(LoadCode::Withdrawn, message));
        self.status(name)
    }

    /// Carries out a change to its end, though whoever asked for it may leave.
    pub(crate) async fn to_the_end<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T, ChangeError>> + Send + 'static,
    ) -> Result<T, ChangeError> {
        match self.shared.tasks.spawn(change).await {
            Ok(done) => done,
            Err(error) => Err(ChangeError::Conflict(format!("the change broke off: {error}"))),
        }
    }

    /// Loads a policy's file. One that was taken back is not served, and is no failure: an earlier one is.
    async fn load(&self, name: &str) -> Result<(), ChangeError> {
        match self.shared.load(name).await {
            Err(error) if error.code != LoadCode::Withdrawn => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn known(&self, name: &str) -> Result<Arc<Entry>, ChangeError> {
        let known = self.get(name).and_then(|_| self.shared.registry.entry(name));
        known.ok_or_else(|| ChangeError::Unknown(name.to_owned()))
    }

    fn status(&self, name: &str) -> Result<PolicyStatus, ChangeError> {
        self.get(name).ok_or_else(|| ChangeError::Unknown(name.to_owned()))
    }

    async fn remember(
        &self,
        name: &str,
        change: impl FnOnce(&mut Standing) + Send + 'static,
    ) -> Result<(), ChangeError> {
        let written = self.shared.standings.remember(name, change).await;
        written.map_err(|error| ChangeError::Disk { path: "the server's state".to_owned(), error })
    }

    /// Writes a file of the directory. It is the old one or the new one, whole.
    async fn write(&self, file: &str, bytes: Bytes) -> Result<(), ChangeError> {
        let path = self.shared.options.dir.join(file);
        let written = tokio::task::spawn_blocking(move || replace(&path, &bytes)).await;
        let failed = |error: String| ChangeError::Disk { path: file.to_owned(), error };
        written.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))
    }
}

impl Shared {
    /// The version on trial serves every session from now on. Returns whether there was one.
    pub(super) async fn promote(&self, name: &str, trial: Option<&Candidate>) -> bool {
        let Some(version) = self.registry.promote(name, trial) else { return false };
        tracing::info!(target: "policy", policy = name, version = version.version(), "promoted");
        let hash = version.hash.clone();
        self.standings.note(name, move |standing| standing.prove(&hash)).await;
        true
    }

    /// The version on trial serves no session from now on, nor after a restart. Returns whether there was one.
    pub(super) async fn withdraw(&self, name: &str, trial: Option<&Candidate>, why: &str) -> bool {
        let Some(version) = self.registry.withdraw(name, trial) else { return false };
        tracing::warn!(target: "policy", policy = name, version = version.version(), why, "rolled back");
        let message = format!("version {} was rolled back: {why}", version.version());
        self.registry.fail(&version.entry, &LoadError::new(LoadCode::Withdrawn, message));
        let hash = version.hash.clone();
        self.standings.note(name, move |standing| standing.withdraw(&hash)).await;
        true
    }
}

fn named(name: &str) -> Result<(), ChangeError> {
    if is_policy_name(name) { Ok(()) } else { Err(ChangeError::Name(name.to_owned())) }
}

/// Writes beside the target, brings it to the disk, and renames.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::Builder::new().prefix(".forkpoint-").tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}
