//! `forkpoint bench`: how fast this machine serves a model, beside other servers if they are named.
//!
//! The bench starts Forkpoint's own server in its process and calls it over HTTP as any client does; peers are called
//! by the same code over their own APIs, in turn with it, repeat by repeat. `docs/bench.md` says what each measure is.

mod bare;
mod client;
mod error;
mod forkpoint;
mod llama;
mod machine;
mod measures;
mod overhead;
mod paired;
mod report;
mod side;
mod stats;
mod text;
mod vllm;

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::ValueEnum;
use forkpoint_engine::Quantize;
use forkpoint_engine::load::Checkpoint;
use serde_json::json;

use self::client::Client;
use self::forkpoint::{Forkpoint, TRIAGE};
use self::machine::Machine;
use self::measures::{Run, Sizes};
use self::paired::Measured;
use self::report::{Memory, Report};
use self::text::Author;
use crate::config::{Bytes, Config};
use crate::models::{Source, Store};
use crate::serve::{Server, bind};

pub(crate) use self::bare::Bare;
pub use self::error::BenchError;
use self::side::Side;
pub use self::side::{Against, PeerKind};
pub(crate) use self::stats::quantile;

/// Tokens of a page of keys and values.
const PAGE: usize = 16;

/// Tokens beside the longest prompt that the smallest arena has room for.
const BESIDE: usize = 512;

/// The shortest context in which anything can be measured.
const SHORTEST: usize = 1024;

/// Tokens of a question that stand around its own words: the turn's marks, how to answer, the reply's opening.
const AROUND: usize = 64;

/// Questions whose pages may lie in the cache beside a state before it is asked about again.
const LINGERING: usize = 4;

/// A group of measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Measure {
    /// Cold prompts.
    Prefill,
    /// Replies after prompts of several lengths.
    Decode,
    /// Questions on a warm state.
    Decide,
    /// A cold prompt, three chained decisions of a policy, a short reply.
    Triage,
    /// Clients at once, each with a warm state of its own.
    Sessions,
    /// What the policy host costs where nothing is asked.
    Policy,
}

/// What to measure and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The server's configuration; its address and keys do not count.
    pub config: Config,
    /// Whether the operator chose the memory for keys and values; if not, it is made to fit.
    pub kv_memory_given: bool,
    /// What to measure; empty is all.
    pub only: Vec<Measure>,
    /// Peers to measure beside.
    pub against: Vec<Against>,
    /// How often each side runs.
    pub repeats: usize,
    /// Tokens of a state.
    pub state_tokens: usize,
    /// Tokens of the cold prompts.
    pub prompts: Vec<usize>,
    /// Tokens before the replies whose speed is measured.
    pub depths: Vec<usize>,
    /// How many questions a call asks.
    pub questions: Vec<usize>,
    /// How many clients at once.
    pub clients: Vec<usize>,
    /// Small sizes, to see that it works.
    pub quick: bool,
    /// Where JSON goes; `-` is standard output, in place of the table.
    pub json: Option<PathBuf>,
}

impl Plan {
    fn wants(&self, measure: Measure) -> bool {
        self.only.is_empty() || self.only.contains(&measure)
    }

    fn sizes(&self) -> Sizes {
        let clients = self.clients.clone();
        if self.quick {
            return Sizes {
                repeats: 1,
                prefill: vec![64, 256],
                depths: vec![32],
                reply: 8,
                state: self.state_tokens.min(300),
                questions: vec![1, 4],
                clients: clients.into_iter().filter(|&clients| clients <= 8).collect(),
                triage_reply: 4,
                policy_calls: 50,
            };
        }
        Sizes {
            repeats: self.repeats,
            prefill: self.prompts.clone(),
            depths: self.depths.clone(),
            reply: 64,
            state: self.state_tokens,
            questions: self.questions.clone(),
            clients,
            triage_reply: 16,
            policy_calls: 2000,
        }
    }
}

