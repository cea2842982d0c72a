//! What goes into a policy and what comes out, in the host's own types.

use std::sync::Arc;
use std::time::Instant;

use forkpoint_engine::{EngineError, Message, Sampling, Session, Tool};
use serde::{Deserialize, Serialize};

use super::capabilities::{Capabilities, Names};
use super::opening::Opening;
use super::settings::{PolicyOptions, PolicySettings};
use super::trace::Trace;
use crate::traces::TraceContext;

/// A request, as a policy sees it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RouteRequest {
    /// Of the request, in logs and journals.
    pub id: String,
    /// Whose it is: keeps apart what clients with keys of their own may not see of each other. Policies do not see it.
    pub tenant: String,
    /// The model that the client named.
    pub model: String,
    /// The conversation.
    pub messages: Vec<Message>,
    /// Tools that the client offers.
    pub tools: Vec<Tool>,
    /// What the client set of the sampling.
    pub sampling: SamplingOverrides,
    /// The same over the model's own: what a draft is sampled with.
    pub drafts: Sampling,
    /// All headers of the client; a policy sees those that its settings list.
    pub headers: Vec<(String, String)>,
    /// Its place in a trace; none where traces are off.
    pub trace: Option<Arc<TraceContext>>,
    /// When it has to be over; none where it may last.
    pub deadline: Option<Instant>,
}

/// How a reply is sampled, where someone said so; the rest keeps its value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingOverrides {
    /// Instead of the temperature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Instead of top-p.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f32>,
    /// Instead of the most tokens to write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Instead of the seed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Instead of the stop strings, when there are any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop: Vec<String>,
}

impl SamplingOverrides {
    /// What a client said of the sampling in its body; a policy sees no defaults as if they were wishes.
    #[must_use]
    pub fn set_in(body: &serde_json::Value, sampling: &Sampling) -> Self {
        let said = |name: &str| body.get(name).is_some_and(|value| !value.is_null());
        Self {
            temperature: said("temperature").then_some(sampling.temperature),
            top_p: said("top_p").then_some(sampling.top_p),
            max_tokens: sampling.max_tokens,
            seed: sampling.seed,
            stop: sampling.stop.clone(),
        }
    }

    /// Writes what is set over `sampling`.
    pub fn apply(&self, sampling: &mut Sampling) {
        sampling.temperature = self.temperature.unwrap_or(sampling.temperature);
        sampling.top_p = self.top_p.unwrap_or(sampling.top_p);
        sampling.max_tokens = self.max_tokens.or(sampling.max_tokens);
        sampling.seed = self.seed.or(sampling.seed);
        if !self.stop.is_empty() {
            sampling.stop.clone_from(&self.stop);
        }
    }

    /// Checks the ranges, as [`Sampling::validate`].
    ///
    /// # Errors
    /// [`EngineError::Invalid`] names the field, the range and what came.
    pub fn validate(&self) -> Result<(), EngineError> {
        let mut sampling = Sampling::default();
        self.apply(&mut sampling);
        if self.max_tokens == Some(0) {
            return Err(EngineError::Invalid("max_tokens must be at least 1, got 0".into()));
        }
        sampling.validate()
    }
}

/// Where a request goes.
pub struct Routed {
    /// The policy that decided, or the last one asked.
    pub policy: String,
    /// Its version: the first 12 digits of the component's SHA-256. Empty when none is served.
    pub version: String,
    /// Why: the policy's own code, `policy-<fault>`, or `chain-exhausted`.
    pub reason: String,
    /// What the policy noted for the journal.
    pub labels: Vec<(String, String)>,
    /// What to do.
    pub plan: Plan,
    /// The request's own session, open where a policy needed it. No policy changes it: one that appends or drafts works
    /// on a fork.
    pub session: Opening,
    /// What happened on the way.
    pub trace: Trace,
    /// What held for each version that was called: a trial's is not that of the version beside it.
    pub(super) held: Vec<Arc<PolicySettings>>,
}

