//! One call of one policy: an instance, its bounds, and what came of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use wasmtime::{PoolConcurrencyLimitError, Store, Trap};

use super::contract::{Guest, dispatch, types};
use super::convert;
use super::fault::{Fault, FaultKind};
use super::guest::{Halt, Held, Place, State};
use super::instance::{self, Instance};
use super::plan::{Allowed, GeneratePlan, Plan, RouteRequest, Unfit, check_code, check_labels};
use super::registry::Published;
use super::runtime::Runtime;
use super::trace::{PlanRecord, Step, Used};
use super::wall::Wall;

/// What a policy decided.
pub(super) struct Decided {
    /// None asks the next policy.
    pub(super) plan: Option<Plan>,
    pub(super) labels: Vec<(String, String)>,
}

/// What came of a call.
pub(super) struct Called {
    /// The session that was lent, as it was.
    pub(super) place: Place,
    /// The plan; after a fault, none. The step says why.
    pub(super) decided: Option<Decided>,
    /// For the trace.
    pub(super) step: Step,
}

/// Calls that an instance lasts for: what a guest leaks goes with it.
const CALLS: u32 = 1000;

/// The part of its limit by which an instance's memory may grow after its first call.
const LEAK: usize = 8;

/// How long a call may wait for its instance and run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    pub(super) queue: Duration,
    pub(super) wall: Duration,
}

/// Calls a policy. Never fails: a fault is in the step, and the session comes back whatever happens. `conversation` is
/// the hash of the request's conversation.
pub(super) async fn call(
    runtime: &Arc<Runtime>,
    policy: &Arc<Published>,
    allowed: &Allowed<'_>,
    conversation: u64,
    place: Place,
    patience: Patience,
) -> Called {
    let start = Instant::now();
    let wall = || u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let step = |reason: String, decisions, used: Used| Step {
        policy: policy.name.to_string(),
        version: policy.version().to_owned(),
        at_us: 0,
        plan: None,
        reason,
        labels: Vec::new(),
        capabilities: used.capabilities(),
        fault: None,
        decisions,
        used: Used { wall_us: wall(), ..used },
    };
    let failed = |fault: Fault, decisions, used| {
        let step = step(fault.kind.reason(), decisions, used);
        Step { fault: Some(fault), ..step }
    };

    // Canary calls have places of their own: a busy server still takes up new versions.
    let canary = matches!(place, Place::Offline(_));
    let free = if canary {
        Ok(None)
    } else {
        let free = tokio::time::timeout(patience.queue, runtime.places.clone().acquire_owned()).await;
        free.map_err(drop).and_then(|permit| permit.map(Some).map_err(drop))
    };
    let Ok(permit) = free else {
        let message = format!("no place in the pool for {} ms", patience.queue.as_millis());
        let step = failed(Fault::new(FaultKind::Busy, message), Vec::new(), Used::default());
        return Called { place, decided: None, step };
    };
    let (_ticking, _running) = (runtime.tick(), policy.entry.running());
    let settings = policy.settings.clone();
    let held = Held { store: policy.entry.store.clone(), probes: policy.probes.clone() };
    let limit = Arc::new(Wall::new(patience.wall));
    let when = (start, limit.clone());
    let state = State::new(policy.name.clone(), settings, held, allowed.request, place, when);
    let headers = policy.settings.visible(&allowed.request.headers);
    let request = request_out(allowed.request, conversation, headers);
    let tenant = &allowed.request.tenant;
    let keep = policy.settings.stateless && policy.warm.is_on();
    let kept = if keep { policy.warm.take(policy, tenant) } else { None };
    let waiting = kept.or_else(|| policy.ready.as_ref().and_then(|ready| ready.take_ready(policy)));
    let (mut store, guest, calls, memory) = match waiting {
        Some(Instance { mut store, guest, calls, memory }) => {
            runtime.renew(&mut store, state, calls > 0);
            (store, Some(guest), calls + 1, memory)
        }
        None => (runtime.store(state), None, 1, None),
    };
    let routed = match limit.hold(route(&mut store, guest, policy, request)).await {
        Some(routed) => routed,
        None => {
            let message = format!("took longer than {} ms (wall_ms)", patience.wall.as_millis());
            Err(Fault::new(FaultKind::Wall, message))
        }
    };
    let fuel = store.get_fuel().ok().map(|left| u64::MAX - left);
    let state = store.data_mut();
    state.clock.pause();
    let (routed, guest) =
        routed.map_or_else(|fault| (Err(fault), None), |(routing, guest)| (Ok(routing), Some(guest)));
    let routed = routed.and_then(|routing| take_plan(state, routing));
    let (used, decisions) = (Used { fuel, ..state.used() }, std::mem::take(&mut state.decisions));
    let (place, changed) = state.give_back();
    let (now, most) = (state.memory(), policy.settings.limits.memory());
    let checked = routed.and_then(|(reason, mut decided)| {
        let record = PlanRecord::of(decided.plan.as_ref(), changed.is_some());
        if let Some(Plan::Generate(GeneratePlan { session: session @ None, .. })) = &mut decided.plan {
            *session = changed.and_then(Place::into_session);
        }
        check_code("reason", &reason).and_then(|()| check_labels(&decided.labels)).map_err(Unfit::from)?;
        decided.plan.as_ref().map_or(Ok(()), |plan| allowed.check(plan))?;
        Ok((record, reason, decided))
    });
    // One that leaks must not run out of memory in the middle of a request.
    let memory = memory.unwrap_or(now);
    let keep = keep && checked.is_ok() && calls < CALLS && now - memory <= most / LEAK;
    match guest.filter(|_| keep) {
        Some(guest) => {
            policy.warm.put(policy, tenant, Instance { store, guest, calls, memory: Some(memory) });
            instance::begin(runtime, policy);
        }
        None => instance::end(runtime, policy, store, permit),
    }
    match checked {
        Ok((record, reason, decided)) => {
            let mut step = step(reason, decisions, used);
            step.capabilities.extend(decided.plan.iter().flat_map(|plan| allowed.uses(plan)));
            step.labels.clone_from(&decided.labels);
            step.plan = Some(record);
            Called { place, decided: Some(decided), step }
        }
        Err(fault) => Called { place, decided: None, step: failed(fault, decisions, used) },
    }
}

