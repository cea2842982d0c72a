//! `forkpoint policy explain`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use forkpoint_engine::{Answer, Conversation, Criteria, Question, Rung, Verdict};
use serde_json::{Value, json};

use super::super::serve::ModelArgs;
use super::super::{LogFormat, start_log};
use super::{code_cache, pair, print, table};
use crate::author::case;
use crate::config::Config;
use crate::policy::{
    Grant, Limits, Names, Opening, Plan, PlanRecord, Policies, PolicyOptions, PolicyRules, RouteRequest,
    Routed, Share,
};
use crate::probe::ProbeState;
use crate::serve::load_model;

/// How long probes that have to be fitted first are waited for.
const FITTING: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(in crate::cli) struct ExplainArgs {
    /// A policy of the plugins folder by name, or a component's file.
    policy: String,
    /// What the user says.
    #[arg(required_unless_present = "request", conflicts_with = "request")]
    text: Option<String>,
    /// A whole request, as clients send it.
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// A value of its configuration.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// Write JSON in place of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

impl ExplainArgs {
    pub(super) async fn run(self) -> Result<()> {
        start_log(LogFormat::Human, "error")?;
        let body = match (&self.text, &self.request) {
            (Some(text), _) => json!({ "messages": [{ "role": "user", "content": text }] }),
            (None, Some(path)) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                serde_json::from_str::<Value>(&text)
                    .with_context(|| format!("{} is not JSON", path.display()))?
            }
            (None, None) => bail!("say what the user says, or name a request with --request"),
        };
        let request = case::request(&body, BTreeMap::new()).map_err(anyhow::Error::msg)?;
        let config = self.model.into_config()?;
        let (dir, name) = place(&self.policy, &config)?;
        let (_, engine) = load_model(&config.model).await?;
        let policies =
            Policies::start(options(&config, &dir, &name, &table(&self.set), engine.clone())).await?;
        let status = policies.get(&name).with_context(|| format!("no {name}.wasm in {}", dir.display()))?;
        if let Some(error) = status.last_error {
            bail!("{name} is not served: {}: {}", error.code.code(), error.message);
        }
        wait_for_probes(&policies, &name).await;
        let conversation = Conversation { messages: request.messages.clone(), tools: Vec::new() };
        let opened = Arc::new(OnceLock::new());
        let session = Opening::new({
            let (engine, opened) = (engine.clone(), opened.clone());
            async move {
                let start = Instant::now();
                let session = engine.open(conversation, "").await;
                opened.get_or_init(|| start.elapsed());
                session
            }
        });
        let request = RouteRequest { id: "explain".into(), model: name.clone(), ..request };
        let start = Instant::now();
        let routed = policies.route(&[name], request, session).await;
        let took = start.elapsed();
        let generates = matches!(routed.plan, Plan::Generate(_));
        if let Some(error) = routed.error().or(routed.session.failure().filter(|_| generates)) {
            bail!("the session cannot be opened: {error}");
        }
        let text = if self.json {
            let (trace, plan) = (&routed.trace, PlanRecord::from(&routed.plan));
            format!(
                "{:#}\n",
                json!({ "plan": plan, "reason": routed.reason, "labels": routed.labels, "trace": trace })
            )
        } else {
            describe(&routed, opened.get().copied().unwrap_or_default(), took)
        };
        drop(routed);
        policies.stop().await;
        tokio::task::spawn_blocking(move || engine.stop()).await?;
        print(&text)
    }
}

/// The folder and the name of a policy.
fn place(policy: &str, config: &Config) -> Result<(PathBuf, String)> {
    if !policy.ends_with(".wasm") {
        return Ok((config.plugins.dir.clone(), policy.to_owned()));
    }
    let path = Path::new(policy);
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let dir = path.parent().filter(|dir| *dir != Path::new("")).unwrap_or(Path::new("."));
    Ok((dir.to_owned(), name))
}

/// As it would be served, with values over its configuration; the client's headers are granted, since there are none.
fn options(
    config: &Config,
    dir: &Path,
    name: &str,
    set: &BTreeMap<String, String>,
    engine: forkpoint_engine::Engine,
) -> PolicyOptions {
    let mut rules = config.policies.clone();
    let own: &mut PolicyRules = rules.entry(name.to_owned()).or_default();
    own.config.extend(set.clone());
    own.shadow = Some(Share::NONE);
    own.grant = Grant { headers: Some(Names::All), ..own.grant.clone() };
    PolicyOptions {
        rules,
        only: Some(name.to_owned()),
        defaults: config.plugins.defaults.clone(),
        ceiling: Limits::CEILING.with(&config.plugins.ceiling),
        upstreams: config.upstreams.keys().cloned().collect(),
        tools: config.tools.keys().cloned().collect(),
        models: [engine.model().name.clone()].into(),
        engine: config.plugins.probes.then_some(engine),
        cache: code_cache(),
        probe_cache: Some(crate::folders::cache_folder().join("probes")),
        ..PolicyOptions::new(dir)
    }
}

