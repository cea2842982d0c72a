//! What the policy host adds to a policy that asks nothing: a fresh instance, the call, and the end of both, beside
//! wasmtime alone with the same component.

use std::path::Path;
use std::time::Instant;

use forkpoint_engine::{Conversation, Message, Role};
use serde_json::json;

use super::bare::Bare;
use super::error::BenchError;
use super::paired::{Case, Measured, Metric, Row};
use super::stats::quantile;
use crate::config::Config;
use crate::policy::{Limits, Opening, Plan, RouteRequest};
use crate::serve::App;

/// The policy that is called, and what it answers by a rule of its own.
pub(super) const POLICY: &str = "auto";
const GREETING: &str = "Hello!";
const REASON: &str = "small-talk";

const METRICS: &[Metric] = &[
    Metric { name: "p50", unit: "us", higher_is_better: false },
    Metric { name: "p99", unit: "us", higher_is_better: false },
];

/// Calls each way that come before those that count.
const WARM_UP: usize = 100;

/// Calls the policy through the policy host and through wasmtime alone, in turn, `calls` times in each repeat.
pub(super) async fn measure(
    app: &App,
    config: &Config,
    repeats: usize,
    calls: usize,
) -> Result<Measured, BenchError> {
    let messages = vec![Message::new(Role::User, GREETING)];
    let request = RouteRequest {
        id: "bench".to_owned(),
        model: POLICY.to_owned(),
        messages: messages.clone(),
        ..RouteRequest::default()
    };
    let path = config.plugins.dir.join(format!("{POLICY}.wasm"));
    let memory = Limits::DEFAULT.with(&config.plugins.defaults.limits).memory_mb as usize * (1 << 20);
    let bare = Bare::new(&read(&path)?, config.places(), memory, &request, Default::default())?;
    let chain = [POLICY.to_owned()];
    let session = app.engine.open(Conversation { messages, tools: Vec::new() }, "").await?;
    let mut session = Some(Opening::from(session));

    let mut host = async || -> Result<f64, BenchError> {
        // Made by whoever reads the request, so not a part of the call.
        let request = request.clone();
        let Some(lent) = session.take() else { return Ok(f64::NAN) };
        let start = Instant::now();
        let routed = app.policies.route(&chain, request, lent).await;
        let (reason, plan, back) = (routed.reason, routed.plan, routed.session);
        let took = start.elapsed().as_secs_f64() * 1e6;
        session = Some(back);
        if reason != REASON || !matches!(plan, Plan::Reply(_)) {
            return Err(BenchError::Unfit(format!("the policy {POLICY} gave {reason}, not {REASON}")));
        }
        Ok(took)
    };
    let alone = async || -> Result<f64, BenchError> {
        let start = Instant::now();
        let reason = bare.call().await;
        let took = start.elapsed().as_secs_f64() * 1e6;
        match reason {
            Ok(reason) if reason == REASON => Ok(took),
            Ok(reason) => Err(BenchError::Unfit(format!("bare wasmtime gave {reason}, not {REASON}"))),
            Err(error) => Err(BenchError::Unfit(format!("bare wasmtime: {error:#}"))),
        }
    };

    for _ in 0..WARM_UP {
        host().await?;
        alone().await?;
    }
    let mut rows = vec![Row::new("forkpoint", "forkpoint"), Row::new("wasmtime", "wasmtime")];
    for _ in 0..repeats {
        let (mut ours, mut theirs) = (Vec::with_capacity(calls), Vec::with_capacity(calls));
        for call in 0..calls {
            // Each goes first in turn.
            if call % 2 == 0 {
                ours.push(host().await?);
                theirs.push(alone().await?);
            } else {
                theirs.push(alone().await?);
                ours.push(host().await?);
            }
        }
        for (row, mut times) in rows.iter_mut().zip([ours, theirs]) {
            times.sort_by(f64::total_cmp);
            row.add("", vec![quantile(&times, 0.5), quantile(&times, 0.99)]);
        }
    }
    let case = Case {
        measure: "policy",
        name: "policy without a question".to_owned(),
        metrics: METRICS,
        facts: json!({ "policy": POLICY, "calls": calls }),
        rehearse: true,
        yardstick: true,
    };
    Ok(Measured::new(case, rows))
}

fn read(path: &Path) -> Result<Vec<u8>, BenchError> {
    std::fs::read(path).map_err(|error| BenchError::Unfit(format!("cannot read {}: {error}", path.display())))
}
