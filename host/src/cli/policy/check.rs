//! `forkpoint policy check`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use forkpoint_engine::{Message, Probe, Role};
use serde_json::{Value, json};

use super::{code_cache, pair, print, stale, table};
use crate::author::{case, lint};
use crate::policy::offline::{Even, OfflineSession};
use crate::policy::{Capabilities, PublicKey, RouteRequest, Signers, Step, Workbench, WorkbenchOptions};

/// Asked where no request is named.
const SAMPLE: &str = "Remove every file under /var/lib/old-service and restart nginx, please.";

#[derive(Debug, Args)]
pub(in crate::cli) struct CheckArgs {
    /// The component; the manifest is read from beside it.
    component: PathBuf,
    /// A request to call it with, as clients send it [default: one that asks for files to be removed].
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// A value of its configuration.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// A public key, as `policy keygen` prints it: the component must be signed by its owner, or by that of another
    /// --signer.
    #[arg(long, value_name = "KEY")]
    signer: Vec<PublicKey>,
    /// Write JSON in place of text.
    #[arg(long)]
    json: bool,
}

impl CheckArgs {
    pub(super) async fn run(self) -> Result<()> {
        let keys = self.signer.iter().map(|key| (key.to_string(), *key)).collect();
        let signers = Signers { required: !self.signer.is_empty(), keys };
        let (config, cache) = (table(&self.set), code_cache());
        let options =
            WorkbenchOptions { config, cache, metered: true, signers, ..WorkbenchOptions::default() };
        stale::warn(&self.component, None);
        let bench = Workbench::load(&self.component, &options)?;
        let request = match &self.request {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let body: Value =
                    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))?;
                case::request(&body, BTreeMap::new()).map_err(anyhow::Error::msg)?
            }
            None => RouteRequest {
                id: "check".into(),
                model: bench.name().to_owned(),
                messages: vec![Message::new(Role::User, SAMPLE)],
                ..RouteRequest::default()
            },
        };
        let session = OfflineSession::holding(&request.messages, Arc::new(Even));
        let step = bench.call(&request, session).await;
        let report = Report::new(&bench, &step);
        if self.json {
            print(&format!("{:#}\n", report.to_json(&bench, &step)))?;
        } else {
            print(&report.to_text(&bench, &step))?;
        }
        bench.close().await;
        match report.faults.first() {
            Some(fault) => bail!("{fault}"),
            None => Ok(()),
        }
    }
}

/// What is wrong, and what is doubtful.
struct Report {
    faults: Vec<String>,
    warnings: Vec<String>,
    /// How good each probe is that the sample call asked, where it is shipped fitted.
    probes: Vec<String>,
}

impl Report {
    fn new(bench: &Workbench, step: &Step) -> Self {
        let mut faults: Vec<String> =
            step.fault.iter().map(|fault| format!("the sample call ended with {fault}")).collect();
        let mut warnings = missing_capabilities(bench);
        for decision in &step.decisions {
            if let Some(failure) = &decision.failure {
                warnings.push(format!("a decide failed: {failure}"));
            }
            for question in &decision.questions {
                let found = lint::lint(question);
                warnings.extend(found.iter().map(|what| format!("{:?} {what}", question.instructions)));
            }
        }
        if bench.settings().description.is_none() {
            warnings.push("has no description: a manifest beside it tells operators what it does".to_owned());
        }
        let named = step.decisions.iter().flat_map(|decision| decision.probes.iter().flatten());
        let mut probes: Vec<&String> = named.collect();
        probes.sort();
        probes.dedup();
        // Read only where one is asked.
        let shipped = if probes.is_empty() { BTreeMap::new() } else { bench.origin().read() };
        let mut quality = Vec::new();
        for probe in probes {
            let Some(found) = shipped.get(probe) else {
                let file = bench.origin().file(probe);
                faults.push(format!(
                    "asks the probe {probe}: neither {file} nor [probes.{probe}] in its manifest has examples"
                ));
                continue;
            };
            let examples = match &found.examples {
                Ok(examples) => examples,
                Err(error) => {
                    faults.push(format!("the probe {probe}: {error}"));
                    continue;
                }
            };
            warnings.extend(examples.warnings.iter().map(|what| format!("probe {probe}: {what}")));
            match &found.artifact {
                Some(Probe { quality: fitted, examples: of, .. }) if *of == examples.hash => {
                    let (accuracy, ece) = (fitted.accuracy, fitted.ece);
                    quality.push(format!("{probe}: accuracy {accuracy:.2}, ECE {ece:.3}, cross-validated"));
                }
                Some(_) => warnings.push(format!(
                    "probe {probe}: the fitted probe beside it is of other examples; fit it again, or remove it"
                )),
                None => {}
            }
        }
        Self { faults, warnings, probes: quality }
    }

