//! `forkpoint probe`.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, Subcommand};
use forkpoint_engine::Engine;
use forkpoint_engine::probe::{Examples, LabelReads, Probe, layer};

use super::files::{read_file, write_file};
use super::serve::ModelArgs;
use super::{LogFormat, on_runtime, start_log};
use crate::policy::Manifest;
use crate::probe::judge::{Table, Trial, judge};
use crate::serve::load_model;

#[derive(Debug, Subcommand)]
pub(super) enum ProbeCommand {
    /// Fit a probe from labelled examples, and say how good it is.
    #[command(after_help = "\
Examples:
  forkpoint probe fit plugins/shell-gate.probes/shell.jsonl
  forkpoint probe fit shell.jsonl --out shell.probe.json --model ./model.gguf
  forkpoint probe fit plugins/my-policy.toml --name shell

A server does this by itself for the examples that a policy ships. docs/probes.md has the format of the files, and of the
tables that a policy's manifest may hold instead.")]
    Fit(FitArgs),
    /// Say how well probes answer, on examples that they were not fitted from.
    #[command(after_help = "\
Examples:
  forkpoint probe eval shell.jsonl                     fit one half of the families, judge by the other
  forkpoint probe eval tests/data/probes/*.jsonl --curve 5,10,20,40 --json table.json
  forkpoint probe eval plugins/my-policy.toml          each probe of a manifest
  forkpoint probe eval fresh.jsonl --probe shell.probe.json")]
    Eval(EvalArgs),
    /// Say what a fitted probe was fitted from and how good it is.
    #[command(after_help = "Example:\n  forkpoint probe show shell.probe.json")]
    Show {
        /// The probe, as `forkpoint probe fit` writes it.
        probe: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(super) struct FitArgs {
    /// Labelled examples, as JSON lines, or a policy's manifest NAME.toml that holds some.
    examples: PathBuf,
    /// Of a manifest, the probe to fit [default: the only one].
    #[arg(long, value_name = "PROBE")]
    name: Option<String>,
    /// Where the probe goes [default: the examples' name with .probe.json; of a manifest NAME.probes/PROBE.probe.json].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Examples that label reads answer too, for comparison, where the file has the question; 0 for none.
    #[arg(long, value_name = "N", default_value = "40")]
    label_reads: usize,
    #[command(flatten)]
    model: ModelArgs,
}

#[derive(Debug, Args)]
pub(super) struct EvalArgs {
    /// Files of labelled examples, as JSON lines, and policies' manifests that hold some.
    #[arg(required = true)]
    examples: Vec<PathBuf>,
    /// Of manifests, the probe to judge [default: all of them].
    #[arg(long, value_name = "PROBE")]
    name: Option<String>,
    /// Judge this probe on all examples, rather than fit half of them.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["curve", "per_label", "repeats"])]
    probe: Option<PathBuf>,
    /// Examples of each label that a probe is fitted from.
    #[arg(long, value_name = "N", default_value = "30", value_parser = clap::value_parser!(u16).range(1..))]
    per_label: u16,
    /// More such counts, for a learning curve.
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..))]
    curve: Vec<u16>,
    /// How often examples are drawn for each count.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u64).range(1..))]
    repeats: u64,
    /// Examples of each question that label reads answer, for comparison; 0 for none.
    #[arg(long, value_name = "N", default_value = "0")]
    label_reads: usize,
    /// Where to write the results as JSON; - writes standard output, in place of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
}

impl ProbeCommand {
    pub(super) fn run(self) -> Result<()> {
        start_log(LogFormat::Human, "warn")?;
        match self {
            Self::Fit(args) => on_runtime(fit(args)),
            Self::Eval(args) => on_runtime(eval(args)),
            Self::Show { probe } => print(&describe(&read_probe(&probe)?)),
        }
    }
}

async fn fit(args: FitArgs) -> Result<()> {
    let sets = read_examples(&args.examples, args.name.as_deref())?;
    let [set] = <[Set; 1]>::try_from(sets).map_err(|sets| {
        let names: Vec<&str> = sets.iter().map(|set| set.name.as_str()).collect();
        let (path, names) = (args.examples.display(), names.join(", "));
        anyhow!("{path} has the probes {names}: name one with --name")
    })?;
    let (place, examples) = (set.artifact(), set.examples);
    for warning in &examples.warnings {
        eprintln!("warning: {warning}");
    }
    if set.signed {
        eprintln!("warning: the manifest is signed and the fitted probe is not: servers fit their own");
    }
    let (_, engine) = load_model(&args.model.into_config()?.model).await?;
    let mut progress = Progress::new(&set.name, examples.examples.len());
    let read = engine.read_labels(&examples, args.label_reads).await.unwrap_or_else(|error| {
        eprintln!("warning: label reads were not measured: {error}");
        None
    });
    let reads = read.filter(|read| !read.read.is_empty()).map(|read| read.quality(&examples));
    let learned = engine.learn(examples, |done| progress.show(done)).await?;
    progress.end();
    let mut probe = tokio::task::spawn_blocking(move || learned.fit()).await.context("the fit broke off")?;
    probe.quality.label_reads = reads;
    let out = match args.out {
        Some(out) => out,
        None => {
            let folder = place.parent().unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            place
        }
    };
    write_file(&out, probe.to_json().as_bytes())?;
    if out != Path::new("-") {
        print(&describe(&probe))?;
        eprintln!("wrote {}", out.display());
    }
    Ok(())
}

async fn eval(args: EvalArgs) -> Result<()> {
    let sets = args.examples.iter().map(|path| read_examples(path, args.name.as_deref()));
    let sets: Vec<Set> = sets.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    let probe = args.probe.as_deref().map(read_probe).transpose()?;
    let (_, engine) = load_model(&args.model.into_config()?.model).await?;
    if let Some(probe) = probe {
        return eval_probe(&engine, &probe, sets, args.json.as_deref()).await;
    }
    let trial = Trial {
        per_label: args.per_label.into(),
        curve: args.curve.into_iter().map(usize::from).collect(),
        repeats: args.repeats,
        label_reads: args.label_reads,
    };
    let mut questions = Vec::with_capacity(sets.len());
    for set in sets {
        let title = set.title();
        let mut progress = Progress::new(&set.name, set.examples.examples.len());
        let judged = judge(&engine, &set.name, set.examples, &trial, |done| progress.show(done)).await;
        progress.end();
        questions.push(judged.context(title)?);
    }
    let table = Table::new(&engine, &trial, questions);
    match args.json {
        Some(path) => {
            write_file(&path, &json(&table)?)?;
            if path == Path::new("-") { Ok(()) } else { print(&table.text()) }
        }
        None => print(&table.text()),
    }
}

/// Judges a probe that is there already.
async fn eval_probe(engine: &Engine, probe: &Probe, sets: Vec<Set>, out: Option<&Path>) -> Result<()> {
    let model = engine.model();
    if !probe.fits(model) || probe.layer != layer(model.layers) {
        bail!("the probe was fitted on another model than {}", model.name);
    }
    let mut evaluations = Vec::with_capacity(sets.len());
    for set in sets {
        let (title, examples) = (set.title(), set.examples);
        if examples.labels.len() != probe.labels.len() || probe.check(&examples.criteria()).is_err() {
            let (got, expected) = (examples.labels.join(", "), probe.labels.join(", "));
            bail!("{title} has the labels {got}, the probe {expected}");
        }
        let mut progress = Progress::new(&set.name, examples.examples.len());
        // What it reads is the probe's to say.
        let examples = Examples { span: probe.span, ..examples.relabelled(&probe.labels) };
        let learned = engine.learn(examples, |done| progress.show(done)).await?;
        progress.end();
        let evaluation = learned.evaluate(probe);
        let quality = &evaluation.quality;
        if out != Some(Path::new("-")) {
            print(&format!(
                "{title}: accuracy {:.3} (majority {:.3}), ECE {:.3}, Brier {:.3}{}\n",
                quality.accuracy,
                quality.majority,
                quality.ece,
                quality.brier,
                quality.scope.map_or(String::new(), |scope| format!(", scope {scope:.3}"))
            ))?;
        }
        evaluations.push(serde_json::json!({ "file": title, "evaluation": evaluation }));
    }
    match out {
        Some(path) => write_file(path, &json(&evaluations)?),
        None => Ok(()),
    }
}

fn json(value: &impl serde::Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)?;
    bytes.push(b'\n');
    Ok(bytes)
}

/// Examples of one probe.
struct Set {
    /// The probe's name: the file's or the table's.
    name: String,
    /// The file that they are in.
    path: PathBuf,
    /// The file is a manifest, and they are one of its tables.
    table: bool,
    /// The manifest is signed.
    signed: bool,
    examples: Examples,
}

impl Set {
    /// What people call it.
    fn title(&self) -> String {
        let path = self.path.display();
        if self.table { format!("{path}, [probes.{}]", self.name) } else { path.to_string() }
    }

    /// Where a server looks for the probe that is fitted to them, unless the manifest is signed.
    fn artifact(&self) -> PathBuf {
        if self.table {
            self.path.with_extension("probes").join(format!("{}.probe.json", self.name))
        } else {
            self.path.with_extension("probe.json")
        }
    }
}

/// The examples of a file of JSON lines; of a manifest those of each probe, or of one.
fn read_examples(path: &Path, name: Option<&str>) -> Result<Vec<Set>> {
    let shown = || path.display().to_string();
    let bytes = read_file(path)?;
    let text = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8", path.display()))?;
    let set = |name, examples| Set { name, path: path.to_owned(), table: false, signed: false, examples };
    if path.extension().is_none_or(|extension| extension != "toml") {
        if name.is_some() {
            bail!("--name names a probe of a manifest, NAME.toml; {} is none", path.display());
        }
        return Ok(vec![set(stem(path), Examples::parse(&text).with_context(shown)?)]);
    }
    let Manifest { probes: tables, signature, .. } = Manifest::parse(&text).with_context(shown)?;
    let there: Vec<String> = tables.keys().cloned().collect();
    let tables = tables.into_iter().filter(|(probe, _)| name.is_none_or(|name| name == probe));
    let signed = signature.is_some();
    let of_table =
        |(probe, examples)| Set { table: true, signed, ..set(probe, Arc::unwrap_or_clone(examples)) };
    let sets: Vec<Set> = tables.map(of_table).collect();
    if sets.is_empty() {
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        let name = name.unwrap_or("NAME");
        bail!("{} has no table [probes.{name}]; its probes: {there}", path.display());
    }
    Ok(sets)
}

fn read_probe(path: &Path) -> Result<Probe> {
    let bytes = read_file(path)?;
    let text = String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8", path.display()))?;
    Probe::from_json(&text).with_context(|| path.display().to_string())
}

fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
}

/// What a person wants to know of a probe.
fn describe(probe: &Probe) -> String {
    use std::fmt::Write as _;
    let quality = &probe.quality;
    let mut out = String::new();
    let _ = writeln!(out, "kind        {}", probe.kind.name());
    if let Some(question) = &probe.question {
        let _ = writeln!(out, "question    {question}");
    }
    let counts: Vec<String> =
        probe.labels.iter().zip(&probe.counts).map(|(label, count)| format!("{label} {count}")).collect();
    let _ = writeln!(out, "examples    {}", counts.join(", "));
    let _ = writeln!(out, "model       {:032x}, after block {}", probe.model, probe.layer);
    let _ = writeln!(
        out,
        "accuracy    {:.3} over {} folds; the commonest label {:.3}",
        quality.accuracy, quality.folds, quality.majority
    );
    if let Some(LabelReads { examples, accuracy }) = quality.label_reads {
        let _ = writeln!(out, "label reads {accuracy:.3} on {examples} of the examples");
    }
    let _ = writeln!(out, "ECE         {:.3}, Brier {:.3}", quality.ece, quality.brier);
    if let Some(scope) = quality.scope {
        let _ = writeln!(out, "scope       {scope:.3} (area under the ROC curve of mass)");
    }
    let _ = writeln!(out, "confusion   rows are the examples' labels, columns the answers");
    let width = probe.labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    for (label, row) in probe.labels.iter().zip(&quality.confusion) {
        let row: String = row.iter().map(|count| format!(" {count:4}")).collect();
        let _ = writeln!(out, "            {label:width$}{row}");
    }
    out
}

fn print(text: &str) -> Result<()> {
    std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write to standard output")
}

/// How far a file is, on a terminal.
struct Progress {
    name: String,
    total: usize,
    shown: bool,
}

impl Progress {
    fn new(name: &str, total: usize) -> Self {
        Self { name: name.to_owned(), total, shown: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, done: usize) {
        if self.shown {
            eprint!("\r{}: {done} of {} examples", self.name, self.total);
        }
    }

    fn end(&self) {
        if self.shown {
            eprintln!();
        }
    }
}