/// Measures, and writes the results.
///
/// # Errors
/// What stopped it; a peer that only lacks a measure does not.
pub async fn run(mut plan: Plan) -> Result<(), BenchError> {
    let (date, machine) = (machine::utc(SystemTime::now()), Machine::look());
    if !machine.quiet {
        eprintln!(
            "warning: something else runs on this machine (load average {:.2})",
            machine.load_average.unwrap_or(0.0)
        );
    }
    // A peer that is down is told before a model is loaded.
    for against in &plan.against {
        Client::new(&against.name, &against.url)?.get("/v1/models").await?;
    }
    let source = Source::parse(&plan.config.model.source)?;
    let located = tokio::task::spawn_blocking(move || source.locate(&Store::from_env()))
        .await
        .map_err(|error| BenchError::Unfit(format!("fetching the model broke off: {error}")))??;
    let mut sizes = plan.sizes();
    let mut skipped = Vec::new();
    let page_bytes = fit_memory(&mut plan, &mut sizes, &located.path, &mut skipped)?;

    plan.config.server.addr = SocketAddr::from(([127, 0, 0, 1], 0));
    (plan.config.server.api_keys_env, plan.config.server.api_keys_file) = (None, None);
    plan.config.routes.clear();
    // A fit in the background would be measured too.
    plan.config.plugins.probes = false;
    // The whole life of an instance is measured, as wasmtime alone has it.
    plan.config.plugins.ready_instances = 0;
    let server = Server::start(&plan.config, bind(plan.config.server.addr).await?).await?;
    let peak_after_load = machine::peak_memory();
    let app = server.app().clone();
    let info = app.engine.model().clone();

    let client = Client::new("forkpoint", &format!("http://{}", server.addr()))?;
    let ours = Forkpoint {
        client,
        model: app.model().to_owned(),
        context: info.context,
        engine: app.engine.clone(),
    };
    let mut sides = vec![Side::Forkpoint(ours)];
    for against in &plan.against {
        sides.push(Side::connect(against, &app.engine).await?);
    }
    fit_context(&mut sizes, &sides, app.engine.count_tokens(&text::sample_question()) + AROUND)?;
    let described = sides.iter().map(Side::describe).collect();
    let settings = json!({
        "repeats": sizes.repeats, "quick": plan.quick, "state_tokens": sizes.state,
        "threads": plan.config.model.threads, "measures": plan.only.iter().map(word).collect::<Vec<_>>(),
    });
    let mut run = Run { author: Author::new(app.engine.clone()), app: app.clone(), sides, sizes };
    let mut measured = Vec::new();
    let end = measure_all(&mut run, &plan, &mut measured, &mut skipped).await;
    if let Err(error) = &end {
        skipped.push(("what was to follow".to_owned(), error.to_string()));
    }

    let report = Report {
        date,
        machine,
        model: json!({
            "name": app.model(), "architecture": info.architecture, "parameters": info.parameters,
            "tensor_bytes": info.bytes, "file_bytes": machine::file_bytes(&located.path), "context": info.context,
            "device": info.device, "quantize": info.quantize.map(Quantize::name),
            "kv_precision": info.kv_precision.name(),
        }),
        settings,
        sides: described,
        memory: Memory {
            kv: app.engine.counters().pages_total * page_bytes,
            peak_after_load,
            peak: machine::peak_memory(),
        },
        measured,
        skipped,
    };
    drop((run, app));
    server.stop().await;
    // Hours of figures outlive what stopped the bench.
    write(&report, plan.json.as_deref())?;
    end
}

async fn measure_all(
    run: &mut Run,
    plan: &Plan,
    all: &mut Vec<Measured>,
    skipped: &mut Vec<(String, String)>,
) -> Result<(), BenchError> {
    let mut keep = |measured: Measured| {
        eprintln!("measured {}", measured.case.name);
        all.push(measured);
    };
    run.warm_up().await?;
    let sizes = run.sizes.clone();
    if plan.wants(Measure::Prefill) {
        for &tokens in &sizes.prefill {
            keep(run.prefill(tokens).await?);
        }
    }
    if plan.wants(Measure::Decode) {
        for &depth in &sizes.depths {
            keep(run.decode(depth).await?);
        }
    }
    let undecided = run.app.engine.model().decide_unsupported.clone();
    let mut lacking = |measure: Measure, why: &str| skipped.push((word(&measure), why.to_owned()));
    for measure in [Measure::Decide, Measure::Triage, Measure::Sessions] {
        if let (true, Some(why)) = (plan.wants(measure), &undecided) {
            lacking(measure, &format!("the model answers no questions: {why}"));
        }
    }
    let decides = |measure| plan.wants(measure) && undecided.is_none();
    if decides(Measure::Decide) {
        let state = run.author.state(sizes.state)?;
        for &questions in &sizes.questions {
            keep(run.decide(&state, questions).await?);
        }
    }
    let missing = |name: &str| {
        format!(
            "there is no {name}.wasm in {}; --plugins names its folder",
            plan.config.plugins.dir.display()
        )
    };
    if decides(Measure::Triage) {
        if run.app.policies.has(TRIAGE) {
            keep(run.triage().await?);
        } else {
            lacking(Measure::Triage, &missing(TRIAGE));
        }
    }
    if decides(Measure::Sessions) {
        let most = sizes.clients.iter().copied().max().unwrap_or(0);
        let states: Result<Vec<_>, _> = (0..most).map(|_| run.author.state(sizes.state)).collect();
        let states = states?;
        for &clients in &sizes.clients {
            keep(run.sessions(&states[..clients]).await?);
        }
    }
    if plan.wants(Measure::Policy) {
        if run.app.policies.has(overhead::POLICY) {
            keep(overhead::measure(&run.app, &plan.config, sizes.repeats, sizes.policy_calls).await?);
        } else {
            lacking(Measure::Policy, &missing(overhead::POLICY));
        }
    }
    Ok(())
}

