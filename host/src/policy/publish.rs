//! From a file that came to rest to a version that serves: read, checked, compiled, tried, published or put on trial.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::canary;
use super::capabilities::Capabilities;
use super::entry::Entry;
use super::fault::{Fault, FaultKind};
use super::guest::Place;
use super::instance;
use super::loader::{self, LoadCode, LoadError, Source};
use super::manifest::{Canary, MAX_MANIFEST, Manifest};
use super::plan::Allowed;
use super::registry::{self, Published};
use super::run::{self, Patience};
use super::settings::{Fallback, PolicySettings};
use super::state_dir::Kept;
use super::store::KeyValue;
use super::waiting::WaitingPart;
use super::watch::{Change, MANIFEST, PROBES};
use super::{CANARY_WALL, Shared};
use crate::probe::shipped::Origin;

/// What a load came to.
enum Loaded {
    /// A version that is new.
    New(Published),
    /// One that is served or tried already, with what may have changed beside it.
    Same(Published),
}

impl Shared {
    /// Brings a policy's file to service, or says in its status why not. What is served stays so when any step fails.
    pub(super) async fn load(&self, name: &str) -> Result<(), LoadError> {
        let entry = self.registry.begin(name, || match &self.standings.disk {
            Some(state) => KeyValue::open(state.clone(), name),
            None => KeyValue::new(0),
        });
        let _turn = entry.turn.lock().await;
        let outcome = self.load_file(name, &entry).await;
        self.make_ready(name);
        let error = match outcome {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let served = self.registry.current(name).map(|version| version.version().to_owned());
        tracing::warn!(target: "policy", policy = name, %error, still_serving = served, "not loaded");
        self.registry.fail(&entry, &error);
        Err(error)
    }

    async fn load_file(&self, name: &str, entry: &Arc<Entry>) -> Result<(), LoadError> {
        let standing = self.standings.of(name);
        let source = self.read(name, self.options.dir.join(format!("{name}.wasm"))).await;
        self.remember_fallback(name, entry, &source).await;
        if standing.disabled {
            self.registry.disable(name, entry);
            return Ok(());
        }
        let source = source?;
        let settings = Arc::new(self.settings_of(name, &source)?);
        if standing.withdrawn.contains(&source.hash) {
            match self.registry.current(name) {
                // A manifest that pins the other component says nothing of this one.
                Some(now) if loader::check_pin(&now.hash, source.manifest.as_ref()).is_ok() => {
                    self.registry.refresh(name, &settings);
                }
                Some(_) => {}
                None => self.serve_kept(name, entry, standing.proven.last()).await?,
            }
            let version = source.version();
            let message = format!("version {version} was rolled back; another file or an upload replaces it");
            return Err(LoadError::new(LoadCode::Withdrawn, message));
        }
        let kept = Kept::of(&source);
        let version = match self.prepare(name, entry, source, settings.clone()).await? {
            Loaded::Same(version) => {
                self.standings.keep(name, kept).await;
                return self.keep(name, entry, version, settings.canary).await;
            }
            Loaded::New(version) => version,
        };
        let hash = version.hash.clone();
        self.standings.keep(name, kept).await;
        let before = standing.proven.last().filter(|proven| **proven != hash);
        if let (Some(_), None, Some(before)) = (settings.canary, self.registry.current(name), before)
            && let Err(error) = self.serve_kept(name, entry, Some(before)).await
        {
            // The server was started in the middle of a trial.
            tracing::warn!(target: "policy", policy = name, %error, "no earlier version to try beside");
        }
        match settings.canary.filter(|_| self.registry.current(name).is_some()) {
            Some(canary) => {
                let (version_name, share) = (version.version().to_owned(), canary.share.get());
                tracing::info!(target: "policy", policy = name, version = version_name, share, "on trial");
                self.registry.try_out(version, canary);
                self.standings.note(name, move |standing| standing.tried = Some(hash)).await;
            }
            None => {
                tracing::info!(target: "policy", policy = name, version = version.version(), "serving");
                self.registry.publish(version);
                self.standings.note(name, move |standing| standing.prove(&hash)).await;
            }
        }
        Ok(())
    }

    /// Takes up what may have changed beside a version that is served or tried already.
    async fn keep(
        &self,
        name: &str,
        entry: &Arc<Entry>,
        version: Published,
        canary: Option<Canary>,
    ) -> Result<(), LoadError> {
        let hash = version.hash.clone();
        match canary {
            _ if self.registry.current(name).is_some_and(|now| now.hash == hash) => {
                self.registry.keep(entry, &version);
                if self.standings.of(name).tried.is_some() {
                    self.standings.note(name, |standing| standing.tried = None).await;
                }
            }
            Some(canary) => self.registry.keep_trying(entry, &version, canary),
            // The trial was called off in its favour.
            None => {
                self.registry.publish(version);
                self.standings.note(name, move |standing| standing.prove(&hash)).await;
            }
        }
        Ok(())
    }

    /// What requests get while no version serves: what the manifest says, or the operator; where the manifest cannot
    /// be read, or its signature is not good, nobody knows what the policy was there to keep out, and requests are
    /// refused.
    async fn remember_fallback(&self, name: &str, entry: &Entry, source: &Result<Source, LoadError>) {
        let alone;
        let manifest = match source {
            Ok(source) => Ok(source.manifest.as_ref()),
            Err(error) if error.code == LoadCode::Manifest => Err(error.clone()),
            Err(error) => {
                // The component cannot be read; its manifest may be.
                let beside = self.options.dir.join(format!("{name}{MANIFEST}"));
                alone = blocking(move || read_manifest(&beside, &[])).await;
                match &alone {
                    Ok(Some(manifest)) => Ok(Some(manifest)),
                    Ok(None) => Err(error.clone()),
                    Err(error) => Err(error.clone()),
                }
            }
        };
        let judged = |manifest| self.options.signers.judge(name, manifest).map(|_| manifest);
        match manifest.and_then(judged) {
            Ok(manifest) => entry.fall_back_to(self.options.settings_of(name, manifest).fallback),
            Err(LoadError { code: LoadCode::Manifest | LoadCode::Signature, .. })
                if entry.fallback().is_none() =>
            {
                let said = self.options.rules.get(name).and_then(|rules| rules.fallback);
                entry.fall_back_to(said.or(self.options.defaults.fallback).unwrap_or(Fallback::Reject));
            }
            Err(_) => {}
        }
    }

    /// Serves a version that was kept, with the manifest of now; where that pins another, with the one that was kept.
    pub(super) async fn serve_kept(
        &self,
        name: &str,
        entry: &Arc<Entry>,
        hash: Option<&String>,
    ) -> Result<(), LoadError> {
        let gone = || LoadError::new(LoadCode::Unreadable, "no earlier version is kept");
        let hash = hash.ok_or_else(gone)?;
        let path = self.standings.version(name, hash).ok_or_else(gone)?;
        let mut source = self.read(name, path).await?;
        if source.hash != *hash {
            return Err(LoadError::new(LoadCode::Unreadable, "the version that was kept is damaged"));
        }
        if source.check_pin().is_err()
            && let Some(beside) = self.standings.manifest(name, hash)
        {
            let bytes = source.bytes.clone();
            source.manifest = blocking(move || read_manifest(&beside, &bytes)).await?;
        }
        let settings = Arc::new(self.settings_of(name, &source)?);
        match self.prepare(name, entry, source, settings).await? {
            Loaded::Same(version) | Loaded::New(version) => self.registry.publish(version),
        }
        Ok(())
    }

    /// Makes an instance of each version that serves, where there is none for the next call.
    pub(super) fn make_ready(&self, name: &str) {
        for version in self.registry.versions(name) {
            instance::begin(&self.runtime, &version);
        }
    }

    /// A component, and the manifest of its policy: from beside it in the plugins folder, or from inside.
    async fn read(&self, name: &str, path: PathBuf) -> Result<Source, LoadError> {
        let beside = self.options.dir.join(format!("{name}{MANIFEST}"));
        let most = self.options.max_file;
        blocking(move || {
            let mut source = loader::read(&path, most)?;
            source.manifest = read_manifest(&beside, &source.bytes)?;
            Ok(source)
        })
        .await
    }

    /// What holds for a component with its manifest.
    fn settings_of(&self, name: &str, source: &Source) -> Result<PolicySettings, LoadError> {
        source.check_pin()?;
        let manifest = source.manifest.as_ref();
        let signed_by = self.options.signers.judge(name, manifest)?;
        let settings = PolicySettings { signed_by, ..self.options.settings_of(name, manifest) };
        if !settings.refused.is_empty() {
            let refused = settings.refused.join("; ");
            tracing::debug!(target: "policy", policy = name, "asks for more than it is granted: {refused}");
        }
        Ok(settings)
    }

    /// Whether a component with its manifest could serve; nothing is changed.
    pub(super) async fn check(
        &self,
        name: &str,
        apart: &Arc<Entry>,
        source: Source,
    ) -> Result<(), LoadError> {
        let settings = Arc::new(self.settings_of(name, &source)?);
        self.prepare(name, apart, source, settings).await.map(drop)
    }

    /// Compiles a component and tries it with the canary call, unless its very version is there already.
    async fn prepare(
        &self,
        name: &str,
        entry: &Arc<Entry>,
        source: Source,
        settings: Arc<PolicySettings>,
    ) -> Result<Loaded, LoadError> {
        let there = [self.registry.current(name), self.registry.candidate(name).map(|tried| tried.version)];
        let probes = match &self.shelf {
            Some(shelf) => {
                let folder = self.options.dir.join(format!("{name}{PROBES}"));
                let origin = Origin::new(folder, source.manifest.as_ref());
                let before = there[0].as_ref().and_then(|now| now.probes.clone()).unwrap_or_default();
                Some(Arc::new(shelf.load(name, origin, &before).await))
            }
            None => None,
        };
        if let Some(same) = there.into_iter().flatten().find(|version| version.hash == source.hash) {
            check_contract(source.manifest.as_ref(), &same.contract)?;
            return Ok(Loaded::Same(Published { settings, probes, ..Published::clone(&same) }));
        }
        let _permit = self.compilers.acquire().await;
        let (hash, bytes) = (source.hash.clone(), source.bytes.len() as u64);
        let (linker, cache) = (self.runtime.linker.clone(), self.cache.clone());
        let manifest = source.manifest.clone();
        let linked = blocking(move || loader::link(linker, cache.as_ref(), &source)).await?;
        check_contract(manifest.as_ref(), &linked.contract)?;
        let version = Published {
            name: name.into(),
            hash,
            contract: linked.contract,
            bytes,
            loaded_at: registry::now(),
            pre: linked.pre,
            settings,
            probes,
            entry: entry.clone(),
            warm: WaitingPart::new(&self.runtime.warm),
            ready: Some(WaitingPart::new(&self.runtime.ready)),
            late: Arc::default(),
        };
        self.try_out(&version).await?;
        Ok(Loaded::New(version))
    }

    /// The canary call. Which plan a policy makes of it does not matter, nor that it makes none; that it survives
    /// does, and that the plan is one that some server could carry out.
    async fn try_out(&self, version: &Published) -> Result<(), LoadError> {
        let request = canary::request();
        let wall = CANARY_WALL.min(version.settings.limits.wall());
        let patience = Patience { queue: self.options.queue_wait, wall };
        let place = Place::Offline(canary::session());
        // It may do everything, and leaves nothing behind that requests see.
        let settings = PolicySettings {
            capabilities: Capabilities::all(),
            stateless: false,
            ..PolicySettings::clone(&version.settings)
        };
        let entry = Entry::apart(settings.limits.store_bytes);
        let apart = Published { entry, settings: Arc::new(settings), ready: None, ..version.clone() };
        let apart = Arc::new(apart);
        let allowed = Allowed { names: None, capabilities: &apart.settings.capabilities, request: &request };
        let conversation = super::chain::conversation_hash(&request);
        let called = run::call(&self.runtime, &apart, &allowed, conversation, place, patience).await;
        match called.step.fault {
            Some(Fault { kind: FaultKind::Error, message }) => {
                tracing::debug!(target: "policy", policy = &*version.name, message, "the canary got an error");
                Ok(())
            }
            Some(fault) => {
                let message = format!("the canary call ended with {fault}");
                Err(LoadError::new(LoadCode::Canary, message))
            }
            None => Ok(()),
        }
    }
}

/// The manifest beside a component, or inside it.
pub(super) fn read_manifest(beside: &Path, component: &[u8]) -> Result<Option<Manifest>, LoadError> {
    let refused = |error: String| LoadError::new(LoadCode::Manifest, error);
    let name = beside.file_name().unwrap_or_default().to_string_lossy();
    let read = match std::fs::metadata(beside) {
        // Also where something else lies in the folder's place.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Manifest::embedded(component)
                .transpose()
                .map_err(|error| refused(format!("in its section {}: {error}", super::MANIFEST_SECTION)));
        }
        Err(error) => Err(error),
        Ok(metadata) if metadata.len() > MAX_MANIFEST => {
            return Err(refused(format!("{name} has {} bytes, the most is {MAX_MANIFEST}", metadata.len())));
        }
        Ok(_) => std::fs::read_to_string(beside),
    };
    let text = read.map_err(|error| refused(format!("{name}: {error}")))?;
    Manifest::parse(&text).map(Some).map_err(|error| refused(format!("{name}: {error}")))
}