async fn wait_for_probes(policies: &Policies, name: &str) {
    let start = Instant::now();
    let fitting = || {
        let status = policies.get(name);
        status.is_some_and(|status| status.probes.values().any(|probe| probe.state == ProbeState::Fitting))
    };
    while fitting() && start.elapsed() < FITTING {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn describe(routed: &Routed, opened: Duration, took: Duration) -> String {
    let mut lines = Vec::new();
    let ms = |time: Duration| format!("{:.0} ms", time.as_secs_f64() * 1e3);
    lines.push(match (routed.session.usage(), routed.session.failure()) {
        (Some(usage), _) => format!(
            "session   {} tokens, {} reused, {} computed    {}",
            usage.tokens,
            usage.reused,
            usage.computed,
            ms(opened)
        ),
        (None, Some(error)) => format!("session   cannot be opened: {error}    {}", ms(opened)),
        (None, None) => "session   not opened: the policy did not need it".to_owned(),
    });
    for step in &routed.trace.steps {
        for decision in &step.decisions {
            if let Some(failure) = &decision.failure {
                lines.push(format!("├ decide failed: {failure}"));
            }
            for (at, (question, answer)) in decision.questions.iter().zip(&decision.answers).enumerate() {
                let time = match at {
                    0 => format!("{:.1} ms", decision.took_us as f64 / 1e3),
                    _ => "(same step)".to_owned(),
                };
                let probe = decision.probes[at].as_deref();
                lines.extend(answered(question, answer, probe, &time));
            }
        }
        if let Some(fault) = &step.fault {
            lines.push(format!("├ {} failed with {fault}", step.policy));
        }
        for (key, value) in &step.labels {
            lines.push(format!("├ label {key} = {value}"));
        }
    }
    lines.push(format!("└ {}    {}", decided(routed), ms(took)));
    lines.join("\n") + "\n"
}

/// A question and its answer, the likeliest first.
fn answered(question: &Question, answer: &Answer, probe: Option<&str>, time: &str) -> Vec<String> {
    let (kind, names): (&str, Vec<String>) = match &question.criteria {
        Criteria::Boolean { .. } => ("boolean", vec!["yes".into(), "no".into()]),
        Criteria::Choice(options) => ("choice", options.iter().map(|option| option.name.clone()).collect()),
        Criteria::Score(levels) => ("score", levels.clone()),
    };
    let mut ranked: Vec<(&String, f64)> = names.iter().zip(answer.probabilities.iter().copied()).collect();
    ranked.sort_by(|left, right| right.1.total_cmp(&left.1));
    let show = |(name, p): &(&String, f64)| format!("{name} {p:.2}");
    let head = match answer.verdict {
        Verdict::Boolean(yes) => format!("yes {yes:.2}"),
        Verdict::Choice(_) => show(&ranked[0]),
        Verdict::Score(level) => format!("level {level:.1}"),
    };
    let by = match answer.rung {
        Rung::Probe => format!("probe {}", probe.unwrap_or_default()),
        Rung::Labels => "labels".to_owned(),
    };
    let mass = answer.mass;
    let mut lines =
        vec![format!("├ {:50} {kind:8} {head:20} {by:18} mass {mass:.2}    {time}", question.instructions)];
    if !matches!(answer.verdict, Verdict::Boolean(_)) {
        let rest: Vec<String> = ranked.iter().map(show).collect();
        lines.push(format!("│ {:50} {:8} {}", "", "", rest.join(", ")));
    }
    lines
}

fn decided(routed: &Routed) -> String {
    let plan = match PlanRecord::from(&routed.plan) {
        PlanRecord::Reject { status, code, message, retry_after } => {
            let when = retry_after.map(|seconds| format!(", retry after {seconds} s")).unwrap_or_default();
            format!("reject {status} {code}  {message:?}{when}")
        }
        PlanRecord::Reply { text } => format!("reply {text:?}"),
        PlanRecord::Forward { upstream, model } => {
            format!(
                "forward to {upstream}{}",
                model.map(|model| format!(", model {model}")).unwrap_or_default()
            )
        }
        PlanRecord::Generate { append, tools, .. } => {
            let added =
                if append.is_empty() { String::new() } else { format!(", {} turns added", append.len()) };
            let tools = tools.map(|tools| format!(", tools {}", tools.join(", "))).unwrap_or_default();
            format!("generate{added}{tools}")
        }
        PlanRecord::Next => "next".to_owned(),
    };
    format!("{plan} ({})", routed.reason)
}
