//! Policies: WebAssembly components in a directory, served from the moment that they are there.
//!
//! [`Policies::start`] loads the directory and follows it; [`Policies::route`] sends a request through a chain of
//! policies and gives back a [`Plan`]. A new file is read whole, validated, compiled apart from requests, called
//! once with a canary request and published by one pointer swap; requests in flight finish on the version that
//! they began with, and the last good version is served on when any of these steps fails.
//!
//! A policy runs on a fresh instance for each request, within [`Limits`]. What goes wrong with it is a [`Fault`]
//! of a closed set of kinds, and leads to the policy's [`Fallback`].

mod cache;
mod canary;
mod capabilities;
mod chain;
mod clock;
mod contract;
mod convert;
mod entry;
mod fault;
mod guest;
mod imports;
mod instance;
mod lifecycle;
mod limits;
mod loader;
mod manifest;
pub mod offline;
mod opening;
mod plan;
mod probe_tables;
mod publish;
mod registry;
mod run;
mod runtime;
mod sessions;
mod settings;
mod shadow;
mod share;
mod signature;
mod standings;
mod state_dir;
mod status;
mod store;
mod trace;
mod waiting;
mod wall;
mod watch;
mod workbench;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::cache::Cache;
use self::registry::Registry;
use self::runtime::{Instances, Runtime};
use self::standings::Standings;
use self::state_dir::StateDir;
use self::watch::{Settle, Watch};
use crate::probe::shelf::{self, Entry, Shelf};

pub(crate) use self::opening::would_hold;
pub(crate) use self::runtime::pooled_config;
pub(crate) use self::signature::{Keys, statement};

pub use self::capabilities::{Capabilities, Grant, Names};
pub use self::contract::CONTRACT_VERSIONS;
pub use self::fault::{Fault, FaultKind};
pub use self::lifecycle::ChangeError;
pub use self::limits::{Limits, SomeLimits};
pub use self::loader::{LoadCode, LoadError};
pub use self::manifest::{Canary, MANIFEST_SECTION, Manifest, ManifestError};
pub use self::opening::Opening;
pub use self::plan::{GeneratePlan, Plan, RouteRequest, Routed, SamplingOverrides};
pub use self::runtime::StartError;
pub use self::settings::{Fallback, PolicyOptions, PolicyRules, PolicySettings, is_policy_name};
pub use self::share::Share;
pub use self::signature::{PublicKey, Signature, Signers};
pub use self::status::{CanaryStatus, CapabilityStatus, LastError, PolicyState, PolicyStatus};
pub use self::trace::{Continues, Decision, Failure, FailureKind, PlanRecord, Step, Trace, Used};
pub use self::workbench::{Workbench, WorkbenchError, WorkbenchOptions};

/// The reason of a plan that no policy made.
pub const CHAIN_EXHAUSTED: &str = "chain-exhausted";

/// The reason of a plan whose policy gave none.
pub const UNSPECIFIED: &str = "unspecified";

/// The longest that a canary call may take: it asks no engine.
const CANARY_WALL: Duration = Duration::from_secs(2);

/// Most MiB that a guest may be given: a page less than what 32 bits address.
const MOST_MEMORY_MB: u64 = 4095;

/// The policies of a server, the runtime that they share and the watcher of their directory.
pub struct Policies {
    shared: Arc<Shared>,
    watch: Watch,
    follower: std::sync::Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    options: PolicyOptions,
    runtime: Arc<Runtime>,
    registry: Registry,
    cache: Option<Cache>,
    standings: Standings,
    /// None where there is no engine to fit probes on.
    shelf: Option<Arc<Shelf>>,
    /// Calls of policies in shadow and changes by operators, which end by themselves.
    tasks: TaskTracker,
    /// How many calls in shadow there may be at once.
    shadow_places: Arc<Semaphore>,
    /// No session is opened any more for calls in shadow.
    stopping: CancellationToken,
    /// One permit for each component that may be compiled at once: a large one must not hold up a small one.
    compilers: Semaphore,
}

