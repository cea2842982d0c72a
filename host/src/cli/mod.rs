//! The command line.

mod bench;
mod files;
mod policy;
mod probe;
mod serve;

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::EnvFilter;

use self::bench::BenchArgs;
use self::policy::PolicyCommand;
use self::probe::ProbeCommand;
use self::serve::ServeArgs;
use crate::models::{BUILT_IN, Source, Store};

/// An LLM inference server that runs its users' routing policies, as WebAssembly, where the KV cache is warm.
#[derive(Debug, Parser)]
#[command(name = "forkpoint", version, about, long_about = None, after_help = "\
Examples:
  forkpoint serve                            serve the default model and the policies in plugins/
  forkpoint serve --model ./model.gguf       serve a file of your own
  forkpoint pull smollm2-135m                fetch a model, for a machine that will be offline
  forkpoint bench                            measure how fast this machine serves it
  forkpoint policy new --lang rust my-gate   start a policy
  forkpoint policy test my-gate              run its test cases, with no model
  forkpoint probe fit needs-shell.jsonl      fit a probe from labelled examples")]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model and policies over HTTP.
    #[command(after_help = "\
Examples:
  forkpoint serve
  forkpoint serve --model hf:owner/repo/model.gguf --addr 0.0.0.0:8080
  forkpoint serve --plugins ./policies --config ./forkpoint.toml
  FORKPOINT_KV_MEMORY=4GiB forkpoint serve --threads 8

Flags win over the environment, the environment over forkpoint.toml.")]
    Serve(Box<ServeArgs>),
    /// Measure how fast this machine serves a model, beside other servers if they are named.
    #[command(after_help = "\
Examples:
  forkpoint bench                                    every measure; a few minutes
  forkpoint bench --quick                            small sizes, to see that it works
  forkpoint bench --only decide,sessions --json -    two groups, as JSON
  forkpoint bench --against llama:q4_0=http://127.0.0.1:8080 --against llama:q4_1=http://127.0.0.1:8081
  forkpoint bench --model ./qwen3 --against vllm=http://127.0.0.1:8000

Peers must run already, and serve the same weights. docs/bench.md says what each measure is.")]
    Bench(Box<BenchArgs>),
    /// Fetch a built-in model or one from a hub, and say where it lies.
    #[command(after_help = "Example:\n  forkpoint pull smollm2-135m")]
    Pull {
        /// A built-in name, or hf:owner/repo/file.gguf.
        name: String,
    },
    /// Start, build, check, test, replay, explain and measure policies.
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Fit probes from labelled examples, and judge them.
    #[command(subcommand)]
    Probe(ProbeCommand),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    /// What stopped it, as one sentence with its causes.
    pub fn run(self) -> Result<()> {
        match self.command {
            Command::Serve(args) => args.run(),
            Command::Bench(args) => args.run(),
            Command::Pull { name } => pull(&name),
            Command::Probe(command) => command.run(),
            Command::Policy(command) => command.run(),
        }
    }
}

fn on_runtime(work: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("forkpoint-http")
        .build()
        .context("cannot start the runtime")?;
    let done = runtime.block_on(work);
    // Threads that block, such as a compilation that no request waits for, must not hold up the exit.
    runtime.shutdown_background();
    done
}

fn pull(name: &str) -> Result<()> {
    let source = Source::parse(name)?;
    if let Source::Path(path) = &source {
        bail!("{} is a file already; built-in models: {}", path.display(), built_in_names());
    }
    let located = source.locate(&Store::from_env())?;
    writeln!(std::io::stdout(), "{}", located.path.display()).context("cannot write to standard output")
}

fn built_in_names() -> String {
    BUILT_IN.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}

/// `usual` is what is logged where FORKPOINT_LOG says nothing.
fn start_log(format: LogFormat, usual: &str) -> Result<()> {
    let filter = match std::env::var("FORKPOINT_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::try_new(&text)
            .with_context(|| format!("FORKPOINT_LOG: {text:?} is not a log filter"))?,
        _ => EnvFilter::new(usual),
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // A line that cannot be written, as to a full disk, would be told by a write that panics.
        .log_internal_errors(false);
    let started = match format {
        LogFormat::Human => {
            subscriber.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init()
        }
        LogFormat::Json => subscriber.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds_together() {
        Cli::command().debug_assert();
    }
}
