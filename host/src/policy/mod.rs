//! Policies: WebAssembly components in a directory, served from the moment that they are there.
//!
//! [`Policies::start`] loads the directory and follows it; [`Policies::route`] sends a request through a chain of
//! policies and gives back a [`Plan`]. A new file is read whole, validated, compiled apart from requests, called
//! once with a canary request and published by one pointer swap; requests in flight finish on the version that
//! they began with, and the last good version is served on when any of these steps fails.
//!
//! A policy runs on a fresh instance for each request, within [`Limits`]. What goes wrong with it is a [`Fault`]
//! of a closed set of kinds, and leads to the policy's [`Fallback`].

mod bindings;
mod cache;
mod canary;
mod clock;
mod convert;
mod fault;
mod guest;
mod imports;
mod loader;
mod plan;
mod registry;
mod run;
mod runtime;
mod settings;
mod store;
mod trace;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use forkpoint_engine::Session;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use self::cache::Cache;
use self::guest::Place;
use self::plan::Allowed;
use self::registry::{Published, Registry};
use self::run::{Called, Patience};
use self::runtime::Runtime;
use self::watch::{Change, PROBES, Settle, Watch};
use crate::probe::shelf::{self, Entry, Shelf};

pub(crate) use self::runtime::pooled_config;

pub use self::fault::{Fault, FaultKind};
pub use self::loader::{CONTRACT_VERSIONS, LoadCode, LoadError};
pub use self::plan::{GeneratePlan, Plan, RouteRequest, Routed, SamplingOverrides};
pub use self::registry::{LastError, PolicyState, PolicyStatus};
pub use self::runtime::StartError;
pub use self::settings::{Fallback, Limits, PolicyOptions, PolicySettings, is_policy_name};
pub use self::trace::{Decision, Step, Trace, Used};

/// The reason of a plan that no policy made.
pub const CHAIN_EXHAUSTED: &str = "chain-exhausted";

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
    runtime: Runtime,
    registry: Registry,
    cache: Option<Cache>,
    /// None where there is no engine to fit probes on.
    shelf: Option<Arc<Shelf>>,
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
        let named = options.settings.iter().map(|(name, settings)| (name.as_str(), settings));
        let mut memory = 0;
        for (policy, settings) in named.chain([("the defaults", &options.defaults)]) {
            let asked = settings.limits.memory_mb;
            if asked > MOST_MEMORY_MB {
                let policy = policy.to_owned();
                return Err(StartError::Memory { policy, asked, most: MOST_MEMORY_MB });
            }
            memory = memory.max(settings.limits.memory());
        }
        let runtime = Runtime::new(options.concurrency, memory)?;
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
        let shared = Arc::new(Shared { options, runtime, registry, cache, shelf, compilers });

        let there = watch::list(&dir).map(|listing| listing.policies).unwrap_or_default();
        let mut loads = JoinSet::new();
        for name in there.keys() {
            loads.spawn(load(shared.clone(), name.clone()));
        }
        loads.join_all().await;
        let (sender, changes) = mpsc::unbounded_channel();
        let watch = Watch::start(dir, Settle::new(there), sender)?;
        let follower = tokio::spawn(follow(shared.clone(), changes));
        Ok(Arc::new(Self { shared, watch, follower: std::sync::Mutex::new(Some(follower)) }))
    }

    /// Every policy that has a file, by name.
    #[must_use]
    pub fn list(&self) -> Vec<PolicyStatus> {
        self.shared.registry.list()
    }

    /// One policy, if it has a file.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<PolicyStatus> {
        self.shared.registry.get(name)
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

    /// Whether a version of this policy is served.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.shared.registry.current(name).is_some()
    }

    /// Asks the policies of a chain in order, until one makes a plan or fails with another fallback than
    /// [`Fallback::Next`]. Never fails: what goes wrong is in the trace. Dropping the future ends the guest and
    /// whatever it waits for.
    pub async fn route(&self, chain: &[String], request: RouteRequest, session: Session) -> Routed {
        let mut place = Place::Engine(session);
        let mut trace = Trace::default();
        let mut settled = None;
        for name in chain {
            let called = self.shared.call(name, &request, place).await;
            place = called.place;
            let fault = called.step.fault.clone();
            trace.steps.push(called.step);
            settled = match (called.decided, fault) {
                (Some(decided), _) => decided.plan.map(|plan| (plan, decided.labels)),
                (None, fault) => self.shared.fallback(name, fault.as_ref()).map(|plan| (plan, Vec::new())),
            };
            if settled.is_some() {
                break;
            }
        }
        let last = trace.steps.last();
        let policy = last.map(|step| step.policy.clone()).unwrap_or_default();
        let version = last.map(|step| step.version.clone()).unwrap_or_default();
        let reason = match (&settled, last) {
            (Some(_), Some(step)) => step.reason.clone(),
            _ => CHAIN_EXHAUSTED.to_owned(),
        };
        let (plan, labels) = settled.unwrap_or_else(|| (Plan::Generate(GeneratePlan::default()), Vec::new()));
        let session = place.into_session().expect("the session is the one that was given");
        Routed { policy, version, reason, labels, plan, session, trace }
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
        if let Some(shelf) = &self.shared.shelf {
            shelf.stop().await;
        }
        self.shared.runtime.stop().await;
    }
}

