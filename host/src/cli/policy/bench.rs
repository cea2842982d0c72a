//! `forkpoint policy bench`.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkpoint_engine::{Message, Role};
use serde_json::{Value, json};

use super::{code_cache, print};
use crate::bench::{Bare, quantile};
use crate::policy::offline::{Even, OfflineSession};
use crate::policy::{RouteRequest, Workbench, WorkbenchOptions};

#[derive(Debug, Args)]
pub(in crate::cli) struct BenchArgs {
    /// Components.
    #[arg(required = true)]
    components: Vec<PathBuf>,
    /// Calls of each: on an instance made ahead, on one that the call makes, and on a warm one.
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(1..))]
    calls: u32,
    /// What the user says; every question is answered evenly.
    #[arg(long, value_name = "TEXT", default_value = "Hello!")]
    text: String,
    /// Write JSON in place of a table.
    #[arg(long)]
    json: bool,
}

/// Of one component. Times are in microseconds but where they say otherwise.
struct Row {
    name: String,
    bytes: u64,
    compile_ms: f64,
    load_ms: f64,
    /// On a fresh instance that the call makes and ends.
    p50: f64,
    p99: f64,
    /// On a fresh instance that was there before the call; none where it cannot be.
    ready_p50: Option<f64>,
    /// On an instance that is called again and again; none where one cannot be.
    warm_p50: Option<f64>,
    /// Wasmtime alone, with the same component, where its contract is the one that this is done for.
    bare_p50: Option<f64>,
    memory_kib: u64,
}

impl BenchArgs {
    pub(super) async fn run(self) -> Result<()> {
        let mut rows = Vec::new();
        for component in &self.components {
            let row = self.measure(component).await;
            rows.push(row.with_context(|| format!("cannot measure {}", component.display()))?);
        }
        if self.json {
            let rows: Vec<Value> = rows.iter().map(Row::to_json).collect();
            return print(&format!("{:#}\n", Value::from(rows)));
        }
        print(&describe(&rows))
    }

    async fn measure(&self, component: &Path) -> Result<Row> {
        let cold = Workbench::load(component, &WorkbenchOptions::default())?;
        let compile_ms = cold.compiled().as_secs_f64() * 1e3;
        cold.close().await;
        let kept = WorkbenchOptions { cache: code_cache(), ..WorkbenchOptions::default() };
        // The first may have to fill the cache.
        Workbench::load(component, &kept)?.close().await;
        let bench = Workbench::load(component, &kept)?;
        let ahead = Workbench::load(component, &WorkbenchOptions { ready: true, ..kept.clone() })?;
        let load_ms = bench.compiled().as_secs_f64() * 1e3;
        let request = RouteRequest {
            id: "bench".into(),
            model: bench.name().to_owned(),
            messages: vec![Message::new(Role::User, self.text.as_str())],
            ..RouteRequest::default()
        };
        let mut warm = Some(Workbench::load(component, &WorkbenchOptions { warm: true, ..kept })?);
        let bytes = std::fs::read(component)?;
        let bare = (bench.contract() == Bare::CONTRACT)
            .then(|| Bare::new(&bytes, 1, 256 << 20, &request, bench.settings().config.clone()))
            .transpose()?;
        let timed = async |bench: &Workbench| {
            let session = OfflineSession::holding(&request.messages, Arc::new(Even));
            let start = Instant::now();
            let step = bench.call(&request, session).await;
            (start.elapsed().as_secs_f64() * 1e6, step)
        };
        let (mut ours, mut ready, mut again, mut theirs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut memory = 0;
        for _ in 0..self.calls {
            // What is made for the next call is no part of another's time.
            ahead.until_ready().await;
            let (us, step) = timed(&ahead).await;
            if step.used.ready == 1 {
                ready.push(us);
            }
            ahead.until_ready().await;
            let (us, step) = timed(&bench).await;
            ours.push(us);
            if let Some(fault) = step.fault {
                bail!("a call ended with {fault}");
            }
            memory = step.used.memory.max(memory);
            if let Some(bare) = &bare {
                let start = Instant::now();
                bare.call().await.map_err(|error| anyhow::anyhow!("wasmtime alone: {error:#}"))?;
                theirs.push(start.elapsed().as_secs_f64() * 1e6);
            }
            if let Some(bench) = &warm {
                let (us, step) = timed(bench).await;
                again.push(us);
                if step.fault.is_some()
                    && let Some(bench) = warm.take()
                {
                    bench.close().await;
                }
            }
        }
        ours.sort_by(f64::total_cmp);
        ready.sort_by(f64::total_cmp);
        again.sort_by(f64::total_cmp);
        theirs.sort_by(f64::total_cmp);
        let row = Row {
            name: bench.name().to_owned(),
            bytes: bench.bytes(),
            compile_ms,
            load_ms,
            p50: quantile(&ours, 0.5),
            p99: quantile(&ours, 0.99),
            ready_p50: (!ready.is_empty()).then(|| quantile(&ready, 0.5)),
            warm_p50: warm.is_some().then(|| quantile(&again, 0.5)),
            bare_p50: bare.map(|_| quantile(&theirs, 0.5)),
            memory_kib: memory >> 10,
        };
        bench.close().await;
        ahead.close().await;
        if let Some(bench) = warm {
            bench.close().await;
        }
        Ok(row)
    }
}

impl Row {
    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "bytes": self.bytes,
            "compile_ms": self.compile_ms,
            "load_ms": self.load_ms,
            "call_p50_us": self.p50,
            "call_p99_us": self.p99,
            "ready_p50_us": self.ready_p50,
            "warm_p50_us": self.warm_p50,
            "wasmtime_p50_us": self.bare_p50,
            "memory_kib": self.memory_kib,
        })
    }
}

fn describe(rows: &[Row]) -> String {
    let mut text = format!(
        "{:24} {:>9} {:>11} {:>9} {:>12} {:>12} {:>10} {:>14} {:>9} {:>11}\n",
        "policy",
        "KiB",
        "compile ms",
        "load ms",
        "call p50 us",
        "call p99 us",
        "ready p50",
        "wasmtime p50",
        "warm p50",
        "memory KiB"
    );
    for row in rows {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "{:24} {:>9} {:>11.0} {:>9.2} {:>12.0} {:>12.0} {:>10} {:>14} {:>9} {:>11}",
            row.name,
            row.bytes >> 10,
            row.compile_ms,
            row.load_ms,
            row.p50,
            row.p99,
            median(row.ready_p50),
            median(row.bare_p50),
            median(row.warm_p50),
            row.memory_kib
        );
    }
    text
}

/// A dash where there is nothing to take it of.
fn median(us: Option<f64>) -> String {
    us.map_or_else(|| "-".to_owned(), |us| format!("{us:.0}"))
}