impl From<Unfit> for Fault {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Denied(message) => Self::new(FaultKind::Denied, message),
            Unfit::Invalid(message) => Self::new(FaultKind::InvalidPlan, message),
        }
    }
}

/// Calls the guest, which is instantiated first unless there is one.
async fn route(
    store: &mut Store<State>,
    guest: Option<Guest>,
    policy: &Published,
    request: types::Request,
) -> Result<(dispatch::Routing, Guest), Fault> {
    store.data().clock.resume();
    let guest = match guest {
        Some(guest) => guest,
        None => {
            let fresh = policy.pre.instantiate(store).await;
            fresh.map_err(|error| fault_of(&error, FaultKind::Instantiate))?
        }
    };
    let session = store.data().lend();
    let routed = guest.route(store, request, session).await;
    let routed = routed.map_err(|error| fault_of(&error, FaultKind::Trap))?;
    let routed = routed.map_err(|message| Fault::new(FaultKind::Error, first_line(&message)))?;
    Ok((routed, guest))
}

/// Which fault an error of the runtime is; one that says nothing of itself is an `other`.
fn fault_of(error: &wasmtime::Error, other: FaultKind) -> Fault {
    tracing::debug!(target: "policy", "a guest ended: {error:?}");
    let kind = if let Some(halt) = error.downcast_ref::<Halt>() {
        halt.kind()
    } else if let Some(Trap::StackOverflow) = error.downcast_ref::<Trap>() {
        FaultKind::Stack
    } else if error.is::<Trap>() {
        FaultKind::Trap
    } else if error.is::<PoolConcurrencyLimitError>() {
        FaultKind::Busy
    } else {
        other
    };
    Fault::new(kind, first_line(&error.root_cause().to_string()))
}

fn first_line(text: &str) -> String {
    let line = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    line.chars().filter(|c| !c.is_control()).take(500).collect()
}

/// A request as the guest sees it.
fn request_out(request: &RouteRequest, conversation: u64, headers: Vec<(String, String)>) -> types::Request {
    types::Request {
        id: request.id.clone(),
        conversation: format!("{conversation:016x}"),
        model: request.model.clone(),
        messages: request.messages.iter().map(convert::message_out).collect(),
        tools: request.tools.iter().map(convert::tool_out).collect(),
        sampling: convert::sampling_out(&request.sampling),
        headers,
    }
}

/// The guest's plan in the host's types: its reason and the plan itself.
fn take_plan(state: &mut State, routing: dispatch::Routing) -> Result<(String, Decided), Fault> {
    let plan = match routing.plan {
        dispatch::Plan::Generate(plan) => {
            let on = plan.on.map_or(Ok(None), |on| state.take(on));
            let on = on.map_err(|error| fault_of(&error, FaultKind::InvalidPlan))?;
            Some(Plan::Generate(GeneratePlan {
                session: on.and_then(Place::into_session),
                model: plan.model,
                append: plan.append.into_iter().map(convert::message_in).collect(),
                tools: plan.tools,
                sampling: convert::sampling_in(plan.sampling),
            }))
        }
        dispatch::Plan::Forward(plan) => Some(Plan::Forward { upstream: plan.upstream, model: plan.model }),
        dispatch::Plan::Reply(text) => Some(Plan::Reply(text)),
        dispatch::Plan::Reject(plan) => Some(Plan::Reject {
            status: plan.status,
            code: plan.code,
            message: plan.message,
            retry_after: plan.retry_after,
        }),
        dispatch::Plan::Next => None,
    };
    // A policy need not say why.
    let reason = if routing.reason.is_empty() { super::UNSPECIFIED.to_owned() } else { routing.reason };
    Ok((reason, Decided { plan, labels: routing.labels }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_runtime_is_the_fault_that_it_means() {
        let cases: [(wasmtime::Error, FaultKind); 6] = [
            (Halt::Cpu(5).into(), FaultKind::Cpu),
            (wasmtime::Error::from(Halt::Memory(65, 64)).context("while instantiating"), FaultKind::Memory),
            (Halt::Denied("wasi:x/y#z".into()).into(), FaultKind::Denied),
            (Trap::StackOverflow.into(), FaultKind::Stack),
            (wasmtime::Error::from(Trap::UnreachableCodeReached).context("backtrace"), FaultKind::Trap),
            (wasmtime::Error::msg("no such thing"), FaultKind::Instantiate),
        ];
        for (error, kind) in cases {
            assert_eq!(fault_of(&error, FaultKind::Instantiate).kind, kind, "{error:?}");
        }
        let trap = wasmtime::Error::from(Trap::UnreachableCodeReached).context("backtrace\n  0: x");
        assert_eq!(
            fault_of(&trap, FaultKind::Trap).message,
            "wasm trap: wasm `unreachable` instruction executed"
        );
    }
}