/// Whether a manifest names the contract that its component was built against: `0.1` stands for every 0.1.x that is
/// no trial.
pub(super) fn check_contract(manifest: Option<&Manifest>, built: &str) -> Result<(), LoadError> {
    let Some(named) = manifest.and_then(|manifest| manifest.contract.as_deref()) else { return Ok(()) };
    let covers = |rest: &str| rest.starts_with('.') && !rest.contains('-');
    if built == named || built.strip_prefix(named).is_some_and(covers) {
        return Ok(());
    }
    let message = format!("the manifest names the contract {named}, the component was built against {built}");
    Err(LoadError::new(LoadCode::WrongWorld, message))
}

/// Runs what blocks on a thread for that.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(LoadError::new(LoadCode::Compile, format!("the loader broke off: {error}"))),
    }
}

pub(super) async fn load(shared: Arc<Shared>, name: String) -> String {
    // The error is in the log and in the status.
    let _ = shared.load(&name).await;
    name
}

/// Carries out the watcher's changes: files side by side, the changes of one file in order, until the watcher is
/// gone and the last is done.
pub(super) async fn follow(shared: Arc<Shared>, mut changes: mpsc::UnboundedReceiver<Change>) {
    let mut loads = JoinSet::new();
    let mut names = HashMap::new();
    let mut waiting: HashMap<String, bool> = HashMap::new();
    let mut open = true;
    while open || !loads.is_empty() {
        let change = tokio::select! {
            change = changes.recv(), if open => match change {
                Some(change) if names.values().any(|name| *name == change.name) => {
                    waiting.insert(change.name, change.present);
                    continue;
                }
                Some(change) => change,
                None => {
                    open = false;
                    waiting.clear();
                    continue;
                }
            },
            Some(done) = loads.join_next_with_id(), if !loads.is_empty() => {
                let id = match &done {
                    Ok((id, _)) => *id,
                    Err(error) => error.id(),
                };
                let Some(name) = names.remove(&id) else { continue };
                let Some(present) = waiting.remove(&name) else { continue };
                Change { name, present }
            }
        };
        let task = match change.present {
            true => loads.spawn(load(shared.clone(), change.name.clone())),
            false => loads.spawn(unload(shared.clone(), change.name.clone())),
        };
        names.insert(task.id(), change.name);
    }
}

/// Takes a policy whose file is gone out of service, unless it is there again.
async fn unload(shared: Arc<Shared>, name: String) -> String {
    let Some(entry) = shared.registry.entry(&name) else { return name };
    let _turn = entry.turn.lock().await;
    let path = shared.options.dir.join(format!("{name}.wasm"));
    if !tokio::fs::try_exists(&path).await.unwrap_or(true) && shared.registry.remove(&name) {
        tracing::info!(target: "policy", policy = name, "no longer served");
        // A later file of the name is not tried beside it. What an operator decided stays.
        shared.standings.note(&name, |standing| (standing.proven, standing.tried) = Default::default()).await;
    }
    name
}