impl Routed {
    /// The engine's own error, where it is answered in place of the plan: the request's session could not be opened
    /// for a reason that the client can mend or must wait for, and the policy refuses as if the server were at fault.
    #[must_use]
    pub fn error(&self) -> Option<&EngineError> {
        let blames_the_server = matches!(self.plan, Plan::Reject { status: 500.., .. });
        self.session.failure().filter(|error| blames_the_server && is_the_clients(error))
    }

    /// Of the client's headers, those that any of the policies called could see, with names in lower case.
    #[must_use]
    pub fn visible(&self, headers: &[(String, String)]) -> Vec<(String, String)> {
        let mut visible: Vec<_> = self.held.iter().flat_map(|settings| settings.visible(headers)).collect();
        visible.sort();
        visible.dedup();
        visible
    }
}

/// Whether a session was not opened for something that its client can mend, or must wait for.
fn is_the_clients(error: &EngineError) -> bool {
    use EngineError::{Busy, Invalid, Template, TooLong};
    matches!(error, TooLong { .. } | Invalid(_) | Template(_) | Busy { .. })
}

/// What to do with a request.
pub enum Plan {
    /// Reply from a model in this process.
    Generate(GeneratePlan),
    /// Send the request on.
    Forward {
        /// One of [`PolicyOptions::upstreams`](super::PolicyOptions::upstreams).
        upstream: String,
        /// The model to name there; none keeps the upstream's own setting.
        model: Option<String>,
    },
    /// Answer with this text.
    Reply(String),
    /// Refuse.
    Reject {
        /// From 400 to 599.
        status: u16,
        /// A short code for programs.
        code: String,
        /// A sentence for people.
        message: String,
        /// When the client may ask again, in seconds; none says nothing of it.
        retry_after: Option<u32>,
    },
}

impl Plan {
    /// "generate", "forward", "reply" or "reject".
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Generate(_) => "generate",
            Self::Forward { .. } => "forward",
            Self::Reply(_) => "reply",
            Self::Reject { .. } => "reject",
        }
    }
}

/// How a model in this process replies.
#[derive(Default)]
pub struct GeneratePlan {
    /// A fork or draft of the policy's to continue from; none: the request's session.
    pub session: Option<Session>,
    /// One of [`PolicyOptions::models`](super::PolicyOptions::models); none: the session's own.
    pub model: Option<String>,
    /// Turns added after the conversation.
    pub append: Vec<Message>,
    /// Names of tools to mount, each the request's or the operator's; none keeps the request's.
    pub tools: Option<Vec<String>>,
    /// Over the client's sampling.
    pub sampling: SamplingOverrides,
}

/// What a plan may be.
pub(super) struct Allowed<'a> {
    /// Holds the names that a plan may use; none allows every name, for a request that is not carried out.
    pub(super) names: Option<&'a PolicyOptions>,
    pub(super) capabilities: &'a Capabilities,
    pub(super) request: &'a RouteRequest,
}

/// Why a plan cannot be carried out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// It names what is not granted.
    Denied(String),
    /// It names what there is not, or is out of range.
    Invalid(String),
}

impl From<String> for Unfit {
    fn from(message: String) -> Self {
        Self::Invalid(message)
    }
}

