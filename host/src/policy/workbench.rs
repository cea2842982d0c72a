//! One policy without a server: for its author's checks, tests and replays. It runs as it would be served, on the same
//! runtime and within the same bounds, and may do all that its manifest asks for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::cache::Cache;
use super::capabilities::{Grant, Names};
use super::entry::Entry;
use super::guest::Place;
use super::instance;
use super::limits::{Limits, SomeLimits};
use super::loader::{self, LoadCode, LoadError};
use super::manifest::Manifest;
use super::offline::OfflineSession;
use super::opening::Opening;
use super::plan::{Allowed, RouteRequest};
use super::publish::{check_contract, read_manifest};
use super::registry::{self, Published};
use super::run::{self, Patience};
use super::runtime::{Instances, Runtime};
use super::settings::{PolicyRules, PolicySettings, is_policy_name};
use super::signature::Signers;
use super::trace::Step;
use super::waiting::WaitingPart;
use super::watch::{MANIFEST, PROBES};
use crate::probe::shipped::Origin;

/// Most bytes of a component's file.
const MAX_FILE: u64 = 64 << 20;

/// How a component is loaded.
#[derive(Debug, Clone, Default)]
pub struct WorkbenchOptions {
    /// Values over those of the manifest's `[config]`.
    pub config: BTreeMap<String, String>,
    /// Bounds over those of the manifest's `[limits]`.
    pub limits: SomeLimits,
    /// Where compiled code is kept; none compiles anew.
    pub cache: Option<PathBuf>,
    /// Count instructions, which makes calls slower.
    pub metered: bool,
    /// Call one instance again and again, as the host does with one that is stateless.
    pub warm: bool,
    /// Make each call's instance before the call, as the host does.
    pub ready: bool,
    /// Whose signatures count, and whether there must be one.
    pub signers: Signers,
}