    fn to_text(&self, bench: &Workbench, step: &Step) -> String {
        let mut text = String::new();
        let settings = bench.settings();
        let used = &step.used;
        let plan = step.plan.as_ref().map_or("none", |plan| plan.kind());
        let mut line = |name: &str, value: String| {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{name:12} {value}");
        };
        line("policy", format!("{} {}", bench.name(), &bench.hash()[..12]));
        line("contract", format!("forkpoint:policy@{}", bench.contract()));
        line(
            "size",
            format!("{} bytes, compiled in {:.0} ms", bench.bytes(), bench.compiled().as_secs_f64() * 1e3),
        );
        if let Some(signer) = &settings.signed_by {
            line("signed by", signer.clone());
        }
        line("imports", short(bench.imports()));
        line("asks for", describe(&settings.asked));
        line("limits", limits(bench));
        line("sample", format!("{plan} ({})", step.reason));
        line("decisions", format!("{} in {} calls", used.decisions, step.decisions.len()));
        line(
            "cost",
            format!(
                "{} instructions, {:.2} ms of processor, {} KiB of memory, {} imports called",
                used.fuel.unwrap_or_default(),
                used.cpu_us as f64 / 1e3,
                used.memory >> 10,
                used.calls
            ),
        );
        for probe in &self.probes {
            line("probe", probe.clone());
        }
        for warning in &self.warnings {
            line("warning", warning.clone());
        }
        for fault in &self.faults {
            line("fault", fault.clone());
        }
        text
    }

    fn to_json(&self, bench: &Workbench, step: &Step) -> Value {
        json!({
            "name": bench.name(),
            "hash": bench.hash(),
            "contract": bench.contract(),
            "bytes": bench.bytes(),
            "signed_by": bench.settings().signed_by,
            "imports": bench.imports(),
            "capabilities": bench.settings().asked,
            "limits": bench.settings().limits,
            "sample": step,
            "probes": self.probes,
            "warnings": self.warnings,
            "faults": self.faults,
        })
    }
}

/// Imports that need a capability which the manifest does not ask for.
fn missing_capabilities(bench: &Workbench) -> Vec<String> {
    let asked = &bench.settings().asked;
    let needs = [
        ("engine", "generate", asked.generate, "generate"),
        ("host", "get", asked.store, "store"),
        ("host", "set", asked.store, "store"),
        ("host", "add", asked.store, "store"),
        ("host", "log", asked.log, "log"),
    ];
    let imports = |interface: &str, function: &str| {
        bench.imports().iter().any(|import| {
            import.contains(&format!("/{interface}@")) && import.ends_with(&format!("#{function}"))
        })
    };
    needs
        .into_iter()
        .filter(|(interface, function, asked, _)| !asked && imports(interface, function))
        .map(|(_, function, _, capability)| {
            format!("imports {function} and does not ask for `{capability}`: calls of it will be denied")
        })
        .collect()
}

fn short(imports: &[String]) -> String {
    let wasi = imports.iter().filter(|import| import.starts_with("wasi:")).count();
    let own = imports.iter().filter(|import| !import.starts_with("wasi:"));
    let mut names: Vec<&str> =
        own.filter_map(|import| import.rsplit_once('#').map(|(_, name)| name)).collect();
    names.retain(|name| !name.starts_with("[resource-drop]"));
    let mut text = if names.is_empty() { "nothing".to_owned() } else { names.join(", ") };
    if wasi > 0 {
        text += &format!("; {wasi} functions of WASI, which end a call that uses them");
    }
    text
}

fn describe(asked: &Capabilities) -> String {
    if *asked == Capabilities::all() {
        return "whatever is granted (no [capabilities] in a manifest)".to_owned();
    }
    let json = json!(asked);
    let named = json.as_object().into_iter().flatten().filter_map(|(name, value)| match value {
        Value::Bool(true) => Some(name.clone()),
        Value::String(all) => Some(format!("{name} = {all}")),
        Value::Array(names) if !names.is_empty() => Some(format!("{name} = {}", Value::from(names.clone()))),
        _ => None,
    });
    let named: Vec<String> = named.collect();
    if named.is_empty() { "nothing but questions".to_owned() } else { named.join(", ") }
}

fn limits(bench: &Workbench) -> String {
    let limits = &bench.settings().limits;
    format!(
        "cpu {} ms, wall {} ms, memory {} MiB, {} decisions, {} tokens decided, {} generated",
        limits.cpu_ms,
        limits.wall_ms,
        limits.memory_mb,
        limits.decisions,
        limits.decided_tokens,
        limits.generated_tokens
    )
}
