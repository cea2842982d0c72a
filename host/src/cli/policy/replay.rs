//! `forkpoint policy replay`.

use std::fmt::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::super::files::write_file;
use super::{code_cache, pair, print, table};
use crate::author::label;
use crate::author::replay::{Decided, Replay};
use crate::journal::Record;
use crate::policy::{Workbench, WorkbenchOptions};

/// Changes that are shown in full.
const SHOWN: usize = 20;

#[derive(Debug, Args)]
pub(in crate::cli) struct ReplayArgs {
    /// A journal: a folder, or one of its files.
    journal: PathBuf,
    /// The component to run over it.
    #[arg(long, value_name = "FILE", required_unless_present = "label")]
    policy: Option<PathBuf>,
    /// The policy of the journal that it stands for [default: the component's own name].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A value of its configuration.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// Write JSON in place of text, every change included.
    #[arg(long)]
    json: bool,
    /// Corrections, as JSON lines {"id": "<request>", "label": "<right label>"}: make examples of them.
    #[arg(long, value_name = "FILE", requires = "into", conflicts_with_all = ["policy", "name", "set"])]
    label: Option<PathBuf>,
    /// The examples that corrected requests are added to.
    #[arg(long, value_name = "FILE", requires = "label")]
    into: Option<PathBuf>,
}

impl ReplayArgs {
    pub(super) async fn run(self) -> Result<()> {
        let read = Record::read_all(&self.journal)
            .with_context(|| format!("cannot read {}", self.journal.display()))?;
        for broken in &read.broken {
            eprintln!("warning: {broken}");
        }
        if read.records.is_empty() {
            bail!("{} holds no records", self.journal.display());
        }
        match (&self.label, &self.into) {
            (Some(corrections), Some(into)) => self.label(corrections, into, &read.records),
            _ => self.replay(&read.records).await,
        }
    }

    async fn replay(&self, records: &[Record]) -> Result<()> {
        let Some(path) = &self.policy else { bail!("name a component with --policy") };
        let options =
            WorkbenchOptions { config: table(&self.set), cache: code_cache(), ..WorkbenchOptions::default() };
        let bench = Workbench::load(path, &options)?;
        let name = self.name.clone().unwrap_or_else(|| bench.name().to_owned());
        let start = Instant::now();
        let replay = Replay::run(&bench, &name, records).await;
        let took = start.elapsed();
        bench.close().await;
        if replay.replayed == 0 {
            let mut there: Vec<&str> =
                records.iter().flat_map(|record| &record.steps).map(|step| step.policy.as_str()).collect();
            there.sort_unstable();
            there.dedup();
            bail!("the journal has no record of {name}; it has {}", there.join(", "));
        }
        if self.json {
            return print(&format!("{}\n", serde_json::to_string_pretty(&replay)?));
        }
        print(&describe(&replay, &name, took.as_secs_f64()))
    }

    fn label(&self, corrections: &PathBuf, into: &PathBuf, records: &[Record]) -> Result<()> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let examples = if into.exists() { read(into)? } else { String::new() };
        let done = label::label(&read(corrections)?, records, &examples).map_err(anyhow::Error::msg)?;
        write_file(into, done.examples.as_bytes())?;
        if self.json {
            return print(&format!("{}\n", serde_json::to_string_pretty(&done)?));
        }
        for what in &done.passed_over {
            eprintln!("warning: {what}");
        }
        print(&format!("{} added to {}, {} there already\n", done.added, into.display(), done.known))
    }
}

fn describe(replay: &Replay, name: &str, seconds: f64) -> String {
    let mut text = String::new();
    let (all, changed) = (replay.replayed, replay.changed.len());
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{all} requests of {name} replayed in {seconds:.2} s: {} as before, {changed} changed",
        replay.same
    );
    for change in replay.changed.iter().take(SHOWN) {
        let _ = writeln!(text, "  {}  {}  ->  {}", change.id, show(&change.before), show(&change.after));
    }
    if changed > SHOWN {
        let _ = writeln!(text, "  and {} more; --json has all", changed - SHOWN);
    }
    if !replay.unanswered.is_empty() {
        let _ = writeln!(text, "{} asked what the journal has no answer to:", replay.unanswered.len());
        for one in replay.unanswered.iter().take(SHOWN) {
            let _ = writeln!(text, "  {}  {:?}", one.id, one.asked);
        }
    }
    if replay.without_prompt > 0 {
        let _ = writeln!(
            text,
            "{} records hold no prompt ([journal] prompts = true keeps it): rules on text saw none",
            replay.without_prompt
        );
    }
    text
}

fn show(decided: &Decided) -> String {
    let plan = match &decided.plan {
        Some(plan) => plan.kind(),
        None => "no plan",
    };
    format!("{plan} ({})", decided.reason)
}
