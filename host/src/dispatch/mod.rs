//! Carries out plans: a reply from the model here, from an upstream, from the policy itself, or a refusal.

mod delivery;
mod forward;
mod generate;

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;
use forkpoint_engine::{Generation, Sampling, Tool, Usage};
use serde_json::Value;

pub(crate) use delivery::json_response;
pub use delivery::{Delivery, Form};
pub use forward::Upstreams;
pub(crate) use generate::{Account, reply};

use crate::policy::{GeneratePlan, Opening, Plan, Routed, Used};
use crate::serve::App;
use crate::wire::chat::UsageReport;
use crate::wire::{ApiError, Kind};

/// What a request brings to its dispatch besides the plan.
pub(crate) struct Job {
    /// The body as the client sent it, for upstreams.
    pub(crate) body: Value,
    /// The client's tools.
    pub(crate) tools: Vec<Tool>,
    /// The client's sampling.
    pub(crate) sampling: Sampling,
    /// How the reply is delivered.
    pub(crate) delivery: Delivery,
}

/// Carries out what the policies decided, but for a refusal in place of which the engine's own error is answered. Every
/// response says which policy, version, route and reason, be it a reply, a stream or an error.
pub(crate) async fn carry_out(app: &App, routed: Routed, job: Job) -> Response {
    let headers = policy_headers(app, &routed);
    app.metrics.policies(&routed.trace);
    {
        let mut note = job.delivery.context.record.note();
        note.policy = Some(routed.policy.clone());
        note.plan = Some(routed.plan.kind());
        note.reason = Some(routed.reason.clone());
    }
    let used = routed.trace.used();
    let error = routed.error().map(ApiError::from);
    // Nothing where no session was needed so far.
    let account = routed.session.usage().map(|usage| asked(usage, used));
    job.delivery.context.time(|timeline| {
        if let Some((_, steps)) = &mut timeline.chain {
            *steps = routed.trace.steps;
        }
    });
    let result = match (error, routed.plan) {
        (Some(error), _) => Err(error),
        (None, Plan::Generate(plan)) => generate_by(app, plan, routed.session, used, job).await,
        (None, Plan::Forward { upstream, model }) => {
            // The request's pages go back to the cache while the upstream works.
            drop(routed.session);
            job.delivery.context.record.note().usage = account.map(Account::before_reply);
            forward::forward(app, &upstream, model, job.body, &job.delivery).await
        }
        (None, Plan::Reply(text)) => {
            let before = account.unwrap_or_default().before_reply();
            let usage = UsageReport { completion: app.count_tokens(&text), ..before };
            Ok(job.delivery.canned(&text, usage))
        }
        (None, Plan::Reject { status, code, message, retry_after }) => {
            job.delivery.context.record.note().usage = account.map(Account::before_reply);
            Err(ApiError::new(Kind::Rejected { status, code, retry_after }, message))
        }
    };
    let mut response = result.unwrap_or_else(axum::response::IntoResponse::into_response);
    for (name, value) in headers {
        // In place of an upstream's, which may be a Forkpoint itself.
        response.headers_mut().insert(name, value);
    }
    response
}

/// What was spent on a request's session, which policies asked.
fn asked(session: Usage, used: Used) -> Account {
    Account {
        decisions: u32::try_from(used.decisions).unwrap_or(u32::MAX),
        decided: u32::try_from(used.decided_tokens).unwrap_or(u32::MAX),
        ..Account::of(session)
    }
}

async fn generate_by(
    app: &App,
    plan: GeneratePlan,
    own: Opening,
    used: Used,
    job: Job,
) -> Result<Response, ApiError> {
    if let Some(model) = plan.model.as_deref().filter(|model| !app.is_model(model)) {
        // The policy host lets only loaded models through; one model is loaded.
        let message = format!("the policy asks for the model {model:?}, which is not loaded");
        return Err(ApiError::new(Kind::Internal, message));
    }
    let mut sampling = job.sampling;
    plan.sampling.apply(&mut sampling);
    let tools = mount(plan.tools.as_deref(), job.tools, &app.tools);
    // Where the policy has a fork to continue from, this is open.
    let own = own.opened().await?;
    let account = asked(own.usage(), used);
    let session = plan.session.unwrap_or(own);
    let account = account.grown_to(&session);
    let generation = Generation { append: plan.append, tools, sampling };
    reply(session, generation, account, job.delivery).await
}

/// The tools that a plan names, the request's before the operator's; without names, the request's.
fn mount(names: Option<&[String]>, offered: Vec<Tool>, operators: &[Tool]) -> Vec<Tool> {
    let Some(names) = names else { return offered };
    let find = |name: &String| offered.iter().chain(operators).find(|tool| tool.name == *name).cloned();
    let mut mounted: Vec<Tool> = Vec::with_capacity(names.len());
    for tool in names.iter().filter_map(find) {
        if mounted.iter().all(|there| there.name != tool.name) {
            mounted.push(tool);
        }
    }
    mounted
}

/// Who decided, where to and why.
fn policy_headers(app: &App, routed: &Routed) -> Vec<(HeaderName, HeaderValue)> {
    let route = match &routed.plan {
        Plan::Generate(_) => app.model(),
        Plan::Forward { upstream, .. } => upstream,
        Plan::Reply(_) | Plan::Reject { .. } => routed.plan.kind(),
    };
    [
        ("x-forkpoint-policy", routed.policy.as_str()),
        ("x-forkpoint-version", routed.version.as_str()),
        ("x-forkpoint-route", route),
        ("x-forkpoint-reason", routed.reason.as_str()),
    ]
    .into_iter()
    // A model file may have a name that no header can hold.
    .filter_map(|(name, value)| Some((HeaderName::from_static(name), HeaderValue::from_str(value).ok()?)))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, description: &str) -> Tool {
        Tool { name: name.into(), description: Some(description.into()), parameters: Value::Null }
    }

    #[test]
    fn a_plan_mounts_tools_by_name() {
        let offered = || vec![tool("ls", "client"), tool("rm", "client")];
        let operators = [tool("rm", "operator"), tool("search", "operator")];
        type Case = (Option<&'static [&'static str]>, &'static [(&'static str, &'static str)]);
        let cases: [Case; 5] = [
            (None, &[("ls", "client"), ("rm", "client")]),
            (Some(&[]), &[]),
            (Some(&["rm"]), &[("rm", "client")]),
            (Some(&["search", "ls"]), &[("search", "operator"), ("ls", "client")]),
            (Some(&["ls", "ls"]), &[("ls", "client")]),
        ];
        for (names, want) in cases {
            let names: Option<Vec<String>> =
                names.map(|names| names.iter().map(|&name| name.into()).collect());
            let mounted = mount(names.as_deref(), offered(), &operators);
            let got: Vec<_> = mounted
                .iter()
                .map(|tool| (tool.name.as_str(), tool.description.as_deref().unwrap()))
                .collect();
            assert_eq!(got, want, "{names:?}");
        }
    }
}