impl Shared {
    async fn call(&self, name: &str, request: &RouteRequest, place: Place) -> Called {
        let Some(policy) = self.registry.current(name) else {
            let step = unavailable(name, self.registry.get(name));
            if let Some(entry) = self.registry.entry(name) {
                entry.count(&step);
            }
            return Called { place, decided: None, step };
        };
        let patience = Patience { queue: self.options.queue_wait, wall: policy.entry.settings.limits.wall() };
        let allowed = Allowed { names: Some(&self.options), request };
        let called = run::call(&self.runtime, &policy, &allowed, place, patience).await;
        policy.entry.count(&called.step);
        if let Some(fault) = &called.step.fault {
            let (version, request) = (policy.version(), request.id.as_str());
            tracing::warn!(target: "policy", policy = name, version, request, %fault, "no plan");
        }
        called
    }

    /// What a fault leads to; none asks the next policy.
    fn fallback(&self, name: &str, fault: Option<&Fault>) -> Option<Plan> {
        match self.options.settings_of(name).fallback {
            Fallback::Next => None,
            Fallback::Generate => Some(Plan::Generate(GeneratePlan::default())),
            Fallback::Reject => {
                let kind = fault.map_or("no plan", |fault| fault.kind.code());
                Some(Plan::Reject {
                    status: 503,
                    code: "policy-failed".into(),
                    message: format!("The policy {name} failed ({kind})."),
                })
            }
        }
    }

    /// Reads, validates, compiles and tries a policy's file; serves it when all of that went well.
    async fn load(&self, name: &str) -> Result<(), LoadError> {
        let path = self.options.dir.join(format!("{name}.wasm"));
        let most = self.options.max_file;
        let settings = self.options.settings_of(name);
        let entry = self.registry.begin(name, settings);
        let outcome = async {
            let source = blocking(move || loader::read(&path, most)).await?;
            let now = self.registry.current(name);
            let probes = match &self.shelf {
                Some(shelf) => {
                    let folder = self.options.dir.join(format!("{name}{PROBES}"));
                    let before = now.as_ref().and_then(|now| now.probes.clone()).unwrap_or_default();
                    Some(Arc::new(shelf.load(name, folder, &before).await))
                }
                None => None,
            };
            if now.is_some_and(|now| now.hash == source.hash) {
                return Ok((None, probes));
            }
            let _permit = self.compilers.acquire().await;
            let (hash, bytes) = (source.hash.clone(), source.bytes.len() as u64);
            let (linker, cache) = (self.runtime.linker.clone(), self.cache.clone());
            let linked = blocking(move || loader::link(linker, cache.as_ref(), &source)).await?;
            let version = Published {
                name: name.into(),
                hash,
                contract: linked.contract,
                bytes,
                loaded_at: registry::now(),
                pre: linked.pre,
                probes: probes.clone(),
                entry: entry.clone(),
            };
            self.try_out(&version).await?;
            Ok((Some(version), probes))
        };
        match outcome.await {
            Ok((None, probes)) => self.registry.keep(name, &entry, probes),
            Ok((Some(version), _)) => {
                tracing::info!(target: "policy", policy = name, version = version.version(), "serving");
                self.registry.publish(version);
            }
            Err(error) => {
                let served = self.registry.current(name).map(|version| version.version().to_owned());
                tracing::warn!(target: "policy", policy = name, %error, still_serving = served, "not loaded");
                self.registry.fail(&entry, &error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// The canary call. Which plan a policy makes of it does not matter, nor that it makes none; that it survives
    /// does, and that the plan is one that some server could carry out.
    async fn try_out(&self, version: &Published) -> Result<(), LoadError> {
        let request = canary::request();
        let wall = CANARY_WALL.min(version.entry.settings.limits.wall());
        let patience = Patience { queue: self.options.queue_wait, wall };
        let place = Place::Canary(canary::session());
        let allowed = Allowed { names: None, request: &request };
        let called = run::call(&self.runtime, version, &allowed, place, patience).await;
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

fn unavailable(name: &str, status: Option<PolicyStatus>) -> Step {
    let why = match status.and_then(|status| status.last_error) {
        Some(error) => format!("{}: {}", error.code.code(), error.message),
        None => format!("there is no {name}.wasm"),
    };
    let fault = Fault::new(FaultKind::Unavailable, why);
    Step {
        policy: name.to_owned(),
        version: String::new(),
        plan: None,
        reason: fault.kind.reason(),
        fault: Some(fault),
        decisions: Vec::new(),
        used: Used::default(),
    }
}

/// Runs what blocks on a thread for that.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(LoadError::new(LoadCode::Compile, format!("the loader broke off: {error}"))),
    }
}

async fn load(shared: Arc<Shared>, name: String) -> String {
    // The error is in the log and in the status.
    let _ = shared.load(&name).await;
    name
}

/// Carries out the watcher's changes: files side by side, the changes of one file in order, until the watcher is
/// gone and the last is done.
async fn follow(shared: Arc<Shared>, mut changes: mpsc::UnboundedReceiver<Change>) {
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
        if change.present {
            let task = loads.spawn(load(shared.clone(), change.name.clone()));
            names.insert(task.id(), change.name);
        } else if shared.registry.remove(&change.name) {
            tracing::info!(target: "policy", policy = change.name, "no longer served");
        }
    }
}
