//! A request on its way through a chain of policies.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Instant;

use forkpoint_engine::Role;

use super::fault::{Fault, FaultKind};
use super::guest::{self, Place};
use super::opening::Opening;
use super::plan::{Allowed, GeneratePlan, Plan, RouteRequest, Routed};
use super::registry::{Published, Verdict};
use super::run::{self, Called, Patience};
use super::settings::{Fallback, PolicySettings};
use super::status::PolicyStatus;
use super::trace::{Step, Trace, Used};
use super::{CHAIN_EXHAUSTED, Policies, Shared};

impl Policies {
    /// Asks the policies of a chain in order, until one makes a plan or fails with another fallback than
    /// [`Fallback::Next`]; those in shadow are passed over, and asked apart once there is a plan. Never fails: what
    /// goes wrong is in the trace. Dropping the future ends the guest and whatever it waits for.
    ///
    /// The session is opened by the first policy that needs it. Once that has failed, no fallback refuses: the plan
    /// is to generate instead, which fails for the same reason. [`Routed::error`] may stand for other plans then.
    pub async fn route(
        &self,
        chain: &[String],
        request: impl Into<Arc<RouteRequest>>,
        session: impl Into<Opening>,
    ) -> Routed {
        let request = request.into();
        let (hash, asked) = (conversation_hash(&request), Instant::now());
        let mut place = Place::Engine(session.into());
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
                    let fallback = match settings.fallback {
                        // The client is told what the engine says, as it would be without a policy.
                        Fallback::Reject if place.failure().is_some() => Fallback::Generate,
                        fallback => fallback,
                    };
                    fallback_plan(name, fallback, fault.as_ref()).map(|plan| (plan, Vec::new()))
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
        let session = place.into_opening().expect("the session is the one that was given");
        let session = self.shadows(shadows, &request, hash, asked).follow(&plan, session).await;
        Routed { policy, version, reason, labels, plan, session, trace, held }
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
            let nobody = PolicySettings { fallback: self.fallback(name), ..PolicySettings::default() };
            return (Called { place, decided: None, step }, Arc::new(nobody));
        };
        let called = self.run(&policy, request, hash, place).await;
        let fault = called.step.fault.as_ref().map(|fault| fault.kind);
        // A busy server says nothing of a version, nor does an error that may be the session's, passed on.
        let telling = match fault {
            Some(FaultKind::Busy) => false,
            Some(FaultKind::Error) => called.place.failure().is_none(),
            _ => true,
        };
        if let Some(trial) = trial.filter(|_| telling) {
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

    /// What a request gets where no version of a policy serves.
    pub(super) fn fallback(&self, name: &str) -> Fallback {
        let known = self.registry.entry(name).and_then(|entry| entry.fallback());
        known.unwrap_or_else(|| self.options.settings_of(name, None).fallback)
    }

    pub(super) async fn run(
        &self,
        policy: &Arc<Published>,
        request: &RouteRequest,
        hash: u64,
        place: Place,
    ) -> Called {
        let patience = Patience { queue: self.options.queue_wait, wall: policy.settings.limits.wall() };
        let capabilities = &policy.settings.capabilities;
        let allowed = Allowed { names: Some(&self.options), capabilities, request };
        let called = run::call(&self.runtime, policy, &allowed, hash, place, patience).await;
        policy.entry.count(&called.step);
        if let Some(fault) = &called.step.fault {
            let (name, version, request) = (&*policy.name, policy.version(), request.id.as_str());
            tracing::warn!(target: "policy", policy = name, version, request, %fault, "no plan");
        }
        called
    }
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
pub(super) fn conversation_hash(request: &RouteRequest) -> u64 {
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
