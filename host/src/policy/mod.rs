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
mod clock;
mod contract;
mod convert;
mod fault;
mod guest;
mod imports;
mod lifecycle;
mod limits;
mod loader;
mod manifest;
pub mod offline;
mod plan;
mod publish;
mod registry;
mod run;
mod runtime;
mod sessions;
mod settings;
mod signature;
mod standings;
mod state_dir;
mod status;
mod store;
mod trace;
mod warm;
mod watch;
mod workbench;

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkpoint_engine::{Role, Session};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::task::TaskTracker;

use self::cache::Cache;
use self::guest::Place;
use self::plan::Allowed;
use self::registry::{Candidate, Published, Registry, Verdict};
use self::run::{Called, Patience};
use self::runtime::Runtime;
use self::standings::Standings;
use self::state_dir::StateDir;
use self::watch::{Settle, Watch};
use crate::journal::Record;
use crate::probe::shelf::{self, Entry, Shelf};

pub(crate) use self::runtime::pooled_config;
pub(crate) use self::signature::{Keys, statement};

pub use self::capabilities::{Capabilities, Grant, Names};
pub use self::contract::CONTRACT_VERSIONS;
pub use self::fault::{Fault, FaultKind};
pub use self::lifecycle::ChangeError;
pub use self::limits::{Limits, SomeLimits};
pub use self::loader::{LoadCode, LoadError};
pub use self::manifest::{Canary, MANIFEST_SECTION, Manifest, ManifestError, Share};
pub use self::plan::{GeneratePlan, Plan, RouteRequest, Routed, SamplingOverrides};
pub use self::runtime::StartError;
pub use self::settings::{Fallback, PolicyOptions, PolicyRules, PolicySettings, is_policy_name};
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
    runtime: Runtime,
    registry: Registry,
    cache: Option<Cache>,
    standings: Standings,
    /// None where there is no engine to fit probes on.
    shelf: Option<Arc<Shelf>>,
    /// Calls of policies in shadow and changes by operators, which end by themselves.
    tasks: TaskTracker,
    /// How many calls in shadow there may be at once.
    shadow_places: Arc<Semaphore>,
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
        let runtime = Runtime::new(options.concurrency, options.warm_instances, memory, false)?;
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
        let (tasks, shadow_places) = (TaskTracker::new(), options.concurrency.div_ceil(4) as usize);
        let shadow_places = Arc::new(Semaphore::new(shadow_places));
        let shared = Arc::new(Shared {
            options,
            runtime,
            registry,
            cache,
            standings,
            shelf,
            tasks,
            shadow_places,
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
        let list = self.shared.registry.list();
        list.into_iter().map(|status| self.shared.with_warm(status)).collect()
    }

    /// One policy, if it has a file.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<PolicyStatus> {
        self.shared.registry.get(name).map(|status| self.shared.with_warm(status))
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

    /// Asks the policies of a chain in order, until one makes a plan or fails with another fallback than
    /// [`Fallback::Next`]; those in shadow are passed over, and asked apart once there is a plan. Never fails: what
    /// goes wrong is in the trace. Dropping the future ends the guest and whatever it waits for.
    pub async fn route(
        &self,
        chain: &[String],
        request: impl Into<Arc<RouteRequest>>,
        session: Session,
    ) -> Routed {
        let request = request.into();
        let (hash, asked) = (conversation_hash(&request), Instant::now());
        let mut place = Place::Engine(session);
        let mut trace = Trace::default();
        let mut held = Vec::new();
        let mut settled = None;
        let mut shadows = Vec::new();
        for name in chain {
            let shadow = self.shared.registry.current(name).and_then(|version| version.settings.shadow);
            if let Some(share) = shadow {
                shadows.extend(share.holds(hash).then_some(name));
                continue;
            }
            let at_us = guest::micros(asked.elapsed());
            let (called, settings) = self.shared.call(name, &request, hash, place).await;
            place = called.place;
            let fault = called.step.fault.clone();
            trace.steps.push(Step { at_us, ..called.step });
            settled = match (called.decided, fault) {
                (Some(decided), _) => decided.plan.map(|plan| (plan, decided.labels)),
                (None, fault) => {
                    fallback_plan(name, settings.fallback, fault.as_ref()).map(|plan| (plan, Vec::new()))
                }
            };
            held.push(settings);
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
        for name in shadows {
            self.shared.shadow(name, &request, hash, &session, asked).await;
        }
        Routed { policy, version, reason, labels, plan, session, trace, held }
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
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        if let Some(shelf) = &self.shared.shelf {
            shelf.stop().await;
        }
        self.shared.runtime.stop().await;
    }
}

impl Shared {
    /// Calls the version of a policy that the session of this hash gets, and says what holds for it.
    async fn call(
        &self,
        name: &str,
        request: &RouteRequest,
        hash: u64,
        place: Place,
    ) -> (Called, Arc<PolicySettings>) {
        let Some((policy, trial)) = self.registry.pick(name, hash) else {
            let step = unavailable(name, self.registry.get(name));
            if let Some(entry) = self.registry.entry(name) {
                entry.count(&step);
            }
            let known = self.registry.entry(name).and_then(|entry| entry.fallback());
            let fallback = known.unwrap_or_else(|| self.options.settings_of(name, None).fallback);
            let nobody = PolicySettings { fallback, ..PolicySettings::default() };
            return (Called { place, decided: None, step }, Arc::new(nobody));
        };
        let called = self.run(&policy, request, hash, place).await;
        let fault = called.step.fault.as_ref().map(|fault| fault.kind);
        // A busy server says nothing of a version.
        if let Some(trial) = trial.filter(|_| fault != Some(FaultKind::Busy)) {
            match trial.count(fault.is_some()) {
                Some(Verdict::Promote) => _ = self.promote(name, Some(&trial)).await,
                Some(Verdict::RollBack) => {
                    _ = self.withdraw(name, Some(&trial), "its trial failed too often").await;
                }
                None => {}
            }
        }
        (called, policy.settings.clone())
    }

    async fn run(&self, policy: &Arc<Published>, request: &RouteRequest, hash: u64, place: Place) -> Called {
        let patience = Patience { queue: self.options.queue_wait, wall: policy.settings.limits.wall() };
        let capabilities = &policy.settings.capabilities;
        let allowed = Allowed { names: Some(&self.options), capabilities, request };
        let _running = policy.entry.running();
        let called = run::call(&self.runtime, policy, &allowed, hash, place, patience).await;
        policy.entry.count(&called.step);
        if let Some(fault) = &called.step.fault {
            let (name, version, request) = (&*policy.name, policy.version(), request.id.as_str());
            tracing::warn!(target: "policy", policy = name, version, request, %fault, "no plan");
        }
        called
    }

    fn with_warm(&self, status: PolicyStatus) -> PolicyStatus {
        let served = self.registry.current(&status.name);
        let warm = served.map_or(0, |version| version.warm.count(&version) as u64);
        PolicyStatus { warm, ..status }
    }

    /// Asks a policy apart from the request, on a fork of its session; the plan is only written down. Where too many
    /// such calls run, or there is no room for a fork, it is not asked. `asked` is when the chain was.
    async fn shadow(
        self: &Arc<Self>,
        name: &str,
        request: &Arc<RouteRequest>,
        hash: u64,
        session: &Session,
        asked: Instant,
    ) {
        let Some(policy) = self.registry.current(name) else { return };
        let passed = |why: &str| {
            tracing::debug!(target: "policy", policy = name, request = request.id, why, "not asked in shadow");
        };
        let Ok(permit) = self.shadow_places.clone().try_acquire_owned() else {
            return passed("too many calls in shadow");
        };
        let fork = match session.fork().await {
            Ok(fork) => fork,
            Err(error) => return passed(&error.to_string()),
        };
        let (shared, request, usage) = (self.clone(), request.clone(), session.usage());
        self.tasks.spawn(async move {
            let headers = policy.settings.visible(&request.headers);
            let at_us = guest::micros(asked.elapsed());
            let called = shared.run(&policy, &request, hash, Place::Engine(fork)).await;
            let step = Step { at_us, ..called.step };
            if let (Some(traces), Some(context)) = (&shared.options.traces, &request.trace) {
                traces.shadow(context, asked, &step);
            }
            if let Some(journal) = &shared.options.journal {
                journal.write(Record::shadow(&request, step, usage, headers, journal.keeps_prompts()));
            }
            drop(permit);
        });
    }

    /// The version on trial serves every session from now on. Returns whether there was one.
    async fn promote(&self, name: &str, trial: Option<&Candidate>) -> bool {
        let Some(version) = self.registry.promote(name, trial) else { return false };
        tracing::info!(target: "policy", policy = name, version = version.version(), "promoted");
        let hash = version.hash.clone();
        self.standings.note(name, move |standing| standing.prove(&hash)).await;
        true
    }

    /// The version on trial serves no session from now on, nor after a restart. Returns whether there was one.
    async fn withdraw(&self, name: &str, trial: Option<&Candidate>, why: &str) -> bool {
        let Some(version) = self.registry.withdraw(name, trial) else { return false };
        tracing::warn!(target: "policy", policy = name, version = version.version(), why, "rolled back");
        let message = format!("version {} was rolled back: {why}", version.version());
        self.registry.fail(&version.entry, &LoadError::new(LoadCode::Withdrawn, message));
        let hash = version.hash.clone();
        self.standings.note(name, move |standing| standing.withdraw(&hash)).await;
        true
    }
}

/// The policies that a server over these folders knows: those with a file, whether it can be served or not, and those
/// that the state folder keeps a version of.
pub(crate) fn known(dir: &Path, state: Option<&Path>) -> BTreeSet<String> {
    let there = watch::list(dir).map(|listing| listing.policies).unwrap_or_default();
    there.into_keys().chain(state.map(state_dir::kept).unwrap_or_default()).collect()
}

/// What a fault leads to; none asks the next policy.
fn fallback_plan(name: &str, fallback: Fallback, fault: Option<&Fault>) -> Option<Plan> {
    match fallback {
        Fallback::Next => None,
        Fallback::Generate => Some(Plan::Generate(GeneratePlan::default())),
        Fallback::Reject => {
            let kind = fault.map_or("no plan", |fault| fault.kind.code());
            Some(Plan::Reject {
                status: 503,
                code: "policy-failed".into(),
                message: format!("The policy {name} failed ({kind})."),
                retry_after: None,
            })
        }
    }
}

/// The same for every request of a conversation of one client: over its turns up to the user's first.
fn conversation_hash(request: &RouteRequest) -> u64 {
    let mut hash = DefaultHasher::new();
    request.tenant.hash(&mut hash);
    let first = request.messages.iter().position(|message| message.role == Role::User);
    let opening = first.map_or(&request.messages[..], |first| &request.messages[..=first]);
    for message in opening {
        (message.role == Role::User, &message.content).hash(&mut hash);
    }
    hash.finish()
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
        at_us: 0,
        plan: None,
        reason: fault.kind.reason(),
        labels: Vec::new(),
        capabilities: Vec::new(),
        fault: Some(fault),
        decisions: Vec::new(),
        used: Used::default(),
    }
}
