//! Which versions of policies have proven themselves, in memory and on the disk where the server has a folder for its
//! state.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::state_dir::{Kept, Standing, StateDir};

/// The standings of all policies.
#[derive(Default)]
pub(super) struct Standings {
    /// None keeps everything in memory.
    pub(super) disk: Option<Arc<StateDir>>,
    memory: Mutex<HashMap<String, Standing>>,
}

impl Standings {
    pub(super) fn new(disk: Option<Arc<StateDir>>) -> Self {
        Self { disk, memory: Mutex::default() }
    }

    /// What is remembered of a policy.
    pub(super) fn of(&self, policy: &str) -> Standing {
        match &self.disk {
            Some(disk) => disk.standing(policy),
            None => {
                let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
                memory.get(policy).cloned().unwrap_or_default()
            }
        }
    }

    /// Changes what is remembered, on the disk before this returns.
    ///
    /// # Errors
    /// When the disk does not take it.
    pub(super) async fn remember(
        &self,
        policy: &str,
        change: impl FnOnce(&mut Standing) + Send + 'static,
    ) -> Result<(), String> {
        let Some(disk) = self.disk.clone() else {
            let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
            let standing = memory.entry(policy.to_owned()).or_default();
            change(standing);
            standing.bound();
            return Ok(());
        };
        let policy = policy.to_owned();
        let written = tokio::task::spawn_blocking(move || disk.remember(&policy, change));
        written.await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// As [`Self::remember`], where a failure changes nothing but the log: what was done holds until a restart.
    pub(super) async fn note(&self, policy: &str, change: impl FnOnce(&mut Standing) + Send + 'static) {
        if let Err(error) = self.remember(policy, change).await {
            tracing::error!(target: "policy", policy, error, "not remembered: a restart will not know of it");
        }
    }

    /// Keeps a version for a way back. A failure is logged.
    pub(super) async fn keep(&self, policy: &str, version: Kept) {
        let Some(disk) = self.disk.clone() else { return };
        let name = policy.to_owned();
        let kept = tokio::task::spawn_blocking(move || disk.keep(&name, &version)).await;
        let error = match kept {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::warn!(target: "policy", policy, error, "the version is not kept for a way back");
    }

    /// Where a version's component is kept.
    pub(super) fn version(&self, policy: &str, hash: &str) -> Option<PathBuf> {
        Some(self.disk.as_ref()?.version(policy, hash)).filter(|path| path.exists())
    }

    /// Where the manifest that a version had last is kept, if it had one.
    pub(super) fn manifest(&self, policy: &str, hash: &str) -> Option<PathBuf> {
        Some(self.disk.as_ref()?.manifest(policy, hash)).filter(|path| path.exists())
    }
}