/// Why a component cannot be worked on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkbenchError {
    /// It would not be served.
    #[error(transparent)]
    Refused(#[from] LoadError),
    /// WebAssembly cannot run here.
    #[error(transparent)]
    Start(#[from] super::StartError),
}

/// A component, compiled and ready to be called.
pub struct Workbench {
    runtime: Arc<Runtime>,
    version: Arc<Published>,
    imports: Vec<String>,
    compiled: Duration,
    origin: Origin,
}

impl Workbench {
    /// Reads, checks and compiles a component, with the manifest beside it.
    ///
    /// # Errors
    /// What would keep it from being served, but for the canary call.
    pub fn load(path: &Path, options: &WorkbenchOptions) -> Result<Self, WorkbenchError> {
        let mut source = loader::read(path, MAX_FILE)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let beside = path.with_file_name(format!("{name}{MANIFEST}"));
        source.manifest = read_manifest(&beside, &source.bytes)?;
        source.check_pin()?;
        if !is_policy_name(&name) {
            let message = format!("{name:?} cannot be a policy's name: 1 to 64 of a-z, 0-9, - and _");
            return Err(LoadError::new(LoadCode::Unreadable, message).into());
        }
        let signed_by = options.signers.judge(&name, source.manifest.as_ref())?;
        let granted = all_granted(source.manifest.as_ref(), options);
        let settings = PolicySettings { signed_by, stateless: options.warm, ..granted };
        let instances =
            Instances { calls: 1, warm: u32::from(options.warm), ready: u32::from(options.ready) };
        let runtime = Arc::new(Runtime::new(instances, settings.limits.memory(), options.metered)?);
        let cache = options.cache.as_deref().and_then(|dir| Cache::open(dir).ok());
        let start = Instant::now();
        let linked = loader::link(runtime.linker.clone(), cache.as_ref(), &source)?;
        let compiled = start.elapsed();
        check_contract(source.manifest.as_ref(), &linked.contract)?;
        let imports = linked.imports;
        let folder = path.with_file_name(format!("{name}{PROBES}"));
        let origin = Origin::new(folder, source.manifest.as_ref());
        let version = Arc::new(Published {
            name: name.into(),
            hash: source.hash,
            contract: linked.contract,
            bytes: source.bytes.len() as u64,
            loaded_at: registry::now(),
            pre: linked.pre,
            probes: None,
            entry: Entry::apart(settings.limits.store_bytes),
            settings: Arc::new(settings),
            warm: WaitingPart::new(&runtime.warm),
            ready: options.ready.then(|| WaitingPart::new(&runtime.ready)),
            late: Arc::default(),
        });
        Ok(Self { runtime, version, imports, compiled, origin })
    }

    /// The policy's name: the file's, without `.wasm`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.version.name
    }

    /// SHA-256 of the component.
    #[must_use]
    pub fn hash(&self) -> &str {
        &self.version.hash
    }

    /// The version of the contract that it was built against.
    #[must_use]
    pub fn contract(&self) -> &str {
        &self.version.contract
    }

    /// Bytes of the component.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.version.bytes
    }

    /// How long it took to compile, or to find compiled.
    #[must_use]
    pub fn compiled(&self) -> Duration {
        self.compiled
    }

    /// Functions that it imports, such as `forkpoint:policy/engine@0.1.0#decide`.
    #[must_use]
    pub fn imports(&self) -> &[String] {
        &self.imports
    }

    /// What holds for it.
    #[must_use]
    pub fn settings(&self) -> &PolicySettings {
        &self.version.settings
    }

    /// Where its probes come from.
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Empties its store and puts these values there.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn store(&mut self, values: &BTreeMap<String, String>) -> Result<(), String> {
        let entry = Entry::apart(self.version.settings.limits.store_bytes);
        self.version = Arc::new(Published { entry, ..Published::clone(&self.version) });
        let now = SystemTime::now();
        for (key, value) in values {
            let set = self.version.entry.store.set(key, value.clone().into_bytes(), None, now);
            set.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// What its store holds, as text where it is text.
    #[must_use]
    pub fn stored(&self) -> BTreeMap<String, String> {
        let all = self.version.entry.store.all(SystemTime::now());
        all.into_iter().map(|(key, value)| (key, String::from_utf8_lossy(&value).into_owned())).collect()
    }

    /// Calls it on a session without an engine.
    pub async fn call(&self, request: &RouteRequest, session: OfflineSession) -> Step {
        self.run(request, Place::Offline(session)).await
    }

    /// Calls it on a session of an engine.
    pub async fn call_live(&self, request: &RouteRequest, session: impl Into<Opening>) -> Step {
        self.run(request, Place::Engine(session.into())).await
    }

    async fn run(&self, request: &RouteRequest, place: Place) -> Step {
        let patience = Patience { queue: Duration::from_secs(60), wall: self.version.settings.limits.wall() };
        let capabilities = &self.version.settings.capabilities;
        let allowed = Allowed { names: None, capabilities, request };
        let conversation = super::chain::conversation_hash(request);
        run::call(&self.runtime, &self.version, &allowed, conversation, place, patience).await.step
    }

    /// Waits for what earlier calls left to be ended and made. Then an instance is there for the next call, where such are
    /// made ahead, unless one cannot be made: the call tells why.
    pub async fn until_ready(&self) {
        while !self.runtime.background.is_empty() {
            tokio::task::yield_now().await;
        }
        if self.version.ready.as_ref().is_some_and(|ready| ready.count(&self.version) == 0) {
            instance::make(&self.runtime, &self.version).await;
        }
    }

    /// Ends what runs beside the calls.
    pub async fn close(self) {
        self.runtime.stop().await;
    }
}

/// Everything that the manifest asks for is granted: what an operator would say is not known here.
fn all_granted(manifest: Option<&Manifest>, options: &WorkbenchOptions) -> PolicySettings {
    let grant = Grant { headers: Some(Names::All), ..Grant::default() };
    let (config, limits) = (options.config.clone(), options.limits);
    let own = PolicyRules { grant, config, limits, ..PolicyRules::default() };
    PolicySettings::resolve(manifest, &own, &PolicyRules::default(), &Limits::CEILING)
}