impl Policies {
    /// Sets up the runtime, loads every policy of the directory and follows it. A file that cannot be loaded is
    /// in the [list](Self::list) with its error, and is no reason not to start.
    ///
    /// # Errors
    /// When WebAssembly cannot run on this machine, or the limits ask for more than a memory can hold.
    pub async fn start(options: PolicyOptions) -> Result<Arc<Self>, StartError> {
        let (whose, asked) = options.most_memory_mb();
        if asked > MOST_MEMORY_MB {
            let policy = whose.to_owned();
            return Err(StartError::Memory { policy, asked, most: MOST_MEMORY_MB });
        }
        let memory = Limits { memory_mb: asked.max(Limits::DEFAULT.memory_mb), ..Limits::DEFAULT }.memory();
        let (calls, warm, ready) = (options.concurrency, options.warm_instances, options.ready_instances);
        let runtime = Arc::new(Runtime::new(Instances { calls, warm, ready }, memory, false)?);
        let state = options.state.as_deref().map(StateDir::open).transpose()?;
        let standings = Standings::new(state.map(Arc::new));
        let cache = options.cache.as_deref().and_then(|dir| match Cache::open(dir) {
            Ok(cache) => Some(cache),
            Err(error) => {
                tracing::warn!(target: "policy", ?dir, %error, "compiled code is not kept");
                None
            }
        });
        let dir = options.dir.clone();
        let compilers = Semaphore::new(runtime::CANARIES as usize);
        let shelf = options.engine.clone().map(|engine| Shelf::new(engine, options.probe_cache.clone()));
        let registry = Registry::default();
        let tasks = TaskTracker::new();
        let shadow_places = Arc::new(Semaphore::new(options.shadow_places()));
        let shared = Arc::new(Shared {
            options,
            runtime,
            registry,
            cache,
            standings,
            shelf,
            tasks,
            shadow_places,
            stopping: CancellationToken::new(),
            compilers,
        });

        let there = watch::list(&dir).map(|listing| listing.policies).unwrap_or_default();
        let mut loads = JoinSet::new();
        let only = shared.options.only.clone();
        for name in there.keys().filter(|name| only.as_ref().is_none_or(|only| only == *name)) {
            loads.spawn(publish::load(shared.clone(), name.clone()));
        }
        loads.join_all().await;
        let (sender, changes) = mpsc::unbounded_channel();
        let watch = Watch::start(dir, Settle::new(there), sender)?;
        let follower = tokio::spawn(publish::follow(shared.clone(), changes));
        Ok(Arc::new(Self { shared, watch, follower: std::sync::Mutex::new(Some(follower)) }))
    }

    /// Every policy that has a file, by name.
    #[must_use]
    pub fn list(&self) -> Vec<PolicyStatus> {
        self.shared.registry.list().into_iter().map(|status| self.shared.told(status)).collect()
    }

    /// One policy, if it has a file.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<PolicyStatus> {
        self.shared.registry.get(name).map(|status| self.shared.told(status))
    }

    /// The probe `policy/probe`.
    ///
    /// # Errors
    /// Names the probes that there are.
    pub(crate) fn probe(&self, name: &str) -> Result<Arc<Entry>, String> {
        let Some((policy, probe)) = name.split_once('/') else {
            return Err(format!("must be \"policy/probe\", got {name:?}"));
        };
        if self.shared.shelf.is_none() {
            return Err("probes are switched off on this server".to_owned());
        }
        let version = self.shared.registry.current(policy);
        let probes = version.and_then(|version| version.probes.clone()).unwrap_or_default();
        shelf::find(&probes, probe).cloned()
    }

    /// Largest component, in bytes.
    #[must_use]
    pub fn max_file(&self) -> u64 {
        self.shared.options.max_file
    }

    /// Model names that manifests bind, each with its policy, but for names that another policy has.
    pub(crate) fn routes(&self) -> Vec<(String, String)> {
        let mut routes = Vec::new();
        for policy in self.list().into_iter().filter(|policy| policy.version.is_some()) {
            routes.extend(policy.routes.into_iter().map(|route| (route, policy.name.clone())));
        }
        routes.retain(|(route, policy)| !self.has(route) && self.routed(route).as_ref() == Some(policy));
        routes
    }

    /// Whether a version of this policy is served.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.shared.registry.current(name).is_some()
    }

    /// The policy whose manifest binds this model name, if one does.
    #[must_use]
    pub fn routed(&self, model: &str) -> Option<String> {
        self.shared.registry.routed(model)
    }

    /// Ends the watcher, the compilations, the calls (each is bounded in time) and the epoch's thread, and waits
    /// for them.
    pub async fn stop(&self) {
        self.watch.stop();
        let follower = self.follower.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(follower) = follower
            && let Err(error) = follower.await
        {
            tracing::error!(target: "policy", %error, "the loader of policies broke off");
        }
        self.shared.stopping.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        if let Some(shelf) = &self.shared.shelf {
            shelf.stop().await;
        }
        self.shared.runtime.stop().await;
    }
}

impl Shared {
    /// A status with the fallback that requests get, also where no version serves.
    fn told(&self, status: PolicyStatus) -> PolicyStatus {
        match status.version {
            Some(_) => status,
            None => PolicyStatus { fallback: self.fallback(&status.name), ..status },
        }
    }
}

/// The policies that have a file in a folder, whether it can be served or not.
pub(crate) fn there(dir: &Path) -> BTreeSet<String> {
    watch::list(dir).map(|listing| listing.policies).unwrap_or_default().into_keys().collect()
}