impl Allowed<'_> {
    /// Whether a plan can be carried out here.
    ///
    /// # Errors
    /// A sentence that names what is wrong and what there is.
    pub(super) fn check(&self, plan: &Plan) -> Result<(), Unfit> {
        let may = self.capabilities;
        match plan {
            Plan::Generate(generate) => {
                if let Some(model) = &generate.model {
                    granted("models", model, &may.models)?;
                    self.names.map_or(Ok(()), |names| known("model", model, names.models.iter()))?;
                }
                for tool in self.operators_tools(generate) {
                    granted("tools", tool, &may.tools)?;
                    let offered = self.request.tools.iter().map(|tool| &tool.name);
                    self.names.map_or(Ok(()), |names| known("tool", tool, offered.chain(&names.tools)))?;
                }
                Ok(generate.sampling.validate().map_err(|error| error.to_string())?)
            }
            Plan::Forward { upstream, model } => {
                granted("upstreams", upstream, &may.upstreams)?;
                if let Some(model) = model.as_ref().filter(|model| model.len() > MAX_MODEL) {
                    let message = format!("a model's name may have {MAX_MODEL} bytes, got {}", model.len());
                    return Err(message.into());
                }
                Ok(self.names.map_or(Ok(()), |names| known("upstream", upstream, names.upstreams.iter()))?)
            }
            Plan::Reply(_) => Ok(()),
            Plan::Reject { status, code, .. } => {
                if !(400..=599).contains(status) {
                    let message = format!("a rejection's status must be from 400 to 599, got {status}");
                    return Err(message.into());
                }
                Ok(check_code("code", code)?)
            }
        }
    }

    /// Capabilities that a plan makes use of, such as `upstreams.strong`.
    pub(super) fn uses(&self, plan: &Plan) -> Vec<String> {
        match plan {
            Plan::Generate(generate) => {
                let model = generate.model.iter().map(|model| format!("models.{model}"));
                let tools = self.operators_tools(generate).map(|tool| format!("tools.{tool}"));
                model.chain(tools).collect()
            }
            Plan::Forward { upstream, .. } => vec![format!("upstreams.{upstream}")],
            Plan::Reply(_) | Plan::Reject { .. } => Vec::new(),
        }
    }

    /// The tools of a plan that the request does not offer itself.
    fn operators_tools<'p>(&self, plan: &'p GeneratePlan) -> impl Iterator<Item = &'p String> {
        let offered: Vec<&str> = self.request.tools.iter().map(|tool| tool.name.as_str()).collect();
        plan.tools.iter().flatten().filter(move |tool| !offered.contains(&tool.as_str()))
    }
}

fn granted(kind: &str, name: &str, names: &Names) -> Result<(), Unfit> {
    if names.has(name) {
        return Ok(());
    }
    let name: String = name.chars().take(64).collect();
    Err(Unfit::Denied(format!("{name:?} is not among the {kind} that this policy is granted")))
}

fn known<'a>(
    what: &str,
    name: &str,
    mut there: impl Iterator<Item = &'a String> + Clone,
) -> Result<(), String> {
    if there.clone().any(|one| one == name) {
        return Ok(());
    }
    let name: String = name.chars().take(64).collect();
    match there.next() {
        None => Err(format!("no {what} named {name:?}: there are none")),
        Some(first) => {
            let list = there.fold(first.clone(), |list, one| list + ", " + one);
            Err(format!("no {what} named {name:?}: there are {list}"))
        }
    }
}

/// Longest name of a model that an upstream is asked for. The upstream knows which it has.
const MAX_MODEL: usize = 256;

/// Most labels of a plan.
const MAX_LABELS: usize = 16;

/// A reason or code: 1 to 64 of letters, digits and `-_.:`, because it stands in a header and in metrics.
pub(super) fn check_code(what: &str, code: &str) -> Result<(), String> {
    let fits = |c: u8| c.is_ascii_alphanumeric() || b"-_.:".contains(&c);
    if (1..=64).contains(&code.len()) && code.bytes().all(fits) {
        return Ok(());
    }
    let shown: String = code.chars().take(80).collect();
    Err(format!("a {what} must be 1 to 64 ASCII letters, digits or any of -_.: and got {shown:?}"))
}