/// Gives keys and values the memory that the measures need, where the operator did not choose; leaves out numbers of
/// clients whose states would not stay resident. Returns the bytes of a page.
fn fit_memory(
    plan: &mut Plan,
    sizes: &mut Sizes,
    checkpoint: &Path,
    skipped: &mut Vec<(String, String)>,
) -> Result<u64, BenchError> {
    let checkpoint = Checkpoint::open(checkpoint)?;
    let page_bytes = checkpoint.config.kv_shape(1, plan.config.model.kv_precision).page_bytes() as u64;
    let own = checkpoint.config.context;
    let context = if plan.config.model.context == 0 { own } else { own.min(plan.config.model.context) };
    let bytes = |tokens: usize| tokens.div_ceil(PAGE) as u64 * page_bytes;
    let question = checkpoint.tokenizer.encode(&text::sample_question()).len() + AROUND;
    // The longest prompt twice: the last one's pages go when the next one needs them.
    let longest = sizes.prefill.iter().chain(&sizes.depths).copied().max().unwrap_or(0).max(sizes.state);
    let alone = bytes(2 * (longest.min(context) + BESIDE));
    let beside = |clients: usize| bytes(clients * (sizes.state.min(context) + LINGERING * question));
    let most = match (plan.kv_memory_given, machine::available_memory()) {
        (true, _) => plan.config.model.kv_memory.0,
        (false, Some(available)) => available / 2,
        (false, None) => u64::MAX,
    };
    if plan.wants(Measure::Sessions) {
        let (fit, unfit): (Vec<usize>, Vec<usize>) =
            sizes.clients.iter().partition(|&&clients| beside(clients) <= most);
        for clients in unfit {
            let why = format!(
                "the states of {clients} clients need {} for keys and values, there are {}",
                Bytes(beside(clients)),
                Bytes(most)
            );
            skipped.push((format!("sessions, {clients} clients"), why));
        }
        sizes.clients = fit;
    } else {
        sizes.clients.clear();
    }
    if !plan.kv_memory_given {
        let clients = sizes.clients.iter().copied().max().unwrap_or(0);
        plan.config.model.kv_memory = Bytes(alone.max(beside(clients)));
    }
    Ok(page_bytes)
}

/// Leaves out, or cuts to the context, what a side could not hold.
fn fit_context(sizes: &mut Sizes, sides: &[Side], question: usize) -> Result<(), BenchError> {
    let contexts = sides.iter().filter_map(|side| Some((side.context()?, side.name())));
    let Some((context, side)) = contexts.min() else { return Ok(()) };
    if context < SHORTEST {
        let what =
            format!("a context of {context} tokens, as {side} has it, is too short; {SHORTEST} are needed");
        return Err(BenchError::Unfit(what));
    }
    let reply = sizes.reply as usize;
    // A prompt that fills the context leaves no room for a token; one less still shows that length.
    sizes.prefill = fitting(&sizes.prefill, context - 1, context);
    sizes.depths = fitting(&sizes.depths, context - reply, usize::MAX);
    let room = context.saturating_sub(question.max(reply));
    if sizes.state > room {
        eprintln!(
            "states have {room} tokens, not {}: {side} holds {context} with their questions",
            sizes.state
        );
        sizes.state = room;
    }
    Ok(())
}

/// Sizes up to `limit`; one above it, but not above `near`, becomes the limit.
fn fitting(sizes: &[usize], limit: usize, near: usize) -> Vec<usize> {
    let mut fitting: Vec<usize> =
        sizes.iter().filter(|&&size| size <= near).map(|&size| size.min(limit)).collect();
    fitting.dedup();
    fitting
}

fn word(measure: &Measure) -> String {
    measure.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn write(report: &Report, json: Option<&Path>) -> Result<(), BenchError> {
    let failed = |path: &Path, error| BenchError::Write { path: path.display().to_string(), error };
    let pretty = format!("{:#}\n", report.to_json());
    let stdout = Path::new("-");
    let shown = match json {
        Some(path) if path == stdout => pretty,
        Some(path) => {
            std::fs::write(path, pretty).map_err(|error| failed(path, error))?;
            report.to_table()
        }
        None => report.to_table(),
    };
    std::io::stdout().lock().write_all(shown.as_bytes()).map_err(|error| failed(stdout, error))
}

#[cfg(test)]
mod tests {
    use super::fitting;

    #[test]
    fn what_is_too_long_is_cut_or_left_out() {
        assert_eq!(fitting(&[512, 4096, 8192], 8191, 8192), [512, 4096, 8191]);
        assert_eq!(fitting(&[512, 4096, 8192], 4095, 4096), [512, 4095]);
        assert_eq!(fitting(&[128, 2048, 8192], 4032, usize::MAX), [128, 2048, 4032]);
        assert_eq!(fitting(&[128, 2048, 8192], 1000, usize::MAX), [128, 1000]);
    }
}