/// Labels: at most 16, keys as codes, values of at most 256 bytes.
pub(super) fn check_labels(labels: &[(String, String)]) -> Result<(), String> {
    if labels.len() > MAX_LABELS {
        return Err(format!("a plan may have {MAX_LABELS} labels, got {}", labels.len()));
    }
    for (key, value) in labels {
        check_code("label's key", key)?;
        if value.len() > 256 {
            return Err(format!("a label's value may have 256 bytes, that of {key:?} has {}", value.len()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reject(status: u16, code: &str) -> Plan {
        Plan::Reject { status, code: code.into(), message: String::new(), retry_after: None }
    }

    fn generate(plan: GeneratePlan) -> Plan {
        Plan::Generate(plan)
    }

    #[test]
    fn a_plan_that_names_what_does_not_exist_is_told_what_does() {
        let mut names = PolicyOptions::new("plugins");
        names.upstreams = ["strong", "vision"].map(str::to_owned).into();
        names.models = ["small"].map(str::to_owned).into();
        names.tools = ["search"].map(str::to_owned).into();
        let bash = Tool { name: "bash".into(), description: None, parameters: serde_json::json!({}) };
        let request = RouteRequest { tools: vec![bash], ..Default::default() };
        let all = Capabilities::all();
        let allowed = Allowed { names: Some(&names), capabilities: &all, request: &request };
        let mount = |tool: &str| GeneratePlan { tools: Some(vec![tool.into()]), ..Default::default() };
        let hot = SamplingOverrides { temperature: Some(f32::NAN), ..Default::default() };
        let cases = [
            (Plan::Forward { upstream: "strong".into(), model: None }, ""),
            (
                Plan::Forward { upstream: "weak".into(), model: None },
                "no upstream named \"weak\": there are strong, vision",
            ),
            (generate(GeneratePlan::default()), ""),
            (generate(GeneratePlan { model: Some("small".into()), ..Default::default() }), ""),
            (generate(GeneratePlan { model: Some("large".into()), ..Default::default() }), "there are small"),
            (generate(mount("bash")), ""),
            (generate(mount("search")), ""),
            (generate(mount("rm")), "no tool named \"rm\": there are bash, search"),
            (generate(GeneratePlan { sampling: hot, ..Default::default() }), "temperature"),
            (reject(403, "shell-risk"), ""),
            (reject(200, "ok"), "from 400 to 599, got 200"),
            (reject(9999, "ok"), "got 9999"),
            (reject(403, "two words"), "two words"),
            (Plan::Reply("hi".into()), ""),
        ];
        for (plan, says) in cases {
            match allowed.check(&plan) {
                Ok(()) => assert_eq!(says, "", "{} should have been refused", plan.kind()),
                Err(Unfit::Invalid(message)) => {
                    assert!(!says.is_empty() && message.contains(says), "{message}")
                }
                Err(unfit) => panic!("{unfit:?}"),
            }
        }
        let any = Allowed { names: None, capabilities: &all, request: &request };
        assert_eq!(any.check(&Plan::Forward { upstream: "weak".into(), model: None }), Ok(()));
        assert!(any.check(&reject(9999, "ok")).is_err(), "what no configuration allows");
    }

    #[tokio::test]
    async fn a_refusal_that_blames_the_server_gives_way_to_what_the_client_can_mend() {
        use forkpoint_engine::template::TemplateError;

        use crate::wire::{ApiError, Dialect};

        let errors = || {
            let template = TemplateError::Raised("roles must alternate".into());
            [
                (EngineError::TooLong { tokens: 9, limit: 8 }, true),
                (EngineError::Invalid("no turns".into()), true),
                (EngineError::Template(template), true),
                (EngineError::Busy { waiting: 9, limit: 9 }, true),
                (EngineError::Full { pages: 2, free: 1, total: 1 }, false),
                (EngineError::Stopped, false),
            ]
        };
        let plans = || {
            [
                (reject(500, "failed"), true),
                (reject(503, "later"), true),
                (reject(499, "no"), false),
                (reject(429, "spent"), false),
                (Plan::Reply("by rule".into()), false),
                (Plan::Forward { upstream: "up".into(), model: None }, false),
                (generate(GeneratePlan::default()), false),
            ]
        };
        for (index, (_, gives_way)) in plans().into_iter().enumerate() {
            for (error, clients) in errors() {
                assert_eq!(
                    ApiError::from(&error).status(Dialect::OpenAi).is_client_error(),
                    clients,
                    "{error}"
                );
                let what = format!("plan {index}, {error}");
                let mut session = Opening::new(async { Err(error) });
                let routed = |session| Routed {
                    policy: String::new(),
                    version: String::new(),
                    reason: String::new(),
                    labels: Vec::new(),
                    plan: plans().into_iter().nth(index).unwrap().0,
                    session,
                    trace: Trace::default(),
                    held: Vec::new(),
                };
                assert!(session.open().await.is_err());
                assert_eq!(routed(session).error().is_some(), gives_way && clients, "{what}");
                let never = Opening::new(async { Err(EngineError::TooLong { tokens: 9, limit: 8 }) });
                assert!(routed(never).error().is_none(), "{what}: nobody needed it");
            }
        }
    }

    #[test]
    fn a_plan_that_names_what_is_not_granted_is_denied() {
        let granted: Capabilities =
            toml::from_str("upstreams = ['strong']\nmodels = ['small']\ntools = ['search']").unwrap();
        let bash = Tool { name: "bash".into(), description: None, parameters: serde_json::json!({}) };
        let request = RouteRequest { tools: vec![bash], ..Default::default() };
        let allowed = Allowed { names: None, capabilities: &granted, request: &request };
        let forward = |upstream: &str| Plan::Forward { upstream: upstream.into(), model: None };
        let tools = |names: &[&str]| {
            let tools = Some(names.iter().map(|&name| name.into()).collect());
            generate(GeneratePlan { tools, ..Default::default() })
        };
        let model = |name: &str| generate(GeneratePlan { model: Some(name.into()), ..Default::default() });
        // The request's own tools need no leave.
        for plan in [forward("strong"), model("small"), tools(&["bash", "search"])] {
            assert_eq!(allowed.check(&plan), Ok(()));
        }
        for (plan, kind) in
            [(forward("weak"), "upstreams"), (model("x"), "models"), (tools(&["rm"]), "tools")]
        {
            let Err(Unfit::Denied(message)) = allowed.check(&plan) else { panic!("{kind}") };
            assert!(message.contains(kind), "{message}");
        }
        assert_eq!(allowed.uses(&tools(&["bash", "search"])), ["tools.search"]);
        assert_eq!(allowed.uses(&forward("strong")), ["upstreams.strong"]);
    }

    #[test]
    fn reasons_fit_a_header_and_labels_fit_a_journal() {
        for good in ["plain", "shell-risk", "a.b:c_D9"] {
            assert_eq!(check_code("reason", good), Ok(()));
        }
        for bad in ["", "two words", "zeile\r\nx", "é", &"a".repeat(65)] {
            assert!(check_code("reason", bad).is_err(), "{bad:?}");
        }
        let pair = |key: &str, len: usize| (key.to_owned(), "x".repeat(len));
        assert_eq!(check_labels(&[pair("a", 256)]), Ok(()));
        assert!(check_labels(&[pair("a", 257)]).is_err());
        assert!(check_labels(&vec![pair("a", 1); 17]).is_err());
    }

    #[test]
    fn overrides_change_only_what_is_set() {
        let mut sampling = Sampling { seed: Some(7), stop: vec!["x".into()], ..Default::default() };
        let set = SamplingOverrides { temperature: Some(0.0), max_tokens: Some(5), ..Default::default() };
        set.apply(&mut sampling);
        assert_eq!((sampling.temperature, sampling.max_tokens, sampling.seed), (0.0, Some(5), Some(7)));
        assert_eq!(sampling.stop, ["x"]);
    }
}
